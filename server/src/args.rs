//! Flags that several commands share: which model, how large an engine, how tokens are chosen.

use std::time::Duration;

use anyhow::Context;
use clap::Args;
use stolon::{
    AdmissionPolicy, Engine, EngineBuilder, EvictionPolicy, KvType, ModelSource, Request,
    SamplingParams, WeightType,
};

use crate::memory::parse_bytes;

/// The model that is used when none is named.
const DEMO: &str = "demo";

/// Which model, and how large an engine around it.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Engine")]
pub struct EngineArgs {
    /// The model: `demo`, a model directory, a .gguf file, a hub id (org/name, org/name@revision)
    /// or `random:PRESET`
    #[arg(long, default_value = DEMO, env = "STOLON_MODEL")]
    pub model: String,
    /// Memory for the KV cache: bytes, or with a suffix K, M or G (512M)
    #[arg(long, value_parser = parse_bytes, conflicts_with = "num_blocks", value_name = "BYTES")]
    pub kv_memory: Option<u64>,
    /// Size of the KV cache in blocks, instead of in bytes
    #[arg(long)]
    pub num_blocks: Option<usize>,
    /// Positions a KV block holds: a power of two from 1 to 256
    #[arg(long, default_value_t = 16)]
    pub block_size: usize,
    /// What keys and values are stored as: f32, bf16, f16 or int8; f32 for a model in f32 and bf16 for
    /// all others if not given
    #[arg(long, value_name = "TYPE")]
    pub kv_dtype: Option<KvType>,
    /// Most tokens that one forward pass computes, prompt chunks and decodes together
    #[arg(long, default_value_t = 512)]
    pub max_batched_tokens: usize,
    /// Most requests that run at the same time
    #[arg(long, default_value_t = 32)]
    pub max_running: usize,
    /// Most requests that wait; more are refused
    #[arg(long)]
    pub max_queued: Option<usize>,
    /// Most uncached prompt tokens that wait; more are refused. A few thousand keep conversations that do
    /// not fit in the KV cache together from driving each other out
    #[arg(long, value_name = "TOKENS")]
    pub max_queued_tokens: Option<usize>,
    /// Uncached prompt tokens of later requests that may be admitted before an earlier one, beside as many
    /// as waited when it came; 0 is strictly in order of arrival
    #[arg(long, value_name = "TOKENS")]
    pub max_overtake_tokens: Option<usize>,
    /// Compute every prompt from scratch
    #[arg(long)]
    pub no_prefix_caching: bool,
    /// Which cached blocks are given up first: lru, lfu, fifo, mru, filo, priority, slru or
    /// cost-aware
    #[arg(long, default_value_t)]
    pub eviction_policy: EvictionPolicy,
    /// Most KV blocks that pins may hold together; requests have so many fewer
    #[arg(long, default_value_t = 0, value_name = "BLOCKS")]
    pub pin_budget: usize,
    /// Which waiting request runs next: fcfs, longest-prefix, cost or priority
    #[arg(long, default_value_t)]
    pub admission: AdmissionPolicy,
    /// Seconds after which a forward pass counts as hung; requests then fail instead of waiting
    #[arg(long, default_value_t = 600, value_name = "SECONDS")]
    pub step_timeout: u64,
    /// Threads that compute; the machine's cores if not given
    #[arg(long)]
    pub threads: Option<usize>,
    /// What matrices are held in: `stored`, as in the file, or `q8_0`, rounded while they are loaded
    #[arg(long, default_value_t)]
    pub weights: WeightType,
}

impl EngineArgs {
    /// The engine these flags describe, with the model named, not yet loaded.
    ///
    /// # Errors
    /// When the demo model is asked for in a build without it.
    pub fn builder(&self) -> anyhow::Result<EngineBuilder> {
        let mut builder = Engine::builder()
            .block_size(self.block_size)
            .max_batched_tokens(self.max_batched_tokens)
            .max_running(self.max_running)
            .prefix_caching(!self.no_prefix_caching)
            .eviction_policy(self.eviction_policy)
            .pin_budget(self.pin_budget)
            .step_timeout(Duration::from_secs(self.step_timeout))
            .admission(self.admission)
            .weights(self.weights);
        builder = if self.model == DEMO {
            builder.model(demo_model()?)
        } else {
            builder.model(self.model.as_str())
        };
        if let Some(bytes) = self.kv_memory {
            builder = builder.kv_memory(bytes);
        }
        if let Some(count) = self.num_blocks {
            builder = builder.num_blocks(count);
        }
        if let Some(kv_type) = self.kv_dtype {
            builder = builder.kv_type(kv_type);
        }
        if let Some(count) = self.max_queued {
            builder = builder.max_queued_requests(count);
        }
        if let Some(tokens) = self.max_queued_tokens {
            builder = builder.max_queued_tokens(tokens);
        }
        if let Some(tokens) = self.max_overtake_tokens {
            builder = builder.max_overtake_tokens(tokens);
        }
        if let Some(count) = self.threads {
            builder = builder.threads(count);
        }
        Ok(builder)
    }

    /// Loads the model and starts the engine.
    ///
    /// # Errors
    /// The engine's, with the model's name.
    pub async fn start(&self) -> anyhow::Result<Engine> {
        let engine = self.builder()?.build().await;
        engine.with_context(|| format!("cannot start an engine for the model `{}`", self.model))
    }
}

#[cfg(feature = "demo-model")]
#[allow(clippy::unnecessary_wraps, reason = "without the feature this is an error")]
fn demo_model() -> anyhow::Result<ModelSource> {
    Ok(ModelSource::Demo)
}

#[cfg(not(feature = "demo-model"))]
fn demo_model() -> anyhow::Result<ModelSource> {
    anyhow::bail!("this build has no demo model (feature `demo-model`): name a model with --model")
}

/// How tokens are chosen, and when to stop.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Most tokens to generate for a prompt
    #[arg(long, default_value_t = Request::DEFAULT_MAX_TOKENS)]
    pub max_tokens: usize,
    /// 0 takes the likeliest token each time
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub temperature: Option<f32>,
    /// Choose among the K likeliest tokens
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,
    /// Choose among the likeliest tokens that together have this probability
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Choose among tokens at least this fraction as likely as the likeliest
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// Make tokens that occurred already less likely; 1 changes nothing
    #[arg(long, value_name = "FACTOR", allow_negative_numbers = true)]
    pub repetition_penalty: Option<f32>,
    /// Subtract this from the logits of tokens that were generated already
    #[arg(long, value_name = "AMOUNT", allow_negative_numbers = true)]
    pub presence_penalty: Option<f32>,
    /// Subtract this for each time a token was generated
    #[arg(long, value_name = "AMOUNT", allow_negative_numbers = true)]
    pub frequency_penalty: Option<f32>,
    /// Add BIAS to a token's logit; may be given several times
    #[arg(long, value_name = "ID=BIAS", value_parser = parse_bias)]
    pub logit_bias: Vec<(u32, f32)>,
    /// The same seed gives the same text
    #[arg(long)]
    pub seed: Option<u64>,
    /// End when this string appears; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// End when this token is generated; may be given several times
    #[arg(long, value_name = "ID")]
    pub stop_id: Vec<u32>,
    /// Go on past the model's end-of-text tokens
    #[arg(long)]
    pub ignore_eos: bool,
}

impl SamplingArgs {
    /// Puts these flags into a request; what no flag says is as in `base`.
    #[must_use]
    pub fn apply(&self, request: Request, base: &SamplingParams) -> Request {
        let mut sampling = base.clone();
        let set = |value: &mut f32, flag: Option<f32>| *value = flag.unwrap_or(*value);
        set(&mut sampling.temperature, self.temperature);
        set(&mut sampling.top_p, self.top_p);
        set(&mut sampling.min_p, self.min_p);
        set(&mut sampling.repetition_penalty, self.repetition_penalty);
        set(&mut sampling.presence_penalty, self.presence_penalty);
        set(&mut sampling.frequency_penalty, self.frequency_penalty);
        sampling.top_k = self.top_k.or(sampling.top_k);
        sampling.logit_bias.extend(&self.logit_bias);
        sampling.seed = self.seed.or(sampling.seed);
        request
            .max_tokens(self.max_tokens)
            .sampling(sampling)
            .stop(self.stop.iter().cloned())
            .stop_ids(self.stop_id.iter().copied())
            .ignore_eos(self.ignore_eos)
    }
}

fn parse_bias(text: &str) -> Result<(u32, f32), String> {
    let pair = text
        .split_once('=')
        .and_then(|(id, bias)| Some((id.trim().parse().ok()?, bias.trim().parse::<f32>().ok()?)));
    pair.ok_or_else(|| format!("expected TOKEN_ID=BIAS, for example 42=-1.5, got `{text}`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a bias is an id and a number, and anything else is refused with what was expected.
    #[test]
    fn biases_parse() {
        assert_eq!(parse_bias("42=-1.5"), Ok((42, -1.5)));
        for bad in ["42", "x=1", "42=", "-1=2"] {
            let message = parse_bias(bad).expect_err("no bias");
            assert!(message.contains("expected") && message.contains(bad), "{message}");
        }
    }
}
