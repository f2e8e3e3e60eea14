//! Events of a lock, as text and as JSON.

use std::time::Duration;

use serde::Serialize;
use syncguard::HolderInfo;

use crate::output;

/// An event or a message for standard error.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub(crate) enum Event<'a> {
    /// Another process holds the lock, and this one waits for it.
    Waiting {
        key: &'a str,
        waited_ms: u64,
        holder: Option<&'a HolderInfo>,
        held_ms: Option<u64>,
    },
    Acquired {
        key: &'a str,
        fence: String,
        waited_ms: u64,
    },
    Renewed {
        key: &'a str,
    },
    Released {
        key: &'a str,
    },
    /// A log message of the library.
    Log {
        level: &'static str,
        message: &'a str,
    },
    /// Another message.
    Note {
        message: &'a str,
    },
    /// The reason why the command failed.
    Error {
        message: &'a str,
        hint: Option<&'a str>,
        exit_code: u8,
    },
}

impl Event<'_> {
    /// Formats the event as one line of text.
    pub(crate) fn text(&self) -> String {
        let waited = |ms: &u64| output::duration(Duration::from_millis(*ms));
        match self {
            Self::Waiting { key, waited_ms, holder, held_ms } => {
                let key = output::printable(key);
                match (holder, held_ms) {
                    (Some(holder), Some(held)) => {
                        let (holder, held) = (output::holder(holder), waited(held));
                        format!("waiting for {key}: held by {holder}, for {held}")
                    }
                    _ => format!("waiting for {key} ({})", waited(waited_ms)),
                }
            }
            Self::Acquired { key, fence, waited_ms } => {
                let (key, waited) = (output::quoted(key), waited(waited_ms));
                format!("acquired {key} with fence {fence}, waited {waited}")
            }
            Self::Renewed { key } => format!("renewed {}", output::quoted(key)),
            Self::Released { key } => format!("released {}", output::quoted(key)),
            Self::Log { level, message } => format!("{level}: {message}"),
            Self::Note { message } | Self::Error { message, .. } => (*message).to_owned(),
        }
    }
}

/// Converts a duration to milliseconds for JSON.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
