//! `stolon launch`: what a coding agent is given, which server it uses, and what is left
//! afterwards. Shell scripts take the places of the agents; `tests/agents/run.py` launches the real
//! ones.

use std::fs;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use axum::Json;
use axum::http::StatusCode;
use axum::routing::get;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{SCRIPTED, Server, TINY, stolon};

/// An address at which nothing answers.
const NOWHERE: &str = "http://127.0.0.1:1";
/// Longer than anything here may take. It ends a test that hangs.
const GUARD: Duration = Duration::from_secs(60);
/// How the script of an agent begins: it writes down what it was given.
const BEGIN: &str = r#"#!/bin/sh
env > $TRIAL/environment
printf '%s\n' "$@" > $TRIAL/arguments
cat < "${QWEN_CODE_SYSTEM_DEFAULTS_PATH:-/dev/null}" > $TRIAL/settings
"#;
/// Variables of an agent that are not compared.
const NOT_COMPARED: [&str; 10] = [
    "HOME",
    "OLDPWD",
    "PATH",
    "PWD",
    "QWEN_CODE_SYSTEM_DEFAULTS_PATH",
    "SHLVL",
    "STOLON_API_KEY",
    "TMPDIR",
    "TRIAL",
    "_",
];
/// A script's last lines, by which it runs until the test allows it to end.
const UNTIL_ALLOWED: &str = "touch $TRIAL/started; until test -e $TRIAL/end; do sleep 0.02; done";
/// A script's last lines, by which it runs until a signal ends it.
const UNTIL_SIGNALED: &str = "trap 'exit 9' INT; trap 'exit 10' TERM; touch $TRIAL/started; \
                              while true; do sleep 0.02; done";

/// A folder with programs, a home that has to stay empty, and a folder for temporary files.
struct Trial {
    folder: TempDir,
}

impl Trial {
    /// Agents that write down their environment and their arguments, and then run `end`.
    fn new(end: &str) -> Self {
        let trial = Self { folder: tempfile::tempdir().expect("a folder") };
        for name in ["bin", "home", "temporary"] {
            fs::create_dir(trial.path(name)).expect("created");
        }
        let script = format!("{BEGIN}{end}\n");
        for agent in ["claude", "codex", "opencode", "qwen"] {
            let path = trial.path("bin").join(agent);
            fs::write(&path, &script).expect("written");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("changed");
        }
        trial
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).expect("a file that the agent has written")
    }

    /// The value of an environment variable of the agent.
    fn variable(&self, name: &str) -> Option<String> {
        let environment = self.read("environment");
        let mut lines = environment.lines().filter_map(|line| line.split_once('='));
        lines.find(|(found, _)| *found == name).map(|(_, value)| value.to_owned())
    }

    /// The environment of the agent, as far as it is compared.
    fn environment(&self) -> Vec<String> {
        let environment = self.read("environment");
        let is_compared = |line: &&str| {
            line.split_once('=').is_none_or(|(name, _)| !NOT_COMPARED.contains(&name))
        };
        let mut lines: Vec<_> =
            environment.lines().filter(is_compared).map(str::to_owned).collect();
        lines.sort();
        lines
    }

    /// `stolon launch` with these arguments, below the trial's folder.
    fn command(&self, args: &[&str]) -> Command {
        let mut command = stolon(&["launch"]);
        self.set_environment(command.args(args));
        command
    }

    fn set_environment(&self, command: &mut Command) {
        let path = std::env::var("PATH").expect("a path");
        command
            .env("PATH", format!("{}:{path}", self.path("bin").display()))
            .env("HOME", self.path("home"))
            .env("TMPDIR", self.path("temporary"))
            .env("TRIAL", self.folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
    }

    /// Runs `stolon launch` until it ends. Nothing may be left then.
    fn run(&self, args: &[&str]) -> Output {
        let output = self.command(args).output().expect("the binary ends");
        self.check_nothing_is_left();
        output
    }

    fn check_nothing_is_left(&self) {
        for name in ["home", "temporary"] {
            let mut entries = fs::read_dir(self.path(name)).expect("a folder");
            assert!(entries.next().is_none(), "something is left in {name}");
        }
    }

    /// Waits until the script has begun.
    fn wait_for_agent(&self, launched: &mut Child) {
        wait_until("the agent runs", || {
            assert!(launched.try_wait().expect("a process").is_none(), "it has ended");
            self.path("started").exists()
        });
    }
}

fn wait_until(what: &str, mut is_reached: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_reached() {
        assert!(start.elapsed() < GUARD, "{what}: expected within {GUARD:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn signal(process: &Child, name: &str) {
    let status = Command::new("kill").args([name, &process.id().to_string()]).status();
    assert!(status.expect("kill runs").success());
}

/// Whether something accepts connections at this address.
fn is_open(url: &str) -> bool {
    TcpStream::connect(url.strip_prefix("http://").expect("an address")).is_ok()
}

/// A server that is no Stolon, or one that is made up: the replies of `/v1/models` and `/health`.
async fn fake(
    mut models: impl FnMut() -> (StatusCode, Json<Value>) + Clone + Send + Sync + 'static,
    health: Value,
) -> String {
    let router = axum::Router::new()
        .route("/v1/models", get(move || std::future::ready(models())))
        .route("/health", get(move || std::future::ready(Json(health.clone()))));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move { axum::serve(listener, router).await });
    format!("http://{address}")
}

/// Goal: each agent is told the server, the key, the model and its context, nothing of other
/// providers, and its own arguments; the server that ran before runs on.
#[tokio::test]
async fn agents_use_the_server_that_runs() {
    let flags =
        ["--api-key", "sekret", "--served-model-name", "org/tiny", "--max-model-len", "2000"];
    let server = Server::start(TINY, &flags);
    let url = server.url("");
    let api = format!("{url}/v1");
    let provider = format!(
        r#"model_providers.stolon={{name="Stolon",base_url="{api}",env_key="LOCAL_KEY",wire_api="responses"}}"#
    );
    for (agent, variables, arguments) in [
        (
            "claude",
            &[
                ("ANTHROPIC_BASE_URL", &*url),
                ("ANTHROPIC_AUTH_TOKEN", "sekret"),
                ("ANTHROPIC_MODEL", "org/tiny"),
                ("ANTHROPIC_SMALL_FAST_MODEL", "org/tiny"),
                ("ANTHROPIC_DEFAULT_OPUS_MODEL", "org/tiny"),
                ("ANTHROPIC_DEFAULT_SONNET_MODEL", "org/tiny"),
                ("ANTHROPIC_DEFAULT_HAIKU_MODEL", "org/tiny"),
                ("CLAUDE_CODE_MAX_CONTEXT_TOKENS", "2000"),
                ("CLAUDE_CODE_MAX_OUTPUT_TOKENS", "500"),
                ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1"),
                ("DISABLE_AUTOUPDATER", "1"),
            ][..],
            &[][..],
        ),
        (
            "codex",
            &[("LOCAL_KEY", "sekret")],
            &[
                "-c",
                r#"model="org/tiny""#,
                "-c",
                "model_context_window=2000",
                "-c",
                r#"model_provider="stolon""#,
                "-c",
                &provider,
            ],
        ),
        ("opencode", &[("LOCAL_KEY", "sekret")], &[]),
        (
            "qwen",
            &[
                ("OPENAI_BASE_URL", &api),
                ("OPENAI_API_KEY", "sekret"),
                ("OPENAI_MODEL", "org/tiny"),
                ("QWEN_CODE_MAX_OUTPUT_TOKENS", "500"),
            ],
            &["--auth-type", "openai"],
        ),
    ] {
        let trial = Trial::new("echo done");
        let args =
            [agent, "--url", &format!("{url}/"), "--kv-memory", "64M", "--", "two words", "-p"];
        let mut command = trial.command(&args);
        command.env("ANTHROPIC_API_KEY", "other").env("CLAUDE_CODE_USE_BEDROCK", "1");
        let output = command.env("STOLON_API_KEY", "sekret").output().expect("the binary ends");
        trial.check_nothing_is_left();
        let errors = errors(&output);
        assert!(output.status.success(), "{agent}: {errors}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "done\n", "only the agent's output");
        for part in ["2000 tokens of context are too few", "no effect: --kv-memory"] {
            assert!(errors.contains(part), "{agent}: {errors}");
        }
        for (name, value) in variables {
            assert_eq!(trial.variable(name).as_deref(), Some(*value), "{agent}: {name}");
        }
        let given = trial.read("arguments");
        let expected = [arguments, &["two words", "-p"]].concat();
        assert_eq!(given.lines().collect::<Vec<_>>(), expected, "{agent}");
        let has_other = trial.variable("ANTHROPIC_API_KEY").is_some();
        assert_eq!(has_other, agent != "claude", "{agent}: a variable of another provider");
        if agent == "opencode" {
            let settings = trial.variable("OPENCODE_CONFIG_CONTENT").expect("settings");
            let settings: Value = serde_json::from_str(&settings).expect("JSON");
            let provider = &settings["provider"]["stolon"];
            let options = json!({"baseURL": api, "apiKey": "{env:LOCAL_KEY}"});
            assert_eq!(provider["options"], options);
            let limit = json!({"context": 2000, "output": 500});
            assert_eq!(provider["models"]["org/tiny"]["limit"], limit);
            assert_eq!(settings["model"], "stolon/org/tiny");
            assert_eq!(settings["small_model"], "stolon/org/tiny");
        }
        if agent == "qwen" {
            let settings: Value = serde_json::from_str(&trial.read("settings")).expect("JSON");
            assert_eq!(settings["model"]["generationConfig"]["contextWindowSize"], 2000);
            assert_eq!(settings["privacy"]["usageStatisticsEnabled"], false);
        }
    }
    let (status, health) = server.get("/health").await;
    assert_eq!(status, 200, "{health}");
}

/// Goal: a server is started if none answers, if another program does, or if the model is another
/// one; it has the settings of flags and environment, but not their address. It answers while the
/// agent runs, and is stopped afterwards. The exit status is that of the agent.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_is_started_and_stopped() {
    let other = fake(
        || (StatusCode::OK, Json(json!({"data": [{"id": "x", "owned_by": "other"}]}))),
        json!({"status": "ok"}),
    )
    .await;
    let running = Server::tiny();
    let running = running.url("");
    for (url, model, reason) in [
        (NOWHERE, TINY, "no server answers"),
        (&other, TINY, "is not Stolon"),
        (&running, SCRIPTED, "does not have the model"),
    ] {
        let trial = Trial::new(&format!("{UNTIL_ALLOWED}; exit 7"));
        let args = ["claude", model, "--url", url, "--api-key", "sekret", "--num-blocks", "512"];
        let mut command = trial.command(&args);
        command.env("STOLON_UDS", trial.path("socket")).env("STOLON_PORT", "1");
        command.env("STOLON_SERVED_MODEL_NAME", "named").env("STOLON_MAX_MODEL_LEN", "1000");
        let mut launched = command.spawn().expect("the binary starts");
        trial.wait_for_agent(&mut launched);
        let own = trial.variable("ANTHROPIC_BASE_URL").expect("an address");
        assert!(own != url && is_open(&own), "{own}");
        let models = reqwest::Client::new().get(format!("{own}/v1/models"));
        assert_eq!(
            models.try_clone().expect("a request").send().await.expect("a reply").status(),
            401
        );
        let models = models.bearer_auth("sekret").send().await.expect("a reply");
        let models: Value = models.json().await.expect("JSON");
        let served = &models["data"][0];
        assert_eq!((&served["id"], &served["max_model_len"]), (&json!("named"), &json!(1000)));
        assert_eq!(trial.variable("ANTHROPIC_MODEL").as_deref(), Some("named"));
        fs::write(trial.path("end"), "").expect("written");
        let output = launched.wait_with_output().expect("the binary ends");
        let errors = errors(&output);
        assert_eq!(output.status.code(), Some(7), "{errors}");
        assert!(errors.contains(reason), "{errors}");
        assert!(!is_open(&own), "the server has not been stopped");
        trial.check_nothing_is_left();
    }
}

/// Goal: signals to this process end the agent, and the server with it, and the exit status is that
/// of the agent. An agent that a signal has ended gives 128 and the signal's number.
#[test]
fn signals_reach_the_agent() {
    for (name, status) in [("-INT", 9), ("-TERM", 10)] {
        let trial = Trial::new(UNTIL_SIGNALED);
        let args = ["claude", "--url", NOWHERE, "--model", TINY, "--num-blocks", "512"];
        let mut launched = trial.command(&args).spawn().expect("the binary starts");
        trial.wait_for_agent(&mut launched);
        let url = trial.variable("ANTHROPIC_BASE_URL").expect("an address");
        signal(&launched, name);
        let output = launched.wait_with_output().expect("the binary ends");
        assert_eq!(output.status.code(), Some(status), "{name}: {}", errors(&output));
        assert!(!is_open(&url), "{name}: the server has not been stopped");
        trial.check_nothing_is_left();
    }
    let server = Server::tiny();
    let trial = Trial::new("kill -KILL $$");
    let output = trial.run(&["codex", "--url", &server.url("")]);
    assert_eq!(output.status.code(), Some(137), "{}", errors(&output));
}

/// Goal: Ctrl-C, which a terminal sends to all processes in the foreground, is for the agent alone:
/// an agent that goes on still has its server.
#[test]
fn ctrl_c_is_for_the_agent() {
    let trial = Trial::new(&format!("trap 'touch $TRIAL/interrupted' INT; {UNTIL_ALLOWED}"));
    let args = ["claude", "--url", NOWHERE, "--model", TINY, "--num-blocks", "512"];
    let mut command = trial.command(&args);
    let mut launched = command.process_group(0).spawn().expect("the binary starts");
    trial.wait_for_agent(&mut launched);
    let url = trial.variable("ANTHROPIC_BASE_URL").expect("an address");
    let group = format!("-{}", launched.id());
    let status = Command::new("kill").args(["-INT", "--", &group]).status();
    assert!(status.expect("kill runs").success());
    wait_until("a signal", || trial.path("interrupted").exists());
    // Time in which a server would stop.
    std::thread::sleep(Duration::from_millis(500));
    assert!(is_open(&url), "the server has been stopped");
    fs::write(trial.path("end"), "").expect("written");
    let output = launched.wait_with_output().expect("the binary ends");
    assert!(output.status.success(), "{}", errors(&output));
    assert!(!is_open(&url), "the server has not been stopped");
}

/// Goal: a server that loads its model is waited for, and a signal meanwhile ends the command.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_loads_is_waited_for() {
    let loading = || (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"error": {}})));
    let model = json!({"id": "late", "owned_by": "stolon", "root": "late", "max_model_len": 65_536,
                       "input_modalities": ["text", "image"]});
    let mut asked = 0;
    let late = move || {
        asked += 1;
        if asked < 4 { loading() } else { (StatusCode::OK, Json(json!({"data": [model]}))) }
    };
    let late = std::sync::Arc::new(std::sync::Mutex::new(late));
    let url = fake(move || late.lock().expect("a lock")(), json!({"status": "loading"})).await;
    let trial = Trial::new("");
    let output = trial.run(&["opencode", "--url", &url]);
    assert!(output.status.success(), "{}", errors(&output));
    assert!(!errors(&output).contains("WARNING"), "{}", errors(&output));
    let settings = trial.variable("OPENCODE_CONFIG_CONTENT").expect("settings");
    let settings: Value = serde_json::from_str(&settings).expect("JSON");
    let model = &settings["provider"]["stolon"]["models"]["late"];
    assert_eq!(model["limit"], json!({"context": 65_536, "output": 16_384}));
    assert_eq!(model["modalities"]["input"], json!(["text", "image"]));

    let url = fake(loading, json!({"status": "loading"})).await;
    let trial = Trial::new("");
    let mut launched = trial.command(&["claude", "--url", &url]).spawn().expect("it starts");
    // It has a handler of signals when it has its folder.
    let temporary = trial.path("temporary");
    wait_until("a folder", || fs::read_dir(&temporary).expect("a folder").next().is_some());
    std::thread::sleep(Duration::from_millis(200));
    assert!(launched.try_wait().expect("a process").is_none(), "it has not waited");
    signal(&launched, "-TERM");
    assert_eq!(launched.wait().expect("it ends").code(), Some(143));
    assert!(!trial.path("environment").exists(), "the agent has run");
    trial.check_nothing_is_left();
}

/// Goal: `--print` prints lines with which a shell runs the agent as `stolon launch` does. A key
/// from the environment is not shown.
#[test]
fn print_shows_lines_for_a_shell() {
    let server = Server::start(TINY, &["--api-key", "sek'ret", "--served-model-name", "a 'b' $c"]);
    let url = server.url("");
    for agent in ["claude", "codex", "opencode", "qwen"] {
        let trial = Trial::new("");
        let args = [agent, "--url", &url, "--", "two words", "it's"];
        let variable = ("STOLON_API_KEY", "sek'ret");
        let output = trial.command(&args).envs([variable]).output().expect("the binary ends");
        assert!(output.status.success(), "{agent}: {}", errors(&output));
        let seen = |trial: &Trial| (trial.environment(), trial.read("arguments"));
        let expected = seen(&trial);
        let printed = Trial::new("");
        for (key, variables) in [(&["--api-key", "sek'ret"][..], &[][..]), (&[], &[variable])] {
            let mut command = printed.command(&[agent, "--print", "--url", &url]);
            command.args(key).args(["--", "two words", "it's"]).envs(variables.iter().copied());
            let output = command.output().expect("the binary ends");
            assert!(output.status.success(), "{agent}: {}", errors(&output));
            assert!(!printed.path("environment").exists(), "the agent has run");
            let lines = String::from_utf8(output.stdout).expect("UTF-8");
            assert_eq!(lines.contains("sek"), !key.is_empty(), "{lines}");
            let mut shell = Command::new("sh");
            printed.set_environment(shell.args(["-c", &lines]).envs(variables.iter().copied()));
            let ended = shell.output().expect("a shell");
            assert!(ended.status.success(), "{lines}: {}", errors(&ended));
            assert_eq!(seen(&printed), expected, "{lines}");
            fs::remove_file(printed.path("environment")).expect("removed");
        }
        printed.check_nothing_is_left();
    }
    let output = Trial::new("").run(&["claude", "--print", "--url", NOWHERE]);
    assert!(!output.status.success() && errors(&output).contains("no server answers"));
}

/// Goal: errors say what to do: how to install an agent, which key is missing, that a server
/// elsewhere is not there, and why a server could not be started. The agent is not run.
#[test]
fn errors_say_what_to_do() {
    let server = Server::start(TINY, &["--api-key", "sekret"]);
    let trial = Trial::new("");
    let missing = |agent: &str| {
        let mut command = trial.command(&[agent, "--url", NOWHERE]);
        command.env("PATH", trial.path("home")).output().expect("the binary ends")
    };
    for (agent, package) in [
        ("claude", "npm install -g @anthropic-ai/claude-code"),
        ("codex", "npm install -g @openai/codex"),
        ("opencode", "npm install -g opencode-ai"),
        ("qwen", "npm install -g @qwen-code/qwen-code"),
    ] {
        let output = missing(agent);
        assert_eq!(output.status.code(), Some(1), "{agent}");
        assert!(errors(&output).contains(package), "{}", errors(&output));
    }
    let url = server.url("");
    for (args, part) in [
        (&["--url", &*url][..], "has keys: give one with --api-key"),
        (&["--url", &url, "--api-key", "wrong"], "refuses the key"),
        (
            &["--url", "http://nowhere.invalid:1"],
            "cannot reach the server at http://nowhere.invalid",
        ),
        (&["--url", NOWHERE, "--model", "/no/such/model"], "/no/such/model"),
        (&["--url", NOWHERE, "--num-blocks", "0", "--model", TINY], "got 0"),
    ] {
        let output = trial.run(&[&["claude"], args].concat());
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert!(errors(&output).contains(part), "{args:?}: {}", errors(&output));
    }
    assert!(!trial.path("environment").exists(), "an agent has run");
}

/// Goal: if the server that was started ends before the agent, the end of its log is shown.
#[cfg(target_os = "linux")]
#[test]
fn the_end_of_a_server_is_reported() {
    let kill = "for child in $(cat /proc/$PPID/task/*/children); do \
                test $child = $$ || kill -KILL $child; done; sleep 0.3";
    let trial = Trial::new(kill);
    let output = trial.run(&["claude", TINY, "--url", NOWHERE, "--num-blocks", "512"]);
    let errors = errors(&output);
    assert!(output.status.success(), "{errors}");
    assert!(errors.contains("WARNING: the server has ended"), "{errors}");
    assert!(errors.contains("listening on http://127.0.0.1:"), "{errors}");
}

/// Goal: the settings of a file reach the server that is started, except its address.
#[test]
fn a_server_has_the_settings_of_a_file() {
    let trial = Trial::new("");
    let file = trial.path("stolon.toml");
    let settings = format!(
        "model = \"{TINY}\"\nnum-blocks = 512\nserved-model-name = [\"of-file\"]\nport = 1\n\
         host = \"192.0.2.1\"\nadmin-key = \"sekret\"\n"
    );
    fs::write(&file, settings).expect("written");
    let file = Path::to_str(&file).expect("UTF-8");
    let output = trial.run(&["claude", "--url", NOWHERE, "--config", file]);
    assert!(output.status.success(), "{}", errors(&output));
    assert_eq!(trial.variable("ANTHROPIC_MODEL").as_deref(), Some("of-file"));
}
