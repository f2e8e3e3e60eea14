//! Starts processes. Signals that this process blocks are not blocked in the new process; signals
//! that were ignored on entry stay ignored.

use std::ffi::{CString, OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;

use nix::fcntl::OFlag;
use nix::spawn::{PosixSpawnAttr, PosixSpawnFileActions, PosixSpawnFlags, posix_spawnp};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::stat::Mode;
use nix::unistd::Pid;

/// Environment variables to set, or to remove (`None`).
pub(crate) type Variables<'a> = [(&'a str, Option<&'a str>)];

/// Starts a program from the search path, in `group`, or in the process group of this process with
/// an empty standard input.
pub(crate) fn spawn(
    command: &[OsString],
    variables: &Variables<'_>,
    group: Option<Pid>,
) -> io::Result<Pid> {
    let arguments: Vec<CString> =
        command.iter().map(|text| c_string(text)).collect::<Result<_, _>>()?;
    let program = arguments.first().ok_or(io::ErrorKind::InvalidInput)?;
    let mut attributes = PosixSpawnAttr::init()?;
    let mut flags =
        PosixSpawnFlags::POSIX_SPAWN_SETSIGDEF | PosixSpawnFlags::POSIX_SPAWN_SETSIGMASK;
    attributes.set_sigmask(&SigSet::empty())?;
    // Every Rust program ignores it; restore the default.
    let mut default = SigSet::empty();
    default.add(Signal::SIGPIPE);
    attributes.set_sigdefault(&default)?;
    let mut files = PosixSpawnFileActions::init()?;
    if let Some(group) = group {
        attributes.set_pgroup(group)?;
        flags |= PosixSpawnFlags::POSIX_SPAWN_SETPGROUP;
    } else {
        files.add_open(0, "/dev/null", OFlag::O_RDONLY, Mode::empty())?;
    }
    attributes.set_flags(flags)?;
    Ok(posix_spawnp(program, &files, &attributes, &arguments, &environment(variables)?)?)
}

fn environment(variables: &Variables<'_>) -> io::Result<Vec<CString>> {
    let is_kept = |name: &OsStr| !variables.iter().any(|(changed, _)| name == *changed);
    let pair = |name: &OsStr, value: &OsStr| {
        let mut pair = name.to_owned();
        pair.push("=");
        pair.push(value);
        c_string(&pair)
    };
    let kept = std::env::vars_os().filter(|(name, _)| is_kept(name));
    let kept = kept.map(|(name, value)| pair(&name, &value));
    let added = variables.iter().filter_map(|(name, value)| Some((name, (*value)?)));
    let added = added.map(|(name, value)| pair(OsStr::new(name), OsStr::new(value)));
    kept.chain(added).collect()
}

fn c_string(text: &OsStr) -> io::Result<CString> {
    CString::new(text.as_bytes().to_vec()).map_err(|_nul| io::ErrorKind::InvalidInput.into())
}
