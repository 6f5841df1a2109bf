//! `stolon bench serve`: measures a server with an OpenAI-compatible API. The flags and the fields
//! of the JSON report have the names of `vllm bench serve` if they mean the same.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use hyper::header::{HeaderName, HeaderValue};
use serde_json::{Map, Value};
use stolon_http::certificates::Authorities;

use stolon_loadgen::drive::{Measured, closed_loop, open_loop};
use stolon_loadgen::http::{Api, HttpOptions, HttpTarget, WORD_COUNT};
use tokio_rustls::rustls::ClientConfig;

use super::progress;
use crate::terminal;
use report::Report;
use stolon_loadgen::rng::SeededRng;
use stolon_loadgen::workload::{Arrivals, Conversation, PrefixWorkload, Turn};

mod report;

/// Arguments of `stolon bench serve`.
#[derive(Debug, Args)]
pub struct BenchServeArgs {
    /// Address of the server. The path of the API is added
    #[arg(long, default_value = "http://127.0.0.1:8080", value_name = "URL")]
    base_url: String,
    /// API that requests are sent to: openai (completions) or openai-chat
    #[arg(long, default_value = "openai", value_name = "API")]
    backend: Api,
    /// Path of the API. Default: /v1/completions or /v1/chat/completions
    #[arg(long, value_name = "PATH")]
    endpoint: Option<String>,
    /// Name of the model in requests. Default: the first one that the server lists
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Key that is sent as `Authorization: Bearer KEY`
    #[arg(long, value_name = "KEY", env = "OPENAI_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// PEM file with the certificates of the authorities to trust, instead of the public ones, for
    /// a server with https
    #[arg(long, value_name = "FILE")]
    cacert: Option<PathBuf>,
    /// Further header of all requests. Can be repeated
    #[arg(long, value_name = "NAME=VALUE", value_parser = parse_header)]
    header: Vec<(HeaderName, HeaderValue)>,
    /// JSON object with further fields of all requests, such as {"top_k": 1}
    #[arg(long, value_name = "JSON", value_parser = parse_fields)]
    extra_body: Option<Map<String, Value>>,
    /// Number of conversations, each with one prompt unless --turns is given
    #[arg(long, default_value_t = 100, value_name = "COUNT")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    num_prompts: u32,
    /// Conversations that begin per second, at random times (a Poisson process), or `inf` to begin
    /// all at once
    #[arg(long, default_value = "inf", value_name = "RATE", conflicts_with = "max_concurrency")]
    request_rate: Arrivals,
    /// Number of clients that each send a request, wait for its answer, and send the next, instead
    /// of a rate
    #[arg(long, value_name = "CLIENTS", value_parser = clap::value_parser!(u32).range(1..))]
    max_concurrency: Option<u32>,
    /// Length of the prefix that all prompts share, in words of about one token
    #[arg(long, visible_alias = "prefix-len", default_value_t = 0, value_name = "TOKENS")]
    random_prefix_len: usize,
    /// Length of the part of a prompt that no other prompt has, in words of about one token
    #[arg(long, visible_alias = "input-len", default_value_t = 128, value_name = "TOKENS")]
    random_input_len: usize,
    /// Share by which the length of that part varies, 0 to 1: lengths are drawn uniformly from
    /// LENGTH * (1 - RATIO) to LENGTH * (1 + RATIO)
    #[arg(long, default_value_t = 0.0, value_name = "RATIO")]
    random_range_ratio: f64,
    /// Maximum number of tokens of an answer
    #[arg(long, visible_alias = "output-len", default_value_t = 128, value_name = "TOKENS")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    random_output_len: u32,
    /// Ask the server to generate the maximum number of tokens always. Not all servers know this
    /// field
    #[arg(long)]
    ignore_eos: bool,
    /// Send prompts of completions as random token ids below VOCABULARY instead of words, so that
    /// their lengths are exact
    #[arg(long, value_name = "VOCABULARY", value_parser = clap::value_parser!(u32).range(1..))]
    token_ids: Option<u32>,
    /// Number of turns of each conversation. The prompt of a turn is the conversation so far and as
    /// many new words as in the first turn
    #[arg(long, default_value_t = 1, value_name = "COUNT")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=10_000))]
    turns: u32,
    /// Seconds between an answer and the next turn of its conversation
    #[arg(long, default_value_t = 0.0, value_name = "SECONDS")]
    turn_pause: f64,
    /// Number of requests before the measurement, one after the other. They share no prefix with
    /// the others, and have to succeed
    #[arg(long, default_value_t = 1, value_name = "COUNT")]
    num_warmups: u32,
    /// Percentiles to report, separated by commas
    #[arg(long, value_delimiter = ',', default_values_t = [90.0, 95.0, 99.0])]
    metric_percentiles: Vec<f64>,
    /// Seconds after which a request without a complete answer counts as failed
    #[arg(long, default_value_t = 600.0, value_name = "SECONDS")]
    timeout: f64,
    /// Seed of prompts and arrivals
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

/// The settings of a client that trusts the authorities in a PEM file.
pub(crate) fn trusting(file: &Path) -> anyhow::Result<ClientConfig> {
    let config = Authorities::read(file).and_then(|authorities| authorities.client_config());
    config.with_context(|| format!("--cacert {}", file.display()))
}

impl BenchServeArgs {
    pub(super) async fn run(self) -> anyhow::Result<()> {
        self.check()?;
        // Each request in progress needs a connection. For small runs a low limit is enough.
        let _ = rlimit::increase_nofile_limit(u64::MAX);
        let target = HttpTarget::new(self.options()?).await?;
        let warmup = self.workload(self.num_warmups, Arrivals::AtOnce, !self.seed);
        let bar = progress::bar(warmup.len(), "warm-up");
        let warm = closed_loop(&target, &warmup, 1, || bar.inc(1)).await?;
        bar.finish_and_clear();
        fail_if_any_failed(&target, &warm)?;
        let plan = self.workload(self.num_prompts, self.arrivals(), self.seed);
        let bar = progress::bar(plan.len(), target.url().to_string());
        let measured = match self.max_concurrency {
            Some(clients) => closed_loop(&target, &plan, clients as usize, || bar.inc(1)).await?,
            None => open_loop(&target, &plan, || bar.inc(1)).await?,
        };
        bar.finish_and_clear();
        let report = Report::new(&measured, &self.metric_percentiles);
        if self.json {
            terminal::line(report.json(&self, &target))?;
        } else {
            terminal::stream(&report.text(&self, &target))?;
        }
        anyhow::ensure!(!measured.records.is_empty(), "no request was answered");
        Ok(())
    }

    fn check(&self) -> anyhow::Result<()> {
        anyhow::ensure!(
            self.random_prefix_len.saturating_add(self.input_lens().0) > 0,
            "expected a prompt of at least 1 token, got --random-prefix-len {} and \
             --random-input-len {}",
            self.random_prefix_len,
            self.random_input_len
        );
        anyhow::ensure!(
            (0.0..=1.0).contains(&self.random_range_ratio),
            "--random-range-ratio: expected 0 to 1, got {}",
            self.random_range_ratio
        );
        for (flag, seconds) in [("--timeout", self.timeout), ("--turn-pause", self.turn_pause)] {
            anyhow::ensure!(
                (0.0..=86_400.0).contains(&seconds),
                "{flag}: expected 0 to 86400 seconds, got {seconds}"
            );
        }
        for percent in &self.metric_percentiles {
            anyhow::ensure!(
                (0.0..=100.0).contains(percent),
                "--metric-percentiles: expected 0 to 100, got {percent}"
            );
        }
        anyhow::ensure!(
            self.token_ids.is_none() || (self.backend == Api::Completions && self.turns == 1),
            "--token-ids is possible only with --backend openai and a single turn, because answers \
             arrive as text"
        );
        // A prompt and its arrival take memory before the first is sent.
        let tokens = (self.random_prefix_len as u64)
            .saturating_add((self.input_lens().1 as u64).saturating_mul(u64::from(self.turns)))
            .saturating_mul(u64::from(self.num_prompts.max(self.num_warmups)));
        anyhow::ensure!(
            tokens <= 1 << 30,
            "expected prompts of at most {} tokens together, got {tokens}",
            1_u64 << 30
        );
        Ok(())
    }

    fn options(&self) -> anyhow::Result<HttpOptions> {
        let mut extra_body = self.extra_body.clone().unwrap_or_default();
        if self.ignore_eos {
            extra_body.insert("ignore_eos".to_owned(), Value::Bool(true));
        }
        Ok(HttpOptions {
            base_url: self.base_url.clone(),
            endpoint: self.endpoint.clone(),
            api: self.backend,
            model: self.model.clone(),
            api_key: self.api_key.clone(),
            headers: self.header.clone(),
            extra_body,
            token_ids: self.token_ids.is_some(),
            timeout: Duration::from_secs_f64(self.timeout),
            tls: self.cacert.as_deref().map(trusting).transpose()?,
        })
    }

    fn arrivals(&self) -> Arrivals {
        match self.request_rate {
            Arrivals::PerSecond(rate) => Arrivals::Poisson(rate),
            other => other,
        }
    }

    /// Smallest and largest length of the part of a prompt that no other prompt has, in tokens.
    fn input_lens(&self) -> (usize, usize) {
        let spread = (self.random_input_len as f64 * self.random_range_ratio) as usize;
        let longest = self.random_input_len.saturating_add(spread);
        (self.random_input_len.saturating_sub(spread), longest)
    }

    fn workload(&self, count: u32, arrivals: Arrivals, seed: u64) -> Vec<Conversation> {
        let (unique_min, unique_max) = self.input_lens();
        let vocab_size = self.token_ids.map_or(WORD_COUNT, |size| size as usize);
        let output_tokens = self.random_output_len as usize;
        let workload = PrefixWorkload {
            request_count: count as usize,
            shared_tokens: self.random_prefix_len,
            unique_min,
            unique_max,
            output_tokens,
            arrivals,
            distinct: false,
            vocab_size,
            excluded: Vec::new(),
            seed,
        };
        let mut plan = workload.plan();
        // Drawn after the first turns, which then do not depend on the number of turns.
        let mut rng = SeededRng::new(seed.wrapping_add(1));
        for conversation in &mut plan {
            conversation.pause = Duration::from_secs_f64(self.turn_pause);
            for _ in 1..self.turns {
                let length = rng.between(unique_min.max(1), unique_max.max(1));
                let tokens = rng.tokens(length, vocab_size);
                conversation.turns.push(Turn { tokens, output_tokens });
            }
        }
        plan
    }
}

/// Fails with the first error of the warm-up, because all other requests would most likely fail in
/// the same way.
fn fail_if_any_failed(target: &HttpTarget, warm: &Measured) -> anyhow::Result<()> {
    let url = target.url();
    if let Some((kind, message)) = warm.failures.first() {
        anyhow::bail!("{url}: a warm-up request failed: {kind}: {message}");
    }
    anyhow::ensure!(warm.refusals.is_empty(), "{url}: the server is overloaded (status 429)");
    Ok(())
}

fn parse_header(text: &str) -> Result<(HeaderName, HeaderValue), String> {
    let pair = text.split_once('=').and_then(|(name, value)| {
        Some((name.trim().parse().ok()?, HeaderValue::from_str(value.trim()).ok()?))
    });
    pair.ok_or_else(|| format!("expected NAME=VALUE, got `{text}`"))
}

fn parse_fields(text: &str) -> anyhow::Result<Map<String, Value>> {
    serde_json::from_str(text).context("expected a JSON object")
}
