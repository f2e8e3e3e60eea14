//! Checks of text: lines that are too long, and links in documents that lead nowhere.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::shell::{Outcome, root};

/// The longest line of a Rust file.
const COLUMNS: usize = 100;

/// Where documents that leave the repository point to.
const REPOSITORY: &str = "https://github.com/syncguard/syncguard/blob/main/";

/// Checks all files that git knows.
pub(crate) fn check() -> Outcome {
    println!("\n== lines and links");
    let mut found = Vec::new();
    for file in files()? {
        let text = fs::read_to_string(root().join(&file)).unwrap_or_default();
        match file.extension().and_then(|extension| extension.to_str()) {
            Some("rs") => found.extend(long_lines(&file, &text)),
            Some("md") => found.extend(broken_links(&file, &text)),
            _ => {}
        }
    }
    if found.is_empty() { Ok(()) } else { Err(format!("\n  {}", found.join("\n  "))) }
}

/// The files of the repository that are no links.
fn files() -> Outcome<Vec<PathBuf>> {
    let list = ["ls-files", "--cached", "--others", "--exclude-standard"];
    let output = Command::new("git").current_dir(root()).args(list).output();
    let output = output.map_err(|cause| format!("git ls-files: {cause}"))?;
    let names = String::from_utf8_lossy(&output.stdout).into_owned();
    let is_file = |path: &PathBuf| {
        fs::symlink_metadata(root().join(path)).is_ok_and(|metadata| metadata.is_file())
    };
    Ok(names.lines().map(PathBuf::from).filter(is_file).collect())
}

/// Lines over the limit. Strings, links, tables and hidden lines of examples cannot be wrapped.
fn long_lines(file: &Path, text: &str) -> Vec<String> {
    const EXEMPT: [&str; 5] = ["http", "\"", "/// |", "//! |", "/// # "];
    let is_long = |line: &str| {
        line.chars().count() > COLUMNS && !EXEMPT.iter().any(|part| line.contains(part))
    };
    let lines = text.lines().enumerate().filter(|(_, line)| is_long(line));
    lines.map(|(at, _)| format!("{}:{}: over {COLUMNS} columns", file.display(), at + 1)).collect()
}

/// Links to files that do not exist, and to headings that their files do not have.
fn broken_links(file: &Path, text: &str) -> Vec<String> {
    let folder = file.parent().unwrap_or(Path::new(""));
    let is_broken = |target: &String| {
        let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
        let path = match path.strip_prefix(REPOSITORY) {
            Some(path) => root().join(path),
            None if path.contains("://") || path.starts_with("mailto:") => return false,
            None if path.is_empty() => root().join(file),
            None => root().join(folder).join(path),
        };
        if anchor.is_empty() || path.extension().is_none_or(|extension| extension != "md") {
            return !path.exists();
        }
        !fs::read_to_string(path).is_ok_and(|text| anchors(&text).any(|known| known == anchor))
    };
    let broken = targets(text).into_iter().filter(is_broken);
    broken.map(|target| format!("{}: broken link {target}", file.display())).collect()
}

/// The targets of the links in a document, those in code blocks excepted.
fn targets(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for line in prose(text) {
        if let Some((_, target)) = line.strip_prefix('[').and_then(|line| line.split_once("]: ")) {
            found.push(target.trim().to_owned());
        }
        let mut rest = line;
        while let Some((_, after)) = rest.split_once("](") {
            let Some((target, after)) = after.split_once(')') else { break };
            found.push(target.to_owned());
            rest = after;
        }
    }
    found
}

/// The anchors of a document: its headings as GitHub names them, and those that it names itself.
fn anchors(text: &str) -> impl Iterator<Item = String> {
    let slug = |heading: &str| {
        let kept = |letter: char| letter.is_alphanumeric() || matches!(letter, ' ' | '-' | '_');
        let text: String = heading.to_lowercase().chars().filter(|letter| kept(*letter)).collect();
        text.trim().replace(' ', "-")
    };
    prose(text).filter_map(move |line| match line.split_once("<a id=\"") {
        Some((_, after)) => after.split_once('"').map(|(name, _)| name.to_owned()),
        None => line.starts_with('#').then(|| slug(line.trim_start_matches('#'))),
    })
}

/// The lines outside of code blocks.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut is_code = false;
    text.lines().filter(move |line| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_and_anchors_are_found_outside_of_code() {
        let text = "# A `b` c\n[x](y.md#z) [u](v)\n```\n[no](link)\n```\n[ref]: https://h/\n<a id=\"old\"></a>";
        assert_eq!(targets(text), ["y.md#z", "v", "https://h/"]);
        assert_eq!(anchors(text).collect::<Vec<_>>(), ["a-b-c", "old"]);
    }

    #[test]
    fn a_broken_link_and_a_long_line_are_reported() {
        let broken = broken_links(Path::new("README.md"), "[a](no-such-file.md) [b](#no-heading)");
        assert_eq!(broken.len(), 2, "{broken:?}");
        assert_eq!(long_lines(Path::new("x.rs"), &"x".repeat(101)).len(), 1);
    }
}
