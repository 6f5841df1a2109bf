//! The reply of `/v1/messages`: a list of blocks, or the events that build it.

use serde_json::{Map, Value};
use stolon::{AnswerPart, FinishReason, PrefixMark};

use super::error_object;
use crate::api::chat::Role;
use crate::api::messages::{
    BlockDelta, CacheCreation, MessageDelta, MessageEvent, MessageReply, MessagesUsage, ReplyBlock,
    StopReason,
};
use crate::api::reply::Usage;
use crate::handlers::dialogue::CallIds;
use crate::handlers::hints::HOUR;
use crate::handlers::options::Call;
use crate::wire::error::ApiError;
use crate::wire::reply::{Dialect, Piece};
use crate::wire::request_id;

/// A reply in progress.
pub(super) struct Messages {
    reply: MessageReply,
    call_ids: CallIds,
    /// The marked parts of the prompt.
    marks: Vec<PrefixMark>,
    /// The block in progress.
    open: Option<Open>,
    /// Number of the next block in the events.
    next_index: usize,
    /// Number of complete calls.
    complete_calls: usize,
}

/// A block in progress.
struct Open {
    kind: Kind,
    index: usize,
    /// Its text, or the arguments of the call.
    text: String,
    /// The block without its text.
    block: ReplyBlock,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Thinking,
    ToolUse,
}

impl Open {
    /// The complete block.
    fn close(self) -> ReplyBlock {
        let mut block = self.block;
        match &mut block {
            ReplyBlock::Text { text } => *text = self.text,
            ReplyBlock::Thinking { thinking, .. } => *thinking = self.text,
            // The arguments of a call that was cut off are not JSON.
            ReplyBlock::ToolUse { input, .. } => {
                *input = serde_json::from_str(&self.text).unwrap_or_else(|_| Map::new().into());
            }
        }
        block
    }
}

impl Messages {
    pub(super) fn new(call: &Call) -> Self {
        let reply = MessageReply {
            id: format!("msg_{}", request_id::fresh()),
            kind: "message",
            role: Role::Assistant,
            model: call.model.clone(),
            content: Vec::new(),
            stop_reason: None,
            stop_sequence: None,
            usage: MessagesUsage::default(),
        };
        let call_ids = call.call_ids;
        let marks = Vec::new();
        Self { reply, call_ids, marks, open: None, next_index: 0, complete_calls: 0 }
    }

    /// Begins a block.
    fn start(&mut self, kind: Kind, block: ReplyBlock) -> Vec<MessageEvent> {
        let mut events = self.stop();
        let index = self.next_index;
        self.next_index += 1;
        events.push(MessageEvent {
            kind: "content_block_start",
            index: Some(index),
            content_block: Some(block.clone()),
            ..MessageEvent::default()
        });
        self.open = Some(Open { kind, index, text: String::new(), block });
        events
    }

    /// Adds text to a block of this kind, which begins if another one is open.
    fn add(&mut self, kind: Kind, text: String) -> Vec<MessageEvent> {
        let mut events = Vec::new();
        if self.open.as_ref().is_none_or(|open| open.kind != kind) {
            let empty = String::new;
            let block = match kind {
                Kind::Text => ReplyBlock::Text { text: empty() },
                _ => ReplyBlock::Thinking { thinking: empty(), signature: empty() },
            };
            events = self.start(kind, block);
        }
        if let Some(open) = &mut self.open {
            open.text.push_str(&text);
            let delta = match kind {
                Kind::Text => BlockDelta::TextDelta { text },
                Kind::Thinking => BlockDelta::ThinkingDelta { thinking: text },
                Kind::ToolUse => BlockDelta::InputJsonDelta { partial_json: text },
            };
            events.push(MessageEvent {
                kind: "content_block_delta",
                index: Some(open.index),
                delta: Some(MessageDelta::Block(delta)),
                ..MessageEvent::default()
            });
        }
        events
    }

    /// Ends the block in progress.
    fn stop(&mut self) -> Vec<MessageEvent> {
        let Some(open) = self.open.take() else { return Vec::new() };
        let index = Some(open.index);
        self.reply.content.push(open.close());
        vec![MessageEvent { kind: "content_block_stop", index, ..MessageEvent::default() }]
    }

    /// Adds a part of the answer.
    fn add_part(&mut self, part: AnswerPart) -> Vec<MessageEvent> {
        match part {
            AnswerPart::Reasoning(text) => self.add(Kind::Thinking, text),
            AnswerPart::Text(text) => self.add(Kind::Text, text),
            AnswerPart::Call { name, index } => {
                let id = self.call_ids.id("toolu_", index, &name);
                let input = Value::Object(Map::new());
                self.start(Kind::ToolUse, ReplyBlock::ToolUse { id, name, input })
            }
            AnswerPart::Arguments { json, .. } => self.add(Kind::ToolUse, json),
            AnswerPart::CallEnd { .. } => {
                self.complete_calls += 1;
                self.stop()
            }
        }
    }
}

/// The usage in Anthropic's form, with the marked parts of the prompt in ascending order.
fn messages_usage(usage: Usage, marks: &[PrefixMark]) -> MessagesUsage {
    let cached = usage.cached_tokens();
    let (mut created, mut end) = (CacheCreation::default(), cached);
    // What is cached is not told by what was created either, if it is hidden.
    for mark in marks.iter().filter(|_| usage.prompt_tokens_details.is_some()) {
        let count = mark.len.saturating_sub(end);
        match mark.ttl >= HOUR {
            true => created.ephemeral_1h_input_tokens += count,
            false => created.ephemeral_5m_input_tokens += count,
        }
        end = end.max(mark.len);
    }
    MessagesUsage {
        input_tokens: usage.prompt_tokens.saturating_sub(end),
        cache_creation_input_tokens: end - cached,
        cache_read_input_tokens: cached,
        cache_creation: created,
        image_tokens: usage.image_tokens(),
        output_tokens: usage.completion_tokens,
    }
}

impl Dialect for Messages {
    type Event = MessageEvent;
    type Whole = MessageReply;

    fn name(event: &MessageEvent) -> Option<&'static str> {
        Some(event.kind)
    }

    fn marked(&mut self, marks: &[PrefixMark]) {
        self.marks = marks.to_vec();
    }

    fn begin(&mut self, _choice: usize, usage: Usage) -> Vec<MessageEvent> {
        self.reply.usage = messages_usage(usage, &self.marks);
        let message = Some(self.reply.clone());
        vec![MessageEvent { kind: "message_start", message, ..MessageEvent::default() }]
    }

    fn part(&mut self, _choice: usize, piece: Piece<'_>) -> Vec<MessageEvent> {
        piece.parts.into_iter().flat_map(|part| self.add_part(part)).collect()
    }

    fn end(&mut self, _choice: usize, reason: &FinishReason) -> Vec<MessageEvent> {
        let in_call = self.open.as_ref().is_some_and(|open| open.kind == Kind::ToolUse);
        self.reply.stop_reason = Some(match reason {
            FinishReason::Length => StopReason::MaxTokens,
            // The call is not complete, so clients must not run it.
            FinishReason::Repetition if in_call => StopReason::MaxTokens,
            _ if self.complete_calls > 0 => StopReason::ToolUse,
            FinishReason::StopString(_) => StopReason::StopSequence,
            _ => StopReason::EndTurn,
        });
        if let FinishReason::StopString(stop) = reason {
            self.reply.stop_sequence = Some(stop.clone());
        }
        self.stop()
    }

    fn finish(&mut self, usage: Usage) -> Vec<MessageEvent> {
        self.reply.usage = messages_usage(usage, &self.marks);
        let (stop_reason, stop_sequence) =
            (self.reply.stop_reason, self.reply.stop_sequence.clone());
        let delta = MessageEvent {
            kind: "message_delta",
            delta: Some(MessageDelta::Stop { stop_reason, stop_sequence }),
            usage: Some(self.reply.usage),
            ..MessageEvent::default()
        };
        vec![delta, MessageEvent { kind: "message_stop", ..MessageEvent::default() }]
    }

    fn fail(&mut self, error: &ApiError) -> MessageEvent {
        let error = Some(error_object(error));
        MessageEvent { kind: "error", error, ..MessageEvent::default() }
    }

    fn whole(self) -> MessageReply {
        self.reply
    }
}
