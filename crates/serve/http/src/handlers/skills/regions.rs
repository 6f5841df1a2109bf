//! The handlers of `POST /v1/point` and `POST /v1/detect`.

use axum::{Extension, Json};
use serde_json::json;
use stolon::{Completion, Request};

use super::{MAX_TOKENS, places};
use crate::api::options::GenerationOptions;
use crate::api::reply::{FinishReason, Usage};
use crate::api::skills::{
    BoundingBox, BoxesReply, Point, PointsReply, RegionsRequest, RegionsSettings,
};
use crate::handlers::context::{Incoming, RequestContext};
use crate::handlers::options::{ApiOptions, Call};
use crate::wire::error::ApiError;
use crate::wire::request_id::RequestId;

/// Maximum number of boxes, unless the request says otherwise.
const BOXES: usize = 50;

/// The handler of `/v1/point`.
pub(crate) async fn point(
    Extension(id): Extension<RequestId>,
    Incoming { body: request, context }: Incoming<RegionsRequest>,
) -> Result<Json<PointsReply>, ApiError> {
    let settings = request.settings.clone().unwrap_or_default();
    let of_objects = settings.max_objects.map(|count| 2 * count + 1);
    let max_tokens = of_objects.or(settings.max_tokens).unwrap_or(MAX_TOKENS);
    let prompt = Request::point_about(request.object.clone(), places(request.spatial_refs.clone()));
    let mut call = call(context, &request, &settings, max_tokens)?;
    let found = complete(&mut call, prompt.image_url(request.image_url)).await?;
    let points = found.points(call.engine().model_info());
    let points: Vec<Point> =
        points.into_iter().map(|point| Point { x: point.x, y: point.y }).collect();
    let (finish_reason, usage) = end(&call, &found);
    let (request_id, count) = (id.as_str().to_owned(), points.len());
    Ok(Json(PointsReply { request_id, points, count, finish_reason, usage }))
}

/// The handler of `/v1/detect`.
pub(crate) async fn detect(
    Extension(id): Extension<RequestId>,
    Incoming { body: request, context }: Incoming<RegionsRequest>,
) -> Result<Json<BoxesReply>, ApiError> {
    let settings = request.settings.clone().unwrap_or_default();
    if let Some(refs) = request.spatial_refs.as_ref().filter(|refs| !refs.is_empty()) {
        let expected = "none, because the model finds boxes by a name alone";
        return Err(ApiError::expected("spatial_refs", expected, &json!(refs)));
    }
    let max_tokens = 3 * settings.max_objects.unwrap_or(BOXES) + 1;
    let prompt = Request::detect(request.object.clone());
    let mut call = call(context, &request, &settings, max_tokens)?;
    let found = complete(&mut call, prompt.image_url(request.image_url)).await?;
    let boxes = found.boxes(call.engine().model_info()).into_iter();
    let objects = boxes.map(|found| {
        let stolon::BoundingBox { x_min, y_min, x_max, y_max } = found;
        BoundingBox { x_min, y_min, x_max, y_max }
    });
    let (objects, (finish_reason, usage)) = (objects.collect(), end(&call, &found));
    Ok(Json(BoxesReply { request_id: id.as_str().to_owned(), objects, finish_reason, usage }))
}

/// The call of a request, whose answer has at most `max_tokens` tokens.
fn call(
    context: RequestContext,
    request: &RegionsRequest,
    settings: &RegionsSettings,
    max_tokens: usize,
) -> Result<Call, ApiError> {
    if request.stream == Some(true) {
        let expected = "false, because the reply comes as a whole";
        return Err(ApiError::expected("stream", expected, &json!(true)));
    }
    if let Some(temperature) = settings.temperature.filter(|temperature| *temperature != 0.0) {
        let expected = "0, because the most likely coordinates are chosen";
        return Err(ApiError::expected("settings.temperature", expected, &json!(temperature)));
    }
    let options = GenerationOptions {
        model: request.model.clone(),
        temperature: Some(0.0),
        cache_salt: request.cache_salt.clone(),
        priority: request.priority,
        ..GenerationOptions::default()
    };
    Call::new(
        context,
        options,
        ApiOptions { max_tokens: Some(max_tokens), ..ApiOptions::default() },
    )
}

/// Runs a call with one answer.
async fn complete(call: &mut Call, prompt: Request) -> Result<Completion, ApiError> {
    call.describe();
    let stream = call.engine().generate(call.apply(prompt)).await;
    let stream = stream.map_err(|error| call.refused(error))?;
    // The image has been decoded.
    call.context.held = None;
    stream.collect_text().await.map_err(|error| call.refused(error))
}

/// Why an answer ended, and its token counts.
fn end(call: &Call, found: &Completion) -> (FinishReason, Usage) {
    let usage = call.usage_sum.with_prompts(&[found.finish.usage]);
    ((&found.finish.reason).into(), usage.total())
}
