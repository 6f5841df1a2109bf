//! The text layer of a build without the feature `text`. Every use of text is an error.

use std::sync::Arc;

use stolon_scheduler::{FinishReason, PromptLimit, TokenSet};
use stolon_text::{Answer, TextSource};

use crate::long_work::Client;
use crate::prompt::PromptTokens;
use crate::request::{Prompt, part_tokens};
use crate::skills::Skills;
use crate::{
    AnswerFormat, CacheMiss, ChatMessage, Error, Grammar, PrefixMatch, Request, SharedProcessor,
};

/// How a conversation would be rendered.
#[derive(Clone, Debug, Default)]
pub(crate) struct ChatOptions;

/// Nothing can be said about conversations.
pub(crate) fn ended_chat(options: &ChatOptions) -> ChatOptions {
    options.clone()
}

/// There are no values.
pub(crate) fn chat_values(_: &ChatOptions) -> impl Iterator<Item = &serde_json::Value> {
    std::iter::empty()
}

/// Replaces the tokenizer and chat templates. It refuses all text.
#[derive(Clone, Debug, Default)]
pub(crate) struct Text {
    eos_ids: TokenSet,
    /// The prompts of the model's skills.
    pub(crate) skills: Skills,
}

/// Has no values: without text there is no history.
#[derive(Clone, Debug)]
pub(crate) enum Remembered {}

/// Has no values: without a tokenizer there is no detokenizer.
#[derive(Clone, Debug)]
pub(crate) enum Detokenizer {}

impl Detokenizer {
    pub(crate) fn push(&mut self, _token: u32) -> String {
        match *self {}
    }

    pub(crate) fn finish(self) -> String {
        match self {}
    }
}

/// Has no values: without text there are no conversations.
#[derive(Clone, Debug)]
pub(crate) enum Exchange {}

/// Has no values: there are no conversations.
#[derive(Clone, Debug)]
pub(crate) enum Recording {}

impl Recording {
    pub(crate) fn push_token(&mut self, _id: u32) {
        match *self {}
    }

    pub(crate) fn push_text(&mut self, _text: &str) {
        match *self {}
    }

    pub(crate) fn finish(self, _reason: &FinishReason) -> Option<Answer> {
        match self {}
    }
}

/// The form of the tokens of a text encoder.
#[derive(Clone, Copy, Debug)]
#[expect(dead_code, reason = "no text is tokenized")]
pub(crate) struct TypedTokens {
    pub(crate) vocab_size: usize,
    pub(crate) types: usize,
    pub(crate) lowercase: bool,
}

#[cfg(feature = "tiers")]
impl Text {
    pub(crate) fn with_stored_history(self, _: &std::path::Path, _: &[u8; 32], _: usize) -> Text {
        self
    }

    pub(crate) fn flush_history(&self) {}

    pub(crate) fn clear_stored_history(&self) {}
}

impl Text {
    pub(crate) fn with_types(self, _typed: TypedTokens) -> Text {
        self
    }

    pub(crate) fn with_pairs(self, _template: Option<&str>) -> Result<Text, Error> {
        Ok(self)
    }

    pub(crate) fn tokens_only(eos_token_ids: &[u32]) -> Text {
        Text { eos_ids: eos_token_ids.iter().copied().collect(), skills: Skills::default() }
    }

    pub(crate) fn load(
        _source: &TextSource,
        eos_token_ids: &[u32],
        _needs_template: bool,
    ) -> Result<Text, Error> {
        Ok(Text::tokens_only(eos_token_ids))
    }

    pub(crate) fn has_tokenizer(&self) -> bool {
        false
    }

    pub(crate) fn first_difference(&self, _other: &Text) -> Option<[String; 2]> {
        None
    }

    pub(crate) fn require_tokenizer(&self) -> Result<(), Error> {
        Err(Error::NoTokenizer)
    }

    pub(crate) fn detokenizer(&self, _shown: &[String]) -> Option<Detokenizer> {
        None
    }

    pub(crate) fn grammar_processor(
        &self,
        _grammar: &Grammar,
        _ends: Arc<[u32]>,
        _inner: Option<SharedProcessor>,
        _client: Client,
    ) -> Result<SharedProcessor, Error> {
        Err(Error::NoTokenizer)
    }

    pub(crate) fn encode(&self, _text: &str, _add_special: bool) -> Result<Vec<u32>, Error> {
        Err(Error::NoTokenizer)
    }

    pub(crate) fn decode(&self, _ids: &[u32], _skip_special: bool) -> Result<String, Error> {
        Err(Error::NoTokenizer)
    }

    pub(crate) fn infill_ends(&self) -> Result<&[u32], Error> {
        Err(Error::NoTokenizer)
    }

    pub(crate) fn prepare_grammars(&self) {}

    pub(crate) fn spelling(&self, _id: u32) -> Result<Option<String>, Error> {
        Err(Error::NoTokenizer)
    }

    pub(crate) fn eos_ids(&self) -> TokenSet {
        self.eos_ids.clone()
    }

    pub(crate) fn has_chat_template(&self) -> bool {
        false
    }

    pub(crate) fn check_len(&self, _bytes: usize, _limit: PromptLimit) -> Result<(), Error> {
        Ok(())
    }

    pub(crate) fn prompt_tokens(
        &self,
        request: &Request,
        _limit: PromptLimit,
    ) -> Result<PromptTokens, Error> {
        let tokens = match request.prompt() {
            Prompt::Tokens(tokens) => return Ok(PromptTokens::given(tokens.clone(), request)),
            Prompt::Text(_) | Prompt::Chat(_) | Prompt::Infill(_) | Prompt::Pair(..) => {
                return Err(Error::NoTokenizer);
            }
            Prompt::Parts(parts) => part_tokens(parts, &[], true, self)?,
            Prompt::Skill(skill) => self.skills.prompt_tokens(skill, self)?,
        };
        Ok(PromptTokens { tokens, exchange: None })
    }

    pub(crate) fn with_history(self, _bytes: usize, _: Option<Remembered>) -> Text {
        self
    }

    pub(crate) fn remembered(&self) -> Option<Remembered> {
        None
    }

    pub(crate) fn exchange(&self, _: &Request, _: &PromptTokens) -> Option<Arc<Exchange>> {
        None
    }

    pub(crate) fn recording(
        &self,
        exchange: Arc<Exchange>,
        _: Option<Arc<AnswerFormat>>,
        _: u64,
    ) -> Option<Recording> {
        match *exchange {}
    }

    pub(crate) fn miss(
        &self,
        exchange: &Exchange,
        _: &[u32],
        _: PrefixMatch,
        _: impl Fn(usize) -> usize,
        _: u64,
    ) -> Option<CacheMiss> {
        match *exchange {}
    }

    pub(crate) fn quick_tokens(
        &self,
        _request: &Request,
        _limit: PromptLimit,
    ) -> Result<Option<PromptTokens>, Error> {
        Ok(None)
    }

    pub(crate) fn render_chat(
        &self,
        _messages: &[ChatMessage],
        _tools: Option<&serde_json::Value>,
    ) -> Result<String, Error> {
        Err(Error::NoTokenizer)
    }
}
