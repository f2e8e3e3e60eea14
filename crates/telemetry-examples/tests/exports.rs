//! What the examples export, and that the dashboard asks for metrics that exist.

use std::collections::BTreeSet;
use std::process::Command;

fn output_of(program: &str) -> String {
    let output = Command::new(program).output().expect("the example runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// The names in a text that begin with `syncguard_`.
fn names(text: &str) -> impl Iterator<Item = &str> {
    let is_name = |letter: char| letter.is_ascii_lowercase() || letter == '_';
    text.match_indices("syncguard_").map(move |(at, _)| {
        let rest = &text[at..];
        &rest[..rest.find(|letter| !is_name(letter)).unwrap_or(rest.len())]
    })
}

/// The same, without the endings that Prometheus adds to histograms.
fn metrics(text: &str) -> BTreeSet<String> {
    let parts = ["_bucket", "_sum", "_count"];
    let whole = |name| parts.iter().find_map(|part| str::strip_suffix(name, part)).unwrap_or(name);
    names(text).map(|name| whole(name).to_owned()).collect()
}

#[test]
fn prometheus_gets_every_metric() {
    let exported = output_of(env!("CARGO_BIN_EXE_prometheus"));
    for line in [
        r#"syncguard_acquired_total{backend="memory",key="report"} 3"#,
        r#"syncguard_contended_total{backend="memory",key="report"} 1"#,
        r#"syncguard_timed_out_total{backend="memory",key="report"} 1"#,
        r#"syncguard_lost_total{backend="memory",key="import",reason="expired"} 1"#,
        r#"syncguard_held_locks{backend="memory",key="report"} 0"#,
        r#"syncguard_queued_calls{backend="memory",key="report"} 0"#,
        r#"syncguard_hand_over_seconds_count{backend="memory",key="report"} 1"#,
    ] {
        assert!(exported.lines().any(|exported| exported == line), "{line}\n{exported}");
    }
    assert!(!exported.contains("daily"), "no key is exported");
}

#[test]
fn opentelemetry_gets_waits_and_holds_below_the_request() {
    let exported = output_of(env!("CARGO_BIN_EXE_opentelemetry"));
    for name in ["request", "wait", "hold"] {
        let line = format!("Name         : {name}");
        assert!(exported.lines().any(|exported| exported.trim() == line), "{name}\n{exported}");
    }
    assert!(exported.contains("key_hash") && !exported.contains("report:daily"), "{exported}");
}

#[test]
fn the_dashboard_asks_for_metrics_that_exist() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let read = |file: &str| std::fs::read_to_string(format!("{root}/{file}")).expect("it exists");
    let dashboard = read("docs/dashboards/syncguard.json");
    let dashboard: serde_json::Value = serde_json::from_str(&dashboard).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    let queries: Vec<&str> = targets.map(|target| target["expr"].as_str().expect("text")).collect();
    assert!(queries.len() > 8, "{queries:?}");
    let asked = metrics(&queries.join("\n"));
    // Those of the library, as its documentation and the page's list them.
    let documented = metrics(&read("docs/guide/telemetry.md"));
    let documented: BTreeSet<_> =
        documented.union(&metrics(&read("docs/guide/ui.md"))).cloned().collect();
    assert_eq!(asked.difference(&documented).collect::<Vec<_>>(), Vec::<&String>::new());
    // What the documentation lists is what the example exports, and what the page serves.
    let served = metrics(&read("crates/syncguard-cli/src/ui/server.rs"));
    let output = output_of(env!("CARGO_BIN_EXE_prometheus"));
    for bucket in names(&queries.join("\n")).filter(|name| name.ends_with("_bucket")) {
        assert!(names(&output).any(|name| name == bucket), "{bucket} is a histogram");
    }
    let mut exported = metrics(&output);
    // No renewal fails in the example.
    exported.insert("syncguard_renewals_failed_total".to_owned());
    let existing: BTreeSet<_> = exported.union(&served).cloned().collect();
    assert_eq!(documented, existing);
}
