//! Common code for replies of completions and chat completions: a list of choices in an envelope. A
//! whole choice is the sum of the pieces that would be sent if it were streamed.

use serde::Serialize;

use super::error::ApiError;
use super::options::Call;
use super::{request_id, unix_seconds};
use crate::api::error::ErrorReply;
use crate::api::reply::{Reply, Usage};

/// The data of an event.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum ChoiceEvent<Choice> {
    /// A piece of the reply.
    Piece(Reply<Choice>),
    /// The error that ends the reply early.
    Failed(ErrorReply),
}

/// The data of the event after the last one.
pub(super) const TERMINATOR: Option<&str> = Some("[DONE]");

/// The names of one API in its replies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Names {
    /// Prefix of the ids of replies.
    pub(super) id: &'static str,
    /// The type of a whole reply.
    pub(super) whole: &'static str,
    /// The type of a streamed piece.
    pub(super) piece: &'static str,
}

/// The members that all pieces of a reply share.
#[derive(Debug)]
pub(super) struct Envelope {
    names: Names,
    id: String,
    created: u64,
    model: String,
    /// Whether pieces are sent.
    pub(super) stream: bool,
    include_usage: bool,
    /// Token ids of the prompt, for the whole reply or the first piece.
    prompt_ids: Option<Vec<u32>>,
    usage: Usage,
}

impl Envelope {
    /// The envelope of the reply to one call.
    pub(super) fn new(names: Names, call: &Call, prompt_ids: Option<Vec<u32>>) -> Self {
        Self {
            names,
            id: format!("{}-{}", names.id, request_id::fresh()),
            created: unix_seconds(),
            model: call.model.clone(),
            stream: call.stream,
            include_usage: call.include_usage,
            prompt_ids,
            usage: Usage::default(),
        }
    }

    /// An event with a piece of a choice.
    pub(super) fn piece<Choice>(&mut self, choice: Choice) -> ChoiceEvent<Choice> {
        // Every piece has the member `usage` if the client asked for it: `null` in all but the last.
        self.event(vec![choice], self.include_usage.then_some(None))
    }

    /// The events after the last choice.
    pub(super) fn finish<Choice>(&mut self, usage: Usage) -> Vec<ChoiceEvent<Choice>> {
        self.usage = usage;
        match self.include_usage {
            true => vec![self.event(Vec::new(), Some(Some(usage)))],
            false => Vec::new(),
        }
    }

    /// The event that ends a reply early.
    pub(super) fn fail<Choice>(error: &ApiError) -> ChoiceEvent<Choice> {
        ChoiceEvent::Failed(error.reply())
    }

    /// The whole reply.
    pub(super) fn whole<Choice>(mut self, choices: Vec<Choice>) -> Reply<Choice> {
        let usage = Some(Some(self.usage));
        self.reply(self.names.whole, choices, usage)
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
            choices,
            prompt_token_ids: self.prompt_ids.take(),
            usage,
        }
    }
}
