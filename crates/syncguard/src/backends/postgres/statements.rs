//! The statements. Each operation is a few of them in one transaction, sent at once.
//!
//! The order of locks is that of decision 023: acquire reads first, then takes the advisory lock of
//! the key, then the row. Every statement sees what was committed before it began (`READ
//! COMMITTED`), so what is read by the statement after a wait is current, and the clock is read after
//! the wait too.

use tokio_postgres::types::Type;

use super::names::TableName;

/// A statement and the types of its parameters, which are fixed: a value that could not be encoded
/// would be left out, and the rest committed without it.
#[derive(Clone, Debug)]
pub(super) struct Sql {
    pub(super) text: String,
    pub(super) types: &'static [Type],
}

/// All statements of one pair of tables.
#[derive(Clone, Debug)]
pub(super) struct Statements {
    pub(super) turn: Sql,
    pub(super) take: Sql,
    pub(super) release: Sql,
    pub(super) turn_by_id: Sql,
    pub(super) extend: Sql,
    pub(super) by_key: Sql,
    pub(super) by_id: Sql,
    pub(super) clean_up: Sql,
    pub(super) list: Sql,
    pub(super) notify: Sql,
}

/// The server's clock, in milliseconds.
const NOW: &str = "floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint";

/// What a lock of ours has; other data is never changed.
const SENSIBLE: &str = "fence ~ '^[0-9]{15}$'";

macro_rules! sql {
    ($file:literal, $tables:expr, $types:expr) => {
        Sql { text: fill(include_str!($file), $tables), types: &$types }
    };
}

/// Puts the names of the tables into a statement, and what several of them share.
fn fill(statement: &str, [locks, fences]: &[String; 2]) -> String {
    statement
        .replace("{locks}", locks)
        .replace("{fences}", fences)
        .replace("{now}", NOW)
        .replace("{sensible}", SENSIBLE)
}

impl Statements {
    pub(super) fn new(locks: &TableName, fences: &TableName) -> Self {
        let names = &[locks.quoted(), fences.quoted()];
        Self {
            turn: sql!("sql/turn.sql", names, [Type::TEXT]),
            take: sql!(
                "sql/take.sql",
                names,
                [Type::TEXT, Type::INT8, Type::TEXT, Type::INT8, Type::INT8]
            ),
            release: sql!("sql/release.sql", names, [Type::TEXT, Type::INT8, Type::INT4]),
            turn_by_id: sql!("sql/turn_by_id.sql", names, [Type::TEXT]),
            extend: sql!("sql/extend.sql", names, [Type::TEXT, Type::INT8, Type::INT8]),
            by_key: sql!("sql/by_key.sql", names, [Type::TEXT]),
            by_id: sql!("sql/by_id.sql", names, [Type::TEXT]),
            clean_up: sql!("sql/clean_up.sql", names, [Type::TEXT, Type::INT8]),
            list: sql!("sql/list.sql", names, [Type::TEXT]),
            notify: sql!("sql/notify.sql", names, [Type::TEXT, Type::TEXT]),
        }
    }

    /// In the order in which a connection keeps them.
    pub(super) fn all(&self) -> [&Sql; 10] {
        [
            &self.turn,
            &self.take,
            &self.release,
            &self.turn_by_id,
            &self.extend,
            &self.by_key,
            &self.by_id,
            &self.clean_up,
            &self.list,
            &self.notify,
        ]
    }
}
