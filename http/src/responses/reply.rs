//! The reply of `/v1/responses`: a list of items, or the events that build it.

use serde_json::{Value, json};
use stolon::{AnswerPart, FinishReason, ToolCallFormat};

use super::Namespaces;
use crate::api::reply::Usage;
use crate::dialogue::call_id;
use crate::error::ApiError;
use crate::reply::{Dialect, NamedEvent, Piece};
use crate::request_id;
use crate::unix_seconds;

/// A reply that is being made.
pub(super) struct ResponseReply {
    /// The response without its output.
    response: Value,
    format: Option<ToolCallFormat>,
    namespaces: Namespaces,
    /// The items of the whole reply.
    output: Vec<Value>,
    /// The item that is growing.
    open: Option<Open>,
    /// Number of the next item in the events.
    next_index: usize,
    /// Number of the next event.
    sequence: usize,
    /// Whether the answer ended because it was too long.
    is_cut: bool,
}

/// An item that is growing.
struct Open {
    kind: Kind,
    index: usize,
    id: String,
    /// Its text, or the arguments of the call.
    text: String,
    /// The item as it is when it begins.
    item: Value,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Message,
    Reasoning,
    Call,
}

impl Kind {
    /// What the events about its text are called.
    fn text_event(self) -> [&'static str; 2] {
        match self {
            Self::Message => ["response.output_text.delta", "response.output_text.done"],
            Self::Reasoning => ["response.reasoning_text.delta", "response.reasoning_text.done"],
            Self::Call => {
                ["response.function_call_arguments.delta", "response.function_call_arguments.done"]
            }
        }
    }

    /// The part of content that has the text; `None` for a call.
    fn part(self, text: &str) -> Option<Value> {
        match self {
            Self::Message => Some(
                json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []}),
            ),
            Self::Reasoning => Some(json!({"type": "reasoning_text", "text": text})),
            Self::Call => None,
        }
    }
}

impl ResponseReply {
    /// `settings` are the members that repeat the request.
    pub(super) fn new(
        settings: Value,
        format: Option<ToolCallFormat>,
        namespaces: Namespaces,
    ) -> Self {
        let mut response = json!({
            "id": format!("resp_{}", request_id::fresh()), "object": "response",
            "created_at": unix_seconds(), "status": "in_progress", "error": null,
            "incomplete_details": null, "output": [], "usage": null,
        });
        if let (Value::Object(response), Value::Object(settings)) = (&mut response, settings) {
            response.extend(settings);
        }
        let (output, open) = (Vec::new(), None);
        Self {
            response,
            format,
            namespaces,
            output,
            open,
            next_index: 0,
            sequence: 0,
            is_cut: false,
        }
    }

    /// An event with its number.
    fn event(&mut self, name: &'static str, mut content: Value) -> NamedEvent {
        content["type"] = json!(name);
        content["sequence_number"] = json!(self.sequence);
        self.sequence += 1;
        NamedEvent { name, content }
    }

    /// An event about the item that is growing.
    fn item_event(&mut self, name: &'static str, mut content: Value) -> Option<NamedEvent> {
        let open = self.open.as_ref()?;
        content["item_id"] = json!(open.id);
        content["output_index"] = json!(open.index);
        if open.kind != Kind::Call {
            content["content_index"] = json!(0);
        }
        if open.kind == Kind::Message && name.contains("output_text") {
            content["logprobs"] = json!([]);
        }
        Some(self.event(name, content))
    }

    /// Begins an item.
    fn start(&mut self, kind: Kind, mut item: Value) -> Vec<NamedEvent> {
        let mut events = self.stop("completed");
        let prefix = match kind {
            Kind::Message => "msg",
            Kind::Reasoning => "rs",
            Kind::Call => "fc",
        };
        let id = format!("{prefix}_{}", request_id::fresh());
        item["id"] = json!(id);
        item["status"] = json!("in_progress");
        let index = self.next_index;
        self.next_index += 1;
        let added = json!({"output_index": index, "item": item});
        events.push(self.event("response.output_item.added", added));
        self.open = Some(Open { kind, index, id, text: String::new(), item });
        if let Some(part) = kind.part("") {
            events.extend(self.item_event("response.content_part.added", json!({ "part": part })));
        }
        events
    }

    /// Adds text to an item of this kind, which begins if another one is open.
    fn add(&mut self, kind: Kind, text: &str) -> Vec<NamedEvent> {
        let mut events = Vec::new();
        if self.open.as_ref().is_none_or(|open| open.kind != kind) {
            let item = match kind {
                Kind::Message => json!({"type": "message", "role": "assistant", "content": []}),
                _ => json!({"type": "reasoning", "summary": [], "content": []}),
            };
            events = self.start(kind, item);
        }
        if let Some(open) = &mut self.open {
            open.text.push_str(text);
        }
        let [name, _] = kind.text_event();
        events.extend(self.item_event(name, json!({ "delta": text })));
        events
    }

    /// Ends the item that is growing.
    fn stop(&mut self, status: &str) -> Vec<NamedEvent> {
        let Some(open) = &self.open else { return Vec::new() };
        let (kind, text) = (open.kind, open.text.clone());
        let [_, name] = kind.text_event();
        let mut events = Vec::new();
        let part = kind.part(&text);
        let done = match &part {
            Some(_) => json!({ "text": text }),
            None => json!({ "arguments": text, "name": open.item["name"] }),
        };
        events.extend(self.item_event(name, done));
        if let Some(part) = &part {
            events.extend(self.item_event("response.content_part.done", json!({ "part": part })));
        }
        if let Some(Open { index, mut item, .. }) = self.open.take() {
            item["status"] = json!(status);
            match part {
                Some(part) => item["content"] = json!([part]),
                None => item["arguments"] = json!(text),
            }
            self.output.push(item.clone());
            let done = json!({"output_index": index, "item": item});
            events.push(self.event("response.output_item.done", done));
        }
        events
    }

    /// Adds a part of the answer.
    fn add_part(&mut self, part: AnswerPart) -> Vec<NamedEvent> {
        match part {
            AnswerPart::Reasoning(text) => self.add(Kind::Reasoning, &text),
            AnswerPart::Text(text) => self.add(Kind::Message, &text),
            AnswerPart::Call { name, .. } => {
                let id = call_id(self.format, "call_");
                let mut call =
                    json!({"type": "function_call", "call_id": id, "name": name, "arguments": ""});
                if let Some((namespace, name)) = self.namespaces.get(&name) {
                    call["namespace"] = json!(namespace);
                    call["name"] = json!(name);
                }
                self.start(Kind::Call, call)
            }
            AnswerPart::Arguments { json, .. } => self.add(Kind::Call, &json),
            AnswerPart::CallEnd { .. } => self.stop("completed"),
            AnswerPart::CallBroken { .. } => {
                let events = self.stop("incomplete");
                self.output.pop();
                events
            }
        }
    }
}

impl Dialect for ResponseReply {
    type Event = NamedEvent;
    type Whole = Value;

    fn name(event: &NamedEvent) -> Option<&'static str> {
        Some(event.name)
    }

    fn begin(&mut self, _choice: usize, _usage: Usage) -> Vec<NamedEvent> {
        let response = json!({ "response": self.response });
        let created = self.event("response.created", response.clone());
        vec![created, self.event("response.in_progress", response)]
    }

    fn part(&mut self, _choice: usize, piece: Piece<'_>) -> Vec<NamedEvent> {
        piece.parts.into_iter().flat_map(|part| self.add_part(part)).collect()
    }

    fn end(&mut self, _choice: usize, reason: &FinishReason) -> Vec<NamedEvent> {
        self.is_cut = matches!(reason, FinishReason::Length);
        self.stop(if self.is_cut { "incomplete" } else { "completed" })
    }

    fn finish(&mut self, usage: Usage) -> Vec<NamedEvent> {
        self.response["usage"] = json!({
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens()},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.total_tokens,
        });
        let (name, status) = match self.is_cut {
            true => ("response.incomplete", "incomplete"),
            false => ("response.completed", "completed"),
        };
        self.response["status"] = json!(status);
        if self.is_cut {
            self.response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        self.response["output"] = Value::Array(std::mem::take(&mut self.output));
        let response = json!({ "response": self.response });
        vec![self.event(name, response)]
    }

    fn fail(&mut self, error: &ApiError) -> NamedEvent {
        self.response["status"] = json!("failed");
        self.response["error"] = json!({"code": "server_error", "message": error.message()});
        let response = json!({ "response": self.response });
        self.event("response.failed", response)
    }

    fn whole(self) -> Value {
        self.response
    }
}
