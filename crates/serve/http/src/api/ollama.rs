//! Ollama's API: `/api/chat`, `/api/generate`, `/api/embed` and the routes that describe models.
//!
//! `keep_alive` is advice: the model stays in memory. So are options that choose how a model is
//! loaded, such as `num_ctx`.

mod reply;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;

use super::chat::{MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, Tool};
use super::fields::{self, UnknownFields};
use super::options::StopStrings;
pub use reply::{
    ChatReply, Details, Embedded, Embeddings, GenerateReply, ModelEntry, OllamaError, OllamaEvent,
    ReplyCall, ReplyEnd, ReplyFunction, ReplyMessage, Running, RunningEntry, Shown, Status, Tags,
    Version,
};

/// The body of `POST /api/chat`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct OllamaChat {
    /// The model's name, with or without the tag `latest`. Default: the served model.
    pub model: Option<String>,
    /// The conversation, oldest message first; at most [`MAX_MESSAGES`] messages. Without messages,
    /// nothing is generated: other servers load the model.
    #[serde(default, deserialize_with = "fields::optional_list::<_, _, MAX_MESSAGES>")]
    #[schemars(length(max = MAX_MESSAGES))]
    pub messages: Option<Vec<OllamaMessage>>,
    /// Functions that the model may call, at most [`MAX_TOOLS`].
    #[serde(default, deserialize_with = "fields::optional_list::<_, _, MAX_TOOLS>")]
    #[schemars(length(max = MAX_TOOLS))]
    pub tools: Option<Vec<Tool>>,
    /// How to reply.
    #[serde(flatten)]
    pub common: OllamaCommon,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The members that `/api/chat` and `/api/generate` share.
#[derive(Debug, Default, Deserialize, JsonSchema)]
pub struct OllamaCommon {
    /// Whether to send the reply in pieces, each a line of JSON. Default true.
    pub stream: Option<bool>,
    /// Whether the model reasons before it answers, or how much: `low`, `medium` or `high`.
    /// Default: as its chat template has it.
    pub think: Option<Think>,
    /// Required format of the answer: `json` or a JSON schema. Default, and the empty text: none.
    pub format: Option<Value>,
    /// Parameters of sampling.
    pub options: Option<OllamaOptions>,
}

/// Whether and how much the model reasons.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected true, false, or the effort as a string")]
pub enum Think {
    /// Whether it reasons.
    Switch(bool),
    /// The effort.
    Effort(String),
}

/// One message of a conversation.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object with `role` and `content`")]
pub struct OllamaMessage {
    /// Who wrote the message: `system`, `user`, `assistant` or `tool`.
    pub role: super::chat::Role,
    /// The text.
    pub content: Option<String>,
    /// The assistant's reasoning before this message.
    pub thinking: Option<String>,
    /// Images in base64, for models that take images; at most [`MAX_PARTS`].
    #[serde(default, deserialize_with = "fields::optional_list::<_, _, MAX_PARTS>")]
    #[schemars(length(max = MAX_PARTS))]
    pub images: Option<Vec<String>>,
    /// The functions that the assistant called in this message, at most [`MAX_PARTS`].
    #[serde(default, deserialize_with = "fields::optional_list::<_, _, MAX_PARTS>")]
    #[schemars(length(max = MAX_PARTS))]
    pub tool_calls: Option<Vec<OllamaCall>>,
    /// The function whose result this message is. `name` means the same.
    #[serde(alias = "name")]
    pub tool_name: Option<String>,
    /// The call whose result this message is. Default: the oldest call of that function, or of any
    /// one, that has no result yet.
    pub tool_call_id: Option<String>,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// A call in a message of the assistant.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object with `function`")]
pub struct OllamaCall {
    /// Its id, if the client keeps it.
    pub id: Option<String>,
    /// The called function.
    pub function: OllamaFunction,
}

/// A function with its arguments.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object with `name` and `arguments`")]
pub struct OllamaFunction {
    /// Its name.
    pub name: String,
    /// The arguments: an object. Default: none.
    pub arguments: Option<Value>,
}

/// Parameters of sampling. Those that are left out have the values that the model's authors
/// recommend.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct OllamaOptions {
    /// Maximum number of tokens of the answer. Default, and below 0: as many as the context allows.
    #[serde(default, deserialize_with = "fields::number")]
    pub num_predict: Option<f32>,
    /// Softmax temperature, 0 or above; 0 is greedy decoding.
    #[serde(default, deserialize_with = "fields::number")]
    pub temperature: Option<f32>,
    /// Nucleus sampling, 0 to 1.
    #[serde(default, deserialize_with = "fields::number")]
    pub top_p: Option<f32>,
    /// Keep this many of the most likely tokens; 0 and -1 keep all.
    #[serde(default, deserialize_with = "fields::top_k")]
    #[schemars(range(min = -1, max = u32::MAX))]
    pub top_k: Option<usize>,
    /// Keep the tokens whose probability is at least this fraction of the most likely token's.
    #[serde(default, deserialize_with = "fields::number")]
    pub min_p: Option<f32>,
    /// Divides positive logits, and multiplies negative ones, of tokens that occur in the prompt or
    /// the answer; above 0.
    #[serde(default, deserialize_with = "fields::number")]
    pub repeat_penalty: Option<f32>,
    /// Subtracted from the logit of each token that the answer contains; -2 to 2.
    #[serde(default, deserialize_with = "fields::number")]
    pub presence_penalty: Option<f32>,
    /// Subtracted from a token's logit for each time that the answer contains it; -2 to 2.
    #[serde(default, deserialize_with = "fields::number")]
    pub frequency_penalty: Option<f32>,
    /// Seed of the random draws. Default, and -1: a fresh one.
    #[serde(default, deserialize_with = "fields::seed")]
    #[schemars(schema_with = "super::schemas::seed")]
    pub seed: Option<u64>,
    /// Strings that end the answer when they appear in it.
    pub stop: Option<StopStrings>,
    /// Every other member: options that have no effect here.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The body of `POST /api/generate`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct OllamaGenerate {
    /// The model's name, with or without the tag `latest`. Default: the served model.
    pub model: Option<String>,
    /// The question, or the text before a gap. Without one, nothing is generated.
    pub prompt: Option<String>,
    /// The text after the gap that the model fills, for models that were trained for it.
    pub suffix: Option<String>,
    /// Instructions that precede the question.
    pub system: Option<String>,
    /// Whether the prompt is continued as it is, without the chat template. Default false.
    pub raw: Option<bool>,
    /// Images in base64, for models that take images; at most [`MAX_PARTS`].
    #[serde(default, deserialize_with = "fields::optional_list::<_, _, MAX_PARTS>")]
    #[schemars(length(max = MAX_PARTS))]
    pub images: Option<Vec<String>>,
    /// How to reply.
    #[serde(flatten)]
    pub common: OllamaCommon,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The body of `POST /api/embed`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct OllamaEmbed {
    /// The model's name, with or without the tag `latest`. Default: the served model.
    pub model: Option<String>,
    /// One text or a list of them, as for `/v1/embeddings`.
    pub input: super::completions::PromptInput,
    /// Whether a text that is too long is cut at its end. Default true.
    pub truncate: Option<bool>,
    /// Number of values of each vector. Default: all.
    #[serde(default, deserialize_with = "fields::count::<_, 1, { u32::MAX as usize }>")]
    #[schemars(range(min = 1, max = u32::MAX))]
    pub dimensions: Option<usize>,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The body of `POST /api/embeddings`, an older form of `/api/embed`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct OllamaEmbeddings {
    /// The model's name, with or without the tag `latest`. Default: the served model.
    pub model: Option<String>,
    /// The text.
    pub prompt: String,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The body of `POST /api/show` and `POST /api/pull`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object with `model`")]
pub struct OllamaModel {
    /// The model's name, with or without the tag `latest`. `name` means the same.
    #[serde(alias = "name")]
    pub model: String,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}
