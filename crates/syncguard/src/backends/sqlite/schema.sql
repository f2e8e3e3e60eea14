-- Version 1. Files of earlier releases get the column holder when they are opened. A row of
-- syncguard_locks is a lock; a row of syncguard_fences is the fence counter of a key.
CREATE TABLE syncguard_locks (
  key TEXT PRIMARY KEY,
  lock_id TEXT NOT NULL UNIQUE,
  fence INTEGER NOT NULL,
  acquired_at_ms INTEGER NOT NULL,
  expires_at_ms INTEGER NOT NULL,
  holder TEXT
) STRICT, WITHOUT ROWID;

CREATE TABLE syncguard_fences (
  key TEXT PRIMARY KEY,
  fence INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
