//! Where the records of a key are, for a person who looks at a store without this library.

use syncguard::diagnostics::explain_key;
use syncguard::{ErrorCode, Key};

fn explained(url: &str, key: &str) -> Vec<(&'static str, String)> {
    explain_key(url, &Key::new(key).expect("valid")).expect(url)
}

#[cfg(any(feature = "firestore", feature = "postgres", feature = "redis", feature = "sqlite"))]
fn places(lock: &str, index: &str, fence: &str) -> Vec<(&'static str, String)> {
    vec![("lock", lock.to_owned()), ("index", index.to_owned()), ("fence", fence.to_owned())]
}

#[test]
fn memory_has_one_record_and_an_unknown_store_is_an_error() {
    let lock = "in this process, key = \"it's\"".to_owned();
    assert_eq!(explained("memory:", "it's"), [("lock", lock)]);
    let error = explain_key("unknown:", &Key::new("k").expect("valid")).expect_err("unknown");
    assert_eq!(error.code(), ErrorCode::InvalidArgument);
}

#[cfg(feature = "sqlite")]
#[test]
fn sqlite_names_tables_and_the_key() {
    let lock = "syncguard_locks, key = \"it's\"";
    let fence = "syncguard_fences, key = \"it's\"";
    let index = "syncguard_locks, by lock_id";
    assert_eq!(explained("sqlite:/locks.db", "it's"), places(lock, index, fence));
}

#[cfg(feature = "redis")]
#[test]
fn redis_names_keys_below_the_prefix() {
    let expected = places("shop:it's", "shop:id:<lock id>", "shop:fence:shop:it's");
    assert_eq!(explained("redis://localhost/0?prefix=shop", "it's"), expected);
}

#[cfg(feature = "postgres")]
#[test]
fn postgres_names_tables_and_sql_literals() {
    let lock = "\"a\".\"b\", key = 'it''s'";
    let fence = "\"f\", fence_key = 'fence:it''s'";
    let index = "\"a\".\"b\", by lock_id";
    let url = "postgres://user@localhost/db?locks_table=a.b&fences_table=f";
    assert_eq!(explained(url, "it's"), places(lock, index, fence));
}

#[cfg(feature = "firestore")]
#[test]
fn firestore_names_documents() {
    let expected = places("a/it's", "a, by lockId", "f/fence:it's");
    let url = "firestore://project?locks_collection=a&fences_collection=f";
    assert_eq!(explained(url, "it's"), expected);
}
