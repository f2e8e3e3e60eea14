-- lock_row: wait until nobody changes the row, if the lock is dead. A live one is only read.
-- $1 key   $2 tolerance in ms
SELECT FROM {locks} WHERE key = $1 AND expires_at_ms <= {now} - $2 FOR UPDATE
