//! The handlers of `POST /completion`, `POST /infill`, `POST /apply-template` and `GET /props`, as in
//! llama.cpp's server.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use serde_json::{Map, Value, json};
use stolon::{AnswerPart, FinishReason, Infill, InfillFile, Request, Timings};

use crate::api::llama_cpp::{
    AppliedTemplate, DefaultSettings, InfillRequest, LlamaCompletionRequest, LlamaEvent,
    LlamaOptions, LlamaReply, LlamaReplyEnd, LlamaTimings, Modalities, Props, StopType,
};
use crate::api::options::GenerationOptions;
use crate::api::reply::Usage;
use crate::api::tokenize::TokenizeRequest;
use crate::handlers::app::App;
use crate::handlers::completions::engine_request;
use crate::handlers::context::{Incoming, RequestContext};
use crate::handlers::options::{ApiOptions, Call, is_chosen};
use crate::handlers::tokenize::{self, chat_tokens};
use crate::wire::error::ApiError;
use crate::wire::reply::{Dialect, Piece};

/// llama.cpp's name of a text without one.
const UNNAMED: &str = "tmp";

/// `POST /completion`.
pub(crate) async fn completion(
    Incoming { body: request, context }: Incoming<LlamaCompletionRequest>,
) -> Result<Response, ApiError> {
    let mut options = request.options;
    options.guided_json = options.guided_json.or(request.json_schema);
    let mut prompts = request.prompt.into_prompts();
    let (Some(prompt), true) = (prompts.pop(), prompts.is_empty()) else {
        let message = "expected one prompt; `POST /v1/completions` takes several";
        return Err(ApiError::invalid(Some("prompt"), message));
    };
    respond(context, request.own, options, engine_request(prompt)).await
}

/// `POST /infill`.
pub(crate) async fn infill(
    Incoming { body: request, context }: Incoming<InfillRequest>,
) -> Result<Response, ApiError> {
    let prefix = [request.input_prefix, request.prompt].into_iter().flatten().collect();
    let files = request.input_extra.unwrap_or_default().into_iter().map(|extra| InfillFile {
        name: extra.filename.unwrap_or_else(|| UNNAMED.to_owned()),
        text: extra.text,
    });
    let suffix = request.input_suffix.unwrap_or_default();
    let infill = Infill { prefix, suffix, files: files.collect() };
    respond(context, request.own, request.options, Request::infill(infill)).await
}

/// Runs a prompt and replies in llama.cpp's form.
async fn respond(
    context: RequestContext,
    own: LlamaOptions,
    mut options: GenerationOptions,
    prompt: Request,
) -> Result<Response, ApiError> {
    options.repetition_penalty = options.repetition_penalty.or(own.repeat_penalty);
    options.seed = options.seed.filter(is_chosen);
    // Clients send what they do not set.
    options.guided_grammar = options.guided_grammar.filter(|grammar| !grammar.is_empty());
    let max_tokens = own.n_predict.unwrap_or_else(|| context.app.default_max_tokens());
    let api = ApiOptions { max_tokens: Some(max_tokens.max(1)), ..ApiOptions::default() };
    let mut call = Call::new(context, options, api)?;
    call.prompts = vec![prompt];
    call.join_session()?;
    call.describe();
    let reply = Reply {
        model: call.model.clone(),
        stream: call.stream,
        only_prompt: max_tokens == 0,
        fields: own.response_fields,
        content: String::new(),
        reason: FinishReason::Length,
        timings: Timings::default(),
        end: None,
    };
    call.respond(reply).await
}

/// A reply in progress.
struct Reply {
    model: String,
    stream: bool,
    /// Whether the client wants no text. The engine generates one token in any case.
    only_prompt: bool,
    /// The members that a whole reply has; `None` for all.
    fields: Option<Vec<String>>,
    /// The text so far, unless it is streamed.
    content: String,
    reason: FinishReason,
    timings: Timings,
    end: Option<LlamaReplyEnd>,
}

impl Dialect for Reply {
    type Event = LlamaEvent;
    type Whole = Value;

    fn name(_: &LlamaEvent) -> Option<&'static str> {
        None
    }

    fn begin(&mut self, _choice: usize, _usage: Usage) -> Vec<LlamaEvent> {
        Vec::new()
    }

    fn part(&mut self, _choice: usize, piece: Piece<'_>) -> Vec<LlamaEvent> {
        let content: String = piece.parts.into_iter().filter_map(AnswerPart::into_text).collect();
        if content.is_empty() || self.only_prompt {
            return Vec::new();
        }
        if self.stream {
            let piece = LlamaReply { index: 0, content, stop: false, end: None };
            return vec![LlamaEvent::Piece(piece)];
        }
        self.content.push_str(&content);
        Vec::new()
    }

    fn timed(&mut self, _choice: usize, timings: &Timings) {
        self.timings = *timings;
    }

    fn end(&mut self, _choice: usize, reason: &FinishReason) -> Vec<LlamaEvent> {
        self.reason = reason.clone();
        Vec::new()
    }

    fn finish(&mut self, usage: Usage) -> Vec<LlamaEvent> {
        let (stop_type, stopping_word) = match &self.reason {
            FinishReason::Length => (StopType::Limit, String::new()),
            FinishReason::StopString(stop) => (StopType::Word, stop.clone()),
            _ if self.only_prompt => (StopType::Limit, String::new()),
            _ => (StopType::Eos, String::new()),
        };
        let predicted = if self.only_prompt { 0 } else { usage.completion_tokens };
        self.end = Some(LlamaReplyEnd {
            model: std::mem::take(&mut self.model),
            tokens_predicted: predicted,
            tokens_evaluated: usage.prompt_tokens,
            tokens_cached: usage.prompt_tokens + predicted,
            truncated: false,
            stop_type,
            stopping_word,
            timings: timings(&self.timings, usage, predicted),
        });
        if self.stream { vec![LlamaEvent::Piece(self.last())] } else { Vec::new() }
    }

    fn fail(&mut self, error: &ApiError) -> LlamaEvent {
        LlamaEvent::Failed(error.reply())
    }

    fn whole(mut self) -> Value {
        let reply = json!(self.last());
        match self.fields {
            None => reply,
            Some(fields) => Value::Object(selected(&reply, fields)),
        }
    }
}

impl Reply {
    /// The whole reply, or the last piece.
    fn last(&mut self) -> LlamaReply {
        let content = std::mem::take(&mut self.content);
        LlamaReply { index: 0, content, stop: true, end: self.end.take() }
    }
}

/// The members of a reply at these paths, whose parts are separated by slashes. The paths are their
/// names.
fn selected(reply: &Value, paths: Vec<String>) -> Map<String, Value> {
    let member = |path: String| {
        let value = path.split('/').try_fold(reply, |value, name| value.get(name))?.clone();
        Some((path, value))
    };
    paths.into_iter().filter_map(member).collect()
}

/// Times in llama.cpp's form.
fn timings(timings: &Timings, usage: Usage, predicted: usize) -> LlamaTimings {
    let cached = usage.cached_tokens();
    let computed = usage.prompt_tokens.saturating_sub(cached);
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let per = |time: f64, count: usize| if count == 0 { 0.0 } else { time / count as f64 };
    let rate = |count: usize, time: f64| if time > 0.0 { count as f64 / time * 1e3 } else { 0.0 };
    let prompt_ms = ms(timings.ttft.saturating_sub(timings.queue));
    let predicted_ms = ms(timings.total.saturating_sub(timings.ttft));
    LlamaTimings {
        cache_n: cached,
        prompt_n: computed,
        prompt_ms,
        prompt_per_token_ms: per(prompt_ms, computed),
        prompt_per_second: rate(computed, prompt_ms),
        predicted_n: predicted,
        predicted_ms,
        predicted_per_token_ms: per(predicted_ms, predicted),
        predicted_per_second: rate(predicted, predicted_ms),
    }
}

/// `POST /apply-template`: the text of a conversation's prompt.
pub(crate) async fn apply_template(
    Incoming { body: mut request, context }: Incoming<TokenizeRequest>,
) -> Result<Json<AppliedTemplate>, ApiError> {
    let RequestContext { app, caller, ignored, held: _held, .. } = context;
    if let Some(model) = &request.model {
        app.check_model(model, &ignored)?;
    }
    let conversation = request.messages.take().ok_or_else(|| ApiError::missing("messages"))?;
    let tokens = chat_tokens(&app, &caller, &ignored, conversation, request).await?;
    let (engine, count) = (app.engine.clone(), tokens.len());
    let decode = move || engine.detokenize(&tokens, false);
    let prompt = app.parser.run(caller.identity, count, decode).await??;
    Ok(Json(AppliedTemplate { prompt }))
}

/// `GET /props`: what clients ask a server of one model for.
pub(crate) async fn props(State(app): State<Arc<App>>) -> Result<Json<Props>, ApiError> {
    let model = app.engine.model_info();
    let (alias, path) = (app.model_name().to_owned(), model.id.clone());
    let (n_ctx, vision) = (model.max_positions, model.takes_images);
    let drafting = model.drafting.name();
    let Json(tokenizer) = tokenize::info(State(app)).await?;
    Ok(Json(Props {
        default_generation_settings: DefaultSettings { n_ctx },
        model_alias: alias,
        model_path: path,
        modalities: Modalities { vision, audio: false },
        drafting,
        chat_template: tokenizer.chat_template.unwrap_or_default(),
        bos_token: tokenizer.bos_token.unwrap_or_default(),
        eos_token: tokenizer.eos_token.unwrap_or_default(),
        build_info: format!("stolon-{}", env!("CARGO_PKG_VERSION")),
        is_sleeping: false,
    }))
}
