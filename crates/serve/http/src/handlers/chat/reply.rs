//! The reply of `/v1/chat/completions`: messages, or the pieces that build them.

use stolon::{AnswerPart, Engine, TokenLogprob};

use crate::api::chat::{
    AnswerMessage, CallType, CalledFunction, CalledTool, ChatChoice, ChatChunkChoice,
    ChatCompletion, CustomDelta, Delta, FunctionDelta, ReplyToolCall, Role, ToolCallDelta,
};
use crate::api::logprobs::ChatLogprobs;
use crate::api::reply::{CutReason, FinishReason, Usage};
use crate::handlers::choices::{self, ChoiceEvent, Envelope, Names};
use crate::handlers::dialogue::CallIds;
use crate::handlers::free_text::{Customs, FreeText};
use crate::handlers::logprobs::{self, LogprobForm};
use crate::handlers::options::Call;
use crate::wire::error::ApiError;
use crate::wire::reply::{Dialect, Piece};

/// The names in replies.
const NAMES: Names = Names {
    id: "chatcmpl",
    whole: "chat.completion",
    piece: "chat.completion.chunk",
    has_prompt_logprobs: true,
};

/// The reply to one call.
pub(super) struct Chat {
    engine: Engine,
    envelope: Envelope,
    logprob_form: LogprobForm,
    /// Whether the reply has the reasoning.
    reasoning: bool,
    call_ids: CallIds,
    /// The tools with free text.
    customs: Customs,
    /// Whether token ids were requested.
    has_ids: bool,
    choices: Vec<Growing>,
}

/// The state of a choice.
#[derive(Debug)]
struct Growing {
    /// The whole choice, unless it is streamed.
    whole: ChatChoice,
    /// Number of complete calls.
    complete_calls: usize,
    /// Whether a call has begun and not ended.
    has_open_call: bool,
    /// The text of the call in progress, if it is one of a tool with free text.
    free_text: Option<FreeText>,
}

/// The finish reason of an answer. If an answer repeats itself within a call, the reason must not
/// let clients run the call.
fn finish_reason(reason: &stolon::FinishReason, choice: &Growing) -> FinishReason {
    match reason {
        stolon::FinishReason::Repetition if choice.has_open_call => FinishReason::Length,
        reason => match reason.into() {
            FinishReason::Stop if choice.complete_calls > 0 => FinishReason::ToolCalls,
            reason => reason,
        },
    }
}

impl Chat {
    /// The reply to one call, with or without the reasoning.
    pub(super) fn new(call: &Call, reasoning: bool) -> Self {
        let ids = call.prompt_ids.first().cloned();
        let (has_ids, has_logprobs) = (ids.is_some(), call.logprobs.is_some());
        let growing = |index| {
            let message = AnswerMessage {
                role: Role::Assistant,
                content: Some(String::new()),
                refusal: None,
                reasoning_content: None,
                reasoning: None,
                tool_calls: Vec::new(),
            };
            let whole = ChatChoice {
                index,
                message,
                logprobs: has_logprobs.then(|| ChatLogprobs { content: Vec::new(), refusal: None }),
                finish_reason: FinishReason::Stop,
                stop_reason: None,
                token_ids: has_ids.then(Vec::new),
            };
            Growing { whole, complete_calls: 0, has_open_call: false, free_text: None }
        };
        Self {
            engine: call.engine().clone(),
            logprob_form: call.logprob_form,
            envelope: Envelope::new(NAMES, call, ids),
            reasoning,
            call_ids: call.call_ids,
            customs: call.customs.clone(),
            has_ids,
            choices: (0..call.choice_count).map(growing).collect(),
        }
    }

    /// A piece without log-probabilities and token ids.
    fn chunk(&self, index: usize, delta: Delta) -> ChatChunkChoice {
        let token_ids = self.has_ids.then(Vec::new);
        ChatChunkChoice {
            index,
            delta,
            logprobs: None,
            finish_reason: None,
            stop_reason: None,
            token_ids,
        }
    }

    /// The deltas by which parts of an answer extend the message of a choice.
    fn deltas(&mut self, index: usize, parts: Vec<AnswerPart>) -> Vec<Delta> {
        let mut deltas = Vec::new();
        for part in parts {
            deltas.push(match part {
                AnswerPart::Text(text) => Delta { content: Some(text), ..Delta::default() },
                AnswerPart::Reasoning(text) if self.reasoning => {
                    let reasoning = Some(text.clone());
                    Delta { reasoning_content: Some(text), reasoning, ..Delta::default() }
                }
                AnswerPart::Reasoning(_) => continue,
                AnswerPart::Call { index: number, name } => self.begin_call(index, number, name),
                AnswerPart::Arguments { index: number, json } => {
                    match self.arguments(index, number, json) {
                        Some(delta) => delta,
                        None => continue,
                    }
                }
                AnswerPart::CallEnd { index: number } => {
                    self.choices[index].complete_calls += 1;
                    self.choices[index].has_open_call = false;
                    match self.end_free_text(index, number) {
                        Some(delta) => delta,
                        None => continue,
                    }
                }
            });
        }
        deltas
    }

    /// The beginning of a call: its number in the message, and its name.
    fn begin_call(&mut self, choice: usize, number: usize, name: String) -> Delta {
        let is_custom = self.customs.contains(&name);
        self.choices[choice].free_text = is_custom.then(FreeText::default);
        self.choices[choice].has_open_call = true;
        let id = Some(self.call_ids.id("call_", number, &name));
        let name = Some(name);
        if is_custom {
            let custom = CustomDelta { name, input: String::new() };
            return call_delta(number, id, Some(CallType::Custom), CallPart::Custom(custom));
        }
        let function = FunctionDelta { name, arguments: String::new() };
        call_delta(number, id, Some(CallType::Function), CallPart::Function(function))
    }

    /// Further arguments of a call; `None` if they add nothing to its free text.
    fn arguments(&mut self, choice: usize, number: usize, json: String) -> Option<Delta> {
        let part = match &mut self.choices[choice].free_text {
            Some(free_text) => {
                let input = Some(free_text.push(&json)).filter(|text| !text.is_empty())?;
                CallPart::Custom(CustomDelta { name: None, input })
            }
            None => CallPart::Function(FunctionDelta { name: None, arguments: json }),
        };
        Some(call_delta(number, None, None, part))
    }

    /// The free text of a call whose text is known only at its end.
    fn end_free_text(&mut self, choice: usize, number: usize) -> Option<Delta> {
        let input = self.choices[choice].free_text.take()?.finish();
        let part = CallPart::Custom(CustomDelta { name: None, input });
        (!matches!(&part, CallPart::Custom(custom) if custom.input.is_empty()))
            .then(|| call_delta(number, None, None, part))
    }

    /// Sends pieces, or adds them to the whole choice.
    fn emit(&mut self, pieces: Vec<ChatChunkChoice>) -> Vec<ChoiceEvent<ChatChunkChoice>> {
        if self.envelope.stream {
            let event = |piece: ChatChunkChoice| self.envelope.piece(piece.index, piece);
            return pieces.into_iter().map(event).collect();
        }
        for piece in pieces {
            add(&mut self.choices[piece.index].whole, piece);
        }
        Vec::new()
    }
}

/// Adds a piece to a choice.
fn add(choice: &mut ChatChoice, piece: ChatChunkChoice) {
    let Delta { role: _, content, reasoning_content, reasoning, tool_calls } = piece.delta;
    let message = &mut choice.message;
    message.content.get_or_insert_default().push_str(&content.unwrap_or_default());
    if let Some(text) = reasoning_content {
        message.reasoning_content.get_or_insert_default().push_str(&text);
    }
    if let Some(text) = reasoning {
        message.reasoning.get_or_insert_default().push_str(&text);
    }
    for delta in tool_calls.into_iter().flatten() {
        add_call(message, delta);
    }
    if let (Some(all), Some(more)) = (&mut choice.logprobs, piece.logprobs) {
        all.content.extend(more.content);
    }
    if let (Some(ids), Some(more)) = (&mut choice.token_ids, piece.token_ids) {
        ids.extend(more);
    }
    choice.finish_reason = piece.finish_reason.unwrap_or(choice.finish_reason);
    choice.stop_reason = piece.stop_reason.or(choice.stop_reason);
}

/// Adds a piece of a call to a message.
fn add_call(message: &mut AnswerMessage, delta: ToolCallDelta) {
    let ToolCallDelta { index, id, kind, function, custom } = delta;
    if let (Some(id), Some(kind)) = (id, kind) {
        let (function, custom) = (function.as_ref(), custom.as_ref());
        let function = function.map(|function| CalledFunction {
            name: function.name.clone().unwrap_or_default(),
            arguments: String::new(),
        });
        let custom = custom.map(|custom| CalledTool {
            name: custom.name.clone().unwrap_or_default(),
            input: String::new(),
        });
        message.tool_calls.push(ReplyToolCall { id, kind, function, custom });
    }
    let Some(call) = message.tool_calls.get_mut(index) else { return };
    if let (Some(called), Some(more)) = (&mut call.function, function) {
        called.arguments.push_str(&more.arguments);
    }
    if let (Some(called), Some(more)) = (&mut call.custom, custom) {
        called.input.push_str(&more.input);
    }
}

/// The addition of a piece to a call.
enum CallPart {
    Function(FunctionDelta),
    Custom(CustomDelta),
}

fn call_delta(index: usize, id: Option<String>, kind: Option<CallType>, part: CallPart) -> Delta {
    let (function, custom) = match part {
        CallPart::Function(function) => (Some(function), None),
        CallPart::Custom(custom) => (None, Some(custom)),
    };
    let call = ToolCallDelta { index, id, kind, function, custom };
    Delta { tool_calls: Some([call]), ..Delta::default() }
}

impl Dialect for Chat {
    type Event = ChoiceEvent<ChatChunkChoice>;
    type Whole = ChatCompletion;

    const TERMINATOR: Option<&'static str> = choices::TERMINATOR;

    fn name(_: &Self::Event) -> Option<&'static str> {
        None
    }

    fn begin(&mut self, index: usize, usage: Usage) -> Vec<Self::Event> {
        self.envelope.begin(index, usage);
        let (role, content) = (Some(Role::Assistant), Some(String::new()));
        let piece = self.chunk(index, Delta { role, content, ..Delta::default() });
        self.emit(vec![piece])
    }

    fn prompt_logprobs(&mut self, _index: usize, entries: &[Option<TokenLogprob>]) {
        self.envelope.prompt_logprobs = Some(logprobs::prompt(&self.engine, entries));
    }

    fn part(&mut self, index: usize, piece: Piece<'_>) -> Vec<Self::Event> {
        self.envelope.count(index, piece.id);
        let deltas = self.deltas(index, piece.parts);
        let mut chunks: Vec<ChatChunkChoice> =
            deltas.into_iter().map(|delta| self.chunk(index, delta)).collect();
        let logprobs = piece.logprob.map(|entry| {
            let content = vec![self.logprob_form.chat(&self.engine, entry)];
            ChatLogprobs { content, refusal: None }
        });
        let needs_chunk = logprobs.is_some() || (self.has_ids && piece.id.is_some());
        if needs_chunk && chunks.is_empty() {
            let content = Some(String::new());
            chunks.push(self.chunk(index, Delta { content, ..Delta::default() }));
        }
        if let Some(first) = chunks.first_mut() {
            first.logprobs = logprobs;
            if let Some(ids) = &mut first.token_ids {
                ids.extend(piece.id);
            }
        }
        self.emit(chunks)
    }

    fn end(&mut self, index: usize, reason: &stolon::FinishReason) -> Vec<Self::Event> {
        let stop_reason = CutReason::of(reason);
        let finish_reason = Some(finish_reason(reason, &self.choices[index]));
        let piece = self.chunk(index, Delta::default());
        self.emit(vec![ChatChunkChoice { finish_reason, stop_reason, ..piece }])
    }

    fn finish(&mut self, usage: Usage) -> Vec<Self::Event> {
        self.envelope.finish(usage)
    }

    fn fail(&mut self, error: &ApiError) -> Self::Event {
        Envelope::fail(error)
    }

    fn whole(self) -> ChatCompletion {
        let choices = self.choices.into_iter().map(|growing| {
            let mut choice = growing.whole;
            let message = &mut choice.message;
            let text = message.content.take();
            message.content = text.filter(|text| message.tool_calls.is_empty() || !text.is_empty());
            choice
        });
        self.envelope.whole(choices.collect())
    }
}
