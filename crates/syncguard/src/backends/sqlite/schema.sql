-- Version 1. A row of syncguard_locks is a lock; a row of syncguard_fences is never deleted.
CREATE TABLE syncguard_locks (
  key TEXT PRIMARY KEY,
  lock_id TEXT NOT NULL UNIQUE,
  fence INTEGER NOT NULL,
  acquired_at_ms INTEGER NOT NULL,
  expires_at_ms INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE syncguard_fences (
  key TEXT PRIMARY KEY,
  fence INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
