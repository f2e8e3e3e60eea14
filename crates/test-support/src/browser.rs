//! A headless browser, driven by the `DevTools` protocol over two pipes.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::process::{Server, TempDir, find_program};

/// How long the browser may take to answer.
const TIMEOUT: Duration = Duration::from_secs(20);

/// A running browser with one page.
#[derive(Debug)]
pub struct Browser {
    _process: Server,
    _folder: TempDir,
    requests: File,
    messages: Receiver<Value>,
    last_id: u64,
    session: Option<String>,
}

impl Browser {
    /// Starts Chromium, if it is installed.
    ///
    /// # Panics
    ///
    /// Panics if it does not start.
    #[must_use]
    pub fn start() -> Option<Self> {
        // The shell opens the pipes as the descriptors 3 and 4, which the browser expects.
        const OPEN: &str = r#"exec "$0" "$@" 3<requests 4>responses"#;
        let program = find_program("chromium")?;
        let folder = TempDir::new();
        let mut made = Command::new("mkfifo");
        let made = made.args(["requests", "responses"]).current_dir(folder.path()).status();
        assert!(made.expect("mkfifo runs").success());
        let arguments = [
            "-c",
            OPEN,
            program.to_str().expect("a path in UTF-8"),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-dev-shm-usage",
            "--remote-debugging-pipe",
            "--user-data-dir=profile",
            "about:blank",
        ];
        let arguments = arguments.map(str::to_owned);
        let process = Server::start(Path::new("sh"), &arguments, folder.path());
        let requests = File::options().write(true).open(folder.path().join("requests"));
        let responses = File::open(folder.path().join("responses")).expect("opened by the browser");
        let (sender, messages) = channel();
        std::thread::spawn(move || {
            for message in BufReader::new(responses).split(0) {
                let Ok(message) = message else { return };
                let message = serde_json::from_slice(&message).expect("JSON");
                if sender.send(message).is_err() {
                    return;
                }
            }
        });
        let mut browser = Self {
            _process: process,
            _folder: folder,
            requests: requests.expect("opened by the browser"),
            messages,
            last_id: 0,
            session: None,
        };
        let target = browser.call("Target.createTarget", &json!({"url": "about:blank"}));
        let target = json!({"targetId": target["targetId"], "flatten": true});
        let session = browser.call("Target.attachToTarget", &target);
        browser.session = session["sessionId"].as_str().map(str::to_owned);
        Some(browser)
    }

    /// Opens a page.
    ///
    /// # Panics
    ///
    /// Panics if the browser does not answer.
    pub fn open(&mut self, url: &str) {
        self.call("Page.navigate", &json!({"url": url}));
    }

    /// Sets the size of the window.
    ///
    /// # Panics
    ///
    /// Panics if the browser does not answer.
    pub fn resize(&mut self, width: u32, height: u32) {
        let size = json!({
            "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false,
        });
        self.call("Emulation.setDeviceMetricsOverride", &size);
    }

    /// Evaluates JavaScript in the page, and returns its value.
    ///
    /// # Panics
    ///
    /// Panics if the script throws, or the browser does not answer.
    pub fn evaluate(&mut self, script: &str) -> Value {
        let script = json!({"expression": script, "awaitPromise": true, "returnByValue": true});
        let answer = self.call("Runtime.evaluate", &script);
        assert!(answer.get("exceptionDetails").is_none(), "{script}: {answer}");
        answer["result"]["value"].clone()
    }

    /// Waits until a JavaScript expression is true, for at most 20 seconds. Returns how long that
    /// took.
    ///
    /// # Panics
    ///
    /// Panics if it does not become true.
    pub fn wait_for(&mut self, condition: &str) -> Duration {
        let started = Instant::now();
        // A page that is not loaded yet lacks elements.
        let check = format!("(() => {{ try {{ return Boolean({condition}) }} catch {{ }} }})()");
        while self.evaluate(&check) != Value::Bool(true) {
            assert!(started.elapsed() < TIMEOUT, "{condition}: {}", self.text());
            std::thread::sleep(Duration::from_millis(20));
        }
        started.elapsed()
    }

    /// Returns the visible text of the page.
    pub fn text(&mut self) -> String {
        let text = self.evaluate("document.body ? document.body.innerText : ''");
        text.as_str().unwrap_or_default().to_owned()
    }

    /// Returns a screenshot of the window as a PNG file.
    ///
    /// # Panics
    ///
    /// Panics if the browser does not answer.
    pub fn screenshot(&mut self) -> Vec<u8> {
        let answer = self.call("Page.captureScreenshot", &json!({"format": "png"}));
        STANDARD.decode(answer["data"].as_str().expect("a picture")).expect("base64")
    }

    fn call(&mut self, method: &str, parameters: &Value) -> Value {
        self.last_id += 1;
        let mut request = json!({"id": self.last_id, "method": method, "params": parameters});
        if let Some(session) = &self.session {
            request["sessionId"] = session.as_str().into();
        }
        let mut bytes = request.to_string().into_bytes();
        bytes.push(0);
        self.requests.write_all(&bytes).expect("the browser runs");
        loop {
            let message = self.messages.recv_timeout(TIMEOUT).expect("the browser answers");
            if message["id"] == self.last_id {
                assert!(message.get("error").is_none(), "{method}: {message}");
                return message["result"].clone();
            }
        }
    }
}
