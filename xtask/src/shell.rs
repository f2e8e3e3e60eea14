//! Runs other programs and prints what runs.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// The result of a step; the error is a message.
pub(crate) type Outcome<T = ()> = Result<T, String>;

/// Returns the directory of build results.
pub(crate) fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// Returns the root of the workspace.
pub(crate) fn root() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().expect("xtask is in the workspace").to_owned()
}

/// Returns a `cargo` command with arguments, in the root of the workspace.
pub(crate) fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).args(arguments);
    // `cargo run` has set these for this program. Build scripts would run again, and what depends
    // on them be built again, whenever someone runs cargo with and without xtask in turn.
    for (name, _) in std::env::vars_os() {
        let is_ours = |prefix| name.to_str().is_some_and(|name| name.starts_with(prefix));
        if is_ours("CARGO_PKG_") || is_ours("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command
}

/// Runs a step, and prints its name before and its duration after it.
pub(crate) fn step(name: &str, command: &mut Command) -> Outcome {
    println!("\n== {name}");
    let started = Instant::now();
    let status = command.status().map_err(|cause| {
        format!("{name}: cannot start {}: {cause}", command.get_program().display())
    })?;
    println!("== {name}: {:.0} s", started.elapsed().as_secs_f64());
    if status.success() { Ok(()) } else { Err(format!("{name} failed ({status})")) }
}
