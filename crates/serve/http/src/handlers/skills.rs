//! The handlers of `POST /v1/query` and `POST /v1/caption`, Moondream's API. The handlers of points
//! and boxes are in `skills/regions.rs`.

mod regions;

use axum::Extension;
use axum::response::Response;
use stolon::{AnswerPart, BoundingBox, CaptionLength, Engine, Point, Request, SpatialRef};

use crate::api::options::GenerationOptions;
use crate::api::reply::{FinishReason, Usage};
use crate::api::skills::{self as api, CaptionRequest, QueryRequest, SkillChunk, SkillReply};
use crate::handlers::context::{Incoming, RequestContext};
use crate::handlers::options::{ApiOptions, Call};
use crate::wire::error::ApiError;
use crate::wire::reply::{Dialect, Piece};
use crate::wire::request_id::RequestId;

pub(crate) use regions::{detect, point};

/// The defaults of Moondream's own server.
const TEMPERATURE: f32 = 0.2;
const TOP_P: f32 = 0.9;
const MAX_TOKENS: usize = 768;

/// The handler of `/v1/query`.
pub(crate) async fn query(
    Extension(id): Extension<RequestId>,
    Incoming { body: request, context }: Incoming<QueryRequest>,
) -> Result<Response, ApiError> {
    let mut skill = Skill::new(&id, Field::Answer);
    let places = places(request.spatial_refs);
    let question = if request.reasoning == Some(true) {
        skill.reasoning = ReasoningState::Arriving(context.app.engine.clone(), Vec::new());
        Request::reason_about(request.question, places)
    } else {
        Request::query_about(request.question, places)
    };
    let prompt = with_image(question, request.image_url);
    call(context, request.options, prompt)?.respond(skill).await
}

/// The handler of `/v1/caption`.
pub(crate) async fn caption(
    Extension(id): Extension<RequestId>,
    Incoming { body: request, context }: Incoming<CaptionRequest>,
) -> Result<Response, ApiError> {
    let length = match request.length.unwrap_or_default() {
        api::CaptionLength::Short => CaptionLength::Short,
        api::CaptionLength::Normal => CaptionLength::Normal,
        api::CaptionLength::Long => CaptionLength::Long,
    };
    let prompt = Request::caption(length).image_url(request.image_url);
    call(context, request.options, prompt)?.respond(Skill::new(&id, Field::Caption)).await
}

/// The request about an image, if there is a URL.
pub(crate) fn with_image(prompt: Request, image_url: Option<String>) -> Request {
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

/// The call with these options and this prompt.
fn call(
    context: RequestContext,
    options: api::SkillOptions,
    prompt: Request,
) -> Result<Call, ApiError> {
    let settings = options.settings.unwrap_or_default();
    let max_tokens =
        settings.max_tokens.or(context.app.configured_max_tokens).unwrap_or(MAX_TOKENS);
    let options = GenerationOptions {
        model: options.model,
        stream: options.stream,
        temperature: Some(settings.temperature.unwrap_or(TEMPERATURE)),
        top_p: Some(settings.top_p.unwrap_or(TOP_P)),
        cache_salt: options.cache_salt,
        priority: options.priority,
        ..GenerationOptions::default()
    };
    let own = ApiOptions { max_tokens: Some(max_tokens), ..ApiOptions::default() };
    let mut call = Call::new(context, options, own)?;
    call.describe();
    call.prompts = vec![prompt];
    Ok(call)
}

/// The name of the text in a whole reply.
#[derive(Clone, Copy, Debug)]
enum Field {
    Answer,
    Caption,
}

/// The reasoning before an answer, while it arrives.
#[derive(Debug)]
enum ReasoningState {
    /// None was requested.
    Absent,
    /// The tokens of the answer so far.
    Arriving(Engine, Vec<u32>),
    Complete(api::SkillReasoning),
}

impl ReasoningState {
    /// Adds a token, unless the reasoning is complete.
    fn push(&mut self, id: Option<u32>) {
        if let Self::Arriving(_, tokens) = self {
            tokens.extend(id);
        }
    }

    /// Completes the reasoning. Returns it if it was not complete before.
    fn complete(&mut self) -> Option<api::SkillReasoning> {
        let Self::Arriving(engine, tokens) = self else { return None };
        // The model has a tokenizer and reasons, or the request would have been refused.
        let stolon::Reasoning { text, grounding, .. } =
            engine.reasoning(tokens).unwrap_or_default();
        let grounding = grounding.into_iter().map(|part| api::Grounding {
            start_idx: part.start,
            end_idx: part.end,
            points: part.points.into_iter().map(|point| [point.x, point.y]).collect(),
        });
        let reasoning = api::SkillReasoning { text, grounding: grounding.collect() };
        *self = Self::Complete(reasoning.clone());
        Some(reasoning)
    }
}

/// A reply in progress.
#[derive(Debug)]
struct Skill {
    request_id: String,
    field: Field,
    reasoning: ReasoningState,
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
            reasoning: ReasoningState::Absent,
            text: String::new(),
            finish_reason: FinishReason::Stop,
            usage: Usage::default(),
        }
    }

    /// The event with the reasoning, when it is complete.
    fn reasoning_event(&mut self) -> Option<SkillChunk> {
        let reasoning = self.reasoning.complete()?;
        Some(SkillChunk { reasoning: Some(reasoning), ..SkillChunk::default() })
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
        self.reasoning.push(piece.id);
        let text: String = piece.parts.into_iter().filter_map(AnswerPart::into_text).collect();
        if text.is_empty() {
            return Vec::new();
        }
        self.text.push_str(&text);
        let chunk = SkillChunk { chunk: Some(text), ..SkillChunk::default() };
        self.reasoning_event().into_iter().chain([chunk]).collect()
    }

    fn end(&mut self, _choice: usize, reason: &stolon::FinishReason) -> Vec<SkillChunk> {
        self.finish_reason = FinishReason::from(reason);
        self.reasoning_event().into_iter().collect()
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
        let Self { request_id, field, reasoning, text, finish_reason, usage } = self;
        let reasoning = match reasoning {
            ReasoningState::Complete(reasoning) => Some(reasoning),
            ReasoningState::Absent | ReasoningState::Arriving(..) => None,
        };
        let (answer, caption) = match field {
            Field::Answer => (Some(text), None),
            Field::Caption => (None, Some(text)),
        };
        SkillReply { request_id, reasoning, answer, caption, finish_reason, usage }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stolon::{FinishReason, PromptPart};

    use super::*;

    /// Goal: the reasoning is one event before the first piece of the answer, or before the end if
    /// there is no answer, with its parts in characters; and a whole reply has the same.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn reasoning_is_an_event_before_the_answer() {
        let engine = Engine::builder().model("random:moondream3-tiny").num_blocks(64).threads(1);
        let engine = engine.build().await.expect("an engine");
        let places = [PromptPart::Coordinate(0.0), PromptPart::Coordinate(1.0)];
        let places = engine.prompt_tokens(&Request::parts(places)).await.expect("coordinates");
        let (marked, rest) = ([65, 7, 66, places[0], places[1], 67, 9], [68]);
        let grounding = json!([{"start_idx": 1, "end_idx": 3, "points": [[0.0, 1.0]]}]);
        let whole = json!({"text": "ABCD", "grounding": grounding});
        for answer in ["", "yes"] {
            let mut skill =
                Skill::new(&RequestId::of(&axum::http::HeaderMap::new()), Field::Answer);
            skill.reasoning = ReasoningState::Arriving(engine.clone(), Vec::new());
            let mut events = Vec::new();
            for id in marked.iter().chain(&rest).chain(&[3]) {
                events.extend(skill.part(0, Piece { id: Some(*id), ..Piece::default() }));
            }
            assert!(events.is_empty(), "{events:?}");
            for text in answer.chars().map(String::from) {
                let parts = vec![AnswerPart::Text(text)];
                events.extend(skill.part(0, Piece { parts, id: Some(70), logprob: None }));
            }
            events.extend(skill.end(0, &FinishReason::Length));
            events.extend(skill.finish(Usage::default()));
            let events = serde_json::to_value(&events).expect("JSON");
            let events = events.as_array().expect("a list");
            assert_eq!(events[0], json!({"reasoning": whole, "completed": false}));
            let (last, pieces) = events[1..].split_last().expect("an event");
            assert!(last["completed"] == true && last["reasoning"] == Value::Null, "{last}");
            let pieces = pieces.iter().map(|event| event["chunk"].as_str().expect("a piece"));
            assert_eq!(pieces.collect::<String>(), answer);
            let reply = serde_json::to_value(skill.whole()).expect("JSON");
            assert_eq!((&reply["reasoning"], &reply["answer"]), (&whole, &json!(answer)));
        }
        engine.shutdown().await;
    }
}
