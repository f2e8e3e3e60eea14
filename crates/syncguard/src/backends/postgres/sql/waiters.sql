-- waiters: count the listeners that hold the marker of a key, one per process.
-- $1 key   $2, $3 first numbers of the markers of one key and of any key
-- returns NULL if a listener holds the marker for any key: whether it waits for this one is unknown
SELECT CASE WHEN bool_or(classid = $3::oid) THEN NULL ELSE count(DISTINCT pid) END
FROM pg_locks
WHERE locktype = 'advisory' AND objsubid = 2 AND granted
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND (classid = $2::oid AND objid = hashtext($1)::oid OR classid = $3::oid)
