//! Executes the templates of a model. All of this runs on a thread with a large stack.

use std::error::Error as _;
use std::sync::OnceLock;
use std::time::SystemTime;

use minijinja::machinery::{Vm, make_string_output};
use minijinja::value::Value as Jinja;
use minijinja::{AutoEscape, Environment, ErrorKind, State};
use serde_json::{Map, Value, json};

use super::limits::{self, Budget, FUEL, MAX_OUTPUT, QUICK_FUEL};
use super::{ChatOptions, RenderedChat, Reserved};
use super::{clock, compile, describe, environment, generation, messages};
use crate::{ChatMessage, ChatTemplateError};

/// The text of the messages that find out what a template supports.
const PROBE: &str = "5tolon pr0be";

#[derive(Debug)]
pub(super) struct Templates {
    environment: Environment<'static>,
    /// The environment of renderings that must be quick.
    quick: Environment<'static>,
    pub(super) entries: Vec<Entry>,
    /// The variables `bos_token`, `eos_token` and so on.
    special_tokens: Map<String, Value>,
}

/// How much work a rendering may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effort {
    /// About a millisecond. A rendering that needs more fails.
    Quick,
    /// As much as any rendering may be.
    Full,
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) source: String,
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
    /// One text.
    strings: bool,
}

/// The message of `raise_exception`, carried through minijinja's error type as its source.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Raised(pub(super) String);

impl Entry {
    pub(super) fn new(name: String, source: &str) -> Self {
        // Jinja2 treats all line endings as `\n`.
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        let source = generation::replace_generation_tags(&source);
        Self { name, source, forms: OnceLock::new(), shows_system: OnceLock::new() }
    }
}

impl Entry {
    /// Whether the results of calls are a member of the message with the calls, and messages with
    /// the role `tool` are not understood: the first templates of Gemma 4.
    fn reads_responses(&self) -> bool {
        let knows_role = ["== 'tool'", "!= 'tool'"].iter().any(|text| self.source.contains(text));
        self.source.contains("tool_responses") && !knows_role
    }
}

impl Templates {
    pub(super) fn new(entries: Vec<Entry>, special_tokens: Map<String, Value>) -> Self {
        let [environment, quick] = [FUEL, QUICK_FUEL].map(environment::environment);
        Self { environment, quick, entries, special_tokens }
    }

    pub(super) fn check_syntax(&self) -> Result<(), ChatTemplateError> {
        self.entries.iter().try_for_each(|entry| {
            compile::compile(&entry.name, &entry.source).map(drop).map_err(|error| {
                ChatTemplateError::Malformed { name: entry.name.clone(), reason: describe(&error) }
            })
        })
    }

    pub(super) fn render(
        &self,
        index: usize,
        messages: &[ChatMessage],
        mut options: ChatOptions,
        reserved: Option<&Reserved>,
        effort: Effort,
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
        // After the separation, which trusts messages of the assistant more than results.
        if entry.reads_responses() {
            messages = messages::with_responses(messages);
        }
        if options.continue_final_message {
            messages::mark_end(&mut messages)?;
        }
        let mut text = self.render_values(entry, &messages, &options, effort)?;
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
        effort: Effort,
    ) -> Result<String, ChatTemplateError> {
        let environment = match effort {
            Effort::Quick => &self.quick,
            Effort::Full => &self.environment,
        };
        // Compiling takes less time than rendering, and the result would borrow from the source.
        let compiled = compile::compile(&entry.name, &entry.source).map_err(failure)?;
        let variables = self.variables(messages, options);
        let mut text = String::new();
        Vm::new(environment)
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
        let text = self.render_values(entry, messages, &ChatOptions::default(), Effort::Full);
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
