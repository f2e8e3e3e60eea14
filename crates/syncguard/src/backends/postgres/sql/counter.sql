-- counter: the fence counter of a key.
-- $1 key
SELECT fence FROM {fences} WHERE fence_key = 'fence:' || $1
