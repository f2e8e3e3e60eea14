-- release: delete the lock if this id holds it and it is live, and look whether anybody waits for it: then
-- the marker of the key cannot be locked, or the one that stands for any key. The first is kept until the
-- commit, so that a listener that marks the key meanwhile waits for it. The second is the same for all releases and
-- is let go at once.
-- $1 lock id   $2 tolerance in ms   $3, $4 first numbers of the markers of one key and of any key
-- answers the key that is free now and whether anybody waits; or, of what was not deleted, the fence and
-- whether it is live: then another one was deleting it
WITH released AS (
  DELETE FROM {locks}
  WHERE lock_id = $1 AND expires_at_ms > {now} - $2 AND {sensible}
  RETURNING user_key, CASE
    WHEN NOT pg_try_advisory_xact_lock($3, hashtext(key)) THEN true
    WHEN pg_try_advisory_lock($4, 0) THEN NOT pg_advisory_unlock($4, 0)
    ELSE true END AS is_awaited)
SELECT user_key, is_awaited, NULL, NULL FROM released
UNION ALL
SELECT NULL, NULL, fence, expires_at_ms > {now} - $2 FROM {locks}
WHERE lock_id = $1 AND NOT EXISTS (SELECT FROM released)
