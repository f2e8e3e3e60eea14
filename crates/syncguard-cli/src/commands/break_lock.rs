//! `break`: takes a lock away from its holder, after asking.

use std::io::{BufRead, IsTerminal, Write};

use serde::Serialize;
use syncguard::diagnostics;

use crate::Context;
use crate::args::Break;
use crate::commands::look::describe;
use crate::exit::{Failure, NO, USAGE};
use crate::output::Output;
use crate::waiting;

#[derive(Serialize)]
struct Broken {
    broken: bool,
}

pub(crate) async fn run(context: &Context, args: Break) -> Result<u8, Failure> {
    let key = waiting::key(&args.key)?;
    let backend = context.target.connect().await?;
    let Some(shown) = diagnostics::get_by_key_raw(&backend, &key).await? else {
        context
            .output
            .data(&Broken { broken: false }, || "free; there is nothing to break\n".to_owned());
        return Ok(NO);
    };
    let whom_it_hurts = format!(
        "the lock is held {}; its holder is not asked: it works on, unlocked, until its next \
         renewal fails, and its writes are refused only where fences are checked",
        describe(&shown.info)
    );
    if args.yes {
        context.output.note(&whom_it_hurts);
    } else {
        // Whoever is asked must know what for.
        Output::say(&whom_it_hurts);
    }
    if !args.yes && !confirmed()? {
        context.output.note("nothing was changed");
        return Ok(NO);
    }
    let broken = diagnostics::break_lock(&backend, &shown).await?;
    context.output.data(&Broken { broken }, || {
        if broken {
            "broken\n".to_owned()
        } else {
            "it is not held any more by whom was shown; nothing was changed\n".to_owned()
        }
    });
    Ok(if broken { 0 } else { NO })
}

fn confirmed() -> Result<bool, Failure> {
    if !std::io::stdin().is_terminal() {
        return Err(Failure::new(USAGE, "there is nobody to ask").hint("in scripts, say --yes"));
    }
    let mut stderr = std::io::stderr().lock();
    drop(write!(stderr, "break it? [y/N] ").and_then(|()| stderr.flush()));
    let mut answer = String::new();
    drop(std::io::stdin().lock().read_line(&mut answer));
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
