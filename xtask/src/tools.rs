//! Installs the tools that the checks need, into a directory in the user's cache.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::shell::{Outcome, cargo, step};

/// Returns the directory of the tools: `SYNCGUARD_TOOLS`, or one in the user's cache.
fn directory() -> Outcome<PathBuf> {
    if let Some(directory) = std::env::var_os("SYNCGUARD_TOOLS") {
        return Ok(directory.into());
    }
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let cache = cache.or_else(home).ok_or("no directory for tools; set HOME or SYNCGUARD_TOOLS")?;
    Ok(cache.join("syncguard-tools"))
}

/// Ensures that a program, or a file by its path, of a Debian package is installed. Installs it
/// with `apt-get`; if that fails, the error names the package.
pub(crate) fn from_debian(program: &str, package: &str) -> Outcome {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders = std::env::split_paths(&path).chain([PathBuf::from("/usr/sbin")]);
    if folders.any(|folder| folder.join(program).is_file()) {
        return Ok(());
    }
    let mut update = Command::new("apt-get");
    let mut install = Command::new("apt-get");
    step("apt-get update", update.args(["update", "--quiet"]))
        .and_then(|()| {
            let arguments = ["install", "--quiet", "--yes", "--no-install-recommends", package];
            step(
                &format!("installing {package}"),
                install.args(arguments).env("DEBIAN_FRONTEND", "noninteractive"),
            )
        })
        .map_err(|cause| {
            format!("{program} is not installed; install the package {package} ({cause})")
        })
}

/// Returns a program from crates.io at exactly this version. Builds it on first use, with the given
/// profile: `dev` for a program that takes longer to build than to run.
pub(crate) fn from_crates_io(name: &str, version: &str, profile: &str) -> Outcome<PathBuf> {
    let root = directory()?.join(format!("{name}-{version}"));
    let program = root.join("bin").join(name);
    if !program.exists() {
        let mut install =
            cargo(&["install", "--locked", "--profile", profile, "--version", version, name]);
        step(&format!("installing {name} {version}"), install.arg("--root").arg(&root))?;
    }
    Ok(program)
}

/// Installs the Firestore emulator, and returns a `PATH` on which tests and benchmarks find it.
pub(crate) fn firestore_emulator() -> Outcome<OsString> {
    let program = from_crates_io("hidane", "0.6.0", "release")?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = program.parent().map(Path::to_owned).into_iter();
    std::env::join_paths(folders.chain(std::env::split_paths(&path)))
        .map_err(|cause| format!("cannot extend PATH: {cause}"))
}
