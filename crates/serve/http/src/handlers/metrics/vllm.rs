//! The metrics that routers read, under vLLM's names.
//!
//! The endpoint picker of llm-d and of the Gateway API Inference Extension reads
//! `num_requests_waiting`, `num_requests_running`, `kv_cache_usage_perc`, `lora_requests_info`
//! (the labels `max_lora`, `running_lora_adapters` and `waiting_lora_adapters`) and
//! `cache_config_info` (`block_size` and `num_gpu_blocks`). The router of the vLLM production stack
//! reads the first two, `gpu_cache_usage_perc`, and `gpu_prefix_cache_hit_rate`, `_hits_total` and
//! `_queries_total`. The counters of speculative decoding have vLLM's names for dashboards.
//! Everything else is exported with Stolon's own prefix only.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use stolon::{AdapterInfo, EngineStats, ModelInfo};

use super::{Output, cache_config, kv_usage};

/// The prefix of vLLM's names.
pub(super) const PREFIX: &str = "vllm:";

pub(super) fn encode(
    out: &mut Output<'_>,
    stats: &EngineStats,
    info: &ModelInfo,
    adapters: &[AdapterInfo],
) -> fmt::Result {
    let (running, waiting) = (stats.running as u64, stats.waiting as u64);
    out.gauge("num_requests_running", "As stolon:num_requests_running.", running)?;
    out.gauge("num_requests_waiting", "As stolon:num_requests_waiting.", waiting)?;
    let help = "As stolon:kv_cache_usage_perc.";
    out.gauge_f64("kv_cache_usage_perc", help, kv_usage(stats))?;
    out.gauge_f64("gpu_cache_usage_perc", help, kv_usage(stats))?;
    let help = "As stolon:prefix_cache_queries.";
    out.counter("gpu_prefix_cache_queries", help, stats.prompt_tokens)?;
    let help = "As stolon:prefix_cache_hits.";
    out.counter("gpu_prefix_cache_hits", help, stats.cached_tokens)?;
    let help = "Share of the prompt tokens that were found in the prefix cache, 0 to 1.";
    out.gauge_f64("gpu_prefix_cache_hit_rate", help, stats.token_hit_rate())?;
    let help = "As stolon:spec_decode_num_drafts.";
    out.counter("spec_decode_num_drafts", help, stats.drafts)?;
    let help = "As stolon:spec_decode_num_draft_tokens.";
    out.counter("spec_decode_num_draft_tokens", help, stats.drafted_tokens)?;
    let help = "As stolon:spec_decode_num_accepted_tokens.";
    out.counter("spec_decode_num_accepted_tokens", help, stats.accepted_tokens)?;
    let labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"];
    let [most, running, waiting] = labels;
    let in_use: Vec<&str> = adapters.iter().filter(|a| a.in_use).map(|a| a.name.as_str()).collect();
    // Any number of adapters can be in a batch. The label says how many are loaded.
    let loaded = adapters.len().to_string();
    let labels = [(most, loaded), (running, in_use.join(",")), (waiting, String::new())];
    let help = "LoRA adapters that requests use; its value is the time in seconds since 1970.";
    out.info("lora_requests_info", help, &labels, now())?;
    cache_config(out, info)
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
