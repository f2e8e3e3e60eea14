//! The import rule between the rings: a ring imports only those below it.

use std::fs;
use std::path::Path;

/// Each ring and what it may import from this crate.
const RINGS: [(&str, &[&str]); 9] = [
    ("common", &["common"]),
    ("contract", &["common", "contract"]),
    ("backends", &["common", "contract", "backends"]),
    ("layers", &["common", "contract", "layers"]),
    ("connect.rs", &["common", "contract", "backends"]),
    ("diagnostics.rs", &["common", "contract", "connect"]),
    ("lock", &["common", "contract", "lock"]),
    ("primitives", &["common", "contract", "lock"]),
    ("blocking", &["common", "contract", "lock"]),
];

fn sources(path: &Path, found: &mut Vec<(String, String)>) {
    if path.is_dir() {
        for entry in fs::read_dir(path).expect("readable") {
            sources(&entry.expect("readable").path(), found);
        }
    } else if path.extension().is_some_and(|extension| extension == "rs") {
        let text = fs::read_to_string(path).expect("readable");
        found.push((path.display().to_string(), text));
    }
}

#[test]
fn every_ring_imports_only_the_rings_below() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut checked = 0;
    for (ring, allowed) in RINGS {
        let mut files = Vec::new();
        sources(&root.join(ring), &mut files);
        assert!(!files.is_empty(), "{ring} is gone");
        for (path, text) in files {
            for line in text.lines() {
                // Documentation links and the tests of a file may name anything.
                if line.starts_with("#[cfg(test)]") || line.starts_with("#![cfg(test)]") {
                    break;
                }
                let line = line.trim_start();
                if line.starts_with("//") {
                    continue;
                }
                // A name at the root of the crate, as in `crate::LockId`, also belongs to a ring.
                for rest in line.split("crate::").skip(1) {
                    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
                    let module = &rest[..end.unwrap_or(rest.len())];
                    assert!(allowed.contains(&module), "{path}: {line}");
                    checked += 1;
                }
            }
        }
    }
    assert!(checked > 50);
}

/// The engine's schedules interrupt a thread only at this mutex, and would hang at another one.
#[test]
fn the_engine_shares_state_only_behind_the_mutex_that_schedules_reach() {
    let mut files = Vec::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for place in ["lock", "common/sharded.rs", "contract/notifier.rs"] {
        sources(&root.join(place), &mut files);
    }
    assert!(files.len() > 10);
    for (path, text) in files {
        for line in text.lines().filter(|line| line.contains("std::sync::")) {
            assert!(!line.contains("Mutex") && !line.contains("RwLock"), "{path}: {line}");
        }
    }
}

/// Backends use the one constant for the tolerance; none of their files has its own number.
#[test]
fn no_backend_has_a_tolerance_of_its_own() {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/backends"), &mut files);
    for (path, text) in files {
        for line in text.lines().filter(|line| line.to_lowercase().contains("tolerance")) {
            assert!(!line.contains("1000") && !line.contains("1_000"), "{path}: {line}");
        }
    }
}
