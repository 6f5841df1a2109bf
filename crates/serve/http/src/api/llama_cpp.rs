//! `POST /completion`, `POST /infill`, `POST /apply-template` and `GET /props`, as in llama.cpp's
//! server. Editors use them: llama.vim, llama.vscode, Continue and others.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::completions::PromptInput;
use super::error::ErrorReply;
use super::fields::{self, UnknownFields};
use super::options::GenerationOptions;

/// Maximum number of entries of `input_extra` and of `response_fields`.
pub const MAX_EXTRA: usize = 1024;

/// The body of `POST /completion`: a text to continue.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct LlamaCompletionRequest {
    /// One prompt, as text or as token ids.
    pub prompt: PromptInput,
    /// llama.cpp's name of `guided_json`: a JSON schema that the text has to match.
    pub json_schema: Option<Value>,
    /// Parameters of llama.cpp's own.
    #[serde(flatten)]
    pub own: LlamaOptions,
    /// Parameters of all APIs for generation.
    #[serde(flatten)]
    pub options: GenerationOptions,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The body of `POST /infill`: a gap in a text.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct InfillRequest {
    /// The text before the gap. Default: none.
    pub input_prefix: Option<String>,
    /// The text after the gap. Default: none.
    pub input_suffix: Option<String>,
    /// Other texts that the model sees before this one, at most [`MAX_EXTRA`], the most important
    /// one last. Those that do not fit the context are left out, from the first one on.
    #[serde(default, deserialize_with = "fields::optional_list::<_, _, MAX_EXTRA>")]
    #[schemars(length(max = MAX_EXTRA))]
    pub input_extra: Option<Vec<InfillExtra>>,
    /// What follows `input_prefix` directly: the beginning of the line with the cursor.
    pub prompt: Option<String>,
    /// Parameters of llama.cpp's own.
    #[serde(flatten)]
    pub own: LlamaOptions,
    /// Parameters of all APIs for generation.
    #[serde(flatten)]
    pub options: GenerationOptions,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// Parameters for generation that only llama.cpp has, or that have another name there.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct LlamaOptions {
    /// Maximum number of tokens to generate. 0 only computes the prompt, so that later requests
    /// find it in the cache. Default, and -1: as many as the context allows.
    #[serde(default, deserialize_with = "fields::count_or_unlimited")]
    #[schemars(range(min = -1, max = u32::MAX))]
    pub n_predict: Option<usize>,
    /// llama.cpp's name of `repetition_penalty`.
    #[serde(default, deserialize_with = "fields::number")]
    pub repeat_penalty: Option<f32>,
    /// The members that a whole reply has, such as `content` or `timings/prompt_n`, at most
    /// [`MAX_EXTRA`]. Default: all.
    #[serde(default, deserialize_with = "fields::optional_list::<_, _, MAX_EXTRA>")]
    #[schemars(length(max = MAX_EXTRA))]
    pub response_fields: Option<Vec<String>>,
}

/// A text next to the one with the gap.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object with `filename` and `text`")]
pub struct InfillExtra {
    /// The name of its file, which the model sees. Default `tmp`.
    pub filename: Option<String>,
    /// The text.
    pub text: String,
}

/// The reply to `POST /completion` and `POST /infill`, whole or one piece of a streamed one.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct LlamaReply {
    /// Always 0.
    pub index: usize,
    /// The text, or the piece of it.
    pub content: String,
    /// Whether this is the whole reply, or the last piece.
    pub stop: bool,
    /// The members of a whole reply and of the last piece.
    #[serde(flatten)]
    pub end: Option<LlamaReplyEnd>,
}

/// How a text ended, and what it took.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct LlamaReplyEnd {
    /// The model's name as the request gave it, or its id.
    pub model: String,
    /// Number of generated tokens.
    pub tokens_predicted: usize,
    /// Number of tokens of the prompt.
    pub tokens_evaluated: usize,
    /// Number of tokens of prompt and answer together, as llama.cpp counts.
    pub tokens_cached: usize,
    /// Always false: no prompt is cut.
    pub truncated: bool,
    /// Why the text ended.
    pub stop_type: StopType,
    /// The stop string that ended it; empty if none did.
    pub stopping_word: String,
    /// The times of its phases.
    pub timings: LlamaTimings,
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum StopType {
    /// The model ended it.
    Eos,
    /// The maximum number of tokens was reached.
    Limit,
    /// A stop string appeared.
    Word,
}

/// Numbers of tokens and times of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct LlamaTimings {
    /// Prompt tokens that were read from the prefix cache; 0 if the server hides it.
    pub cache_n: usize,
    /// Prompt tokens that were computed.
    pub prompt_n: usize,
    /// The time from the end of the wait in the queue to the first token, in milliseconds.
    pub prompt_ms: f64,
    /// The same per computed token of the prompt.
    pub prompt_per_token_ms: f64,
    /// Computed tokens of the prompt per second.
    pub prompt_per_second: f64,
    /// Generated tokens.
    pub predicted_n: usize,
    /// The time after the first token, in milliseconds.
    pub predicted_ms: f64,
    /// The same per generated token.
    pub predicted_per_token_ms: f64,
    /// Generated tokens per second.
    pub predicted_per_second: f64,
}

/// The data of an event of a streamed reply.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum LlamaEvent {
    /// A piece.
    Piece(LlamaReply),
    /// The error that ends the reply early.
    Failed(ErrorReply),
}

/// The reply to `POST /apply-template`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct AppliedTemplate {
    /// The text of the prompt.
    pub prompt: String,
}

/// The reply to `GET /props`.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Props {
    /// The settings of requests that set none.
    pub default_generation_settings: DefaultSettings,
    /// The model's name for clients.
    pub model_alias: String,
    /// The model's id.
    pub model_path: String,
    /// The kinds of content that prompts may have besides text.
    pub modalities: Modalities,
    /// What guesses tokens of answers in addition to earlier texts: `draft_model`, `eagle3` (an
    /// EAGLE-3 head), `gemma4_assistant`, `mtp` (the model's own head), `none`, or `unused_mtp` if the
    /// model has a head that is not used. Not in llama.cpp.
    pub drafting: &'static str,
    /// The chat template, in Jinja; empty if the model has none.
    pub chat_template: String,
    /// The text of the token that begins a text; empty if the model has none.
    pub bos_token: String,
    /// The text of the token that ends an answer; empty if the model has none.
    pub eos_token: String,
    /// Name and version of the server.
    pub build_info: String,
    /// Always false.
    pub is_sleeping: bool,
}

/// The settings of requests that set none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct DefaultSettings {
    /// Context length in tokens: prompt and generated tokens together.
    pub n_ctx: usize,
}

/// The kinds of content that prompts may have besides text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Modalities {
    /// Whether the model takes images.
    pub vision: bool,
    /// Always false.
    pub audio: bool,
}
