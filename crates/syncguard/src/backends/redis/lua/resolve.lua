-- resolve: find the lock that an id holds. Reads only.
-- KEYS[1] index of the lock id
-- returns the name of the lock, an empty string for an undo marker, or nil
return redis.call('GET', KEYS[1])
