//! Between those who wait and the task that owns a backend's connection for wake-ups.

use tokio::sync::{mpsc, oneshot};

use super::wake::{WakeHub, WakeUps};
use crate::common::key::Key;

/// Takes orders of those who wait, for backends that hear of releases from a server.
#[derive(Debug)]
pub(crate) struct WakeDesk {
    hub: WakeHub,
    orders: mpsc::UnboundedSender<Order>,
}

/// What the task is told. It follows orders one after the other, so that a subscription and its end
/// cannot overtake each other.
#[derive(Debug)]
pub(crate) enum Order {
    /// Hear of this key, and say when nothing can be missed any more, or that it cannot be.
    Subscribe { key: Key, confirmed: oneshot::Sender<bool> },
    /// Nobody waits for this key any more, unless somebody has come since.
    Idle { key: Key },
}

impl WakeDesk {
    /// A desk, and where its orders come out. They end with the desk.
    pub(crate) fn open() -> (Self, mpsc::UnboundedReceiver<Order>) {
        let (orders, received) = mpsc::unbounded_channel();
        let idle = orders.downgrade();
        let hub = WakeHub::with_idle_hook(move |key: &Key| {
            if let Some(orders) = idle.upgrade() {
                // The task ends only after the backend.
                drop(orders.send(Order::Idle { key: key.clone() }));
            }
        });
        (Self { hub, orders }, received)
    }

    /// Where the task wakes who waits.
    pub(crate) fn hub(&self) -> &WakeHub {
        &self.hub
    }

    /// Subscribes to the wake-ups of a key; answers when nothing can be missed any more.
    pub(crate) async fn subscribe(&self, key: &Key) -> Option<WakeUps> {
        let wake_ups = self.hub.subscribe(key);
        let (confirmed, confirmation) = oneshot::channel();
        self.orders.send(Order::Subscribe { key: key.clone(), confirmed }).ok()?;
        confirmation.await.unwrap_or(false).then_some(wake_ups)
    }
}
