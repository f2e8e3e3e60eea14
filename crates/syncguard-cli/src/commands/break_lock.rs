//! `break`: takes a lock away from its holder, after confirmation.

use std::io::{BufRead, IsTerminal, Write};

use serde::Serialize;
use syncguard::backend::BreakNote;
use syncguard::{HolderInfo, LockBackend, diagnostics};

use crate::Context;
use crate::args::Break;
use crate::commands::look::describe;
use crate::exit::{Failure, NO, USAGE};
use crate::waiting;

#[derive(Serialize)]
struct Broken {
    broken: bool,
}

pub(crate) async fn run(context: &Context, args: Break) -> Result<u8, Failure> {
    let key = waiting::key_to_look_at(&args.key)?;
    let backend = context.target.connect_existing().await?;
    let Some(shown) = diagnostics::get_by_key_raw(&backend, &key).await? else {
        context.output.data(&Broken { broken: false }, || "free; nothing to break\n".to_owned())?;
        return Ok(NO);
    };
    let consequences = format!(
        "held {}; the holder keeps working without the lock until it notices; only resources that \
         check fences refuse its writes",
        describe(&shown.info)
    );
    let user = std::env::var("USER").ok().filter(|user| !user.is_empty());
    let by = HolderInfo::of_this_process(Some(user.as_deref().unwrap_or("break")));
    let note = BreakNote::new(Some(by), args.reason.as_deref());
    if args.yes {
        context.output.note(&consequences);
    } else {
        // The question below needs this context, even with --quiet.
        context.output.print_note(&consequences);
    }
    if !args.yes && !confirmed()? {
        context.output.note("nothing was broken");
        return Ok(NO);
    }
    let broken = diagnostics::break_lock_with(&backend, &shown, note).await?;
    context.output.data(&Broken { broken }, || {
        if broken {
            "broken\n".to_owned()
        } else {
            "the holder changed; nothing was broken\n".to_owned()
        }
    })?;
    backend.quiesce().await;
    Ok(if broken { 0 } else { NO })
}

fn confirmed() -> Result<bool, Failure> {
    if !std::io::stdin().is_terminal() {
        return Err(Failure::new(USAGE, "cannot ask for confirmation: not a terminal; use --yes"));
    }
    let mut stderr = std::io::stderr().lock();
    drop(write!(stderr, "break it? [y/N] ").and_then(|()| stderr.flush()));
    let mut answer = String::new();
    drop(std::io::stdin().lock().read_line(&mut answer));
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
