//! The handlers of `/v1/responses`.

mod reply;
mod store;

use std::collections::HashMap;
use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use axum::{Extension, Json};
use serde_json::{Value, json};
use stolon::{ChatMessage, MessageContent};

use crate::api::chat::MAX_MESSAGES;
use crate::api::images::image_part;
use crate::api::neutral::Scope;
use crate::api::responses::{
    Input, InputContent, InputItem, InputMessage, InputPart, InputRole, OutputItem,
    ResponseDeleted, ResponseSettings, ResponsesRequest, ResponsesTool, SettingsFormat,
    SettingsFunction, SettingsReasoning, SettingsText, SettingsTool, TypedItem,
};
use crate::guard::access::Caller;
use crate::handlers::context::{Incoming, RequestContext};
use crate::handlers::dialogue::{
    Dialogue, Tool, custom_tool, function_tool, is_function, tool_choice,
};
use crate::handlers::options::{ApiOptions, Call};
use crate::wire::advice::Ignored;
use crate::wire::body::{brief, refuse_unknown};
use crate::wire::error::ApiError;
use crate::wire::history;
use crate::wire::parts::PathId;
use reply::ResponseReply;
pub(crate) use store::ResponseStore;
use store::{StoredResponse, Turn};

/// The part of a reply that can be requested in addition.
const LOGPROBS: &str = "message.output_text.logprobs";

/// The handler.
pub(crate) async fn create(
    Incoming { body: mut request, context }: Incoming<ResponsesRequest>,
) -> Result<Response, ApiError> {
    let mut settings = settings(&request);
    let previous = previous(&request, &context)?;
    let (mut dialogue, namespaces) = dialogue(&mut request, &context.ignored)?;
    let first = usize::from(settings.instructions.is_some());
    let turn = keep(request.store, &context, previous, &mut dialogue.messages, first);
    settings.store = turn.is_some();
    let text = request.text.unwrap_or_default();
    if text.verbosity.is_some_and(|verbosity| verbosity != "medium") {
        context.ignored.note("text.verbosity");
    }
    let own = ApiOptions {
        format: text.format.map(|format| ("text.format", format)),
        max_tokens: request.max_output_tokens,
        logprobs: top_logprobs(request.include.as_deref(), request.top_logprobs),
        ..ApiOptions::default()
    };
    let call = Call::chat(context, request.options, own, dialogue).await?;
    let reply = ResponseReply::new(&call, settings, namespaces, turn);
    call.respond(reply).await
}

/// The response that a request continues, if it continues one.
fn previous(
    request: &ResponsesRequest,
    context: &RequestContext,
) -> Result<Option<Arc<StoredResponse>>, ApiError> {
    let Some(id) = &request.previous_response_id else { return Ok(None) };
    let param = Some("previous_response_id");
    let Some(stored) = context.app.responses.get(id, &context.caller.owner) else {
        let message = format!(
            "there is no response {} (any longer): send the whole conversation as `input`",
            brief(&json!(id))
        );
        return Err(ApiError::invalid(param, message).code("previous_response_not_found"));
    };
    if stored.is_last() {
        let message = "the response continues too many others: send the conversation as `input`";
        return Err(ApiError::invalid(param, message));
    }
    Ok(Some(stored))
}

/// Puts the conversation that a request continues before its messages from the index `first`, which
/// follow the instructions. Returns the turn, if its response is to be kept.
fn keep(
    store: Option<bool>,
    context: &RequestContext,
    previous: Option<Arc<StoredResponse>>,
    messages: &mut Vec<ChatMessage>,
    first: usize,
) -> Option<Turn> {
    let is_open = context.app.responses.is_open();
    if !is_open && store == Some(true) {
        context.ignored.note("store");
    }
    let keeps = is_open && store != Some(false);
    let turn = keeps.then(|| Turn {
        owner: context.caller.owner.clone(),
        previous: previous.clone(),
        messages: messages[first..].to_vec(),
    });
    if let Some(previous) = previous {
        messages.splice(first..first, previous.conversation());
    }
    turn
}

/// The handler of `GET /v1/responses/{id}`.
pub(crate) async fn get(
    State(responses): State<ResponseStore>,
    Extension(caller): Extension<Caller>,
    PathId(id): PathId<String>,
) -> Result<Json<Value>, ApiError> {
    let stored = responses.get(&id, &caller.owner).ok_or_else(|| missing(&id))?;
    Ok(Json(stored.reply.clone()))
}

/// The handler of `DELETE /v1/responses/{id}`.
pub(crate) async fn delete(
    State(responses): State<ResponseStore>,
    Extension(caller): Extension<Caller>,
    PathId(id): PathId<String>,
) -> Result<Json<ResponseDeleted>, ApiError> {
    if !responses.delete(&id, &caller.owner) {
        return Err(missing(&id));
    }
    Ok(Json(ResponseDeleted { id, object: "response", deleted: true }))
}

/// The error for an id of no response.
fn missing(id: &str) -> ApiError {
    let message = format!("there is no response {} (any longer)", brief(&json!(id)));
    ApiError::new(StatusCode::NOT_FOUND, message)
}

/// The messages of the items of a response.
fn output_messages(output: &[OutputItem]) -> Vec<ChatMessage> {
    let mut body = json!({"input": output});
    // The items of a response are of types that are known.
    let settled = history::settle(Scope::Responses, &mut body, &Ignored::default());
    let items = settled.ok().and_then(|()| serde_json::from_value(body["input"].take()).ok());
    let mut messages = Vec::new();
    let items: Vec<InputItem> = items.unwrap_or_default();
    items.into_iter().for_each(|item| add_item(&mut messages, item));
    messages
}

/// Number of most likely tokens to report per token of a text; `None` reports no log-probabilities.
fn top_logprobs(include: Option<&[String]>, top: Option<usize>) -> Option<usize> {
    let is_included = include.is_some_and(|list| list.iter().any(|entry| entry == LOGPROBS));
    let top = top.unwrap_or(0);
    (is_included || top > 0).then_some(top)
}

/// The members of the reply that repeat the request.
fn settings(request: &ResponsesRequest) -> ResponseSettings {
    let tool = |tool: &ResponsesTool| SettingsTool {
        kind: tool.kind.clone(),
        name: tool.name.clone(),
        function: (tool.kind == "function").then(|| SettingsFunction {
            description: tool.description.clone(),
            parameters: tool.parameters.clone(),
            strict: tool.strict.unwrap_or(false),
        }),
    };
    ResponseSettings {
        instructions: request.instructions.clone(),
        max_output_tokens: request.max_output_tokens,
        top_logprobs: request.top_logprobs.unwrap_or(0),
        temperature: request.options.temperature,
        top_p: request.options.top_p,
        tools: request.tools.iter().flatten().map(tool).collect(),
        tool_choice: request.tool_choice.clone().unwrap_or_else(|| Value::from("auto")),
        parallel_tool_calls: request.parallel_tool_calls.unwrap_or(true),
        metadata: request.metadata.clone().unwrap_or_default(),
        previous_response_id: request.previous_response_id.clone(),
        store: false,
        background: false,
        truncation: "disabled",
        text: SettingsText { format: text_format(request) },
        reasoning: SettingsReasoning::default(),
    }
}

/// The form of the text, as the reply repeats it.
fn text_format(request: &ResponsesRequest) -> SettingsFormat {
    let format = request.text.as_ref().and_then(|text| text.format.as_ref());
    match format.map(|format| (format.kind.as_str(), format)) {
        Some(("json_schema", format)) => SettingsFormat::JsonSchema {
            name: format.name.clone(),
            description: format.description.clone(),
            schema: format.schema.clone(),
            strict: format.strict.unwrap_or(true),
        },
        Some(("json_object", _)) => SettingsFormat::JsonObject,
        _ => SettingsFormat::Text,
    }
}

/// The conversation and its tools, and the namespaces of those that have one.
fn dialogue(
    request: &mut ResponsesRequest,
    ignored: &Ignored,
) -> Result<(Dialogue, Namespaces), ApiError> {
    let mut messages = Vec::new();
    messages.extend(request.instructions.take().map(ChatMessage::system));
    if request.input.is_too_long() {
        let message = format!("`input`: expected at most {MAX_MESSAGES} items");
        return Err(ApiError::invalid(Some("input"), message));
    }
    let mut offered = Offered::default();
    match std::mem::replace(&mut request.input, Input::Items(Vec::new())) {
        Input::Text(text) => messages.push(ChatMessage::user(text)),
        Input::Items(items) if items.is_empty() => {
            let expected = "a string or a list of at least one item";
            return Err(ApiError::expected("input", expected, &json!([])));
        }
        Input::Items(items) => {
            for (index, item) in items.into_iter().enumerate() {
                match item {
                    InputItem::Typed(TypedItem::AdditionalTools { tools }) => {
                        offered.add_known(&format!("input[{index}].tools"), tools, ignored);
                    }
                    item => add_item(&mut messages, item),
                }
            }
        }
    }
    let mut dialogue = Dialogue::new(messages);
    if let Some(reasoning) = request.reasoning.take() {
        refuse_unknown("reasoning.", &reasoning.unknown, Scope::Reasoning, ignored)?;
        dialogue.effort = reasoning.effort.map(|effort| ("reasoning.effort", effort));
    }
    offered.add("tools", None, request.tools.take().unwrap_or_default(), ignored)?;
    dialogue.single_call = request.parallel_tool_calls == Some(false);
    dialogue.variables = request.chat_template_kwargs.take().unwrap_or_default();
    let choice = tool_choice(request.tool_choice.as_ref())?;
    dialogue.set_tools(offered.functions, choice, "tool_choice")?;
    Ok((dialogue, offered.namespaces))
}

/// The namespaces of functions that have one, by the name under which the model sees the function:
/// the namespace, and the name in it.
pub(crate) type Namespaces = HashMap<String, (String, String)>;

/// The functions that a request offers to the model.
#[derive(Default)]
struct Offered {
    functions: Vec<Tool>,
    namespaces: Namespaces,
}

impl Offered {
    /// Adds the tools of an item. Those that are not understood are noted and left out, because the
    /// item belongs to the history.
    fn add_known(&mut self, path: &str, tools: Vec<Value>, ignored: &Ignored) {
        for (index, tool) in tools.into_iter().enumerate() {
            let path = format!("{path}[{index}]");
            let tool = serde_json::from_value(tool).ok();
            let added = tool.map(|tool| self.add(&path, None, vec![tool], ignored));
            if !matches!(added, Some(Ok(()))) {
                ignored.note("input.additional_tools");
            }
        }
    }

    /// Adds the tools of the list at `path`, which belongs to a namespace or to the request.
    fn add(
        &mut self,
        path: &str,
        namespace: Option<&str>,
        tools: Vec<ResponsesTool>,
        ignored: &Ignored,
    ) -> Result<(), ApiError> {
        for (index, tool) in tools.into_iter().enumerate() {
            let path = format!("{path}[{index}].");
            if tool.kind == "namespace" && namespace.is_none() {
                let name = tool.name.ok_or_else(|| ApiError::missing(&format!("{path}name")))?;
                let inner = tool.tools.unwrap_or_default();
                self.add(&format!("{path}tools"), Some(&name), inner, ignored)?;
                continue;
            }
            let is_custom = tool.kind == "custom";
            if !is_custom && !is_function(&path, &tool.kind, ignored)? {
                continue;
            }
            refuse_unknown(&path, &tool.unknown, Scope::ResponsesTool, ignored)?;
            if !is_custom && tool.format.is_some() {
                return Err(ApiError::unsupported(&format!("{path}format"), None));
            }
            let path = format!("{path}name");
            let name = tool.name.ok_or_else(|| ApiError::missing(&path))?;
            let shown = shown_name(namespace, &name);
            let (place, description) = ((path.as_str(), "parameters"), tool.description.as_deref());
            self.functions.push(match is_custom {
                true => custom_tool(&path, &shown, description, tool.format.as_ref(), ignored)?,
                false => function_tool(place, &shown, description, tool.parameters, tool.strict)?,
            });
            if let Some(namespace) = namespace {
                self.namespaces.insert(shown, (namespace.to_owned(), name));
            }
        }
        Ok(())
    }
}

/// The name under which the model sees a function. It includes the namespace, because functions of
/// different namespaces may have the same name.
fn shown_name(namespace: Option<&str>, name: &str) -> String {
    match namespace {
        Some(namespace) => format!("{namespace}.{name}"),
        None => name.to_owned(),
    }
}

/// Adds an item to the conversation. Reasoning, text and calls that follow one another are one
/// message of the assistant, as the model wrote them.
fn add_item(messages: &mut Vec<ChatMessage>, item: InputItem) {
    match item {
        InputItem::Message(message) | InputItem::Typed(TypedItem::Message(message)) => {
            add_message(messages, message);
        }
        InputItem::Typed(TypedItem::FunctionCall { call_id, namespace, name, arguments }) => {
            let name = shown_name(namespace.as_deref(), &name);
            let function = json!({"name": name, "arguments": arguments});
            let call = json!({"id": call_id, "type": "function", "function": function});
            let message = last_of_assistant(messages);
            let calls = message.extra.entry("tool_calls").or_insert_with(|| json!([]));
            if let Value::Array(calls) = calls {
                calls.push(call);
            }
        }
        InputItem::Typed(TypedItem::FunctionCallOutput { call_id, output }) => {
            let mut message = ChatMessage::new("tool", "");
            message.content = Some(content(output));
            message.extra.insert("tool_call_id".to_owned(), Value::String(call_id));
            messages.push(message);
        }
        InputItem::Typed(TypedItem::Omitted | TypedItem::AdditionalTools { .. }) => {}
        InputItem::Typed(TypedItem::Reasoning { content }) => {
            let parts = content.unwrap_or_default().into_iter();
            let texts: Vec<String> = parts.flat_map(InputPart::into_text).collect();
            let reasoning = texts.join("\n");
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
    let mut added = match message.role {
        InputRole::User => ChatMessage::user(""),
        InputRole::System => ChatMessage::system(""),
        InputRole::Assistant => match messages.pop() {
            // The reasoning of this message came before it.
            Some(last) if last.role == "assistant" && last.content.is_none() => last,
            other => {
                messages.extend(other);
                ChatMessage::assistant("")
            }
        },
    };
    added.content = Some(content(message.content));
    messages.push(added);
}

/// The last message if it is the assistant's, or else a new message of the assistant.
fn last_of_assistant(messages: &mut Vec<ChatMessage>) -> &mut ChatMessage {
    if messages.last().is_none_or(|message| message.role != "assistant") {
        let mut message = ChatMessage::assistant("");
        message.content = None;
        messages.push(message);
    }
    let last = messages.len() - 1;
    &mut messages[last]
}

/// The content of a message. Texts are joined, unless there are images between them.
fn content(content: InputContent) -> MessageContent {
    let parts = match content {
        InputContent::Text(text) => return MessageContent::Text(text),
        InputContent::Parts(parts) => parts,
    };
    let parts: Vec<Result<String, String>> = parts.into_iter().map(InputPart::into_text).collect();
    if parts.iter().all(Result::is_ok) {
        return MessageContent::Text(parts.into_iter().flatten().collect::<Vec<_>>().join("\n"));
    }
    let part = |part: Result<String, String>| match part {
        Ok(text) => json!({"type": "text", "text": text}),
        Err(url) => image_part(&url),
    };
    MessageContent::Parts(parts.into_iter().map(part).collect())
}
