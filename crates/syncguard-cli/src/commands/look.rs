//! `status`, `owns`, `ls` and `explain-key`: commands that change nothing.

use std::fmt::Write;

use serde::Serialize;
use syncguard::LockBackend;
use syncguard::backend::{Clock, SystemClock};
use syncguard::diagnostics::{self, LockInfo, LockInfoRaw};

use crate::Context;
use crate::args::{Ls, OneId, OneKey};
use crate::commands::locks::lock_id;
use crate::exit::{FAILED, Failure, NO};
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

#[derive(Serialize)]
struct Listed {
    #[serde(flatten)]
    info: LockInfo,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
}

#[derive(Serialize)]
struct List {
    locks: Vec<Listed>,
}

/// Describes how long a lock has been held, when it expires, and its fence.
pub(crate) fn describe(info: &LockInfo) -> String {
    let now = SystemClock.now();
    let (held, left) = (now.since(info.acquired_at), info.expires_at.since(now));
    let fence = info.fence.map_or_else(String::new, |fence| format!(", fence {fence}"));
    format!(
        "for {}, expires in {} unless renewed{fence}",
        output::duration(held),
        output::duration(left)
    )
}

pub(crate) async fn status(context: &Context, args: OneKey) -> Result<u8, Failure> {
    let key = waiting::key_to_look_at(&args.key)?;
    let backend = context.target.connect_existing().await?;
    let lock = diagnostics::get_by_key(&backend, &key).await?;
    let status = Status { locked: lock.is_some(), lock };
    context.output.data(&status, || match &status.lock {
        Some(lock) => format!("held {}\n", describe(lock)),
        None => "free\n".to_owned(),
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

pub(crate) async fn ls(context: &Context, args: Ls) -> Result<u8, Failure> {
    let backend = context.target.connect_existing().await?;
    let admin =
        backend.admin().ok_or_else(|| Failure::new(FAILED, "this store cannot list its locks"))?;
    let (mut found, mut next) = (Vec::new(), None);
    loop {
        let page = admin.list(next.as_ref()).await?;
        found.extend(page.locks.into_iter().map(LockInfoRaw::from));
        next = page.next;
        if next.is_none() {
            break;
        }
    }
    found.sort_by_key(|lock| lock.info.acquired_at);
    // A store may list a lock twice.
    found.dedup_by(|one, two| one.info.lock_id_hash == two.info.lock_id_hash);
    let listed = |lock: LockInfoRaw| Listed {
        key: args.raw.then(|| lock.key.as_str().to_owned()),
        info: lock.info,
    };
    let list = List { locks: found.into_iter().map(listed).collect() };
    context.output.data(&list, || {
        let mut text = String::new();
        for lock in &list.locks {
            let hash = lock.info.key_hash.to_string();
            let name = lock.key.as_deref().map_or(hash, output::printable);
            let described = describe(&lock.info);
            writeln!(text, "{name}  held {described}").unwrap_or_default();
        }
        text
    })?;
    if list.locks.is_empty() {
        context.output.note("no locks are held");
    }
    Ok(0)
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
