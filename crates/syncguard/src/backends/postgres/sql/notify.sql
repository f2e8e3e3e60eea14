-- notify: tell of a release. In a transaction of its own: it makes commits wait for each other, and a
-- full queue must not undo a release. Nothing is lost with it, so it need not be flushed.
-- $1 channel   $2 payload
SELECT set_config('synchronous_commit', 'off', true), pg_notify($1, $2)
