//! The handler of `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use serde_json::json;
use stolon::{ChatMessage, ChatOptions, Completion, Engine, MessageContent, Request};

use super::App;
use super::access::Tenant;
use super::body::refuse_unknown;
use super::error::ApiError;
use super::generation::{Endpoint, Piece, respond};
use super::logprobs;
use super::options::Call;
use super::receive::Received;
use crate::api::chat::{
    AnswerMessage, ChatChoice, ChatChunkChoice, ChatRequest, Content, Delta, MAX_PARTS, Message,
    Role,
};
use crate::api::logprobs::ChatLogprobs;
use crate::api::neutral::Scope;
use crate::api::reply::FinishReason;

/// The form of the choices of one call.
struct Chat {
    /// Whether log-probabilities were requested.
    logprobs: bool,
    /// Token ids of the prompt, if token ids were requested.
    prompt_ids: Option<Vec<u32>>,
}

/// The handler.
pub(super) async fn create(
    State(app): State<Arc<App>>,
    Extension(tenant): Extension<Tenant>,
    body: Received,
) -> Result<Response, ApiError> {
    let request: ChatRequest = app.parser.parse(body).await?;
    let max_tokens = max_tokens(&request)?;
    let logprobs = top_logprobs(&request)?;
    let messages = messages(request.messages)?;
    let mut call = Call::new(request.options, &app, &tenant)?;
    app.check_answers("n", call.choice_count)?;
    call.logprobs = logprobs;
    if let Some(max_tokens) = max_tokens {
        call.max_tokens = max_tokens;
    }
    let usage = app.usage_sum(call.choice_count);
    let options = ChatOptions {
        special_tokens_in_messages: app.special_tokens_in_messages,
        ..ChatOptions::default()
    };
    let mut request = Request::chat(messages).chat_options(options);
    let prompt_ids = call.prompt_ids(&app.engine, &mut request).await?;
    let chat = Chat { logprobs: logprobs.is_some(), prompt_ids };
    respond(&app, chat, call, vec![request], usage).await
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
pub(super) fn messages(messages: Vec<Message>) -> Result<Vec<ChatMessage>, ApiError> {
    if messages.is_empty() {
        let expected = "a list of at least one message";
        return Err(ApiError::expected("messages", expected, &json!([])));
    }
    let mut converted = Vec::with_capacity(messages.len());
    for (index, message) in messages.into_iter().enumerate() {
        refuse_unknown(&format!("messages[{index}]."), &message.unknown, Scope::Message)?;
        let mut chat_message = ChatMessage::new(message.role.as_str(), "");
        chat_message.content = Some(match message.content {
            Content::Text(text) => MessageContent::Text(text),
            Content::Parts(parts) if parts.len() > MAX_PARTS => {
                let path = format!("messages[{index}].content");
                let message =
                    format!("`{path}`: expected at most {MAX_PARTS} parts, got {}", parts.len());
                return Err(ApiError::invalid(Some(&path), message));
            }
            Content::Parts(parts) => {
                MessageContent::Parts(parts.iter().map(|part| json!(part)).collect())
            }
        });
        if let Some(name) = message.name {
            chat_message.extra.insert("name".to_owned(), name);
        }
        converted.push(chat_message);
    }
    Ok(converted)
}

impl Endpoint for Chat {
    const ID_PREFIX: &'static str = "chatcmpl";
    const OBJECT: &'static str = "chat.completion";
    const CHUNK_OBJECT: &'static str = "chat.completion.chunk";

    type Choice = ChatChoice;
    type ChunkChoice = ChatChunkChoice;

    fn whole(&self, engine: &Engine, index: usize, completion: &Completion) -> ChatChoice {
        let logprobs = self
            .logprobs
            .then(|| logprobs::chat(engine, logprobs::visible(engine, &completion.logprobs)));
        ChatChoice {
            index,
            message: AnswerMessage {
                role: Role::Assistant,
                content: completion.text.clone(),
                refusal: None,
            },
            logprobs,
            finish_reason: FinishReason::from(&completion.finish.reason),
            token_ids: self.prompt_ids.is_some().then(|| completion.token_ids.clone()),
        }
    }

    fn prompt_ids(&self) -> Option<Vec<u32>> {
        self.prompt_ids.clone()
    }

    fn opening(&self, index: usize) -> Option<ChatChunkChoice> {
        let delta = Delta { role: Some(Role::Assistant), content: Some(String::new()) };
        let token_ids = self.prompt_ids.is_some().then(Vec::new);
        Some(ChatChunkChoice { index, delta, logprobs: None, finish_reason: None, token_ids })
    }

    fn delta(&self, engine: &Engine, index: usize, piece: Piece<'_>) -> Option<ChatChunkChoice> {
        let logprobs = logprobs::chat(engine, logprobs::visible(engine, piece.logprob));
        let logprobs: Option<ChatLogprobs> = (!logprobs.content.is_empty()).then_some(logprobs);
        let token_ids = self.prompt_ids.is_some().then(|| piece.id.into_iter().collect());
        if piece.text.is_empty() && logprobs.is_none() && token_ids.is_none() {
            return None;
        }
        let delta = Delta { role: None, content: Some(piece.text.to_owned()) };
        Some(ChatChunkChoice { index, delta, logprobs, finish_reason: None, token_ids })
    }

    fn closing(&self, index: usize, reason: FinishReason) -> ChatChunkChoice {
        let (delta, finish_reason) = (Delta::default(), Some(reason));
        let token_ids = self.prompt_ids.is_some().then(Vec::new);
        ChatChunkChoice { index, delta, logprobs: None, finish_reason, token_ids }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::api::chat::MAX_MESSAGES;
    use crate::serve::body::parse;

    fn parse_messages(value: Value) -> Result<Vec<ChatMessage>, ApiError> {
        let body = json!({ "messages": value }).to_string();
        messages(parse::<ChatRequest>(body.as_bytes(), usize::MAX)?.messages)
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
                "messages[0].tool_calls",
            ),
            (json!(["hello"]), "messages[0]"),
            (json!([{"role": "robot", "content": "x"}]), "messages[0].role"),
            (json!([{"role": "tool", "content": "x"}]), "messages[0].role"),
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
