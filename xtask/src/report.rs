//! The page of the benchmarks: their figures, the machine and the versions, in one HTML file.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::shell::Outcome;

const TEMPLATE: &str = include_str!("report.html");

/// Writes the page. `results` is the JSON of all benchmarks.
pub(crate) fn write(path: &Path, results: &str) -> Outcome {
    let facts: Vec<String> = facts().iter().map(|(name, text)| row(name, text)).collect();
    let page = TEMPLATE
        .replace("<!--facts-->", &facts.join("\n"))
        // No figure contains a tag, but a name might one day.
        .replace("/*results*/", &results.replace('<', "\\u003c"));
    fs::write(path, page).map_err(|cause| format!("{}: {cause}", path.display()))
}

fn row(name: &str, text: &str) -> String {
    format!("<tr><th>{name}</th><td>{}</td></tr>", text.replace('&', "&amp;").replace('<', "&lt;"))
}

/// Returns what the figures depend on.
fn facts() -> Vec<(&'static str, String)> {
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let model = model.map_or("unknown processor", |(_, model)| model);
    let mut facts = vec![
        ("date", first_line("date", &["--utc", "+%Y-%m-%d %H:%M UTC"])),
        ("machine", format!("{model}, {cores} cores, shared by servers and clients")),
        ("system", first_line("uname", &["--kernel-name", "--kernel-release", "--machine"])),
        ("commit", first_line("git", &["describe", "--always", "--dirty"])),
        ("Rust", first_line("rustc", &["--version"])),
        ("Redis", first_line("redis-server", &["--version"])),
        ("PostgreSQL", first_line("psql", &["--version"])),
    ];
    facts.retain(|(_, text)| !text.is_empty());
    facts
}

fn first_line(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    text.unwrap_or_default().lines().next().unwrap_or_default().to_owned()
}
