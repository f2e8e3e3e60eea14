-- notify: tell of a release. In a transaction of its own: it makes commits wait for each other, and a
-- full queue must not undo a release.
-- $1 channel   $2 payload
SELECT pg_notify($1, $2)
