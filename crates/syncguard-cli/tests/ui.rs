//! The page of `syncguard ui`, in a real browser and by plain requests.

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::Duration;

use support::{Store, end_of, eventually, send, stderr};
use test_support::{Browser, PostgresOptions};

/// A running `syncguard ui`.
struct Ui {
    process: Child,
    url: String,
}

impl Ui {
    fn start(store: &Store, options: &[&str]) -> Self {
        let mut command = store.command(&[&["ui"], options].concat());
        let mut process =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary runs");
        let mut url = String::new();
        let stdout = process.stdout.take().expect("piped");
        BufReader::new(stdout).read_line(&mut url).expect("it prints the URL");
        assert!(url.starts_with("http://127.0.0.1:"), "{url}");
        Self { process, url: url.trim().to_owned() }
    }

    fn host(&self) -> &str {
        let rest = self.url.strip_prefix("http://").expect("a URL");
        rest.split('/').next().expect("a host")
    }

    fn token(&self) -> &str {
        self.url.split_once("token=").expect("a token").1
    }

    /// Sends a request, and returns the status and the response.
    fn request(&self, line: &str, headers: &[(&str, &str)], body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(self.host()).expect("it listens");
        let mut lines = vec![format!("{line} HTTP/1.1"), "Connection: close".to_owned()];
        if !headers.iter().any(|(name, _)| *name == "Host") {
            lines.push(format!("Host: {}", self.host()));
        }
        lines.extend(headers.iter().map(|(name, value)| format!("{name}: {value}")));
        lines.push(format!("Content-Length: {}\r\n\r\n{body}", body.len()));
        let text = lines.join("\r\n");
        stream.write_all(text.as_bytes()).expect("it reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("it answers");
        let status = answer.split(' ').nth(1).expect("a status").parse().expect("a number");
        (status, answer)
    }

    fn bearer(&self) -> String {
        format!("Bearer {}", self.token())
    }
}

impl Drop for Ui {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

/// Whether the table of locks shows a key.
fn row(key: &str) -> String {
    format!(
        "[...document.querySelectorAll('#locks td.key')].some((td) => td.textContent === '{key}')"
    )
}

#[test]
fn the_page_shows_locks_live_on_every_store() {
    let Some(mut browser) = Browser::start() else { return };
    let mut stores = Store::all();
    let postgres = Store::postgres(&PostgresOptions::default());
    let _server = postgres.map(|(store, server)| {
        stores.push(store);
        server
    });
    for store in stores {
        // A file that does not exist yet is an error of the page, which then recovers.
        let ui = Ui::start(&store, &[]);
        browser.open(&ui.url);
        if store.url.starts_with("sqlite:") {
            browser.wait_for("document.getElementById('error').textContent.includes('exist')");
        }
        let mut holder = store.background(&["first"], "echo x >$FOLDER/held; sleep 60");
        store.wait_for("held");
        browser.wait_for("document.getElementById('status').textContent === 'live'");
        browser.wait_for(&row("first"));
        let mut second = store.background(&["second"], "sleep 60");
        let took = browser.wait_for(&row("second"));
        println!("{}: shown after {took:?}", store.url);
        browser.wait_for("document.getElementById('held').textContent === '2'");
        browser.wait_for("document.querySelectorAll('#timeline rect.hold.live').length === 2");
        send("TERM", second.id());
        end_of(&mut second);
        browser.wait_for("document.getElementById('held').textContent === '1'");
        browser
            .wait_for("document.querySelectorAll('#timeline rect.hold:not(.live)').length === 1");
        assert_eq!(browser.evaluate("document.querySelectorAll('#locks button').length"), 0);
        assert_eq!(browser.evaluate("location.search"), "", "the token is not in the address");
        send("TERM", holder.id());
        end_of(&mut holder);
    }
}

#[test]
fn a_key_is_text_and_never_markup() {
    let Some(mut browser) = Browser::start() else { return };
    let store = Store::sqlite();
    let keys = ["<img src=x onerror='window.hacked=1'>", "</td><script>window.hacked=1</script>"];
    for key in keys {
        assert_eq!(store.code(&["acquire", "-q", "--ttl", "1m", "--key", key]), 0);
    }
    assert_eq!(store.code(&["acquire", "-q", "--ttl", "1m", "--key", "rtl\u{202e}\u{1b}[2J"]), 0);
    let ui = Ui::start(&store, &[]);
    browser.open(&ui.url);
    browser.wait_for("document.querySelectorAll('#locks tr').length === 3");
    browser.wait_for("document.querySelectorAll('#timeline text.key').length === 3");
    let shown = browser.evaluate(
        "[...document.querySelectorAll('#locks td.key')].map((td) => td.textContent).sort()",
    );
    let mut expected = keys.map(str::to_owned).to_vec();
    expected.push("rtl\\u{202e}\\u{1b}[2J".to_owned());
    expected.sort();
    assert_eq!(shown, serde_json::json!(expected));
    let injected = "document.querySelectorAll('main img, main script').length";
    assert_eq!(browser.evaluate(injected), 0);
    assert_eq!(browser.evaluate("typeof window.hacked"), "undefined");
    // The policy also stops what would get past that.
    let inline =
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"hacked=1\">')";
    browser.evaluate(inline);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(browser.evaluate("typeof window.hacked"), "undefined");
}

#[test]
fn a_lock_is_broken_after_its_key_was_typed() {
    let Some(mut browser) = Browser::start() else { return };
    let store = Store::sqlite();
    assert_eq!(store.code(&["acquire", "-q", "--ttl", "1m", "stuck"]), 0);
    let ui = Ui::start(&store, &["--allow-break"]);
    browser.open(&ui.url);
    browser.wait_for(&row("stuck"));
    browser.evaluate("document.querySelector('#locks button').click()");
    let type_key = |text: &str| {
        format!(
            "document.getElementById('confirmation').value = '{text}';
             document.getElementById('confirmation').dispatchEvent(new Event('input'));
             document.getElementById('break-now').disabled"
        )
    };
    assert_eq!(browser.evaluate(&type_key("stuc")), true);
    assert_eq!(browser.evaluate(&type_key("stuck")), false);
    browser.evaluate("document.getElementById('break-now').click()");
    browser.wait_for("!document.getElementById('break').open");
    browser.wait_for("document.querySelectorAll('#timeline .mark.broken').length === 1");
    assert_eq!(store.code(&["status", "stuck"]), 1, "it is free");
}

#[test]
fn a_break_is_marked_and_explained_to_the_holder() {
    let Some(mut browser) = Browser::start() else { return };
    let mut stores = Store::all();
    let postgres = Store::postgres(&PostgresOptions::default());
    let _server = postgres.map(|(store, server)| {
        stores.push(store);
        server
    });
    for store in stores.iter().filter(|store| store.emulator.is_none()) {
        let mut holders = ["page", "shell"].map(|key| store.background(&[key], "sleep 60"));
        let held = |key: &str| store.code(&["status", "-q", key]) == 0;
        eventually("both are held", || held("page") && held("shell"));
        let ui = Ui::start(store, &["--allow-break"]);
        browser.open(&ui.url);
        browser.wait_for("document.querySelectorAll('#timeline rect.hold.live').length === 2");
        assert_eq!(store.code(&["break", "-q", "--yes", "shell"]), 0);
        browser.wait_for("document.querySelectorAll('#timeline .mark.broken').length === 1");
        browser.evaluate("document.querySelector('#locks button').click()");
        browser.evaluate(
            "document.getElementById('confirmation').value = 'page';
             document.getElementById('confirmation').dispatchEvent(new Event('input'));
             document.getElementById('break-now').click()",
        );
        browser.wait_for("document.querySelectorAll('#timeline .mark.broken').length === 2");
        let [page, shell] = &mut holders;
        for (holder, by) in [(page, "ui"), (shell, "")] {
            assert_eq!(end_of(holder).code(), Some(123), "{}", store.url);
            let mut text = String::new();
            let mut stderr = holder.stderr.take().expect("piped");
            stderr.read_to_string(&mut text).expect("text");
            assert!(text.contains("lock lost: broken by") && text.contains(by), "{text}");
        }
    }
}

#[test]
fn only_the_token_opens_the_page() {
    let store = Store::sqlite();
    let ui = Ui::start(&store, &["--allow-break"]);
    let bearer = ui.bearer();
    for path in ["/", "/?token=wrong", "/app.js", "/events", "/locks", "/metrics", "/nothing"] {
        assert_eq!(ui.request(&format!("GET {path}"), &[], "").0, 401, "{path}");
    }
    assert_eq!(ui.request("POST /break", &[], "{}").0, 401);
    let authorized = [("Authorization", bearer.as_str())];
    assert_eq!(ui.request("GET /", &authorized, "").0, 200);
    assert_eq!(ui.request("GET /nothing", &authorized, "").0, 404);
    let (_, page) = ui.request("GET /", &authorized, "");
    for header in ["content-security-policy: default-src 'none'", "SameSite=Strict", "no-store"] {
        assert!(page.contains(header), "{header}: {page}");
    }
}

#[test]
fn another_origin_is_refused() {
    let store = Store::sqlite();
    assert_eq!(store.code(&["acquire", "-q", "--ttl", "1m", "k"]), 0);
    let ui = Ui::start(&store, &["--allow-break"]);
    let bearer = ui.bearer();
    let origin = format!("http://{}", ui.host());
    for (origin, status) in [("http://evil.example", 403), ("null", 403), (origin.as_str(), 400)] {
        let headers = [("Authorization", bearer.as_str()), ("Origin", origin)];
        assert_eq!(ui.request("POST /break", &headers, "{}").0, status, "{origin}");
    }
    let headers = [("Authorization", bearer.as_str())];
    assert_eq!(ui.request("POST /break", &headers, "{}").0, 403, "no origin at all");
    let headers = [("Authorization", bearer.as_str()), ("Host", "evil.example")];
    assert_eq!(ui.request("GET /", &headers, "").0, 403);
    assert_eq!(store.code(&["status", "k"]), 0, "it is still held");
}

#[test]
fn a_break_needs_permission_and_the_right_holder() {
    let store = Store::sqlite();
    assert_eq!(store.code(&["acquire", "-q", "--ttl", "1m", "k"]), 0);
    for (options, status) in [(vec![], 403), (vec!["--allow-break"], 200)] {
        let ui = Ui::start(&store, &options);
        let (bearer, origin) = (ui.bearer(), format!("http://{}", ui.host()));
        let headers = [("Authorization", bearer.as_str()), ("Origin", origin.as_str())];
        eventually("it is connected", || ui.request("GET /locks", &headers, "").0 == 200);
        let body = r#"{"key":"k","lockIdHash":"000000000000000000000000","confirmation":"k"}"#;
        let (found, text) = ui.request("POST /break", &headers, body);
        assert_eq!(found, status, "{text}");
        assert_eq!(status == 200, text.ends_with(r#"{"broken":false}"#), "{text}");
        let body = r#"{"key":"k","lockIdHash":"000000000000000000000000","confirmation":"x"}"#;
        let expected = if status == 200 { 400 } else { 403 };
        assert_eq!(ui.request("POST /break", &headers, body).0, expected);
    }
    assert_eq!(store.code(&["status", "k"]), 0, "it is still held");
}

#[test]
fn a_store_that_ends_is_reported_and_its_return_is_noticed() {
    let Some(mut browser) = Browser::start() else { return };
    let Some(mut store) = Store::redis() else { return };
    assert_eq!(store.code(&["acquire", "-q", "--ttl", "10m", "before"]), 0);
    let ui = Ui::start(&store, &[]);
    browser.open(&ui.url);
    browser.wait_for(&row("before"));
    let redis = store.redis.as_mut().expect("it runs");
    redis.crash();
    browser.wait_for("document.getElementById('error').textContent.includes('Redis at 127')");
    let (_, metrics) = ui.request("GET /metrics", &[("Authorization", &ui.bearer())], "");
    assert!(metrics.contains("\nsyncguard_store_up 0\n"), "{metrics}");
    store.redis.as_mut().expect("it exists").run();
    browser.wait_for("document.getElementById('status').textContent === 'live'");
    assert_eq!(store.code(&["acquire", "-q", "--ttl", "10m", "after"]), 0);
    browser.wait_for(&row("after"));
}

#[test]
fn many_locks_are_paged() {
    let Some(mut browser) = Browser::start() else { return };
    let Some(store) = Store::redis() else { return };
    // Records as the backend writes them, faster than by acquiring 5,000 locks.
    let script = "local now = redis.call('TIME')[1] * 1000
        for i = 1, 5000 do
          local id = string.format('%022d', i)
          redis.call('SET', 'syncguard:job:' .. i, string.format(
            '{\"lockId\":\"%s\",\"expiresAtMs\":%d,\"acquiredAtMs\":%d,\"key\":\"job:%d\",\"fence\":\"%015d\"}',
            id, now + 600000, now, i, i), 'PX', 600000)
        end";
    let redis = store.redis.as_ref().expect("it runs");
    assert_eq!(redis.cli(&["EVAL", script, "0"]).trim(), "");
    let ui = Ui::start(&store, &[]);
    browser.open(&ui.url);
    browser.wait_for("document.getElementById('held').textContent.endsWith('+')");
    browser.wait_for("!document.getElementById('pager').hidden");
    assert_eq!(browser.evaluate("document.querySelectorAll('#locks tr').length"), 500);
    browser.evaluate(
        "document.getElementById('filter').value = 'job:4321';
         document.getElementById('filter').dispatchEvent(new Event('input'))",
    );
    // The store is read in parts; a part may have no match.
    browser.wait_for(
        "document.querySelectorAll('#locks tr').length === 1 ||
         (document.getElementById('next').click(), false)",
    );
    assert_eq!(browser.evaluate(&row("job:4321")), true);
}

#[test]
fn metrics_describe_the_store() {
    let store = Store::sqlite();
    assert_eq!(store.code(&["acquire", "-q", "--ttl", "1m", "k"]), 0);
    let ui = Ui::start(&store, &[]);
    let bearer = ui.bearer();
    let mut metrics = String::new();
    eventually("the lock is counted", || {
        metrics = ui.request("GET /metrics", &[("Authorization", &bearer)], "").1;
        metrics.contains("\nsyncguard_store_held_locks 1\n")
    });
    assert!(metrics.contains("\nsyncguard_store_up 1\n"), "{metrics}");
    assert!(metrics.contains("# TYPE syncguard_store_oldest_hold_seconds gauge"), "{metrics}");
}

#[test]
fn an_address_that_others_can_reach_needs_a_token_file() {
    let store = Store::sqlite();
    let refused = store.run(&["ui", "--listen", "0.0.0.0:0"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("--token-file"), "{}", stderr(&refused));
    let file = store.path("token");
    std::fs::write(&file, "short\n").expect("writable");
    let file = file.to_str().expect("UTF-8").to_owned();
    assert_eq!(store.code(&["ui", "--token-file", &file]), 2, "the token is too short");
    std::fs::write(&file, "a-token-of-some-length\n").expect("writable");
    let ui = Ui::start(&store, &["--token-file", &file]);
    assert!(!ui.url.contains("token"), "the file has it, so the output need not");
    let headers = [("Authorization", "Bearer a-token-of-some-length")];
    assert_eq!(ui.request("GET /", &headers, "").0, 200);
}

#[test]
fn the_token_is_in_no_log() {
    let store = Store::sqlite();
    let mut ui = Ui::start(&store, &["-vv"]);
    let page = format!("GET /?token={}", ui.token());
    assert_eq!(ui.request(&page, &[], "").0, 200);
    assert_eq!(ui.request("GET /metrics", &[("Authorization", &ui.bearer())], "").0, 200);
    let token = ui.token().to_owned();
    ui.process.kill().expect("it runs");
    let mut log = String::new();
    let mut stderr = ui.process.stderr.take().expect("piped");
    stderr.read_to_string(&mut log).expect("text");
    assert!(!log.contains(&token), "{log}");
}

#[test]
fn the_page_fits_wide_and_narrow_windows() {
    let Some(mut browser) = Browser::start() else { return };
    let Some(store) = Store::redis() else { return };
    let ui = Ui::start(&store, &["--allow-break"]);
    browser.resize(1200, 900);
    browser.open(&ui.url);
    browser.wait_for("document.getElementById('window').value = '60000'");
    let mut runs: Vec<Child> = (0..4)
        .map(|number| {
            std::thread::sleep(Duration::from_millis(300));
            let seconds = if number == 3 { "30" } else { "2" };
            store.background(&["-w", "forever", "deploy:shop"], &format!("sleep {seconds}"))
        })
        .collect();
    for key in ["nightly:report", "invoice:4711", "a key that is longer than the timeline shows"] {
        runs.push(store.background(&[key], "sleep 30"));
    }
    assert_eq!(store.code(&["acquire", "-q", "--ttl", "1s", "crashed"]), 0);
    browser.wait_for("document.querySelectorAll('#timeline .mark.expired').length === 1");
    browser.wait_for("document.querySelectorAll('#timeline rect.wait').length >= 1");
    browser.wait_for("document.getElementById('hand-overs').textContent !== '–'");
    browser.wait_for("document.querySelectorAll('#checks li').length > 0");
    for width in [1200, 700] {
        browser.resize(width, 900);
        browser.wait_for("document.documentElement.scrollWidth <= innerWidth");
        if let Some(folder) = std::env::var_os("SYNCGUARD_SCREENSHOTS") {
            std::thread::sleep(Duration::from_secs(2));
            let path = std::path::Path::new(&folder).join(format!("ui-{width}.png"));
            std::fs::write(path, browser.screenshot()).expect("writable");
        }
    }
    for mut run in runs {
        send("TERM", run.id());
        drop(run.wait());
    }
}
