//! `ls`: lists the locks that are held, once or every second.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io::IsTerminal;
use std::time::Duration;

use serde::Serialize;
use syncguard::backend::{Clock, SystemClock};
use syncguard::diagnostics::{LockInfo, LockInfoRaw};
use syncguard::{AnyBackend, LockBackend};

use crate::Context;
use crate::args::Ls;
use crate::exit::{FAILED, Failure};
use crate::output;

/// The locks that were found. Its size is limited by `--limit`, however many locks there are.
#[derive(Serialize)]
struct List {
    locks: Vec<Listed>,
    /// How many other locks match.
    hidden: u64,
}

#[derive(Serialize)]
struct Listed {
    #[serde(flatten)]
    info: LockInfo,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
}

pub(crate) async fn ls(context: &Context, args: Ls) -> Result<u8, Failure> {
    let backend = context.target.connect_existing().await?;
    if args.watch {
        return again_and_again(context, &backend, &args).await;
    }
    let list = collect(&backend, &args).await?;
    context.output.data(&list, || table(&list, args.waiters))?;
    if list.locks.is_empty() {
        context.output.note("no locks are held");
    }
    note_hidden(context, &list);
    Ok(0)
}

/// Lists every second. At a terminal, every list replaces the one before.
async fn again_and_again(
    context: &Context,
    backend: &AnyBackend,
    args: &Ls,
) -> Result<u8, Failure> {
    const INTERVAL: Duration = Duration::from_secs(1);
    /// Moves the cursor to the upper left corner and clears the screen.
    const CLEAR: &str = "\x1b[H\x1b[2J";
    let clear = if std::io::stdout().is_terminal() { CLEAR } else { "" };
    loop {
        match collect(backend, args).await {
            Ok(list) => {
                let text = || format!("{clear}{}", table(&list, args.waiters));
                if !context.output.stream(&list, text)? {
                    return Ok(0);
                }
                note_hidden(context, &list);
            }
            Err(failure) if failure.may_pass() => {
                context.output.note(&format!("{}; trying again", failure.message));
            }
            Err(failure) => return Err(failure),
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

fn note_hidden(context: &Context, list: &List) {
    if list.hidden > 0 {
        let hidden = list.hidden;
        context.output.note(&format!("{hidden} more locks are not shown; see --limit, --prefix"));
    }
}

/// Returns the first locks by key that match the options.
async fn collect(backend: &AnyBackend, args: &Ls) -> Result<List, Failure> {
    let admin =
        backend.admin().ok_or_else(|| Failure::new(FAILED, "this store cannot list its locks"))?;
    let now = SystemClock.now();
    let matches = |lock: &LockInfoRaw| {
        let holder = lock.info.holder.as_ref().map_or("", |holder| holder.as_str());
        args.prefix.as_ref().is_none_or(|prefix| lock.key.as_str().starts_with(prefix))
            && args.holder.as_ref().is_none_or(|text| holder.contains(text))
            && args.older_than.is_none_or(|age| now.since(lock.info.acquired_at) > age)
    };
    // By key, because a store may list a lock twice.
    let (mut found, mut hidden, mut next) = (BTreeMap::new(), 0, None);
    loop {
        let page = admin.list(next.as_ref()).await?;
        for lock in page.locks.into_iter().map(LockInfoRaw::from).filter(matches) {
            found.insert(lock.key.as_str().to_owned(), lock);
            if found.len() > args.limit {
                found.pop_last();
                hidden += 1;
            }
        }
        next = page.next;
        if next.is_none() {
            break;
        }
    }
    let mut locks = Vec::with_capacity(found.len());
    for (key, lock) in found {
        let mut info = lock.info;
        if args.waiters {
            info.waiters = backend.waiters(&lock.key).await;
        }
        locks.push(Listed { info, key: (!args.hashed).then_some(key) });
    }
    Ok(List { locks, hidden })
}

/// Returns a table with a header, or nothing without locks.
fn table(list: &List, has_waiters: bool) -> String {
    let mut header = vec!["KEY", "HOLDER", "HELD FOR", "EXPIRES IN", "FENCE"];
    header.extend(has_waiters.then_some("WAITERS"));
    let now = SystemClock.now();
    let row = |lock: &Listed| {
        let info = &lock.info;
        let unknown = || "-".to_owned();
        let mut row = vec![
            lock.key.as_deref().map_or_else(|| info.key_hash.to_string(), output::printable),
            info.holder.as_ref().map_or_else(unknown, output::holder),
            output::duration(now.since(info.acquired_at)),
            output::duration(info.expires_at.since(now)),
            info.fence.map_or_else(unknown, |fence| fence.to_string()),
        ];
        if has_waiters {
            row.push(info.waiters.map_or_else(unknown, |count| count.to_string()));
        }
        row
    };
    if list.locks.is_empty() {
        return String::new();
    }
    let header = header.into_iter().map(str::to_owned).collect();
    let rows: Vec<Vec<String>> =
        std::iter::once(header).chain(list.locks.iter().map(row)).collect();
    let widths: Vec<usize> = (0..rows[0].len())
        .map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
        .collect();
    let mut text = String::new();
    for row in &rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            write!(line, "{cell:<width$}  ").unwrap_or_default();
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}
