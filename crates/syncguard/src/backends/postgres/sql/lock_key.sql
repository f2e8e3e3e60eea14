-- lock_key: wait for the key's advisory lock.
-- $1 key
SELECT pg_advisory_xact_lock(hashtext($1))
