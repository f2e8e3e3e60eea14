//! `completions` and `man`: generate completion scripts and manual pages.

use std::fs;
use std::io::Write;
use std::path::Path;

use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;

use crate::args::Cli;
use crate::exit::{CODES, FAILED, Failure};

/// Returns the command without its hidden subcommands.
fn public() -> Command {
    let all = Cli::command();
    let subcommands = all.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    let about = all.get_about().cloned().unwrap_or_default();
    Command::new("syncguard")
        .version(env!("CARGO_PKG_VERSION"))
        .about(about)
        .args(all.get_arguments().cloned())
        .subcommands(subcommands)
        .subcommand_required(true)
}

/// Makes bash complete the words after `--` as a command.
const BASH_PROLOGUE: &str = r#"
    local word
    for ((word = 1; word < COMP_CWORD; word++)); do
        [[ "${COMP_WORDS[word]}" == -- ]] || continue
        if declare -F _comp_command_offset >/dev/null; then
            _comp_command_offset $((word + 1))
        elif declare -F _command_offset >/dev/null; then
            _command_offset $((word + 1))
        elif ((COMP_CWORD == word + 1)); then
            COMPREPLY=( $(compgen -c -- "$2") )
        else
            COMPREPLY=( $(compgen -f -- "$2") )
        fi
        return 0
    done
"#;

/// Does the same in zsh.
const ZSH_PROLOGUE: &str = r"
    integer dashes=${words[(ie)--]}
    if (( dashes < CURRENT )); then
        shift $dashes words
        (( CURRENT -= dashes ))
        _normal
        return
    fi
";

/// Does the same in fish, and turns file completion off elsewhere.
const FISH_EPILOGUE: &str = r#"
complete -c syncguard -f
complete -c syncguard -n "contains -- -- (commandline -opc)" -F -a "(__fish_syncguard_command)"

# Completes what follows -- as if it were typed alone.
function __fish_syncguard_command
    set -l words (commandline -opc) (commandline -ct)
    set -l dashes (contains -i -- -- $words)
    complete -C (string join -- ' ' (string escape -- $words[(math $dashes + 1)..-2]) $words[-1])
end
"#;

pub(crate) fn completions(shell: Shell) -> Result<u8, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut public(), "syncguard", &mut script);
    let mut script = String::from_utf8_lossy(&script).into_owned();
    let prologue = |script: &str, prologue: &str| {
        script.replacen("_syncguard() {\n", &format!("_syncguard() {{{prologue}"), 1)
    };
    match shell {
        Shell::Bash => {
            script = prologue(&script, BASH_PROLOGUE);
            // Do not fall back to file names: an argument without completions is a key.
            script = script.replace(" -o bashdefault -o default ", " ");
        }
        Shell::Zsh => script = prologue(&script, ZSH_PROLOGUE),
        Shell::Fish => script.push_str(FISH_EPILOGUE),
        _ => {}
    }
    print(script.as_bytes())
}

fn print(text: &[u8]) -> Result<u8, Failure> {
    match std::io::stdout().write_all(text).and_then(|()| std::io::stdout().flush()) {
        Err(cause) if cause.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::new(FAILED, format!("cannot write to standard output: {cause}")))
        }
        // Ignore a closed pipe.
        _ => Ok(0),
    }
}

pub(crate) fn man(directory: Option<&Path>) -> Result<u8, Failure> {
    let failed =
        |cause: std::io::Error| Failure::new(FAILED, format!("cannot write manual page: {cause}"));
    let mut command = public().disable_help_subcommand(true);
    command.build();
    let Some(directory) = directory else {
        return print(&page(&command).map_err(failed)?);
    };
    let mut pages = vec![&command];
    while let Some(command) = pages.pop() {
        pages.extend(command.get_subcommands());
        let file = Man::new(command.clone()).get_filename();
        fs::write(directory.join(file), page(command).map_err(failed)?).map_err(failed)?;
    }
    Ok(0)
}

/// Renders a manual page, with the exit codes as a list.
fn page(command: &Command) -> std::io::Result<Vec<u8>> {
    let source = concat!("syncguard ", env!("CARGO_PKG_VERSION"));
    let man = Man::new(command.clone()).source(source);
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut page)?;
    }
    writeln!(page, ".SH \"EXIT STATUS\"")?;
    for (code, meaning) in CODES {
        writeln!(page, ".TP\n\\fB{code}\\fR\n{}", meaning.replace('-', "\\-"))?;
    }
    // Only the whole command has a version.
    if command.get_version().is_some() {
        man.render_version_section(&mut page)?;
    } else {
        writeln!(page, ".SH \"SEE ALSO\"\n\\fBsyncguard\\fR(1)")?;
    }
    Ok(page)
}
