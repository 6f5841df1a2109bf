//! Drives Chromium through ChromeDriver, by the WebDriver protocol.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// The key codes of WebDriver for keys that are not characters.
pub(crate) const TAB: &str = "\u{e004}";
pub(crate) const ENTER: &str = "\u{e007}";
pub(crate) const ESCAPE: &str = "\u{e00c}";
pub(crate) const RIGHT: &str = "\u{e014}";
pub(crate) const DOWN: &str = "\u{e015}";

/// A browser with one tab and a fresh profile. It is closed when dropped.
pub(crate) struct Browser {
    driver: Child,
    address: String,
    session: String,
    client: reqwest::Client,
    _profile: tempfile::TempDir,
}

impl Browser {
    /// Starts ChromeDriver and Chromium.
    ///
    /// # Panics
    /// If they are not installed: a test that needs a browser must not pass without one.
    pub(crate) async fn start() -> Self {
        let mut driver = Command::new("chromedriver")
            .arg("--port=0")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("chromedriver: install Debian's packages chromium and chromium-driver");
        let mut lines = BufReader::new(driver.stdout.take().expect("a pipe")).lines();
        let port = loop {
            let line = lines.next().expect("a port before the end").expect("UTF-8");
            if let Some((_, port)) = line.split_once("successfully on port ") {
                break port.trim_end_matches('.').to_owned();
            }
        };
        std::thread::spawn(move || lines.for_each(drop));
        let profile = tempfile::tempdir().expect("a directory");
        let mut browser = Self {
            driver,
            address: format!("127.0.0.1:{port}"),
            session: String::new(),
            client: reqwest::Client::new(),
            _profile: profile,
        };
        let data = format!("--user-data-dir={}", browser._profile.path().display());
        let options = json!({"args": [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--disable-dev-shm-usage", "--window-size=1360,900", data,
        ]});
        let capabilities = json!({
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        });
        let body = json!({"capabilities": {"alwaysMatch": capabilities}});
        let reply = browser.send("/session", body).await;
        browser.session = reply["sessionId"].as_str().expect("a session").to_owned();
        browser
    }

    async fn send(&self, path: &str, body: Value) -> Value {
        let url = format!("http://{}{path}", self.address);
        let reply = self.client.post(url).json(&body).send().await.expect("ChromeDriver answers");
        let status = reply.status();
        let mut reply: Value = reply.json().await.expect("JSON");
        assert!(status.is_success(), "{path}: {reply}");
        reply["value"].take()
    }

    async fn command(&self, path: &str, body: Value) -> Value {
        self.send(&format!("/session/{}{path}", self.session), body).await
    }

    /// Opens an address.
    pub(crate) async fn open(&self, url: &str) {
        self.command("/url", json!({"url": url})).await;
    }

    /// Sends a command of the DevTools protocol.
    pub(crate) async fn devtools(&self, command: &str, params: Value) -> Value {
        self.command("/goog/cdp/execute", json!({"cmd": command, "params": params})).await
    }

    /// Sets the size of the page in pixels.
    pub(crate) async fn resize(&self, width: u32, height: u32) {
        let size =
            json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.devtools("Emulation.setDeviceMetricsOverride", size).await;
    }

    /// Chooses light or dark colors.
    pub(crate) async fn dark(&self, dark: bool) {
        let value = if dark { "dark" } else { "light" };
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": value}]});
        self.devtools("Emulation.setEmulatedMedia", features).await;
    }

    /// The value that the body of a JavaScript function returns.
    pub(crate) async fn script(&self, body: &str) -> Value {
        self.command("/execute/sync", json!({"script": body, "args": []})).await
    }

    /// The value of a JavaScript expression, when it is true.
    pub(crate) async fn wait_for(&self, expression: &str) -> Value {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let value = self.script(&format!("return {expression}")).await;
            if !matches!(value, Value::Null | Value::Bool(false)) && value != "" && value != 0 {
                return value;
            }
            if Instant::now() > deadline {
                let text = self.script("return document.body.innerText").await;
                panic!("waited in vain for {expression}: {text}\n{}", self.log().await);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Clicks on the middle of the first element that a CSS selector finds, as a user does: it has
    /// to be visible, and nothing may cover it.
    pub(crate) async fn click(&self, selector: &str) {
        let element = self.find(selector).await;
        self.command(&format!("/element/{element}/click"), json!({})).await;
    }

    /// Types text into the first element that a CSS selector finds.
    pub(crate) async fn type_into(&self, selector: &str, text: &str) {
        let element = self.find(selector).await;
        self.command(&format!("/element/{element}/value"), json!({"text": text})).await;
    }

    async fn find(&self, selector: &str) -> String {
        let body = json!({"using": "css selector", "value": selector});
        let element = self.command("/element", body).await;
        let id = element.as_object().and_then(|object| object.values().next());
        id.and_then(Value::as_str).expect("an element").to_owned()
    }

    /// Presses keys, one after the other, wherever the focus is.
    pub(crate) async fn press(&self, keys: &str) {
        let press = |key: char| {
            let key = key.to_string();
            [json!({"type": "keyDown", "value": key}), json!({"type": "keyUp", "value": key})]
        };
        let actions: Vec<Value> = keys.chars().flat_map(press).collect();
        let keyboard = json!({"type": "key", "id": "keyboard", "actions": actions});
        self.command("/actions", json!({"actions": [keyboard]})).await;
    }

    /// Accepts the question that the page asks in a box of the browser.
    pub(crate) async fn accept(&self) {
        self.command("/alert/accept", json!({})).await;
    }

    /// The browser's log since the last call: errors of scripts, and violations of the page's
    /// policy.
    pub(crate) async fn log(&self) -> Value {
        self.command("/se/log", json!({"type": "browser"})).await
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Without this, Chromium outlives ChromeDriver. Errors mean that it has ended already.
        if let Ok(mut stream) = TcpStream::connect(&self.address) {
            let (session, host) = (&self.session, &self.address);
            let _ = write!(
                stream,
                "DELETE /session/{session} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
            );
            let _ = stream.set_read_timeout(Some(Duration::from_secs(10)));
            let _ = stream.read(&mut [0; 64]);
        }
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}
