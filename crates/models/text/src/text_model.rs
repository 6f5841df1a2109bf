//! [`TextModel`]: tokenizer, chat templates and end-of-sequence tokens of a model. It is created
//! once from the data that the loader has read, and shared read-only by all requests.

use std::sync::Arc;

use serde_json::{Map, Value};

use crate::chat_template::{Effort, RenderedChat, Reserved};
use crate::spellings::Spellings;
use crate::{
    ChatMessage, ChatOptions, ChatTemplate, ChatTemplateError, GgufTokenizer, InfillTokens,
    TextSource, Tokenizer, TokenizerError, TokenizerSource,
};

/// The tokenizer, chat templates and end-of-sequence tokens of one model. Cheap to clone.
#[derive(Clone, Debug)]
pub struct TextModel {
    tokenizer: Tokenizer,
    /// The chat templates, or why there are none. A model without them can still complete text.
    chat: Result<Arc<ChatTemplate>, ChatTemplateError>,
    /// The spellings that must not become control tokens in a conversation.
    reserved: Arc<Reserved>,
    /// `None` for models that were not trained to fill in the middle.
    infill: Option<Arc<InfillTokens>>,
    eos_token_ids: Vec<u32>,
}

/// Why a conversation could not be turned into tokens.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The conversation could not be rendered.
    #[error(transparent)]
    Template(#[from] ChatTemplateError),
    /// The rendered text could not be tokenized.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// The special tokens that templates may refer to, by the names that `transformers` uses.
pub(crate) const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The tokens with which common model families end a turn or a sequence, and which have no other
/// meaning. A file names one end-of-sequence token, which is often a different one.
const TURN_ENDS: [&str; 22] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<end_of_turn>",
    "<turn|>",
    // Gemma 4 ends a turn with it after calls.
    "<|tool_response>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end_of_sentence|>",
    "<end_of_utterance>",
    "<|END_OF_TURN_TOKEN|>",
    "[|endofturn|]",
    "<|role_end|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
];

/// Further tokens that end a sequence. If they are not control tokens, ordinary text may contain
/// them.
const CONTROL_ENDS: [&str; 3] = ["</s>", "<eos>", "[EOS]"];

/// In the vocabulary of gpt-oss, which has this token, `<|end|>` ends a message within a turn.
const ENDS_TURN_OF_MESSAGES: &str = "<|return|>";

impl TextModel {
    /// Creates the tokenizer and chat templates of a model. `eos_token_ids` are the end-of-sequence
    /// tokens of the model's configuration. The tokenizer's, and the tokens with which the model
    /// ends a turn, end an answer, too. A missing or malformed chat template is reported when it is
    /// used.
    ///
    /// # Errors
    /// [`TokenizerError`] if the tokenizer cannot be read.
    pub fn new(source: &TextSource, eos_token_ids: &[u32]) -> Result<Self, TokenizerError> {
        let tokenizer =
            Tokenizer::with_config(&source.tokenizer, source.tokenizer_config.as_ref())?;
        let special_tokens = special_tokens(source, &tokenizer);
        let chat = ChatTemplate::new(templates(source), special_tokens.clone()).map(Arc::new);
        let template = chat.as_deref().ok();
        let eos_token_ids =
            end_token_ids(source, eos_token_ids, &special_tokens, &tokenizer, template);
        let reserved = Arc::new(reserved(&tokenizer, chat.as_deref().ok()));
        let infill = InfillTokens::of(&tokenizer, &eos_token_ids).map(Arc::new);
        Ok(Self { tokenizer, chat, reserved, infill, eos_token_ids })
    }

    /// The tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The token ids that end generation, sorted and without duplicates.
    #[must_use]
    pub fn eos_token_ids(&self) -> &[u32] {
        &self.eos_token_ids
    }

    /// The tokens for filling in the middle; `None` if the tokenizer has none.
    #[must_use]
    pub fn infill(&self) -> Option<&InfillTokens> {
        self.infill.as_deref()
    }

    /// The model's chat templates.
    ///
    /// # Errors
    /// [`ChatTemplateError::Missing`] or [`ChatTemplateError::Malformed`].
    pub fn chat_template(&self) -> Result<&ChatTemplate, ChatTemplateError> {
        self.chat.as_deref().map_err(Clone::clone)
    }

    /// Renders a conversation to the text format that the model was trained on.
    ///
    /// # Errors
    /// [`ChatTemplateError`] if there is no template or it fails.
    pub fn render_chat(
        &self,
        messages: &[ChatMessage],
        options: &ChatOptions,
    ) -> Result<String, ChatTemplateError> {
        self.chat_template()?.render(messages, options)
    }

    /// Renders a conversation and encodes the text as token ids. The tokenizer adds no special
    /// tokens.
    ///
    /// Unless [`ChatOptions::special_tokens_in_messages`] is set, every special token in the result
    /// begins in the template's own text or in the variables `bos_token` and so on. A special token
    /// that is spelled out in a message, a tool, a document or a variable is encoded as text, also
    /// if the template joins it from several of them. So are added tokens that are not marked as
    /// special but are part of the template's source, except in messages of the assistant, in which
    /// templates look for tokens such as `</think>`. If nothing of this kind is spelled out, the
    /// result is that of encoding the text of [`TextModel::render_chat`].
    ///
    /// # Errors
    /// [`ChatError`] if the conversation cannot be rendered or encoded.
    pub fn encode_chat(
        &self,
        messages: &[ChatMessage],
        options: &ChatOptions,
    ) -> Result<Vec<u32>, ChatError> {
        Ok(self.encode_rendered(&self.prepare_chat(messages, options)?)?)
    }

    /// The first half of [`TextModel::encode_chat`]: renders a conversation. The length of the
    /// result tells whether it may fit in the context before it is encoded.
    ///
    /// # Errors
    /// [`ChatTemplateError`] if there is no template or it fails.
    pub fn prepare_chat(
        &self,
        messages: &[ChatMessage],
        options: &ChatOptions,
    ) -> Result<RenderedChat, ChatTemplateError> {
        self.render_with(messages, options, Effort::Full)
    }

    /// As [`TextModel::prepare_chat`] if that is about a millisecond of work. `None` if it is more,
    /// or if it fails; `prepare_chat` tells which.
    pub fn prepare_quickly(
        &self,
        messages: &[ChatMessage],
        options: &ChatOptions,
    ) -> Option<RenderedChat> {
        self.render_with(messages, options, Effort::Quick).ok()
    }

    fn render_with(
        &self,
        messages: &[ChatMessage],
        options: &ChatOptions,
        effort: Effort,
    ) -> Result<RenderedChat, ChatTemplateError> {
        let reserved = (!options.special_tokens_in_messages).then(|| Arc::clone(&self.reserved));
        self.chat_template()?.render_separated(messages, options, reserved, effort)
    }

    /// The second half of [`TextModel::encode_chat`]: encodes a rendered conversation.
    ///
    /// # Errors
    /// [`TokenizerError`] if the text cannot be encoded.
    pub fn encode_rendered(&self, chat: &RenderedChat) -> Result<Vec<u32>, TokenizerError> {
        let mut tokens = Vec::new();
        for piece in chat.pieces() {
            tokens.extend(self.tokenizer.encode(piece, false)?);
        }
        Ok(tokens)
    }
}

/// The spellings that must not become control tokens in a conversation.
fn reserved(tokenizer: &Tokenizer, chat: Option<&ChatTemplate>) -> Reserved {
    let added = tokenizer.added_tokens();
    let spellings = |with_others: bool| {
        let reserved = added.iter().filter(|(spelling, special)| {
            // Some vocabularies contain runs of spaces and words as added tokens.
            let is_markup = spelling.starts_with(['<', '[']);
            let used = || chat.is_some_and(|chat| chat.mentions(spelling));
            *special || (with_others && is_markup && used())
        });
        Spellings::new(reserved.map(|(spelling, _)| spelling.clone()))
    };
    Reserved { for_assistant: spellings(false), for_others: spellings(true) }
}

/// The templates as `(name, source)`. The loader has chosen the default one, and there may be
/// further ones in files of their own, in the metadata of a GGUF file, and in
/// `tokenizer_config.json`. The first one of a name counts.
fn templates(source: &TextSource) -> Vec<(String, String)> {
    let default = source.chat_template.clone().map(|template| ("default".to_owned(), template));
    let listed =
        source.tokenizer_config.as_ref().and_then(|config| config["chat_template"].as_array());
    let listed = listed.into_iter().flatten().filter_map(|entry| {
        let name = entry["name"].as_str()?.to_owned();
        Some((name, entry["template"].as_str()?.to_owned()))
    });
    let mut templates: Vec<(String, String)> = Vec::new();
    for (name, template) in
        default.into_iter().chain(source.named_templates.iter().cloned()).chain(listed)
    {
        if templates.iter().all(|(other, _)| *other != name) {
            templates.push((name, template));
        }
    }
    templates
}

/// The spelling of each special token, by the name that templates use.
fn special_tokens(source: &TextSource, tokenizer: &Tokenizer) -> Map<String, Value> {
    let mut tokens = Map::new();
    if let TokenizerSource::Gguf(metadata) = &source.tokenizer {
        for (name, id) in ids_in_gguf(metadata) {
            if let Some(spelling) = id.and_then(|id| tokenizer.token_spelling(id)) {
                tokens.insert(name.to_owned(), spelling.into());
            }
        }
    }
    let Some(config) = &source.tokenizer_config else { return tokens };
    for name in SPECIAL_TOKENS {
        // A token is given either as its spelling or as an object with the spelling as `content`.
        let entry = &config[name];
        if let Some(spelling) = entry.as_str().or(entry["content"].as_str()) {
            tokens.insert(name.to_owned(), spelling.into());
        }
    }
    if let Some(further) = config["additional_special_tokens"].as_array() {
        tokens.insert("additional_special_tokens".to_owned(), further.clone().into());
    }
    tokens
}

fn ids_in_gguf(metadata: &GgufTokenizer) -> [(&'static str, Option<u32>); 4] {
    [
        ("bos_token", metadata.bos_token_id),
        ("eos_token", metadata.eos_token_id),
        ("unk_token", metadata.unknown_token_id),
        ("pad_token", metadata.padding_token_id),
    ]
}

/// The tokens that end an answer: the ones that the model's configuration gives (`given`), the
/// tokenizer's, and the tokens with which common model families end a turn. In a GGUF file, these
/// count whatever their type, because converters do not mark all of them. Elsewhere, they count if
/// they are added tokens that the chat template mentions.
fn end_token_ids(
    source: &TextSource,
    given: &[u32],
    special_tokens: &Map<String, Value>,
    tokenizer: &Tokenizer,
    chat: Option<&ChatTemplate>,
) -> Vec<u32> {
    let mut ids = given.to_vec();
    let spelling = special_tokens.get("eos_token").and_then(Value::as_str);
    ids.extend(spelling.and_then(|spelling| tokenizer.token_id(spelling)));
    let messages = tokenizer.token_id(ENDS_TURN_OF_MESSAGES).is_some();
    let ends = TURN_ENDS.iter().filter(|end| !messages || **end != "<|end|>");
    match source.tokenizer {
        TokenizerSource::Gguf(_) => {
            ids.extend(ends.filter_map(|end| tokenizer.token_id(end)));
            let ends = CONTROL_ENDS.iter().filter_map(|end| tokenizer.token_id(end));
            ids.extend(ends.filter(|&id| tokenizer.is_special(id)));
        }
        _ => {
            let is_used = |end: &&&str| chat.is_some_and(|chat| chat.mentions(end));
            let ends = ends.filter(is_used).filter_map(|end| tokenizer.token_id(end));
            ids.extend(ends.filter(|&id| tokenizer.is_added(id)));
        }
    }
    ids.sort_unstable();
    ids.dedup();
    ids
}
