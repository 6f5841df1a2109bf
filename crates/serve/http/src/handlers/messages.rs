//! The handlers of `POST /v1/messages` and `POST /v1/messages/count_tokens`, Anthropic's API.

mod reply;

use std::time::Duration;

use axum::Json;
use axum::extract::Request as HttpRequest;
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::{Value, json};
use stolon::{CacheMark, ChatMessage, MessageContent, ToolChoice};

use crate::api::messages::{
    Block, BlockContent, MessagesError, MessagesErrorObject, MessagesRequest, MessagesTool,
    MessagesToolChoice, Thinking, ThinkingType, TokenCount, TurnMessage, TurnRole,
};
use crate::api::neutral::Scope;
use crate::api::options::StopStrings;
use crate::handlers::context::{Incoming, RequestContext};
use crate::handlers::dialogue::{Dialogue, SWITCHES, Tool, check_hosted, function_tool};
use crate::handlers::hints;
use crate::handlers::options::{ApiOptions, Call};
use crate::handlers::thinking::ThinkingBudget;
use crate::wire::advice::Ignored;
use crate::wire::body::refuse_unknown;
use crate::wire::error::ApiError;
use reply::Messages;

/// The tools that only Anthropic's own models know, by the beginning of their types, which end with
/// a date.
const HOSTED: &[&str] = &[
    "advisor",
    "bash",
    "code_execution",
    "computer",
    "mcp_toolset",
    "memory",
    "text_editor",
    "tool_search",
    "web_fetch",
    "web_search",
];

/// The handler of `/v1/messages`.
pub(crate) async fn create(
    Incoming { body: mut request, context }: Incoming<MessagesRequest>,
) -> Result<Response, ApiError> {
    let max_tokens = request.max_tokens.ok_or_else(|| ApiError::missing("max_tokens"))?;
    let dialogue = dialogue(&mut request, &context.ignored)?;
    let mut options = request.options;
    if let Some(stop) = request.stop_sequences
        && options.stop.replace(StopStrings::Many(stop)).is_some()
    {
        let message = "`stop` is not possible with `stop_sequences`: expected one of them";
        return Err(ApiError::invalid(Some("stop"), message));
    }
    let format = request.output_config.and_then(|output| output.format);
    let own = ApiOptions {
        format: format.map(|format| ("output_config.format", format)),
        max_tokens: Some(max_tokens),
        thinking_budget: thinking_budget(request.thinking.as_ref()),
        ..ApiOptions::default()
    };
    let call = Call::chat(context, options, own, dialogue).await?;
    let reply = Messages::new(&call);
    call.respond(reply).await
}

/// The handler of `/v1/messages/count_tokens`.
pub(crate) async fn count_tokens(
    Incoming { body: mut request, context }: Incoming<MessagesRequest>,
) -> Result<Json<TokenCount>, ApiError> {
    let RequestContext { app, caller, ignored, .. } = &context;
    if let Some(model) = &request.options.model {
        app.check_model(model, ignored)?;
    }
    let dialogue = dialogue(&mut request, ignored)?;
    let request = dialogue.prepare(&context, |request| caller.sign(request), None).await?;
    let input_tokens = app.engine.prompt_tokens(&request).await?.len();
    Ok(Json(TokenCount { input_tokens }))
}

/// Middleware that turns errors into Anthropic's form.
pub(crate) async fn errors(request: HttpRequest, next: Next) -> Response {
    converted(next.run(request).await, whole_error)
}

/// The body of a reply for an error, which is also the data of an event.
pub(crate) fn whole_error(error: &ApiError) -> MessagesError {
    MessagesError { kind: "error", error: error_object(error) }
}

/// A response whose error, if it is one, has this body.
pub(crate) fn converted<T: Serialize>(
    response: Response,
    body: impl FnOnce(&ApiError) -> T,
) -> Response {
    let Some(error) = response.extensions().get::<ApiError>() else { return response };
    let mut converted = (response.status(), Json(body(error))).into_response();
    for (name, value) in response.headers() {
        if name != "content-type" && name != "content-length" {
            converted.headers_mut().insert(name, value.clone());
        }
    }
    converted
}

/// An error in Anthropic's form.
fn error_object(error: &ApiError) -> MessagesErrorObject {
    let kind = match error.status() {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        StatusCode::GATEWAY_TIMEOUT => "timeout_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "api_error",
    };
    MessagesErrorObject { kind, message: error.message().to_owned() }
}

/// The conversation and its tools.
fn dialogue(request: &mut MessagesRequest, ignored: &Ignored) -> Result<Dialogue, ApiError> {
    let (mut messages, mut marks) = (Vec::new(), Vec::new());
    if let Some(system) = request.system.take() {
        marks.extend(marks_of(0, &system));
        let content = text_content("system", system)?;
        messages.push(message("system", content));
    }
    let tool_marks = request.tools.iter().flatten().map(|tool| tool.cache_control.as_ref());
    if let Some(ttl) = tool_marks.filter_map(hints::ttl).max() {
        // Templates show tools in the system message, if there is one.
        let parts_left_out = if messages.is_empty() { usize::MAX } else { 0 };
        marks.push(CacheMark { message: 0, parts_left_out, ttl });
    }
    marks.extend(hints::ttl(request.cache_control.as_ref()).map(CacheMark::whole));
    let turns = std::mem::take(&mut request.messages);
    if turns.is_empty() {
        let expected = "a list of at least one message";
        return Err(ApiError::expected("messages", expected, &json!([])));
    }
    for (index, turn) in turns.into_iter().enumerate() {
        add_turn(&mut messages, &mut marks, index, turn)?;
    }
    let continues = messages.last().is_some_and(|last| last.role == "assistant");
    let mut dialogue = Dialogue::new(messages);
    dialogue.marks = marks;
    // A turn merges several steps, also parts that an agent cannot take back.
    dialogue.keeps_images = false;
    dialogue.continue_final_message = continues;
    let tools = tools(request.tools.take().unwrap_or_default(), ignored)?;
    let disabled = request.tool_choice.as_ref().and_then(|choice| choice.disable_parallel_tool_use);
    dialogue.single_call = disabled.unwrap_or(false);
    dialogue.set_tools(tools, tool_choice(request.tool_choice.as_ref())?, "tool_choice")?;
    let kind = request.thinking.as_ref().map_or(ThinkingType::Disabled, |thinking| thinking.kind);
    let thinks = kind != ThinkingType::Disabled;
    dialogue.variables = request.chat_template_kwargs.take().unwrap_or_default();
    for name in SWITCHES {
        dialogue.variables.entry(name).or_insert(Value::Bool(thinks));
    }
    let output = request.output_config.as_mut();
    let effort = output.and_then(|output| output.effort.take());
    dialogue.effort = effort.map(|effort| ("output_config.effort", effort));
    Ok(dialogue)
}

/// The limit of the reasoning.
fn thinking_budget(thinking: Option<&Thinking>) -> Option<ThinkingBudget> {
    let thinking = thinking.filter(|thinking| thinking.kind == ThinkingType::Enabled)?;
    let tokens = thinking.budget_tokens.as_ref()?.as_u64()?;
    Some(ThinkingBudget { tokens: usize::try_from(tokens).ok()?, param: None })
}

/// The rule of a request for calling tools.
fn tool_choice(choice: Option<&MessagesToolChoice>) -> Result<ToolChoice, ApiError> {
    let Some(choice) = choice else { return Ok(ToolChoice::Auto) };
    match (choice.kind.as_str(), &choice.name) {
        ("auto", _) => Ok(ToolChoice::Auto),
        ("none", _) => Ok(ToolChoice::None),
        ("any", _) => Ok(ToolChoice::Required),
        ("tool", Some(name)) => Ok(ToolChoice::Function(name.clone())),
        ("tool", None) => Err(ApiError::missing("tool_choice.name")),
        (other, _) => {
            let expected = "auto, any, tool or none";
            Err(ApiError::expected("tool_choice.type", expected, &json!(other)))
        }
    }
}

fn tools(tools: Vec<MessagesTool>, ignored: &Ignored) -> Result<Vec<Tool>, ApiError> {
    let mut functions = Vec::new();
    for (index, tool) in tools.into_iter().enumerate() {
        let path = format!("tools[{index}].");
        let kind = tool.kind.as_deref().unwrap_or("custom");
        if kind != "custom" {
            check_hosted(&path, kind, HOSTED, ignored)?;
            continue;
        }
        refuse_unknown(&path, &tool.unknown, Scope::MessagesTool, ignored)?;
        let (path, description) = (format!("{path}name"), tool.description.as_deref());
        let place = (path.as_str(), "input_schema");
        let tool = function_tool(place, &tool.name, description, tool.input_schema, tool.strict)?;
        functions.push(tool);
    }
    Ok(functions)
}

fn message(role: &str, content: MessageContent) -> ChatMessage {
    let mut message = ChatMessage::new(role, "");
    message.content = Some(content);
    message
}

/// The marks in the content of a message that has all blocks.
fn marks_of(message: usize, content: &BlockContent) -> impl Iterator<Item = CacheMark> {
    let blocks = match content {
        BlockContent::Text(_) => &[],
        BlockContent::Blocks(blocks) => blocks.as_slice(),
    };
    blocks.iter().rev().enumerate().filter_map(move |(parts_left_out, block)| {
        let ttl = hints::ttl(cache_control(block))?;
        Some(CacheMark { message, parts_left_out, ttl })
    })
}

fn cache_control(block: &Block) -> Option<&Value> {
    match block {
        Block::Text { cache_control, .. }
        | Block::Image { cache_control, .. }
        | Block::ToolUse { cache_control, .. }
        | Block::ToolResult { cache_control, .. } => cache_control.as_ref(),
        Block::Thinking { .. } | Block::RedactedThinking { .. } => None,
    }
}

/// The message of a turn, without the results of calls in it.
#[derive(Default)]
struct OwnMessage {
    parts: Vec<Value>,
    calls: Vec<Value>,
    reasoning: String,
    /// The marks in it: the number of parts before each, `None` for all, and its time to live.
    marks: Vec<(Option<usize>, Duration)>,
}

impl OwnMessage {
    fn is_empty(&self) -> bool {
        self.parts.is_empty() && self.calls.is_empty() && self.reasoning.is_empty()
    }

    /// Adds the message, and its marks, to those of the conversation.
    fn push(self, role: &str, messages: &mut Vec<ChatMessage>, marks: &mut Vec<CacheMark>) {
        let Self { parts, calls, reasoning, marks: own_marks } = self;
        let (message_index, part_count) = (messages.len(), parts.len());
        marks.extend(own_marks.into_iter().map(|(before, ttl)| CacheMark {
            message: message_index,
            // Calls follow all parts.
            parts_left_out: before.map_or(0, |before| part_count - before),
            ttl,
        }));
        let mut own = message(role, message_content(parts));
        if own.content == Some(MessageContent::Text(String::new())) && !calls.is_empty() {
            own.content = None;
        }
        if !calls.is_empty() {
            own.extra.insert("tool_calls".to_owned(), Value::Array(calls));
        }
        if !reasoning.is_empty() {
            own.extra.insert("reasoning_content".to_owned(), Value::String(reasoning));
        }
        messages.push(own);
    }
}

/// Adds the messages of a turn: each result of a call is a separate message.
fn add_turn(
    messages: &mut Vec<ChatMessage>,
    marks: &mut Vec<CacheMark>,
    index: usize,
    turn: TurnMessage,
) -> Result<(), ApiError> {
    let path = format!("messages[{index}].content");
    check_length(&path, &turn.content)?;
    let role = match turn.role {
        TurnRole::User => "user",
        TurnRole::Assistant => "assistant",
        TurnRole::System => "system",
    };
    let blocks = match turn.content {
        BlockContent::Text(text) => {
            messages.push(ChatMessage::new(role, text));
            return Ok(());
        }
        BlockContent::Blocks(blocks) => blocks,
    };
    let before = messages.len();
    let mut own = OwnMessage::default();
    for (place, block) in blocks.into_iter().enumerate() {
        let misplaced = |role: &str| {
            let path = format!("{path}[{place}]");
            let message = format!("`{path}`: this type of block is only for the role `{role}`");
            ApiError::invalid(Some(&path), message)
        };
        let ttl = hints::ttl(cache_control(&block));
        let mut is_own = true;
        match block {
            Block::Text { text, .. } if text.is_empty() => {}
            Block::Text { text, .. } => own.parts.push(text_part(text)),
            Block::Image { source, .. } => own.parts.push(source.into_part()),
            Block::ToolUse { id, name, input, .. } if turn.role == TurnRole::Assistant => {
                let function = json!({"name": name, "arguments": input});
                own.calls.push(json!({"id": id, "type": "function", "function": function}));
            }
            Block::Thinking { thinking, .. } if turn.role == TurnRole::Assistant => {
                own.reasoning.push_str(&thinking);
            }
            Block::RedactedThinking { .. } if turn.role == TurnRole::Assistant => {}
            Block::ToolResult { tool_use_id, content, .. } => {
                // In a turn of the assistant, the call before a result ends a message.
                if turn.role == TurnRole::Assistant && !own.calls.is_empty() {
                    std::mem::take(&mut own).push(role, messages, marks);
                }
                is_own = false;
                let message_index = messages.len();
                marks.extend(ttl.map(|ttl| CacheMark {
                    message: message_index,
                    parts_left_out: 0,
                    ttl,
                }));
                let content = content.map_or(BlockContent::Text(String::new()), |content| *content);
                let content = text_content(&format!("{path}[{place}].content"), content)?;
                let mut result = message("tool", content);
                result.extra.insert("tool_call_id".to_owned(), Value::String(tool_use_id));
                messages.push(result);
            }
            _ => return Err(misplaced("assistant")),
        }
        if let Some(ttl) = ttl.filter(|_| is_own) {
            let before = own.calls.is_empty().then_some(own.parts.len());
            own.marks.push((before, ttl));
        }
    }
    if !own.is_empty() || messages.len() == before {
        own.push(role, messages, marks);
    }
    Ok(())
}

fn check_length(path: &str, content: &BlockContent) -> Result<(), ApiError> {
    if !content.is_too_long() {
        return Ok(());
    }
    let message = format!("`{path}`: expected at most {} blocks", crate::api::chat::MAX_PARTS);
    Err(ApiError::invalid(Some(path), message))
}

/// Content that may only have blocks of text and images.
fn text_content(path: &str, content: BlockContent) -> Result<MessageContent, ApiError> {
    check_length(path, &content)?;
    let blocks = match content {
        BlockContent::Text(text) => return Ok(MessageContent::Text(text)),
        BlockContent::Blocks(blocks) => blocks,
    };
    let mut parts = Vec::with_capacity(blocks.len());
    for (index, block) in blocks.into_iter().enumerate() {
        match block {
            Block::Text { text, .. } => parts.push(text_part(text)),
            Block::Image { source, .. } => parts.push(source.into_part()),
            _ => {
                let path = format!("{path}[{index}]");
                let message = format!("`{path}`: expected a block of type `text` or `image`");
                return Err(ApiError::invalid(Some(&path), message));
            }
        }
    }
    Ok(message_content(parts))
}

fn text_part(text: String) -> Value {
    json!({"type": "text", "text": text})
}

/// Parts as the content of a message. A single text is not a part.
fn message_content(mut parts: Vec<Value>) -> MessageContent {
    match parts.as_mut_slice() {
        [] => MessageContent::Text(String::new()),
        [only] if only["type"] == "text" => match only["text"].take() {
            Value::String(text) => MessageContent::Text(text),
            _ => MessageContent::Parts(parts),
        },
        _ => MessageContent::Parts(parts),
    }
}
