//! Parses the command line, and adds hints to usage errors.

use std::ffi::OsString;

use clap::Parser;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::args::{Cli, Command, Run, Supervised};
use crate::exit::{Failure, USAGE};
use crate::output;

/// Command names of other tools, and the matching ones of `syncguard`.
const COMMANDS: [(&str, &str); 9] = [
    ("lock", "acquire"),
    ("unlock", "release"),
    ("exec", "run"),
    ("renew", "extend"),
    ("list", "ls"),
    ("show", "status"),
    ("info", "status"),
    ("rm", "break"),
    ("delete", "break"),
];

/// Options of other tools, and the matching ones of `syncguard`.
const OPTIONS: [(&str, &str); 7] = [
    ("--timeout", "--wait"),
    ("--nonblock", "--no-wait"),
    ("--nb", "--no-wait"),
    ("--name", "--key"),
    ("--lock", "--key"),
    ("--max-wait", "--wait"),
    ("--json", "--format json"),
];

/// Parses the command line. Help and usage errors end the process.
pub(crate) fn parse() -> Cli {
    let typed: Vec<OsString> = std::env::args_os().collect();
    match Cli::try_parse_from(&typed) {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() && error.kind() != DISPLAYS_HELP => {
            // clap drops control characters, so escape the arguments and parse them again.
            let escaped = typed.iter().map(|word| output::printable(&word.to_string_lossy()));
            let shown = Cli::try_parse_from(escaped).err().unwrap_or(error);
            let text = shown.render().to_string();
            let text = text.strip_prefix("error: ").unwrap_or(&text);
            eprint!("syncguard: {}", output::shown(text));
            let error = shown;
            if let Some(hint) = hint(&error, &typed) {
                eprintln!("syncguard: {hint}");
            }
            std::process::exit(i32::from(USAGE));
        }
        Err(help) => help.exit(),
    }
}

/// The kind of error that `syncguard` without arguments causes: it prints the help.
const DISPLAYS_HELP: ErrorKind = ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;

fn hint(error: &clap::Error, typed: &[OsString]) -> Option<String> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let ours = |table: &[(&str, &'static str)], theirs: &str| {
        table.iter().find(|(other, _)| *other == theirs).map(|(_, ours)| *ours)
    };
    if let Some(theirs) = text(ContextKind::InvalidSubcommand) {
        return ours(&COMMANDS, theirs).map(|ours| format!("did you mean `syncguard {ours}`?"));
    }
    if error.kind() == ErrorKind::UnknownArgument
        && let Some(ours) = text(ContextKind::InvalidArg)
            .and_then(|theirs| ours(&OPTIONS, theirs.split('=').next().unwrap_or_default()))
    {
        return Some(format!("did you mean `{ours}`?"));
    }
    let command = typed.iter().find(|word| *word == "run" || *word == "elect");
    let has_dashes = typed.iter().any(|word| word == "--");
    let may_be_the_command = matches!(
        error.kind(),
        ErrorKind::UnknownArgument
            | ErrorKind::ArgumentConflict
            | ErrorKind::MissingRequiredArgument
            | ErrorKind::TooManyValues
    );
    let command = command.filter(|_| !has_dashes && may_be_the_command)?.to_string_lossy();
    Some(format!("did you mean `--` before the command? syncguard {command} KEY -- COMMAND"))
}

/// Refuses contradictory options, and turns `-c` into a `/bin/sh` command.
pub(crate) fn check(cli: &mut Cli) -> Result<(), Failure> {
    let (supervised, label) = match &mut cli.command {
        Command::Run(run) => {
            check_run(run)?;
            (&mut run.supervised, &mut run.waiting.holder.label)
        }
        Command::Elect(elect) => (&mut elect.supervised, &mut elect.holder.label),
        _ => return Ok(()),
    };
    if label.is_none() {
        *label = name_of(supervised);
    }
    if let Some(command) = supervised.shell_command.take() {
        supervised.command = vec!["/bin/sh".into(), "-c".into(), command];
    }
    Ok(())
}

fn check_run(run: &Run) -> Result<(), Failure> {
    if let (Some(least), Some(most)) = (run.hold_at_least, run.max_hold)
        && least > most
    {
        let message = "--hold-at-least must not be longer than --max-hold";
        return Err(Failure::new(USAGE, message).hint("increase --max-hold"));
    }
    if run.keys.options.len() > 1 && run.hold_at_least.is_some() {
        return Err(Failure::new(USAGE, "--hold-at-least works with one key only"));
    }
    if run.keys.options.len() > 1 && run.slots.is_some() {
        return Err(Failure::new(USAGE, "--slots works with one key only"));
    }
    Ok(())
}

/// Returns the name of the command without its arguments, which may be secret.
fn name_of(supervised: &Supervised) -> Option<String> {
    if let Some(shell_command) = &supervised.shell_command {
        let shell_command = shell_command.to_string_lossy();
        // An assignment before the command may be secret too, and its quotes may contain spaces.
        let name = shell_command.split_whitespace().next().filter(|word| !word.contains('='));
        return name.map(str::to_owned);
    }
    supervised.command.first().map(|command| command.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, FromArgMatches};

    use super::*;
    use crate::address::Address;

    #[test]
    fn no_arguments_panic() {
        let seeds: [&[u8]; 10] = [
            b"run\nnightly\n--\nbackup\n--all",
            b"run\n--key\nk\n--ttl\n30s\n--wait\n1h 30m\n-c\ntrue",
            b"run\nk\n--hold-at-least\n5\n--max-hold\n4\n--\ntrue",
            b"--url\nredis://u:s3cr3t@h:6379\n--format\njson\nacquire\nk\n--no-wait",
            b"release\n-",
            b"extend\nWERfqnNu2ScFxRRPeY_ufw\n--ttl\n1.5",
            b"wait\nk\n--wait\nforever",
            b"-vv\nls\n--raw",
            b"break\nk\n--yes",
            b"lock\nk\n--timeout=3",
        ];
        let mut command = Cli::command().no_binary_name(true);
        test_support::fuzz("cli_arguments", env!("CARGO_MANIFEST_DIR"), seeds, |bytes| {
            use std::os::unix::ffi::OsStringExt;
            let words: Vec<OsString> = bytes
                .split(|&byte| byte == b'\n')
                .map(|word| OsString::from_vec(word.to_vec()))
                .collect();
            let text = String::from_utf8_lossy(bytes);
            let address = Address::parse(&text).map(|address| address.place());
            let parsed = command.try_get_matches_from_mut(&words);
            match parsed.and_then(|matches| Cli::from_arg_matches(&matches)) {
                Ok(mut cli) => {
                    let checked = check(&mut cli).is_ok();
                    format!("{:?} {checked}", std::mem::discriminant(&cli.command))
                }
                Err(error) => {
                    format!("{:?} {:?} {}", error.kind(), hint(&error, &words), address.is_some())
                }
            }
        });
    }
}
