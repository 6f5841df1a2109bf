//! `POST /v1/embeddings`: vectors of texts.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::completions::PromptInput;
use super::fields::{self, UnknownFields};
use super::options::Truncation;
use super::reply::PromptTokensDetails;

/// Maximum number of inputs of one request, as in OpenAI's API.
pub const MAX_INPUTS: usize = 2048;

/// The request body.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct EmbeddingsRequest {
    /// The inputs: 1 to 2,048, none of them empty, and 1,048,576 tokens in all. Instructions that
    /// the model expects before a question are part of the input.
    pub input: PromptInput,
    /// The model's id, or one of the names given with `--served-model-name`, which replace it.
    /// Default: the served model.
    pub model: Option<String>,
    /// Format of the vectors. Default `float`.
    pub encoding_format: Option<EncodingFormat>,
    /// Number of values of each vector: the first ones of the whole vector, normalized again.
    /// Accepted if the model or the operator declares that vectors can be shortened. Default: all.
    #[serde(default, deserialize_with = "fields::count::<_, 1, { u32::MAX as usize }>")]
    #[schemars(range(min = 1, max = u32::MAX))]
    pub dimensions: Option<usize>,
    /// Name of the model's prompt (`config_sentence_transformers.json`) that is put before each text.
    /// Default: the model's default, if it has one.
    pub prompt_name: Option<String>,
    /// The kind of the texts: `query` or `document` (`passage`), which selects the model's prompt for
    /// it, or the name of a prompt. Default: as for `prompt_name`.
    pub input_type: Option<String>,
    /// The task whose matrices or adapter compute the vectors of a model that has some, with its prompt
    /// unless `prompt_name` is given. Default: that of `input_type`, or none; some models need one.
    pub task: Option<String>,
    /// Number of tokens to keep of a longer input, from its beginning, or -1 for as many as the model
    /// reads. Default: an input that is too long is refused.
    #[serde(default, deserialize_with = "fields::truncation")]
    #[schemars(schema_with = "super::schemas::truncation")]
    pub truncate_prompt_tokens: Option<Truncation>,
    /// Only requests with the same salt share cached prefixes. Default: the cache of requests
    /// without a salt.
    pub cache_salt: Option<String>,
    /// Requests with a larger priority are admitted first or, on a server with `--admission
    /// priority`, those with a smaller one, as in vLLM. Any 32-bit integer. Default 0.
    #[serde(default, deserialize_with = "fields::signed_32")]
    pub priority: Option<i32>,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// Format of the vectors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum EncodingFormat {
    /// A list of numbers.
    #[default]
    Float,
    /// The values as 32-bit little-endian floating-point numbers, in base64 with padding.
    Base64,
}

/// The reply.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Embeddings {
    /// Always `list`.
    pub object: &'static str,
    /// One vector per input, in their order.
    pub data: Vec<Embedding>,
    /// The model's name as the client wrote it.
    pub model: String,
    /// Numbers of tokens of all inputs together.
    pub usage: EmbeddingsUsage,
}

/// The vector of one input, in vLLM's form.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct PooledVector {
    /// Index of the input.
    pub index: usize,
    /// Always `pooling`.
    pub object: &'static str,
    /// The vector.
    pub data: Vector,
}

/// The vector of one input.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Embedding {
    /// Always `embedding`.
    pub object: &'static str,
    /// Index of the input.
    pub index: usize,
    /// The vector.
    pub embedding: Vector,
}

/// A vector in one of the [formats](EncodingFormat).
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum Vector {
    /// The values.
    Float(Vec<f32>),
    /// Their bytes in base64.
    Base64(String),
}

/// Numbers of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct EmbeddingsUsage {
    /// Tokens of the inputs.
    pub prompt_tokens: usize,
    /// The same: nothing is generated.
    pub total_tokens: usize,
    /// Number of them that came from the cache; left out if the operator hides it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_tokens_details: Option<PromptTokensDetails>,
}
