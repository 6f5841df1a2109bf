//! The reply of `/v1/chat/completions`: messages, or the pieces that build them.

use stolon::{AnswerPart, Engine};

use crate::App;
use crate::api::chat::{
    AnswerMessage, CalledFunction, ChatChoice, ChatChunkChoice, ChatCompletion, Delta,
    FunctionDelta, FunctionType, ReplyToolCall, Role, ToolCallDelta,
};
use crate::api::logprobs::ChatLogprobs;
use crate::api::reply::{CutReason, FinishReason, Usage};
use crate::choices::{self, ChoiceEvent, Envelope, Names};
use crate::dialogue::CallIds;
use crate::error::ApiError;
use crate::logprobs;
use crate::options::Call;
use crate::reply::{Dialect, Piece};

/// The names in replies.
const NAMES: Names =
    Names { id: "chatcmpl", whole: "chat.completion", piece: "chat.completion.chunk" };

/// The reply to one call.
pub(super) struct Chat {
    engine: Engine,
    envelope: Envelope,
    /// Whether the reply has the reasoning.
    pub(super) reasoning: bool,
    call_ids: CallIds,
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
}

/// The finish reason of an answer with this number of complete calls.
fn finish_reason(reason: FinishReason, calls: usize) -> FinishReason {
    match reason {
        FinishReason::Stop if calls > 0 => FinishReason::ToolCalls,
        reason => reason,
    }
}

impl Chat {
    /// The reply to one call. `ids` are the token ids of the prompt, if they were requested.
    pub(super) fn new(app: &App, call: &Call, call_ids: CallIds, ids: Option<Vec<u32>>) -> Self {
        let (has_ids, has_logprobs) = (ids.is_some(), call.logprobs.is_some());
        let growing = |index| {
            let message = AnswerMessage {
                role: Role::Assistant,
                content: Some(String::new()),
                refusal: None,
                reasoning_content: None,
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
            Growing { whole, complete_calls: 0 }
        };
        Self {
            engine: app.engine.clone(),
            envelope: Envelope::new(NAMES, call, ids),
            reasoning: true,
            call_ids,
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
                    Delta { reasoning_content: Some(text), ..Delta::default() }
                }
                AnswerPart::Reasoning(_) => continue,
                AnswerPart::Call { index, name } => {
                    let id = Some(self.call_ids.id("call_", index, &name));
                    let kind = Some(FunctionType::Function);
                    call_delta(index, id, kind, Some(name), String::new())
                }
                AnswerPart::Arguments { index, json } => call_delta(index, None, None, None, json),
                AnswerPart::CallEnd { .. } => {
                    self.choices[index].complete_calls += 1;
                    continue;
                }
            });
        }
        deltas
    }

    /// Sends pieces, or adds them to the whole choice.
    fn emit(&mut self, pieces: Vec<ChatChunkChoice>) -> Vec<ChoiceEvent<ChatChunkChoice>> {
        if self.envelope.stream {
            return pieces.into_iter().map(|piece| self.envelope.piece(piece)).collect();
        }
        for piece in pieces {
            add(&mut self.choices[piece.index].whole, piece);
        }
        Vec::new()
    }
}

/// Adds a piece to a choice.
fn add(choice: &mut ChatChoice, piece: ChatChunkChoice) {
    let Delta { role: _, content, reasoning_content, tool_calls } = piece.delta;
    let message = &mut choice.message;
    message.content.get_or_insert_default().push_str(&content.unwrap_or_default());
    if let Some(text) = reasoning_content {
        message.reasoning_content.get_or_insert_default().push_str(&text);
    }
    for ToolCallDelta { index, id, kind: _, function } in tool_calls.into_iter().flatten() {
        if let Some(id) = id {
            let name = function.name.unwrap_or_default();
            let called = CalledFunction { name, arguments: String::new() };
            let kind = FunctionType::Function;
            message.tool_calls.push(ReplyToolCall { id, kind, function: called });
        }
        if let Some(call) = message.tool_calls.get_mut(index) {
            call.function.arguments.push_str(&function.arguments);
        }
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

fn call_delta(
    index: usize,
    id: Option<String>,
    kind: Option<FunctionType>,
    name: Option<String>,
    arguments: String,
) -> Delta {
    let function = FunctionDelta { name, arguments };
    Delta { tool_calls: Some([ToolCallDelta { index, id, kind, function }]), ..Delta::default() }
}

impl Dialect for Chat {
    type Event = ChoiceEvent<ChatChunkChoice>;
    type Whole = ChatCompletion;

    const TERMINATOR: Option<&'static str> = choices::TERMINATOR;

    fn name(_: &Self::Event) -> Option<&'static str> {
        None
    }

    fn begin(&mut self, index: usize, _usage: Usage) -> Vec<Self::Event> {
        let (role, content) = (Some(Role::Assistant), Some(String::new()));
        let piece = self.chunk(index, Delta { role, content, ..Delta::default() });
        self.emit(vec![piece])
    }

    fn part(&mut self, index: usize, piece: Piece<'_>) -> Vec<Self::Event> {
        let deltas = self.deltas(index, piece.parts);
        let mut chunks: Vec<ChatChunkChoice> =
            deltas.into_iter().map(|delta| self.chunk(index, delta)).collect();
        let logprobs = logprobs::chat(&self.engine, piece.logprob.into_iter());
        let logprobs: Option<ChatLogprobs> = (!logprobs.content.is_empty()).then_some(logprobs);
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
        let finish_reason = Some(finish_reason(reason.into(), self.choices[index].complete_calls));
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
