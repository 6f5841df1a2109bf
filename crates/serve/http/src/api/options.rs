//! Parameters that the APIs for generation have in common.
//!
//! A parameter of the engine is defined once here and applied once, in `src/options.rs`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::fields::{self, UnknownFields};
use super::sessions::SessionParams;
use super::structured::{ResponseFormat, StructuredOutputs};

/// Maximum number of answers of one call: prompts times `n`, or prompts times `best_of`.
pub const MAX_CHOICES: usize = 128;

/// Largest accepted `logprobs` and `top_logprobs`: most likely tokens reported per position.
pub const MAX_LOGPROBS: usize = 20;

/// Maximum number of stop strings of one request.
pub const MAX_STOP_STRINGS: usize = 16;

/// Maximum number of entries of `logprob_token_ids`.
pub const MAX_LOGPROB_IDS: usize = 128;

/// Maximum number of entries of `stop_token_ids`, `allowed_token_ids` and `logit_bias`.
pub const MAX_TOKEN_IDS: usize = 4096;

/// Sampling parameters, stop conditions and delivery of the reply. Every field is optional.
///
/// Sampling parameters that are left out take the values that the model's authors recommend
/// (`generation_config.json`). Without a recommendation, conversations are sampled with temperature
/// 0.8, top-k 40, top-p 0.95 and min-p 0.05, and completions are greedy.
#[derive(Debug, Default, Deserialize, JsonSchema)]
pub struct GenerationOptions {
    /// The model's id, one of the names given with `--served-model-name`, which replace it, or the
    /// name of an adapter. A server with one name and no adapters accepts every name and tells its
    /// own in the header `x-stolon-model`. Default: the served model.
    pub model: Option<String>,
    /// Whether to send the reply in pieces, as server-sent events. Default false.
    pub stream: Option<bool>,

    /// Softmax temperature, 0 or above; 0 is greedy decoding.
    #[serde(default, deserialize_with = "fields::number")]
    pub temperature: Option<f32>,
    /// Nucleus sampling: keep the most likely tokens whose probabilities add up to this; 0 to 1.
    /// 1 keeps all, and 0 the most likely token alone.
    #[serde(default, deserialize_with = "fields::number")]
    pub top_p: Option<f32>,
    /// Keep this many of the most likely tokens; 0 and -1 keep all.
    #[serde(default, deserialize_with = "fields::top_k")]
    #[schemars(range(min = -1, max = u32::MAX))]
    pub top_k: Option<usize>,
    /// Keep the tokens whose probability is at least this fraction of the most likely token's;
    /// 0 to 1. 0 keeps all.
    #[serde(default, deserialize_with = "fields::number")]
    pub min_p: Option<f32>,
    /// Divides positive logits, and multiplies negative ones, of tokens that occur in the prompt
    /// or the answer; above 0. 1 is off.
    #[serde(default, deserialize_with = "fields::number")]
    pub repetition_penalty: Option<f32>,
    /// Subtracted from the logit of each token that the answer contains; -2 to 2. 0 is off.
    #[serde(default, deserialize_with = "fields::number")]
    pub presence_penalty: Option<f32>,
    /// Subtracted from a token's logit for each time that the answer contains it; -2 to 2. 0 is
    /// off.
    #[serde(default, deserialize_with = "fields::number")]
    pub frequency_penalty: Option<f32>,
    /// Pairs of token id and a number from -100 to 100 that is added to the token's logit. In JSON
    /// an object whose keys are the ids.
    #[serde(default, deserialize_with = "fields::logit_bias")]
    #[schemars(schema_with = "super::schemas::logit_bias")]
    pub logit_bias: Option<Vec<(u32, f32)>>,
    /// Seed of the random draws: the same request with the same seed gives the same answer. Of
    /// several choices, each uses the seed after its predecessor's. Default: a fresh one.
    #[serde(default, deserialize_with = "fields::seed")]
    #[schemars(schema_with = "super::schemas::seed")]
    pub seed: Option<u64>,

    /// Strings that end the answer when they appear in it; they are not part of the answer.
    pub stop: Option<StopStrings>,
    /// Token ids that end the answer, in addition to the model's end-of-sequence tokens.
    #[serde(default, deserialize_with = "fields::token_ids")]
    #[schemars(length(max = MAX_TOKEN_IDS))]
    pub stop_token_ids: Option<Vec<u32>>,
    /// The only token ids that may be generated. Default: all.
    #[serde(default, deserialize_with = "fields::token_ids")]
    #[schemars(length(min = 1, max = MAX_TOKEN_IDS))]
    pub allowed_token_ids: Option<Vec<u32>>,
    /// Whether to generate past the model's end-of-sequence tokens. Default false.
    pub ignore_eos: Option<bool>,
    /// Whether to end an answer that repeats itself without end: the same sequence of at most 256
    /// tokens, five times or more, over more than 256 tokens. Its `finish_reason` is `stop`, and its
    /// `stop_reason` is `repetition`. Default true for conversations without `ignore_eos`, and
    /// false for completions.
    pub end_repetition: Option<bool>,
    /// Minimum number of tokens of the answer: before that, no end-of-sequence token, stop token, stop
    /// string or repetition ends it. Default 0.
    #[serde(default, deserialize_with = "fields::count::<_, 0, { u32::MAX as usize }>")]
    #[schemars(range(min = 0, max = u32::MAX as usize))]
    pub min_tokens: Option<usize>,

    /// Maximum number of tokens of the reasoning in a conversation, after which the model has to
    /// answer; 0 or above, or -1 for no limit. The tokens count toward the limit of the answer.
    /// Default: no limit.
    #[serde(default, deserialize_with = "fields::count_or_unlimited")]
    #[schemars(range(min = -1, max = u32::MAX))]
    pub thinking_token_budget: Option<usize>,

    /// Required format of the answer, in OpenAI's form. At most one of this and the following
    /// parameters may be given.
    pub response_format: Option<ResponseFormat>,
    /// Required format of the answer, in vLLM's form.
    pub structured_outputs: Option<StructuredOutputs>,
    /// vLLM's older form of `structured_outputs.json`; llama.cpp's `json_schema`.
    #[serde(alias = "json_schema")]
    pub guided_json: Option<Value>,
    /// vLLM's older form of `structured_outputs.regex`; SGLang's `regex`.
    #[serde(alias = "regex")]
    pub guided_regex: Option<String>,
    /// vLLM's older form of `structured_outputs.choice`.
    pub guided_choice: Option<Vec<String>>,
    /// vLLM's older form of `structured_outputs.grammar`; llama.cpp's `grammar`, SGLang's `ebnf`.
    #[serde(alias = "grammar", alias = "ebnf")]
    pub guided_grammar: Option<String>,

    /// Only requests with the same salt share cached prefixes. This prevents tenants from finding
    /// out by timing which prompts others have sent. Default: the cache of requests without a salt.
    pub cache_salt: Option<String>,
    /// Whether to compute the whole prompt, including tokens that are cached. Default false.
    pub skip_reading_prefix_cache: Option<bool>,
    /// Whether to add no part of the prompt and the answer to the cache, the disk or the object
    /// store. Tokens that are cached already are used, and stay cached. Default false. Not with
    /// `session_id`.
    pub skip_writing_prefix_cache: Option<bool>,
    /// The session of which the request is a turn: the cached KV of its prompt and answer is not
    /// evicted until the next turn. The request has one prompt and one answer, and the `cache_salt`
    /// of the session. See `/v1/sessions`.
    pub session_id: Option<String>,
    /// SGLang's form of `session_id`.
    pub session_params: Option<SessionParams>,
    /// Requests with a larger priority are admitted first or, on a server with `--admission
    /// priority`, those with a smaller one, as in vLLM. Any 32-bit integer. Default 0.
    #[serde(default, deserialize_with = "fields::signed_32")]
    pub priority: Option<i32>,
    /// OpenAI's name of a group of requests with a common prefix. Their prompts are marked for five
    /// minutes after their last use, as with `prompt_cache_retention`. One server has one cache, so
    /// the name itself has no effect.
    pub prompt_cache_key: Option<Value>,
    /// How long the prompt is marked after its last use: `24h`, or five minutes with `in_memory`. What
    /// is marked is evicted after everything else, within the server's budget. Default: not at all.
    pub prompt_cache_retention: Option<Value>,
    /// NVIDIA Dynamo's extensions: `agent_hints.priority` is the `priority`, where larger ones come
    /// first, of a request that gives none, and `cache_control` marks the prompt as in Anthropic's
    /// API. Other members have no effect.
    pub nvext: Option<Value>,
}

/// Parameters of the APIs whose replies are lists of choices: completions and chat completions.
#[derive(Debug, Default, Deserialize, JsonSchema)]
pub struct ChoiceOptions {
    /// Number of choices to generate for each prompt, 1 to 128. Default 1.
    #[serde(default, deserialize_with = "fields::count::<_, 1, MAX_CHOICES>")]
    #[schemars(range(min = 1, max = MAX_CHOICES))]
    pub n: Option<usize>,
    /// Settings of a streamed reply. Without effect on a whole one.
    pub stream_options: Option<StreamOptions>,
    /// Whether to report the token ids of the prompts and of the answers. Default false.
    pub return_token_ids: Option<bool>,
    /// Whether log-probabilities name tokens as `token_id:7` instead of by their texts, which may
    /// be equal or parts of a character. Default false.
    pub return_tokens_as_token_ids: Option<bool>,
    /// Token ids whose log-probabilities are reported instead of those of the most likely tokens.
    /// Allowed only with `logprobs`.
    #[serde(default, deserialize_with = "fields::optional_list::<_, _, MAX_LOGPROB_IDS>")]
    #[schemars(length(max = MAX_LOGPROB_IDS))]
    pub logprob_token_ids: Option<Vec<u32>>,
    /// Number of most likely tokens to report for each token of the prompt, 0 to 20, with their
    /// log-probabilities and that of the token itself. Not possible with `stream`. Default: none.
    #[serde(default, deserialize_with = "fields::count::<_, 0, MAX_LOGPROBS>")]
    #[schemars(range(min = 0, max = MAX_LOGPROBS))]
    pub prompt_logprobs: Option<usize>,
    /// Number of tokens to keep of a longer prompt, 1 or above, or -1 for as many as the context
    /// has room for next to `max_tokens`. Default: the prompt is not cut.
    #[serde(default, deserialize_with = "fields::truncation")]
    #[schemars(schema_with = "super::schemas::truncation")]
    pub truncate_prompt_tokens: Option<Truncation>,
    /// Which end of a prompt is removed: `left`, the default, or `right`. Only with
    /// `truncate_prompt_tokens`.
    pub truncation_side: Option<TruncationSide>,
}

/// How much of a prompt is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Truncation {
    /// This number of tokens.
    Tokens(usize),
    /// As much as the context has room for.
    Context,
}

/// An end of a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TruncationSide {
    /// The beginning.
    #[default]
    Left,
    /// The end.
    Right,
}

/// One stop string or several.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected a string or a list of strings")]
pub enum StopStrings {
    /// One string.
    One(String),
    /// At most [`MAX_STOP_STRINGS`] strings.
    Many(Vec<String>),
}

impl StopStrings {
    /// The strings.
    #[must_use]
    pub fn as_slice(&self) -> &[String] {
        match self {
            Self::One(one) => std::slice::from_ref(one),
            Self::Many(many) => many,
        }
    }

    /// The strings that are not empty. An empty string never ends an answer.
    pub fn given(&self) -> impl Iterator<Item = &String> {
        self.as_slice().iter().filter(|text| !text.is_empty())
    }
}

/// Settings of a streamed reply.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct StreamOptions {
    /// Whether the last event before `[DONE]` reports the usage. Default false.
    pub include_usage: Option<bool>,
    /// Whether, with `include_usage`, each piece reports the usage of its choice so far. Default
    /// false.
    pub continuous_usage_stats: Option<bool>,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}
