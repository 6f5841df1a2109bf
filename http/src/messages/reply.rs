//! The reply of `/v1/messages`: a list of blocks, or the events that build it.

use serde_json::{Map, Value, json};
use stolon::{AnswerPart, FinishReason, ToolCallFormat};

use super::error_value;
use crate::api::reply::Usage;
use crate::dialogue::call_id;
use crate::error::ApiError;
use crate::reply::{Dialect, NamedEvent, Piece};
use crate::request_id;

/// A reply that is being made.
pub(super) struct MessageReply {
    id: String,
    model: String,
    format: Option<ToolCallFormat>,
    /// The blocks of the whole reply.
    blocks: Vec<Value>,
    /// The block that is growing.
    open: Option<Open>,
    /// Number of the next block in the events.
    next_index: usize,
    /// Number of complete calls.
    complete_calls: usize,
    usage: Usage,
    stop_reason: Value,
    stop_sequence: Value,
}

/// A block that is growing.
struct Open {
    kind: Kind,
    index: usize,
    /// Its text, or the arguments of the call.
    text: String,
    /// The block without its text.
    block: Value,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Thinking,
    ToolUse,
}

impl MessageReply {
    pub(super) fn new(model: String, format: Option<ToolCallFormat>) -> Self {
        Self {
            id: format!("msg_{}", request_id::fresh()),
            model,
            format,
            blocks: Vec::new(),
            open: None,
            next_index: 0,
            complete_calls: 0,
            usage: Usage::default(),
            stop_reason: Value::Null,
            stop_sequence: Value::Null,
        }
    }

    fn message(&self, content: Value) -> Value {
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model,
            "content": content, "stop_reason": self.stop_reason,
            "stop_sequence": self.stop_sequence, "usage": self.usage_value(),
        })
    }

    /// Tokens of the prompt are divided into those that were computed and those that were cached.
    fn usage_value(&self) -> Value {
        let Usage { prompt_tokens, completion_tokens, .. } = self.usage;
        let cached_tokens = self.usage.cached_tokens();
        json!({
            "input_tokens": prompt_tokens.saturating_sub(cached_tokens),
            "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached_tokens,
            "output_tokens": completion_tokens,
        })
    }

    /// Begins a block.
    fn start(&mut self, kind: Kind, block: Value) -> Vec<NamedEvent> {
        let mut events = self.stop();
        let index = self.next_index;
        self.next_index += 1;
        let event = json!({"index": index, "content_block": block});
        events.push(named("content_block_start", event));
        self.open = Some(Open { kind, index, text: String::new(), block });
        events
    }

    /// Adds text to a block of this kind, which begins if another one is open.
    fn add(&mut self, kind: Kind, text: &str) -> Vec<NamedEvent> {
        let mut events = Vec::new();
        if self.open.as_ref().is_none_or(|open| open.kind != kind) {
            let block = match kind {
                Kind::Text => json!({"type": "text", "text": ""}),
                _ => json!({"type": "thinking", "thinking": "", "signature": ""}),
            };
            events = self.start(kind, block);
        }
        if let Some(open) = &mut self.open {
            open.text.push_str(text);
            let delta = match kind {
                Kind::Text => json!({"type": "text_delta", "text": text}),
                Kind::Thinking => json!({"type": "thinking_delta", "thinking": text}),
                Kind::ToolUse => json!({"type": "input_json_delta", "partial_json": text}),
            };
            let event = json!({"index": open.index, "delta": delta});
            events.push(named("content_block_delta", event));
        }
        events
    }

    /// Ends the block that is growing.
    fn stop(&mut self) -> Vec<NamedEvent> {
        let Some(Open { kind, index, text, mut block }) = self.open.take() else {
            return Vec::new();
        };
        let (name, value) = match kind {
            Kind::Text => ("text", Value::String(text)),
            Kind::Thinking => ("thinking", Value::String(text)),
            // Only complete calls, which have valid arguments, are kept.
            Kind::ToolUse => {
                ("input", serde_json::from_str(&text).unwrap_or_else(|_| Map::new().into()))
            }
        };
        block[name] = value;
        self.blocks.push(block);
        vec![named("content_block_stop", json!({ "index": index }))]
    }

    /// Adds a part of the answer.
    fn add_part(&mut self, part: AnswerPart) -> Vec<NamedEvent> {
        match part {
            AnswerPart::Reasoning(text) => self.add(Kind::Thinking, &text),
            AnswerPart::Text(text) => self.add(Kind::Text, &text),
            AnswerPart::Call { name, .. } => {
                let id = call_id(self.format, "toolu_");
                let block = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
                self.start(Kind::ToolUse, block)
            }
            AnswerPart::Arguments { json, .. } => self.add(Kind::ToolUse, &json),
            AnswerPart::CallEnd { .. } => {
                self.complete_calls += 1;
                self.stop()
            }
            AnswerPart::CallBroken { .. } => {
                let events = self.stop();
                self.blocks.pop();
                events
            }
        }
    }
}

/// An event, whose type is its name.
fn named(name: &'static str, mut content: Value) -> NamedEvent {
    content["type"] = json!(name);
    NamedEvent { name, content }
}

impl Dialect for MessageReply {
    type Event = NamedEvent;
    type Whole = Value;

    fn name(event: &NamedEvent) -> Option<&'static str> {
        Some(event.name)
    }

    fn begin(&mut self, _choice: usize, usage: Usage) -> Vec<NamedEvent> {
        self.usage = usage;
        vec![named("message_start", json!({"message": self.message(json!([]))}))]
    }

    fn part(&mut self, _choice: usize, piece: Piece<'_>) -> Vec<NamedEvent> {
        piece.parts.into_iter().flat_map(|part| self.add_part(part)).collect()
    }

    fn end(&mut self, _choice: usize, reason: &FinishReason) -> Vec<NamedEvent> {
        self.stop_reason = json!(match reason {
            FinishReason::Length => "max_tokens",
            _ if self.complete_calls > 0 => "tool_use",
            FinishReason::StopString(_) => "stop_sequence",
            _ => "end_turn",
        });
        if let FinishReason::StopString(stop) = reason {
            self.stop_sequence = json!(stop);
        }
        self.stop()
    }

    fn finish(&mut self, usage: Usage) -> Vec<NamedEvent> {
        self.usage = usage;
        let delta = json!({"stop_reason": self.stop_reason, "stop_sequence": self.stop_sequence});
        let delta = json!({"delta": delta, "usage": self.usage_value()});
        vec![named("message_delta", delta), named("message_stop", json!({}))]
    }

    fn fail(&mut self, error: &ApiError) -> NamedEvent {
        NamedEvent { name: "error", content: error_value(error) }
    }

    fn whole(mut self) -> Value {
        let blocks = std::mem::take(&mut self.blocks);
        self.message(Value::Array(blocks))
    }
}
