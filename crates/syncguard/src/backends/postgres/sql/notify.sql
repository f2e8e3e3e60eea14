-- notify: notify waiters of releases. It runs in a separate transaction, because it makes commits wait for
-- each other and a full queue must not roll back a release. It stores nothing, so it need not be flushed.
-- $1 channel   $2 payloads
SELECT set_config('synchronous_commit', 'off', true), pg_notify($1, payload) FROM unnest($2) AS payload
