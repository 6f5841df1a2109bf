//! The handlers of `POST /v1/query` and `POST /v1/caption`, Moondream's API. Those of points and
//! boxes are in `skills/regions.rs`.

mod regions;

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use serde_json::json;
use stolon::{AnswerFormat, AnswerPart, BoundingBox, CaptionLength, Point, Request, SpatialRef};

use super::App;
use super::access::Caller;
use super::advice::Ignored;
use super::error::ApiError;
use super::options::{Call, OfApi};
use super::receive::Received;
use super::reply::{self, Dialect, Piece};
use super::request_id::RequestId;
use crate::api::options::GenerationOptions;
use crate::api::reply::{FinishReason, Usage};
use crate::api::skills::{self as api, CaptionRequest, QueryRequest, SkillChunk, SkillReply};

pub(super) use regions::{detect, point};

/// The defaults of Moondream's own server.
const TEMPERATURE: f32 = 0.2;
const TOP_P: f32 = 0.9;
const MAX_TOKENS: usize = 768;

/// The handler of `/v1/query`.
pub(super) async fn query(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Extension(id): Extension<RequestId>,
    body: Received,
) -> Result<Response, ApiError> {
    let ignored = body.ignored.clone();
    let (request, held): (QueryRequest, _) = app.parser.parse_with_images(body).await?;
    if request.reasoning == Some(true) {
        let expected = "false, because this server does not support reasoning here";
        return Err(ApiError::expected("reasoning", expected, &json!(true)));
    }
    let question = Request::query_about(request.question, places(request.spatial_refs));
    let prompt = with_image(question, request.image_url);
    let mut call = call(request.options, &app, &caller, &ignored)?;
    call.body = held;
    respond(&app, &mut call, prompt, Skill::new(&id, Field::Answer)).await
}

/// The handler of `/v1/caption`.
pub(super) async fn caption(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Extension(id): Extension<RequestId>,
    body: Received,
) -> Result<Response, ApiError> {
    let ignored = body.ignored.clone();
    let (request, held): (CaptionRequest, _) = app.parser.parse_with_images(body).await?;
    let length = match request.length.unwrap_or_default() {
        api::CaptionLength::Short => CaptionLength::Short,
        api::CaptionLength::Normal => CaptionLength::Normal,
        api::CaptionLength::Long => CaptionLength::Long,
    };
    let prompt = Request::caption(length).image_url(request.image_url);
    let mut call = call(request.options, &app, &caller, &ignored)?;
    call.body = held;
    respond(&app, &mut call, prompt, Skill::new(&id, Field::Caption)).await
}

/// The request about an image, if there is a URL.
pub(super) fn with_image(prompt: Request, image_url: Option<String>) -> Request {
    match image_url {
        Some(url) => prompt.image_url(url),
        None => prompt,
    }
}

/// The engine's form of places in an image.
fn places(refs: Option<Vec<api::SpatialRef>>) -> impl Iterator<Item = SpatialRef> {
    refs.into_iter().flatten().map(|place| match place {
        api::SpatialRef::Point([x, y]) => SpatialRef::Point(Point { x, y }),
        api::SpatialRef::Box([x_min, y_min, x_max, y_max]) => {
            SpatialRef::Box(BoundingBox { x_min, y_min, x_max, y_max })
        }
    })
}

/// The call with these options.
fn call(
    options: api::SkillOptions,
    app: &App,
    caller: &Caller,
    ignored: &Ignored,
) -> Result<Call, ApiError> {
    let settings = options.settings.unwrap_or_default();
    let max_tokens = settings.max_tokens.or(app.configured_max_tokens).unwrap_or(MAX_TOKENS);
    let options = GenerationOptions {
        model: options.model,
        stream: options.stream,
        temperature: Some(settings.temperature.unwrap_or(TEMPERATURE)),
        top_p: Some(settings.top_p.unwrap_or(TOP_P)),
        cache_salt: options.cache_salt,
        priority: options.priority,
        ..GenerationOptions::default()
    };
    let mut call = Call::new(options, OfApi::default(), app, caller, ignored)?;
    call.max_tokens = max_tokens;
    call.describe(app);
    Ok(call)
}

async fn respond(
    app: &App,
    call: &mut Call,
    prompt: Request,
    reply: Skill,
) -> Result<Response, ApiError> {
    let (usage, format) = (app.usage_sum(1), AnswerFormat::default());
    reply::respond(app, call, vec![prompt], usage, format, reply).await
}

/// The name of the text in a whole reply.
#[derive(Clone, Copy, Debug)]
enum Field {
    Answer,
    Caption,
}

/// A reply in progress.
#[derive(Debug)]
struct Skill {
    request_id: String,
    field: Field,
    /// The text so far.
    text: String,
    finish_reason: FinishReason,
    usage: Usage,
}

impl Skill {
    fn new(id: &RequestId, field: Field) -> Self {
        Self {
            request_id: id.as_str().to_owned(),
            field,
            text: String::new(),
            finish_reason: FinishReason::Stop,
            usage: Usage::default(),
        }
    }
}

impl Dialect for Skill {
    type Event = SkillChunk;
    type Whole = SkillReply;

    fn name(_: &SkillChunk) -> Option<&'static str> {
        None
    }

    fn begin(&mut self, _choice: usize, _usage: Usage) -> Vec<SkillChunk> {
        Vec::new()
    }

    fn part(&mut self, _choice: usize, piece: Piece<'_>) -> Vec<SkillChunk> {
        let text: String = piece.parts.into_iter().filter_map(AnswerPart::into_text).collect();
        if text.is_empty() {
            return Vec::new();
        }
        self.text.push_str(&text);
        vec![SkillChunk { chunk: Some(text), ..SkillChunk::default() }]
    }

    fn end(&mut self, _choice: usize, reason: &stolon::FinishReason) -> Vec<SkillChunk> {
        self.finish_reason = FinishReason::from(reason);
        Vec::new()
    }

    fn finish(&mut self, usage: Usage) -> Vec<SkillChunk> {
        self.usage = usage;
        vec![SkillChunk {
            completed: true,
            request_id: Some(self.request_id.clone()),
            finish_reason: Some(self.finish_reason),
            usage: Some(usage),
            ..SkillChunk::default()
        }]
    }

    fn fail(&mut self, error: &ApiError) -> SkillChunk {
        SkillChunk { error: Some(error.reply().error), ..SkillChunk::default() }
    }

    fn whole(self) -> SkillReply {
        let Self { request_id, field, text, finish_reason, usage } = self;
        let (answer, caption) = match field {
            Field::Answer => (Some(text), None),
            Field::Caption => (None, Some(text)),
        };
        SkillReply { request_id, answer, caption, finish_reason, usage }
    }
}
