//! `status`, `owns` and `explain-key`: commands that change nothing.

use std::fmt::Write;

use serde::Serialize;
use syncguard::Key;
use syncguard::backend::{Clock, SystemClock};
use syncguard::diagnostics::{self, LockInfo};
use syncguard::primitives::{MAX_PERMITS, leader_key, slot_key};

use crate::Context;
use crate::args::{OneId, OneKey, Status as StatusArgs};
use crate::commands::locks::lock_id;
use crate::exit::{Failure, NO, USAGE};
use crate::output;
use crate::waiting;

#[derive(Serialize)]
struct Status {
    locked: bool,
    lock: Option<LockInfo>,
}

#[derive(Serialize)]
struct Owns {
    owns: bool,
}

/// Describes by whom and how long a lock has been held, when it expires, its fence and its waiters.
pub(crate) fn describe(info: &LockInfo) -> String {
    let now = SystemClock.now();
    let (held, left) = (now.since(info.acquired_at), info.expires_at.since(now));
    let by = info.holder.as_ref().map(|by| format!("by {}, ", output::holder(by)));
    let fence = info.fence.map_or_else(String::new, |fence| format!(", fence {fence}"));
    let waiting = match info.waiters {
        None | Some(0) => String::new(),
        Some(1) => ", 1 process waits".to_owned(),
        Some(count) => format!(", {count} processes wait"),
    };
    format!(
        "{}for {}, expires in {} unless renewed{fence}{waiting}",
        by.unwrap_or_default(),
        output::duration(held),
        output::duration(left)
    )
}

/// The slots of a semaphore.
#[derive(Serialize)]
struct Slots {
    locked: bool,
    held: usize,
    /// The lock of each slot, in order.
    #[serde(rename = "slots")]
    locks: Vec<Option<LockInfo>>,
}

async fn slots(context: &Context, key: &Key, count: u32) -> Result<u8, Failure> {
    if !(1..=MAX_PERMITS).contains(&count) {
        return Err(Failure::new(USAGE, format!("--slots must be from 1 to {MAX_PERMITS}")));
    }
    let backend = context.target.connect_existing().await?;
    let mut slots = Vec::new();
    for slot in 0..count {
        slots.push(diagnostics::get_by_key(&backend, &slot_key(key, slot)?).await?);
    }
    let held = slots.iter().flatten().count();
    let found = Slots { locked: held > 0, held, locks: slots };
    context.output.data(&found, || {
        let mut text = format!("{held} of {count} slots held\n");
        for (slot, lock) in found.locks.iter().enumerate() {
            if let Some(lock) = lock {
                writeln!(text, "slot {slot} held {}", describe(lock)).unwrap_or_default();
            }
        }
        text
    })?;
    Ok(if found.locked { 0 } else { NO })
}

pub(crate) async fn status(context: &Context, args: StatusArgs) -> Result<u8, Failure> {
    let mut key = waiting::key_to_look_at(&args.key)?;
    if let Some(count) = args.slots {
        return slots(context, &key, count).await;
    }
    if args.election {
        key = leader_key(&key)?;
    }
    let (held, free) = if args.election { ("led", "no leader") } else { ("held", "free") };
    let backend = context.target.connect_existing().await?;
    let lock = diagnostics::get_by_key(&backend, &key).await?;
    let status = Status { locked: lock.is_some(), lock };
    context.output.data(&status, || match &status.lock {
        Some(lock) => format!("{held} {}\n", describe(lock)),
        None => format!("{free}\n"),
    })?;
    Ok(if status.locked { 0 } else { NO })
}

pub(crate) async fn owns(context: &Context, args: OneId) -> Result<u8, Failure> {
    let lock_id = lock_id(&args)?;
    let backend = context.target.connect_existing().await?;
    let owns = diagnostics::owns(&backend, &lock_id).await?;
    let text = if owns { "yes\n" } else { "no\n" };
    context.output.data(&Owns { owns }, || text.to_owned())?;
    Ok(if owns { 0 } else { NO })
}

#[derive(Serialize)]
struct Explanation {
    key: String,
    hash: String,
    records: Vec<Place>,
}

#[derive(Serialize)]
struct Place {
    what: &'static str,
    name: String,
}

pub(crate) fn explain_key(context: &Context, args: &OneKey) -> Result<u8, Failure> {
    let key = waiting::key_to_look_at(&args.key)?;
    let records = diagnostics::explain_key(context.target.url(), &key)?;
    let records = records.into_iter().map(|(what, name)| Place { what, name }).collect();
    let explanation =
        Explanation { key: key.as_str().to_owned(), hash: key.hash_id().to_string(), records };
    context.output.data(&explanation, || {
        let mut text = format!("{:<6} {}\n", "key", output::printable(&explanation.key));
        writeln!(text, "{:<6} {}", "hash", explanation.hash).unwrap_or_default();
        for place in &explanation.records {
            let name = output::printable(&place.name);
            writeln!(text, "{:<6} {name}", place.what).unwrap_or_default();
        }
        text
    })?;
    Ok(0)
}
