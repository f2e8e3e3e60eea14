//! A marked key and a marked lock id go through every error path; neither may appear anywhere.

mod servers;
mod support;

use std::fmt::Write as _;
use std::sync::{Arc, Mutex};

use servers::log::Log;
use servers::shown;
use support::{Call, Fault, Faulty, locker, ms, ttl_ms};
use syncguard::backend::{AcquireRequest, Layer, ReleaseRequest};
use syncguard::telemetry::{EventSink, LockEvent, TelemetryLayer, TracingSink};
use syncguard::{ErrorCode, Key, LockBackend, LockId, LockOptions, Locker, Ttl, diagnostics};

const CANARY: &str = "canary-key-4711";

#[derive(Debug)]
struct EventsAsText(Arc<Mutex<String>>);

impl EventSink for EventsAsText {
    fn is_inline(&self) -> bool {
        true
    }

    fn operation(&self, event: &LockEvent) {
        writeln!(self.0.lock().expect("no panic"), "{event:?}").expect("writing to a string");
    }

    fn engine(&self, event: &syncguard::telemetry::EngineEvent) {
        writeln!(self.0.lock().expect("no panic"), "{event:?}").expect("writing to a string");
    }
}

#[tokio::test(start_paused = true)]
async fn neither_key_nor_lock_id_is_shown_anywhere() {
    let log = Log::default();
    let _guard = tracing::subscriber::set_default(log.clone());
    let mut seen = String::new();
    let mut ids: Vec<LockId> = Vec::new();

    // Bad input.
    let errors = [
        Key::new(format!("{CANARY}\0")).expect_err("NUL"),
        Key::new(CANARY.repeat(100)).expect_err("too long"),
        LockId::parse(CANARY).expect_err("not a lock id"),
        CANARY.parse::<syncguard::Fence>().expect_err("not a fence"),
    ];
    for error in &errors {
        seen.push_str(&shown(error));
    }

    // Every way an operation can fail, and everything that is logged about it.
    let codes = [
        ErrorCode::ServiceUnavailable,
        ErrorCode::AuthFailed,
        ErrorCode::InvalidArgument,
        ErrorCode::RateLimited,
        ErrorCode::NetworkTimeout,
        ErrorCode::Internal,
    ];
    for code in codes {
        let backend = Faulty::new();
        let options = LockOptions::default().ttl(ttl_ms(300)).timeout(ms(100)).renew();
        let locker = locker(&backend, options);
        backend.fail_next(Call::Acquire, Fault::LosesReply(code));
        seen.push_str(&shown(&locker.lock(CANARY).await.expect_err("made to fail")));
        tokio::time::sleep(ms(3_000)).await;

        let guard = locker.lock(CANARY).await.expect("free");
        ids.push(guard.lock_id());
        seen.push_str(&shown(&locker.lock(CANARY).await.expect_err("held")));
        backend.fail_always(Call::Extend, Some(Fault::Fails(code)));
        if let Err(error) = guard.extend(Ttl::DEFAULT).await {
            seen.push_str(&shown(&error));
        }
        backend.fail_next(Call::Release, Fault::Fails(code));
        seen.push_str(&shown(&guard.release().await.expect_err("made to fail")));
        write!(seen, "{guard:?} {locker:?} {:?}", guard.handle()).expect("writing to a string");
        backend.fail_always(Call::Release, Some(Fault::Fails(code)));
        drop(guard); // logged, because there is no callback
        ids.extend(backend.acquire_ids());
        drop(locker.shutdown().await);
    }

    // A lost lock, a fence near its end, and events of every kind.
    let events = Arc::new(Mutex::new(String::new()));
    for sink in
        [Arc::new(EventsAsText(Arc::clone(&events))) as Arc<dyn EventSink>, Arc::new(TracingSink)]
    {
        let layer = TelemetryLayer::new(Arc::clone(&sink)).include_raw(true);
        let backend = layer.layer(Faulty::new());
        let options = LockOptions::default().ttl(ttl_ms(300)).timeout(ms(100));
        let builder = Locker::builder(backend).telemetry(sink).options(options);
        let locker =
            builder.clock(syncguard::testing::LocalClock::Tokio).build().expect("in a runtime");
        let guard = locker.lock(CANARY).await.expect("free");
        ids.push(guard.lock_id());
        guard.lost().await;
        let key = Key::new(CANARY).expect("valid");
        let info = diagnostics::get_by_key_raw(locker.backend(), &key).await.expect("works");
        write!(seen, "{info:?}").expect("writing to a string");
        let request = AcquireRequest::new(key, Ttl::DEFAULT).expect("randomness");
        ids.push(request.lock_id());
        write!(seen, "{request:?} {:?}", ReleaseRequest::undo(&request)).expect("writing");
        drop(locker.backend().acquire(&request).await);
        drop(guard);
        locker.shutdown().await.expect("released");
    }
    seen.push_str(&events.lock().expect("no panic"));

    let logged = log.take();
    assert!(logged.contains("message=lost "), "the log was written: {logged}");
    assert!(logged.contains("was not released"), "the log was written: {logged}");
    let everything = seen + &logged;
    assert!(!everything.contains(CANARY), "{everything}");
    assert!(!ids.is_empty());
    for id in ids {
        assert!(!everything.contains(id.expose()), "a lock id was shown");
    }
}
