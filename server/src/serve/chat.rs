//! `POST /v1/chat/completions`: answers a conversation.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::response::Response;
use serde_json::{Map, Value, json};
use stolon::{ChatMessage, Completion, Engine, MessageContent, Request, TokenLogprob};

use super::App;
use super::api::{self, Api, Piece};
use super::error::ApiError;
use super::fields::Fields;
use super::logprobs;
use super::params::{Common, MAX_LOGPROBS};

/// How the choices of one call look.
struct Chat {
    logprobs: bool,
}

/// The handler.
pub(super) async fn create(
    State(app): State<Arc<App>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let mut fields = api::parse_body(body)?;
    let mut common = Common::take(&mut fields, &app)?;
    let messages = parse_messages(fields.take("messages"))?;
    common.max_tokens = max_tokens(&mut fields)?;
    let asked = fields.take_bool("logprobs")?.unwrap_or(false);
    let top = fields.take_count("top_logprobs", 0, MAX_LOGPROBS)?;
    common.logprobs = match (asked, top) {
        (true, top) => Some(top.unwrap_or(0)),
        (false, None | Some(0)) => None,
        (false, Some(_)) => {
            let message = "`top_logprobs` is allowed only with `logprobs`: true";
            return Err(ApiError::invalid(Some("top_logprobs"), message));
        }
    };
    refuse_unsupported(fields)?;
    let chat = Chat { logprobs: asked };
    api::respond(&app, chat, common, vec![Request::chat(messages)]).await
}

/// `max_completion_tokens`, or `max_tokens` by its older name.
fn max_tokens(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let new = fields.take_count("max_completion_tokens", 1, usize::MAX)?;
    let old = fields.take_count("max_tokens", 1, usize::MAX)?;
    match (new, old) {
        (Some(new), Some(old)) if new != old => Err(ApiError::invalid(
            Some("max_tokens"),
            format!(
                "`max_tokens` ({old}) and `max_completion_tokens` ({new}) contradict each other"
            ),
        )),
        _ => Ok(new.or(old)),
    }
}

/// Refuses whatever is left, except values that ask for nothing.
fn refuse_unsupported(mut fields: Fields) -> Result<(), ApiError> {
    fields.accept_only("tools", &[json!([])])?;
    fields.accept_only("tool_choice", &[json!("none"), json!("auto")])?;
    fields.accept_only("parallel_tool_calls", &[json!(true), json!(false)])?;
    fields.accept_only("response_format", &[json!({"type": "text"})])?;
    fields.accept_only("modalities", &[json!(["text"])])?;
    fields.finish()
}

fn parse_messages(value: Option<Value>) -> Result<Vec<ChatMessage>, ApiError> {
    let value = value.unwrap_or(Value::Null);
    let Some(messages) = value.as_array().filter(|messages| !messages.is_empty()) else {
        let expected = "a list of at least one message";
        return Err(ApiError::expected("messages", expected, &value));
    };
    messages.iter().enumerate().map(|(index, message)| parse_message(index, message)).collect()
}

fn parse_message(index: usize, value: &Value) -> Result<ChatMessage, ApiError> {
    let at = |part: &str| format!("messages[{index}]{part}");
    let Some(object) = value.as_object() else {
        return Err(ApiError::expected(&at(""), "an object with `role` and `content`", value));
    };
    for name in object.keys() {
        if !["role", "content", "name", "refusal"].contains(&name.as_str())
            && !object[name].is_null()
        {
            return Err(ApiError::unsupported(&at(&format!(".{name}")), None));
        }
    }
    let field = |name: &str| object.get(name).unwrap_or(&Value::Null);
    let role = match field("role").as_str() {
        Some("developer") => "system",
        Some(role @ ("system" | "user" | "assistant")) => role,
        _ => {
            let expected = "`system`, `developer`, `user` or `assistant`";
            return Err(ApiError::expected(&at(".role"), expected, field("role")));
        }
    };
    let content = content_of(field("content")).ok_or_else(|| {
        let expected = "a string or a list of parts of type `text`";
        ApiError::expected(&at(".content"), expected, field("content"))
    })?;
    let mut message = ChatMessage::new(role, "");
    message.content = Some(content);
    if let Some(name) = object.get("name").filter(|name| !name.is_null()) {
        message.extra.insert("name".to_owned(), name.clone());
    }
    Ok(message)
}

/// A message's content: a string, or parts that hold text, which the template puts together.
fn content_of(content: &Value) -> Option<MessageContent> {
    let is_text = |part: &Value| part["type"] == "text" && part["text"].is_string();
    match content {
        Value::String(text) => Some(MessageContent::Text(text.clone())),
        Value::Array(parts) if parts.iter().all(is_text) => {
            Some(MessageContent::Parts(parts.clone()))
        }
        _ => None,
    }
}

impl Chat {
    fn piece(choice: usize, delta: Value, logprobs: Value, finish_reason: Option<&str>) -> Value {
        json!({
            "index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason,
        })
    }
}

impl Api for Chat {
    const ID_PREFIX: &'static str = "chatcmpl";
    const OBJECT: &'static str = "chat.completion";
    const CHUNK_OBJECT: &'static str = "chat.completion.chunk";

    fn whole(&self, engine: &Engine, choice: usize, completion: &Completion) -> Value {
        let logprobs = match self.logprobs {
            true => logprobs::chat(engine, logprobs::visible(engine, &completion.logprobs)),
            false => Value::Null,
        };
        json!({
            "index": choice,
            "message": {"role": "assistant", "content": completion.text, "refusal": null},
            "logprobs": logprobs,
            "finish_reason": completion.finish.reason.as_str(),
        })
    }

    fn opening(
        &self,
        _: &Engine,
        choice: usize,
        _: &[Option<TokenLogprob>],
    ) -> Option<(Value, usize)> {
        let delta = json!({"role": "assistant", "content": ""});
        Some((Self::piece(choice, delta, Value::Null, None), 0))
    }

    fn delta(&self, engine: &Engine, choice: usize, piece: &Piece<'_>) -> Option<Value> {
        let mut entries = logprobs::visible(engine, piece.logprob).peekable();
        let logprobs = match entries.peek() {
            Some(_) => logprobs::chat(engine, entries),
            None => Value::Null,
        };
        let silent = piece.text.is_empty() && logprobs.is_null();
        let delta = json!({"content": piece.text});
        (!silent).then(|| Self::piece(choice, delta, logprobs, None))
    }

    fn closing(&self, choice: usize, finish_reason: &str) -> Value {
        Self::piece(choice, Value::Object(Map::new()), Value::Null, Some(finish_reason))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: contents in both forms, roles by both names.
    #[test]
    fn messages_are_read() {
        let messages = parse_messages(Some(json!([
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c", "refusal": null, "tool_calls": null},
        ])));
        let messages = messages.expect("messages");
        let roles: Vec<&str> = messages.iter().map(|message| message.role.as_str()).collect();
        assert_eq!(roles, ["system", "user", "assistant"]);
        assert_eq!(messages[0], ChatMessage::system("be brief"));
        let parts =
            vec![json!({"type": "text", "text": "a"}), json!({"type": "text", "text": "b"})];
        assert_eq!(messages[1].content, Some(MessageContent::Parts(parts)));
        assert_eq!(messages[2], ChatMessage::assistant("c"));
    }

    /// Goal: what cannot be answered is refused, and the message at fault is named.
    #[test]
    fn messages_that_cannot_be_answered() {
        for (messages, param) in [
            (json!(null), "messages"),
            (json!([]), "messages"),
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
            let error = parse_messages(Some(messages)).expect_err("refused").to_json();
            assert_eq!(error["error"]["param"], param);
        }
    }
}
