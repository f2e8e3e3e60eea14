-- turn: wait for the key's turn.
-- $1 key
SELECT pg_advisory_xact_lock(hashtext($1))
