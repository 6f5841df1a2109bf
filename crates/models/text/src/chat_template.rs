//! Chat templates: they turn a conversation into the text format that a model was trained on, and
//! render it as `transformers` does. Compiled once per model and read-only afterward.
//!
//! Templates are Jinja2 programs that rely on Python. minijinja implements most of the language.
//! This file and its child modules add the rest: transformers' whitespace control, printing and
//! JSON as in Python, the methods of Python's strings and mappings, `raise_exception`,
//! `strftime_now`, `{% break %}`, and the `{% generation %}` tags, which matter for training only
//! and are ignored.

mod capabilities;
mod clock;
mod compile;
mod describe;
mod environment;
mod generation;
mod guards;
mod history;
mod limits;
mod lists;
mod messages;
mod methods;
mod python;
mod reads;
mod reserved;
mod templates;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde_json::{Map, Value};

use self::limits::{MAX_SOURCE, MAX_TEMPLATES, MAX_WORK};
pub(crate) use self::reserved::Reserved;
pub(crate) use self::templates::Effort;
use self::templates::{Entry, Templates};
use crate::bounded::{Bounded, MAX_WAIT, Stopped};
use crate::{ChatMessage, ChatTemplateError, ToolCallFormat};

/// Name of the template that is used unless the request names another one.
const DEFAULT: &str = "default";
/// Name of the template that is preferred for conversations with tools.
const TOOL_USE: &str = "tool_use";

/// A model's chat templates.
///
/// A template is a program from a downloaded file. It runs on a separate thread, with limits on its
/// instructions, memory, output and processor time, and only when a conversation is rendered.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    templates: Arc<Templates>,
    bounded: Bounded,
}

/// A rendered conversation, as [`TextModel::prepare_chat`](crate::TextModel::prepare_chat) returns
/// it.
#[derive(Clone, Debug)]
pub struct RenderedChat {
    text: String,
    /// The character that separates the pieces to be encoded; `None` for a single piece.
    separator: Option<char>,
}

impl RenderedChat {
    /// Length of the text in bytes.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.text.len()
    }

    /// The text. It contains the separators between the pieces that are encoded one by one.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The rest of the text from the byte `start`, to be encoded by itself.
    ///
    /// # Panics
    /// If `start` is beyond the end or within a character.
    #[must_use]
    pub fn rest(&self, start: usize) -> Self {
        Self { text: self.text[start..].to_owned(), separator: self.separator }
    }

    /// [`replace_in_order`](crate::replace_in_order) in the text.
    #[must_use]
    pub fn replace_in_order(self, placeholder: &str, texts: &[String]) -> (Self, usize) {
        let (text, count) = crate::replace_in_order(&self.text, placeholder, texts);
        (Self { text, ..self }, count)
    }

    /// The pieces of the text, which are encoded one by one.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = &str> {
        let separator = self.separator;
        self.text
            .split(move |character| Some(character) == separator)
            .filter(|piece| !piece.is_empty())
    }
}

/// How a model calls tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToolUse {
    /// The format of its calls.
    pub format: ToolCallFormat,
    /// Whether the tools of a conversation, and with them earlier calls and their results, are
    /// described in the messages instead of being handed to the chat template: it does not support
    /// tools, or has an unknown format. In that case the model was not trained on `format`, and only a grammar makes it
    /// follow that format.
    pub is_described: bool,
}

/// Options for rendering a conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatOptions {
    /// Whether the text ends with the start of the model's answer. True by default.
    pub add_generation_prompt: bool,
    /// Whether the text ends with the content of the last message, so that the model continues it.
    /// Used without `add_generation_prompt`. False by default.
    pub continue_final_message: bool,
    /// JSON schemas of the functions that the model may call. May be empty.
    pub tools: Vec<Value>,
    /// The format in which the model calls tools. `None` selects the one that the template is
    /// recognized by. If there is none, the tools are described in the messages: see [`ToolUse`].
    pub tool_calls: Option<ToolCallFormat>,
    /// Documents for templates that support retrieval. May be empty.
    pub documents: Vec<Value>,
    /// Name of the template. `None` selects `tool_use` if there are tools and the model has this
    /// template, else `default`.
    pub template: Option<String>,
    /// Further variables that the template may read, such as `enable_thinking`.
    pub variables: Map<String, Value>,
    /// Whether special tokens that are spelled out in the conversation become control tokens when
    /// it is encoded. False by default: only the template's own text can contain control tokens.
    pub special_tokens_in_messages: bool,
    /// The time that `strftime_now` formats, in UTC. `None` selects the current time.
    pub now: Option<SystemTime>,
}

impl Default for ChatOptions {
    fn default() -> Self {
        Self {
            add_generation_prompt: true,
            continue_final_message: false,
            tools: Vec::new(),
            tool_calls: None,
            documents: Vec::new(),
            template: None,
            variables: Map::new(),
            special_tokens_in_messages: false,
            now: None,
        }
    }
}

impl ChatTemplate {
    /// Checks the syntax of `(name, source)` templates, without executing them. `special_tokens`
    /// are the variables `bos_token`, `eos_token` and so on.
    ///
    /// # Errors
    /// [`ChatTemplateError::Missing`] for an empty list, [`ChatTemplateError::Malformed`] for a
    /// source that is not valid Jinja or has more than 256 KiB, and for more than 64 templates.
    pub fn new<N: Into<String>, S: AsRef<str>>(
        templates: impl IntoIterator<Item = (N, S)>,
        special_tokens: Map<String, Value>,
    ) -> Result<Self, ChatTemplateError> {
        let mut entries = Vec::new();
        for (name, source) in templates {
            let (name, source) = (name.into(), source.as_ref());
            let malformed = |name, reason| Err(ChatTemplateError::Malformed { name, reason });
            if source.len() > MAX_SOURCE {
                let got = source.len();
                return malformed(name, format!("expected at most {MAX_SOURCE} bytes, got {got}"));
            }
            if entries.len() >= MAX_TEMPLATES {
                return malformed(name, format!("expected at most {MAX_TEMPLATES} templates"));
            }
            entries.push(Entry::new(name, source));
        }
        if entries.is_empty() {
            return Err(ChatTemplateError::Missing);
        }
        let templates = Arc::new(Templates::new(entries, special_tokens));
        let chat = Self { templates, bounded: Bounded::default() };
        let templates = Arc::clone(&chat.templates);
        let check = move || templates.check_syntax();
        chat.bounded.run(&None, MAX_WORK, Duration::MAX, check).unwrap_or_else(|stopped| {
            let name = chat.names().collect::<Vec<_>>().join(", ");
            Err(ChatTemplateError::Malformed { name, reason: stopped.to_string() })
        })?;
        Ok(chat)
    }

    /// The names of the templates.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.templates.entries.iter().map(|entry| entry.name.as_str())
    }

    /// The source of the template that a conversation with these options is rendered with.
    ///
    /// # Errors
    /// [`ChatTemplateError::UnknownName`].
    pub fn source(&self, options: &ChatOptions) -> Result<&str, ChatTemplateError> {
        Ok(&self.templates.entries[self.choose(options)?].source)
    }

    /// Whether the template that a conversation with these options is rendered with reads a
    /// variable, such as `enable_thinking`.
    ///
    /// # Errors
    /// [`ChatTemplateError::UnknownName`].
    pub fn reads_variable(
        &self,
        options: &ChatOptions,
        name: &str,
    ) -> Result<bool, ChatTemplateError> {
        Ok(reads::reads_variable(self.source(options)?, name))
    }

    /// How a model with this template calls tools in a conversation with these options.
    ///
    /// # Errors
    /// [`ChatTemplateError::UnknownName`].
    pub fn tool_use(&self, options: &ChatOptions) -> Result<ToolUse, ChatTemplateError> {
        Ok(self.templates.entries[self.choose(options)?].tool_use(options.tool_calls))
    }

    /// Renders a conversation. The text contains the special tokens, so it must be encoded without
    /// adding any. Blocks the calling thread for up to 10 seconds of processor time, which is as
    /// many seconds or, on a busy machine, up to a minute.
    ///
    /// Messages that the template would refuse or lose get a form that it shows: instructions in
    /// the middle of the conversation become a part of the message before them, messages of the
    /// same role are merged if roles have to alternate, and so on. The form of a message depends on
    /// the template and on earlier messages only.
    ///
    /// # Errors
    /// Any [`ChatTemplateError`] except [`ChatTemplateError::Missing`] and
    /// [`ChatTemplateError::Malformed`].
    pub fn render(
        &self,
        messages: &[ChatMessage],
        options: &ChatOptions,
    ) -> Result<String, ChatTemplateError> {
        let rendered = self.render_separated(messages, options, None, Effort::Full);
        rendered.map(|rendered| rendered.text)
    }

    /// Renders a conversation, with separators in the given spellings.
    pub(crate) fn render_separated(
        &self,
        messages: &[ChatMessage],
        options: &ChatOptions,
        reserved: Option<Arc<Reserved>>,
        effort: Effort,
    ) -> Result<RenderedChat, ChatTemplateError> {
        limits::check_input(messages, options)?;
        let index = self.choose(options)?;
        let (messages, options) = (messages.to_vec(), options.clone());
        let templates = Arc::clone(&self.templates);
        self.bounded
            .run(&None, MAX_WORK, MAX_WAIT, move || {
                templates.render(index, &messages, &options, reserved.as_deref(), effort)
            })
            .unwrap_or_else(|stopped| match stopped {
                Stopped::Busy(busy) => Err(busy.into()),
                stopped => Err(ChatTemplateError::Failed { reason: stopped.to_string() }),
            })
    }

    /// Whether the source of a template contains `spelling`.
    pub(crate) fn mentions(&self, spelling: &str) -> bool {
        self.templates.entries.iter().any(|entry| entry.source.contains(spelling))
    }

    /// The index of the template that the conversation is rendered with.
    fn choose(&self, options: &ChatOptions) -> Result<usize, ChatTemplateError> {
        let find = |name: &str| self.names().position(|other| other == name);
        let tool_use = || if options.tools.is_empty() { None } else { find(TOOL_USE) };
        match &options.template {
            Some(name) => find(name),
            // If there is only one template, its name does not matter.
            None => tool_use()
                .or_else(|| find(DEFAULT))
                .or((self.templates.entries.len() == 1).then_some(0)),
        }
        .ok_or_else(|| ChatTemplateError::UnknownName {
            name: options.template.clone().unwrap_or_else(|| DEFAULT.to_owned()),
            available: self.names().collect::<Vec<_>>().join(", "),
        })
    }
}
