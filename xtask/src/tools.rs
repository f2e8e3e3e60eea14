//! Tools that the checks need, installed by themselves into a cache beside the user's other ones.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::shell::{Outcome, cargo, step};

/// Where tools are kept between runs: `SYNCGUARD_TOOLS`, or the user's cache.
fn directory() -> Outcome<PathBuf> {
    if let Some(directory) = std::env::var_os("SYNCGUARD_TOOLS") {
        return Ok(directory.into());
    }
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let cache = cache.or_else(home).ok_or("set HOME, or SYNCGUARD_TOOLS, for the tools' cache")?;
    Ok(cache.join("syncguard-tools"))
}

/// Makes sure that a program of a Debian package is there: installs it where that is possible, and
/// says what to install where it is not.
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
        .map_err(|cause| format!("{program} is missing; install the package {package} ({cause})"))
}

/// A program from crates.io at exactly this version, built the first time it is asked for, by the
/// profile `dev` if it is built more often than it is slow.
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

/// The emulator of Firestore; the path with which tests and benchmarks find it.
pub(crate) fn firestore_emulator() -> Outcome<OsString> {
    let program = from_crates_io("hidane", "0.6.0", "release")?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = program.parent().map(Path::to_owned).into_iter();
    std::env::join_paths(folders.chain(std::env::split_paths(&path)))
        .map_err(|cause| format!("the path: {cause}"))
}
