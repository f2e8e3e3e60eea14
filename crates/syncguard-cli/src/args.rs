//! The command-line arguments.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};
use clap_complete::Shell;

use crate::exit::{CODES, NOT_ACQUIRED};

const URL_HELP: &str = "URL of the lock store: sqlite:/path, redis://host, … [env: SYNCGUARD_URL] \
                        [default: a per-user SQLite file on this machine]";

const REQUIRE_URL_HELP: &str = "Refuse to use the default store [env: SYNCGUARD_REQUIRE_URL=1]";

/// Returns the exit codes, which are printed below the help text.
fn exit_codes() -> String {
    let line = |(code, meaning): (&str, &str)| format!("{code:>5}  {meaning}");
    format!("Exit codes:\n{}", CODES.map(line).join("\n"))
}

/// Run commands while holding a distributed lock
#[derive(Debug, Parser)]
#[command(
    name = "syncguard",
    version,
    arg_required_else_help = true,
    after_help = exit_codes(),
    max_term_width = 100
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The options of every command.
#[derive(Args, Debug)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Global {
    #[arg(long, global = true, value_name = "URL", help = URL_HELP, value_hint = ValueHint::Other)]
    pub(crate) url: Option<String>,
    /// Read the URL from a file, which keeps a password out of `ps`
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        conflicts_with = "url",
        value_hint = ValueHint::FilePath
    )]
    pub(crate) url_file: Option<PathBuf>,
    #[arg(long, global = true, help = REQUIRE_URL_HELP)]
    pub(crate) require_url: bool,
    /// Format of data on standard output and of messages on standard error
    #[arg(long, global = true, value_enum, default_value_t = Format::Text)]
    pub(crate) format: Format,
    /// Print data and errors only, no other messages
    #[arg(long, short, global = true, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
    /// Increase verbosity (-v info, -vv debug)
    #[arg(long, short, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
}

/// The output format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Human-readable text
    Text,
    /// One JSON object per line
    Json,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a command while holding a lock, several locks, or a slot
    Run(Run),
    /// Run a command while this process leads, and campaign again when it ends
    Elect(Elect),
    /// Acquire a lock and print its lock id, which `release` needs
    Acquire(Acquire),
    /// Release a lock; exit code 1 if it was not held
    Release(Release),
    /// Reset a lock's TTL; exit code 1 if it was not held
    Extend(Extend),
    /// Show whether a lock is held; exit code 1 if it is free
    Status(Status),
    /// Wait until a lock is free, without acquiring it
    Wait(Wait),
    /// Show whether a lock id holds a lock; exit code 1 if it does not
    Owns(OneId),
    /// List the locks that are held
    Ls(Ls),
    /// Print a line whenever a lock is acquired, released, broken or expires
    Watch(Watch),
    /// Take a lock away from its holder
    Break(Break),
    /// Show the names of a lock's records in the store; does not connect
    ExplainKey(OneKey),
    /// Show which store is used, without its password; does not connect
    Url,
    /// Create the store's tables (PostgreSQL) or file (SQLite)
    Setup,
    /// Refuse a stale fence before a script writes; exit code 1 if the fence is stale
    #[command(subcommand)]
    Fence(Fence),
    /// Delete the fence counters of locks that are no longer used; needs fences=clock
    Gc(Gc),
    /// Check the store: connection, permissions, clock and settings
    Doctor(Doctor),
    /// Serve a page that shows the locks live
    Ui(Ui),
    /// Print a completion script for a shell
    Completions {
        /// Shell to complete for
        shell: Shell,
    },
    /// Print the manual page, or write the pages of all commands into a directory
    Man {
        /// Directory for the pages; it must exist
        #[arg(value_hint = ValueHint::DirPath)]
        directory: Option<PathBuf>,
    },
}

/// The name of a lock.
#[derive(Args, Debug)]
pub(crate) struct KeyArgs {
    #[arg(
        help = "Name of the lock [env: SYNCGUARD_KEY]",
        value_name = "KEY",
        id = "key_argument",
        conflicts_with = "key",
        value_hint = ValueHint::Other
    )]
    pub(crate) argument: Option<String>,
    /// Name of the lock, as an option
    #[arg(long = "key", short = 'k', value_name = "KEY", id = "key", value_hint = ValueHint::Other)]
    pub(crate) option: Option<String>,
}

/// The names of one or more locks.
#[derive(Args, Debug)]
pub(crate) struct KeysArgs {
    #[arg(
        help = "Name of the lock [env: SYNCGUARD_KEY]",
        value_name = "KEY",
        id = "key_argument",
        conflicts_with = "key",
        value_hint = ValueHint::Other
    )]
    pub(crate) argument: Option<String>,
    /// Name of the lock, as an option; repeat it to take several locks, all or none
    #[arg(long = "key", short = 'k', value_name = "KEY", id = "key", value_hint = ValueHint::Other)]
    pub(crate) options: Vec<String>,
}

/// The TTL of a lock, and how long to wait for it.
#[derive(Args, Debug)]
pub(crate) struct Waiting {
    /// Time after which the lock expires unless it is renewed
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "30s",
        value_parser = duration,
        value_hint = ValueHint::Other
    )]
    pub(crate) ttl: Duration,
    /// How long to wait for the lock: 10 (seconds), 500ms, 2m, … or forever
    #[arg(
        long,
        short,
        value_name = "DURATION",
        default_value = "5s",
        value_parser = wait_limit,
        value_hint = ValueHint::Other
    )]
    pub(crate) wait: WaitLimit,
    /// Make one attempt and do not wait
    #[arg(long, short, conflicts_with = "wait")]
    pub(crate) no_wait: bool,
    #[command(flatten)]
    pub(crate) conflict: Conflict,
    #[command(flatten)]
    pub(crate) holder: Holder,
}

/// What others see about the holder of the lock.
#[derive(Args, Clone, Debug)]
pub(crate) struct Holder {
    /// Label under which others see this holder, with host name and process id [default: the name
    /// of the command, if there is one]
    #[arg(long, value_name = "TEXT", value_hint = ValueHint::Other)]
    pub(crate) label: Option<String>,
    /// Do not store who holds the lock
    #[arg(long, conflicts_with = "label")]
    pub(crate) no_holder: bool,
}

/// What to do if the lock cannot be acquired.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Conflict {
    /// Exit code if the lock is still held when the wait ends
    #[arg(
        long = "conflict-exit-code",
        short = 'E',
        value_name = "CODE",
        default_value_t = NOT_ACQUIRED,
        value_hint = ValueHint::Other
    )]
    pub(crate) exit_code: u8,
    /// Fail on the first store error, even if it is retryable
    #[arg(long)]
    pub(crate) fail_fast: bool,
}

/// How long to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitLimit {
    For(Duration),
    Forever,
}

#[derive(Args, Debug)]
#[command(override_usage = "syncguard run [OPTIONS] KEY -- COMMAND...\n       \
                            syncguard run [OPTIONS] KEY -c 'SHELL COMMAND'")]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) keys: KeysArgs,
    #[command(flatten)]
    pub(crate) waiting: Waiting,
    /// Let up to COUNT commands run at once: hold one of COUNT slots of the key instead of its
    /// lock; `SYNCGUARD_SLOT` is the number of the slot, from 0
    #[arg(long, value_name = "COUNT", value_hint = ValueHint::Other)]
    pub(crate) slots: Option<u32>,
    /// Keep the lock at least this long, even if the command ends sooner
    #[arg(
        long,
        value_name = "DURATION",
        value_parser = duration,
        value_hint = ValueHint::Other,
        conflicts_with = "slots"
    )]
    pub(crate) hold_at_least: Option<Duration>,
    /// Terminate the command if it takes longer than this
    #[arg(long, value_name = "DURATION", value_parser = duration, value_hint = ValueHint::Other)]
    pub(crate) max_hold: Option<Duration>,
    #[command(flatten)]
    pub(crate) supervised: Supervised,
}

#[derive(Args, Debug)]
#[command(override_usage = "syncguard elect [OPTIONS] KEY -- COMMAND...\n       \
                            syncguard elect [OPTIONS] KEY -c 'SHELL COMMAND'")]
pub(crate) struct Elect {
    #[command(flatten)]
    pub(crate) key: KeyArgs,
    /// Time after which another process leads unless this one renews its lock
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "30s",
        value_parser = duration,
        value_hint = ValueHint::Other
    )]
    pub(crate) ttl: Duration,
    /// End with the first term, with the exit code of the command
    #[arg(long)]
    pub(crate) once: bool,
    #[command(flatten)]
    pub(crate) holder: Holder,
    #[command(flatten)]
    pub(crate) supervised: Supervised,
}

/// A command that runs under a lock.
#[derive(Args, Debug)]
pub(crate) struct Supervised {
    /// Time from SIGTERM to SIGKILL when syncguard terminates the command; less than two thirds of
    /// the TTL [default: a third of the TTL]
    #[arg(long, value_name = "DURATION", value_parser = duration, value_hint = ValueHint::Other)]
    pub(crate) grace: Option<Duration>,
    /// Shell command to run when the lock is lost
    #[arg(long, value_name = "COMMAND", value_hint = ValueHint::CommandString)]
    pub(crate) on_lost: Option<String>,
    /// Shell command, run by /bin/sh
    #[arg(
        long = "command",
        short = 'c',
        value_name = "SHELL COMMAND",
        conflicts_with = "command",
        value_hint = ValueHint::CommandString
    )]
    pub(crate) shell_command: Option<OsString>,
    /// Command and its arguments
    #[arg(
        last = true,
        required_unless_present = "shell_command",
        value_name = "COMMAND",
        value_hint = ValueHint::CommandWithArguments
    )]
    pub(crate) command: Vec<OsString>,
}

#[derive(Args, Debug)]
pub(crate) struct Acquire {
    #[command(flatten)]
    pub(crate) key: KeyArgs,
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
    /// New TTL, counted from now
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "30s",
        value_parser = duration,
        value_hint = ValueHint::Other
    )]
    pub(crate) ttl: Duration,
}

#[derive(Args, Debug)]
pub(crate) struct OneKey {
    #[command(flatten)]
    pub(crate) key: KeyArgs,
}

#[derive(Args, Debug)]
pub(crate) struct Status {
    #[command(flatten)]
    pub(crate) key: KeyArgs,
    /// Show who leads in the election of this name
    #[arg(long)]
    pub(crate) election: bool,
    /// Show this many slots of the key, as with `run --slots`
    #[arg(long, value_name = "COUNT", conflicts_with = "election", value_hint = ValueHint::Other)]
    pub(crate) slots: Option<u32>,
}

#[derive(Args, Debug)]
pub(crate) struct Wait {
    #[command(flatten)]
    pub(crate) key: KeyArgs,
    /// How long to wait: 10 (seconds), 500ms, 2m, … or forever
    #[arg(
        long = "wait",
        short = 'w',
        value_name = "DURATION",
        default_value = "forever",
        value_parser = wait_limit,
        value_hint = ValueHint::Other
    )]
    pub(crate) limit: WaitLimit,
    #[command(flatten)]
    pub(crate) conflict: Conflict,
}

#[derive(Args, Debug)]
pub(crate) struct OneId {
    /// Lock id printed by `acquire`; - reads it from standard input, which hides it from `ps`
    #[arg(allow_hyphen_values = true, value_hint = ValueHint::Other)]
    pub(crate) lock_id: String,
}

#[derive(Args, Debug)]
pub(crate) struct Ls {
    /// List only keys that begin with this
    #[arg(long, value_name = "TEXT", value_hint = ValueHint::Other)]
    pub(crate) prefix: Option<String>,
    /// List only locks whose holder (host, program or label) contains this
    #[arg(long, value_name = "TEXT", value_hint = ValueHint::Other)]
    pub(crate) holder: Option<String>,
    /// List only locks that have been held for longer than this
    #[arg(long, value_name = "DURATION", value_parser = duration, value_hint = ValueHint::Other)]
    pub(crate) older_than: Option<Duration>,
    /// List at most this many locks, the first by key
    #[arg(long, value_name = "COUNT", default_value_t = 1000, value_hint = ValueHint::Other)]
    pub(crate) limit: usize,
    /// Count the processes that wait for each lock
    #[arg(long)]
    pub(crate) waiters: bool,
    /// Show hashes instead of keys
    #[arg(long)]
    pub(crate) hashed: bool,
    /// List again every second; at a terminal, in place
    #[arg(long)]
    pub(crate) watch: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Watch {
    /// Names of the locks [default: all locks]
    #[arg(value_name = "KEY", value_hint = ValueHint::Other)]
    pub(crate) keys: Vec<String>,
    /// How often to look at the store, besides its notifications
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "1s",
        value_parser = duration,
        value_hint = ValueHint::Other
    )]
    pub(crate) interval: Duration,
}

#[derive(Args, Debug)]
pub(crate) struct Break {
    #[command(flatten)]
    pub(crate) key: KeyArgs,
    /// Why the lock is broken; shown to its holder
    #[arg(long, value_name = "TEXT", value_hint = ValueHint::Other)]
    pub(crate) reason: Option<String>,
    /// Do not ask for confirmation
    #[arg(long, short)]
    pub(crate) yes: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Fence {
    /// Remember the fence for a resource in the lock store; exit code 1 if the fence is
    /// stale
    Check(FenceCheck),
}

#[derive(Args, Debug)]
pub(crate) struct FenceCheck {
    #[arg(help = "Fence of the lock [env: SYNCGUARD_FENCE]", value_hint = ValueHint::Other)]
    pub(crate) fence: Option<String>,
    /// Name of what is about to be written, the same in all programs that write it
    #[arg(long, value_name = "NAME", value_hint = ValueHint::Other)]
    pub(crate) resource: String,
    #[arg(
        help = "Name of the lock, to refuse the fence of another lock [env: SYNCGUARD_KEY]",
        long,
        short = 'k',
        value_name = "KEY",
        value_hint = ValueHint::Other
    )]
    pub(crate) key: Option<String>,
}

#[derive(Args, Debug)]
pub(crate) struct Gc {
    /// Delete counters whose last grant is longer ago than this; at least 48h
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "7d",
        value_parser = duration,
        value_hint = ValueHint::Other
    )]
    pub(crate) older_than: Duration,
}

#[derive(Args, Debug)]
pub(crate) struct Doctor {
    /// Exit with code 1 on warnings too
    #[arg(long)]
    pub(crate) strict: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Ui {
    /// Address to listen on; one that other machines can reach needs --token-file
    /// [default: a free port of 127.0.0.1]
    #[arg(long, value_name = "ADDRESS:PORT", value_hint = ValueHint::Other)]
    pub(crate) listen: Option<SocketAddr>,
    /// File with the token that a browser must present [default: a random token, in the URL]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) token_file: Option<PathBuf>,
    /// Let the page break locks
    #[arg(long)]
    pub(crate) allow_break: bool,
}

/// Parses a duration with units, or a number of seconds.
fn duration(text: &str) -> Result<Duration, String> {
    const EXPECTED: &str = "expected seconds, or a duration such as 500ms, 30s, 5m or \"1h 30m\"";
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    if is_number(whole) && is_number(fraction) {
        let seconds = text.parse().ok().and_then(|text| Duration::try_from_secs_f64(text).ok());
        return seconds.ok_or_else(|| EXPECTED.to_owned());
    }
    humantime::parse_duration(text).map_err(|_cause| EXPECTED.to_owned())
}

fn wait_limit(text: &str) -> Result<WaitLimit, String> {
    match text {
        "forever" => Ok(WaitLimit::Forever),
        _ => duration(text).map(WaitLimit::For),
    }
}
