//! The SQL statements. An operation is one or two of them in one transaction, sent at once.
//!
//! The order of locks is that of ADR 023: acquire reads first, then takes the key's advisory lock,
//! then the row. Every statement sees what was committed before it began (`READ COMMITTED`), so the
//! statement after a wait reads current data, and reads the clock after the wait.

use std::error::Error as StdError;
use std::fmt;

use tokio_postgres::types::private::BytesMut;
use tokio_postgres::types::{IsNull, ToSql, Type};

use super::names::Names;

/// A parameter for the driver.
pub(super) type Parameter<'a> = &'a (dyn ToSql + Sync);

/// The value of a parameter. The driver logs parameters by their `Debug`, so this one hides them:
/// there are keys and lock ids among them.
#[derive(Clone, Copy)]
pub(super) enum Value<'a> {
    Text(&'a str),
    MaybeText(Option<&'a str>),
    Texts(&'a [&'a str]),
    MaybeTexts(&'a [Option<&'a str>]),
    Int4(i32),
    Int8(i64),
    Int8s(&'a [i64]),
}

impl fmt::Debug for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("redacted")
    }
}

type Encoded = Result<IsNull, Box<dyn StdError + Sync + Send>>;

impl ToSql for Value<'_> {
    fn to_sql(&self, kind: &Type, out: &mut BytesMut) -> Encoded {
        match self {
            Self::Text(text) => text.to_sql(kind, out),
            Self::MaybeText(text) => text.to_sql(kind, out),
            Self::Texts(texts) => texts.to_sql(kind, out),
            Self::MaybeTexts(texts) => texts.to_sql(kind, out),
            Self::Int4(number) => number.to_sql(kind, out),
            Self::Int8(number) => number.to_sql(kind, out),
            Self::Int8s(numbers) => numbers.to_sql(kind, out),
        }
    }

    /// Accepts every type, because what fits depends on the variant; `to_sql_checked` checks it.
    fn accepts(_kind: &Type) -> bool {
        true
    }

    fn to_sql_checked(&self, kind: &Type, out: &mut BytesMut) -> Encoded {
        match self {
            Self::Text(text) => text.to_sql_checked(kind, out),
            Self::MaybeText(text) => text.to_sql_checked(kind, out),
            Self::Texts(texts) => texts.to_sql_checked(kind, out),
            Self::MaybeTexts(texts) => texts.to_sql_checked(kind, out),
            Self::Int4(number) => number.to_sql_checked(kind, out),
            Self::Int8(number) => number.to_sql_checked(kind, out),
            Self::Int8s(numbers) => numbers.to_sql_checked(kind, out),
        }
    }
}

/// A statement and the types of its parameters. They are fixed, because a statement whose
/// parameters cannot be encoded is not sent, and the rest of its transaction would be committed
/// without it.
#[derive(Clone, Debug)]
pub(super) struct Sql {
    pub(super) text: String,
    pub(super) types: &'static [Type],
    /// The same for a table with the column `holder`, with one more parameter for it.
    with_holder: Option<Box<Self>>,
}

impl Sql {
    pub(super) fn new(text: String, types: &'static [Type]) -> Self {
        Self { text, types, with_holder: None }
    }

    /// Returns the statement for a table with or without the column `holder`.
    pub(super) fn variant(&self, stores_holders: bool) -> &Self {
        self.with_holder.as_deref().filter(|_| stores_holders).unwrap_or(self)
    }
}

/// All statements of one pair of tables.
#[derive(Clone, Debug)]
pub(super) struct Statements {
    pub(super) lock_key: Sql,
    pub(super) acquire: Sql,
    pub(super) acquire_any: Sql,
    pub(super) acquire_many: Sql,
    pub(super) release: Sql,
    pub(super) release_many: Sql,
    pub(super) lock_key_by_id: Sql,
    pub(super) lock_keys_by_id: Sql,
    pub(super) extend: Sql,
    pub(super) extend_many: Sql,
    pub(super) by_key: Sql,
    pub(super) by_id: Sql,
    pub(super) clean_up: Sql,
    pub(super) list: Sql,
    pub(super) notify: Sql,
    pub(super) waiters: Sql,
    pub(super) collect_fences: Sql,
    pub(super) check_fence: Sql,
    /// Returns a row if the table has the column `holder` and we may write it.
    pub(super) has_holder: Sql,
}

/// The server's clock, in milliseconds.
const NOW: &str = "floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint";

/// What a valid lock has; other rows are never changed.
const SENSIBLE: &str = "fence ~ '^[0-9]{15}$'";

/// The holder of a row, or NULL if the table has no such column.
const HOLDER: &str = "to_jsonb(l)->>'holder'";

const HAS_HOLDER: &str = "SELECT FROM pg_attribute WHERE attrelid = to_regclass('{locks}') \
                          AND attname = 'holder' AND NOT attisdropped \
                          AND has_column_privilege(attrelid, attnum, 'INSERT') \
                          AND has_column_privilege(attrelid, attnum, 'UPDATE')";

macro_rules! sql {
    ($file:literal, $tables:expr, $types:expr) => {
        Sql::new(fill(include_str!($file), $tables), &$types)
    };
}

/// Fills in the names of the tables and the expressions that statements share.
fn fill(statement: &str, [locks, fences]: &[String; 2]) -> String {
    statement
        .replace("{locks}", locks)
        .replace("{fences}", fences)
        .replace("{now}", NOW)
        .replace("{sensible}", SENSIBLE)
        .replace("{holder}", HOLDER)
}

/// Fills in where a statement mentions the column `holder`. The last of its types needs the column.
fn with_holder(sql: &Sql, value: &str) -> Sql {
    let fill = |column, value, update| {
        let text = sql.text.replace("{column}", column).replace("{value}", value);
        text.replace("{update}", update)
    };
    let holder = Sql::new(fill(", holder", value, ", holder = excluded.holder"), sql.types);
    let mut without = Sql::new(fill("", "", ""), &sql.types[..sql.types.len() - 1]);
    without.with_holder = Some(Box::new(holder));
    without
}

/// The parameters of acquire. The last one needs the column `holder`.
const ACQUIRE: [Type; 9] = [
    Type::TEXT,
    Type::INT8,
    Type::TEXT,
    Type::INT8,
    Type::INT8,
    Type::TEXT,
    Type::TEXT,
    Type::INT8,
    Type::TEXT,
];

/// The parameters of `acquire_any`. The last one needs the column `holder`.
const ACQUIRE_ANY: [Type; 9] = [
    Type::TEXT_ARRAY,
    Type::INT8,
    Type::TEXT,
    Type::INT8,
    Type::INT8,
    Type::TEXT_ARRAY,
    Type::TEXT_ARRAY,
    Type::INT8,
    Type::TEXT,
];

/// The parameters of `acquire_many`. The last one needs the column `holder`.
const ACQUIRE_MANY: [Type; 10] = [
    Type::TEXT_ARRAY,
    Type::INT8,
    Type::TEXT_ARRAY,
    Type::INT8_ARRAY,
    Type::INT8,
    Type::TEXT_ARRAY,
    Type::TEXT_ARRAY,
    Type::TEXT,
    Type::INT8,
    Type::TEXT_ARRAY,
];

impl Statements {
    pub(super) fn new(names: &Names) -> Self {
        let names = &[names.locks.quoted(), names.fences.quoted()];
        Self {
            lock_key: sql!("sql/lock_key.sql", names, [Type::TEXT]),
            acquire: with_holder(&sql!("sql/acquire.sql", names, ACQUIRE), ", $9"),
            acquire_any: with_holder(&sql!("sql/acquire_any.sql", names, ACQUIRE_ANY), ", $9"),
            acquire_many: with_holder(
                &sql!("sql/acquire_many.sql", names, ACQUIRE_MANY),
                ", $10::text[]",
            ),
            has_holder: Sql::new(fill(HAS_HOLDER, names), &[]),
            release: sql!(
                "sql/release.sql",
                names,
                [Type::TEXT, Type::INT8, Type::INT4, Type::INT4]
            ),
            release_many: sql!(
                "sql/release_many.sql",
                names,
                [Type::TEXT_ARRAY, Type::INT8, Type::INT4, Type::INT4, Type::TEXT]
            ),
            lock_key_by_id: sql!("sql/lock_key_by_id.sql", names, [Type::TEXT]),
            lock_keys_by_id: sql!("sql/lock_keys_by_id.sql", names, [Type::TEXT_ARRAY, Type::TEXT]),
            extend: sql!("sql/extend.sql", names, [Type::TEXT, Type::INT8, Type::INT8]),
            extend_many: sql!(
                "sql/extend_many.sql",
                names,
                [Type::TEXT_ARRAY, Type::INT8, Type::INT8_ARRAY]
            ),
            by_key: sql!("sql/by_key.sql", names, [Type::TEXT]),
            by_id: sql!("sql/by_id.sql", names, [Type::TEXT]),
            clean_up: sql!("sql/clean_up.sql", names, [Type::TEXT, Type::INT8]),
            list: sql!("sql/list.sql", names, [Type::TEXT]),
            notify: sql!("sql/notify.sql", names, [Type::TEXT, Type::TEXT_ARRAY]),
            waiters: sql!("sql/waiters.sql", names, [Type::TEXT, Type::INT4, Type::INT4]),
            check_fence: sql!("sql/check_fence.sql", names, [Type::TEXT, Type::INT8, Type::TEXT]),
            collect_fences: sql!(
                "sql/collect_fences.sql",
                names,
                [Type::TEXT, Type::INT8, Type::INT8]
            ),
        }
    }

    /// Returns all statements, in the order in which a connection keeps them.
    pub(super) fn all(&self) -> [&Sql; 15] {
        [
            &self.lock_key,
            &self.acquire,
            &self.acquire_many,
            &self.acquire_any,
            &self.release,
            &self.release_many,
            &self.lock_key_by_id,
            &self.lock_keys_by_id,
            &self.extend,
            &self.extend_many,
            &self.by_key,
            &self.by_id,
            &self.clean_up,
            &self.list,
            &self.notify,
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_hides_parameters() {
        let values = [
            Value::Text("canary"),
            Value::MaybeText(Some("canary")),
            Value::Texts(&["canary"]),
            Value::MaybeTexts(&[Some("canary")]),
            Value::Int4(4711),
            Value::Int8(4711),
            Value::Int8s(&[4711]),
        ];
        let parameters: Vec<Parameter<'_>> = values.iter().map(|value| value as _).collect();
        let shown = format!("{values:?} {values:#?} {parameters:?}");
        assert!(!shown.contains("canary") && !shown.contains("4711"), "{shown}");
    }

    #[test]
    fn a_value_of_the_wrong_type_is_refused() {
        let mut out = BytesMut::new();
        assert!(Value::Text("x").to_sql_checked(&Type::TEXT, &mut out).is_ok());
        assert!(Value::Text("x").to_sql_checked(&Type::INT8, &mut out).is_err());
        assert!(Value::Int4(1).to_sql_checked(&Type::INT8, &mut out).is_err());
        assert!(Value::Texts(&[]).to_sql_checked(&Type::TEXT_ARRAY, &mut out).is_ok());
        assert!(Value::Int8s(&[]).to_sql_checked(&Type::TEXT_ARRAY, &mut out).is_err());
    }
}
