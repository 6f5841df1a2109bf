//! `POST /v1/query`, `/v1/caption`, `/v1/point` and `/v1/detect`: Moondream's API, for models that
//! were trained for these tasks.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::error::ErrorObject;
use super::fields::{self, UnknownFields};
use super::reply::{FinishReason, Usage};

/// The body of a request to `/v1/query`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct QueryRequest {
    /// The question, which is not empty.
    pub question: String,
    /// The image that the question is about: a data URL in base64, `data:image/png;base64,..`.
    /// Other URLs are fetched only from hosts that the server's operator has named. Default: the
    /// question is about no image.
    pub image_url: Option<String>,
    /// Whether the model reasons before it answers (Moondream 3). Default false.
    pub reasoning: Option<bool>,
    /// Places in the image that the question is about: points `[x, y]` and boxes
    /// `[x_min, y_min, x_max, y_max]`, from 0, the left or the upper edge, to 1. Only with an image.
    #[serde(default, deserialize_with = "fields::optional_list::<_, _, MAX_PLACES>")]
    #[schemars(length(max = MAX_PLACES))]
    pub spatial_refs: Option<Vec<SpatialRef>>,
    /// Parameters of both routes.
    #[serde(flatten)]
    pub options: SkillOptions,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The body of a request to `/v1/caption`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct CaptionRequest {
    /// The image: a data URL in base64, `data:image/png;base64,..`. Other URLs are fetched only
    /// from hosts that the server's operator has named.
    pub image_url: String,
    /// How long the description is. Default `normal`.
    pub length: Option<CaptionLength>,
    /// Parameters of both routes.
    #[serde(flatten)]
    pub options: SkillOptions,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The body of a request to `/v1/point` or `/v1/detect`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct RegionsRequest {
    /// The image: a data URL in base64, `data:image/png;base64,..`. Other URLs are fetched only
    /// from hosts that the server's operator has named.
    pub image_url: String,
    /// The name of the things to find, which is not empty.
    pub object: String,
    /// Places in the image that the name refers to, as in `/v1/query`; must be empty for boxes.
    #[serde(default, deserialize_with = "fields::optional_list::<_, _, MAX_PLACES>")]
    #[schemars(length(max = MAX_PLACES))]
    pub spatial_refs: Option<Vec<SpatialRef>>,
    /// How the answer is generated.
    pub settings: Option<RegionsSettings>,
    /// The model's id, or one of the names given with `--served-model-name`, which replace it.
    /// Default: the served model.
    pub model: Option<String>,
    /// Must be false: the reply comes as a whole. Default false.
    pub stream: Option<bool>,
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

/// How points and boxes are generated.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object")]
pub struct RegionsSettings {
    /// Must be 0: the most likely coordinates are chosen. Default 0.
    #[serde(default, deserialize_with = "fields::number")]
    pub temperature: Option<f32>,
    /// Without effect, because the most likely coordinates are chosen.
    #[serde(default, deserialize_with = "fields::number")]
    pub top_p: Option<f32>,
    /// Maximum number of tokens of points: two for each, and one more. Without effect for boxes.
    /// Default 768.
    #[serde(default, deserialize_with = "fields::count::<_, 1, { u32::MAX as usize }>")]
    #[schemars(range(min = 1, max = u32::MAX))]
    pub max_tokens: Option<usize>,
    /// Maximum number of things to find, which replaces `max_tokens`. Default: 50 boxes, and as
    /// many points as `max_tokens` permits.
    #[serde(default, deserialize_with = "fields::count::<_, 1, MAX_OBJECTS>")]
    #[schemars(range(min = 1, max = MAX_OBJECTS))]
    pub max_objects: Option<usize>,
}

/// Largest accepted `max_objects`.
pub const MAX_OBJECTS: usize = 4096;

/// The reply of `/v1/point`.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct PointsReply {
    /// The id of the request, as in the header `x-request-id`.
    pub request_id: String,
    /// The points, one for each thing.
    pub points: Vec<Point>,
    /// Number of points.
    pub count: usize,
    /// Why the answer ended.
    pub finish_reason: FinishReason,
    /// Token counts.
    pub usage: Usage,
}

/// A point in an image.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Point {
    /// From 0, the left edge, to 1.
    pub x: f32,
    /// From 0, the upper edge, to 1.
    pub y: f32,
}

/// The reply of `/v1/detect`.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct BoxesReply {
    /// The id of the request, as in the header `x-request-id`.
    pub request_id: String,
    /// The boxes, one around each thing.
    pub objects: Vec<BoundingBox>,
    /// Why the answer ended.
    pub finish_reason: FinishReason,
    /// Token counts.
    pub usage: Usage,
}

/// A box in an image, from 0, the left or the upper edge, to 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub struct BoundingBox {
    /// The left edge.
    pub x_min: f32,
    /// The upper edge.
    pub y_min: f32,
    /// The right edge.
    pub x_max: f32,
    /// The lower edge.
    pub y_max: f32,
}

/// Largest accepted number of places in an image.
pub const MAX_PLACES: usize = 1024;

/// A point or a box in an image.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected a point [x, y] or a box [x_min, y_min, x_max, y_max]")]
pub enum SpatialRef {
    /// `[x, y]`.
    Point([f32; 2]),
    /// `[x_min, y_min, x_max, y_max]`.
    Box([f32; 4]),
}

/// How long the description of an image is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum CaptionLength {
    /// One sentence.
    Short,
    /// A few sentences.
    #[default]
    Normal,
    /// A paragraph.
    Long,
}

/// Parameters of the routes whose answers are texts.
#[derive(Debug, Default, Deserialize, JsonSchema)]
pub struct SkillOptions {
    /// The model's id, or one of the names given with `--served-model-name`, which replace it.
    /// Default: the served model.
    pub model: Option<String>,
    /// Whether to send the reply in pieces, as server-sent events. Default false.
    pub stream: Option<bool>,
    /// How the answer is generated.
    pub settings: Option<SkillSettings>,
    /// Only requests with the same salt share cached prefixes. Default: the cache of requests
    /// without a salt.
    pub cache_salt: Option<String>,
    /// Requests with a larger priority are admitted first or, on a server with `--admission
    /// priority`, those with a smaller one, as in vLLM. Any 32-bit integer. Default 0.
    #[serde(default, deserialize_with = "fields::signed_32")]
    pub priority: Option<i32>,
}

/// How an answer is generated.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object")]
pub struct SkillSettings {
    /// Softmax temperature, 0 or above; 0 is greedy decoding. Default 0.2.
    #[serde(default, deserialize_with = "fields::number")]
    pub temperature: Option<f32>,
    /// Nucleus sampling: keep the most likely tokens whose probabilities add up to this; 0 to 1.
    /// Default 0.9.
    #[serde(default, deserialize_with = "fields::number")]
    pub top_p: Option<f32>,
    /// Maximum number of tokens of the answer and of the reasoning before it, together, at least 1.
    /// Default 768, or the one that the server is configured with.
    #[serde(default, deserialize_with = "fields::count::<_, 1, { usize::MAX }>")]
    #[schemars(range(min = 1))]
    pub max_tokens: Option<usize>,
}

/// The reasoning of the model before its answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct SkillReasoning {
    /// The text.
    pub text: String,
    /// The parts of the text that the model has shown in the image, in order.
    pub grounding: Vec<Grounding>,
}

/// A part of the text of a reasoning, and where in the image it is.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Grounding {
    /// Number of characters of the text before this part.
    pub start_idx: usize,
    /// Number of characters of the text before the end of this part.
    pub end_idx: usize,
    /// Points `[x, y]`, from 0, the left or the upper edge, to 1.
    pub points: Vec<[f32; 2]>,
}

/// A whole reply.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct SkillReply {
    /// The id of the request, as in the header `x-request-id`.
    pub request_id: String,
    /// The reasoning of the model before its answer, if it was requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<SkillReasoning>,
    /// The answer to a question.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answer: Option<String>,
    /// The description of an image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub caption: Option<String>,
    /// Why the answer ended.
    pub finish_reason: FinishReason,
    /// Token counts.
    pub usage: Usage,
}

/// One event of a streamed reply. The last one is complete, or has an error.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct SkillChunk {
    /// The reasoning of the model as a whole, in an event before the first piece of the text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<SkillReasoning>,
    /// The next piece of the text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunk: Option<String>,
    /// Whether the text is complete.
    pub completed: bool,
    /// The id of the request, in the event that completes the reply.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// Why the answer ended, in the event that completes the reply.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub finish_reason: Option<FinishReason>,
    /// Token counts, in the event that completes the reply.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// Why the reply cannot be completed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<ErrorObject>,
}
