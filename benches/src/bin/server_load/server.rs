//! The process of the server, and the numbers that `/proc` has for it.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use serde_json::Value;
use stolon::{Engine, ModelSource};
use stolon_backend::fake::{FakeBackend, FakeLatency, FakeOptions};
use stolon_checkpoint::{LoadOptions, load};
use stolon_http::{ConnectionLimits, Gate, RouterOptions, listen, router};
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::client;

/// Serves an engine with steps of this duration until the process is killed, and prints the address
/// once requests are answered.
pub(crate) async fn serve(step_ms: u64) -> anyhow::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let gate = Arc::new(Gate::loading());
    let limits = ConnectionLimits {
        count: 8_192,
        header_timeout: Duration::from_secs(30),
        write_timeout: Duration::from_secs(60),
    };
    gate.open(router(engine(step_ms).await?, RouterOptions::default()));
    println!("listening on http://{address}");
    let (_stopping, stop) = watch::channel(false);
    listen(listener, gate, limits, None, stop).await;
    Ok(())
}

/// An engine with the demo model's tokenizer and a backend that computes nothing.
pub(crate) async fn engine(step_ms: u64) -> anyhow::Result<Engine> {
    let model = load(&ModelSource::Demo, &LoadOptions::default())?;
    let text = stolon::TextModel::new(&model.text, &model.generation.eos_token_ids)?;
    let latency = FakeLatency { fixed: Duration::from_millis(step_ms), ..FakeLatency::default() };
    let backend = FakeBackend::new(FakeOptions {
        vocab_size: model.config.vocab_size,
        block_count: 1 << 15,
        latency,
        ..FakeOptions::default()
    });
    let builder = Engine::builder().backend("fake", Box::new(backend)).text_model(text);
    let builder = builder.max_running(4_096).max_batched_tokens(1 << 16);
    Ok(builder.max_queued_requests(8_192).build().await?)
}

/// A running server; killed when dropped.
pub(crate) struct Server {
    child: Child,
    /// Host and port.
    pub(crate) address: String,
    errors: Arc<Mutex<String>>,
}

impl Server {
    /// Starts a server on a free port.
    pub(crate) fn start(flags: &[&str]) -> anyhow::Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("serve")
            .args(flags)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let errors = Arc::new(Mutex::new(String::new()));
        let (mut pipe, log) = (child.stderr.take().context("a pipe")?, Arc::clone(&errors));
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = pipe.read(&mut bytes) {
                let text = String::from_utf8_lossy(&bytes[..count]);
                log.lock().unwrap_or_else(PoisonError::into_inner).push_str(&text);
            }
        });
        let mut lines = BufReader::new(child.stdout.take().context("a pipe")?).lines();
        let address = loop {
            let line = lines.next().context("the server ended before it listened")??;
            if let Some(url) = line.strip_prefix("listening on http://") {
                break url.to_owned();
            }
        };
        // The rest of the output is read so that it does not fill the pipe.
        std::thread::spawn(move || lines.for_each(drop));
        Ok(Self { child, address, errors })
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Resident memory, in bytes.
    pub(crate) fn resident_bytes(&self) -> anyhow::Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("VmRSS")?;
        Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? * 1024)
    }

    /// Number of open files.
    pub(crate) fn open_files(&self) -> anyhow::Result<usize> {
        Ok(std::fs::read_dir(format!("/proc/{}/fd", self.child.id()))?.count())
    }

    /// Processor time so far, in seconds.
    pub(crate) fn cpu_seconds(&self) -> anyhow::Result<f64> {
        cpu_seconds(&self.child.id().to_string())
    }

    /// Number of requests that run.
    pub(crate) async fn running(&self) -> anyhow::Result<usize> {
        let audit = client::get(&self.address, "/admin/audit").await?;
        Ok(audit["audit"]["running"].as_u64().context("a count")? as usize)
    }

    /// Waits until no request runs or waits, checks that every block is free or cached and that the
    /// server works and has not panicked.
    pub(crate) async fn check_idle(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let reply = client::get(&self.address, "/admin/audit").await?;
            let audit = &reply["audit"];
            let count = |name: &str| audit[name].as_u64().unwrap_or(u64::MAX);
            if ["running", "waiting", "blocks_reserved"].iter().all(|name| count(name) == 0) {
                let accounted = count("blocks_free") + count("blocks_committed");
                anyhow::ensure!(accounted == count("blocks_total"), "blocks are lost: {audit}");
                break;
            }
            anyhow::ensure!(Instant::now() < deadline, "requests do not end: {audit}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let health: Value = client::get(&self.address, "/health").await?;
        anyhow::ensure!(health["status"] == "ok", "the server is not healthy: {health}");
        let errors = self.errors.lock().unwrap_or_else(PoisonError::into_inner);
        anyhow::ensure!(!errors.contains("panicked"), "the server panicked: {errors}");
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Fails if the process has ended already, which is fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Processor time of a process so far, in seconds. Linux counts in hundredths.
pub(crate) fn cpu_seconds(process: &str) -> anyhow::Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
    // The second field is the program's name in parentheses, which may have spaces.
    let fields = stat.rsplit(") ").next().context("fields")?.split(' ');
    let ticks: f64 = fields.skip(11).take(2).filter_map(|field| field.parse::<f64>().ok()).sum();
    Ok(ticks / 100.0)
}
