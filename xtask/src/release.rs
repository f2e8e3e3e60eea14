//! `cargo xtask release`, and the checks of what is released.

use std::fs;

use crate::shell::{Outcome, cargo, step, target};

/// Builds the binary as it is released, and prints its size.
pub(crate) fn run() -> Outcome {
    packages()?;
    let build = ["build", "--release", "--package", "syncguard-cli"];
    step("release binary", &mut cargo(&build))?;
    let binary = target().join("release/syncguard");
    let size = fs::metadata(&binary).map_err(|cause| format!("{}: {cause}", binary.display()))?;
    println!("{}: {} KiB", binary.display(), size.len().div_ceil(1024));
    Ok(())
}

/// Builds the packages from what they contain.
pub(crate) fn packages() -> Outcome {
    let packages = ["package", "--package", "syncguard", "--package", "syncguard-cli"];
    step("packages", cargo(&packages).args(["--allow-dirty", "--quiet"]))
}

/// Checks that no dependency needs a newer Rust than the workspace declares. Clippy checks the
/// standard library's functions by its lint `incompatible_msrv`.
pub(crate) fn rust_version() -> Outcome {
    println!("\n== Rust version of the dependencies");
    let mut metadata = cargo(&["metadata", "--format-version", "1", "--locked"]);
    // Only dependencies that the tests have downloaded anyway.
    metadata.args(["--filter-platform", "x86_64-unknown-linux-gnu"]);
    let output = metadata.output().map_err(|cause| format!("cargo metadata: {cause}"))?;
    let too_new = newer_versions(&String::from_utf8_lossy(&output.stdout), ours());
    match too_new.as_slice() {
        [] if output.status.success() => Ok(()),
        [] => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        newer => Err(format!("dependencies need Rust {}", newer.join(", "))),
    }
}

/// The version that the workspace declares.
fn ours() -> (u32, u32) {
    version(env!("CARGO_PKG_RUST_VERSION")).expect("the workspace declares its Rust version")
}

/// Returns the Rust versions in the output of `cargo metadata` that are newer than this one.
fn newer_versions(metadata: &str, than: (u32, u32)) -> Vec<String> {
    let declared = metadata.split("\"rust_version\":\"").skip(1);
    let declared = declared.filter_map(|rest| rest.split_once('"').map(|(text, _)| text));
    declared
        .filter(|text| version(text).is_none_or(|version| version > than))
        .map(str::to_owned)
        .collect()
}

/// Parses the first two numbers of a version.
fn version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dependency_that_needs_a_newer_rust_is_found() {
        let metadata = r#"{"rust_version":"1.88.0"},{"rust_version":null},{"rust_version":"1.92"}"#;
        assert_eq!(newer_versions(metadata, (1, 91)), ["1.92"]);
        assert_eq!(newer_versions(metadata, (1, 92)), [""; 0]);
    }
}
