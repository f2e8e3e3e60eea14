//! Corrupt records, and what an error contains.

use super::{Fixture, LONG, acquire, fresh_key, not_applicable, request};
use crate::common::error::ErrorCode;
use crate::common::fence::Fence;
use crate::contract::LockBackend;
use crate::contract::request::{ExtendRequest, Hint, ReleaseRequest};

/// A corrupt record is an error and is never overwritten, and the error shows neither key nor lock
/// id.
pub async fn a_corrupt_record_is_an_internal_error_and_stays<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("canary-corrupt");
    let (lock_id, fence) = acquire(&backend, &key).await;
    if !fixture.corrupt(&key).await {
        return not_applicable("the store's types allow no corrupt record");
    }
    let hint = Hint::key(key.clone());
    let errors = [
        backend.acquire(&request(&key)).await.expect_err("the record is corrupt"),
        backend.is_locked(&key).await.expect_err("the record is corrupt"),
        backend.lookup_key(&key).await.expect_err("the record is corrupt"),
        backend
            .release(&ReleaseRequest::new(lock_id).with_hint(hint.clone()))
            .await
            .expect_err("the record is corrupt"),
        backend
            .extend(&ExtendRequest::new(lock_id, LONG).with_hint(hint))
            .await
            .expect_err("the record is corrupt"),
    ];
    for error in errors {
        assert_eq!(error.code(), ErrorCode::Internal, "{error}");
        let shown = format!("{error} {error:?}");
        assert!(!shown.contains("canary") && !shown.contains(lock_id.expose()), "{shown}");
    }
    assert_eq!(fixture.fence_counter(&key).await, fence.get());
}

/// An error contains which backend failed, in which operation and on which key.
pub async fn an_error_names_backend_operation_and_key<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("named");
    fixture.set_fence_counter(&key, Fence::MAX.get()).await;
    let error = backend.acquire(&request(&key)).await.expect_err("the counter is exhausted");
    assert_eq!(error.backend(), Some(backend.capabilities().backend));
    assert_eq!(error.operation(), Some("acquire"));
    assert_eq!(error.key(), Some(&key));
}
