//! The replies of `/api/chat` and `/api/generate`: one object, or lines of JSON that add up to it.

use std::time::Duration;

use serde_json::Map;
use stolon::{AnswerPart, FinishReason, Timings};

use super::error_object;
use crate::api::chat::Role;
use crate::api::ollama::{
    ChatReply, GenerateReply, OllamaEvent, ReplyCall, ReplyEnd, ReplyFunction, ReplyMessage,
};
use crate::api::reply::Usage;
use crate::handlers::dialogue::CallIds;
use crate::wire::error::ApiError;
use crate::wire::reply::{Dialect, Piece};

/// Which of the two APIs is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Chat,
    Generate,
}

/// A reply in progress.
pub(super) struct Reply {
    form: Form,
    model: String,
    stream: bool,
    pub(super) call_ids: CallIds,
    /// What has not been sent yet.
    content: String,
    thinking: String,
    calls: Vec<ReplyCall>,
    /// The call in progress, and its arguments so far.
    open: Option<(ReplyCall, String)>,
    timings: Timings,
    end: ReplyEnd,
}

impl Reply {
    pub(super) fn new(form: Form, model: String, stream: bool) -> Self {
        Self {
            form,
            model,
            stream,
            call_ids: CallIds::default(),
            content: String::new(),
            thinking: String::new(),
            calls: Vec::new(),
            open: None,
            timings: Timings::default(),
            end: ReplyEnd::default(),
        }
    }

    /// The reply for which nothing is generated.
    pub(super) fn loaded(mut self) -> OllamaEvent {
        self.end.done_reason = "load";
        self.take(true)
    }

    /// A reply with what has not been sent yet.
    fn take(&mut self, done: bool) -> OllamaEvent {
        let content = std::mem::take(&mut self.content);
        let thinking = std::mem::take(&mut self.thinking);
        let tool_calls = std::mem::take(&mut self.calls);
        let (model, created_at) = (self.model.clone(), jiff::Timestamp::now().to_string());
        let end = done.then_some(self.end);
        match self.form {
            Form::Chat => {
                let role = Role::Assistant;
                let message = ReplyMessage { role, content, thinking, tool_calls };
                OllamaEvent::Chat(ChatReply { model, created_at, message, done, end })
            }
            Form::Generate => {
                let response = content;
                let reply = GenerateReply { model, created_at, response, thinking, done, end };
                OllamaEvent::Generate(reply)
            }
        }
    }

    fn add(&mut self, part: AnswerPart) {
        match part {
            AnswerPart::Reasoning(text) => self.thinking.push_str(&text),
            AnswerPart::Text(text) => self.content.push_str(&text),
            AnswerPart::Call { name, index } => {
                let id = self.call_ids.id("call_", index, &name);
                let function = ReplyFunction { index, name, arguments: Map::new() };
                self.open = Some((ReplyCall { id, function }, String::new()));
            }
            AnswerPart::Arguments { json, .. } => {
                if let Some((_, arguments)) = &mut self.open {
                    arguments.push_str(&json);
                }
            }
            // A call that is cut off does not come here, and clients never run it.
            AnswerPart::CallEnd { .. } => {
                if let Some((mut call, arguments)) = self.open.take() {
                    call.function.arguments = serde_json::from_str(&arguments).unwrap_or_default();
                    self.calls.push(call);
                }
            }
        }
    }
}

impl Dialect for Reply {
    type Event = OllamaEvent;
    type Whole = OllamaEvent;

    const IS_LINES: bool = true;

    fn name(_: &OllamaEvent) -> Option<&'static str> {
        None
    }

    fn begin(&mut self, _choice: usize, _usage: Usage) -> Vec<OllamaEvent> {
        Vec::new()
    }

    fn part(&mut self, _choice: usize, piece: Piece<'_>) -> Vec<OllamaEvent> {
        piece.parts.into_iter().for_each(|part| self.add(part));
        let is_empty = self.content.is_empty() && self.thinking.is_empty() && self.calls.is_empty();
        if is_empty || !self.stream { Vec::new() } else { vec![self.take(false)] }
    }

    fn timed(&mut self, _choice: usize, timings: &Timings) {
        self.timings = *timings;
    }

    fn end(&mut self, _choice: usize, reason: &FinishReason) -> Vec<OllamaEvent> {
        self.end.done_reason = match reason {
            FinishReason::Length => "length",
            _ => "stop",
        };
        Vec::new()
    }

    fn finish(&mut self, usage: Usage) -> Vec<OllamaEvent> {
        let Timings { queue, ttft, total, .. } = self.timings;
        self.end = ReplyEnd {
            total_duration: Some(nanoseconds(total)),
            load_duration: Some(0),
            prompt_eval_count: Some(usage.prompt_tokens),
            prompt_eval_duration: Some(nanoseconds(ttft.saturating_sub(queue))),
            eval_count: Some(usage.completion_tokens),
            eval_duration: Some(nanoseconds(total.saturating_sub(ttft))),
            ..self.end
        };
        if self.stream { vec![self.take(true)] } else { Vec::new() }
    }

    fn fail(&mut self, error: &ApiError) -> OllamaEvent {
        OllamaEvent::Failed(error_object(error))
    }

    fn whole(mut self) -> OllamaEvent {
        self.take(true)
    }
}

/// A time in Ollama's unit.
pub(super) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
