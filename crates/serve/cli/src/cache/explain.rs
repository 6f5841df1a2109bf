//! `stolon cache explain` and `stolon cache misses`: why prompts were not cached.

use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, ValueEnum};
use serde_json::Value;
use stolon_http::api::cache::{Explanations, Miss, Misses};

use super::Client;
use crate::text_file;

/// Arguments of `stolon cache explain`.
#[derive(Debug, Args)]
pub(super) struct ExplainArgs {
    /// JSON file with the body of the request, as it is sent to the API; `-` is standard input
    #[arg(value_name = "FILE")]
    request: PathBuf,
    /// The API that the request is for. Default: the one whose form it has
    #[arg(long, value_enum)]
    api: Option<Api>,
    /// The client's key, for a server with API keys
    #[arg(long, value_name = "KEY", env = "STOLON_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
}

/// An API, by the path of its route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Api {
    /// /v1/chat/completions
    Chat,
    /// /v1/completions
    Completions,
    /// /v1/messages
    Messages,
    /// /v1/responses
    Responses,
}

impl Api {
    /// The API whose form a request has.
    fn of(body: &Value) -> Api {
        let tools = body["tools"].as_array();
        let has_schema = |tool: &Value| tool.get("input_schema").is_some();
        if body.get("input").is_some() {
            Api::Responses
        } else if body.get("prompt").is_some() {
            Api::Completions
        } else if body.get("system").is_some() || tools.is_some_and(|it| it.iter().any(has_schema))
        {
            Api::Messages
        } else {
            Api::Chat
        }
    }

    /// The path below `/v1/cache`.
    fn path(self) -> &'static str {
        match self {
            Api::Chat => "explain",
            Api::Completions => "explain/completions",
            Api::Messages => "explain/messages",
            Api::Responses => "explain/responses",
        }
    }
}

impl ExplainArgs {
    /// Sends the request to the server, and returns its reply.
    pub(super) fn send(&self, client: &Client<'_>) -> anyhow::Result<String> {
        let text = text_file::read_or_stdin(&self.request)?;
        let body: Value = serde_json::from_str(&text)
            .with_context(|| format!("{} is not JSON", self.request.display()))?;
        let path = self.api.unwrap_or_else(|| Api::of(&body)).path();
        let client = Client { admin_key: self.api_key.as_deref(), ..client.clone() };
        client.send(path, Some(text))
    }
}

/// The lines for an explanation of each prompt.
pub(super) fn explanations(reply: &Explanations) -> Vec<String> {
    let of_prompt = |result: &stolon_http::api::cache::Explanation| {
        let (cached, prompt) = (result.cached_tokens, result.prompt_tokens);
        let mut lines = vec![format!("{cached} of {prompt} tokens are cached")];
        match &result.miss {
            None => lines.push("no more can be, or nothing is remembered".to_owned()),
            Some(miss) => {
                lines.push(reason(miss));
                if miss.lost_tokens > 0 {
                    lines.push(format!("the prompt goes on:      {:?}", miss.prompt_text));
                    lines.push(format!("the earlier one went on: {:?}", miss.earlier_text));
                }
            }
        }
        lines
    };
    reply.results.iter().flat_map(of_prompt).collect()
}

/// The lines for a list of misses.
pub(super) fn misses(reply: &Misses) -> Vec<String> {
    let mut lines = Vec::new();
    for count in reply.reasons.iter().filter(|count| count.requests > 0) {
        let (requests, tokens) = (count.requests, count.lost_tokens);
        lines.push(format!("{}: {requests} requests, {tokens} tokens lost", count.reason));
    }
    for miss in &reply.misses {
        let client = miss.client.as_deref().unwrap_or("-");
        let (cached, prompt) = (miss.cached_tokens, miss.prompt_tokens);
        lines.push(format!("{client}: {cached} of {prompt} tokens cached, {}", reason(&miss.miss)));
    }
    if lines.is_empty() {
        lines.push("no request has lost cached tokens".to_owned());
    }
    lines
}

/// What was lost, and why.
fn reason(miss: &Miss) -> String {
    let time = miss.lost_seconds.map_or(String::new(), |seconds| format!(", about {seconds:.2} s"));
    let place = match (miss.message, &miss.role) {
        (Some(index), Some(role)) => format!(" (message {index}, {role})"),
        _ => String::new(),
    };
    let why = match miss.reason.as_str() {
        "new" => return "the rest of the prompt is new".to_owned(),
        "other_salt" => "the same prompt was computed with another cache salt",
        "other_adapter" => "the same prompt was computed with another adapter",
        "evicted" => "it was cached and has been evicted",
        "not_computed" => "a request with it was canceled, failed or is still running",
        "no_checkpoint" => "no checkpoint of the recurrent state is there",
        "tools_changed" => "the tools are others",
        "options_changed" => "the variables of the chat template are others",
        "message_changed" => "a message has changed",
        "message_removed" => "a message is missing",
        "message_inserted" => "a message was inserted",
        "answer_changed" => "an answer came back with another content",
        "reasoning_changed" => "an answer came back with other reasoning",
        "template_changed" => "the chat template has rendered the same messages otherwise",
        "other_tokens" => "the same text has other tokens",
        "text_changed" => "the text is another one",
        other => other,
    };
    format!("{} tokens lost{time}: {why}{place}", miss.lost_tokens)
}
