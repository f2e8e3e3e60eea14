//! The command `syncguard`.

#[cfg(not(unix))]
compile_error!("the command needs process groups and signals; use the library on this system");

mod address;
mod args;
mod child;
mod commands;
mod event;
mod exit;
mod output;
mod program;
mod progress;
mod reporting;
mod signals;
mod spawn;
mod supervision;
mod target;
mod terminal;
mod usage;
mod waiting;
mod watcher;

use std::process::ExitCode;
use std::time::Duration;

use tokio::runtime::Builder;

use args::{Cli, Command};
use exit::{FAILED, Failure};
use output::Output;
use target::Target;

/// What every command has at hand.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) target: Target,
    pub(crate) output: Output,
}

fn main() -> ExitCode {
    if let Some(grace) = watcher_grace() {
        return ExitCode::from(watcher::watch(grace));
    }
    let cli = usage::parse();
    let (is_quiet, output) = (cli.global.quiet, Output::new(&cli.global));
    match execute(cli) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            // Whoever asked for quiet expects that others hold the lock at times.
            if !(is_quiet && failure.is_conflict()) {
                output.failure(&failure);
            }
            ExitCode::from(failure.code)
        }
    }
}

/// The grace, if this process is started as the watcher of another one. Such a process is to be ready
/// soon, and parses nothing else.
fn watcher_grace() -> Option<Duration> {
    let mut arguments = std::env::args_os().skip(1);
    let (name, grace) = (arguments.next()?, arguments.next()?);
    (name == "__watch").then_some(Duration::from_millis(grace.to_str()?.parse().ok()?))
}

fn execute(mut cli: Cli) -> Result<u8, Failure> {
    match &cli.command {
        // These need neither store nor runtime.
        Command::Completions { shell } => return commands::shell::completions(*shell),
        Command::Man { directory } => return commands::shell::man(directory.as_deref()),
        _ => {}
    }
    usage::check(&mut cli)?;
    let output = Output::new(&cli.global);
    output.log();
    if matches!(cli.command, Command::Run(_) | Command::Acquire(_) | Command::Wait(_)) {
        signals::handle()?;
    }
    let context = Context { target: Target::choose(&cli.global, output)?, output };
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|cause| Failure::new(FAILED, format!("no runtime: {cause}")))?;
    let code = runtime.block_on(async {
        match cli.command {
            Command::Run(args) => commands::run::run(&context, args).await,
            Command::Acquire(args) => commands::locks::acquire(&context, args).await,
            Command::Release(args) => commands::locks::release(&context, args).await,
            Command::Extend(args) => commands::locks::extend(&context, args).await,
            Command::Status(args) => commands::look::status(&context, args).await,
            Command::Wait(args) => commands::wait::wait(&context, args).await,
            Command::Owns(args) => commands::look::owns(&context, args).await,
            Command::Ls(args) => commands::look::ls(&context, args).await,
            Command::Break(args) => commands::break_lock::run(&context, args).await,
            Command::ExplainKey(args) => commands::look::explain_key(&context, &args),
            Command::Url => commands::store::url(&context),
            Command::Setup => commands::store::setup(&context).await,
            Command::Doctor(args) => commands::doctor::doctor(&context, args).await,
            Command::Completions { .. } | Command::Man { .. } => Ok(0),
        }
    });
    // A thread that is still busy is none of the caller's business.
    runtime.shutdown_background();
    code.map_err(|failure| context.target.locate(failure))
}
