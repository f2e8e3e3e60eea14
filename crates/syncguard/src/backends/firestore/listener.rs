//! Notifications: one stream per backend, on which Firestore reports changes while a task waits.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::poll_fn;
use googleapis_tonic_google_firestore_v1::google::firestore::v1 as api;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tonic::Streaming;

use super::names::Names;
use super::requests::Requests;
use crate::common::backoff::reconnect_delay;
use crate::common::key::Key;
use crate::contract::listener_handle::{Command, Interest, ListenerHandle};
use crate::contract::notifier::{Notifier, Subscription};
use api::listen_request::TargetChange;
use api::listen_response::ResponseType;
use api::target::{DocumentsTarget, TargetType};
use api::target_change::TargetChangeType;

/// The handle of the task that listens to Firestore.
pub(super) struct FirestoreListener {
    handle: ListenerHandle,
    timeout: Duration,
}

impl FirestoreListener {
    /// Starts the task that owns the stream. The task ends when the backend is dropped.
    pub(super) fn start(requests: Arc<Requests>, names: Names) -> Self {
        let (handle, commands) = ListenerHandle::open();
        let timeout = requests.timeout();
        let listener = ListenTask {
            notifier: handle.notifiers().releases.clone(),
            requests,
            names,
            targets: HashMap::new(),
            last_id: 0,
            stream: None,
            failures: 0,
            reopen_at: Instant::now(),
            has_warned: false,
        };
        tokio::spawn(listener.serve(commands));
        Self { handle, timeout }
    }

    /// Watches the lock of a key. Returns once no change can be missed, or `None` if it cannot be
    /// watched.
    pub(super) async fn subscribe(&self, key: &Key) -> Option<Subscription> {
        let subscribing = self.handle.subscribe(key, Interest::Release);
        tokio::time::timeout(self.timeout, subscribing).await.ok().flatten()
    }
}

/// The task that owns the stream.
struct ListenTask {
    notifier: Notifier,
    requests: Arc<Requests>,
    names: Names,
    /// The watched documents, by name.
    targets: HashMap<String, WatchedDocument>,
    last_id: i32,
    stream: Option<ListenStream>,
    /// The number of streams in a row that ended before they were stable.
    failures: u32,
    reopen_at: Instant,
    has_warned: bool,
}

/// A lock's document that is watched.
struct WatchedDocument {
    id: i32,
    key: Key,
    /// Whether the server has reported all changes up to now.
    is_current: bool,
    /// Subscribers to notify once the document is current.
    waiting: Vec<oneshot::Sender<bool>>,
}

struct ListenStream {
    requests_out: mpsc::UnboundedSender<api::ListenRequest>,
    responses: Streaming<api::ListenResponse>,
    opened_at: Instant,
}

impl ListenTask {
    async fn serve(mut self, mut commands: mpsc::UnboundedReceiver<Command>) {
        let mut replacements = self.requests.replacements();
        loop {
            let is_missing = self.stream.is_none() && !self.targets.is_empty();
            tokio::select! {
                command = commands.recv() => match command {
                    None => return,
                    Some(Command::Subscribe { key, confirmed, .. }) => self.watch(&key, confirmed),
                    Some(Command::Idle { key, .. }) => {
                        self.leave(&key);
                        self.note_working();
                    }
                },
                responses = next(&mut self.stream) => match responses {
                    Some(responses) if self.on_notification(&responses) => {}
                    _ => self.lose(),
                },
                // The channel of the stream was replaced.
                Ok(()) = replacements.changed() => if self.stream.is_some() {
                    self.lose();
                },
                () = tokio::time::sleep_until(self.reopen_at), if is_missing => {
                    if !self.open().await {
                        self.lose();
                    }
                }
            }
        }
    }

    fn watch(&mut self, key: &Key, confirmed: oneshot::Sender<bool>) {
        let Ok([name, _]) = self.names.documents(key) else { return };
        if let Some(target) = self.targets.get_mut(&name) {
            if target.is_current && self.stream.is_some() {
                // A waiter that was dropped needs no confirmation.
                confirmed.send(true).unwrap_or_default();
            } else {
                target.waiting.push(confirmed);
            }
            return;
        }
        self.last_id = self.last_id.checked_add(1).unwrap_or(1);
        let target = WatchedDocument {
            id: self.last_id,
            key: key.clone(),
            is_current: false,
            waiting: vec![confirmed],
        };
        self.change_target(add(&name, &target));
        self.targets.insert(name, target);
    }

    fn leave(&mut self, key: &Key) {
        if self.notifier.is_awaited(key) {
            return;
        }
        let Ok([name, _]) = self.names.documents(key) else { return };
        if let Some(target) = self.targets.remove(&name) {
            self.change_target(TargetChange::RemoveTarget(target.id));
        }
        if self.targets.is_empty() {
            self.stream = None;
        }
    }

    fn change_target(&self, change: TargetChange) {
        if let Some(stream) = &self.stream {
            // The task notices the end of the stream when it reads the next response.
            drop(stream.requests_out.send(self.requests.listen_request(change)));
        }
    }

    /// Opens the stream and watches all documents on it. Returns `false` if that fails.
    async fn open(&mut self) -> bool {
        let (requests_out, mut granted) = mpsc::unbounded_channel();
        for (name, target) in &mut self.targets {
            target.is_current = false;
            let change_target = self.requests.listen_request(add(name, target));
            if requests_out.send(change_target).is_err() {
                return false;
            }
        }
        match self.requests.listen(poll_fn(move |context| granted.poll_recv(context))).await {
            Ok(responses) => {
                self.stream =
                    Some(ListenStream { requests_out, responses, opened_at: Instant::now() });
                true
            }
            Err(_cause) => false,
        }
    }

    /// Drops the stream and schedules another. Waiters poll until it is open.
    fn lose(&mut self) {
        /// A stream that lasted this long resets the backoff; one that ended earlier does not.
        const STABLE: Duration = Duration::from_secs(10);
        let lost = self.stream.take();
        if lost.is_some_and(|stream: ListenStream| stream.opened_at.elapsed() >= STABLE) {
            self.failures = 0;
        }
        self.failures = self.failures.saturating_add(1);
        self.reopen_at = Instant::now() + reconnect_delay(self.failures);
        self.notifier.set_working(false);
        for target in self.targets.values_mut() {
            target.is_current = false;
            for confirmed in target.waiting.drain(..) {
                confirmed.send(false).unwrap_or_default();
            }
        }
    }

    /// Handles a response. Returns `false` if the stream can no longer be used.
    fn on_notification(&mut self, responses: &api::ListenResponse) -> bool {
        match &responses.response_type {
            Some(ResponseType::DocumentDelete(gone)) => self.wake(&gone.document),
            Some(ResponseType::DocumentRemove(gone)) => self.wake(&gone.document),
            Some(ResponseType::Filter(filter)) => self.wake_target(filter.target_id),
            Some(ResponseType::TargetChange(change)) => match change.target_change_type() {
                TargetChangeType::Current => {
                    self.note_current(&change.target_ids);
                    self.note_working();
                }
                TargetChangeType::Remove if change.cause.is_some() => {
                    return self.give_up(&change.target_ids);
                }
                _ => {}
            },
            _ => {}
        }
        true
    }

    /// Wakes the waiters of a target, because a change may have been missed.
    fn wake_target(&self, id: i32) {
        if let Some(target) = self.targets.values().find(|target| target.id == id) {
            self.notifier.notify(&target.key, None);
        }
    }

    fn wake(&self, name: &str) {
        if let Some(target) = self.targets.get(name) {
            self.notifier.notify(&target.key, None);
        }
    }

    /// Stops watching targets that the server removed; their waiters poll. Without ids, the server
    /// means all targets, and this returns `false`.
    fn give_up(&mut self, ids: &[i32]) -> bool {
        if !self.has_warned {
            self.has_warned = true;
            tracing::warn!("Firestore refused to watch some locks; their waiters poll instead");
        }
        for target in self.targets.values_mut().filter(|target| ids.contains(&target.id)) {
            for confirmed in target.waiting.drain(..) {
                confirmed.send(false).unwrap_or_default();
            }
        }
        self.targets.retain(|_, target| !ids.contains(&target.id));
        !ids.is_empty()
    }

    /// Reports that notifications work, if all watched documents are current.
    fn note_working(&self) {
        if self.stream.is_some() && self.targets.values().all(|target| target.is_current) {
            self.notifier.set_working(true);
        }
    }

    /// Marks targets as current: no change of theirs is missed from now on. Without ids, all are
    /// meant.
    fn note_current(&mut self, ids: &[i32]) {
        let is_meant = |target: &&mut WatchedDocument| ids.is_empty() || ids.contains(&target.id);
        for target in self.targets.values_mut().filter(is_meant) {
            target.is_current = true;
            for confirmed in target.waiting.drain(..) {
                confirmed.send(true).unwrap_or_default();
            }
        }
    }
}

/// Returns the change that watches a document.
fn add(name: &str, target: &WatchedDocument) -> TargetChange {
    let documents = DocumentsTarget { documents: vec![name.to_owned()] };
    TargetChange::AddTarget(api::Target {
        target_id: target.id,
        target_type: Some(TargetType::Documents(documents)),
        ..Default::default()
    })
}

/// Waits for the next response. Returns `None` when the stream has ended; without a stream, never
/// returns.
async fn next(stream: &mut Option<ListenStream>) -> Option<api::ListenResponse> {
    match stream {
        Some(stream) => stream.responses.message().await.ok().flatten(),
        None => std::future::pending().await,
    }
}
