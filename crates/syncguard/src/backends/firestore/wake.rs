//! Wake-ups: one stream per backend on which Firestore tells of changes, while somebody waits.

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
use crate::contract::wake::{WakeHub, WakeUps};
use crate::contract::wake_desk::{Order, WakeDesk};
use api::listen_request::TargetChange as Wish;
use api::listen_response::ResponseType as News;
use api::target::{DocumentsTarget, TargetType};
use api::target_change::TargetChangeType;

/// Subscribes.
pub(super) struct Waker {
    desk: WakeDesk,
    patience: Duration,
}

impl Waker {
    /// Starts the task that owns the stream. It ends with the backend.
    pub(super) fn start(requests: Arc<Requests>, names: Names) -> Self {
        let (desk, orders) = WakeDesk::open();
        let patience = requests.patience();
        let listener = Listener {
            hub: desk.hub().clone(),
            requests,
            names,
            targets: HashMap::new(),
            last_id: 0,
            stream: None,
            failures: 0,
            reopen_at: Instant::now(),
            has_warned: false,
        };
        tokio::spawn(listener.serve(orders));
        Self { desk, patience }
    }

    /// Watches the lock of a key; answers when nothing can be missed any more.
    pub(super) async fn subscribe(&self, key: &Key) -> Option<WakeUps> {
        tokio::time::timeout(self.patience, self.desk.subscribe(key)).await.ok().flatten()
    }
}

/// The task that owns the stream.
struct Listener {
    hub: WakeHub,
    requests: Arc<Requests>,
    names: Names,
    /// What is watched, by the name of the lock's document.
    targets: HashMap<String, Target>,
    last_id: i32,
    stream: Option<Stream>,
    /// How many streams in a row have failed before they were of use.
    failures: u32,
    reopen_at: Instant,
    has_warned: bool,
}

/// A document that is watched.
struct Target {
    id: i32,
    key: Key,
    /// All changes up to now have been told.
    is_current: bool,
    /// Who wants to know when that is so.
    waiting: Vec<oneshot::Sender<bool>>,
}

struct Stream {
    wishes: mpsc::UnboundedSender<api::ListenRequest>,
    news: Streaming<api::ListenResponse>,
    opened_at: Instant,
}

impl Listener {
    async fn serve(mut self, mut orders: mpsc::UnboundedReceiver<Order>) {
        let mut replacements = self.requests.replacements();
        loop {
            let is_missing = self.stream.is_none() && !self.targets.is_empty();
            tokio::select! {
                order = orders.recv() => match order {
                    None => return,
                    Some(Order::Subscribe { key, confirmed }) => self.watch(&key, confirmed),
                    Some(Order::Idle { key }) => {
                        self.leave(&key);
                        self.note_working();
                    }
                },
                news = next(&mut self.stream) => match news {
                    Some(news) if self.hear(&news) => {}
                    _ => self.lose(),
                },
                // The stream is on a channel that is no longer trusted.
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
                // A waiter that has gone needs no confirmation.
                confirmed.send(true).unwrap_or_default();
            } else {
                target.waiting.push(confirmed);
            }
            return;
        }
        self.last_id = self.last_id.checked_add(1).unwrap_or(1);
        let target = Target {
            id: self.last_id,
            key: key.clone(),
            is_current: false,
            waiting: vec![confirmed],
        };
        self.wish(add(&name, &target));
        self.targets.insert(name, target);
    }

    fn leave(&mut self, key: &Key) {
        if self.hub.is_awaited(key) {
            return;
        }
        let Ok([name, _]) = self.names.documents(key) else { return };
        if let Some(target) = self.targets.remove(&name) {
            self.wish(Wish::RemoveTarget(target.id));
        }
        if self.targets.is_empty() {
            self.stream = None;
        }
    }

    fn wish(&self, change: Wish) {
        if let Some(stream) = &self.stream {
            // A stream that has ended is noticed where its news are heard.
            drop(stream.wishes.send(self.requests.listen_request(change)));
        }
    }

    /// Opens the stream and asks for everything that is watched.
    async fn open(&mut self) -> bool {
        let (wishes, mut granted) = mpsc::unbounded_channel();
        for (name, target) in &mut self.targets {
            target.is_current = false;
            let wish = self.requests.listen_request(add(name, target));
            if wishes.send(wish).is_err() {
                return false;
            }
        }
        match self.requests.listen(poll_fn(move |context| granted.poll_recv(context))).await {
            Ok(news) => {
                self.stream = Some(Stream { wishes, news, opened_at: Instant::now() });
                true
            }
            Err(_cause) => false,
        }
    }

    /// Without the stream nothing is heard; until it is back, polling serves.
    fn lose(&mut self) {
        /// A stream that has lasted as long was of use; one that ends after a few messages was not.
        const STABLE: Duration = Duration::from_secs(10);
        let lost = self.stream.take();
        if lost.is_some_and(|stream: Stream| stream.opened_at.elapsed() >= STABLE) {
            self.failures = 0;
        }
        self.failures = self.failures.saturating_add(1);
        self.reopen_at = Instant::now() + reconnect_delay(self.failures);
        self.hub.set_working(false);
        for target in self.targets.values_mut() {
            target.is_current = false;
            for confirmed in target.waiting.drain(..) {
                confirmed.send(false).unwrap_or_default();
            }
        }
    }

    /// Hears one piece of news; `false` when the stream is of no use any more.
    fn hear(&mut self, news: &api::ListenResponse) -> bool {
        match &news.response_type {
            Some(News::DocumentDelete(gone)) => self.wake(&gone.document),
            Some(News::DocumentRemove(gone)) => self.wake(&gone.document),
            Some(News::Filter(filter)) => self.wake_target(filter.target_id),
            Some(News::TargetChange(change)) => match change.target_change_type() {
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

    /// Something may have been missed.
    fn wake_target(&self, id: i32) {
        if let Some(target) = self.targets.values().find(|target| target.id == id) {
            self.hub.wake(&target.key);
        }
    }

    fn wake(&self, name: &str) {
        if let Some(target) = self.targets.get(name) {
            self.hub.wake(&target.key);
        }
    }

    /// The server does not tell of these: who waits for them polls. None named is all.
    fn give_up(&mut self, ids: &[i32]) -> bool {
        if !self.has_warned {
            self.has_warned = true;
            tracing::warn!("firestore does not tell of some locks; who waits for them polls");
        }
        for target in self.targets.values_mut().filter(|target| ids.contains(&target.id)) {
            for confirmed in target.waiting.drain(..) {
                confirmed.send(false).unwrap_or_default();
            }
        }
        self.targets.retain(|_, target| !ids.contains(&target.id));
        !ids.is_empty()
    }

    /// Wake-ups work when all that is watched is current.
    fn note_working(&self) {
        if self.stream.is_some() && self.targets.values().all(|target| target.is_current) {
            self.hub.set_working(true);
        }
    }

    /// Nothing of these is missed from now on. None named is all.
    fn note_current(&mut self, ids: &[i32]) {
        let is_meant = |target: &&mut Target| ids.is_empty() || ids.contains(&target.id);
        for target in self.targets.values_mut().filter(is_meant) {
            target.is_current = true;
            for confirmed in target.waiting.drain(..) {
                confirmed.send(true).unwrap_or_default();
            }
        }
    }
}

/// The wish to hear of a document.
fn add(name: &str, target: &Target) -> Wish {
    let documents = DocumentsTarget { documents: vec![name.to_owned()] };
    Wish::AddTarget(api::Target {
        target_id: target.id,
        target_type: Some(TargetType::Documents(documents)),
        ..Default::default()
    })
}

/// The next piece of news; `None` when the stream has ended. Without a stream there is none.
async fn next(stream: &mut Option<Stream>) -> Option<api::ListenResponse> {
    match stream {
        Some(stream) => stream.news.message().await.ok().flatten(),
        None => std::future::pending().await,
    }
}
