//! Checks of text: lines that are too long, links in documents that lead nowhere, and subjects of
//! commits.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::shell::{Outcome, root};

/// The longest line of a Rust file.
const COLUMNS: usize = 100;

/// The longest subject of a commit.
const SUBJECT_COLUMNS: usize = 72;

/// The last commit whose subject is not checked; older ones are too long.
const UNCHECKED: &str = "35b9890509";

/// Where documents that leave the repository point to.
const REPOSITORY: &str = "https://github.com/syncguard/syncguard/blob/main/";

/// Checks all files that git knows.
pub(crate) fn check() -> Outcome {
    println!("\n== lines, links and subjects of commits");
    let mut found = bad_subjects(&subjects()?);
    for file in files()? {
        let text = fs::read_to_string(root().join(&file)).unwrap_or_default();
        match file.extension().and_then(|extension| extension.to_str()) {
            Some("rs") => {
                found.extend(long_lines(&file, &text));
                found.extend(broken_links(&file, repository_links(&text)));
            }
            Some("md") => found.extend(broken_links(&file, targets(&text))),
            _ => {}
        }
    }
    if found.is_empty() { Ok(()) } else { Err(format!("\n  {}", found.join("\n  "))) }
}

/// The files of the repository that are not symbolic links.
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

/// The subjects of the commits since [`UNCHECKED`]; none if the history does not reach back to it.
fn subjects() -> Outcome<String> {
    let range = format!("{UNCHECKED}..HEAD");
    let log = ["log", "--no-merges", "--format=%s", &range];
    let output = Command::new("git").current_dir(root()).args(log).output();
    let output = output.map_err(|cause| format!("git log: {cause}"))?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Subjects that are not `module: imperative, lowercase, no period`, or that are too long.
fn bad_subjects(subjects: &str) -> Vec<String> {
    let is_good = |subject: &str| {
        subject.chars().count() <= SUBJECT_COLUMNS
            && !subject.ends_with('.')
            && subject.split_once(": ").is_some_and(|(module, change)| {
                module.starts_with(|letter: char| letter.is_ascii_lowercase())
                    && !change.starts_with(char::is_whitespace)
                    && !change.is_empty()
            })
    };
    let bad = subjects.lines().filter(|subject| !is_good(subject));
    bad.map(|subject| {
        format!("expected \"module: imperative\" in {SUBJECT_COLUMNS} columns: {subject}")
    })
    .collect()
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

/// The links from the documentation of a Rust file to documents of the repository. `cargo doc`
/// checks all other links.
fn repository_links(text: &str) -> Vec<String> {
    let comments = text.lines().filter(|line| line.trim_start().starts_with("//"));
    let is_here = |target: &String| target.starts_with(REPOSITORY);
    comments.flat_map(targets).filter(is_here).collect()
}

/// Links to files that do not exist, and to headings that their files do not have.
fn broken_links(file: &Path, targets: Vec<String>) -> Vec<String> {
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
    let broken = targets.into_iter().filter(is_broken);
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
        let broken =
            broken_links(Path::new("README.md"), targets("[a](no-such-file.md) [b](#no-heading)"));
        assert_eq!(broken.len(), 2, "{broken:?}");
        let comment = format!("//! [c]({REPOSITORY}no-such-file.md), [d](Self::e)");
        let broken = broken_links(Path::new("x.rs"), repository_links(&comment));
        assert_eq!(broken.len(), 1, "{broken:?}");
        assert_eq!(long_lines(Path::new("x.rs"), &"x".repeat(101)).len(), 1);
    }

    #[test]
    fn bad_subjects_of_commits_are_reported() {
        let good = "redis: release truncated keys\nlock, backends: model the protocol";
        assert_eq!(bad_subjects(good), [""; 0]);
        let long = format!("redis: {}", "x".repeat(66));
        for bad in ["Fix it", "redis: release keys.", "redis: ", &long] {
            assert_eq!(bad_subjects(bad).len(), 1, "{bad}");
        }
    }
}
