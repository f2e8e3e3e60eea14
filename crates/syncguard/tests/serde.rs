//! Serialization: fences as text, times as numbers, and no secrets.
#![cfg(feature = "serde")]

use std::time::Duration;

use serde_json::json;
use syncguard::{Fence, Locker, MemoryBackend, Timestamp, Ttl, diagnostics};

#[test]
fn a_fence_is_text_and_only_fifteen_digits_are_read() {
    let fence = Fence::new(42).expect("valid");
    assert_eq!(serde_json::to_value(fence).expect("serializes"), json!("000000000000042"));
    let read: Fence = serde_json::from_str("\"000000000000042\"").expect("15 digits");
    assert_eq!(read, fence);
    for wrong in ["42", "\"42\"", "\"0000000000000042\"", "\"00000000000004x\""] {
        assert!(serde_json::from_str::<Fence>(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn a_ttl_is_a_number_of_milliseconds_within_its_bounds() {
    let ttl = Ttl::new(Duration::from_secs(7)).expect("valid");
    assert_eq!(serde_json::to_value(ttl).expect("serializes"), json!(7_000));
    assert_eq!(serde_json::from_value::<Ttl>(json!(7_000)).expect("valid"), ttl);
    for wrong in [json!(0), json!(-1), json!("7s"), json!(u64::MAX)] {
        assert!(serde_json::from_value::<Ttl>(wrong.clone()).is_err(), "{wrong}");
    }
}

#[tokio::test]
async fn lock_info_serializes_with_the_field_names_of_the_specification() {
    let locker = Locker::new(MemoryBackend::new()).expect("in a runtime");
    let guard = locker.lock("k").await.expect("free");
    let info = diagnostics::get_by_id(locker.backend(), &guard.lock_id()).await.expect("works");
    let value = serde_json::to_value(info.expect("held")).expect("serializes");
    assert_eq!(value["keyHash"], guard.key().hash_id().as_str());
    assert_eq!(value["lockIdHash"], guard.lock_id().hash_id().as_str());
    assert_eq!(value["fence"], "000000000000001");
    assert_eq!(value["expiresAtMs"], guard.expires_at().as_millis());
    let acquired: Timestamp =
        serde_json::from_value(value["acquiredAtMs"].clone()).expect("a number");
    assert!(acquired < guard.expires_at());
    assert!(!value.to_string().contains(guard.lock_id().expose()));
}
