//! Values from the running TypeScript implementation. Where ours differ on purpose, the list of
//! departures says so and the test asserts *our* value there; nothing is skipped.

use serde_json::Value;
use syncguard::{
    Backoff, ErrorCode, Fence, Jitter, Key, KeySpace, LockId, RetryPolicy, TIME_TOLERANCE_MS,
    Timestamp, hash_key, is_live,
};

fn load(text: &str) -> Value {
    serde_json::from_str(text).expect("the vectors are JSON")
}

fn cases<'a>(vectors: &'a Value, list: &str) -> &'a Vec<Value> {
    let cases = vectors[list].as_array().expect("a list of cases");
    assert!(!cases.is_empty());
    cases
}

fn text<'a>(case: &'a Value, field: &str) -> &'a str {
    case[field].as_str().unwrap_or_else(|| panic!("{field} of {case}"))
}

fn number(case: &Value, field: &str) -> u64 {
    case[field].as_u64().unwrap_or_else(|| panic!("{field} of {case}"))
}

fn size(case: &Value, field: &str) -> usize {
    usize::try_from(number(case, field)).expect("small")
}

#[test]
fn hashes_of_keys() {
    let vectors = load(include_str!("vectors/hash_key.json"));
    for case in cases(&vectors, "cases") {
        assert_eq!(hash_key(text(case, "input")).as_str(), text(case, "hash"), "{case}");
        assert_eq!(hash_key(text(case, "nfc")).as_str(), text(case, "hash"), "{case}");
    }
}

#[test]
fn keys() {
    // Settled point 7: a NUL is refused on every backend.
    let departs = |key: &str| key.contains('\0');
    let vectors = load(include_str!("vectors/key_validation.json"));
    let mut departures = 0;
    for case in cases(&vectors, "cases") {
        let result = Key::new(text(case, "key"));
        if case["ok"] == true && !departs(text(case, "key")) {
            let key = result.unwrap_or_else(|error| panic!("{error}: {case}"));
            assert_eq!(key.as_str(), text(case, "normalized"), "{case}");
            assert_eq!(key.as_str().len(), size(case, "bytes"), "{case}");
        } else {
            departures += usize::from(case["ok"] == true);
            let error = result.expect_err("refused");
            assert_eq!(error.code(), ErrorCode::InvalidArgument, "{case}");
        }
    }
    assert!(departures > 0, "the list of departures is out of date");
}

#[test]
fn lock_ids() {
    let vectors = load(include_str!("vectors/lock_id_validation.json"));
    for case in cases(&vectors, "generated") {
        assert!(LockId::parse(text(case, "lockId")).is_ok(), "{case}");
    }
    for case in cases(&vectors, "cases") {
        let result = LockId::parse(text(case, "lockId"));
        assert_eq!(result.is_ok(), case["ok"] == true, "{case}");
        if let Err(error) = result {
            assert_eq!(error.code(), ErrorCode::InvalidArgument);
            // Settled point 17: the message does not repeat the id.
            assert_eq!(error.to_string(), "lock id must be exactly 22 base64url characters");
        }
    }
}

#[test]
fn fences() {
    let vectors = load(include_str!("vectors/fence_format.json"));
    assert_eq!(text(&vectors["meta"], "max"), Fence::MAX.to_string());
    assert_eq!(text(&vectors["meta"], "warn"), Fence::WARN.to_string());
    let mut checked = 0;
    for case in cases(&vectors, "cases").iter().filter(|case| case["kind"] == "bigint") {
        // A negative number is no `u64`: the type does not let it in.
        let Ok(input) = text(case, "input").parse::<u64>() else {
            assert_eq!(case["ok"], false, "{case}");
            continue;
        };
        checked += 1;
        match Fence::new(input) {
            Ok(fence) => {
                assert_eq!(fence.to_string(), text(case, "fence"));
                assert_eq!(text(case, "fence").parse::<Fence>().expect("15 digits"), fence);
                assert_eq!(fence > Fence::MAX, case["aboveMax"] == true, "{case}");
                assert_eq!(fence.is_near_the_end(), case["aboveWarn"] == true, "{case}");
            }
            Err(error) => {
                assert_eq!(case["ok"], false, "{case}");
                assert_eq!(error.code(), ErrorCode::InvalidArgument);
            }
        }
    }
    assert!(checked > 10);
}

#[test]
fn liveness() {
    let vectors = load(include_str!("vectors/time_liveness.json"));
    let mut checked = 0;
    for case in cases(&vectors, "cases") {
        // Ours takes no other tolerance than the one.
        if number(case, "toleranceMs") != TIME_TOLERANCE_MS {
            continue;
        }
        checked += 1;
        let expires_at = Timestamp::from_millis(number(case, "expiresAtMs"));
        let now = Timestamp::from_millis(number(case, "nowMs"));
        assert_eq!(is_live(expires_at, now), case["live"] == true, "{case}");
    }
    assert!(checked > 10);
}

#[test]
fn storage_keys() {
    let vectors = load(include_str!("vectors/storage_key.json"));
    for case in cases(&vectors, "cases") {
        let derive = || {
            let key = Key::new(text(case, "key"))?;
            KeySpace::new(text(case, "prefix"), size(case, "limit"), size(case, "reserve"))?
                .lock_key(&key)
        };
        match derive() {
            Ok(storage_key) => {
                assert_eq!(storage_key, text(case, "storageKey"), "{case}");
                assert_eq!(storage_key.len(), size(case, "bytes"), "{case}");
            }
            // Ours also refuses keys over 512 bytes and NUL here, because a `Key` cannot be made.
            Err(error) => {
                let key = text(case, "key");
                let cannot_be_made = key.len() > 512 || key.contains('\0');
                assert!(case["ok"] == false || cannot_be_made, "{error}: {case}");
                assert_eq!(error.code(), ErrorCode::InvalidArgument);
            }
        }
    }
}

#[test]
fn fence_and_index_keys() {
    let vectors = load(include_str!("vectors/fence_key.json"));
    let mut hashed = 0;
    for case in cases(&vectors, "cases") {
        let key = Key::new(text(case, "key")).expect("valid");
        let derive = || {
            let space =
                KeySpace::new(text(case, "prefix"), size(case, "limit"), size(case, "reserve"))?;
            let lock = space.lock_key(&key)?;
            let fence = space.fence_key(&lock)?;
            let index = match case["lockId"].as_str() {
                Some(lock_id) => Some(space.index_key(&LockId::parse(lock_id)?)?),
                None => None,
            };
            Ok::<_, syncguard::Error>((lock, fence, index))
        };
        match derive() {
            Ok((lock, fence, index)) => {
                assert_eq!(lock, text(case, "baseKey"), "{case}");
                assert_eq!(fence, text(case, "fenceKey"), "{case}");
                assert_eq!(index.as_deref(), case["indexKey"].as_str(), "{case}");
                hashed += usize::from(case["baseHashed"] == true);
            }
            Err(error) => {
                assert_eq!(case["ok"], false, "{case}");
                assert_eq!(error.code(), ErrorCode::InvalidArgument);
            }
        }
    }
    assert!(hashed > 0);
}

fn policy(case: &Value) -> RetryPolicy {
    RetryPolicy {
        max_retries: case["maxRetries"].as_u64().map(|max| u32::try_from(max).expect("small")),
        delay: std::time::Duration::from_millis(number(case, "retryDelayMs")),
        backoff: match text(case, "backoff") {
            "exponential" => Backoff::Exponential,
            _ => Backoff::Fixed,
        },
        jitter: match text(case, "jitter") {
            "equal" => Jitter::Equal,
            "full" => Jitter::Full,
            _ => Jitter::None,
        },
        max_delay: None,
    }
}

#[test]
fn retry_delays() {
    let vectors = load(include_str!("vectors/retry_delay.json"));
    for case in cases(&vectors, "delayBounds") {
        let attempt = u32::try_from(number(case, "attempt")).expect("small");
        let delay_ms = |random| policy(case).delay(attempt, random).as_secs_f64() * 1000.0;
        for (random, field) in [(0.0, "minMs"), (0.5, "atRandomHalfMs"), (1.0, "maxMs")] {
            let expected = case[field].as_f64().expect("a number");
            assert!((delay_ms(random) - expected).abs() < 1e-3, "{field} of {case}");
        }
    }
}

/// Whole retry loops, by the virtual clock: ours follow the vectors but for the last sleep, which
/// ends a little before the timeout for one last attempt, and for a delay of zero, which means "at
/// once" (settled point 9).
#[test]
fn retry_loops() {
    let vectors = load(include_str!("vectors/retry_delay.json"));
    let mut compared = 0;
    for case in cases(&vectors, "runs").iter().filter(|case| case["succeedsOnCall"].is_null()) {
        let timeout_ms = case["timeoutMs"].as_f64().expect("a number");
        let random = case["random"].as_f64().expect("a number");
        let policy = policy(case);
        let delays: Vec<f64> = cases_or_empty(case, "delaysMs");
        let mut elapsed = 0.0;
        for (index, expected) in delays.iter().enumerate() {
            let retry = u32::try_from(index + 1).expect("small");
            let delay = policy.delay(retry, random).as_secs_f64() * 1000.0;
            let was_cut = elapsed + expected >= timeout_ms;
            if was_cut {
                assert!(delay >= *expected, "{case}");
            } else {
                assert!((delay - expected).abs() < 1e-3, "delay {retry} of {case}");
            }
            elapsed += expected;
            compared += 1;
        }
    }
    assert!(compared > 50);
}

fn cases_or_empty(case: &Value, field: &str) -> Vec<f64> {
    let list = case[field].as_array().expect("a list");
    list.iter().map(|delay| delay.as_f64().expect("a number")).collect()
}
