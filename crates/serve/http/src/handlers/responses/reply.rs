//! The reply of `/v1/responses`: a list of items, or the events that build it.

use std::sync::Arc;

use stolon::{AnswerPart, Engine, FinishReason};

use super::store::Turn;
use super::{Namespaces, output_messages};
use crate::api::chat::Role;
use crate::api::logprobs::ChatTokenLogprobs;
use crate::api::reply::Usage;
use crate::api::responses::{
    IncompleteDetails, InputTokensDetails, OutputItem, OutputPart, OutputTokensDetails, Response,
    ResponseError, ResponseEvent, ResponseSettings, ResponseUsage, Status,
};
use crate::handlers::app::App;
use crate::handlers::dialogue::CallIds;
use crate::handlers::free_text::{Customs, FreeText};
use crate::handlers::logprobs::LogprobForm;
use crate::handlers::options::Call;
use crate::wire::error::ApiError;
use crate::wire::reply::{Dialect, Piece};
use crate::wire::request_id;
use crate::wire::unix_seconds;

/// A reply in progress.
pub(super) struct ResponseReply {
    /// The response without its output.
    response: Response,
    engine: Engine,
    logprob_form: LogprobForm,
    call_ids: CallIds,
    namespaces: Namespaces,
    /// The tools with free text.
    customs: Customs,
    /// The items of the whole reply.
    output: Vec<OutputItem>,
    /// The item in progress.
    open: Option<Open>,
    /// Log-probabilities of tokens whose text has not been added yet.
    pending: Vec<ChatTokenLogprobs>,
    /// Number of the next item in the events.
    next_index: usize,
    /// Number of the next event.
    sequence: usize,
    /// Whether the answer ended because it was too long.
    is_cut: bool,
    /// The turn, if the response is to be kept.
    turn: Option<Turn>,
    app: Arc<App>,
}

/// An item in progress.
struct Open {
    kind: Kind,
    index: usize,
    id: String,
    /// Its text, or the arguments of the call.
    text: String,
    /// Log-probabilities of the tokens of the text.
    logprobs: Vec<ChatTokenLogprobs>,
    /// Finds the text in the arguments of a tool with free text.
    free_text: FreeText,
    /// The item as it is when it begins.
    item: OutputItem,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Message,
    Reasoning,
    Call,
    Custom,
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
            Self::Custom => {
                ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]
            }
        }
    }

    fn is_call(self) -> bool {
        matches!(self, Self::Call | Self::Custom)
    }

    /// The part of content that has the text; `None` for a call.
    fn part(self, text: &str, logprobs: Vec<ChatTokenLogprobs>) -> Option<OutputPart> {
        let text = text.to_owned();
        match self {
            Self::Message => {
                Some(OutputPart::OutputText { text, annotations: Vec::new(), logprobs })
            }
            Self::Reasoning => Some(OutputPart::ReasoningText { text }),
            Self::Call | Self::Custom => None,
        }
    }

    /// A new id of an item.
    fn id(self) -> String {
        let prefix = match self {
            Self::Message => "msg",
            Self::Reasoning => "rs",
            Self::Call => "fc",
            Self::Custom => "ctc",
        };
        format!("{prefix}_{}", request_id::fresh())
    }
}

impl Open {
    /// The complete item.
    fn close(self, new_status: Status) -> OutputItem {
        let part = self.kind.part(&self.text, self.logprobs);
        let mut item = self.item;
        match &mut item {
            OutputItem::Message { status, content, .. }
            | OutputItem::Reasoning { status, content, .. } => {
                *status = new_status;
                content.extend(part);
            }
            OutputItem::FunctionCall { status, arguments: text, .. }
            | OutputItem::CustomToolCall { status, input: text, .. } => {
                *status = new_status;
                *text = self.text;
            }
        }
        item
    }
}

impl ResponseReply {
    /// `settings` are the members that repeat the request. The response is kept if there is a
    /// `turn`.
    pub(super) fn new(
        call: &Call,
        settings: ResponseSettings,
        namespaces: Namespaces,
        turn: Option<Turn>,
    ) -> Self {
        let response = Response {
            id: format!("resp_{}", request_id::fresh()),
            object: "response",
            created_at: unix_seconds(),
            status: Status::InProgress,
            error: None,
            incomplete_details: None,
            model: call.model.clone(),
            output: Vec::new(),
            usage: None,
            settings,
        };
        Self {
            response,
            engine: call.engine().clone(),
            logprob_form: call.logprob_form,
            call_ids: call.call_ids,
            namespaces,
            customs: call.customs.clone(),
            output: Vec::new(),
            open: None,
            pending: Vec::new(),
            next_index: 0,
            sequence: 0,
            is_cut: false,
            turn,
            app: Arc::clone(&call.context.app),
        }
    }

    /// Keeps the complete response.
    fn keep(&mut self) {
        let Some(mut turn) = self.turn.take() else { return };
        turn.messages.extend(output_messages(&self.response.output));
        let reply = serde_json::to_value(&self.response);
        let reply = reply.expect("replies have string keys and cannot fail to serialize");
        self.app.responses.insert(self.response.id.clone(), turn, reply);
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

    /// An event about the item in progress. `logprobs` belong to the text in the event.
    fn item_event(
        &mut self,
        kind: &'static str,
        logprobs: Vec<ChatTokenLogprobs>,
        event: ResponseEvent,
    ) -> Option<ResponseEvent> {
        let open = self.open.as_ref()?;
        let has_logprobs = open.kind == Kind::Message && kind.contains("output_text");
        let event = ResponseEvent {
            item_id: Some(open.id.clone()),
            output_index: Some(open.index),
            content_index: (!open.kind.is_call()).then_some(0),
            logprobs: has_logprobs.then_some(logprobs),
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
        let (text, logprobs, free_text) = (String::new(), Vec::new(), FreeText::default());
        self.open = Some(Open { kind, index, id, text, logprobs, free_text, item });
        if let Some(part) = kind.part("", Vec::new()) {
            let event = ResponseEvent { part: Some(part), ..ResponseEvent::default() };
            events.extend(self.item_event("response.content_part.added", Vec::new(), event));
        }
        events
    }

    /// The log-probabilities of the tokens of a text of the message. A message that begins is
    /// preceded by tokens that are not part of it, such as the end of the reasoning.
    fn logprobs_of(&mut self, text: &str) -> Vec<ChatTokenLogprobs> {
        if self.open.as_ref().is_some_and(|open| open.kind == Kind::Message) {
            return std::mem::take(&mut self.pending);
        }
        let mut missing = text.chars().count();
        let mut first = self.pending.len();
        while first > 0 && missing > 0 {
            first -= 1;
            let token = &self.pending[first].chosen;
            // Tokens that are parts of a character are merged into the next token.
            if token.bytes.is_some() {
                missing = missing.saturating_sub(token.token.chars().count());
            }
        }
        let own = self.pending.split_off(first);
        self.pending.clear();
        own
    }

    /// Adds text to the message.
    fn add_text(&mut self, text: String) -> Vec<ResponseEvent> {
        let logprobs = self.logprobs_of(&text);
        self.add(Kind::Message, text, logprobs)
    }

    /// Adds text to an item of this kind, which begins if another one is open.
    fn add(
        &mut self,
        kind: Kind,
        text: String,
        logprobs: Vec<ChatTokenLogprobs>,
    ) -> Vec<ResponseEvent> {
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
            open.logprobs.extend(logprobs.iter().cloned());
        }
        let [name, _] = kind.text_event();
        let event = ResponseEvent { delta: Some(text), ..ResponseEvent::default() };
        events.extend(self.item_event(name, logprobs, event));
        events
    }

    /// Adds to the arguments of the call in progress.
    fn add_arguments(&mut self, json: String) -> Vec<ResponseEvent> {
        match &mut self.open {
            Some(open) if open.kind == Kind::Custom => {
                let text = open.free_text.push(&json);
                self.add_free_text(text)
            }
            _ => self.add(Kind::Call, json, Vec::new()),
        }
    }

    fn add_free_text(&mut self, text: String) -> Vec<ResponseEvent> {
        match text.is_empty() {
            true => Vec::new(),
            false => self.add(Kind::Custom, text, Vec::new()),
        }
    }

    /// Begins a call.
    fn start_call(&mut self, index: usize, name: String) -> Vec<ResponseEvent> {
        let call_id = self.call_ids.id("call_", index, &name);
        let kind = match self.customs.contains(&name) {
            true => Kind::Custom,
            false => Kind::Call,
        };
        let (namespace, name) = match self.namespaces.get(&name) {
            Some((namespace, name)) => (Some(namespace.clone()), name.clone()),
            None => (None, name),
        };
        let (new_id, status) = (kind.id(), Status::InProgress);
        let id = new_id.clone();
        let item = if kind == Kind::Custom {
            let input = String::new();
            OutputItem::CustomToolCall { id, status, call_id, namespace, name, input }
        } else {
            let arguments = String::new();
            OutputItem::FunctionCall { id, status, call_id, namespace, name, arguments }
        };
        self.start(kind, new_id, item)
    }

    /// Ends the item in progress.
    fn stop(&mut self, status: Status) -> Vec<ResponseEvent> {
        let Some(open) = &mut self.open else { return Vec::new() };
        let rest = match open.kind {
            Kind::Custom => open.free_text.finish(),
            _ => String::new(),
        };
        let mut events = self.add_free_text(rest);
        let Some(open) = &self.open else { return events };
        let (index, text, logprobs) = (open.index, open.text.clone(), open.logprobs.clone());
        let [_, kind] = open.kind.text_event();
        let part = open.kind.part(&text, logprobs.clone());
        let done = match &open.item {
            OutputItem::FunctionCall { name, .. } => {
                let (arguments, name) = (Some(text), Some(name.clone()));
                ResponseEvent { arguments, name, ..ResponseEvent::default() }
            }
            OutputItem::CustomToolCall { .. } => {
                ResponseEvent { input: Some(text), ..ResponseEvent::default() }
            }
            _ => ResponseEvent { text: Some(text), ..ResponseEvent::default() },
        };
        events.extend(self.item_event(kind, logprobs, done));
        if part.is_some() {
            let event = ResponseEvent { part, ..ResponseEvent::default() };
            events.extend(self.item_event("response.content_part.done", Vec::new(), event));
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
        if !matches!(part, AnswerPart::Text(_)) {
            self.pending.clear();
        }
        match part {
            AnswerPart::Reasoning(text) => self.add(Kind::Reasoning, text, Vec::new()),
            AnswerPart::Text(text) => self.add_text(text),
            AnswerPart::Call { index, name } => self.start_call(index, name),
            AnswerPart::Arguments { json, .. } => self.add_arguments(json),
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
        let logprob = piece.logprob.map(|entry| self.logprob_form.chat(&self.engine, entry));
        self.pending.extend(logprob);
        piece.parts.into_iter().flat_map(|part| self.add_part(part)).collect()
    }

    fn end(&mut self, _choice: usize, reason: &FinishReason) -> Vec<ResponseEvent> {
        // A complete call has ended before.
        let is_call = self.open.as_ref().is_some_and(|open| open.kind.is_call());
        self.is_cut = match reason {
            FinishReason::Length => true,
            FinishReason::Repetition => is_call,
            _ => false,
        };
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
            output_tokens_details: OutputTokensDetails {
                reasoning_tokens: usage.reasoning_tokens(),
            },
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
        self.keep();
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
