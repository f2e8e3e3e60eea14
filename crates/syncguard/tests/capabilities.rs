//! The capabilities of every backend, as its specification lists them.
#![cfg(all(feature = "firestore", feature = "postgres", feature = "redis", feature = "sqlite"))]

use syncguard::backend::{Layer, TimeAuthority};
use syncguard::telemetry::{TelemetryLayer, TracingSink};
use syncguard::{AnyBackend, connect};
use syncguard::{LockBackend, MemoryBackend};
use test_support::{
    FirestoreEmulator, PostgresOptions, PostgresServer, RedisOptions, RedisServer, TempDir,
};

async fn assert_capabilities(url: &str, name: &str, authority: TimeAuthority, undo_is_final: bool) {
    let capabilities = connect(url).await.expect("a store").capabilities();
    assert_eq!(capabilities.backend, name);
    assert_eq!(capabilities.time_authority, authority, "{name}");
    assert_eq!(capabilities.undo_is_final, undo_is_final, "{name}");
    assert!(capabilities.fencing, "{name}");
}

#[tokio::test]
async fn memory_and_sqlite_decide_by_their_own_clock() {
    assert_capabilities("memory:", "memory", TimeAuthority::Server, true).await;
    let directory = TempDir::new();
    let url = format!("sqlite:{}", directory.path().join("locks.db").display());
    assert_capabilities(&url, "sqlite", TimeAuthority::Server, true).await;
}

#[tokio::test]
async fn redis_decides_by_its_own_clock() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    assert_capabilities(&server.url(), "redis", TimeAuthority::Server, true).await;
}

#[tokio::test]
async fn postgresql_decides_by_its_own_clock() {
    let Some(server) = PostgresServer::start(&PostgresOptions::default()) else { return };
    assert_capabilities(&server.url(), "postgres", TimeAuthority::Server, false).await;
}

#[tokio::test]
async fn firestore_decides_by_the_clients_clocks() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let url = format!("firestore://p?emulator={}", emulator.host());
    assert_capabilities(&url, "firestore", TimeAuthority::Client, false).await;
}

/// Layers and erasure do not change the capabilities.
#[test]
fn layers_keep_the_capabilities() {
    let backend = MemoryBackend::new();
    let capabilities = backend.capabilities();
    let telemetry = TelemetryLayer::new(std::sync::Arc::new(TracingSink));
    assert_eq!(telemetry.layer(backend.clone()).capabilities(), capabilities);
    assert_eq!(AnyBackend::new(backend).capabilities(), capabilities);
}
