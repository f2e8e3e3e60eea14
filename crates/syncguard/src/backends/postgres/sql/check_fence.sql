-- check_fence: remember the fence of a resource unless a larger one, or that of another lock, is known.
-- $1 key of the resource's row   $2 fence   $3 hash of the lock's key, or NULL
-- returns whether it was remembered, and the hash in the row before
WITH remembered AS (
  INSERT INTO {fences} AS seen (fence_key, fence, key_debug) VALUES ($1, $2, $3)
  ON CONFLICT (fence_key) DO UPDATE SET
    fence = excluded.fence, key_debug = coalesce(excluded.key_debug, seen.key_debug)
    WHERE seen.fence <= excluded.fence AND (seen.key_debug = excluded.key_debug) IS NOT FALSE
  RETURNING 1)
SELECT EXISTS (SELECT FROM remembered), (SELECT key_debug FROM {fences} WHERE fence_key = $1)
