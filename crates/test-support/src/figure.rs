//! Figures of a test run, such as how many states a test has visited.

use std::fmt::Display;
use std::fs::File;
use std::io::Write;

/// Prints a figure. If `SYNCGUARD_FIGURES` names a file, it is also appended there, for the table
/// that `cargo xtask test` prints.
pub fn figure(name: &str, value: impl Display) {
    println!("figure: {name} = {value}");
    if let Some(path) = std::env::var_os("SYNCGUARD_FIGURES") {
        // One write per line, because several tests append at once.
        let line = format!("{name}\t{value}\n");
        let file = File::options().append(true).create(true).open(path);
        file.and_then(|mut file| file.write_all(line.as_bytes())).expect("a writable file");
    }
}
