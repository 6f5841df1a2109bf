//! A streamed answer of an OpenAI-compatible server, event by event.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::Value;

use super::Failure;
use super::request::{failed, shown};

/// The part of an answer that has arrived.
#[derive(Debug, Default)]
pub(super) struct Answer {
    /// The text, reasoning included.
    pub(super) text: String,
    /// Number of events with tokens.
    pub(super) token_events: usize,
    /// The token counts that the server reports.
    pub(super) usage: TokenCounts,
    /// The server has sent `[DONE]`.
    pub(super) done: bool,
    /// An event has reported the finish reason.
    finished: bool,
}

/// Numbers of tokens, as far as the server reports them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TokenCounts {
    pub(super) prompt: Option<usize>,
    pub(super) completion: Option<usize>,
    pub(super) cached: Option<usize>,
}

/// The fields of an event that matter here, of both APIs.
#[derive(Deserialize)]
struct Event<'a> {
    #[serde(borrow, default)]
    choices: Vec<Choice<'a>>,
    usage: Option<ReportedUsage>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow, default)]
    text: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    delta: Option<Delta<'a>>,
    #[serde(borrow, default)]
    finish_reason: Option<Cow<'a, str>>,
    #[serde(default)]
    token_ids: Option<Vec<u32>>,
}

#[derive(Deserialize)]
struct Delta<'a> {
    #[serde(borrow, default)]
    content: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    reasoning_content: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    reasoning: Option<Cow<'a, str>>,
    #[serde(default)]
    tool_calls: Option<Vec<Value>>,
}

#[derive(Deserialize)]
struct ReportedUsage {
    prompt_tokens: Option<usize>,
    completion_tokens: Option<usize>,
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Deserialize)]
struct PromptDetails {
    cached_tokens: Option<usize>,
}

impl Answer {
    /// Takes the data of one event. Returns whether it had tokens.
    pub(super) fn on_event(&mut self, data: &[u8]) -> Result<bool, Failure> {
        if data == b"[DONE]" {
            self.done = true;
            return Ok(false);
        }
        let event: Event<'_> = serde_json::from_slice(data).map_err(|error| {
            let text = shown(&String::from_utf8_lossy(data));
            failed("malformed event", format!("{error}: {text}"))
        })?;
        if let Some(error) = &event.error {
            return Err(failed("error in the stream", error_message(error)));
        }
        if let Some(usage) = event.usage {
            self.usage = TokenCounts {
                prompt: usage.prompt_tokens.or(self.usage.prompt),
                completion: usage.completion_tokens.or(self.usage.completion),
                cached: usage
                    .prompt_tokens_details
                    .and_then(|details| details.cached_tokens)
                    .or(self.usage.cached),
            };
        }
        let before = self.text.len();
        let mut has_tokens = false;
        for choice in event.choices {
            self.finished |= choice.finish_reason.is_some();
            has_tokens |= choice.token_ids.is_some_and(|ids| !ids.is_empty());
            self.text.push_str(choice.text.as_deref().unwrap_or_default());
            let Some(delta) = choice.delta else { continue };
            let reasoning = delta.reasoning_content.or(delta.reasoning);
            for text in [reasoning, delta.content].into_iter().flatten() {
                self.text.push_str(&text);
            }
            has_tokens |= delta.tool_calls.is_some_and(|calls| !calls.is_empty());
        }
        Ok(has_tokens || self.text.len() > before)
    }

    /// Called at the end of the stream.
    pub(super) fn check_complete(&self) -> Result<(), Failure> {
        if !self.done && !self.finished {
            let message = format!("the stream ended after {} events", self.token_events);
            return Err(failed("cut off", message));
        }
        if self.token_events == 0 {
            return Err(failed("empty answer", "the stream had no tokens"));
        }
        Ok(())
    }
}

/// The message of an error reply in OpenAI's form, or all of it.
pub(super) fn error_message(reply: &Value) -> String {
    let error = reply.get("error").unwrap_or(reply);
    let message = error.get("message").unwrap_or(error);
    shown(&message.as_str().map_or_else(|| message.to_string(), str::to_owned))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(events: &[&str]) -> Result<Answer, Failure> {
        let mut answer = Answer::default();
        for event in events {
            if answer.on_event(event.as_bytes())? {
                answer.token_events += 1;
            }
        }
        answer.check_complete()?;
        Ok(answer)
    }

    /// Goal: text, reasoning, calls and token ids count as tokens, roles and ends do not, and the
    /// last report of usage holds.
    #[test]
    fn events_with_tokens_are_counted() {
        let chat = answer(&[
            r#"{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}],"usage":null}"#,
            r#"{"choices":[{"delta":{"reasoning_content":"a"}}],"usage":{"prompt_tokens":9}}"#,
            r#"{"choices":[{"delta":{"content":"b\u00e9"}}]}"#,
            r#"{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}"#,
            r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#,
            r#"{"choices":[],"usage":{"completion_tokens":3,
                "prompt_tokens_details":{"cached_tokens":8}}}"#,
            "[DONE]",
        ]);
        let chat = chat.expect("complete");
        assert_eq!((chat.text.as_str(), chat.token_events), ("ab\u{e9}", 3));
        let usage = (chat.usage.prompt, chat.usage.completion, chat.usage.cached);
        assert_eq!(usage, (Some(9), Some(3), Some(8)));
        let ids = r#"{"choices":[{"text":"","token_ids":[5]}]}"#;
        let end = r#"{"choices":[{"text":"","finish_reason":"length"}]}"#;
        assert_eq!(answer(&[ids, end]).expect("complete").token_events, 1);
    }

    /// Goal: each way in which a stream can go wrong is a failure of a different kind.
    #[test]
    fn bad_streams_are_told_apart() {
        let token = r#"{"choices":[{"text":"a"}]}"#;
        let cases: [(&[&str], &str, &str); 6] = [
            (&[token, r#"{"choices":[{"te"#], "malformed event", "EOF"),
            (&[token, r#"{"choices":7}"#], "malformed event", "expected a sequence"),
            (&[token, r#"{"error":{"message":"no memory"}}"#], "error in the stream", "no memory"),
            (&[token], "cut off", "after 1 events"),
            (&["[DONE]"], "empty answer", "no tokens"),
            (&["\u{0}"], "malformed event", "expected value"),
        ];
        for (events, expected, text) in cases {
            match answer(events) {
                Err(Failure::Counted { kind, message }) => {
                    assert_eq!(kind, expected);
                    assert!(message.contains(text), "{message}");
                }
                other => panic!("{events:?}: {other:?}"),
            }
        }
    }
}
