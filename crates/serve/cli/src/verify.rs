//! `stolon verify`: checks with any OpenAI-compatible server, or with an engine of its own, that
//! answers depend neither on the prefix cache nor on other requests.
//!
//! `conversations.rs` writes the prompts, `scenarios.rs` sends them, `checks.rs` compares the
//! answers, `report.rs` shows the result, and `own_server.rs` starts an engine if no address is
//! given.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::Args;
use serde_json::{Map, Value, json};
use stolon_loadgen::drive::Failure;
use stolon_loadgen::http::{Api, HttpOptions, HttpTarget, Message};

use crate::args::{DEMO, EngineArgs};
use crate::bench::{bar, trusting};
use crate::cli::{is_broken_pipe, one_line};
use crate::terminal;
use conversations::Writer;
use own_server::OwnServer;
use report::{Report, Verdict};
use scenarios::{Run, Sizes, ask};

mod checks;
mod conversations;
mod own_server;
mod report;
mod scenarios;

/// Exit status for a difference or a leak.
const DIFFERENT: u8 = 1;
/// Exit status if not everything could be compared.
const INCOMPLETE: u8 = 2;

/// Arguments of `stolon verify`.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Address of the server to check, such as http://127.0.0.1:8000, instead of an engine that is
    /// started for it
    ///
    /// With an address, --model is the name of the model in requests, by default the first one that
    /// the server lists, and the other flags of the engine have no effect.
    #[arg(long, visible_alias = "base-url", value_name = "URL")]
    url: Option<String>,
    /// Key that is sent as `Authorization: Bearer KEY`
    #[arg(long, value_name = "KEY", env = "OPENAI_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// PEM file with the certificates of the authorities to trust, instead of the public ones, for
    /// a server with https
    #[arg(long, value_name = "FILE")]
    cacert: Option<PathBuf>,
    /// API that requests are sent to: openai-chat or openai (completions). Default: chat, or
    /// completions if the server has no chat for its model
    #[arg(long, value_name = "API")]
    backend: Option<Api>,
    /// Number of times that everything is checked, each time with new prompts
    #[arg(long, default_value_t = 5, value_name = "COUNT")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Length of the text that a question is about, in words
    #[arg(long, default_value_t = 300, value_name = "COUNT")]
    #[arg(value_parser = clap::value_parser!(u32).range(20..=100_000))]
    words: u32,
    /// Maximum number of tokens of an answer
    #[arg(long, default_value_t = 32, value_name = "TOKENS")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// Number of prompts, each of four times --words, that are sent in each round to push the
    /// others out of the cache. A server with a large cache needs more
    #[arg(long, default_value_t = 12, value_name = "COUNT")]
    unrelated_prompts: u32,
    /// Seconds after which a request without a complete answer counts as failed, together with
    /// the waits for a server that is overloaded
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
    /// Seed of the prompts. By default another one in each run, so that the server has none of them
    /// in its cache; the report names it
    #[arg(long)]
    seed: Option<u64>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    engine: EngineArgs,
}

impl VerifyArgs {
    /// Checks the server and prints the result. Returns the exit status: 0 if all answers were
    /// equal, 1 for a difference or a leak, and 2 if not everything could be compared.
    ///
    /// # Errors
    /// If the result cannot be printed. Other errors are printed here.
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        match self.verdict().await {
            Ok(Verdict::Equal) => Ok(ExitCode::SUCCESS),
            Ok(Verdict::Different) => Ok(ExitCode::from(DIFFERENT)),
            Ok(Verdict::Incomplete) => Ok(ExitCode::from(INCOMPLETE)),
            Err(error) if is_broken_pipe(&error) => Err(error),
            Err(error) => {
                terminal::warn(format_args!("error: {}", one_line(&error)));
                Ok(ExitCode::from(INCOMPLETE))
            }
        }
    }

    async fn verdict(&self) -> anyhow::Result<Verdict> {
        if let Some(url) = &self.url {
            let model = Some(&self.engine.model).filter(|model| *model != DEMO);
            return self.check(url, model.cloned()).await;
        }
        let server = OwnServer::start(self.engine.clone()).await?;
        let verdict = self.check(&server.url, None).await;
        server.stop().await;
        verdict
    }

    async fn check(&self, url: &str, model: Option<String>) -> anyhow::Result<Verdict> {
        let begin = Instant::now();
        let target = self.connect(url, model).await?;
        let sizes = self.sizes();
        let seed = self.seed.unwrap_or_else(seed_of_now);
        let bar = bar(sizes.answers() * self.rounds as usize, target.url().to_string());
        let writer = Writer::new(seed);
        let mut run = Run::new(&target, sizes, writer, bar);
        for _ in 0..self.rounds {
            if run.round().await.is_break() {
                break;
            }
        }
        let checks = run.finish();
        let report = Report { target: &target, seed, elapsed: begin.elapsed(), checks };
        match self.json {
            true => terminal::line(report.json())?,
            false => terminal::stream(&report.text())?,
        }
        Ok(report.verdict())
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            words: self.words as usize,
            max_tokens: self.max_tokens as usize,
            unrelated: self.unrelated_prompts as usize,
            timeout: Duration::from_secs(self.timeout),
        }
    }

    /// Finds an API that the server has, and which of token ids and log-probabilities it accepts to
    /// send, by asking a short question.
    async fn connect(&self, url: &str, mut model: Option<String>) -> anyhow::Result<HttpTarget> {
        let sizes = Sizes { max_tokens: 1, ..self.sizes() };
        let hello = [Message { role: "user", text: "Hello".to_owned() }];
        let mut first_failure = None;
        for api in self.backend.map_or(vec![Api::Chat, Api::Completions], |api| vec![api]) {
            for extra_body in optional_fields(api) {
                let target = HttpTarget::new(HttpOptions {
                    base_url: url.to_owned(),
                    endpoint: None,
                    api,
                    model: model.clone(),
                    api_key: self.api_key.clone(),
                    headers: Vec::new(),
                    extra_body,
                    token_ids: false,
                    timeout: sizes.timeout,
                    tls: self.cacert.as_deref().map(trusting).transpose()?,
                });
                let target = target.await?;
                model = Some(target.model().to_owned());
                let Err(failure) = ask(&target, &hello, sizes).await else { return Ok(target) };
                let is_refused = matches!(&failure, Failure::Counted { kind, .. }
                    if kind.starts_with("status") && !["status 401", "status 403"].contains(&&**kind));
                let failure = anyhow::anyhow!("{}: {failure}", target.url());
                if !is_refused {
                    return Err(failure);
                }
                first_failure.get_or_insert(failure);
            }
        }
        Err(first_failure.unwrap_or_else(|| anyhow::anyhow!("{url}: no API was tried")))
    }
}

/// The fields that ask for what some servers do not send: all, and fewer for servers that refuse
/// them.
fn optional_fields(api: Api) -> [Map<String, Value>; 3] {
    let logprobs = match api {
        Api::Chat => json!(true),
        Api::Completions => json!(1),
    };
    let only_logprobs = Map::from_iter([("logprobs".to_owned(), logprobs)]);
    let mut all = only_logprobs.clone();
    all.insert("return_token_ids".to_owned(), json!(true));
    [all, only_logprobs, Map::new()]
}

/// A seed that no earlier run had.
fn seed_of_now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.as_millis() as u64
}
