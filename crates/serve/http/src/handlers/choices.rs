//! Common code for replies of completions and chat completions: a list of choices in an envelope. A
//! whole choice is the sum of the pieces that would be sent if it were streamed.

use serde::Serialize;

use crate::api::error::ErrorReply;
use crate::api::logprobs::PromptLogprobs;
use crate::api::reply::{Reply, Usage};
use crate::handlers::options::{Call, StreamedUsage};
use crate::wire::error::ApiError;
use crate::wire::request_id;
use crate::wire::unix_seconds;

/// The data of an event.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum ChoiceEvent<Choice> {
    /// A piece of the reply.
    Piece(Reply<Choice>),
    /// The error that ends the reply early.
    Failed(ErrorReply),
}

/// The data of the event after the last one.
pub(crate) const TERMINATOR: Option<&str> = Some("[DONE]");

/// The names of one API in its replies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Names {
    /// Prefix of the ids of replies.
    pub(crate) id: &'static str,
    /// The type of a whole reply.
    pub(crate) whole: &'static str,
    /// The type of a streamed piece.
    pub(crate) piece: &'static str,
    /// Whether a whole reply has the log-probabilities of the prompt, instead of its choices.
    pub(crate) has_prompt_logprobs: bool,
}

/// The members that all pieces of a reply share.
#[derive(Debug)]
pub(crate) struct Envelope {
    names: Names,
    id: String,
    created: u64,
    model: String,
    /// Whether pieces are sent.
    pub(crate) stream: bool,
    usage_in_stream: StreamedUsage,
    fingerprint: String,
    /// Log-probabilities of the prompt, for the whole reply.
    pub(crate) prompt_logprobs: Option<PromptLogprobs>,
    /// The usage of each choice so far.
    so_far: Vec<Usage>,
    /// Token ids of the prompt, for the whole reply or the first piece.
    prompt_ids: Option<Vec<u32>>,
    usage: Usage,
}

impl Envelope {
    /// The envelope of the reply to one call.
    pub(crate) fn new(names: Names, call: &Call, prompt_ids: Option<Vec<u32>>) -> Self {
        Self {
            names,
            id: format!("{}-{}", names.id, request_id::fresh()),
            created: unix_seconds(),
            model: call.model.clone(),
            stream: call.stream,
            usage_in_stream: call.usage,
            fingerprint: call.context.app.fingerprint.clone(),
            prompt_logprobs: None,
            so_far: Vec::new(),
            prompt_ids,
            usage: Usage::default(),
        }
    }

    /// The choice with this index begins. `usage` counts its prompt.
    pub(crate) fn begin(&mut self, index: usize, usage: Usage) {
        if self.so_far.len() <= index {
            self.so_far.resize(index + 1, Usage::default());
        }
        self.so_far[index] = usage;
    }

    /// Counts a generated token of the choice with this index.
    pub(crate) fn count(&mut self, index: usize, token: Option<u32>) {
        if let Some(usage) = self.so_far.get_mut(index).filter(|_| token.is_some()) {
            usage.completion_tokens += 1;
            usage.total_tokens += 1;
        }
    }

    /// An event with a piece of the choice with this index.
    pub(crate) fn piece<Choice>(&mut self, index: usize, choice: Choice) -> ChoiceEvent<Choice> {
        // Every piece has the member `usage` if the client asked for it: `null` in all but the last,
        // unless the usage so far was requested.
        let usage = match self.usage_in_stream {
            StreamedUsage::Left => None,
            StreamedUsage::AtEnd => Some(None),
            StreamedUsage::Always => Some(self.so_far.get(index).copied()),
        };
        self.event(vec![choice], usage)
    }

    /// The events after the last choice.
    pub(crate) fn finish<Choice>(&mut self, usage: Usage) -> Vec<ChoiceEvent<Choice>> {
        self.usage = usage;
        match self.usage_in_stream {
            StreamedUsage::Left => Vec::new(),
            _ => vec![self.event(Vec::new(), Some(Some(usage)))],
        }
    }

    /// The event that ends a reply early.
    pub(crate) fn fail<Choice>(error: &ApiError) -> ChoiceEvent<Choice> {
        ChoiceEvent::Failed(error.reply())
    }

    /// The whole reply.
    pub(crate) fn whole<Choice>(mut self, choices: Vec<Choice>) -> Reply<Choice> {
        let usage = Some(Some(self.usage));
        let prompt_logprobs = self.names.has_prompt_logprobs.then(|| self.prompt_logprobs.take());
        Reply { prompt_logprobs, ..self.reply(self.names.whole, choices, usage) }
    }

    fn event<Choice>(
        &mut self,
        choices: Vec<Choice>,
        usage: Option<Option<Usage>>,
    ) -> ChoiceEvent<Choice> {
        ChoiceEvent::Piece(self.reply(self.names.piece, choices, usage))
    }

    fn reply<Choice>(
        &mut self,
        object: &'static str,
        choices: Vec<Choice>,
        usage: Option<Option<Usage>>,
    ) -> Reply<Choice> {
        Reply {
            id: self.id.clone(),
            object,
            created: self.created,
            model: self.model.clone(),
            system_fingerprint: self.fingerprint.clone(),
            choices,
            prompt_token_ids: self.prompt_ids.take(),
            prompt_logprobs: None,
            usage,
        }
    }
}
