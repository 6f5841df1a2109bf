//! The handler of `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use serde_json::{Value, json};
use stolon::{AnswerPart, ChatMessage, Engine, MessageContent, ToolCallFormat};

use super::App;
use super::access::Caller;
use super::advice::Ignored;
use super::body::refuse_unknown;
use super::choices::{self, ChoiceEvent, Envelope, Names};
use super::dialogue::{Dialogue, Tool, call_id, function_tool, is_function, tool_choice};
use super::error::ApiError;
use super::logprobs;
use super::options::Call;
use super::receive::Received;
use super::reply::{self, Dialect, Piece};
use crate::api::chat::{
    AnswerMessage, CalledFunction, ChatChoice, ChatChunkChoice, ChatCompletion, ChatRequest,
    Content, Delta, FunctionDelta, FunctionType, MAX_PARTS, Message, ReplyToolCall,
    RequestToolCall, Role, Tool as RequestTool, ToolCallDelta,
};
use crate::api::logprobs::ChatLogprobs;
use crate::api::neutral::Scope;
use crate::api::reply::{FinishReason, Usage};

/// The names in replies.
const NAMES: Names =
    Names { id: "chatcmpl", whole: "chat.completion", piece: "chat.completion.chunk" };

/// The reply to one call.
struct Chat {
    engine: Engine,
    envelope: Envelope,
    /// Whether the reply has the reasoning.
    reasoning: bool,
    /// How the model calls tools.
    format: Option<ToolCallFormat>,
    /// Whether token ids were requested.
    has_ids: bool,
    choices: Vec<Growing>,
}

/// The handler.
pub(super) async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: Received,
) -> Result<Response, ApiError> {
    let ignored = body.ignored.clone();
    let mut request: ChatRequest = app.parser.parse(body).await?;
    let max_tokens = max_tokens(&request)?;
    let logprobs = top_logprobs(&request)?;
    let reasoning = request.include_reasoning.unwrap_or(true);
    let dialogue = dialogue(&mut request, &ignored)?;
    let mut call = Call::new(request.options, &app, &caller, &ignored)?;
    app.check_answers("n", call.choice_count)?;
    call.logprobs = logprobs;
    if let Some(max_tokens) = max_tokens {
        call.max_tokens = max_tokens;
    }
    let (mut request, format) = dialogue.prepare(&app, call.grammar.take(), &ignored).await?;
    call.join_session(std::slice::from_mut(&mut request))?;
    call.admit(&app.engine, std::slice::from_mut(&mut request)).await?;
    let prompt_ids = call.prompt_ids(&app.engine, &mut request).await?;
    let chat = Chat { reasoning, ..Chat::new(&app, &call, format.tool_calls, prompt_ids) };
    let usage = app.usage_sum(call.choice_count);
    reply::respond(&app, &call, vec![request], usage, format, chat).await
}

/// The conversation and its tools.
fn dialogue(request: &mut ChatRequest, ignored: &Ignored) -> Result<Dialogue, ApiError> {
    let messages = messages(std::mem::take(&mut request.messages), ignored)?;
    let mut dialogue = Dialogue::new(messages);
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

/// The tools of a request.
fn tools(tools: Vec<RequestTool>, ignored: &Ignored) -> Result<Vec<Tool>, ApiError> {
    let mut functions = Vec::new();
    for (index, tool) in tools.into_iter().enumerate() {
        let path = format!("tools[{index}].");
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

/// `max_completion_tokens`, or `max_tokens`, its older name.
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

/// The conversation as the engine takes it.
pub(super) fn messages(
    messages: Vec<Message>,
    ignored: &Ignored,
) -> Result<Vec<ChatMessage>, ApiError> {
    if messages.is_empty() {
        let expected = "a list of at least one message";
        return Err(ApiError::expected("messages", expected, &json!([])));
    }
    messages
        .into_iter()
        .enumerate()
        .map(|(index, message)| convert(index, message, ignored))
        .collect()
}

fn convert(index: usize, message: Message, ignored: &Ignored) -> Result<ChatMessage, ApiError> {
    refuse_unknown(&format!("messages[{index}]."), &message.unknown, Scope::Message, ignored)?;
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

/// What is known of a choice.
#[derive(Debug)]
struct Growing {
    /// The whole choice, unless it is streamed.
    whole: ChatChoice,
    /// Number of complete calls.
    complete_calls: usize,
}

/// The reason of an answer with this number of complete calls.
fn finish_reason(reason: FinishReason, calls: usize) -> FinishReason {
    match reason {
        FinishReason::Stop if calls > 0 => FinishReason::ToolCalls,
        reason => reason,
    }
}

impl Chat {
    /// The reply to one call. `format` is what an answer consists of.
    fn new(app: &App, call: &Call, format: Option<ToolCallFormat>, ids: Option<Vec<u32>>) -> Self {
        let (has_ids, has_logprobs) = (ids.is_some(), call.logprobs.is_some());
        let growing = |index| {
            let message = AnswerMessage {
                role: Role::Assistant,
                content: Some(String::new()),
                refusal: None,
                reasoning_content: None,
                tool_calls: Vec::new(),
            };
            let whole = ChatChoice {
                index,
                message,
                logprobs: has_logprobs.then(|| ChatLogprobs { content: Vec::new(), refusal: None }),
                finish_reason: FinishReason::Stop,
                token_ids: has_ids.then(Vec::new),
            };
            Growing { whole, complete_calls: 0 }
        };
        Self {
            engine: app.engine.clone(),
            envelope: Envelope::new(NAMES, call, ids),
            reasoning: true,
            format,
            has_ids,
            choices: (0..call.choice_count).map(growing).collect(),
        }
    }

    /// A piece without log-probabilities and token ids.
    fn chunk(&self, index: usize, delta: Delta) -> ChatChunkChoice {
        let token_ids = self.has_ids.then(Vec::new);
        ChatChunkChoice { index, delta, logprobs: None, finish_reason: None, token_ids }
    }

    /// What parts of an answer add to the message of a choice.
    fn deltas(&mut self, index: usize, parts: Vec<AnswerPart>) -> Vec<Delta> {
        let mut deltas = Vec::new();
        for part in parts {
            deltas.push(match part {
                AnswerPart::Text(text) => Delta { content: Some(text), ..Delta::default() },
                AnswerPart::Reasoning(text) if self.reasoning => {
                    Delta { reasoning_content: Some(text), ..Delta::default() }
                }
                AnswerPart::Reasoning(_) => continue,
                AnswerPart::Call { index, name } => {
                    let id = Some(call_id(self.format, "call_"));
                    let kind = Some(FunctionType::Function);
                    call_delta(index, id, kind, Some(name), String::new())
                }
                AnswerPart::Arguments { index, json } => call_delta(index, None, None, None, json),
                AnswerPart::CallEnd { .. } => {
                    self.choices[index].complete_calls += 1;
                    continue;
                }
                // A client cannot be told to forget what was sent. A whole reply leaves it out.
                AnswerPart::CallBroken { index: call } if !self.envelope.stream => {
                    deltas.retain(|delta| !is_of_call(delta, call));
                    self.choices[index].whole.message.tool_calls.truncate(call);
                    continue;
                }
                AnswerPart::CallBroken { .. } => continue,
            });
        }
        deltas
    }

    /// Sends pieces, or adds them to the whole choice.
    fn emit(&mut self, pieces: Vec<ChatChunkChoice>) -> Vec<ChoiceEvent<ChatChunkChoice>> {
        if self.envelope.stream {
            return pieces.into_iter().map(|piece| self.envelope.piece(piece)).collect();
        }
        for piece in pieces {
            add(&mut self.choices[piece.index].whole, piece);
        }
        Vec::new()
    }
}

/// Adds a piece to a choice.
fn add(choice: &mut ChatChoice, piece: ChatChunkChoice) {
    let Delta { role: _, content, reasoning_content, tool_calls } = piece.delta;
    let message = &mut choice.message;
    message.content.get_or_insert_default().push_str(&content.unwrap_or_default());
    if let Some(text) = reasoning_content {
        message.reasoning_content.get_or_insert_default().push_str(&text);
    }
    for ToolCallDelta { index, id, kind: _, function } in tool_calls.into_iter().flatten() {
        if let Some(id) = id {
            let name = function.name.unwrap_or_default();
            let called = CalledFunction { name, arguments: String::new() };
            let kind = FunctionType::Function;
            message.tool_calls.push(ReplyToolCall { id, kind, function: called });
        }
        if let Some(call) = message.tool_calls.get_mut(index) {
            call.function.arguments.push_str(&function.arguments);
        }
    }
    if let (Some(all), Some(more)) = (&mut choice.logprobs, piece.logprobs) {
        all.content.extend(more.content);
    }
    if let (Some(ids), Some(more)) = (&mut choice.token_ids, piece.token_ids) {
        ids.extend(more);
    }
    choice.finish_reason = piece.finish_reason.unwrap_or(choice.finish_reason);
}

/// Whether a delta is a part of the call with this number.
fn is_of_call(delta: &Delta, call: usize) -> bool {
    delta.tool_calls.as_ref().is_some_and(|[delta]| delta.index == call)
}

fn call_delta(
    index: usize,
    id: Option<String>,
    kind: Option<FunctionType>,
    name: Option<String>,
    arguments: String,
) -> Delta {
    let function = FunctionDelta { name, arguments };
    Delta { tool_calls: Some([ToolCallDelta { index, id, kind, function }]), ..Delta::default() }
}

impl Dialect for Chat {
    type Event = ChoiceEvent<ChatChunkChoice>;
    type Whole = ChatCompletion;

    const TERMINATOR: Option<&'static str> = choices::TERMINATOR;

    fn name(_: &Self::Event) -> Option<&'static str> {
        None
    }

    fn begin(&mut self, index: usize, _usage: Usage) -> Vec<Self::Event> {
        let (role, content) = (Some(Role::Assistant), Some(String::new()));
        let piece = self.chunk(index, Delta { role, content, ..Delta::default() });
        self.emit(vec![piece])
    }

    fn part(&mut self, index: usize, piece: Piece<'_>) -> Vec<Self::Event> {
        let deltas = self.deltas(index, piece.parts);
        let mut chunks: Vec<ChatChunkChoice> =
            deltas.into_iter().map(|delta| self.chunk(index, delta)).collect();
        let logprobs = logprobs::chat(&self.engine, logprobs::visible(&self.engine, piece.logprob));
        let logprobs: Option<ChatLogprobs> = (!logprobs.content.is_empty()).then_some(logprobs);
        let needs_chunk = logprobs.is_some() || (self.has_ids && piece.id.is_some());
        if needs_chunk && chunks.is_empty() {
            let content = Some(String::new());
            chunks.push(self.chunk(index, Delta { content, ..Delta::default() }));
        }
        if let Some(first) = chunks.first_mut() {
            first.logprobs = logprobs;
            if let Some(ids) = &mut first.token_ids {
                ids.extend(piece.id);
            }
        }
        self.emit(chunks)
    }

    fn end(&mut self, index: usize, reason: &stolon::FinishReason) -> Vec<Self::Event> {
        let reason = finish_reason(reason.into(), self.choices[index].complete_calls);
        let piece = self.chunk(index, Delta::default());
        self.emit(vec![ChatChunkChoice { finish_reason: Some(reason), ..piece }])
    }

    fn finish(&mut self, usage: Usage) -> Vec<Self::Event> {
        self.envelope.finish(usage)
    }

    fn fail(&mut self, error: &ApiError) -> Self::Event {
        Envelope::fail(error)
    }

    fn whole(self) -> ChatCompletion {
        let choices = self.choices.into_iter().map(|growing| {
            let mut choice = growing.whole;
            let message = &mut choice.message;
            let text = message.content.take();
            message.content = text.filter(|text| message.tool_calls.is_empty() || !text.is_empty());
            choice
        });
        self.envelope.whole(choices.collect())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::api::chat::MAX_MESSAGES;
    use crate::body::parse;

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

    /// Goal: what chat templates may read besides the text reaches them: a name, and further
    /// members of a part.
    #[test]
    fn names_and_members_of_parts_reach_the_template() {
        let part = json!({"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}});
        let messages = parse_messages(json!([{"role": "user", "content": [part], "name": "Ada"}]));
        let messages = messages.expect("messages");
        assert_eq!(messages[0].content, Some(MessageContent::Parts(vec![part])));
        assert_eq!(messages[0].extra["name"], "Ada");
    }

    /// Goal: a message that cannot be answered is refused by the path of what is wrong in it.
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
            (
                json!([{"role": "user", "content": "x"}, {"role": "user", "content": "x", "audio": {}}]),
                "messages[1].audio",
            ),
        ] {
            let error = parse_messages(messages).expect_err("refused").reply().error;
            assert_eq!(error.param.as_deref(), Some(param), "{error:?}");
        }
    }
}
