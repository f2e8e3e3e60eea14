//! `cargo xtask torture`: composed faults against real stores, and a report.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use crate::figures;
use crate::shell::{Outcome, cargo, root, step, target};
use crate::test::{REQUIRE_SERVERS, install_servers};

/// The stores of each backend: the ways in which its server is deployed.
const STORES: [(&str, &[&str]); 5] = [
    ("memory", &["memory"]),
    ("sqlite", &["sqlite", "sqlite-replaced"]),
    ("redis", &["redis", "redis-sentinel", "redis-cluster", "redis-shards"]),
    ("postgres", &["postgres", "postgres-pgbouncer", "postgres-standby"]),
    ("firestore", &["firestore"]),
];

/// The stores and for how many seconds each is tortured with `--brief`.
const BRIEFLY: [&str; 11] = [
    "firestore=60",
    "memory=60",
    "redis=40",
    "postgres=40",
    "sqlite=35",
    "redis-sentinel=35",
    "redis-cluster=35",
    "redis-shards=25",
    "sqlite-replaced=25",
    "postgres-standby=20",
    "postgres-pgbouncer=20",
];

/// Tortures the named backends or stores, or all, with the given options.
pub(crate) fn run(arguments: &[String]) -> Outcome {
    if arguments == ["--brief"] {
        let path = install_servers(&STORES.map(|(backend, _)| backend))?;
        step("building", &mut cargo(&["build", "--package", "torture"]))?;
        let figures = figures::file()?;
        briefly(&path, &figures)?;
        return figures::print(&figures, &[&figures::OF_TORTURE]);
    }
    let mut backends = Vec::new();
    let mut passed = Vec::new();
    for argument in arguments {
        let name = argument.split('=').next().unwrap_or_default();
        match STORES.iter().find(|(backend, stores)| *backend == name || stores.contains(&name)) {
            Some((backend, stores)) if *backend == argument => {
                backends.push(*backend);
                passed.extend(stores.iter().map(|store| (*store).to_owned()));
            }
            Some((backend, _)) => {
                backends.push(*backend);
                passed.push(argument.clone());
            }
            None => passed.push(argument.clone()),
        }
    }
    if backends.is_empty() {
        backends = STORES.map(|(backend, _)| backend).to_vec();
    }
    let path = install_servers(&backends)?;
    step("building", &mut cargo(&["build", "--package", "torture"]))?;
    step("torture", &mut torture(&path, &passed))
}

/// Tortures all stores for an hour.
pub(crate) fn soak() -> Outcome {
    run(&["--minutes", "5.5"].map(str::to_owned))
}

/// Tortures all stores briefly, and then with planted bugs. The program is built.
pub(crate) fn briefly(path: &OsStr, figures: &Path) -> Outcome {
    let stores = BRIEFLY.map(str::to_owned);
    // They wait more than they work.
    let jobs = ["--jobs", "4"].map(str::to_owned);
    let mut run = torture(path, &[&stores[..], &jobs[..]].concat());
    step("torture", run.env(figures::VARIABLE, figures))?;
    let bugs = ["bugs", "--jobs", "5"].map(str::to_owned);
    let mut run = torture(path, &bugs);
    step("torture with planted bugs", run.env(figures::VARIABLE, figures))
}

fn torture(path: &OsStr, arguments: &[String]) -> Command {
    let mut command = Command::new(target().join("debug/torture"));
    command.current_dir(root()).args(arguments);
    command.args(["--out"]).arg(target().join("torture"));
    command.env("PATH", path).env(REQUIRE_SERVERS, "1");
    command
}
