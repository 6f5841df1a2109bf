//! The text layer: renders and tokenizes prompts, and provides detokenizers for answers.

#[cfg(feature = "grammar")]
mod grammar;
#[cfg(not(feature = "grammar"))]
#[path = "text/no_grammar.rs"]
mod grammar;
mod history;
mod options;
mod recording;

use std::borrow::Cow;
use std::sync::Arc;

use stolon_scheduler::{PromptLimit, TokenSet};
use stolon_text::{
    ChatMessage, ChatTemplate, InfillTokens, PairPrompts, RenderedChat, TextModel, TextSource,
    Tokenizer,
};

pub(crate) use history::Exchange;
use history::StoredHistory;
pub(crate) use recording::Recording;
pub(crate) use stolon_text::{ChatOptions, Detokenizer};

use grammar::Grammars;
use history::{Found, History, Outline};

use crate::long_work::Client;
use crate::prompt::PromptTokens;
use crate::request::{Prompt, part_tokens};
use crate::skills::Skills;
use crate::{AnswerFormat, CacheMiss, Error, Grammar, PrefixMatch, Request, SharedProcessor};

/// The history of an engine, which a later engine of the same model continues.
pub(crate) type Remembered = Arc<History>;

/// The model's tokenizer and chat templates, if it has any. All requests share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Text {
    model: Option<TextModel>,
    eos_ids: TokenSet,
    /// The spellings of `eos_ids`.
    ends: Arc<[String]>,
    /// `None` if answers are tokenized again.
    history: Option<Arc<History>>,
    /// The file of the history; `None` if it is in memory only.
    stored: Option<Arc<StoredHistory>>,
    grammars: Option<Grammars>,
    /// The prompts of the model's skills.
    pub(crate) skills: Skills,
    /// The form of the tokens of a text encoder; `None` for other models.
    typed: Option<TypedTokens>,
    /// The prompts of pairs of a reranker; `None` for other models.
    pairs: Option<Arc<PairPrompts>>,
}

/// The form of the tokens of a text encoder.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TypedTokens {
    /// Number of ids of each type.
    pub(crate) vocab_size: usize,
    /// Number of token types; 0 if there are none.
    pub(crate) types: usize,
    /// Whether texts are converted to lower case before they are tokenized.
    pub(crate) lowercase: bool,
}

impl TypedTokens {
    /// The number of a token in prompts, as the backend expects it.
    fn number(self, (id, kind): (u32, u32)) -> u32 {
        if self.types <= 1 {
            return id;
        }
        // A number that does not exist is refused with the prompt.
        let number = (kind as usize).saturating_mul(self.vocab_size).saturating_add(id as usize);
        u32::try_from(number).unwrap_or(u32::MAX)
    }
}

impl Text {
    /// The same for a text encoder.
    pub(crate) fn with_types(self, typed: TypedTokens) -> Text {
        Text { typed: Some(typed), ..self }
    }

    /// The same for a reranker that answers with a token. `template` is that of its pairs, if it is
    /// not the model's own.
    pub(crate) fn with_pairs(self, template: Option<&str>) -> Result<Text, Error> {
        // Without a tokenizer, prompts are token ids.
        let Ok(model) = self.model() else { return Ok(self) };
        let Some(pairs) = PairPrompts::new(model, template)? else {
            let expected = "a text with `{query}` and `{document}`, because the model has no \
                            template of pairs";
            return Err(Error::invalid("rerank_template", expected, "nothing"));
        };
        Ok(Text { pairs: Some(Arc::new(pairs)), ..self })
    }

    pub(crate) fn new(model: TextModel) -> Text {
        let eos_ids = model.eos_token_ids().iter().copied().collect();
        let spelling = |id: &u32| model.tokenizer().token_spelling(*id);
        let ends = model.eos_token_ids().iter().filter_map(spelling).collect();
        let grammars = Some(Grammars::new(&model));
        Text { grammars, model: Some(model), eos_ids, ends, ..Text::default() }
    }

    /// Makes the prompts of conversations of the tokens that were sampled. Requests and answers are
    /// kept in `bytes` bytes of memory; with 0, all text is tokenized. `earlier` is the history of
    /// an earlier engine of the same model.
    pub(crate) fn with_history(self, bytes: usize, earlier: Option<Remembered>) -> Text {
        let history = || earlier.unwrap_or_else(|| Arc::new(History::new(bytes)));
        Text { history: (bytes > 0).then(history), ..self }
    }

    /// The history, if there is one.
    pub(crate) fn remembered(&self) -> Option<Remembered> {
        self.history.clone()
    }

    /// The tokenizer and chat templates of a model. With `needs_template`, a template that is
    /// malformed is an error.
    pub(crate) fn load(
        source: &TextSource,
        eos_token_ids: &[u32],
        needs_template: bool,
    ) -> Result<Text, Error> {
        let text = Text::new(TextModel::new(source, eos_token_ids)?);
        if needs_template {
            text.chat_template()?;
        }
        Ok(text)
    }

    /// Prepares the part that the grammars of all requests share. It takes up to two seconds.
    pub(crate) fn prepare_grammars(&self) {
        if let Some(grammars) = &self.grammars {
            grammars.prepare();
        }
    }

    /// For a model without a tokenizer.
    pub(crate) fn tokens_only(eos_token_ids: &[u32]) -> Text {
        Text { eos_ids: eos_token_ids.iter().copied().collect(), ..Text::default() }
    }

    /// Whether there is a tokenizer.
    pub(crate) fn has_tokenizer(&self) -> bool {
        self.model.is_some()
    }

    /// The first token that another model's vocabulary does not have under the same id: its
    /// description here and there. `None` if the vocabularies are equal.
    pub(crate) fn first_difference(&self, other: &Text) -> Option<[String; 2]> {
        let (own, other) = (self.tokenizer().ok()?, other.tokenizer().ok()?);
        // The bytes of a token name it where it has no spelling.
        let name = |tokenizer: &Tokenizer, id| {
            let bytes = || tokenizer.token_bytes(id).map(|bytes| format!("{bytes:?}"));
            tokenizer.token_spelling(id).or_else(bytes)
        };
        let ids = 0..own.vocab_size().max(other.vocab_size()) as u32;
        ids.map(|id| (id, name(own, id), name(other, id))).find(|(_, a, b)| a != b).map(
            |(id, a, b)| {
                [a, b].map(|token| match token {
                    Some(token) => format!("`{token}` as token {id}"),
                    None => format!("no token {id}"),
                })
            },
        )
    }

    fn model(&self) -> Result<&TextModel, Error> {
        self.model.as_ref().ok_or(Error::NoTokenizer)
    }

    fn tokenizer(&self) -> Result<&Tokenizer, Error> {
        self.model().map(TextModel::tokenizer)
    }

    /// # Errors
    /// [`Error::NoTokenizer`].
    pub(crate) fn require_tokenizer(&self) -> Result<(), Error> {
        self.tokenizer().map(|_| ())
    }

    /// A detokenizer for one answer. `None` if there is no tokenizer. The special tokens with the
    /// spellings `shown` have a text.
    pub(crate) fn detokenizer(&self, shown: &[String]) -> Option<Detokenizer> {
        let tokenizer = self.tokenizer().ok()?;
        let shown = shown.iter().filter_map(|spelling| tokenizer.token_id(spelling));
        Some(Detokenizer::continuing(tokenizer.clone(), true).showing(shown))
    }

    /// A processor that keeps an answer to a client's `grammar` and runs after `inner`. The answer
    /// ends with one of `ends`.
    pub(crate) fn grammar_processor(
        &self,
        grammar: &Grammar,
        ends: Arc<[u32]>,
        inner: Option<SharedProcessor>,
        client: Client,
    ) -> Result<SharedProcessor, Error> {
        let grammars = self.grammars.as_ref().ok_or(Error::NoTokenizer)?;
        if ends.is_empty() && self.eos_ids.as_slice().is_empty() {
            let expected = "a model with an end-of-sequence token, or stop ids";
            return Err(Error::invalid("grammar", expected, "neither"));
        }
        Ok(grammars.processor(grammar, ends, inner, client)?)
    }

    pub(crate) fn chat_template(&self) -> Result<&ChatTemplate, Error> {
        Ok(self.model()?.chat_template()?)
    }

    /// The model's tokens for filling in the middle.
    fn infill(&self) -> Result<&InfillTokens, Error> {
        self.model()?.infill().ok_or(Error::NoInfill)
    }

    /// The tokens that end the text of a gap.
    ///
    /// # Errors
    /// [`Error::NoInfill`].
    pub(crate) fn infill_ends(&self) -> Result<&[u32], Error> {
        Ok(self.infill()?.ends())
    }

    pub(crate) fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, Error> {
        Ok(self.tokenizer()?.encode(text, add_special)?)
    }

    pub(crate) fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, Error> {
        Ok(self.tokenizer()?.decode(ids, skip_special))
    }

    /// The spelling of a token in the vocabulary, if it has one.
    pub(crate) fn spelling(&self, id: u32) -> Result<Option<String>, Error> {
        Ok(self.tokenizer()?.token_spelling(id))
    }

    /// Token ids that end an answer. Empty if there is no tokenizer.
    pub(crate) fn eos_ids(&self) -> TokenSet {
        self.eos_ids.clone()
    }

    pub(crate) fn has_chat_template(&self) -> bool {
        self.model.as_ref().is_some_and(|model| model.chat_template().is_ok())
    }

    /// The prompt text of a conversation, ending where the assistant's answer begins.
    pub(crate) fn render_chat(
        &self,
        messages: &[ChatMessage],
        tools: Option<&serde_json::Value>,
    ) -> Result<String, Error> {
        self.render(messages, tools, &ChatOptions::default())
    }

    /// Refuses a text that is so long that it has more than `limit` tokens for certain.
    ///
    /// # Errors
    /// `PromptTooLong`.
    pub(crate) fn check_len(&self, bytes: usize, limit: PromptLimit) -> Result<(), Error> {
        let Ok(tokenizer) = self.tokenizer() else { return Ok(()) };
        if bytes <= tokenizer.max_bytes(limit.tokens) {
            return Ok(());
        }
        Err(limit.error(bytes.div_ceil(tokenizer.max_bytes(1).max(1))).into())
    }

    /// The token ids of a request's prompt. A prompt that is longer than `limit` for certain is
    /// refused before it is rendered and tokenized.
    pub(crate) fn prompt_tokens(
        &self,
        request: &Request,
        limit: PromptLimit,
    ) -> Result<PromptTokens, Error> {
        let instruction = request.instruction.as_deref();
        if instruction.is_some()
            && !self.pairs.as_ref().is_some_and(|pairs| pairs.takes_instruction())
        {
            let expected = "none, because the model has no template of pairs with an instruction";
            return Err(Error::invalid("instruction", expected, "a text"));
        }
        if let Some(typed) = self.typed {
            return self.typed_tokens(request, typed, limit);
        }
        if let Prompt::Pair(first, second) = request.prompt() {
            let pairs = self.pairs.as_ref().ok_or_else(no_pairs)?;
            let most = request.truncate.map(|most| most.min(limit.tokens));
            let tokens = pairs.encode([first, second], instruction, most)?;
            return Ok(PromptTokens { tokens, exchange: None });
        }
        self.check_len(request.prompt().len_bytes(), limit)?;
        let tokens = match request.prompt() {
            Prompt::Tokens(tokens) => return Ok(PromptTokens::given(tokens.clone(), request)),
            Prompt::Text(text) => self.encode(text, true)?,
            Prompt::Pair(..) => return Err(no_pairs()),
            Prompt::Chat(messages) => {
                let asked = self.asked(request, messages, None)?;
                let chat = self.model()?.prepare_chat(&asked.messages, &asked.options)?;
                return self.chat_tokens(asked, &chat, limit);
            }
            Prompt::Parts(parts) => part_tokens(parts, &[], true, self)?,
            Prompt::Skill(skill) => self.skills.prompt_tokens(skill, self)?,
            Prompt::Infill(infill) => {
                // The answer needs room, too.
                let answer = request.options.max_tokens.unwrap_or(usize::MAX).min(limit.tokens / 4);
                self.infill()?.encode(infill, limit.tokens - answer)?
            }
        };
        Ok(PromptTokens { tokens, exchange: None })
    }

    /// The tokens of a prompt of a text encoder.
    fn typed_tokens(
        &self,
        request: &Request,
        typed: TypedTokens,
        limit: PromptLimit,
    ) -> Result<PromptTokens, Error> {
        let most = request.truncate.map(|most| most.min(limit.tokens));
        let (first, second) = match request.prompt() {
            Prompt::Tokens(tokens) => {
                let most = most.unwrap_or(tokens.len()).min(tokens.len());
                return Ok(PromptTokens::given(tokens[..most].to_vec(), request));
            }
            Prompt::Text(text) => (text, None),
            Prompt::Pair(first, second) => (first, Some(second.as_str())),
            Prompt::Chat(_) | Prompt::Parts(_) | Prompt::Skill(_) | Prompt::Infill(_) => {
                let expected = "a text, a pair of texts or token ids, because the model is a text \
                                encoder or a classifier";
                return Err(Error::invalid("prompt", expected, "another prompt"));
            }
        };
        if most.is_none() {
            self.check_len(request.prompt().len_bytes(), limit)?;
        }
        let (first, second) = match typed.lowercase {
            true => (first.to_lowercase().into(), second.map(|text| text.to_lowercase().into())),
            false => (Cow::Borrowed(first.as_str()), second.map(Cow::Borrowed)),
        };
        let tokens = self.tokenizer()?.encode_typed(&first, second.as_deref(), most)?;
        let tokens = tokens.into_iter().map(|token| typed.number(token)).collect();
        Ok(PromptTokens { tokens, exchange: None })
    }

    /// The token ids of a conversation whose template needs little work; `None` if it needs more, or
    /// fails.
    pub(crate) fn quick_tokens(
        &self,
        request: &Request,
        limit: PromptLimit,
    ) -> Result<Option<PromptTokens>, Error> {
        let Prompt::Chat(messages) = request.prompt() else { return Ok(None) };
        let asked = self.asked(request, messages, None)?;
        let chat = self.model()?.prepare_quickly(&asked.messages, &asked.options);
        chat.map(|chat| self.chat_tokens(asked, &chat, limit)).transpose()
    }

    /// The conversation of a request as it is rendered. `identified` are the messages with which the
    /// history knows it, if they have images.
    fn asked<'a>(
        &self,
        request: &Request,
        messages: &'a [ChatMessage],
        identified: Option<&[ChatMessage]>,
    ) -> Result<Asked<'a>, Error> {
        let options = chat_options(request.tools.as_deref(), &request.chat)?;
        let Some(history) = &self.history else {
            return Ok(Asked { options, messages: messages.into(), known: None });
        };
        let outline = Outline::of_tokens(request);
        let found = history.find(&outline.scope(), identified.unwrap_or(messages));
        let messages = found.restored(messages);
        let outline = outline.with_chat(&messages, identified.is_some(), &options);
        Ok(Asked { options, messages, known: Some((found, outline)) })
    }

    /// The token ids of a rendered conversation: those that were sampled for its known answers, and
    /// those of its text.
    fn chat_tokens(
        &self,
        asked: Asked<'_>,
        chat: &RenderedChat,
        limit: PromptLimit,
    ) -> Result<PromptTokens, Error> {
        let Some((found, outline)) = asked.known else {
            return Ok(PromptTokens { tokens: self.encode_chat(chat, limit)?, exchange: None });
        };
        self.check_len(chat.len_bytes(), limit)?;
        let base = found.verified(chat).into_iter().find_map(|known| {
            let end = known.end_of_answer(chat, &asked.messages[known.message], &self.ends)?;
            Some((known, end))
        });
        let (base, start) = base.unzip();
        let rest = self.encode_chat(&chat.rest(start.unwrap_or(0)), limit)?;
        let exchange = Exchange::new(found.conversation, outline, chat.as_str(), base, rest);
        let tokens = exchange.prompt();
        Ok(PromptTokens { tokens, exchange: Some(Arc::new(exchange)) })
    }

    /// What the history keeps of a request. `None` if nothing is kept, or if its prompt has images and
    /// is not a conversation.
    pub(crate) fn exchange(
        &self,
        request: &Request,
        prompt: &PromptTokens,
    ) -> Option<Arc<Exchange>> {
        self.history.as_ref()?;
        prompt.exchange.clone().or_else(|| {
            if !request.placed.is_empty() {
                return None;
            }
            let outline = Outline::of_tokens(request);
            Some(Arc::new(Exchange::of_tokens(outline, &prompt.tokens)))
        })
    }

    /// Keeps a request that is submitted, and records its answers for the next one of its
    /// conversation. `evictions` is the number of blocks that the cache has evicted.
    pub(crate) fn recording(
        &self,
        exchange: Arc<Exchange>,
        format: Option<Arc<AnswerFormat>>,
        evictions: u64,
    ) -> Option<Recording> {
        let exchange = self.history.as_ref()?.remember(exchange, evictions);
        let tokenizer = self.tokenizer().ok()?.clone();
        let format = format.as_deref().cloned().unwrap_or_default();
        Some(Recording::new(exchange, tokenizer, format, self.stored.clone()))
    }

    /// As [`History::miss`]; `None` also if nothing is remembered.
    pub(crate) fn miss(
        &self,
        exchange: &Exchange,
        tokens: &[u32],
        found: PrefixMatch,
        resume_max: impl Fn(usize) -> usize,
        evictions: u64,
    ) -> Option<CacheMiss> {
        let text = |tokens: &[u32]| self.decode(tokens, false).unwrap_or_default();
        self.history.as_ref()?.miss(exchange, tokens, found, resume_max, evictions, text)
    }

    /// The token ids of a conversation with images, as for one without: `place` puts them in their
    /// places in its text. The history knows it by its `identified` messages, which say which images
    /// they are. `is_whole` says whether tokens have all images and nothing that looks like one.
    #[cfg(feature = "images")]
    pub(crate) fn placed_chat_tokens(
        &self,
        request: &Request,
        (messages, identified): (&[ChatMessage], &[ChatMessage]),
        place: impl Fn(RenderedChat) -> Result<RenderedChat, Error>,
        is_whole: impl Fn(&[u32]) -> bool,
        limit: PromptLimit,
    ) -> Result<PromptTokens, Error> {
        let asked = self.asked(request, messages, Some(identified))?;
        let chat = place(self.model()?.prepare_chat(&asked.messages, &asked.options)?)?;
        let prompt = self.chat_tokens(asked, &chat, limit)?;
        if is_whole(&prompt.tokens) {
            return Ok(prompt);
        }
        // An answer was sampled with the token of an image.
        Ok(PromptTokens { tokens: self.encode_chat(&chat, limit)?, exchange: None })
    }

    fn encode_chat(&self, chat: &RenderedChat, limit: PromptLimit) -> Result<Vec<u32>, Error> {
        self.check_len(chat.len_bytes(), limit)?;
        Ok(self.model()?.encode_rendered(chat)?)
    }

    /// The prompt text of a conversation. `tools` replace those of `options`.
    pub(crate) fn render(
        &self,
        messages: &[ChatMessage],
        tools: Option<&serde_json::Value>,
        options: &ChatOptions,
    ) -> Result<String, Error> {
        Ok(self.model()?.render_chat(messages, &chat_options(tools, options)?)?)
    }
}

/// The file of the history.
#[cfg(feature = "tiers")]
impl Text {
    /// Also keeps the history in a file of this directory, in which the KV that the model with this
    /// fingerprint computes is stored, and reads the file. Without a history or a tokenizer, there is
    /// no file; if it cannot be written, a warning is logged. Blocks the thread.
    pub(crate) fn with_stored_history(
        self,
        directory: &std::path::Path,
        fingerprint: &[u8; 32],
        vocab_size: usize,
    ) -> Text {
        let (Some(history), Ok(tokenizer)) = (&self.history, self.tokenizer()) else { return self };
        // Tokens depend on the tokenizer, too.
        let mut model = blake3::Hasher::new_keyed(fingerprint);
        for id in 0..u32::try_from(vocab_size).unwrap_or(u32::MAX) {
            let spelling = tokenizer.token_spelling(id).map(String::into_bytes);
            let name = spelling.or_else(|| tokenizer.token_bytes(id)).unwrap_or_default();
            model.update(&(name.len() as u64).to_le_bytes()).update(&name);
        }
        let path = directory.join("history");
        let model = *model.finalize().as_bytes();
        let stored = StoredHistory::open(path.clone(), history, model, vocab_size);
        let stored = stored.inspect_err(|error| {
            tracing::warn!(path = %path.display(), %error, "the history is not stored");
        });
        Text { stored: stored.ok().map(Arc::new), ..self }
    }

    /// Waits until the answers that have ended are in the file of the history, if there is one.
    pub(crate) fn flush_history(&self) {
        self.stored.iter().for_each(|stored| stored.flush());
    }

    /// Removes everything from the file of the history, if there is one.
    pub(crate) fn clear_stored_history(&self) {
        self.stored.iter().for_each(|stored| stored.clear());
    }
}

/// The error for a pair of texts and a model that does not read pairs.
fn no_pairs() -> Error {
    let expected = "one text, because the model does not read pairs";
    Error::invalid("prompt", expected, "a pair of texts")
}

/// The conversation of a request as it is rendered.
struct Asked<'a> {
    options: ChatOptions,
    /// The messages, with reasoning that the client left out.
    messages: Cow<'a, [ChatMessage]>,
    /// The answers in it that are known, and what it is made of; `None` without a history.
    known: Option<(Found, Outline)>,
}

/// `options` with `tools`, if there are any.
fn chat_options(
    tools: Option<&serde_json::Value>,
    options: &ChatOptions,
) -> Result<ChatOptions, Error> {
    let tools = match tools {
        None | Some(serde_json::Value::Null) => options.tools.clone(),
        Some(serde_json::Value::Array(tools)) => tools.clone(),
        Some(other) => return Err(Error::invalid("tools", "a list of functions", other)),
    };
    Ok(ChatOptions { tools, ..options.clone() })
}

/// The options with which a conversation ends after its last message, without the beginning of an
/// answer.
pub(crate) fn ended_chat(options: &ChatOptions) -> ChatOptions {
    ChatOptions {
        add_generation_prompt: false,
        continue_final_message: false,
        ..ChatOptions::clone(options)
    }
}

/// The values of `options` that may become text.
pub(crate) fn chat_values(options: &ChatOptions) -> impl Iterator<Item = &serde_json::Value> {
    options.tools.iter().chain(options.variables.values())
}
