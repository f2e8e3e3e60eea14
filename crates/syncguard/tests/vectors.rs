//! Values from the running TypeScript implementation. Where ours differ on purpose, a list of
//! departures names the cases, and the tests assert *our* value. No case is skipped.

use serde_json::Value;
use syncguard::backend::{KeySpace, TIME_TOLERANCE_MS, hash_key, is_live};
use syncguard::{Backoff, ErrorCode, Fence, Jitter, Key, LockId, RetryPolicy, Timestamp};

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
fn hashes_of_keys_match_the_vectors() {
    let vectors = load(include_str!("vectors/hash_key.json"));
    for case in cases(&vectors, "cases") {
        assert_eq!(hash_key(text(case, "input")).as_str(), text(case, "hash"), "{case}");
        assert_eq!(hash_key(text(case, "nfc")).as_str(), text(case, "hash"), "{case}");
    }
    cannot_be_text(&vectors);
}

/// Checks lone surrogates, which a JavaScript string can contain and a Rust string cannot.
fn cannot_be_text(vectors: &Value) {
    for case in cases(vectors, "jsOnlyLoneSurrogates") {
        let units = cases(case, "utf16").iter().map(|unit| unit.as_u64().expect("a number"));
        let units: Vec<_> = units.map(|unit| u16::try_from(unit).expect("16 bits")).collect();
        assert!(String::from_utf16(&units).is_err(), "{case}");
        // TypeScript sends a replacement character instead, which is a valid key.
        if let Some(sent) = case["utf8OnTheWire"].as_str() {
            let key = Key::new(String::from_utf16_lossy(&units)).expect("valid");
            let bytes =
                (0..sent.len()).step_by(2).map(|at| u8::from_str_radix(&sent[at..at + 2], 16));
            let bytes: Result<Vec<_>, _> = bytes.collect();
            assert_eq!(key.as_str().as_bytes(), bytes.expect("hexadecimal"), "{case}");
        }
    }
}

/// Returns the inputs that are not strings in JavaScript. In Rust the compiler refuses them; the
/// list is asserted so that a new case is noticed.
fn inputs_that_are_no_text(vectors: &Value) -> Vec<&str> {
    let list = cases(vectors, "jsOnlyNonString").iter();
    let refused = list.inspect(|case| assert_eq!(text(case, "errorCode"), "InvalidArgument"));
    refused.map(|case| text(case, "input")).collect()
}

#[test]
fn keys_match_the_vectors() {
    // Settled point 7: every backend refuses a NUL.
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
    cannot_be_text(&vectors);
    assert_eq!(
        inputs_that_are_no_text(&vectors),
        ["undefined", "null", "0", "1", "true", "{}", "[]", "[\"a\"]", "symbol"]
    );
}

#[test]
fn lock_ids_match_the_vectors() {
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
            assert_eq!(error.message(), "lock id must be exactly 22 base64url characters");
        }
    }
    for input in inputs_that_are_no_text(&vectors) {
        let error = LockId::parse(input).expect_err("not a lock id as text either");
        assert_eq!(error.code(), ErrorCode::InvalidArgument);
    }
}

#[test]
fn fences_match_the_vectors() {
    let vectors = load(include_str!("vectors/fence_format.json"));
    assert_eq!(text(&vectors["meta"], "max"), Fence::MAX.to_string());
    assert_eq!(text(&vectors["meta"], "warn"), Fence::WARN.to_string());
    for case in cases(&vectors, "cases") {
        // Negative numbers, fractions and infinity are not a `u64`, and parsing refuses them too.
        // TypeScript truncates fractions.
        let Ok(input) = text(case, "input").parse::<u64>() else {
            let error = text(case, "input").parse::<Fence>().expect_err("not a fence");
            assert_eq!(error.code(), ErrorCode::InvalidArgument, "{case}");
            assert_eq!(text(case, "kind"), "js-number", "{case}");
            continue;
        };
        match Fence::new(input) {
            Ok(fence) => {
                assert_eq!(fence.to_string(), text(case, "fence"));
                assert_eq!(text(case, "fence").parse::<Fence>().expect("15 digits"), fence);
                let is = |field: &str, ours| assert!(case[field].is_null() || case[field] == ours);
                is("aboveMax", fence > Fence::MAX);
                is("aboveWarn", fence.is_near_the_end());
            }
            Err(error) => {
                assert_eq!(case["ok"], false, "{case}");
                assert_eq!(error.code(), ErrorCode::InvalidArgument);
            }
        }
    }
}

/// Settled point 2: there is one tolerance. Where a case uses another one and the result depends on
/// it, our result is that of the one tolerance.
#[test]
fn liveness_matches_the_vectors() {
    let vectors = load(include_str!("vectors/time_liveness.json"));
    assert_eq!(number(&vectors["meta"], "toleranceMs"), TIME_TOLERANCE_MS);
    let mut departures = Vec::new();
    for case in cases(&vectors, "cases") {
        let expires_at = Timestamp::from_millis(number(case, "expiresAtMs"));
        let now = Timestamp::from_millis(number(case, "nowMs"));
        let delta_ms = case["deltaMs"].as_i64().expect("a number");
        let ours = is_live(expires_at, now);
        assert_eq!(ours, delta_ms > -TIME_TOLERANCE_MS.cast_signed(), "{case}");
        if number(case, "toleranceMs") == TIME_TOLERANCE_MS {
            assert_eq!(ours, case["live"] == true, "{case}");
        } else if ours != (case["live"] == true) {
            departures.push((number(case, "toleranceMs"), delta_ms));
        }
    }
    let without = [(0, -999), (0, -500), (0, -1), (0, 0)];
    let twice = [(2000, -1999), (2000, -1001), (2000, -1000)];
    assert_eq!(departures, [&without[..], &twice[..]].concat(), "the list is out of date");
}

/// The time of a Redis server in whole milliseconds, as the scripts compute it.
#[cfg(feature = "redis")]
#[tokio::test]
async fn the_server_time_of_redis_matches_the_vectors() {
    let Some(server) = test_support::RedisServer::start(&test_support::RedisOptions::default())
    else {
        return;
    };
    let client = redis::Client::open(server.url()).expect("a URL");
    let mut connection = client.get_multiplexed_async_connection().await.expect("a server");
    // The function that all scripts use, with a given time instead of the server's.
    let common = include_str!("../src/backends/redis/lua/common.lua");
    let asks = "redis.call('TIME')";
    assert_eq!(common.matches(asks).count(), 1, "the scripts read the time in one place");
    let script = common.replace(asks, "{ARGV[1], ARGV[2]}") + "\nreturn integer(now_ms())";
    let vectors = load(include_str!("vectors/time_liveness.json"));
    for case in cases(&vectors, "redisServerTime") {
        let mut command = redis::cmd("EVAL");
        command.arg(&script).arg(0);
        for part in cases(case, "time") {
            command.arg(part.as_str().expect("a text"));
        }
        let ms: String = command.query_async(&mut connection).await.expect("it runs");
        assert_eq!(ms, number(case, "ms").to_string(), "{case}");
    }
}

#[test]
fn storage_keys_match_the_vectors() {
    let vectors = load(include_str!("vectors/storage_key.json"));
    let mut departures = 0;
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
            // Ours also refuses keys over 512 bytes and with a NUL, which cannot be a `Key`.
            Err(error) => {
                let key = text(case, "key");
                let cannot_be_made = key.len() > 512 || key.contains('\0');
                assert!(case["ok"] == false || cannot_be_made, "{error}: {case}");
                departures += usize::from(case["ok"] == true);
                assert_eq!(error.code(), ErrorCode::InvalidArgument);
            }
        }
    }
    assert!(departures > 0, "the list of departures is out of date");
}

#[test]
fn fence_and_index_keys_match_the_vectors() {
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
    let backoff = match text(case, "backoff") {
        "exponential" => Backoff::Exponential,
        _ => Backoff::Fixed,
    };
    let jitter = match text(case, "jitter") {
        "equal" => Jitter::Equal,
        "full" => Jitter::Full,
        _ => Jitter::None,
    };
    RetryPolicy::default()
        .max_retries(case["maxRetries"].as_u64().map(|max| u32::try_from(max).expect("small")))
        .delay(std::time::Duration::from_millis(number(case, "retryDelayMs")))
        .backoff(backoff)
        .jitter(jitter)
}

#[test]
fn retry_delays_match_the_vectors() {
    let vectors = load(include_str!("vectors/retry_delay.json"));
    for case in cases(&vectors, "delayBounds") {
        let attempt = u32::try_from(number(case, "attempt")).expect("small");
        let delay_ms = |random| policy(case).delay_for(attempt, random).as_secs_f64() * 1000.0;
        for (random, field) in [(0.0, "minMs"), (0.5, "atRandomHalfMs"), (1.0, "maxMs")] {
            let expected = case[field].as_f64().expect("a number");
            assert!((delay_ms(random) - expected).abs() < 1e-3, "{field} of {case}");
        }
    }
}

/// Whole retry loops by a virtual clock. Ours follow the vectors, except for the last sleep, which
/// ends a little before the timeout for one last attempt, and for a delay of zero, which means
/// "immediately" (settled point 9).
#[test]
fn retry_loops_match_the_vectors() {
    let vectors = load(include_str!("vectors/retry_delay.json"));
    let mut compared = 0;
    for case in cases(&vectors, "runs") {
        let timeout_ms = case["timeoutMs"].as_f64().expect("a number");
        let random = case["random"].as_f64().expect("a number");
        let policy = policy(case);
        let delays: Vec<f64> = cases_or_empty(case, "delaysMs");
        let mut elapsed = 0.0;
        for (index, expected) in delays.iter().enumerate() {
            let retry = u32::try_from(index + 1).expect("small");
            let delay = policy.delay_for(retry, random).as_secs_f64() * 1000.0;
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
