//! Connects waiters with the task that owns a backend's connection for notifications.

use tokio::sync::{mpsc, oneshot};

use super::notifier::{Notifier, Subscription};
use crate::common::key::Key;

/// Sends the commands of waiters to the task, for backends whose server sends notifications.
#[derive(Debug)]
pub(crate) struct ListenerHandle {
    notifier: Notifier,
    commands: mpsc::UnboundedSender<Command>,
}

/// A command to the task. The task runs commands in order, so that a subscription and its end
/// cannot overtake each other.
#[derive(Debug)]
pub(crate) enum Command {
    /// Subscribe to this key. Confirm with `true` once no notification can be missed, or with
    /// `false` if the subscription failed.
    Subscribe { key: Key, confirmed: oneshot::Sender<bool> },
    /// This key no longer has a waiter, unless a new one has subscribed since.
    Idle { key: Key },
}

impl ListenerHandle {
    /// Creates a handle and the receiver of its commands. The channel closes when the handle is
    /// dropped.
    pub(crate) fn open() -> (Self, mpsc::UnboundedReceiver<Command>) {
        let (commands, received) = mpsc::unbounded_channel();
        let idle = commands.downgrade();
        let notifier = Notifier::with_idle_hook(move |key: &Key| {
            if let Some(commands) = idle.upgrade() {
                // This fails only if the task has ended; then there is nothing to unsubscribe.
                drop(commands.send(Command::Idle { key: key.clone() }));
            }
        });
        (Self { notifier, commands }, received)
    }

    /// Returns the notifier through which the task wakes waiters.
    pub(crate) fn notifier(&self) -> &Notifier {
        &self.notifier
    }

    /// Subscribes to the notifications of a key. When it returns, no later notification is missed.
    pub(crate) async fn subscribe(&self, key: &Key) -> Option<Subscription> {
        let subscription = self.notifier.subscribe(key);
        let (confirmed, confirmation) = oneshot::channel();
        self.commands.send(Command::Subscribe { key: key.clone(), confirmed }).ok()?;
        confirmation.await.unwrap_or(false).then_some(subscription)
    }
}
