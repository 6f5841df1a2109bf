//! Chat templates: they turn a conversation into the text format that a model was trained on, and
//! render it as `transformers` does. Compiled once per model and read-only afterwards.
//!
//! Templates are Jinja2 programs that rely on Python. minijinja implements most of the language.
//! This file and its child modules add the rest: transformers' whitespace control, printing and
//! JSON as in Python, the methods of Python's strings and mappings, `raise_exception`,
//! `strftime_now`, `{% break %}`, and the `{% generation %}` tags, which matter for training only
//! and are ignored.

mod clock;
mod compile;
mod describe;
mod environment;
mod generation;
mod guards;
mod limits;
mod messages;
mod python;
mod reserved;

use std::error::Error as _;
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use minijinja::machinery::{Vm, make_string_output};
use minijinja::value::Value as Jinja;
use minijinja::{AutoEscape, Environment, ErrorKind, State};
use serde_json::{Map, Value, json};

use self::limits::{Budget, DEADLINE, FUEL, MAX_OUTPUT, MAX_SOURCE, MAX_TEMPLATES};
pub(crate) use self::reserved::Reserved;
use crate::bounded::Bounded;
use crate::{ChatMessage, ChatTemplateError, ToolCallFormat};

/// Name of the template that is used unless the request names another one.
const DEFAULT: &str = "default";
/// The text of the messages that find out what a template supports.
const PROBE: &str = "5tolon pr0be";
/// Name of the template that is preferred for conversations with tools.
const TOOL_USE: &str = "tool_use";

/// A model's chat templates.
///
/// A template is a program from a downloaded file. It runs on a thread of its own, with limits on
/// its instructions, memory, output and time, and only when a conversation is rendered.
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

    /// The pieces of the text, which are encoded one by one.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = &str> {
        let separator = self.separator;
        self.text
            .split(move |character| Some(character) == separator)
            .filter(|piece| !piece.is_empty())
    }
}

#[derive(Debug)]
struct Templates {
    environment: Environment<'static>,
    entries: Vec<Entry>,
    /// The variables `bos_token`, `eos_token` and so on.
    special_tokens: Map<String, Value>,
}

#[derive(Debug)]
struct Entry {
    name: String,
    source: String,
    /// Determined by the first rendering.
    forms: OnceLock<Forms>,
    /// Whether messages with the role `system` are shown. Determined when tools are described for
    /// the first time.
    shows_system: OnceLock<bool>,
}

/// The forms of content that a template supports. Content is converted to the other form if the
/// template supports only one.
#[derive(Clone, Copy, Debug)]
struct Forms {
    /// A list of parts.
    parts: bool,
    strings: bool,
}

/// How a model calls tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToolUse {
    /// The format of its calls.
    pub format: ToolCallFormat,
    /// Whether the tools have to be described in the messages, as
    /// [`ChatOptions::describe_tools`] says: the chat template does not know tools, or has a format
    /// that is not known. The model was not trained on the format then, and only a grammar makes
    /// sure that it keeps to it.
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
    /// Whether tools, and earlier calls with their results, are described in the messages instead of
    /// being handed to the template: for templates that do not know tools. False by default. See
    /// [`ChatTemplate::tool_use`].
    pub describe_tools: bool,
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
            describe_tools: false,
            documents: Vec::new(),
            template: None,
            variables: Map::new(),
            special_tokens_in_messages: false,
            now: None,
        }
    }
}

/// The message of `raise_exception`, carried through minijinja's error type as its source.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

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
            // Jinja2 treats all line endings as `\n`.
            let source = source.replace("\r\n", "\n").replace('\r', "\n");
            let source = generation::replace_generation_tags(&source);
            let (forms, shows_system) = (OnceLock::new(), OnceLock::new());
            entries.push(Entry { name, source, forms, shows_system });
        }
        if entries.is_empty() {
            return Err(ChatTemplateError::Missing);
        }
        let environment = environment::environment();
        let templates = Arc::new(Templates { environment, entries, special_tokens });
        let chat = Self { templates, bounded: Bounded::default() };
        let templates = Arc::clone(&chat.templates);
        chat.bounded.run(DEADLINE, move || templates.check_syntax()).unwrap_or_else(|stopped| {
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

    /// How a model with this template calls tools. `chosen` replaces the format that the template
    /// is recognised by.
    ///
    /// # Errors
    /// [`ChatTemplateError::UnknownName`].
    pub fn tool_use(
        &self,
        options: &ChatOptions,
        chosen: Option<ToolCallFormat>,
    ) -> Result<ToolUse, ChatTemplateError> {
        let source = self.source(options)?;
        let known = chosen.or_else(|| ToolCallFormat::of_template(source));
        let format = known.filter(|_| source.contains("tools"));
        Ok(ToolUse {
            format: format.unwrap_or(ToolCallFormat::Hermes),
            is_described: format.is_none(),
        })
    }

    /// Renders a conversation. The text contains the special tokens, so it must be encoded without
    /// adding any. Blocks the calling thread for at most 10 seconds.
    ///
    /// # Errors
    /// Any [`ChatTemplateError`] except [`ChatTemplateError::Missing`] and
    /// [`ChatTemplateError::Malformed`].
    pub fn render(
        &self,
        messages: &[ChatMessage],
        options: &ChatOptions,
    ) -> Result<String, ChatTemplateError> {
        self.render_separated(messages, options, None).map(|rendered| rendered.text)
    }

    /// Renders a conversation, with separators in the given spellings.
    pub(crate) fn render_separated(
        &self,
        messages: &[ChatMessage],
        options: &ChatOptions,
        reserved: Option<Arc<Reserved>>,
    ) -> Result<RenderedChat, ChatTemplateError> {
        limits::check_input(messages, options)?;
        let index = self.choose(options)?;
        let (messages, options) = (messages.to_vec(), options.clone());
        let templates = Arc::clone(&self.templates);
        self.bounded
            .run(DEADLINE, move || templates.render(index, &messages, options, reserved.as_deref()))
            .unwrap_or_else(|stopped| {
                Err(ChatTemplateError::Failed { reason: stopped.to_string() })
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
            // A single template is used whatever its name is.
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

/// All of this runs on a thread with a large stack.
impl Templates {
    fn check_syntax(&self) -> Result<(), ChatTemplateError> {
        self.entries.iter().try_for_each(|entry| {
            compile::compile(&entry.name, &entry.source).map(drop).map_err(|error| {
                ChatTemplateError::Malformed { name: entry.name.clone(), reason: describe(&error) }
            })
        })
    }

    fn render(
        &self,
        index: usize,
        messages: &[ChatMessage],
        mut options: ChatOptions,
        reserved: Option<&Reserved>,
    ) -> Result<RenderedChat, ChatTemplateError> {
        let entry = &self.entries[index];
        let forms = entry.forms.get_or_init(|| self.probe(entry));
        let mut messages = messages::to_template_values(messages, forms.parts, forms.strings)?;
        if options.describe_tools {
            let tools = std::mem::take(&mut options.tools);
            let system = entry.shows_system.get_or_init(|| self.shows_system(entry, *forms));
            messages = describe::describe(messages, &tools, *system);
        }
        let separator = match reserved {
            Some(reserved) => reserved.separate(&mut messages, &mut options)?,
            None => None,
        };
        if options.continue_final_message {
            messages::mark_end(&mut messages)?;
        }
        let mut text = self.render_values(entry, &messages, &options)?;
        if options.continue_final_message {
            messages::cut_at_mark(&mut text)?;
        }
        Ok(RenderedChat { text, separator })
    }

    fn render_values(
        &self,
        entry: &Entry,
        messages: &[Value],
        options: &ChatOptions,
    ) -> Result<String, ChatTemplateError> {
        // Compiling takes less time than rendering, and the result would borrow from the source.
        let compiled = compile::compile(&entry.name, &entry.source).map_err(failure)?;
        let variables = self.variables(messages, options);
        let mut text = String::new();
        Vm::new(&self.environment)
            .eval(
                &compiled.main,
                variables,
                &compiled.blocks,
                &mut make_string_output(&mut text),
                AutoEscape::None,
            )
            .map_err(failure)?;
        if text.len() > MAX_OUTPUT {
            let got = text.len();
            let reason = format!("expected a text of at most {MAX_OUTPUT} bytes, got {got}");
            return Err(ChatTemplateError::Failed { reason });
        }
        Ok(text)
    }

    fn variables(&self, messages: &[Value], options: &ChatOptions) -> Jinja {
        // An absent list is passed as `none`, as transformers does: templates distinguish it from
        // an undefined variable and from an empty list.
        let or_none = |list: &[Value]| {
            if list.is_empty() { Jinja::from(()) } else { Jinja::from_serialize(list) }
        };
        let now = options.now.unwrap_or_else(SystemTime::now);
        let strftime_now = move |state: &State<'_, '_>, format: &str| {
            // A directive such as `%c` becomes a text of several words.
            Budget::of(state).charge(format.len().saturating_mul(64))?;
            Ok::<_, minijinja::Error>(clock::format_utc(now, format))
        };
        let own = [
            ("messages", Jinja::from_serialize(messages)),
            ("tools", or_none(&options.tools)),
            ("documents", or_none(&options.documents)),
            ("add_generation_prompt", Jinja::from(options.add_generation_prompt)),
            ("strftime_now", Jinja::from_function(strftime_now)),
        ];
        let of_map = |map: &Map<String, Value>| -> Vec<(String, Jinja)> {
            map.iter().map(|(name, value)| (name.clone(), Jinja::from_serialize(value))).collect()
        };
        // Later variables override earlier ones: a request may override special tokens, but not
        // the conversation.
        of_map(&self.special_tokens)
            .into_iter()
            .chain(of_map(&options.variables))
            .chain(own.map(|(name, value)| (name.to_owned(), value)))
            .collect()
    }

    /// Determines which forms of content the template supports, by rendering a message with each.
    fn probe(&self, entry: &Entry) -> Forms {
        let part = json!([{"type": "text", "text": PROBE, "5tolon_type": 1}]);
        let strings = self.shows(entry, &[json!({"role": "user", "content": PROBE})]);
        let parts = self.shows(entry, &[json!({"role": "user", "content": part})]);
        // If both fail, the template needs more than one message. Strings are the common form.
        Forms { parts, strings: strings || !parts }
    }

    /// Determines whether the template shows messages with the role `system`.
    fn shows_system(&self, entry: &Entry, forms: Forms) -> bool {
        let message = |role: &str, text: &str| match forms.strings {
            true => json!({"role": role, "content": text}),
            false => json!({"role": role, "content": [{"type": "text", "text": text}]}),
        };
        self.shows(entry, &[message("system", PROBE), message("user", "Hello")])
    }

    /// Whether the template shows the text of the probe, and nothing else of its part.
    fn shows(&self, entry: &Entry, messages: &[Value]) -> bool {
        let text = self.render_values(entry, messages, &ChatOptions::default());
        // A template that does not support parts prints the whole list, including the types.
        text.is_ok_and(|text| text.contains(PROBE) && !text.contains("5tolon_type"))
    }
}

/// The error and all its sources in one line.
fn describe(error: &minijinja::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(source) = cause {
        text.push_str(": ");
        text.push_str(&source.to_string());
        cause = source.source();
    }
    limits::shortened(text)
}

fn failure(error: minijinja::Error) -> ChatTemplateError {
    let mut cause = error.source();
    while let Some(source) = cause {
        if let Some(Raised(message)) = source.downcast_ref() {
            return ChatTemplateError::Raised { message: message.clone() };
        }
        cause = source.source();
    }
    if error.kind() == ErrorKind::OutOfFuel {
        let reason = format!("expected a template that executes at most {FUEL} instructions");
        return ChatTemplateError::Failed { reason };
    }
    ChatTemplateError::Failed { reason: describe(&error) }
}
