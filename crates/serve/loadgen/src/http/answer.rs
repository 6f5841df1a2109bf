//! A streamed answer of an OpenAI-compatible server, event by event.

use std::borrow::Cow;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

use super::Failure;
use super::request::{failed, shown};

/// The part of an answer that has arrived.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// The text, reasoning included.
    pub text: String,
    /// The ids of its tokens; empty if the server does not send them.
    pub token_ids: Vec<u32>,
    /// The log-probabilities of its tokens; empty if the server does not send them.
    pub logprobs: Vec<TokenLogprob>,
    /// Number of events with tokens.
    pub(super) token_events: usize,
    /// The token counts that the server reports.
    pub usage: TokenCounts,
    /// The server has sent `[DONE]`.
    pub(super) done: bool,
    /// An event has reported the finish reason.
    finished: bool,
}

/// Numbers of tokens, as far as the server reports them.
#[derive(Clone, Copy, Debug, Default)]
pub struct TokenCounts {
    /// Tokens of the prompt.
    pub prompt: Option<usize>,
    /// Tokens of the answer.
    pub completion: Option<usize>,
    /// Tokens of the prompt that came from the server's prefix cache.
    pub cached: Option<usize>,
}

/// The log-probability of a token of an answer.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct TokenLogprob {
    /// The token as text. Tokens that are a part of a character may have the same text.
    pub token: String,
    /// The natural logarithm of its probability; `None` if the server gives no number.
    pub logprob: Option<f64>,
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
    #[serde(default)]
    logprobs: Option<Logprobs>,
}

/// Log-probabilities in one of the known forms. Anything else is ignored.
#[derive(Deserialize)]
#[serde(untagged)]
enum Logprobs {
    /// In chats, and in the completions of llama.cpp.
    Content {
        content: Vec<TokenLogprob>,
    },
    /// In completions: the tokens, and the value of each.
    Lists {
        tokens: Vec<String>,
        token_logprobs: Vec<Option<f64>>,
    },
    Other(IgnoredAny),
}

impl Logprobs {
    fn into_tokens(self) -> Vec<TokenLogprob> {
        match self {
            Self::Content { content } => content,
            Self::Lists { tokens, token_logprobs } => {
                let pairs = tokens.into_iter().zip(token_logprobs);
                pairs.map(|(token, logprob)| TokenLogprob { token, logprob }).collect()
            }
            Self::Other(_) => Vec::new(),
        }
    }
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
            let ids = choice.token_ids.unwrap_or_default();
            has_tokens |= !ids.is_empty();
            self.token_ids.extend(ids);
            self.logprobs.extend(choice.logprobs.into_iter().flat_map(Logprobs::into_tokens));
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
        let completion = answer(&[ids, ids, end]).expect("complete");
        assert_eq!((completion.token_events, completion.token_ids), (2, vec![5, 5]));
    }

    /// Goal: log-probabilities are read in all forms in which servers send them, and anything else
    /// in their place is ignored.
    #[test]
    fn logprobs_are_read_in_every_form() {
        let logprobs = |form: &str| {
            let event = format!(r#"{{"choices":[{{"text":"a","logprobs":{form}}}]}}"#);
            answer(&[&event, "[DONE]"]).expect("complete").logprobs
        };
        let a = TokenLogprob { token: "a".to_owned(), logprob: Some(-0.25) };
        let unknown = TokenLogprob { token: "b".to_owned(), logprob: None };
        let chat = r#"{"content":[{"id":7,"token":"a","logprob":-0.25,"top_logprobs":[]}]}"#;
        let completion = r#"{"tokens":["a","b"],"token_logprobs":[-0.25,null],"top_logprobs":[]}"#;
        assert_eq!(logprobs(chat), std::slice::from_ref(&a));
        assert_eq!(logprobs(completion), [a, unknown]);
        for other in ["null", "7", "[]", r#"{"content":null}"#, r#"{"tokens":"a"}"#] {
            assert_eq!(logprobs(other), [], "{other}");
        }
    }

    /// Goal: each way in which a stream can go wrong is a failure of a different kind.
    #[test]
    fn bad_streams_are_told_apart() {
        let token = r#"{"choices":[{"text":"a"}]}"#;
        let cases: [(&[&str], &str, &str); 5] = [
            (&[token, r#"{"choices":[{"te"#], "malformed event", "EOF"),
            (&[token, r#"{"choices":7}"#], "malformed event", "expected a sequence"),
            (&[token, r#"{"error":{"message":"no memory"}}"#], "error in the stream", "no memory"),
            (&[token], "cut off", "after 1 events"),
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
