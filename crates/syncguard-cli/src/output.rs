//! Prints data to standard output and messages to standard error.
//!
//! External text (keys, paths, messages of servers) may contain characters that move the cursor or
//! change the direction of text. This module, and no other, escapes them; it never drops any.

use std::borrow::Cow;
use std::fmt;
use std::io::{ErrorKind, IsTerminal, Write};
use std::time::{Duration, SystemTime};

use anstyle::{AnsiColor, Style};
use rustix::fs::OFlags;
use serde::Serialize;
use syncguard::{HolderInfo, Timestamp};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;

use crate::args::{Format, Global};
use crate::event::Event;
use crate::exit::{FAILED, Failure};

const PROBLEM: Style = AnsiColor::Red.on_default().bold();
const HINT: Style = AnsiColor::Cyan.on_default();
pub(crate) const GOOD: Style = AnsiColor::Green.on_default();
pub(crate) const WARNING: Style = AnsiColor::Yellow.on_default();
pub(crate) const BAD: Style = AnsiColor::Red.on_default();

/// The output format and verbosity.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output {
    format: Format,
    is_quiet: bool,
    verbosity: u8,
}

impl Output {
    pub(crate) fn new(global: &Global) -> Self {
        Self { format: global.format, is_quiet: global.quiet, verbosity: global.verbose }
    }

    /// Prints data as JSON or text. In the text, the caller makes external text [`printable`].
    ///
    /// Ignores a closed pipe; `acquire` uses [`Self::receipt`], which does not.
    pub(crate) fn data<T: Serialize>(
        self,
        data: &T,
        text: impl FnOnce() -> String,
    ) -> Result<(), Failure> {
        match self.write(data, text) {
            Err(cause) if cause.kind() != ErrorKind::BrokenPipe => Err(unwritable(&cause)),
            _ => Ok(()),
        }
    }

    /// Prints data that must arrive, and fails otherwise.
    pub(crate) fn receipt<T: Serialize>(
        self,
        data: &T,
        text: impl FnOnce() -> String,
    ) -> Result<(), Failure> {
        self.write(data, text).map_err(|cause| unwritable(&cause))
    }

    /// Prints one of many data. Returns `false` when the reader has closed the pipe.
    pub(crate) fn stream<T: Serialize>(
        self,
        data: &T,
        text: impl FnOnce() -> String,
    ) -> Result<bool, Failure> {
        match self.write(data, text) {
            Ok(()) => Ok(true),
            Err(cause) if cause.kind() == ErrorKind::BrokenPipe => Ok(false),
            Err(cause) => Err(unwritable(&cause)),
        }
    }

    fn write<T: Serialize>(self, data: &T, text: impl FnOnce() -> String) -> std::io::Result<()> {
        match self.format {
            Format::Json => {
                let mut stdout = std::io::stdout().lock();
                writeln!(stdout, "{}", json(data))?;
                stdout.flush()
            }
            Format::Text => {
                let mut stdout = anstream::stdout().lock();
                stdout.write_all(text().as_bytes())?;
                stdout.flush()
            }
        }
    }

    /// Prints a message, unless `--quiet` is set.
    pub(crate) fn note(self, text: &str) {
        if !self.is_quiet {
            self.print_note(text);
        }
    }

    /// Prints a message even with `--quiet`.
    pub(crate) fn print_note(self, text: &str) {
        self.print(&Event::Note { message: text }, Style::new());
    }

    /// Prints an event, if [`Self::shows_events`].
    pub(crate) fn event(self, event: &Event<'_>) {
        if self.shows_events() {
            self.print(event, Style::new());
        }
    }

    /// Returns whether events are printed: as JSON always, as text with `-v`, never with `--quiet`.
    pub(crate) fn shows_events(self) -> bool {
        !self.is_quiet && (self.verbosity > 0 || self.format == Format::Json)
    }

    /// Reports that a wait continues.
    pub(crate) fn still_waiting(self, event: &Event<'_>) {
        if !self.is_quiet {
            self.print(event, Style::new());
        }
    }

    /// Prints a failure, even with `--quiet`.
    pub(crate) fn failure(self, failure: &Failure) {
        let hint = failure.hint.as_deref();
        let event = Event::Error { message: &failure.message, hint, exit_code: failure.code };
        self.print(&event, PROBLEM);
        if let Some(hint) = hint
            && self.format == Format::Text
        {
            self.print(&Event::Note { message: hint }, HINT);
        }
    }

    fn print(self, event: &Event<'_>, style: Style) {
        // Ignore a closed standard error.
        match self.format {
            Format::Json => drop(writeln!(std::io::stderr().lock(), "{}", json(event))),
            Format::Text => {
                let text = event.text();
                let text = shown(&text);
                let mut stderr = anstream::stderr().lock();
                drop(writeln!(stderr, "syncguard: {style}{text}{style:#}"));
            }
        }
    }

    /// Returns whether a progress line can be shown.
    pub(crate) fn is_live(self) -> bool {
        let is_dumb = std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb");
        // Events and log messages would overwrite the line.
        !self.is_quiet && !self.shows_events() && !is_dumb && std::io::stderr().is_terminal()
    }

    /// Prints log messages of the library, as many as the verbosity asks for.
    pub(crate) fn log(self) {
        let level = match self.verbosity {
            // Always warn about a SQLite file on which locks do not work.
            0 if !self.is_quiet => LevelFilter::WARN,
            0 => return,
            1 => LevelFilter::INFO,
            _ => LevelFilter::DEBUG,
        };
        let mut shown = Targets::new().with_target("syncguard::backends::sqlite", level);
        if self.verbosity > 0 {
            shown = shown.with_default(level);
        }
        let lines = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(std::io::sink);
        let lines = lines.event_format(LogLine(self)).with_filter(shown);
        tracing_subscriber::registry().with(lines).init();
    }
}

/// Formats a log message like every other message.
struct LogLine(Output);

impl<S, N> FormatEvent<S, N> for LogLine
where
    S: tracing::Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        _writer: Writer<'_>,
        event: &tracing::Event<'_>,
    ) -> fmt::Result {
        let mut message = String::new();
        context.format_fields(Writer::new(&mut message), event)?;
        let level = match *event.metadata().level() {
            tracing::Level::ERROR => "error",
            tracing::Level::WARN => "warning",
            tracing::Level::INFO => "info",
            tracing::Level::DEBUG => "debug",
            tracing::Level::TRACE => "trace",
        };
        self.0.print(&Event::Log { level, message: &message }, Style::new());
        Ok(())
    }
}

/// Fails if standard output was closed when this process started (`>&-`).
///
/// Rust opens `/dev/null` for reading and writing in its place, so writing to it would succeed. A
/// shell's `>/dev/null` opens it for writing only.
pub(crate) fn check_is_open() -> Result<(), Failure> {
    let stdout = std::io::stdout();
    let is_replaced = || {
        let flags = rustix::fs::fcntl_getfl(&stdout)?;
        let is_null = rustix::fs::fstat(&stdout)?.st_rdev == rustix::fs::stat("/dev/null")?.st_rdev;
        Ok::<_, rustix::io::Errno>(is_null && flags.contains(OFlags::RDWR))
    };
    match is_replaced() {
        Ok(false) => Ok(()),
        Ok(true) => Err(unwritable(&"it is closed")),
        Err(cause) => Err(unwritable(&cause)),
    }
}

fn unwritable(cause: &dyn fmt::Display) -> Failure {
    Failure::new(FAILED, format!("cannot write to standard output: {cause}"))
}

/// Returns one line of JSON in which every character that a terminal would act on is escaped.
fn json<T: Serialize>(data: &T) -> String {
    use std::fmt::Write;
    let raw = serde_json::to_string(data).unwrap_or_default();
    let mut shown = String::with_capacity(raw.len());
    for letter in raw.chars() {
        if is_unprintable(letter) {
            for unit in letter.encode_utf16(&mut [0; 2]) {
                write!(shown, "\\u{unit:04x}").unwrap_or_default();
            }
        } else {
            shown.push(letter);
        }
    }
    shown
}

/// Formats a duration, rounded down to seconds, or to milliseconds below one second.
pub(crate) fn duration(duration: Duration) -> String {
    let rounded = match duration.as_secs() {
        0 => Duration::from_millis(u64::from(duration.subsec_millis())),
        seconds => Duration::from_secs(seconds),
    };
    humantime::format_duration(rounded).to_string()
}

/// Formats a time in UTC.
pub(crate) fn time(time: Timestamp) -> String {
    /// The last millisecond of the year 9999; `humantime` formats no later time.
    const LAST_MS: u64 = 253_402_300_799_999;
    if time.as_millis() > LAST_MS {
        return "after the year 9999".to_owned();
    }
    let time = SystemTime::UNIX_EPOCH + Duration::from_millis(time.as_millis());
    humantime::format_rfc3339_seconds(time).to_string()
}

/// Returns whether this is a control, bidirectional or zero-width character.
fn is_unprintable(letter: char) -> bool {
    letter.is_control()
        || matches!(
            letter,
            '\u{ad}'
                | '\u{61c}'
                | '\u{180e}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e007f}'
        )
}

fn push_escaped(text: &mut String, letter: char) {
    match letter {
        '\n' => text.push_str("\\n"),
        '\r' => text.push_str("\\r"),
        '\t' => text.push_str("\\t"),
        _ => text.extend(letter.escape_unicode()),
    }
}

/// Escapes external text, so that it stays on one line and can be read back.
pub(crate) fn printable(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '\\' => escaped.push_str("\\\\"),
            _ if is_unprintable(letter) => push_escaped(&mut escaped, letter),
            _ => escaped.push(letter),
        }
    }
    escaped
}

/// Formats who holds a lock: `web-3, pid 4211, ./deploy.sh`.
pub(crate) fn holder(holder: &HolderInfo) -> String {
    let name = holder.label().unwrap_or(holder.program());
    format!("{}, pid {}, {}", printable(holder.host()), holder.pid(), printable(name))
}

/// Quotes a key for a message.
pub(crate) fn quoted(key: &str) -> String {
    format!("'{}'", printable(key))
}

/// Escapes the characters that a terminal would act on, except newlines. Keeps existing escapes.
pub(crate) fn shown(message: &str) -> Cow<'_, str> {
    if !message.contains(is_unprintable) {
        return Cow::Borrowed(message);
    }
    let mut escaped = String::with_capacity(message.len());
    for letter in message.chars() {
        if is_unprintable(letter) && letter != '\n' {
            push_escaped(&mut escaped, letter);
        } else {
            escaped.push(letter);
        }
    }
    Cow::Owned(escaped)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_can_be_shown() {
        for (ms, shown) in [
            (0, "1970-01-01T00:00:00Z"),
            (253_402_300_799_999, "9999-12-31T23:59:59Z"),
            (253_402_300_800_000, "after the year 9999"),
            (u64::MAX, "after the year 9999"),
        ] {
            assert_eq!(time(Timestamp::from_millis(ms)), shown);
        }
    }
}
