//! Data on standard output, messages on standard error.

use std::io::{IsTerminal, Write};
use std::time::{Duration, SystemTime};

use anstyle::{AnsiColor, Style};
use serde::Serialize;
use syncguard::Timestamp;

use crate::args::{Format, Global};
use crate::exit::Failure;

const PROBLEM: Style = AnsiColor::Red.on_default().bold();
const HINT: Style = AnsiColor::Cyan.on_default();
pub(crate) const GOOD: Style = AnsiColor::Green.on_default();
pub(crate) const WARNING: Style = AnsiColor::Yellow.on_default();

/// Where things are said, and how much.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output {
    format: Format,
    is_quiet: bool,
}

impl Output {
    pub(crate) fn new(global: &Global) -> Self {
        Self { format: global.format, is_quiet: global.quiet }
    }

    /// Prints data: as JSON, or as the text for people.
    pub(crate) fn data<T: Serialize>(self, data: &T, text: impl FnOnce() -> String) {
        let shown = match self.format {
            Format::Json => serde_json::to_string(data).unwrap_or_default() + "\n",
            Format::Text => text(),
        };
        // Whoever reads may have seen enough.
        drop(anstream::stdout().lock().write_all(shown.as_bytes()));
    }

    /// Says something to the person at the terminal or in the log.
    pub(crate) fn note(self, text: &str) {
        if !self.is_quiet {
            Self::say(text);
        }
    }

    /// Says something that must be heard.
    pub(crate) fn say(text: &str) {
        // A closed standard error is no reason to fail.
        drop(writeln!(anstream::stderr().lock(), "syncguard: {text}"));
    }

    /// Says what went wrong, whatever was asked for.
    pub(crate) fn failure(failure: &Failure) {
        Self::say(&format!("{PROBLEM}{failure}{PROBLEM:#}"));
        if let Some(hint) = &failure.hint {
            Self::say(&format!("{HINT}{hint}{HINT:#}"));
        }
    }

    /// Whether something that moves can be shown.
    pub(crate) fn is_live(self) -> bool {
        !self.is_quiet && std::io::stderr().is_terminal()
    }
}

/// A duration as people write it, to the second, or to the millisecond below one.
pub(crate) fn duration(duration: Duration) -> String {
    let rounded = match duration.as_secs() {
        0 => Duration::from_millis(u64::from(duration.subsec_millis())),
        seconds => Duration::from_secs(seconds),
    };
    humantime::format_duration(rounded).to_string()
}

/// A time as a clock on the wall shows it, in UTC.
pub(crate) fn time(time: Timestamp) -> String {
    let time = SystemTime::UNIX_EPOCH + Duration::from_millis(time.as_millis());
    humantime::format_rfc3339_seconds(time).to_string()
}

/// A text whose control characters do not reach the terminal.
pub(crate) fn printable(text: &str) -> String {
    let show = |letter: char| {
        if letter.is_control() { letter.escape_debug().to_string() } else { letter.to_string() }
    };
    text.chars().map(show).collect()
}
