//! Connects waiters with the task that owns a backend's connection for notifications.

use tokio::sync::{mpsc, oneshot};

use super::notifier::{Notifier, Subscription};
use crate::common::key::Key;

/// What a subscription is interested in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Interest {
    /// Releases, for those who wait for the lock.
    Release,
    /// Changes of hands, for those who hold or watch it.
    Change,
}

/// Sends the commands of waiters to the task, for backends whose server sends notifications.
#[derive(Debug)]
pub(crate) struct ListenerHandle {
    notifiers: Notifiers,
    commands: mpsc::UnboundedSender<Command>,
}

/// The notifiers through which the task wakes subscribers.
#[derive(Clone, Debug)]
pub(crate) struct Notifiers {
    pub(crate) releases: Notifier,
    pub(crate) changes: Notifier,
}

impl Notifiers {
    pub(crate) fn of(&self, interest: Interest) -> &Notifier {
        match interest {
            Interest::Release => &self.releases,
            Interest::Change => &self.changes,
        }
    }

    /// Sets whether notifications arrive.
    #[cfg(feature = "_listener")]
    pub(crate) fn set_working(&self, is_working: bool) {
        self.releases.set_working(is_working);
        self.changes.set_working(is_working);
    }
}

/// A command to the task. The task runs commands in order, so that a subscription and its end
/// cannot overtake each other.
#[derive(Debug)]
pub(crate) enum Command {
    /// Subscribe to this key. Confirm with `true` once no notification can be missed, or with
    /// `false` if the subscription failed.
    Subscribe {
        key: Key,
        #[cfg_attr(not(feature = "_listener"), expect(dead_code, reason = "Firestore has one"))]
        interest: Interest,
        confirmed: oneshot::Sender<bool>,
    },
    /// This key no longer has a subscriber, unless a new one has subscribed since.
    Idle {
        key: Key,
        #[cfg_attr(not(feature = "_listener"), expect(dead_code, reason = "Firestore has one"))]
        interest: Interest,
    },
}

impl ListenerHandle {
    /// Creates a handle and the receiver of its commands. The channel closes when the handle is
    /// dropped.
    pub(crate) fn open() -> (Self, mpsc::UnboundedReceiver<Command>) {
        let (commands, received) = mpsc::unbounded_channel();
        let notifier = |interest: Interest| {
            let idle = commands.downgrade();
            Notifier::with_idle_hook(move |key: &Key| {
                if let Some(commands) = idle.upgrade() {
                    // This fails only if the task has ended; then there is nothing to unsubscribe.
                    drop(commands.send(Command::Idle { key: key.clone(), interest }));
                }
            })
        };
        let notifiers = Notifiers {
            releases: notifier(Interest::Release),
            changes: notifier(Interest::Change),
        };
        (Self { notifiers, commands }, received)
    }

    pub(crate) fn notifiers(&self) -> &Notifiers {
        &self.notifiers
    }

    /// Subscribes to the notifications of a key. When it returns, no later notification is missed.
    pub(crate) async fn subscribe(&self, key: &Key, interest: Interest) -> Option<Subscription> {
        let subscription = self.notifiers.of(interest).subscribe(key);
        let (confirmed, confirmation) = oneshot::channel();
        let command = Command::Subscribe { key: key.clone(), interest, confirmed };
        self.commands.send(command).ok()?;
        confirmation.await.unwrap_or(false).then_some(subscription)
    }
}
