//! The coding agents: how each is installed, and how it is told which server to use.

use std::path::PathBuf;

use anyhow::Context;
use clap::ValueEnum;
use serde_json::{Value, json};

use super::server::Server;

/// A coding agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Agent {
    /// Claude Code
    Claude,
    /// The Codex CLI
    Codex,
    /// OpenCode
    Opencode,
    /// Qwen Code
    Qwen,
}

/// What an agent is given so that it uses a server.
#[derive(Debug, Default)]
pub(super) struct Setup {
    /// Names and values of environment variables.
    pub(super) variables: Vec<(&'static str, String)>,
    /// Environment variables that would make the agent use another server, or another key.
    pub(super) removed: &'static [&'static str],
    /// Arguments in front of those of the user.
    pub(super) arguments: Vec<String>,
    /// A file with settings that can be given in no other way, and the environment variable that
    /// names it.
    pub(super) settings: Option<(&'static str, Value)>,
}

/// The environment variable with the key for agents that have none of their own.
const LOCAL_KEY: &str = "LOCAL_KEY";
/// Settings of Claude Code for other providers and keys.
const OTHER_CLAUDE_PROVIDERS: &[&str] = &[
    "ANTHROPIC_API_KEY",
    "CLAUDE_CODE_OAUTH_TOKEN",
    "CLAUDE_CODE_USE_ANTHROPIC_AWS",
    "CLAUDE_CODE_USE_BEDROCK",
    "CLAUDE_CODE_USE_FOUNDRY",
    "CLAUDE_CODE_USE_GATEWAY",
    "CLAUDE_CODE_USE_MANTLE",
    "CLAUDE_CODE_USE_VERTEX",
];
/// Maximum number of tokens of an answer, if the context has room for it.
const MAX_ANSWER_TOKENS: usize = 32_000;
/// What the file of a program ends with: on Windows, npm installs scripts of its shell.
#[cfg(windows)]
const EXTENSIONS: &[&str] = &["exe", "cmd", "bat"];
#[cfg(not(windows))]
const EXTENSIONS: &[&str] = &[""];

impl Agent {
    /// The name of its program.
    pub(super) fn program(self) -> &'static str {
        match self {
            Self::Claude => "claude",
            Self::Codex => "codex",
            Self::Opencode => "opencode",
            Self::Qwen => "qwen",
        }
    }

    /// Its package in the registry of npm.
    fn package(self) -> &'static str {
        match self {
            Self::Claude => "@anthropic-ai/claude-code",
            Self::Codex => "@openai/codex",
            Self::Opencode => "opencode-ai",
            Self::Qwen => "@qwen-code/qwen-code",
        }
    }

    /// Finds its program in the folders of `PATH`.
    ///
    /// # Errors
    /// If it is not there; the message says how to install it.
    pub(super) fn find(self) -> anyhow::Result<PathBuf> {
        let program = self.program();
        let folders = std::env::var_os("PATH").unwrap_or_default();
        let mut candidates = std::env::split_paths(&folders).flat_map(|folder| {
            EXTENSIONS.iter().map(move |extension| folder.join(program).with_extension(extension))
        });
        candidates.find(|path| path.is_file()).with_context(|| {
            let package = self.package();
            format!("there is no program `{program}`: npm install -g {package} installs it")
        })
    }

    /// The settings for a server that expects this key.
    pub(super) fn setup(self, server: &Server, key: &str) -> Setup {
        match self {
            Self::Claude => claude(server, key),
            Self::Codex => codex(server, key),
            Self::Opencode => opencode(server, key),
            Self::Qwen => qwen(server, key),
        }
    }
}

/// The maximum number of tokens of an answer. The rest of the context is for the conversation.
fn answer_tokens(server: &Server) -> usize {
    MAX_ANSWER_TOKENS.min(server.context / 4)
}

/// The address of OpenAI's API.
fn openai_url(server: &Server) -> String {
    format!("{}/v1", server.url)
}

fn claude(server: &Server, key: &str) -> Setup {
    let models = [
        "ANTHROPIC_MODEL",
        "ANTHROPIC_DEFAULT_OPUS_MODEL",
        "ANTHROPIC_DEFAULT_SONNET_MODEL",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL",
        "ANTHROPIC_SMALL_FAST_MODEL",
    ];
    let mut variables =
        vec![("ANTHROPIC_BASE_URL", server.url.clone()), ("ANTHROPIC_AUTH_TOKEN", key.to_owned())];
    variables.extend(models.map(|name| (name, server.model.clone())));
    variables.extend([
        ("CLAUDE_CODE_MAX_CONTEXT_TOKENS", server.context.to_string()),
        ("CLAUDE_CODE_MAX_OUTPUT_TOKENS", answer_tokens(server).to_string()),
        ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1".to_owned()),
        ("DISABLE_AUTOUPDATER", "1".to_owned()),
    ]);
    Setup { variables, removed: OTHER_CLAUDE_PROVIDERS, ..Setup::default() }
}

fn codex(server: &Server, key: &str) -> Setup {
    let text = |text: &str| toml::Value::from(text).to_string();
    let settings = [
        format!("model={}", text(&server.model)),
        format!("model_context_window={}", server.context),
        r#"model_provider="stolon""#.to_owned(),
        format!(
            r#"model_providers.stolon={{name="Stolon",base_url={},env_key="{LOCAL_KEY}",wire_api="responses"}}"#,
            text(&openai_url(server))
        ),
    ];
    let arguments = settings.into_iter().flat_map(|setting| ["-c".to_owned(), setting]).collect();
    Setup { variables: vec![(LOCAL_KEY, key.to_owned())], arguments, ..Setup::default() }
}

fn opencode(server: &Server, key: &str) -> Setup {
    let input: &[&str] = if server.takes_images { &["text", "image"] } else { &["text"] };
    let model = json!({
        "name": server.model,
        "limit": {"context": server.context, "output": answer_tokens(server)},
        "attachment": server.takes_images,
        "modalities": {"input": input, "output": ["text"]},
    });
    let name = format!("stolon/{}", server.model);
    let settings = json!({
        "provider": {"stolon": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "Stolon",
            "options": {"baseURL": openai_url(server), "apiKey": format!("{{env:{LOCAL_KEY}}}")},
            "models": {&server.model: model},
        }},
        "model": name,
        "small_model": name,
        "autoupdate": false,
        "share": "disabled",
    });
    let variables =
        vec![("OPENCODE_CONFIG_CONTENT", settings.to_string()), (LOCAL_KEY, key.to_owned())];
    Setup { variables, ..Setup::default() }
}

fn qwen(server: &Server, key: &str) -> Setup {
    let variables = vec![
        ("OPENAI_BASE_URL", openai_url(server)),
        ("OPENAI_API_KEY", key.to_owned()),
        ("OPENAI_MODEL", server.model.clone()),
        ("QWEN_CODE_MAX_OUTPUT_TOKENS", answer_tokens(server).to_string()),
    ];
    let settings = json!({
        "model": {"generationConfig": {"contextWindowSize": server.context}},
        "privacy": {"usageStatisticsEnabled": false},
        "general": {"enableAutoUpdate": false},
    });
    Setup {
        variables,
        arguments: ["--auth-type", "openai"].map(str::to_owned).into(),
        settings: Some(("QWEN_CODE_SYSTEM_DEFAULTS_PATH", settings)),
        ..Setup::default()
    }
}
