//! The server that an agent uses: one that runs already, or one that is started for the agent.

use std::fs::File;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use hyper::{StatusCode, Uri};
use serde::Deserialize;
use serde_json::Value;

use super::KEY_VARIABLE;
use super::flags::ServerFlags;
use crate::{config, download, terminal};

/// Time for a reply of a server. The routes that are asked compute nothing.
const REPLY_TIME: Duration = Duration::from_secs(10);
/// Time between two looks at a server that loads its model, or that stops.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// Time for a server to stop before it is killed.
const STOP_TIME: Duration = Duration::from_secs(10);
/// What a server prints in front of its address when its model is loaded.
const LISTENING: &str = "listening on ";
/// Number of lines of the log that are shown if the server ends by itself.
const LOG_LINES: usize = 20;

/// A server that answers, and the model to use there.
#[derive(Debug)]
pub(super) struct Server {
    /// Its address, without a slash at the end.
    pub(super) url: String,
    /// The name of the model.
    pub(super) model: String,
    /// The context length in tokens.
    pub(super) context: usize,
    /// Whether the model takes images.
    pub(super) takes_images: bool,
}

/// An entry of `/v1/models`.
#[derive(Debug, Deserialize)]
struct Model {
    id: String,
    owned_by: String,
    root: String,
    max_model_len: usize,
    input_modalities: Vec<String>,
}

/// The reply of `/v1/models`.
#[derive(Debug, Deserialize)]
struct ModelList {
    data: Vec<Model>,
}

/// What answers at an address.
#[derive(Debug)]
enum Answer {
    /// A Stolon with these models.
    Models(Vec<Model>),
    /// A Stolon that loads its model, or starts again.
    NotReady,
    /// A Stolon for which the key is missing or wrong.
    KeyRefused,
    /// Something else.
    Other,
}

/// A connection to a server.
#[derive(Clone, Copy, Debug)]
struct Client<'a> {
    url: &'a str,
    key: Option<&'a str>,
}

impl Server {
    /// Finds the server that runs at `url`, waits until its model is loaded, and checks that it is
    /// the model of the flags, if they name one. Otherwise returns why that server is not used.
    ///
    /// # Errors
    /// If the server refuses the key, or if nothing answers and the address is that of another
    /// machine, on which no server can be started.
    pub(super) async fn find(
        url: &str,
        key: Option<&str>,
        flags: &ServerFlags,
    ) -> anyhow::Result<Result<Self, String>> {
        let client = Client { url: url.trim_end_matches('/'), key };
        let url = client.url;
        let models = match client.loaded().await {
            Ok(Answer::Models(models)) => models,
            Ok(_) => return Ok(Err(format!("what answers at {url} is not Stolon"))),
            Err(error) if error.is::<ureq::Error>() && is_local(url) => {
                return Ok(Err(format!("no server answers at {url}")));
            }
            Err(error) => return Err(error),
        };
        match flags.model() {
            Some(asked) if !client.has(asked, &models).await => {
                Ok(Err(format!("the server at {url} does not have the model {asked}")))
            }
            asked => Self::new(url, models, asked).map(Ok),
        }
    }

    /// The server at `url`, with the entry of its list that has the name `asked`, or else with the
    /// first one.
    fn new(url: &str, models: Vec<Model>, asked: Option<&str>) -> anyhow::Result<Self> {
        let index = models.iter().position(|model| asked == Some(&model.id)).unwrap_or(0);
        let model = models.into_iter().nth(index);
        let model = model.with_context(|| format!("the server at {url} has no model"))?;
        Ok(Self {
            url: url.to_owned(),
            model: model.id,
            context: model.max_model_len,
            takes_images: model.input_modalities.iter().any(|kind| kind == "image"),
        })
    }
}

impl Client<'_> {
    /// What answers, when its model is loaded.
    async fn loaded(self) -> anyhow::Result<Answer> {
        let url = self.url;
        let mut spinner = None;
        let answer = loop {
            match self.ask().await? {
                Answer::NotReady => {
                    let wait = || download::spinner(format!("waiting for the server at {url}"));
                    spinner.get_or_insert_with(wait);
                    tokio::time::sleep(LOOK_INTERVAL).await;
                }
                Answer::KeyRefused if self.key.is_some() => {
                    bail!("the server at {url} refuses the key of --api-key or {KEY_VARIABLE}")
                }
                Answer::KeyRefused => {
                    bail!("the server at {url} has keys: give one with --api-key or {KEY_VARIABLE}")
                }
                answer => break answer,
            }
        };
        if let Some(spinner) = spinner {
            spinner.finish_and_clear();
        }
        Ok(answer)
    }

    /// What answers now.
    async fn ask(self) -> anyhow::Result<Answer> {
        let url = self.url;
        let reply = self.get("/v1/models").await;
        let (status, reply) = reply.with_context(|| format!("cannot reach the server at {url}"))?;
        Ok(match status {
            StatusCode::OK => match serde_json::from_value::<ModelList>(reply) {
                Ok(list) if list.data.iter().any(|model| model.owned_by == "stolon") => {
                    Answer::Models(list.data)
                }
                _ => Answer::Other,
            },
            StatusCode::UNAUTHORIZED if reply["error"]["code"] == "invalid_api_key" => {
                Answer::KeyRefused
            }
            StatusCode::SERVICE_UNAVAILABLE => {
                let (_, health) = self.get("/health").await?;
                match health["status"].as_str() {
                    Some("loading" | "restarting" | "hung") => Answer::NotReady,
                    _ => Answer::Other,
                }
            }
            _ => Answer::Other,
        })
    }

    /// Whether the server has the model that a user calls `asked`: a path on this machine or a
    /// name.
    async fn has(self, asked: &str, models: &[Model]) -> bool {
        let path = Path::new(asked);
        if path.exists() {
            let name = path.file_name().unwrap_or_default();
            return models.iter().any(|model| name == model.root.as_str());
        }
        let reply = self.get(&format!("/v1/models/{asked}")).await;
        reply.is_ok_and(|(status, _)| status == StatusCode::OK)
    }

    /// The status and the JSON of a reply; `null` if it is something else.
    async fn get(self, path: &str) -> Result<(StatusCode, Value), ureq::Error> {
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(REPLY_TIME));
        let agent = ureq::Agent::new_with_config(config.build());
        let mut request = agent.get(format!("{}{path}", self.url));
        if let Some(key) = self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        // The HTTP client blocks.
        let reply = tokio::task::spawn_blocking(move || {
            let mut reply = request.call()?;
            let text = reply.body_mut().read_to_string()?;
            Ok((reply.status(), serde_json::from_str(&text).unwrap_or_default()))
        });
        reply.await.unwrap_or_else(|error| Err(ureq::Error::Io(error.into())))
    }
}

/// Whether the address is one of this machine.
fn is_local(url: &str) -> bool {
    let uri = url.parse::<Uri>().ok();
    let host = uri.as_ref().and_then(Uri::host).unwrap_or_default();
    let host = host.trim_matches(['[', ']']);
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// A server that was started for an agent. It is stopped when this is dropped.
#[derive(Debug)]
pub(super) struct Started {
    process: Child,
    log: PathBuf,
}

impl Started {
    /// Starts a server with these flags and with this key, if there is one, on a free port of this
    /// machine. Its output goes to a file in `folder`.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub(super) fn start(
        flags: &ServerFlags,
        key: Option<&str>,
        folder: &Path,
    ) -> anyhow::Result<Self> {
        let path = folder.join("server.log");
        let log =
            File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        let program = std::env::current_exe().context("cannot find this program")?;
        let mut command = Command::new(program);
        command.args(["serve", "--host", "127.0.0.1", "--port", "0"]).args(flags.arguments());
        // The flags have what a file and the environment set.
        for (name, _) in std::env::vars_os() {
            if name.to_str().is_some_and(config::is_setting_variable) {
                command.env_remove(name);
            }
        }
        command.envs(key.map(|key| (KEY_VARIABLE, key)));
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        keep_from_keyboard(&mut command);
        let process = command.spawn().context("cannot start a server")?;
        Ok(Self { process, log: path })
    }

    /// The file with the output of the server.
    pub(super) fn log(&self) -> &Path {
        &self.log
    }

    /// Waits until the model is loaded. Meanwhile a terminal shows the last line of the log.
    ///
    /// # Errors
    /// If the server ends; the message has the end of its log.
    pub(super) async fn ready(
        &mut self,
        asked: Option<&str>,
        key: Option<&str>,
    ) -> anyhow::Result<Server> {
        let spinner = download::spinner("starting a server".to_owned());
        let url = loop {
            // In this order, so that a server that has ended has written its last line.
            let status = self.process.try_wait().context("cannot wait for the server")?;
            let log = self.read_log();
            if let Some(status) = status {
                bail!("the server has ended ({status}):\n{}", tail(&log));
            }
            let mut lines = log.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
            if let Some(url) = lines.clone().find_map(|line| line.strip_prefix(LISTENING)) {
                break url.to_owned();
            }
            if let Some(line) = lines.next_back() {
                spinner.set_message(line.to_owned());
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        };
        spinner.finish_and_clear();
        match (Client { url: &url, key }).loaded().await? {
            Answer::Models(models) => Server::new(&url, models, asked),
            _ => bail!("the server that was started at {url} does not list its models"),
        }
    }

    /// Stops the server. If it has ended before, says so, with the end of its log.
    pub(super) fn stop(mut self) {
        if let Ok(Some(status)) = self.process.try_wait() {
            let log = self.read_log();
            terminal::warn(format!("WARNING: the server has ended ({status}):\n{}", tail(&log)));
        }
    }

    fn read_log(&self) -> String {
        // A log that cannot be read shows no progress; the server is used all the same.
        let bytes = std::fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // The pid of a process that has ended may be that of another one.
        if matches!(self.process.try_wait(), Ok(None)) {
            terminate(&mut self.process);
        }
        let start = Instant::now();
        while matches!(self.process.try_wait(), Ok(None)) && start.elapsed() < STOP_TIME {
            std::thread::sleep(LOOK_INTERVAL);
        }
        // Both fail or do nothing if it has ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The last lines of a log.
fn tail(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
}

/// Lets Ctrl-C reach the agent and not the server.
#[cfg(unix)]
fn keep_from_keyboard(command: &mut Command) {
    use std::os::unix::process::CommandExt;
    command.process_group(0);
}

#[cfg(windows)]
fn keep_from_keyboard(command: &mut Command) {
    use std::os::windows::process::CommandExt;
    const CREATE_NEW_PROCESS_GROUP: u32 = 0x200;
    command.creation_flags(CREATE_NEW_PROCESS_GROUP);
}

#[cfg(not(any(unix, windows)))]
fn keep_from_keyboard(_command: &mut Command) {}

/// Asks a process to end or, where that is not possible, ends it.
#[cfg(unix)]
fn terminate(process: &mut Child) {
    use rustix::process::{Pid, Signal, kill_process};
    // If it fails, the process is killed later.
    let _ = kill_process(Pid::from_child(process), Signal::TERM);
}

#[cfg(not(unix))]
fn terminate(process: &mut Child) {
    let _ = process.kill();
}
