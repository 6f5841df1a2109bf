//! The handler of `POST /v1/chat/completions`.

mod reply;

use axum::response::Response;
use serde_json::{Value, json};
use stolon::{CacheMark, ChatMessage, MessageContent};

use crate::api::chat::{
    ChatRequest, Content, ContentPart, MAX_PARTS, Message, Prediction, RequestToolCall, Role,
    Tool as RequestTool,
};
use crate::api::neutral::Scope;
use crate::handlers::context::Incoming;
use crate::handlers::dialogue::{
    Dialogue, Tool, custom_tool, function_tool, is_function, tool_choice,
};
use crate::handlers::hints;
use crate::handlers::options::{ApiOptions, Call};
use crate::wire::advice::Ignored;
use crate::wire::body::{note_unknown, refuse_unknown};
use crate::wire::error::ApiError;
use reply::Chat;

/// The handler.
pub(crate) async fn create(
    Incoming { body: mut request, context }: Incoming<ChatRequest>,
) -> Result<Response, ApiError> {
    let own = ApiOptions {
        max_tokens: max_tokens(&request)?,
        logprobs: top_logprobs(&request)?,
        prediction: request.prediction.take().map(Prediction::text),
        ..ApiOptions::default()
    };
    let reasoning = request.include_reasoning.unwrap_or(true);
    let dialogue = dialogue(&mut request, &context.ignored)?;
    let own = ApiOptions { choices: request.choices, ..own };
    let call = Call::chat(context, request.options, own, dialogue).await?;
    let chat = Chat::new(&call, reasoning);
    call.respond(chat).await
}

/// The conversation and its tools.
fn dialogue(request: &mut ChatRequest, ignored: &Ignored) -> Result<Dialogue, ApiError> {
    let marks = marks(&mut request.messages);
    let messages = messages(std::mem::take(&mut request.messages), ignored)?;
    let mut dialogue = Dialogue::new(messages);
    dialogue.marks = marks;
    let choice = tool_choice(request.tool_choice.as_ref())?;
    let tools = tools(request.tools.take().unwrap_or_default(), ignored)?;
    dialogue.single_call = request.parallel_tool_calls == Some(false);
    dialogue.set_tools(tools, choice, "tool_choice")?;
    dialogue.variables = request.chat_template_kwargs.take().unwrap_or_default();
    dialogue.effort = request.reasoning_effort.take().map(|effort| ("reasoning_effort", effort));
    dialogue.add_generation_prompt = request.add_generation_prompt.unwrap_or(true);
    dialogue.continue_final_message = request.continue_final_message.unwrap_or(false);
    if dialogue.continue_final_message && request.add_generation_prompt == Some(true) {
        let message = "`continue_final_message` is not possible with `add_generation_prompt`: true";
        return Err(ApiError::invalid(Some("continue_final_message"), message));
    }
    Ok(dialogue)
}

/// Takes the marks from the parts of messages. Clients mark the last part of each request, so a part
/// must be the same with and without.
fn marks(messages: &mut [Message]) -> Vec<CacheMark> {
    let mut marks = Vec::new();
    for (message, Message { content, .. }) in messages.iter_mut().enumerate() {
        let Some(Content::Parts(parts)) = content else { continue };
        for (parts_left_out, part) in parts.iter_mut().rev().enumerate() {
            let control = match part {
                ContentPart::Text { extra, .. } => extra.shift_remove("cache_control"),
                ContentPart::ImageUrl { cache_control, .. } => cache_control.take(),
            };
            let ttl = hints::ttl(control.as_ref());
            marks.extend(ttl.map(|ttl| CacheMark { message, parts_left_out, ttl }));
        }
    }
    marks
}

/// The tools of a request.
pub(crate) fn tools(tools: Vec<RequestTool>, ignored: &Ignored) -> Result<Vec<Tool>, ApiError> {
    let mut functions = Vec::new();
    for (index, tool) in tools.into_iter().enumerate() {
        let path = format!("tools[{index}].");
        if tool.kind == "custom" {
            refuse_unknown(&path, &tool.unknown, Scope::None, ignored)?;
            let path = format!("{path}custom");
            let custom = tool.custom.ok_or_else(|| ApiError::missing(&path))?;
            refuse_unknown(&format!("{path}."), &custom.unknown, Scope::None, ignored)?;
            let (path, description) = (format!("{path}.name"), custom.description.as_deref());
            let tool =
                custom_tool(&path, &custom.name, description, custom.format.as_ref(), ignored)?;
            functions.push(tool);
            continue;
        }
        if !is_function(&path, &tool.kind, ignored)? {
            continue;
        }
        refuse_unknown(&path, &tool.unknown, Scope::None, ignored)?;
        let path = format!("{path}function");
        let function = tool.function.ok_or_else(|| ApiError::missing(&path))?;
        refuse_unknown(&format!("{path}."), &function.unknown, Scope::None, ignored)?;
        let path = format!("{path}.name");
        let description = function.description.as_deref();
        let (parameters, strict) = (function.parameters, function.strict);
        let place = (path.as_str(), "parameters");
        functions.push(function_tool(place, &function.name, description, parameters, strict)?);
    }
    Ok(functions)
}

/// The value of `max_completion_tokens`, or of `max_tokens`, its older name.
fn max_tokens(request: &ChatRequest) -> Result<Option<usize>, ApiError> {
    match (request.max_completion_tokens, request.max_tokens) {
        (Some(new), Some(old)) if new != old => Err(ApiError::invalid(
            Some("max_tokens"),
            format!(
                "`max_tokens` ({old}) and `max_completion_tokens` ({new}) contradict each other"
            ),
        )),
        (new, old) => Ok(new.or(old)),
    }
}

/// Number of most likely tokens to report; `None` reports no log-probabilities.
fn top_logprobs(request: &ChatRequest) -> Result<Option<usize>, ApiError> {
    match (request.logprobs.unwrap_or(false), request.top_logprobs) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => {
            let message = "`top_logprobs` is allowed only with `logprobs`: true";
            Err(ApiError::invalid(Some("top_logprobs"), message))
        }
    }
}

/// The conversation in the engine's types.
pub(crate) fn messages(
    messages: Vec<Message>,
    ignored: &Ignored,
) -> Result<Vec<ChatMessage>, ApiError> {
    if messages.is_empty() {
        let expected = "a list of at least one message";
        return Err(ApiError::expected("messages", expected, &json!([])));
    }
    let last = messages.len() - 1;
    messages
        .into_iter()
        .enumerate()
        .map(|(index, message)| convert(index, index == last, message, ignored))
        .collect()
}

fn convert(
    index: usize,
    is_last: bool,
    message: Message,
    ignored: &Ignored,
) -> Result<ChatMessage, ApiError> {
    note_unknown(&message.unknown, Scope::Message, ignored);
    let path = |member: &str| format!("messages[{index}].{member}");
    let calls = message.tool_calls.unwrap_or_default();
    let only_for = |role: Role, member: &str| {
        let message = format!("`{}` is only for the role `{}`", path(member), role.as_str());
        Err(ApiError::invalid(Some(&path(member)), message))
    };
    if !calls.is_empty() && message.role != Role::Assistant {
        return only_for(Role::Assistant, "tool_calls");
    }
    match (message.role, &message.tool_call_id) {
        (Role::Tool, None) => return Err(ApiError::missing(&path("tool_call_id"))),
        (Role::Tool, Some(_)) | (_, None) => {}
        (_, Some(_)) => return only_for(Role::Tool, "tool_call_id"),
    }
    let mut chat_message = ChatMessage::new(message.role.as_str(), "");
    chat_message.content = match message.content {
        None if calls.is_empty() && message.role == Role::Assistant && !is_last => {
            Some(MessageContent::Text(String::new()))
        }
        None if calls.is_empty() => return Err(ApiError::missing(&path("content"))),
        None => None,
        Some(Content::Text(text)) => Some(MessageContent::Text(text)),
        Some(Content::Parts(parts)) if parts.len() > MAX_PARTS => {
            let path = path("content");
            let message =
                format!("`{path}`: expected at most {MAX_PARTS} parts, got {}", parts.len());
            return Err(ApiError::invalid(Some(&path), message));
        }
        Some(Content::Parts(parts)) => {
            Some(MessageContent::Parts(parts.iter().map(|part| json!(part)).collect()))
        }
    };
    let extra = &mut chat_message.extra;
    let mut add = |name: &str, value: Option<Value>| {
        extra.extend(value.map(|value| (name.to_owned(), value)));
    };
    add("name", message.name);
    add("reasoning_content", message.reasoning_content.map(Value::String));
    add("tool_call_id", message.tool_call_id.map(Value::String));
    add("tool_calls", (!calls.is_empty()).then(|| calls.into_iter().map(template_call).collect()));
    Ok(chat_message)
}

/// A call as chat templates expect it.
fn template_call(call: RequestToolCall) -> Value {
    json!({"id": call.id, "type": call.kind, "function": call.function})
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::api::chat::MAX_MESSAGES;
    use crate::wire::body::parse;

    fn parse_messages(value: Value) -> Result<Vec<ChatMessage>, ApiError> {
        let body = json!({ "messages": value }).to_string();
        let request: ChatRequest = parse(body.as_bytes(), usize::MAX, &Ignored::default())?;
        messages(request.messages, &Ignored::default())
    }

    /// Goal: content may be a string or a list of parts, and `developer` is the role `system`.
    #[test]
    fn both_forms_of_content_and_both_names_of_a_role_are_accepted() {
        let messages = parse_messages(json!([
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c", "refusal": null, "tool_calls": [],
             "annotations": [], "audio": null},
        ]));
        let messages = messages.expect("messages");
        let roles: Vec<&str> = messages.iter().map(|message| message.role.as_str()).collect();
        assert_eq!(roles, ["system", "user", "assistant"]);
        assert_eq!(messages[0], ChatMessage::system("be brief"));
        let parts =
            vec![json!({"type": "text", "text": "a"}), json!({"type": "text", "text": "b"})];
        assert_eq!(messages[1].content, Some(MessageContent::Parts(parts)));
        assert_eq!(messages[2], ChatMessage::assistant("c"));
    }

    /// Goal: chat templates get the members that they may read in addition to the text: a name, and
    /// further members of a part.
    #[test]
    fn names_and_members_of_parts_reach_the_template() {
        let part = json!({"type": "text", "text": "a", "mood": {"type": "good"}});
        let messages = parse_messages(json!([{"role": "user", "content": [part], "name": "Ada"}]));
        let messages = messages.expect("messages");
        assert_eq!(messages[0].content, Some(MessageContent::Parts(vec![part])));
        assert_eq!(messages[0].extra["name"], "Ada");
    }

    /// Goal: a message that cannot be answered is refused with the path of its wrong member.
    #[test]
    fn wrong_messages_are_refused_by_their_path() {
        for (messages, param) in [
            (json!(null), "messages"),
            (json!([]), "messages"),
            (json!(vec![json!({"role": "user", "content": "x"}); MAX_MESSAGES + 1]), "messages"),
            (
                json!([{"role": "user", "content":
                        vec![json!({"type": "text", "text": "x"}); MAX_PARTS + 1]}]),
                "messages[0].content",
            ),
            (
                json!([{"role": "assistant", "content": "x", "tool_calls": [{}]}]),
                "messages[0].tool_calls[0].id",
            ),
            (
                json!([{"role": "user", "content": "x", "tool_calls": [
                    {"id": "1", "function": {"name": "f", "arguments": "{}"}}]}]),
                "messages[0].tool_calls",
            ),
            (
                json!([{"role": "user", "content": "x", "tool_call_id": "1"}]),
                "messages[0].tool_call_id",
            ),
            (json!([{"role": "assistant", "tool_calls": []}]), "messages[0].content"),
            (json!(["hello"]), "messages[0]"),
            (json!([{"role": "robot", "content": "x"}]), "messages[0].role"),
            (json!([{"role": "tool", "content": "x"}]), "messages[0].tool_call_id"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (json!([{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content"),
        ] {
            let error = parse_messages(messages).expect_err("refused").reply().error;
            assert_eq!(error.param.as_deref(), Some(param), "{error:?}");
        }
    }
}
