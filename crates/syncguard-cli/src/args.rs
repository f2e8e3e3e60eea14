//! What can be typed.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;

const EXIT_CODES: &str = "\
Exit codes:
    0  done; of `run`: the command's own code is passed on, whatever it is
    1  the answer is no: not held, not locked, something is wrong (doctor)
    2  what was typed makes no sense
  123  run: the lock was lost, and the command was ended
  124  the lock was not obtained in time
  125  syncguard failed, for example because the store cannot be reached
  126  run: the command cannot be executed
  127  run: the command was not found
128+n  run: the command was ended by signal n";

const URL_HELP: &str = "Where the locks are: sqlite:/path, redis://host, … [env: SYNCGUARD_URL] \
                        [default: a file of this user on this machine]";

/// Run commands while holding a distributed lock
#[derive(Debug, Parser)]
#[command(
    name = "syncguard",
    version,
    arg_required_else_help = true,
    after_help = EXIT_CODES,
    max_term_width = 100
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What holds for every command.
#[derive(Args, Debug)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Global {
    #[arg(long, global = true, value_name = "URL", help = URL_HELP)]
    pub(crate) url: Option<String>,
    /// A file that holds the URL, which may hold a password
    #[arg(long, global = true, value_name = "FILE", conflicts_with = "url")]
    pub(crate) url_file: Option<PathBuf>,
    /// How data is written to standard output
    #[arg(long, global = true, value_enum, default_value_t = Format::Text)]
    pub(crate) format: Format,
    /// Say nothing but errors
    #[arg(long, short, global = true, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
    /// Say more; twice says even more
    #[arg(long, short, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
}

/// How data is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people
    Text,
    /// For programs
    Json,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a command while holding a lock
    Run(Run),
    /// Take a lock and print its lock id, the receipt for `release`
    Acquire(Acquire),
    /// Give a lock back; exit code 1 if it was not held any more
    Release(Release),
    /// Let a lock live this long from now on; exit code 1 if it was not held any more
    Extend(Extend),
    /// Say whether a key is locked; exit code 1 if it is free
    Status(OneKey),
    /// Say whether a lock id holds a lock; exit code 1 if it does not
    Owns(OneId),
    /// List the locks that are held
    Ls(Ls),
    /// Take a lock away from its holder
    Break(Break),
    /// Show what a key is called in the store; needs no connection
    ExplainKey(OneKey),
    /// Create what the store needs
    Setup,
    /// Check the store: reachable, fast, safe, with all rights
    Doctor,
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Print the manual page, or write the pages of all commands into a directory
    Man {
        /// Where the pages go
        directory: Option<PathBuf>,
    },
    /// Ends a group of processes when its parent is gone
    #[command(name = "__watch", hide = true)]
    Watch {
        /// How long the group may take to end by itself
        grace_ms: u64,
    },
}

/// How long a lock lives and how long it is waited for.
#[derive(Args, Debug)]
pub(crate) struct Waiting {
    /// The lock frees itself this long after its last renewal
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration)]
    pub(crate) ttl: Duration,
    /// How long to wait for the lock: 5s, 2m, … or forever
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = patience)]
    pub(crate) wait: Patience,
    /// Do not wait at all
    #[arg(long, conflicts_with = "wait")]
    pub(crate) no_wait: bool,
}

/// How long to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    For(Duration),
    Forever,
}

#[derive(Args, Debug)]
pub(crate) struct Run {
    /// What is locked
    #[arg(long, short)]
    pub(crate) key: String,
    #[command(flatten)]
    pub(crate) waiting: Waiting,
    /// Keep the lock at least this long, even if the command is faster
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) hold_at_least: Option<Duration>,
    /// End the command when it takes longer than this
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) max_hold: Option<Duration>,
    /// How long the command may take to end when the lock is lost, before it is killed
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = duration)]
    pub(crate) grace: Duration,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

#[derive(Args, Debug)]
pub(crate) struct Acquire {
    /// What is locked
    #[arg(long, short)]
    pub(crate) key: String,
    #[command(flatten)]
    pub(crate) waiting: Waiting,
}

#[derive(Args, Debug)]
pub(crate) struct Release {
    #[command(flatten)]
    pub(crate) id: OneId,
}

#[derive(Args, Debug)]
pub(crate) struct Extend {
    #[command(flatten)]
    pub(crate) id: OneId,
    /// How long from now
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration)]
    pub(crate) ttl: Duration,
}

#[derive(Args, Debug)]
pub(crate) struct OneKey {
    /// What is or would be locked
    pub(crate) key: String,
}

#[derive(Args, Debug)]
pub(crate) struct OneId {
    /// The lock id that `acquire` printed; - reads it from standard input, where `ps` does not see it
    #[arg(allow_hyphen_values = true)]
    pub(crate) lock_id: String,
}

#[derive(Args, Debug)]
pub(crate) struct Ls {
    /// Show keys instead of their hashes
    #[arg(long)]
    pub(crate) raw: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Break {
    /// What is locked
    pub(crate) key: String,
    /// Do not ask
    #[arg(long, short)]
    pub(crate) yes: bool,
}

fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|_cause| "durations look like 500ms, 30s, 5m or 1h 30m".to_owned())
}

fn patience(text: &str) -> Result<Patience, String> {
    match text {
        "forever" => Ok(Patience::Forever),
        _ => duration(text).map(Patience::For),
    }
}
