-- release: delete the lock if this id holds it and it is live, and look whether somebody waits for it:
-- then the lock that shows it cannot be had.
-- $1 lock id   $2 tolerance in ms   $3 number of the table
-- answers the key that is free now and whether somebody waits; or, of what was not deleted, the fence and
-- whether it is live: then somebody else was deleting it
WITH released AS (
  DELETE FROM {locks}
  WHERE lock_id = $1 AND expires_at_ms > {now} - $2 AND {sensible}
  RETURNING key, NOT pg_try_advisory_xact_lock($3, hashtext(key)) AS is_awaited)
SELECT key, is_awaited, NULL, NULL FROM released
UNION ALL
SELECT NULL, NULL, fence, expires_at_ms > {now} - $2 FROM {locks}
WHERE lock_id = $1 AND NOT EXISTS (SELECT FROM released)
