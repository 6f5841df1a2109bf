//! The handler of `POST /v1/responses`.

mod reply;

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use serde_json::{Value, json};
use stolon::{ChatMessage, MessageContent};

use super::App;
use super::access::Caller;
use super::dialogue::{Dialogue, Tool, function_tool, tool_choice};
use super::error::ApiError;
use super::options::Call;
use super::receive::Received;
use super::{single, structured};
use crate::api::chat::MAX_MESSAGES;
use crate::api::options::GenerationOptions;
use crate::api::responses::{
    Input, InputContent, InputItem, InputMessage, InputRole, ResponsesRequest, ResponsesTool,
    TypedItem,
};
use reply::ResponseReply;

/// The handler.
pub(super) async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: Received,
) -> Result<Response, ApiError> {
    let mut request: ResponsesRequest = app.parser.parse(body).await?;
    let mut settings = settings(&request);
    let dialogue = dialogue(&mut request)?;
    let options = GenerationOptions {
        model: request.model,
        stream: request.stream,
        temperature: request.temperature,
        top_p: request.top_p,
        ..GenerationOptions::default()
    };
    let mut call = Call::new(options, &app, &caller)?;
    if let Some(max_tokens) = request.max_output_tokens {
        call.max_tokens = max_tokens;
    }
    settings["model"] = json!(call.model);
    let content = match request.text.and_then(|text| text.format) {
        Some(format) => structured::of_format("text.format", format)?,
        None => None,
    };
    let (request, format) = dialogue.prepare(&app, content).await?;
    let reply = ResponseReply::new(settings, format.tool_calls);
    single::respond(&app, call, request, format, reply).await
}

/// The members of the reply that repeat the request.
fn settings(request: &ResponsesRequest) -> Value {
    let tool = |tool: &ResponsesTool| {
        json!({
            "type": "function", "name": tool.name, "description": tool.description,
            "parameters": tool.parameters, "strict": tool.strict.unwrap_or(false),
        })
    };
    let tools: Vec<Value> = request.tools.iter().flatten().map(tool).collect();
    json!({
        "instructions": request.instructions, "max_output_tokens": request.max_output_tokens,
        "temperature": request.temperature, "top_p": request.top_p, "tools": tools,
        "tool_choice": request.tool_choice.clone().unwrap_or(json!("auto")),
        "parallel_tool_calls": request.parallel_tool_calls.unwrap_or(true),
        "metadata": request.metadata.clone().unwrap_or_default(),
        "previous_response_id": null, "store": false, "background": false, "truncation": "disabled",
        "text": {"format": text_format(request)}, "reasoning": {"effort": null, "summary": null},
    })
}

/// The form of the text, as the reply repeats it.
fn text_format(request: &ResponsesRequest) -> Value {
    let format = request.text.as_ref().and_then(|text| text.format.as_ref());
    match format {
        Some(format) if format.kind == "json_schema" => json!({
            "type": format.kind, "name": format.name, "description": format.description,
            "schema": format.schema, "strict": format.strict.unwrap_or(true),
        }),
        Some(format) => json!({"type": format.kind}),
        None => json!({"type": "text"}),
    }
}

/// The conversation and its tools.
fn dialogue(request: &mut ResponsesRequest) -> Result<Dialogue, ApiError> {
    let mut messages = Vec::new();
    messages.extend(request.instructions.take().map(ChatMessage::system));
    if request.input.is_too_long() {
        let message = format!("`input`: expected at most {MAX_MESSAGES} items");
        return Err(ApiError::invalid(Some("input"), message));
    }
    match std::mem::replace(&mut request.input, Input::Items(Vec::new())) {
        Input::Text(text) => messages.push(ChatMessage::user(text)),
        Input::Items(items) if items.is_empty() => {
            let expected = "a string or a list of at least one item";
            return Err(ApiError::expected("input", expected, &json!([])));
        }
        Input::Items(items) => items.into_iter().for_each(|item| add_item(&mut messages, item)),
    }
    let mut dialogue = Dialogue::new(messages);
    let tools = tools(request.tools.take().unwrap_or_default())?;
    dialogue.single_call = request.parallel_tool_calls == Some(false);
    dialogue.set_tools(tools, tool_choice(request.tool_choice.as_ref())?, "tool_choice")?;
    Ok(dialogue)
}

fn tools(tools: Vec<ResponsesTool>) -> Result<Vec<Tool>, ApiError> {
    let checked = tools.into_iter().enumerate().map(|(index, tool)| {
        let path = format!("tools[{index}].name");
        let (path, description) = ((path.as_str(), "parameters"), tool.description.as_deref());
        function_tool(path, &tool.name, description, tool.parameters, tool.strict)
    });
    checked.collect()
}

/// Adds an item to the conversation. Reasoning, text and calls that follow one another are one
/// message of the assistant, as the model wrote them.
fn add_item(messages: &mut Vec<ChatMessage>, item: InputItem) {
    match item {
        InputItem::Message(message) | InputItem::Typed(TypedItem::Message(message)) => {
            add_message(messages, message);
        }
        InputItem::Typed(TypedItem::FunctionCall { call_id, name, arguments }) => {
            let function = json!({"name": name, "arguments": arguments});
            let call = json!({"id": call_id, "type": "function", "function": function});
            let message = last_of_assistant(messages);
            let calls = message.extra.entry("tool_calls").or_insert_with(|| json!([]));
            if let Value::Array(calls) = calls {
                calls.push(call);
            }
        }
        InputItem::Typed(TypedItem::FunctionCallOutput { call_id, output }) => {
            let mut message = ChatMessage::new("tool", text(output));
            message.extra.insert("tool_call_id".to_owned(), Value::String(call_id));
            messages.push(message);
        }
        InputItem::Typed(TypedItem::Reasoning { content }) => {
            let reasoning = text(InputContent::Parts(content.unwrap_or_default()));
            if !reasoning.is_empty() {
                let mut message = ChatMessage::assistant("");
                message.content = None;
                message.extra.insert("reasoning_content".to_owned(), Value::String(reasoning));
                messages.push(message);
            }
        }
    }
}

fn add_message(messages: &mut Vec<ChatMessage>, message: InputMessage) {
    let content = text(message.content);
    match message.role {
        InputRole::User => messages.push(ChatMessage::user(content)),
        InputRole::System => messages.push(ChatMessage::system(content)),
        InputRole::Assistant => match messages.last_mut() {
            // The reasoning of this message came before it.
            Some(last) if last.role == "assistant" && last.content.is_none() => {
                last.content = Some(MessageContent::Text(content));
            }
            _ => messages.push(ChatMessage::assistant(content)),
        },
    }
}

/// The last message, which becomes one of the assistant.
fn last_of_assistant(messages: &mut Vec<ChatMessage>) -> &mut ChatMessage {
    if messages.last().is_none_or(|message| message.role != "assistant") {
        let mut message = ChatMessage::assistant("");
        message.content = None;
        messages.push(message);
    }
    let last = messages.len() - 1;
    &mut messages[last]
}

fn text(content: InputContent) -> String {
    match content {
        InputContent::Text(text) => text,
        InputContent::Parts(parts) => {
            let texts: Vec<String> = parts.into_iter().map(|part| part.into_text()).collect();
            texts.join("\n")
        }
    }
}
