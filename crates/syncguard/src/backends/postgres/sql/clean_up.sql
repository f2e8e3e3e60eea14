-- clean_up: delete a record that has been dead for long. Never a counter.
-- $1 lock id   $2 for how long it must have been dead in ms
DELETE FROM {locks} WHERE lock_id = $1 AND expires_at_ms < {now} - $2
