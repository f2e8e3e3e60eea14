-- collect_fences: delete the idle counters of one page in key order. It waits for no row, so that it cannot
-- deadlock with acquire, and skips counters in use.
-- $1 key after which the page begins   $2 age in ms   $3 fences per ms of the clock
-- returns the last key of the page, or NULL at the end, and how many counters were deleted
WITH page AS MATERIALIZED (
  SELECT fence_key FROM {fences}
  WHERE fence_key > $1 AND fence_key LIKE 'fence:%' ORDER BY fence_key LIMIT 500),
idle AS MATERIALIZED (
  SELECT fence_key FROM {fences}
  WHERE fence_key IN (SELECT fence_key FROM page) AND fence >= 0 AND fence < ({now} - $2) * $3
  FOR UPDATE SKIP LOCKED),
deleted AS (
  DELETE FROM {fences} WHERE fence_key IN (SELECT fence_key FROM idle) RETURNING 1)
SELECT max(fence_key), (SELECT count(*) FROM deleted) FROM page
