//! Data on standard output, messages on standard error.
//!
//! Text that others have written (keys, paths, what a server says) may hold characters that move the
//! cursor or turn the direction of text around. They are escaped here, in one place, and never dropped.

use std::borrow::Cow;
use std::fmt;
use std::io::{ErrorKind, IsTerminal, Write};
use std::time::{Duration, SystemTime};

use anstyle::{AnsiColor, Style};
use serde::Serialize;
use syncguard::Timestamp;
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

/// Where things are said, and how much.
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

    /// Prints data: as JSON, or as the text for people, in which text of others is [`printable`].
    ///
    /// A reader that has seen enough is no failure; `acquire` uses [`Self::receipt`].
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

    /// Prints data that must arrive.
    pub(crate) fn receipt<T: Serialize>(
        self,
        data: &T,
        text: impl FnOnce() -> String,
    ) -> Result<(), Failure> {
        self.write(data, text).map_err(|cause| unwritable(&cause))
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

    /// Says something to the person at the terminal or in the log.
    pub(crate) fn note(self, text: &str) {
        if !self.is_quiet {
            self.say(text);
        }
    }

    /// Says something that must be heard.
    pub(crate) fn say(self, text: &str) {
        self.print(&Event::Note { message: text }, Style::new());
    }

    /// Tells an event: always as JSON, as text when it was asked for by `-v`.
    pub(crate) fn event(self, event: &Event<'_>) {
        if self.tells_events() {
            self.print(event, Style::new());
        }
    }

    /// Whether events are told.
    pub(crate) fn tells_events(self) -> bool {
        !self.is_quiet && (self.verbosity > 0 || self.format == Format::Json)
    }

    /// Tells that a wait goes on.
    pub(crate) fn still_waiting(self, event: &Event<'_>) {
        if !self.is_quiet {
            self.print(event, Style::new());
        }
    }

    /// Says what went wrong, whatever was asked for.
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
        // A closed standard error is no reason to fail.
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

    /// Whether a line that changes can be shown.
    pub(crate) fn is_live(self) -> bool {
        let is_dumb = std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb");
        // Events and logs would be written into it.
        !self.is_quiet && !self.tells_events() && !is_dumb && std::io::stderr().is_terminal()
    }

    /// Shows what the library logs: nothing, what is of interest, or everything.
    pub(crate) fn log(self) {
        let level = match self.verbosity {
            // Locks in a file that cannot exclude anyone are worth a line to everyone.
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

/// A line of the log, in the form of every other message.
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

fn unwritable(cause: &std::io::Error) -> Failure {
    Failure::new(FAILED, format!("cannot write to standard output: {cause}"))
}

/// One line of JSON, in which nothing is raw that a terminal would act upon.
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
    /// The last one with a year of four digits.
    const LAST_MS: u64 = 253_402_300_799_999;
    if time.as_millis() > LAST_MS {
        return "after the year 9999".to_owned();
    }
    let time = SystemTime::UNIX_EPOCH + Duration::from_millis(time.as_millis());
    humantime::format_rfc3339_seconds(time).to_string()
}

/// Controls of the terminal and of the direction of text, and characters without width.
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

/// A text of others with escapes, so that it stays on its line and can be read back.
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

/// A key in a message.
pub(crate) fn quoted(key: &str) -> String {
    format!("'{}'", printable(key))
}

/// A message without what a terminal would act upon; what is escaped already stays.
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
