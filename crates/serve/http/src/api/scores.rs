//! `POST /v1/rerank`, `/score` and `/classify`: scores of pairs of texts, and labels of texts.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::chat::{MAX_MESSAGES, Message};
use super::completions::PromptInput;
use super::embeddings::EmbeddingsUsage;
use super::fields::{self, UnknownFields};
use super::options::Truncation;

/// Maximum number of labels of a request.
pub const MAX_LABELS: usize = 128;

/// Maximum size of a label in bytes.
pub const MAX_LABEL_BYTES: usize = 256;

/// The members that the requests for scores and labels share.
#[derive(Debug, Default, Deserialize, JsonSchema)]
pub struct ScoringOptions {
    /// The model's id, or one of the names given with `--served-model-name`, which replace it.
    /// Default: the served model.
    pub model: Option<String>,
    /// Maximum number of tokens of a text, or of a pair of texts, or -1 for as many as the model
    /// reads. Default: one that is too long is refused; of documents to rank, -1.
    #[serde(default, deserialize_with = "fields::truncation")]
    #[schemars(schema_with = "super::schemas::truncation")]
    pub truncate_prompt_tokens: Option<Truncation>,
    /// Requests with a larger priority are admitted first or, on a server with `--admission
    /// priority`, those with a smaller one, as in vLLM. Any 32-bit integer. Default 0.
    #[serde(default, deserialize_with = "fields::signed_32")]
    pub priority: Option<i32>,
}

/// The body of a request to rank documents, as in Jina's and Cohere's APIs.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct RerankRequest {
    /// The query.
    pub query: String,
    /// The documents: 1 to 2,048, and 1,048,576 tokens in all, each with the query. They are cut to
    /// what the model reads.
    pub documents: Vec<Document>,
    /// Maximum number of results. Default: one for each document.
    #[serde(default, deserialize_with = "fields::count::<_, 1, { u32::MAX as usize }>")]
    #[schemars(range(min = 1, max = u32::MAX))]
    pub top_n: Option<usize>,
    /// Whether the results have the documents. Default: true.
    pub return_documents: Option<bool>,
    /// The task by which the model judges, instead of the one in its template. For language models
    /// that answer yes or no, such as Qwen3-Reranker; other models refuse it.
    pub instruction: Option<String>,
    /// How the texts are read.
    #[serde(flatten)]
    pub options: ScoringOptions,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// A document: a text, or an object with one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected a string or an object with `text`")]
pub enum Document {
    /// The text.
    Text(String),
    /// An object with the text.
    Object {
        /// The text.
        text: String,
    },
}

impl Document {
    /// The text.
    #[must_use]
    pub fn into_text(self) -> String {
        match self {
            Self::Text(text) | Self::Object { text } => text,
        }
    }
}

/// The reply to a request to rank documents.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Reranked {
    /// The reply's id.
    pub id: String,
    /// The model's name as the client wrote it.
    pub model: String,
    /// Numbers of tokens of all pairs together.
    pub usage: EmbeddingsUsage,
    /// The documents with their scores, the best one first.
    pub results: Vec<RerankResult>,
}

/// A document and its score.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct RerankResult {
    /// Index of the document in the request.
    pub index: usize,
    /// The document, if it was requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub document: Option<DocumentText>,
    /// How well the document answers the query; more is better.
    pub relevance_score: f32,
}

/// A document in a reply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct DocumentText {
    /// The text.
    pub text: String,
}

/// One text or several.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected a string or a list of strings")]
pub enum Texts {
    /// One text.
    One(String),
    /// Several texts.
    Several(Vec<String>),
}

impl Texts {
    /// The texts in the order in which they were given.
    #[must_use]
    pub fn into_list(self) -> Vec<String> {
        match self {
            Self::One(text) => vec![text],
            Self::Several(texts) => texts,
        }
    }
}

/// The body of a request to score pairs of texts, as in vLLM's API.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct ScoreRequest {
    /// The first text of each pair: one for all, or as many as there are second texts.
    pub text_1: Texts,
    /// The second text of each pair: 1 to 2,048, and 1,048,576 tokens in all pairs.
    pub text_2: Texts,
    /// The task by which the model judges, instead of the one in its template. For language models
    /// that answer yes or no, such as Qwen3-Reranker; other models refuse it.
    pub instruction: Option<String>,
    /// How the texts are read.
    #[serde(flatten)]
    pub options: ScoringOptions,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The body of a request to classify texts, as in vLLM's API. It has either `input` or `messages`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct ClassifyRequest {
    /// The texts: 1 to 2,048, and 1,048,576 tokens in all. With `labels`, they are prompts.
    pub input: Option<Texts>,
    /// A conversation whose next message is judged: 1 to [`MAX_MESSAGES`] messages, which are rendered
    /// with the model's chat template. Allowed only with `labels`.
    #[serde(default, deserialize_with = "fields::optional_list::<_, _, MAX_MESSAGES>")]
    #[schemars(length(min = 1, max = MAX_MESSAGES))]
    pub messages: Option<Vec<Message>>,
    /// For a language model, such as a guard model or a judge: the answers to compare, 2 to
    /// [`MAX_LABELS`], each of 1 to [`MAX_LABEL_BYTES`] bytes. The probability of a label is that of
    /// its tokens after the prompt, divided by the sum of all labels'. A model for classification has
    /// its own labels.
    #[serde(default, deserialize_with = "fields::optional_list::<_, _, MAX_LABELS>")]
    #[schemars(length(min = 2, max = MAX_LABELS))]
    pub labels: Option<Vec<String>>,
    /// Variables of the chat template. Allowed only with `messages`.
    pub chat_template_kwargs: Option<serde_json::Map<String, serde_json::Value>>,
    /// How the texts are read.
    #[serde(flatten)]
    pub options: ScoringOptions,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The body of a request to score items by the next token of a language model, as in vLLM's API.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct GenerativeScoringRequest {
    /// The beginning of every prompt: a text, or the token ids of one prompt.
    pub query: PromptInput,
    /// What follows it: 1 to 2,048 texts or lists of token ids, and 1,048,576 tokens in all prompts.
    pub items: PromptInput,
    /// The tokens to compare, 1 to [`MAX_LABELS`]. The score of an item is the probability of the first
    /// one.
    #[serde(deserialize_with = "fields::list::<_, _, MAX_LABELS>")]
    #[schemars(length(min = 1, max = MAX_LABELS))]
    pub label_token_ids: Vec<u32>,
    /// Whether probabilities are divided by the sum of those of all `label_token_ids`. Default: true.
    pub apply_softmax: Option<bool>,
    /// Whether items come before the query. Default: false.
    pub item_first: Option<bool>,
    /// Whether a query that is a text has the special tokens of the beginning. Default: true.
    pub add_special_tokens: Option<bool>,
    /// Only requests with the same salt share cached prefixes. Default: the cache of requests
    /// without a salt.
    pub cache_salt: Option<String>,
    /// How the texts are read.
    #[serde(flatten)]
    pub options: ScoringOptions,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The reply to a request for scores, labels, or vectors in vLLM's form.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct ScoreList<T> {
    /// The reply's id.
    pub id: String,
    /// Always `list`.
    pub object: &'static str,
    /// When the reply was made, in seconds since 1970-01-01 UTC.
    pub created: u64,
    /// The model's name as the client wrote it.
    pub model: String,
    /// The results, in the order of the texts.
    pub data: Vec<T>,
    /// Numbers of tokens of all texts together.
    pub usage: EmbeddingsUsage,
}

/// The score of a pair, or of an item.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct PairScore {
    /// Index of the pair or item.
    pub index: usize,
    /// Always `score`.
    pub object: &'static str,
    /// The score.
    pub score: f32,
}

/// The label of a text.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Classified {
    /// Index of the text.
    pub index: usize,
    /// The label with the largest score.
    pub label: String,
    /// The score of each label, in the order of the request's labels, or of the model's.
    pub probs: Vec<f32>,
    /// Number of labels.
    pub num_classes: usize,
}
