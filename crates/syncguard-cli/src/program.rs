//! Starts a program as a shell does, including scripts without a shebang, and explains failures.

use std::ffi::{OsStr, OsString};
use std::io::{ErrorKind, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;

use crate::exit::{Failure, NOT_EXECUTABLE, NOT_FOUND, USAGE};
use crate::output;

/// Starts a command with `spawn`. Runs a script without a shebang in `/bin/sh`.
pub(crate) fn start<T>(
    command: &[OsString],
    spawn: impl Fn(&[OsString]) -> std::io::Result<T>,
) -> Result<T, Failure> {
    let Some((program, arguments)) = command.split_first() else {
        return Err(Failure::new(USAGE, "no command; use syncguard run KEY -- COMMAND"));
    };
    let cause = match spawn(command) {
        Ok(started) => return Ok(started),
        Err(cause) => cause,
    };
    if cause.raw_os_error() == Some(Errno::ENOEXEC as i32)
        && let Some(script) = find(program).filter(|file| is_script(file))
    {
        let command = [&["/bin/sh".into(), script.into()], arguments].concat();
        return spawn(&command).map_err(|cause| failure(program, &cause));
    }
    Err(failure(program, &cause))
}

/// Returns the file that a program name refers to.
fn find(program: &OsStr) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Some(program.into());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|file| file.is_file())
}

fn failure(program: &OsStr, cause: &std::io::Error) -> Failure {
    let name = output::printable(&program.to_string_lossy());
    if cause.kind() != ErrorKind::NotFound {
        return Failure::new(NOT_EXECUTABLE, format!("cannot run {name}: {cause}"));
    }
    match find(program).filter(|file| file.exists()).map(|file| interpreter(&file)) {
        None => Failure::new(NOT_FOUND, format!("command not found: {name}")),
        Some(Some(interpreter)) => {
            let interpreter = output::printable(&interpreter);
            let message =
                format!("cannot run {name}: its interpreter {interpreter} does not exist");
            Failure::new(NOT_EXECUTABLE, message)
        }
        Some(None) => {
            let message = format!("cannot run {name}: its loader or a library does not exist");
            Failure::new(NOT_EXECUTABLE, message)
        }
    }
}

/// Returns whether a shell can run the file. A binary for another machine has an early NUL byte.
fn is_script(file: &Path) -> bool {
    beginning(file).is_some_and(|beginning| !beginning.contains(&0))
}

/// Returns the interpreter in a script's first line.
fn interpreter(script: &Path) -> Option<String> {
    let beginning = beginning(script)?;
    let text = String::from_utf8_lossy(&beginning);
    // A carriage return is part of the name, and explains why the file is not found.
    let line = text.split('\n').next()?.strip_prefix("#!")?;
    line.split([' ', '\t']).find(|word| !word.is_empty()).map(str::to_owned)
}

fn beginning(file: &Path) -> Option<Vec<u8>> {
    let mut beginning = Vec::new();
    std::fs::File::open(file).ok()?.take(256).read_to_end(&mut beginning).ok()?;
    Some(beginning)
}
