//! Chat templates: they turn a conversation into the text format that a model was trained on, and
//! render it as `transformers` does. Compiled once per model and read-only afterwards.
//!
//! Templates are Jinja2 programs that rely on Python. minijinja implements most of the language.
//! This file and its child modules add the rest: transformers' whitespace control, printing and
//! JSON as in Python, the methods of Python's strings and mappings, `raise_exception`,
//! `strftime_now`, `{% break %}`, and the `{% generation %}` tags, which matter for training only
//! and are ignored.

mod clock;
mod generation;
mod messages;
mod python;

use std::error::Error as _;
use std::time::SystemTime;

use minijinja::{Environment, ErrorKind, UndefinedBehavior, Value as Jinja};
use serde_json::{Map, Value};

use crate::{ChatMessage, ChatTemplateError};

/// Name of the template that is used unless the request names another one.
const DEFAULT: &str = "default";
/// Name of the template that is preferred for conversations with tools.
const TOOL_USE: &str = "tool_use";

/// A model's chat templates.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    entries: Vec<Entry>,
    /// The variables `bos_token`, `eos_token` and so on.
    special_tokens: Map<String, Value>,
}

#[derive(Debug)]
struct Entry {
    name: String,
    /// Whether the template supports content that is a list of parts. Content is converted to the
    /// other form if the template supports only one.
    takes_parts: bool,
    /// Whether the template supports content that is a string.
    takes_strings: bool,
}

/// Options for rendering a conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatOptions {
    /// Whether the text ends with the start of the model's answer. True by default.
    pub add_generation_prompt: bool,
    /// JSON schemas of the functions that the model may call. May be empty.
    pub tools: Vec<Value>,
    /// Documents for templates that support retrieval. May be empty.
    pub documents: Vec<Value>,
    /// Name of the template. `None` selects `tool_use` if there are tools and the model has this
    /// template, else `default`.
    pub template: Option<String>,
    /// Further variables that the template may read, such as `enable_thinking`.
    pub variables: Map<String, Value>,
    /// The time that `strftime_now` formats, in UTC. `None` selects the current time.
    pub now: Option<SystemTime>,
}

impl Default for ChatOptions {
    fn default() -> Self {
        Self {
            add_generation_prompt: true,
            tools: Vec::new(),
            documents: Vec::new(),
            template: None,
            variables: Map::new(),
            now: None,
        }
    }
}

/// The message of `raise_exception`, carried through minijinja's error type as its source.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

impl ChatTemplate {
    /// Compiles `(name, source)` templates. `special_tokens` are the variables `bos_token`,
    /// `eos_token` and so on.
    ///
    /// # Errors
    /// [`ChatTemplateError::Missing`] for an empty list, [`ChatTemplateError::Malformed`] for a
    /// source that is not valid Jinja.
    pub fn new<N: Into<String>, S: AsRef<str>>(
        templates: impl IntoIterator<Item = (N, S)>,
        special_tokens: Map<String, Value>,
    ) -> Result<Self, ChatTemplateError> {
        let mut chat = Self { environment: environment(), entries: Vec::new(), special_tokens };
        for (name, source) in templates {
            let name = name.into();
            // Jinja2 treats all line endings as `\n`.
            let source = source.as_ref().replace("\r\n", "\n").replace('\r', "\n");
            chat.environment
                .add_template_owned(name.clone(), generation::replace_generation_tags(&source))
                .map_err(|error| ChatTemplateError::Malformed {
                    name: name.clone(),
                    reason: describe(&error),
                })?;
            let entry = chat.probe(name);
            chat.entries.push(entry);
        }
        if chat.entries.is_empty() {
            return Err(ChatTemplateError::Missing);
        }
        Ok(chat)
    }

    /// The names of the templates.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|entry| entry.name.as_str())
    }

    /// Renders a conversation. The text contains the special tokens, so it must be encoded without
    /// adding any.
    ///
    /// # Errors
    /// Any [`ChatTemplateError`] except [`ChatTemplateError::Missing`] and
    /// [`ChatTemplateError::Malformed`].
    pub fn render(
        &self,
        messages: &[ChatMessage],
        options: &ChatOptions,
    ) -> Result<String, ChatTemplateError> {
        let entry = self.choose(options)?;
        let messages =
            messages::to_template_values(messages, entry.takes_parts, entry.takes_strings)?;
        self.render_values(&entry.name, &messages, options)
    }

    fn choose(&self, options: &ChatOptions) -> Result<&Entry, ChatTemplateError> {
        let find = |name: &str| self.entries.iter().find(|entry| entry.name == name);
        let tool_use = || if options.tools.is_empty() { None } else { find(TOOL_USE) };
        match &options.template {
            Some(name) => find(name),
            // A single template is used whatever its name is.
            None => tool_use().or_else(|| find(DEFAULT)).or(match self.entries.as_slice() {
                [only] => Some(only),
                _ => None,
            }),
        }
        .ok_or_else(|| ChatTemplateError::UnknownName {
            name: options.template.clone().unwrap_or_else(|| DEFAULT.to_owned()),
            available: self.names().collect::<Vec<_>>().join(", "),
        })
    }

    fn render_values(
        &self,
        name: &str,
        messages: &[Value],
        options: &ChatOptions,
    ) -> Result<String, ChatTemplateError> {
        // An absent list is passed as `none`, as transformers does: templates distinguish it from
        // an undefined variable and from an empty list.
        let or_none = |list: &[Value]| {
            if list.is_empty() { Jinja::from(()) } else { Jinja::from_serialize(list) }
        };
        let now = options.now.unwrap_or_else(SystemTime::now);
        let own = [
            ("messages", Jinja::from_serialize(messages)),
            ("tools", or_none(&options.tools)),
            ("documents", or_none(&options.documents)),
            ("add_generation_prompt", Jinja::from(options.add_generation_prompt)),
            (
                "strftime_now",
                Jinja::from_function(move |format: String| clock::format_utc(now, &format)),
            ),
        ];
        let of_map = |map: &Map<String, Value>| -> Vec<(String, Jinja)> {
            map.iter().map(|(name, value)| (name.clone(), Jinja::from_serialize(value))).collect()
        };
        // Later variables override earlier ones: a request may override special tokens, but not
        // the conversation.
        let variables = of_map(&self.special_tokens)
            .into_iter()
            .chain(of_map(&options.variables))
            .chain(own.map(|(name, value)| (name.to_owned(), value)));
        let template = self.environment.get_template(name).map_err(failure)?;
        template.render(variables.collect::<Jinja>()).map_err(failure)
    }

    /// Determines which forms of content the template supports, by rendering a message with each.
    fn probe(&self, name: String) -> Entry {
        const TEXT: &str = "5tolon pr0be";
        let takes = |content: Value| {
            let message = serde_json::json!({"role": "user", "content": content});
            let text = self.render_values(&name, &[message], &ChatOptions::default());
            // A template that does not support parts prints the whole list, including the types.
            text.is_ok_and(|text| text.contains(TEXT) && !text.contains("5tolon_type"))
        };
        let takes_strings = takes(TEXT.into());
        let takes_parts = takes(serde_json::json!([
            {"type": "text", "text": TEXT, "5tolon_type": 1}
        ]));
        // If both fail, the template needs more than one message. Strings are the common form.
        Entry { name, takes_parts, takes_strings: takes_strings || !takes_parts }
    }
}

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_formatter(|output, _, value| {
        let mut text = String::new();
        python::write_str(value, &mut text);
        output.write_str(&text).map_err(|_| ErrorKind::WriteFailure.into())
    });
    environment.set_unknown_method_callback(python::call_method);
    environment.add_filter("tojson", python::to_json);
    environment.add_filter("string", |value: &Jinja| {
        let mut text = String::new();
        python::write_str(value, &mut text);
        text
    });
    for name in ["length", "count"] {
        environment.add_filter(name, python::length);
    }
    environment.add_filter("int", python::to_int);
    environment.add_filter("float", python::to_float);
    environment.add_test("sequence", python::is_sequence);
    environment.add_test("iterable", python::is_sequence);
    environment.add_function("raise_exception", |message: Jinja| -> Result<Jinja, _> {
        let message = message.to_string();
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message.clone())
            .with_source(Raised(message)))
    });
    environment
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
    text
}

fn failure(error: minijinja::Error) -> ChatTemplateError {
    let mut cause = error.source();
    while let Some(source) = cause {
        if let Some(Raised(message)) = source.downcast_ref() {
            return ChatTemplateError::Raised { message: message.clone() };
        }
        cause = source.source();
    }
    ChatTemplateError::Failed { reason: describe(&error) }
}
