//! Shows the progress of a wait: a line at a terminal, periodic messages elsewhere.

use std::io::Write;
use std::time::{Duration, Instant};

use syncguard::Key;

use crate::Context;
use crate::event::{Event, millis};
use crate::output::{self, Output};

/// Shorter waits are not shown.
const FIRST: Duration = Duration::from_millis(300);

/// Shows that this process waits for the lock. Never completes.
pub(crate) async fn indicate(context: &Context, key: &Key) {
    if context.output.is_live() {
        at_a_terminal(key).await;
    } else {
        in_a_log(context.output, key).await;
    }
}

async fn at_a_terminal(key: &Key) {
    const AGAIN: Duration = Duration::from_secs(1);
    let started = Instant::now();
    tokio::time::sleep(FIRST).await;
    // Dropping this erases the line.
    let mut line = Line::default();
    loop {
        let waited = Duration::from_secs(started.elapsed().as_secs());
        let columns = terminal_size::terminal_size_of(std::io::stderr());
        let columns = columns.map_or(80, |(width, _)| usize::from(width.0));
        line.show(&text(key, waited, columns));
        tokio::time::sleep(AGAIN).await;
    }
}

/// Prints a message every 30 seconds, because a silent log looks like a hang.
async fn in_a_log(output: Output, key: &Key) {
    const AGAIN: Duration = Duration::from_secs(30);
    let started = Instant::now();
    let mut pause = if output.tells_events() { FIRST } else { AGAIN };
    loop {
        tokio::time::sleep(pause).await;
        let waited_ms = millis(started.elapsed());
        output.still_waiting(&Event::Waiting { key: key.as_str(), waited_ms });
        pause = AGAIN;
    }
}

/// Returns the line, shortened to the width of the terminal: a wrapped line cannot be overwritten.
fn text(key: &Key, waited: Duration, columns: usize) -> String {
    let (before, after) =
        ("syncguard: waiting for '", format!("' ({}), Ctrl-C to cancel", output::duration(waited)));
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
            text(&short, second * 2, 80),
            "syncguard: waiting for 'w' (2s), Ctrl-C to cancel"
        );
        let long = Key::new("\u{1b}日本語 job".repeat(30)).expect("valid");
        for columns in 0..200 {
            let text = text(&long, second, columns);
            assert!(width(&text) < columns.max(1), "{columns}: {text}");
        }
    }
}
