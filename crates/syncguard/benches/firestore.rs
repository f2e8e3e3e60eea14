//! Compares the Firestore backend with the same requests by a bare client, on an emulator.
//!
//! `cargo xtask bench firestore`

#![allow(clippy::unwrap_used, clippy::cast_precision_loss, reason = "a program, not a library")]

mod contention;
mod support;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use googleapis_tonic_google_firestore_v1::google::firestore::v1 as api;
use support::{Demand, Report, median};
use syncguard::backend::ReleaseRequest;
use syncguard::firestore::FirestoreConfig;
use syncguard::firestore::tonic::body::Body;
use syncguard::firestore::tonic::codegen::{Service, http};
use syncguard::firestore::tonic::transport::{Channel, Endpoint, Error, channel};
use syncguard::{FirestoreBackend, Key, LockBackend, LockOptions, Locker, Ttl};
use test_support::FirestoreEmulator;

use api::batch_get_documents_response::Result as Found;
use api::firestore_client::FirestoreClient;
use api::precondition::ConditionType;
use api::value::ValueType;
use api::write::Operation;

const ROUNDS: usize = 9;
const SLICE: Duration = Duration::from_secs(1);

fn main() {
    if contention::is_child() {
        return;
    }
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let mut report = Report::default();
    let runtime = contention::runtime();
    runtime.block_on(requests(&mut report, &emulator));
    runtime.block_on(uncontended(&mut report, &emulator));
    let demands = [Demand::AtLeast(200.0), Demand::AtMost(1000.0)];
    runtime.block_on(contention::tasks(&mut report, &emulator.url(), 8, demands));
    let demands = [Demand::AtLeast(50.0), Demand::AtMost(50.0), Demand::AtMost(2000.0)];
    contention::processes(&mut report, &emulator.url(), 4, 2, demands);
    report.finish("firestore");
}

/// A channel that counts requests.
#[derive(Clone)]
struct Counting {
    inner: Channel,
    count: Arc<AtomicU32>,
}

impl Service<http::Request<Body>> for Counting {
    type Response = http::Response<Body>;
    type Error = Error;
    type Future = channel::ResponseFuture;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.inner.call(request)
    }
}

fn channel(emulator: &FirestoreEmulator) -> Channel {
    let endpoint = Endpoint::from_shared(format!("http://{}", emulator.host())).unwrap();
    endpoint.tcp_nodelay(true).connect_lazy()
}

fn config(emulator: &FirestoreEmulator) -> FirestoreConfig {
    FirestoreConfig::new("bench").emulator(emulator.host())
}

/// Counts the requests of each operation.
async fn requests(report: &mut Report, emulator: &FirestoreEmulator) {
    let count = Arc::new(AtomicU32::new(0));
    let counting = Counting { inner: channel(emulator), count: Arc::clone(&count) };
    let backend = FirestoreBackend::connect(config(emulator).channel(counting)).await.unwrap();
    let locker = Locker::new(backend.clone()).unwrap();
    let mut check = |name: &str, most: f64| {
        let seen = f64::from(count.swap(0, Ordering::Relaxed));
        report.check(format!("requests, {name}"), seen, "", Demand::AtMost(most));
    };
    check("connect", 2.0);
    let guard = locker.lock("counted").await.unwrap();
    check("acquire", 2.0);
    drop(guard.extend(Ttl::DEFAULT).await.unwrap());
    check("extend by its guard", 1.0);
    assert!(backend.is_locked(&Key::new("counted").unwrap()).await.unwrap());
    check("is_locked", 1.0);
    guard.release().await.unwrap();
    check("release by its guard", 1.0);
    let guard = locker.lock("counted").await.unwrap();
    let (lock_id, _) = (guard.lock_id(), guard.detach());
    check("acquire", 2.0);
    assert!(backend.lookup_id(&lock_id).await.unwrap().is_some());
    check("lookup by id", 1.0);
    backend.release(&ReleaseRequest::new(lock_id)).await.unwrap();
    check("release by id", 2.0);
}

/// A bare client that sends the requests of a cycle and does nothing else.
#[derive(Clone)]
struct Bare {
    client: FirestoreClient<Channel>,
    fence: Arc<AtomicU32>,
}

const DATABASE: &str = "projects/bench/databases/(default)";

fn write(operation: Operation, condition: ConditionType) -> api::Write {
    api::Write {
        operation: Some(operation),
        current_document: Some(api::Precondition { condition_type: Some(condition) }),
        ..Default::default()
    }
}

fn set(name: String, fields: [(&str, ValueType); 5], found: Option<&api::Document>) -> api::Write {
    let condition = match found.and_then(|found| found.update_time) {
        Some(version) => ConditionType::UpdateTime(version),
        None => ConditionType::Exists(false),
    };
    let value = |value| api::Value { value_type: Some(value) };
    let fields = fields.into_iter().map(|(name, field)| (name.to_owned(), value(field)));
    let document = api::Document { name, fields: fields.collect(), ..Default::default() };
    write(Operation::Update(document), condition)
}

impl Bare {
    async fn commit(&mut self, writes: Vec<api::Write>) -> Vec<api::WriteResult> {
        let request =
            api::CommitRequest { database: DATABASE.to_owned(), writes, ..Default::default() };
        self.client.commit(request).await.unwrap().into_inner().write_results
    }

    async fn cycle(&mut self, key: &str) {
        let lock = format!("{DATABASE}/documents/locks/bare{key}");
        let counter = format!("{DATABASE}/documents/fence_counters/fence:bare{key}");
        let request = api::BatchGetDocumentsRequest {
            database: DATABASE.to_owned(),
            documents: vec![lock.clone(), counter.clone()],
            ..Default::default()
        };
        let mut answers = self.client.batch_get_documents(request).await.unwrap().into_inner();
        let mut found = HashMap::new();
        while let Some(answer) = answers.message().await.unwrap() {
            if let Some(Found::Found(document)) = answer.result {
                found.insert(document.name.clone(), document);
            }
        }
        let text = |text: &str| ValueType::StringValue(text.to_owned());
        // The number grows, as ours does, because a write that changes nothing is cheaper.
        let fence = self.fence.fetch_add(1, Ordering::Relaxed);
        let fields = || {
            [
                ("lockId", text("AAAAAAAAAAAAAAAAAAAAAA")),
                ("expiresAtMs", ValueType::IntegerValue(1)),
                ("acquiredAtMs", ValueType::IntegerValue(1)),
                ("key", text(key)),
                ("fence", text(&format!("{fence:015}"))),
            ]
        };
        let writes = vec![
            set(counter.clone(), fields(), found.get(&counter)),
            set(lock.clone(), fields(), found.get(&lock)),
        ];
        let written = self.commit(writes).await;
        let version = ConditionType::UpdateTime(written[1].update_time.unwrap());
        self.commit(vec![write(Operation::Delete(lock), version)]).await;
    }

    async fn cycles(&self, tasks: usize) -> f64 {
        contention::cycles(tasks, SLICE, |_task| {
            let bare = self.clone();
            move |key: String| {
                let mut bare = bare.clone();
                async move { bare.cycle(&key).await }
            }
        })
        .await
    }
}

async fn uncontended(report: &mut Report, emulator: &FirestoreEmulator) {
    let bare = Bare { client: FirestoreClient::new(channel(emulator)), fence: Arc::default() };
    let backend = FirestoreBackend::connect(config(emulator)).await.unwrap();
    let options = LockOptions::default().wait_forever();
    let locker = Locker::builder(backend).options(options).build().unwrap();
    let (mut limits, mut singles, mut many, mut many_limits) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        limits.push(bare.cycles(1).await);
        singles.push(contention::lock_cycles(&locker, 1, SLICE).await);
        many.push(contention::lock_cycles(&locker, 16, SLICE).await);
        many_limits.push(bare.cycles(16).await);
    }
    let ratio = |these: &[f64], those: &[f64]| {
        median(these.iter().zip(those).map(|(this, that)| this / that).collect())
    };
    let (single, spread) = (ratio(&singles, &limits), ratio(&many, &singles));
    let many_single = ratio(&many, &many_limits);
    report.info("1 task, bare requests", median(limits), "cycles/s");
    report.info("1 task, ours", median(singles), "cycles/s");
    report.check("1 task, ours / bare", single, "x", Demand::AtLeast(0.8));
    report.info("16 tasks, bare requests", median(many_limits), "cycles/s");
    report.info("16 tasks, ours", median(many), "cycles/s");
    report.info("16 tasks, ours / bare", many_single, "x");
    report.check("16 tasks / 1 task", spread, "x", Demand::AtLeast(2.0));
}
