-- release_many: like release, for many locks with different ids. A row that another transaction has locked
-- ends the statement soon, and each lock is then released by itself.
-- $1 lock ids   $2 tolerance in ms   $3, $4 first numbers of the markers of one key and of any key
-- $5 longest wait for a row in ms
-- returns what release returns, and the lock id; no row for an id that holds no lock
WITH released AS (
  DELETE FROM {locks}
  WHERE (SELECT set_config('lock_timeout', $5, true)) IS NOT NULL
    AND (SELECT set_config('synchronous_commit', 'off', true)) IS NOT NULL
    AND lock_id = ANY ($1) AND expires_at_ms > {now} - $2 AND {sensible}
  RETURNING lock_id, user_key, CASE
    WHEN NOT pg_try_advisory_xact_lock($3, hashtext(key)) THEN true
    WHEN pg_try_advisory_lock($4, 0) THEN NOT pg_advisory_unlock($4, 0)
    ELSE true END AS is_awaited)
SELECT user_key, is_awaited, NULL, NULL, lock_id FROM released
UNION ALL
SELECT NULL, NULL, fence, expires_at_ms > {now} - $2, lock_id FROM {locks}
WHERE (SELECT count(*) FROM released) < cardinality($1)
  AND lock_id = ANY ($1) AND NOT lock_id = ANY (SELECT lock_id FROM released)
