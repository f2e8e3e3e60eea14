-- resolve: where the lock is that an id holds. Reads only.
-- KEYS[1] index of the lock id
-- returns the name of the lock, empty for the mark of an undo, or nil
return redis.call('GET', KEYS[1])
