//! The report: one page without external resources, with a timeline per key.

mod data;

use std::io;
use std::path::Path;

use crate::run::Run;

const PAGE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// Writes the report of some runs to a file.
pub fn write(path: &Path, runs: &[Run]) -> io::Result<()> {
    let data = data::of(runs).to_string();
    // A text in the data must not end the script.
    let data = data.replace("</", "<\\/");
    let page =
        PAGE.replace("/*STYLE*/", STYLE).replace("/*SCRIPT*/", SCRIPT).replace("/*DATA*/", &data);
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    std::fs::write(path, page)
}
