//! The Firestore backend on the real service, for behavior that the emulator cannot show. You need
//! a project:
//!
//! ```sh
//! SYNCGUARD_FIRESTORE_PROJECT=my-project \
//!     cargo test --all-features --test firestore_real -- --nocapture
//! ```
//!
//! The tests use their own collections, and Application Default Credentials.
#![cfg(feature = "firestore")]

use std::time::{Duration, Instant};

use syncguard::backend::{AcquireOutcome, AcquireRequest, ReleaseRequest};
use syncguard::firestore::FirestoreConfig;
use syncguard::{
    FirestoreBackend, Key, LockBackend, LockOptions, Locker, ReleaseOutcome, Ttl, diagnostics,
};

/// Connects two clients, unless no project is configured.
async fn connect() -> Option<[FirestoreBackend; 2]> {
    let Ok(project) = std::env::var("SYNCGUARD_FIRESTORE_PROJECT") else {
        println!("not run: set SYNCGUARD_FIRESTORE_PROJECT to test on the real Firestore");
        return None;
    };
    let database = std::env::var("SYNCGUARD_FIRESTORE_DATABASE");
    let database = database.unwrap_or(FirestoreConfig::DEFAULT_DATABASE.to_owned());
    let config = FirestoreConfig::new(project)
        .database(database)
        .collections("syncguard_test_locks", "syncguard_test_fence_counters");
    let first = FirestoreBackend::connect(config.clone()).await.expect("connects");
    Some([first, FirestoreBackend::connect(config).await.expect("connects")])
}

/// A key that no other run uses.
fn key(name: &str) -> Key {
    Key::new(format!("{name}:{}", std::process::id())).expect("valid")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_behaves_as_on_the_emulator() {
    let Some([first, second]) = connect().await else { return };
    let key = key("users/life");
    let request = AcquireRequest::new(key.clone(), Ttl::DEFAULT).expect("randomness");
    let AcquireOutcome::Acquired(lease) = first.acquire(&request).await.expect("works") else {
        panic!("it is free")
    };
    let other = AcquireRequest::new(key.clone(), Ttl::DEFAULT).expect("randomness");
    let contended = second.acquire(&other).await.expect("works");
    assert!(
        matches!(contended, AcquireOutcome::Contended { expires_in: Some(_) }),
        "{contended:?}"
    );
    let found = diagnostics::get_by_id(&second, &request.lock_id()).await.expect("works");
    assert_eq!(found.expect("held").fence, Some(lease.fence()));
    let release = ReleaseRequest::new(request.lock_id());
    assert_eq!(second.release(&release).await.expect("works"), ReleaseOutcome::Released);
    let AcquireOutcome::Acquired(next) = second.acquire(&other).await.expect("works") else {
        panic!("it is free")
    };
    assert!(next.fence() > lease.fence());
    let release = ReleaseRequest::new(other.lock_id());
    assert_eq!(first.release(&release).await.expect("works"), ReleaseOutcome::Released);
    let findings = first.admin().expect("there is one").findings().await.expect("works");
    println!("findings: {findings:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_wakes_a_waiter_of_another_client() {
    let Some([first, second]) = connect().await else { return };
    let key = key("wake");
    let locker = Locker::new(first).expect("a runtime");
    let guard = locker.lock(&key).await.expect("free");
    let hours = Duration::from_hours(1);
    let options = LockOptions::default().timeout(Duration::from_mins(1));
    let waiter = Locker::builder(second).options(options).poll_interval(hours).build();
    let waiter = waiter.expect("a runtime");
    let waiting = tokio::spawn(async move { waiter.lock(&key).await.map(|_guard| Instant::now()) });
    tokio::time::sleep(Duration::from_secs(5)).await;
    let released = Instant::now();
    guard.release().await.expect("held");
    let taken = waiting.await.expect("no panic").expect("works");
    println!("woken after {:?}", taken.duration_since(released));
}
