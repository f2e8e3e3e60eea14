//! What torture has found, each as a small test.

use syncguard::backend::{AcquireRequest, ReleaseRequest};
use syncguard::redis::RedisConfig;
use syncguard::{Key, LockBackend, RedisBackend, Ttl};
use test_support::{RedisOptions, RedisServer};

/// The marker of an undo needs memory, the release does not. The error said that nothing was done.
#[tokio::test(flavor = "multi_thread")]
async fn an_undo_that_fails_for_lack_of_memory_may_have_taken_effect() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let config = RedisConfig::from_url(&server.url()).expect("a URL");
    let backend = RedisBackend::connect(config).await.expect("connected");
    let request = AcquireRequest::new(Key::new("k").expect("valid"), Ttl::DEFAULT);
    let request = request.expect("randomness");
    drop(backend.acquire(&request).await.expect("works"));
    drop(server.cli(&["CONFIG", "SET", "maxmemory", "1"]));
    let error = backend.release(&ReleaseRequest::undo(&request)).await.expect_err("no memory");
    assert!(!backend.is_locked(request.key()).await.expect("works"), "it was released");
    assert!(error.may_have_taken_effect(), "{error:?}");
}
