//! `GET /metrics`: the engine's counters and distributions in Prometheus's formats.
//!
//! Names and buckets are vLLM's for metrics with the same meaning, with the prefix `stolon:`, so
//! that its dashboards need little change. Metrics that routers read have vLLM's own prefix, too
//! (`vllm.rs`). Nothing is measured here: the engine counts with atomics, which a scrape reads.

use std::fmt;
use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use indexmap::IndexMap;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, text};
use prometheus_client::registry::Registry;
use stolon::{DiskStats, Engine, EngineHistograms, EngineStats, MissCount, ModelInfo, ObjectStats};

use crate::handlers::app::App;
use crate::wire::error::ApiError;
use crate::wire::traces;

mod adapters;
mod more;
mod output;
mod vllm;

use adapters::adapters;
pub use more::{CounterSource, CounterValue};
use output::Output;

/// The prefix of the names of Stolon's metrics.
const PREFIX: &str = "stolon:";

/// The text format of OpenMetrics, which Prometheus requests and other readers accept.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The older text format of Prometheus.
const PLAIN: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The metrics of one engine. A scrape reads the engine's numbers.
#[derive(Debug)]
pub struct EngineMetrics(Registry);

impl EngineMetrics {
    /// The metrics of an engine, whose model is served under this name.
    #[must_use]
    pub fn new(engine: Engine, model_name: String) -> Self {
        Self::with_counters(engine, model_name, Vec::new())
    }

    /// The same, with counters of the program around the engine.
    pub(crate) fn with_counters(
        engine: Engine,
        model_name: String,
        more: Vec<CounterSource>,
    ) -> Self {
        let model = ("model_name".into(), model_name.into());
        let mut registry = Registry::with_labels([model].into_iter());
        registry.register_collector(Box::new(Numbers { engine, more }));
        Self(registry)
    }

    /// The metrics in the text format of OpenMetrics.
    ///
    /// # Errors
    /// None that is known; the encoder's interface has one.
    pub fn open_metrics_text(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        text::encode(&mut text, &self.0)?;
        Ok(text)
    }

    /// The metrics in the older text format of Prometheus.
    ///
    /// # Errors
    /// As [`EngineMetrics::open_metrics_text`].
    pub fn plain_text(&self) -> Result<String, fmt::Error> {
        Ok(plain(&self.open_metrics_text()?))
    }
}

/// The handler.
pub(crate) async fn metrics(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let text = app.metrics.open_metrics_text().map_err(|_| ApiError::internal())?;
    Ok(reply(&headers, text))
}

/// The reply with metrics, in the older format if the client accepts that one only.
pub(crate) fn reply(headers: &HeaderMap, open_metrics: String) -> Response {
    let accepts = |kind: &str| {
        let mut accepted = headers.get_all(header::ACCEPT).iter();
        accepted.any(|value| value.to_str().is_ok_and(|value| value.contains(kind)))
    };
    if accepts("text/plain") && !accepts("openmetrics-text") {
        return ([(header::CONTENT_TYPE, PLAIN)], plain(&open_metrics)).into_response();
    }
    ([(header::CONTENT_TYPE, OPEN_METRICS)], open_metrics).into_response()
}

/// OpenMetrics texts as one: each metric is described once, followed by its samples from all texts.
pub(crate) fn merged(texts: &[String]) -> String {
    let mut metrics = IndexMap::<&str, (String, String)>::new();
    for text in texts {
        let mut name = "";
        for line in text.lines().filter(|&line| line != "# EOF") {
            let comment = line.strip_prefix("# ").map(|comment| comment.splitn(3, ' '));
            let described = comment.and_then(|mut words| words.nth(1));
            let is_new = described.is_some_and(|described| !metrics.contains_key(described));
            name = described.unwrap_or(name);
            let (comments, samples) = metrics.entry(name).or_default();
            match described {
                None => samples.extend([line, "\n"]),
                // The other comments of a new metric follow its first one.
                Some(_) if is_new || samples.is_empty() && !comments.contains(line) => {
                    comments.extend([line, "\n"]);
                }
                Some(_) => {}
            }
        }
    }
    let metrics = metrics.into_values().map(|(comments, samples)| comments + &samples);
    metrics.collect::<String>() + "# EOF\n"
}

/// Converts OpenMetrics text to the older format, in which the comments of counters have names with
/// `_total` like the samples, and which has no mark at the end.
fn plain(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len());
    let mut lines = open_metrics.lines().filter(|&line| line != "# EOF").peekable();
    while let Some(line) = lines.next() {
        let of_counter = |line: &str| line.starts_with("# TYPE ") && line.ends_with(" counter");
        let is_of_counter = of_counter(line)
            || line.starts_with("# HELP ") && lines.peek().is_some_and(|&next| of_counter(next));
        let mut words = line.splitn(4, ' ');
        match (is_of_counter, words.next(), words.next(), words.next(), words.next()) {
            (true, Some(mark), Some(kind), Some(name), Some(rest)) => {
                text.extend([mark, " ", kind, " ", name, "_total ", rest, "\n"]);
            }
            _ => text.extend([line, "\n"]),
        }
    }
    text
}

/// Reads the engine's numbers at each scrape.
#[derive(Debug)]
struct Numbers {
    engine: Engine,
    more: Vec<CounterSource>,
}

impl Collector for Numbers {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Self { engine, more } = self;
        let mut out = Output::new(encoder, PREFIX);
        let (stats, info) = (engine.stats(), engine.model_info());
        requests(&mut out, &stats)?;
        tokens(&mut out, &stats)?;
        blocks(&mut out, &stats, info)?;
        misses(&mut out, &engine.cache().miss_counts())?;
        steps(&mut out, &stats)?;
        sessions(&mut out, &stats)?;
        if let Some(stats) = engine.tiers().disk_stats() {
            disk(&mut out, &stats)?;
        }
        if let Some(stats) = engine.tiers().object_stats() {
            objects(&mut out, &stats)?;
        }
        if let Some(counts) = traces::counts() {
            let help = "Spans of traces. Outcome exported: accepted by the collector; queue_full: \
                        dropped because too many waited for it; failed: not accepted.";
            let outcomes = [
                ("exported", counts.exported),
                ("queue_full", counts.queue_full),
                ("failed", counts.failed),
            ];
            out.counters("trace_spans", help, "outcome", &outcomes)?;
        }
        distributions(&mut out, &engine.histograms(), info.max_positions)?;
        for counter in more.iter().flat_map(CounterSource::read) {
            out.counter(counter.name, counter.help, counter.value)?;
        }
        let loaded = engine.adapters();
        adapters(&mut out, &loaded, engine.adapter_evictions())?;
        vllm::encode(out.with_prefix(vllm::PREFIX), &stats, info, &loaded)
    }
}

/// Why prompts were not cached.
fn misses(out: &mut Output<'_>, counts: &[MissCount]) -> fmt::Result {
    let values = |value: fn(&MissCount) -> u64| -> Vec<(&str, u64)> {
        counts.iter().map(|count| (count.reason.as_str(), value(count))).collect()
    };
    let help = "Requests whose prompt was not cached as far as it could be, by the reason.";
    out.counters("prefix_cache_misses", help, "reason", &values(|count| count.requests))?;
    let help = "Prompt tokens that would have been cached without the reason, compared with the \
                nearest earlier request of the client.";
    out.counters("prefix_cache_lost_tokens", help, "reason", &values(|count| count.lost_tokens))
}

fn requests(out: &mut Output<'_>, stats: &EngineStats) -> fmt::Result {
    let running = stats.running as u64;
    out.gauge("num_requests_running", "Requests being computed.", running)?;
    let waiting = stats.waiting as u64;
    out.gauge("num_requests_waiting", "Requests in the admission queue.", waiting)?;
    let queued = stats.queued_tokens as u64;
    out.gauge("queued_tokens", "Uncached prompt tokens in the admission queue.", queued)?;
    let help = "Requests that have ended. Reason abort: canceled by the client; error: failed.";
    let reasons = [
        ("stop", stats.finished.saturating_sub(stats.finished_length)),
        ("length", stats.finished_length),
        ("abort", stats.canceled),
        ("error", stats.failed),
    ];
    out.counters("request_success", help, "finished_reason", &reasons)?;
    let help = "Requests refused with status 429, by the limit that they exceeded: the requests or \
                tokens in the queue, or the quota of their key.";
    let by_other = stats.rejected_by_tokens + stats.rejected_by_quota;
    let reasons = [
        ("requests", stats.rejected.saturating_sub(by_other)),
        ("tokens", stats.rejected_by_tokens),
        ("quota", stats.rejected_by_quota),
    ];
    out.counters("admission_rejections", help, "reason", &reasons)?;
    let help = "Times that a waiting request waited for a running one that computed its prefix.";
    out.counter("shared_prefill_waits", help, stats.follows)?;
    let help = "Checkpoints of recurrent states that were taken, for models that have such states.";
    out.counter("state_checkpoints", help, stats.checkpoints)?;
    let help = "Prompt tokens whose KV was cached and that were computed again, because the last \
                checkpoint of the recurrent state was before them.";
    out.counter("state_recomputed_tokens", help, stats.recomputed_tokens)?;
    let help = "Requests that were preempted, by any reason.";
    out.counter("num_preemptions", help, stats.preemptions)?;
    let help = "Requests that were preempted. Reason no_blocks: an older request needed the KV \
                blocks; slow_client: the client did not read its answer; fair_share: a \
                client with fewer running requests needed the slot; priority: a request of the \
                same client with a larger priority needed the slot.";
    let for_slots =
        stats.preemptions_stalled + stats.preemptions_for_share + stats.preemptions_for_priority;
    let reasons = [
        ("no_blocks", stats.preemptions - for_slots),
        ("slow_client", stats.preemptions_stalled),
        ("fair_share", stats.preemptions_for_share),
        ("priority", stats.preemptions_for_priority),
    ];
    out.counters("preemptions_by_reason", help, "reason", &reasons)
}

fn tokens(out: &mut Output<'_>, stats: &EngineStats) -> fmt::Result {
    out.counter("prompt_tokens", "Prompt tokens of started requests.", stats.prompt_tokens)?;
    let help = "Prompt tokens that were read from the prefix cache.";
    out.counter("prompt_tokens_cached", help, stats.cached_tokens)?;
    let help = "Prompt tokens that were looked up in the prefix cache.";
    out.counter("prefix_cache_queries", help, stats.prompt_tokens)?;
    let help = "Prompt tokens that were found in the prefix cache.";
    out.counter("prefix_cache_hits", help, stats.cached_tokens)?;
    let help = "Prompt tokens whose KV was loaded from outside of the KV pool.";
    out.counter("prompt_tokens_loaded", help, stats.loaded_tokens)?;
    let help = "Loads of KV that failed; the tokens were computed instead.";
    out.counter("kv_loads_failed", help, stats.loads_failed)?;
    let help = "Blocks that were copied out of the KV pool.";
    out.counter("kv_blocks_saved", help, stats.saved_blocks)?;
    out.counter("generation_tokens", "Generated tokens.", stats.completion_tokens)?;
    let help = "Tokens that were computed while there was no request, for the next turns of \
                conversations.";
    out.counter("background_tokens", help, stats.background_tokens)?;
    let help = "Prompts that were computed while there was no request. Outcome dropped: a request \
                came first, or too many waited.";
    let (computed, dropped) = (stats.background_finished, stats.background_dropped);
    let outcomes = [("computed", computed), ("dropped", dropped)];
    out.counters("background_prefills", help, "outcome", &outcomes)?;
    let help = "First tokens that were sampled from cached logits, without a forward pass.";
    out.counter("first_tokens_from_cache", help, stats.first_tokens_from_cache)
}

fn blocks(out: &mut Output<'_>, stats: &EngineStats, info: &ModelInfo) -> fmt::Result {
    let help = "Share of the KV blocks that requests and pins hold, 0 to 1.";
    out.gauge_f64("kv_cache_usage_perc", help, kv_usage(stats))?;
    let help = "KV blocks. State cached: owned by the prefix cache, of which evictable ones are \
                held by no request and no pin; reserved: private to a running request, or the last \
                block of a session.";
    let states = [
        ("free", stats.blocks_free as u64),
        ("reserved", stats.blocks_reserved as u64),
        ("cached", stats.blocks_cached as u64),
        ("evictable", stats.blocks_evictable as u64),
        ("pinned", stats.blocks_pinned as u64),
    ];
    out.gauges("kv_cache_blocks", help, "state", &states)?;
    let help = "Blocks that left the prefix cache. Reason room: to make room for a request; \
                quota: their cache salt or tenant exceeded its quota; requested: by a flush or \
                another call of the operator.";
    let reasons = [
        ("room", stats.evictions),
        ("quota", stats.evictions_for_quota),
        ("requested", stats.evictions_requested),
    ];
    out.counters("prefix_cache_evicted_blocks", help, "reason", &reasons)?;
    cache_config(out, info)
}

/// The share of the KV blocks that requests and pins hold, 0 to 1.
fn kv_usage(stats: &EngineStats) -> f64 {
    let available = stats.blocks_free + stats.blocks_evictable;
    let used = stats.blocks_total.saturating_sub(available) as f64;
    used / stats.blocks_total.max(1) as f64
}

fn cache_config(out: &mut Output<'_>, info: &ModelInfo) -> fmt::Result {
    let labels = [
        ("block_size", info.block_size.to_string()),
        ("num_gpu_blocks", info.num_blocks.to_string()),
        ("enable_prefix_caching", info.prefix_caching.to_string()),
    ];
    let help = "Size of the KV cache: blocks, and tokens per block.";
    out.info("cache_config_info", help, &labels, 1)
}

fn sessions(out: &mut Output<'_>, stats: &EngineStats) -> fmt::Result {
    out.gauge("sessions", "Open sessions.", stats.sessions as u64)?;
    let help = "KV blocks that sessions hold between their turns.";
    out.gauge("session_kv_blocks", help, stats.blocks_in_sessions as u64)?;
    out.counter("session_turns", "Complete turns of sessions.", stats.session_turns)?;
    let help = "Sessions that the server closed. Reason expired: no turn for the time to live; \
                displaced: to make room for another one.";
    let reasons = [("expired", stats.sessions_expired), ("displaced", stats.sessions_displaced)];
    out.counters("sessions_closed", help, "reason", &reasons)?;
    let help = "Times that the KV blocks of a session were released, for another session or for a \
                running request.";
    out.counter("session_holds_lost", help, stats.session_holds_lost)
}

fn disk(out: &mut Output<'_>, stats: &DiskStats) -> fmt::Result {
    out.gauge("kv_disk_bytes", "Size of the KV that is stored on disk.", stats.bytes)?;
    let help = "Maximum size of the KV that is stored on disk.";
    out.gauge("kv_disk_budget_bytes", help, stats.budget_bytes)?;
    let help = "Prompt tokens whose KV was read from disk.";
    out.counter("kv_disk_read_tokens", help, stats.read_tokens)?;
    out.counter("kv_disk_read_bytes", "KV that was read from disk.", stats.read_bytes)?;
    out.counter("kv_disk_written_bytes", "KV that was written to disk.", stats.written_bytes)?;
    let help = "Records of the disk tier. Event refused: damaged or missing when it was read; \
                evicted: removed to make room; write_failed; write_skipped: too much was waiting, \
                or a write had just failed.";
    let events = [
        ("refused", stats.records_refused),
        ("evicted", stats.records_evicted),
        ("write_failed", stats.writes_failed),
        ("write_skipped", stats.writes_skipped),
    ];
    out.counters("kv_disk_records", help, "event", &events)
}

fn objects(out: &mut Output<'_>, stats: &ObjectStats) -> fmt::Result {
    let help = "Records that the object store has, as far as is known.";
    out.gauge("kv_object_store_known_records", help, stats.records)?;
    let help = "KV that was fetched from the object store.";
    out.counter("kv_object_store_fetched_bytes", help, stats.fetched_bytes)?;
    let help = "KV that was stored in the object store.";
    out.counter("kv_object_store_stored_bytes", help, stats.stored_bytes)?;
    let help = "Requests to the object store that failed.";
    out.counter("kv_object_store_failures", help, stats.failures)?;
    let help = "Records that were looked for in the object store although it was not known to have \
                them. Result absent: it did not send them in time, either.";
    let (looks, found) = (stats.looks, stats.looks_found);
    let results = [("found", found), ("absent", looks.saturating_sub(found))];
    out.counters("kv_object_store_looks", help, "result", &results)?;
    let help = "Records of the object store. Event refused: damaged, or of another key; \
                write_skipped: too many were waiting, or the store had just failed.";
    let events = [("refused", stats.records_refused), ("write_skipped", stats.writes_skipped)];
    out.counters("kv_object_store_records", help, "event", &events)
}

fn steps(out: &mut Output<'_>, stats: &EngineStats) -> fmt::Result {
    out.counter("engine_steps", "Forward passes.", stats.steps)?;
    let help = "Times that tokens were proposed to follow a sequence in a forward pass.";
    out.counter("spec_decode_num_drafts", help, stats.drafts)?;
    let help = "Tokens that were proposed.";
    out.counter("spec_decode_num_draft_tokens", help, stats.drafted_tokens)?;
    let help = "Proposed tokens that were accepted, because they were the tokens of the answer.";
    out.counter("spec_decode_num_accepted_tokens", help, stats.accepted_tokens)?;
    let help = "Tokens of a draft model. Event proposed and accepted: those of the numbers above that it \
                has guessed; computed: tokens of prompts and answers that it has computed before.";
    let events = [
        ("proposed", stats.model_drafted_tokens),
        ("accepted", stats.model_accepted_tokens),
        ("computed", stats.model_computed_tokens),
    ];
    out.counters("spec_decode_draft_model_tokens", help, "event", &events)?;
    out.counter("engine_steps_failed", "Forward passes that failed.", stats.steps_failed)?;
    out.counter("engine_restarts", "Restarts of the engine after a failure.", stats.restarts)
}

fn distributions(
    out: &mut Output<'_>,
    data: &EngineHistograms,
    max_positions: usize,
) -> fmt::Result {
    let mut seconds = |name: &str, help, data| out.histogram(name, help, data, f64::INFINITY);
    let help = "Time from the arrival of a request to its first token.";
    seconds("time_to_first_token_seconds", help, &data.time_to_first_token)?;
    let help = "Time between two tokens of a request.";
    seconds("inter_token_latency_seconds", help, &data.inter_token)?;
    let help = "Mean time between the tokens of a request.";
    seconds("request_time_per_output_token_seconds", help, &data.time_per_output_token)?;
    let help = "Time from the arrival of a request to its end.";
    seconds("e2e_request_latency_seconds", help, &data.end_to_end)?;
    let help = "Time of a request in the admission queue.";
    seconds("request_queue_time_seconds", help, &data.queue_time)?;
    let help = "Time of a request from the queue to its first token.";
    seconds("request_prefill_time_seconds", help, &data.prefill_time)?;
    let help = "Time of a request from its first token to its last.";
    seconds("request_decode_time_seconds", help, &data.decode_time)?;
    let mut tokens = |name: &str, help, data| out.histogram(name, help, data, max_positions as f64);
    tokens("request_prompt_tokens", "Tokens of a prompt.", &data.prompt_tokens)?;
    tokens("request_generation_tokens", "Tokens of an answer.", &data.generation_tokens)?;
    let help = "Positions computed in one forward pass.";
    out.histogram("iteration_tokens_total", help, &data.step_tokens, f64::INFINITY)
}
