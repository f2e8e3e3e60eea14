//! Foreign text that reaches public functions: nothing panics, and what is refused is not repeated.

use syncguard::backend::MAX_KEY_LENGTH_BYTES;
use syncguard::{Error, ErrorCode, Fence, Key, LockId};
use test_support::fuzz;

/// A text that must not appear in an error.
const SECRET: &str = "s3cr3t";

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Checks that an error is about the argument and does not repeat it, and returns its message.
fn refused(error: &Error) -> String {
    assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error:?}");
    assert!(!format!("{error} {error:?}").contains(SECRET), "{error:?}");
    error.message().to_owned()
}

#[test]
fn no_key_panics() {
    let seeds: [&[u8]; 4] =
        [b"invoice:42", "e\u{301}\u{1F512}".as_bytes(), &[b'k'; 512], b"s3cr3t"];
    fuzz("key", env!("CARGO_MANIFEST_DIR"), seeds, |bytes| match Key::new(lossy(bytes)) {
        Ok(key) => {
            assert!((1..=MAX_KEY_LENGTH_BYTES).contains(&key.as_str().len()));
            assert_eq!(Key::new(key.as_str()).expect("normalized"), key);
            assert!(!format!("{key:?}").contains(key.as_str()) || key.as_str().len() < 16);
            format!("{}", key.as_str().is_ascii())
        }
        Err(error) => refused(&error),
    });
}

#[test]
fn no_lock_id_panics() {
    let seeds: [&[u8]; 3] = [b"WERfqnNu2ScFxRRPeY_ufw", b"AAAAAAAAAAAAAAAAAAAAAA", b"s3cr3t"];
    fuzz("lock_id", env!("CARGO_MANIFEST_DIR"), seeds, |bytes| {
        match LockId::parse(&lossy(bytes)) {
            Ok(lock_id) => {
                assert_eq!(lock_id.expose(), lossy(bytes));
                "valid".to_owned()
            }
            Err(error) => refused(&error),
        }
    });
}

#[test]
fn no_fence_panics() {
    let seeds: [&[u8]; 3] = [b"000000000000007", b"999999999999999", b"900000000000000"];
    fuzz("fence", env!("CARGO_MANIFEST_DIR"), seeds, |bytes| match lossy(bytes).parse::<Fence>() {
        Ok(fence) => {
            assert_eq!(fence.to_string(), lossy(bytes));
            "valid".to_owned()
        }
        Err(error) => refused(&error),
    });
}

#[test]
#[cfg(feature = "serde")]
fn no_serialized_value_panics() {
    let seeds: [&[u8]; 4] = [b"\"000000000000007\"", b"1794769120208", b"1.5e300", b"\"7\""];
    fuzz("serde", env!("CARGO_MANIFEST_DIR"), seeds, |json| {
        let fence = serde_json::from_slice::<Fence>(json);
        let time = serde_json::from_slice::<syncguard::Timestamp>(json);
        if let Ok(fence) = &fence {
            assert_eq!(serde_json::to_string(fence).expect("text"), format!("\"{fence}\""));
        }
        format!("{} {}", fence.is_ok(), time.is_ok())
    });
}

#[test]
#[cfg(all(feature = "firestore", feature = "postgres", feature = "redis", feature = "sqlite"))]
fn no_url_panics() {
    let seeds: [&[u8]; 14] = [
        b"memory:?cleanup_in_is_locked=true",
        b"sqlite:/var/lib/locks.db?busy_timeout_ms=100",
        b"sqlite:///tmp/a%20b.db",
        b"redis://user:s3cr3t@localhost:6379/3?prefix=shop&response_timeout_ms=100",
        b"rediss://:s3cr3t@[::1]:6380",
        b"redis+unix:///run/redis.sock?db=1&pass=s3cr3t",
        b"redis+sentinel://:s3cr3t@a:26379,b:26379/mymaster/0?sentinel_password=s3cr3t",
        b"redis+cluster://a:6379,b:6379?wait_for_replicas=1",
        b"unix:/run/redis.sock",
        b"postgres://user:s3cr3t@localhost:5432/db?sslmode=require&table=locks&application_name=x",
        b"postgresql://%2Frun%2Fpostgresql/db?target_session_attrs=read-write",
        b"firestore://my-project/my-database?collection=locks&clock_limit_ms=500",
        b"firestore://p?emulator=localhost:8080",
        b"canary://s3cr3t",
    ];
    let key = Key::new("invoice:42").expect("valid");
    fuzz("url", env!("CARGO_MANIFEST_DIR"), seeds, |bytes| {
        let url = lossy(bytes);
        // A name that the store uses may contain the text; an error must not.
        match syncguard::diagnostics::explain_key(&url, &key) {
            Ok(places) => format!("{:?}", places.iter().map(|(kind, _)| kind).collect::<Vec<_>>()),
            Err(error) => refused(&error),
        }
    });
}
