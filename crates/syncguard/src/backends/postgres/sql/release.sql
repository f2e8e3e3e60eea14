-- release: delete the lock if this id holds it and it is live, and check whether its key is awaited: a
-- listener then holds the marker of the key or the one that stands for any key, and it cannot be locked
-- here. The first is kept until the commit, so that a listener that marks the key meanwhile waits for it.
-- The second is the same for all releases and is unlocked at once.
-- The commit does not wait for the disk: a crash of the server may bring the lock back, until it expires.
-- The next grant waits, and takes this transaction to the disk before itself.
-- $1 lock id   $2 tolerance in ms   $3, $4 first numbers of the markers of one key and of any key
-- returns the released key and whether it is awaited; or, of a row that was not deleted, the fence and
-- whether it is live, in which case another transaction was deleting it
WITH released AS (
  DELETE FROM {locks}
  WHERE lock_id = $1 AND expires_at_ms > {now} - $2 AND {sensible}
  RETURNING user_key, CASE
    WHEN NOT pg_try_advisory_xact_lock($3, hashtext(key)) THEN true
    WHEN pg_try_advisory_lock($4, 0) THEN NOT pg_advisory_unlock($4, 0)
    ELSE true END AS is_awaited, set_config('synchronous_commit', 'off', true))
SELECT user_key, is_awaited, NULL, NULL FROM released
UNION ALL
SELECT NULL, NULL, fence, expires_at_ms > {now} - $2 FROM {locks}
WHERE lock_id = $1 AND NOT EXISTS (SELECT FROM released)
