//! The `syncguard` command.

#[cfg(not(unix))]
compile_error!("syncguard-cli requires Unix; on other systems, use the syncguard library");

mod address;
mod args;
mod child;
mod commands;
mod event;
mod exit;
mod held;
mod output;
mod program;
mod progress;
mod reporting;
mod signals;
mod spawn;
mod supervision;
mod target;
mod terminal;
mod ui;
mod usage;
mod waiting;
mod watcher;

use std::process::ExitCode;
use std::time::Duration;

use tokio::runtime::Builder;

use args::{Cli, Command, Fence};
use exit::{FAILED, Failure};
use output::Output;
use target::Target;

/// The store and the output, which every command uses.
#[derive(Clone, Debug)]
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
            // With --quiet, a conflict is expected and not reported.
            if !(is_quiet && failure.is_conflict()) {
                output.failure(&failure);
            }
            ExitCode::from(failure.code)
        }
    }
}

/// Returns the grace if this process was started as a watcher. A watcher must be ready soon, so it
/// skips the rest of the argument parsing.
fn watcher_grace() -> Option<Duration> {
    let mut arguments = std::env::args_os().skip(1);
    let (name, grace) = (arguments.next()?, arguments.next()?);
    (name == "__watch").then_some(Duration::from_millis(grace.to_str()?.parse().ok()?))
}

fn execute(mut cli: Cli) -> Result<u8, Failure> {
    match &cli.command {
        // These need neither a store nor a runtime.
        Command::Completions { shell } => return commands::shell::completions(*shell),
        Command::Man { directory } => return commands::shell::man(directory.as_deref()),
        _ => {}
    }
    usage::check(&mut cli)?;
    let output = Output::new(&cli.global);
    output.log();
    if matches!(
        cli.command,
        Command::Run(_) | Command::Elect(_) | Command::Acquire(_) | Command::Wait(_)
    ) {
        signals::handle()?;
    }
    let context = Context { target: Target::choose(&cli.global, output)?, output };
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime
        .map_err(|cause| Failure::new(FAILED, format!("cannot start the runtime: {cause}")))?;
    let code = runtime.block_on(async {
        match cli.command {
            Command::Run(args) => commands::run::run(&context, args).await,
            Command::Elect(args) => commands::elect::elect(&context, args).await,
            Command::Acquire(args) => commands::locks::acquire(&context, args).await,
            Command::Release(args) => commands::locks::release(&context, args).await,
            Command::Extend(args) => commands::locks::extend(&context, args).await,
            Command::Status(args) => commands::look::status(&context, args).await,
            Command::Wait(args) => commands::wait::wait(&context, args).await,
            Command::Owns(args) => commands::look::owns(&context, args).await,
            Command::Ls(args) => commands::ls::ls(&context, args).await,
            Command::Watch(args) => commands::watch::watch(&context, args).await,
            Command::Break(args) => commands::break_lock::run(&context, args).await,
            Command::ExplainKey(args) => commands::look::explain_key(&context, &args),
            Command::Url => commands::store::url(&context),
            Command::Setup => commands::store::setup(&context).await,
            Command::Fence(Fence::Check(args)) => commands::fence::check(&context, &args).await,
            Command::Gc(args) => commands::store::gc(&context, &args).await,
            Command::Doctor(args) => commands::doctor::doctor(&context, args).await,
            Command::Ui(args) => ui::ui(&context, args).await,
            Command::Completions { .. } | Command::Man { .. } => Ok(0),
        }
    });
    // Do not wait for threads that are still busy.
    runtime.shutdown_background();
    code.map_err(|failure| context.target.locate(failure))
}
