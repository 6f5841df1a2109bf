//! The reply of `/v1/responses`: a list of items, or the events that build it.

use stolon::{AnswerPart, FinishReason};

use super::Namespaces;
use crate::api::chat::Role;
use crate::api::reply::Usage;
use crate::api::responses::{
    IncompleteDetails, InputTokensDetails, OutputItem, OutputPart, OutputTokensDetails, Response,
    ResponseError, ResponseEvent, ResponseSettings, ResponseUsage, Status,
};
use crate::dialogue::CallIds;
use crate::error::ApiError;
use crate::reply::{Dialect, Piece};
use crate::request_id;
use crate::unix_seconds;

/// A reply in progress.
pub(super) struct ResponseReply {
    /// The response without its output.
    response: Response,
    call_ids: CallIds,
    namespaces: Namespaces,
    /// The items of the whole reply.
    output: Vec<OutputItem>,
    /// The item in progress.
    open: Option<Open>,
    /// Number of the next item in the events.
    next_index: usize,
    /// Number of the next event.
    sequence: usize,
    /// Whether the answer ended because it was too long.
    is_cut: bool,
}

/// An item in progress.
struct Open {
    kind: Kind,
    index: usize,
    id: String,
    /// Its text, or the arguments of the call.
    text: String,
    /// The item as it is when it begins.
    item: OutputItem,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Message,
    Reasoning,
    Call,
}

impl Kind {
    /// The names of the events about its text: an addition, and the end.
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
    fn part(self, text: &str) -> Option<OutputPart> {
        let text = text.to_owned();
        match self {
            Self::Message => {
                let (annotations, logprobs) = (Vec::new(), Vec::new());
                Some(OutputPart::OutputText { text, annotations, logprobs })
            }
            Self::Reasoning => Some(OutputPart::ReasoningText { text }),
            Self::Call => None,
        }
    }

    /// A new id of an item.
    fn id(self) -> String {
        let prefix = match self {
            Self::Message => "msg",
            Self::Reasoning => "rs",
            Self::Call => "fc",
        };
        format!("{prefix}_{}", request_id::fresh())
    }
}

impl Open {
    /// The complete item.
    fn close(self, new_status: Status) -> OutputItem {
        let part = self.kind.part(&self.text);
        let mut item = self.item;
        match &mut item {
            OutputItem::Message { status, content, .. }
            | OutputItem::Reasoning { status, content, .. } => {
                *status = new_status;
                content.extend(part);
            }
            OutputItem::FunctionCall { status, arguments, .. } => {
                *status = new_status;
                *arguments = self.text;
            }
        }
        item
    }
}

impl ResponseReply {
    /// `settings` are the members that repeat the request.
    pub(super) fn new(
        model: String,
        settings: ResponseSettings,
        call_ids: CallIds,
        namespaces: Namespaces,
    ) -> Self {
        let response = Response {
            id: format!("resp_{}", request_id::fresh()),
            object: "response",
            created_at: unix_seconds(),
            status: Status::InProgress,
            error: None,
            incomplete_details: None,
            model,
            output: Vec::new(),
            usage: None,
            settings,
        };
        Self {
            response,
            call_ids,
            namespaces,
            output: Vec::new(),
            open: None,
            next_index: 0,
            sequence: 0,
            is_cut: false,
        }
    }

    /// An event with its name and number.
    fn event(&mut self, kind: &'static str, event: ResponseEvent) -> ResponseEvent {
        let sequence_number = self.sequence;
        self.sequence += 1;
        ResponseEvent { kind, sequence_number, ..event }
    }

    /// An event about the whole response.
    fn response_event(&mut self, kind: &'static str) -> ResponseEvent {
        let response = Some(Box::new(self.response.clone()));
        self.event(kind, ResponseEvent { response, ..ResponseEvent::default() })
    }

    /// An event about the item in progress.
    fn item_event(&mut self, kind: &'static str, event: ResponseEvent) -> Option<ResponseEvent> {
        let open = self.open.as_ref()?;
        let has_logprobs = open.kind == Kind::Message && kind.contains("output_text");
        let event = ResponseEvent {
            item_id: Some(open.id.clone()),
            output_index: Some(open.index),
            content_index: (open.kind != Kind::Call).then_some(0),
            logprobs: has_logprobs.then(Vec::new),
            ..event
        };
        Some(self.event(kind, event))
    }

    /// Begins an item, which has this id.
    fn start(&mut self, kind: Kind, id: String, item: OutputItem) -> Vec<ResponseEvent> {
        let mut events = self.stop(Status::Completed);
        let index = self.next_index;
        self.next_index += 1;
        let added = ResponseEvent {
            output_index: Some(index),
            item: Some(item.clone()),
            ..ResponseEvent::default()
        };
        events.push(self.event("response.output_item.added", added));
        self.open = Some(Open { kind, index, id, text: String::new(), item });
        if let Some(part) = kind.part("") {
            let event = ResponseEvent { part: Some(part), ..ResponseEvent::default() };
            events.extend(self.item_event("response.content_part.added", event));
        }
        events
    }

    /// Adds text to an item of this kind, which begins if another one is open.
    fn add(&mut self, kind: Kind, text: String) -> Vec<ResponseEvent> {
        let mut events = Vec::new();
        if self.open.as_ref().is_none_or(|open| open.kind != kind) {
            let (id, status, content) = (kind.id(), Status::InProgress, Vec::new());
            let item = match kind {
                Kind::Message => {
                    OutputItem::Message { id: id.clone(), status, role: Role::Assistant, content }
                }
                _ => OutputItem::Reasoning { id: id.clone(), status, summary: Vec::new(), content },
            };
            events = self.start(kind, id, item);
        }
        if let Some(open) = &mut self.open {
            open.text.push_str(&text);
        }
        let [name, _] = kind.text_event();
        let event = ResponseEvent { delta: Some(text), ..ResponseEvent::default() };
        events.extend(self.item_event(name, event));
        events
    }

    /// Begins a call.
    fn start_call(&mut self, index: usize, name: String) -> Vec<ResponseEvent> {
        let call_id = self.call_ids.id("call_", index, &name);
        let (namespace, name) = match self.namespaces.get(&name) {
            Some((namespace, name)) => (Some(namespace.clone()), name.clone()),
            None => (None, name),
        };
        let id = Kind::Call.id();
        let item = OutputItem::FunctionCall {
            id: id.clone(),
            status: Status::InProgress,
            call_id,
            namespace,
            name,
            arguments: String::new(),
        };
        self.start(Kind::Call, id, item)
    }

    /// Ends the item in progress.
    fn stop(&mut self, status: Status) -> Vec<ResponseEvent> {
        let Some(open) = &self.open else { return Vec::new() };
        let (index, text) = (open.index, open.text.clone());
        let [_, kind] = open.kind.text_event();
        let part = open.kind.part(&text);
        let done = match &open.item {
            OutputItem::FunctionCall { name, .. } => {
                let (arguments, name) = (Some(text), Some(name.clone()));
                ResponseEvent { arguments, name, ..ResponseEvent::default() }
            }
            _ => ResponseEvent { text: Some(text), ..ResponseEvent::default() },
        };
        let mut events = Vec::from_iter(self.item_event(kind, done));
        if part.is_some() {
            let event = ResponseEvent { part, ..ResponseEvent::default() };
            events.extend(self.item_event("response.content_part.done", event));
        }
        if let Some(open) = self.open.take() {
            let item = open.close(status);
            self.output.push(item.clone());
            let (output_index, item) = (Some(index), Some(item));
            let done = ResponseEvent { output_index, item, ..ResponseEvent::default() };
            events.push(self.event("response.output_item.done", done));
        }
        events
    }

    /// Adds a part of the answer.
    fn add_part(&mut self, part: AnswerPart) -> Vec<ResponseEvent> {
        match part {
            AnswerPart::Reasoning(text) => self.add(Kind::Reasoning, text),
            AnswerPart::Text(text) => self.add(Kind::Message, text),
            AnswerPart::Call { index, name } => self.start_call(index, name),
            AnswerPart::Arguments { json, .. } => self.add(Kind::Call, json),
            AnswerPart::CallEnd { .. } => self.stop(Status::Completed),
        }
    }
}

impl Dialect for ResponseReply {
    type Event = ResponseEvent;
    type Whole = Response;

    fn name(event: &ResponseEvent) -> Option<&'static str> {
        Some(event.kind)
    }

    fn begin(&mut self, _choice: usize, _usage: Usage) -> Vec<ResponseEvent> {
        ["response.created", "response.in_progress"].map(|kind| self.response_event(kind)).into()
    }

    fn part(&mut self, _choice: usize, piece: Piece<'_>) -> Vec<ResponseEvent> {
        piece.parts.into_iter().flat_map(|part| self.add_part(part)).collect()
    }

    fn end(&mut self, _choice: usize, reason: &FinishReason) -> Vec<ResponseEvent> {
        self.is_cut = matches!(reason, FinishReason::Length | FinishReason::Repetition);
        // A complete call has ended before.
        let is_call = self.open.as_ref().is_some_and(|open| open.kind == Kind::Call);
        self.stop(if self.is_cut || is_call { Status::Incomplete } else { Status::Completed })
    }

    fn finish(&mut self, usage: Usage) -> Vec<ResponseEvent> {
        self.response.usage = Some(ResponseUsage {
            input_tokens: usage.prompt_tokens,
            input_tokens_details: InputTokensDetails {
                cached_tokens: usage.cached_tokens(),
                image_tokens: usage.image_tokens(),
            },
            output_tokens: usage.completion_tokens,
            output_tokens_details: OutputTokensDetails::default(),
            total_tokens: usage.total_tokens,
        });
        let (name, status) = match self.is_cut {
            true => ("response.incomplete", Status::Incomplete),
            false => ("response.completed", Status::Completed),
        };
        self.response.status = status;
        self.response.incomplete_details =
            self.is_cut.then_some(IncompleteDetails { reason: "max_output_tokens" });
        self.response.output = std::mem::take(&mut self.output);
        vec![self.response_event(name)]
    }

    fn fail(&mut self, error: &ApiError) -> ResponseEvent {
        self.response.status = Status::Failed;
        let message = error.message().to_owned();
        self.response.error = Some(ResponseError { code: "server_error", message });
        self.response_event("response.failed")
    }

    fn whole(self) -> Response {
        self.response
    }
}
