//! Shows the progress of a wait: a line at a terminal, periodic messages elsewhere.

use std::io::Write;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use syncguard::backend::{Clock, SystemClock};
use syncguard::diagnostics::LockInfo;
use syncguard::{AnyBackend, HolderInfo, Key, LockBackend, Timestamp};

use crate::Context;
use crate::event::{Event, millis};
use crate::output::{self, Output};

/// Shorter waits are not shown.
const FIRST: Duration = Duration::from_millis(300);

/// Shows that this process waits for the lock, and for whom. `backend` is set once the store is
/// connected. Never completes.
pub(crate) async fn indicate(context: &Context, key: &Key, backend: &OnceLock<AnyBackend>) {
    if context.output.is_live() {
        at_a_terminal(key, backend).await;
    } else {
        in_a_log(context.output, key, backend).await;
    }
}

/// Who holds the lock, and since when by this machine's clock.
struct Held {
    by: HolderInfo,
    since: Timestamp,
}

impl Held {
    /// Asks the store who holds the lock. Returns `None` if it does not know, or not in time.
    async fn ask(key: &Key, backend: &OnceLock<AnyBackend>) -> Option<Self> {
        const LIMIT: Duration = Duration::from_secs(1);
        let found = tokio::time::timeout(LIMIT, backend.get()?.lookup_key(key)).await;
        let info = LockInfo::from(found.ok()?.ok()??);
        Some(Self { by: info.holder?, since: info.acquired_at })
    }

    fn duration(&self) -> Duration {
        SystemClock.now().since(self.since)
    }
}

async fn at_a_terminal(key: &Key, backend: &OnceLock<AnyBackend>) {
    const AGAIN: Duration = Duration::from_secs(1);
    /// The store is asked who holds the lock every so many times.
    const ASKED_EVERY: u32 = 5;
    let started = Instant::now();
    tokio::time::sleep(FIRST).await;
    // Dropping this erases the line.
    let mut line = Line::default();
    let mut held = None;
    for count in 0_u32.. {
        if count % ASKED_EVERY == 0 {
            held = Held::ask(key, backend).await;
        }
        let columns = terminal_size::terminal_size_of(std::io::stderr());
        let columns = columns.map_or(80, |(width, _)| usize::from(width.0));
        line.show(&text(key, held.as_ref(), started.elapsed(), columns));
        tokio::time::sleep(AGAIN).await;
    }
}

/// Prints a message every 30 seconds, because a silent log looks like a hang.
async fn in_a_log(output: Output, key: &Key, backend: &OnceLock<AnyBackend>) {
    const AGAIN: Duration = Duration::from_secs(30);
    let started = Instant::now();
    let mut pause = if output.shows_events() { FIRST } else { AGAIN };
    loop {
        tokio::time::sleep(pause).await;
        let held = Held::ask(key, backend).await;
        output.still_waiting(&Event::Waiting {
            key: key.as_str(),
            waited_ms: millis(started.elapsed()),
            holder: held.as_ref().map(|held| &held.by),
            held_ms: held.as_ref().map(|held| millis(held.duration())),
        });
        pause = AGAIN;
    }
}

/// Returns the line, shortened to the width of the terminal: a wrapped line cannot be overwritten.
fn text(key: &Key, held: Option<&Held>, waited: Duration, columns: usize) -> String {
    const BUTTON: &str = ", Ctrl-C to cancel";
    /// The least room for the key and for the holder, which is left out if there is less.
    const KEY: usize = 20;
    const HOLDER: usize = 10;
    let whole = |time: Duration| output::duration(Duration::from_secs(time.as_secs()));
    let before = "syncguard: waiting for ";
    let by_whom = |held: &Held| {
        let (by, time) = (output::holder(&held.by), whole(held.duration()));
        let key = width(&output::printable(key.as_str())).min(KEY);
        let others = width(before) + width(": held by , for ") + width(&time) + width(BUTTON);
        let room = columns.checked_sub(others + key + 1)?;
        let is_enough = room >= width(&by).min(HOLDER);
        is_enough.then(|| format!(": held by {}, for {time}{BUTTON}", shortened(&by, room)))
    };
    let after = held.and_then(by_whom);
    let after = after.unwrap_or_else(|| format!(" ({}){BUTTON}", whole(waited)));
    let room = columns.saturating_sub(1).saturating_sub(width(before) + width(&after));
    let name = shortened(&output::printable(key.as_str()), room);
    shortened(&format!("{before}{name}{after}"), columns.saturating_sub(1))
}

/// Returns the width of a text in columns, or more: every non-ASCII character counts as two.
fn width(text: &str) -> usize {
    text.chars().map(|letter| if letter.is_ascii() { 1 } else { 2 }).sum()
}

fn shortened(text: &str, columns: usize) -> String {
    if width(text) <= columns {
        return text.to_owned();
    }
    let mut shortened = String::new();
    for letter in text.chars() {
        if width(&shortened) + width(letter.encode_utf8(&mut [0; 4])) + 3 > columns {
            break;
        }
        shortened.push(letter);
    }
    shortened + &"..."[..columns.min(3)]
}

/// A line at the terminal that is overwritten in place.
#[derive(Default)]
struct Line {
    is_shown: bool,
}

impl Line {
    fn show(&mut self, text: &str) {
        self.is_shown = true;
        let mut stderr = std::io::stderr().lock();
        drop(write!(stderr, "\r\x1b[2K{text}").and_then(|()| stderr.flush()));
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if self.is_shown {
            self.show("");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_narrower_than_the_terminal() {
        let second = Duration::from_secs(1);
        let short = Key::new("w").expect("valid");
        assert_eq!(
            text(&short, None, second * 2, 80),
            "syncguard: waiting for w (2s), Ctrl-C to cancel"
        );
        let by = HolderInfo::parse("web-3/4211/syncguard/./deploy.sh").expect("valid");
        let held = Held { by, since: SystemClock.now() };
        assert_eq!(
            text(&short, Some(&held), second * 2, 120),
            "syncguard: waiting for w: held by web-3, pid 4211, ./deploy.sh, for 0s, Ctrl-C to \
             cancel"
        );
        let long = Key::new("\u{1b}日本語 job".repeat(30)).expect("valid");
        for columns in 0..200 {
            for held in [None, Some(&held)] {
                let text = text(&long, held, second, columns);
                assert!(width(&text) < columns.max(1), "{columns}: {text}");
                assert!(!text.contains("held by ,"), "{columns}: {text}");
            }
        }
    }
}
