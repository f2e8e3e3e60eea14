-- clean_up: delete a long-dead lock, never a counter.
-- $1 lock id   $2 minimum time since the expiry in ms
DELETE FROM {locks} WHERE lock_id = $1 AND expires_at_ms < {now} - $2
