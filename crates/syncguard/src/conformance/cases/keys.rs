//! Keys that are awkward for one store or another.

use super::{Fixture, LONG, acquire, fresh_id, key};
use crate::common::error::ErrorCode;
use crate::common::key::{Key, MAX_KEY_LENGTH_BYTES};
use crate::contract::LockBackend;
use crate::contract::outcome::{AcquireOutcome, ExtendOutcome, ReleaseOutcome};
use crate::contract::request::{AcquireRequest, ExtendRequest, Hint, ReleaseRequest};

/// Acquires, reads, extends and releases each key. All of them are held at the same time, so they
/// are distinct locks.
async fn all_are_distinct_locks<F: Fixture>(fixture: &F, keys: Vec<Key>) {
    let backend = fixture.backend().await;
    let mut held = Vec::new();
    for key in &keys {
        let (lock_id, fence) = acquire(&backend, key).await;
        assert_eq!(fence.get(), 1, "a counter is shared between two keys");
        held.push(lock_id);
    }
    for (key, lock_id) in keys.iter().zip(held) {
        let stored = fixture.peek(key).await.expect("a record is stored");
        assert_eq!(&stored.key, key, "the stored key is the normalized one");
        assert_eq!(stored.lock_id, lock_id);
        assert!(backend.is_locked(key).await.expect("works"));
        let found = backend.lookup_id(&lock_id).await.expect("works").expect("held");
        assert_eq!(&found.key, key);
        let extend = ExtendRequest::new(lock_id, LONG);
        let answer = backend.extend(&extend).await.expect("works");
        assert!(matches!(answer, ExtendOutcome::Extended(_)), "{answer:?}");
        let release = ReleaseRequest::new(lock_id).with_hint(Hint::key(key.clone()));
        assert_eq!(backend.release(&release).await.expect("works"), ReleaseOutcome::Released);
        assert!(!backend.is_locked(key).await.expect("works"));
    }
}

/// Slashes, dots, quotes, spaces, and keys that look like an internal record.
pub async fn odd_keys_are_locks_like_any_other<F: Fixture>(fixture: &F) {
    let unique = fresh_id();
    let unique = unique.expose();
    let keys = [
        "users/42/",
        "/",
        "//",
        "a//b",
        "../",
        "./",
        "..",
        " ",
        "\n",
        "\r\n",
        "\t",
        "\u{7f}",
        "*",
        "{tag}",
        "}{",
        "%2F",
        "%",
        "\\",
        "'",
        "\"",
        "; drop table locks; --",
        "`",
        "$1",
        "?",
        "\u{feff}",
        "fence:",
        "id:",
        "key:",
        "🔒",
        "日本語",
        "\u{202e}rtl",
        "é",
        "null",
        "0",
        "-1",
        "syncguard:",
    ];
    let keys = keys.iter().flat_map(|odd| [format!("{odd}{unique}"), format!("{unique}{odd}")]);
    let mut keys: Vec<_> = keys.map(|text| key(&text)).collect();
    // Reserved Firestore document ids, and keys that look like an index or fence key.
    keys.extend([key(&format!("__{unique}__")), key(&format!("id:{}", fresh_id().expose()))]);
    keys.extend([key(&format!("fence:{unique}:x")), key(&format!("fence:fence:{unique}"))]);
    all_are_distinct_locks(fixture, keys).await;
}

/// The longest keys differ in their last byte only, and are still distinct; one byte more is
/// refused before any I/O.
pub async fn long_keys_are_locks_like_any_other<F: Fixture>(fixture: &F) {
    let unique = fresh_id();
    let fill = |last: &str, filler: &str| {
        let room = MAX_KEY_LENGTH_BYTES - unique.expose().len() - last.len();
        let text = format!("{}{}{last}", unique.expose(), filler.repeat(room / filler.len()));
        key(&text)
    };
    let longest = fill("a", "x");
    assert_eq!(longest.as_str().len(), MAX_KEY_LENGTH_BYTES);
    let keys =
        vec![longest.clone(), fill("b", "x"), fill("a", "é"), fill("b", "é"), fill("a", "🔒")];
    let too_long = Key::new(format!("{}x", longest.as_str())).expect_err("513 bytes");
    assert_eq!(too_long.code(), ErrorCode::InvalidArgument);
    all_are_distinct_locks(fixture, keys).await;
}

/// A key written with combining marks is the same as the key written without.
pub async fn both_unicode_forms_are_one_lock<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let unique = fresh_id();
    let composed = key(&format!("caf\u{e9}:{}", unique.expose()));
    let decomposed = key(&format!("cafe\u{301}:{}", unique.expose()));
    let (lock_id, _fence) = acquire(&backend, &composed).await;
    let request = AcquireRequest::new(decomposed.clone(), LONG).expect("randomness");
    let outcome = backend.acquire(&request).await.expect("works");
    assert!(matches!(outcome, AcquireOutcome::Contended { .. }), "{outcome:?}");
    assert!(backend.is_locked(&decomposed).await.expect("works"));
    let release = ReleaseRequest::new(lock_id).with_hint(Hint::key(decomposed));
    assert_eq!(backend.release(&release).await.expect("works"), ReleaseOutcome::Released);
}
