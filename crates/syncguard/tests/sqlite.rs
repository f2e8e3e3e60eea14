//! The SQLite backend: the conformance kit on a real file, in one process and across processes.
#![cfg(all(feature = "sqlite", feature = "conformance"))]

use std::sync::Arc;

use rusqlite::{Connection, OptionalExtension, params};
use syncguard::backend::{Clock, Layer, SystemClock};
use syncguard::conformance::{Fixture, RawLock};
use syncguard::sqlite::SqliteConfig;
use syncguard::telemetry::{TelemetryLayer, TracingSink};
use syncguard::{AnyBackend, Fence, FenceSource, Key, LockId, SqliteBackend};
use test_support::TempDir;

struct SqliteFixture {
    folder: TempDir,
}

impl SqliteFixture {
    fn new() -> Self {
        Self { folder: TempDir::new() }
    }

    fn config(&self) -> SqliteConfig {
        SqliteConfig::new(self.folder.path().join("locks.db"))
    }

    /// Opens the file without the backend.
    async fn raw(&self) -> Connection {
        // The first backend creates the file.
        drop(SqliteBackend::open(self.config()).await.expect("opens"));
        let raw = Connection::open(self.config().path()).expect("opens");
        raw.busy_timeout(std::time::Duration::from_secs(5)).expect("works");
        raw
    }
}

fn now_ms() -> i64 {
    i64::try_from(SystemClock.now().as_millis()).expect("this century")
}

fn integer(number: u64) -> i64 {
    i64::try_from(number).expect("small")
}

impl Fixture for SqliteFixture {
    type Backend = SqliteBackend;

    async fn backend(&self) -> SqliteBackend {
        SqliteBackend::open(self.config()).await.expect("opens")
    }

    async fn backend_with_cleanup(&self) -> SqliteBackend {
        SqliteBackend::open(self.config().cleanup_in_is_locked(true)).await.expect("opens")
    }

    async fn backend_with_clock_fences(&self) -> Option<SqliteBackend> {
        let config = self.config().fences(FenceSource::Clock);
        Some(SqliteBackend::open(config).await.expect("opens"))
    }

    async fn delete_fence_counter(&self, key: &Key) {
        let query = "DELETE FROM syncguard_fences WHERE key = ?1";
        self.raw().await.execute(query, [key.as_str()]).expect("works");
    }

    async fn plant(&self, lock: &RawLock) {
        let now = now_ms();
        self.raw()
            .await
            .execute(
                "INSERT OR REPLACE INTO syncguard_locks VALUES (?1, ?2, ?3, ?4, ?5, NULL)",
                params![
                    lock.key.as_str(),
                    lock.lock_id.expose(),
                    integer(lock.fence.get()),
                    now - lock.acquired_ms_ago,
                    now + lock.expires_in_ms,
                ],
            )
            .expect("works");
        self.set_fence_counter(&lock.key, lock.fence.get()).await;
    }

    async fn peek(&self, key: &Key) -> Option<RawLock> {
        let now = now_ms();
        let raw = self.raw().await;
        let query = "SELECT lock_id, fence, acquired_at_ms, expires_at_ms FROM syncguard_locks \
                     WHERE key = ?1";
        raw.query_row(query, [key.as_str()], |row| {
            Ok(RawLock {
                key: key.clone(),
                lock_id: LockId::parse(&row.get::<_, String>(0)?).expect("valid"),
                fence: Fence::new(row.get::<_, i64>(1)?.try_into().expect("positive"))
                    .expect("valid"),
                acquired_ms_ago: now - row.get::<_, i64>(2)?,
                expires_in_ms: row.get::<_, i64>(3)? - now,
            })
        })
        .optional()
        .expect("works")
    }

    async fn knows_id(&self, lock_id: &LockId) -> bool {
        let query = "SELECT 1 FROM syncguard_locks WHERE lock_id = ?1";
        let found = self.raw().await.query_row(query, [lock_id.expose()], |_row| Ok(()));
        found.optional().expect("works").is_some()
    }

    async fn fence_counter(&self, key: &Key) -> u64 {
        let query = "SELECT fence FROM syncguard_fences WHERE key = ?1";
        let raw = self.raw().await;
        let found = raw.query_row(query, [key.as_str()], |row| row.get::<_, i64>(0)).optional();
        found.expect("works").map_or(0, |counter| counter.try_into().expect("positive"))
    }

    async fn set_fence_counter(&self, key: &Key, counter: u64) {
        let query = "INSERT OR REPLACE INTO syncguard_fences VALUES (?1, ?2)";
        let raw = self.raw().await;
        raw.execute(query, params![key.as_str(), integer(counter)]).expect("works");
    }

    async fn corrupt(&self, key: &Key) -> bool {
        let query = "UPDATE syncguard_locks SET fence = -1 WHERE key = ?1";
        assert_eq!(self.raw().await.execute(query, [key.as_str()]).expect("works"), 1);
        true
    }

    async fn restart(&self) -> bool {
        // There is no server to restart, and the file survives.
        true
    }
}

mod another_process;

mod across_processes {
    use super::*;
    syncguard::conformance_tests!(another_process::RemoteFixture::new());
}

mod plain {
    use super::*;
    syncguard::conformance_tests!(SqliteFixture::new());
}

mod erased {
    use super::*;
    syncguard::conformance_tests!(SqliteFixture::new().wrapped(AnyBackend::new));
}

mod under_telemetry {
    use super::*;
    syncguard::conformance_tests!({
        let layer = TelemetryLayer::new(Arc::new(TracingSink));
        SqliteFixture::new().wrapped(move |backend| layer.layer(backend))
    });
}
