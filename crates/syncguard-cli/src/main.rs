//! The command `syncguard`.

#[cfg(not(unix))]
compile_error!("the command needs process groups and signals; use the library on this system");

mod args;
mod child;
mod commands;
mod exit;
mod output;
mod target;
mod terminal;
mod waiting;
mod watcher;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use tokio::runtime::Builder;

use args::{Cli, Command};
use exit::{FAILED, Failure, NOT_OBTAINED};
use output::Output;
use target::Target;

/// What every command has at hand.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) target: Target,
    pub(crate) output: Output,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let is_quiet = cli.global.quiet;
    match execute(cli) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            // Whoever asked for quiet expects that others hold the lock at times.
            if !(is_quiet && failure.code == NOT_OBTAINED) {
                Output::failure(&failure);
            }
            ExitCode::from(failure.code)
        }
    }
}

fn execute(cli: Cli) -> Result<u8, Failure> {
    match &cli.command {
        // These need neither store nor runtime.
        Command::Watch { grace_ms } => return Ok(watcher::watch(Duration::from_millis(*grace_ms))),
        Command::Completions { shell } => return Ok(commands::shell::completions(*shell)),
        Command::Man { directory } => return commands::shell::man(directory.as_deref()),
        _ => {}
    }
    log(cli.global.verbose);
    let context =
        Context { target: Target::choose(&cli.global)?, output: Output::new(&cli.global) };
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|cause| Failure::new(FAILED, format!("no runtime: {cause}")))?;
    let code = runtime.block_on(async {
        match cli.command {
            Command::Run(args) => commands::run::run(&context, args).await,
            Command::Acquire(args) => commands::locks::acquire(&context, args).await,
            Command::Release(args) => commands::locks::release(&context, args).await,
            Command::Extend(args) => commands::locks::extend(&context, args).await,
            Command::Status(args) => commands::look::status(&context, args).await,
            Command::Owns(args) => commands::look::owns(&context, args).await,
            Command::Ls(args) => commands::look::ls(&context, args).await,
            Command::Break(args) => commands::break_lock::run(&context, args).await,
            Command::ExplainKey(args) => commands::look::explain_key(&context, &args),
            Command::Setup => commands::store::setup(&context).await,
            Command::Doctor => commands::store::doctor(&context).await,
            Command::Watch { .. } | Command::Completions { .. } | Command::Man { .. } => Ok(0),
        }
    });
    // A thread that is still busy is none of the caller's business.
    runtime.shutdown_background();
    code
}

/// Shows what the library logs: nothing, warnings, or everything.
fn log(verbose: u8) {
    let level = match verbose {
        0 => return,
        1 => tracing::Level::WARN,
        _ => tracing::Level::DEBUG,
    };
    let subscriber = tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr);
    subscriber.with_ansi(std::io::stderr().is_terminal()).without_time().init();
}
