//! Configurations that the running TypeScript implementation accepts or refuses, compared with
//! ours. Every case runs. Where ours differs on purpose, the test names the reason and asserts
//! *our* result.
#![cfg(all(feature = "firestore", feature = "postgres", feature = "redis"))]

use serde_json::Value;
use syncguard::backend::KeySpace;
use syncguard::diagnostics::explain_key;
use syncguard::{ErrorCode, Key};

/// Builds a URL with options. Options that are `null` in the vectors are omitted.
fn url(base: &str, options: [(&str, &Value); 2]) -> String {
    let options = options.into_iter().filter_map(|(name, value)| Some((name, value.as_str()?)));
    let mut query = form_urlencoded::Serializer::new(String::new());
    format!("{base}?{}", query.extend_pairs(options).finish())
}

/// Returns why ours refuses what TypeScript accepts, or the reverse.
fn departure(case: &Value) -> Option<&'static str> {
    let is = |field: &str, text: &str| case[field] == text;
    let text = |field: &str| case[field].as_str().unwrap_or_default();
    match text("backend") {
        // With TypeScript, every lock under such a prefix fails (storage_key.json); ours fails
        // early.
        "redis" if text("keyPrefix").len() > 973 => Some("the prefix leaves no room for a name"),
        "postgres" if is("tableName", "") => Some("an empty name is a mistake, not the default"),
        "postgres" if is("tableName", "a.b") => Some("a table may be in a schema"),
        "postgres" if text("tableName").len() > 63 => Some("the server truncates the name"),
        "firestore" if text("collection").contains('/') => Some("not a valid collection name"),
        "firestore" if is("collection", "") || is("fenceCollection", "") => {
            (case["ok"] == true).then_some("a collection without a name fails at every lock")
        }
        _ => None,
    }
}

/// Returns the names of a key's records under a configuration: the lock and the fence counter.
fn expected_names(case: &Value) -> [String; 2] {
    let effective = |place: usize| case["effective"][place].as_str().expect("a name");
    match case["backend"].as_str().expect("a text") {
        "redis" => {
            let prefix = case["effective"].as_str().expect("a prefix");
            let names = KeySpace::new(prefix, 1000, 26).expect("valid");
            let lock = names.lock_key(&key()).expect("it fits");
            let fence = names.fence_key(&lock).expect("it fits");
            [lock, fence]
        }
        "postgres" => [
            format!("\"{}\", key = 'a'", effective(0)),
            format!("\"{}\", fence_key = 'fence:a'", effective(1)),
        ],
        "firestore" => [format!("{}/a", effective(0)), format!("{}/fence:a", effective(1))],
        unknown => panic!("an unknown backend: {unknown}"),
    }
}

fn key() -> Key {
    Key::new("a").expect("valid")
}

#[test]
fn configurations_match_the_vectors() {
    let vectors: Value =
        serde_json::from_str(include_str!("vectors/config_validation.json")).expect("JSON");
    let mut departures = 0;
    for case in vectors["cases"].as_array().expect("a list") {
        let url = match case["backend"].as_str().expect("a text") {
            "redis" => url("redis://h/0", [("prefix", &case["keyPrefix"]), ("", &Value::Null)]),
            "postgres" => {
                let fences = ("fences_table", &case["fenceTableName"]);
                url("postgres://u@h/d", [("locks_table", &case["tableName"]), fences])
            }
            "firestore" => {
                let fences = ("fences_collection", &case["fenceCollection"]);
                url("firestore://p", [("locks_collection", &case["collection"]), fences])
            }
            unknown => panic!("an unknown backend: {unknown}"),
        };
        let departure = departure(case);
        departures += usize::from(departure.is_some());
        let is_taken = (case["ok"] == true) != departure.is_some();
        match explain_key(&url, &key()) {
            Ok(places) => {
                assert!(is_taken, "ours accepts it: {case}");
                let place = |what| places.iter().find(|(name, _)| *name == what).map(|(_, at)| at);
                if departure.is_none() {
                    let [lock, fence] = expected_names(case);
                    assert_eq!(place("lock"), Some(&lock), "{case}");
                    assert_eq!(place("fence"), Some(&fence), "{case}");
                } else {
                    assert_eq!(place("lock").expect("named"), "\"a\".\"b\", key = 'a'");
                }
            }
            Err(error) => {
                assert!(!is_taken, "ours refuses it ({error}): {case}");
                assert_eq!(error.code(), ErrorCode::InvalidArgument, "{case}");
            }
        }
    }
    assert_eq!(departures, 8, "the list of departures is out of date");
}
