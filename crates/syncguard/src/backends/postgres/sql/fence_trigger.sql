-- fence_trigger: refuse writes to a table whose fence is below that of the row.
CREATE OR REPLACE FUNCTION syncguard_check_fence() RETURNS trigger LANGUAGE plpgsql AS $body$
DECLARE
  given text := current_setting('syncguard.fence', true);
BEGIN
  IF given IS NULL OR given !~ '^[0-9]{1,15}$' THEN
    RAISE EXCEPTION 'no valid fence: set syncguard.fence in this transaction' USING ERRCODE = 'SG002';
  END IF;
  IF TG_OP <> 'INSERT' AND given::bigint < OLD.fence THEN
    RAISE EXCEPTION 'the fence is stale: a later holder of the lock has already written'
      USING ERRCODE = 'SG001';
  END IF;
  IF TG_OP = 'DELETE' THEN
    RETURN OLD;
  END IF;
  NEW.fence := given::bigint;
  RETURN NEW;
END
$body$;
-- Fails here if the column is missing.
SELECT fence + 0::bigint FROM {table} LIMIT 0;
DROP TRIGGER IF EXISTS syncguard_check_fence ON {table};
CREATE TRIGGER syncguard_check_fence BEFORE INSERT OR UPDATE OR DELETE ON {table}
  FOR EACH ROW EXECUTE FUNCTION syncguard_check_fence();
