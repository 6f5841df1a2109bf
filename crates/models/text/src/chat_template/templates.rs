//! Executes the templates of a model. All of this runs on a thread with a large stack.

use std::error::Error as _;
use std::sync::OnceLock;
use std::time::SystemTime;

use minijinja::machinery::{Vm, make_string_output};
use minijinja::value::Value as Jinja;
use minijinja::{AutoEscape, Environment, ErrorKind, State};
use serde_json::{Map, Value};

use super::capabilities::Capabilities;
use super::limits::{self, Budget, FUEL, MAX_OUTPUT, PROBE_FUEL, QUICK_FUEL};
use super::{ChatOptions, RenderedChat, Reserved, ToolUse};
use super::{clock, compile, environment, generation, history, messages, reads};
use crate::bounded::is_told_to_stop;
use crate::{ChatMessage, ChatTemplateError, ToolCallFormat};

#[derive(Debug)]
pub(super) struct Templates {
    environment: Environment<'static>,
    /// The environment of renderings that must be quick.
    quick: Environment<'static>,
    /// The environment of probes.
    probe: Environment<'static>,
    pub(super) entries: Vec<Entry>,
    /// The variables `bos_token`, `eos_token` and so on.
    special_tokens: Map<String, Value>,
}

/// How much work a rendering may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effort {
    /// About a millisecond. A rendering that needs more fails.
    Quick,
    /// As much as the rendering of a few words may be.
    Probe,
    /// As much as any rendering may be.
    Full,
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) source: String,
    /// The format of calls that the template is recognized by.
    tool_calls: Option<ToolCallFormat>,
    /// Determined by the first rendering.
    capabilities: OnceLock<Capabilities>,
}

/// A fact about the template that the first rendering finds out by rendering probes. A rendering
/// that is told to stop meanwhile finds out nothing.
fn found_out<T: Copy>(known: &OnceLock<T>, find_out: impl FnOnce() -> T) -> T {
    if let Some(known) = known.get() {
        return *known;
    }
    let found = find_out();
    if is_told_to_stop() { found } else { *known.get_or_init(|| found) }
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
        let tool_calls = ToolCallFormat::of_template(&source);
        Self { name, source, tool_calls, capabilities: OnceLock::new() }
    }

    /// How a model with this template calls tools. `chosen` replaces the format that the template
    /// is recognized by.
    pub(super) fn tool_use(&self, chosen: Option<ToolCallFormat>) -> ToolUse {
        let known = chosen.or(self.tool_calls);
        let format = known.filter(|_| self.source.contains("tools"));
        ToolUse { format: format.unwrap_or(ToolCallFormat::Hermes), is_described: format.is_none() }
    }

    /// Whether the results of calls are a member of the message with the calls, and messages with
    /// the role `tool` are not understood: the first templates of Gemma 4.
    fn reads_responses(&self) -> bool {
        let knows_role = ["== 'tool'", "!= 'tool'"].iter().any(|text| self.source.contains(text));
        self.source.contains("tool_responses") && !knows_role
    }

    /// The name by which the template reads the reasoning of earlier answers, if it is not the
    /// usual one: `reasoning` or, in gpt-oss, `thinking`.
    fn reasoning_member(&self) -> Option<&'static str> {
        let reads = |name: &str| reads::reads_member(&self.source, name);
        let others = ["reasoning", "thinking"];
        others.into_iter().find(|name| reads(name)).filter(|_| !reads(messages::REASONING))
    }
}

impl Templates {
    pub(super) fn new(entries: Vec<Entry>, special_tokens: Map<String, Value>) -> Self {
        let [environment, quick, probe] =
            [FUEL, QUICK_FUEL, PROBE_FUEL].map(environment::environment);
        Self { environment, quick, probe, entries, special_tokens }
    }

    pub(super) fn check_syntax(&self) -> Result<(), ChatTemplateError> {
        self.entries.iter().try_for_each(|entry| {
            compile::compile(&entry.name, &entry.source).map(drop).map_err(|error| {
                ChatTemplateError::Malformed { name: entry.name.clone(), reason: describe(&error) }
            })
        })
    }

    /// Renders a conversation. Messages that the template cannot show as they are get another form.
    /// If the template still refuses the conversation, forms are tried that every template can
    /// show.
    pub(super) fn render(
        &self,
        index: usize,
        messages: &[ChatMessage],
        options: &ChatOptions,
        reserved: Option<&Reserved>,
        effort: Effort,
    ) -> Result<RenderedChat, ChatTemplateError> {
        let entry = &self.entries[index];
        let can = found_out(&entry.capabilities, || self.probe(entry));
        let rendered = self.render_as(entry, messages, options.clone(), reserved, effort, can);
        let refused = |error: &ChatTemplateError| {
            matches!(error, ChatTemplateError::Raised { .. } | ChatTemplateError::Failed { .. })
        };
        match rendered {
            Err(error) if effort == Effort::Full && refused(&error) => [true, false]
                .into_iter()
                .map(|calls| can.least(calls))
                .find_map(|can| {
                    self.render_as(entry, messages, options.clone(), reserved, effort, can).ok()
                })
                .ok_or(error),
            rendered => rendered,
        }
    }

    /// Renders a conversation in a form for a template with these capabilities.
    fn render_as(
        &self,
        entry: &Entry,
        messages: &[ChatMessage],
        mut options: ChatOptions,
        reserved: Option<&Reserved>,
        effort: Effort,
        can: Capabilities,
    ) -> Result<RenderedChat, ChatTemplateError> {
        let messages = messages::to_values(messages, &can)?;
        let is_described =
            !options.tools.is_empty() && entry.tool_use(options.tool_calls).is_described;
        let described = is_described.then(|| std::mem::take(&mut options.tools));
        let mut messages = history::settle(messages, described.as_deref(), &can);
        messages::join_parts(&mut messages, &can);
        let separator = match reserved {
            Some(reserved) => reserved.separate(&mut messages, &mut options)?,
            None => None,
        };
        if let Some(member) = entry.reasoning_member() {
            messages::name_reasoning(&mut messages, member);
        }
        // This comes after the separation, which trusts messages of the assistant more than
        // results.
        if entry.reads_responses() {
            messages = messages::with_responses(messages);
        }
        if options.continue_final_message {
            messages::mark_end(&mut messages)?;
        }
        let mut text = self.render_values(entry, &messages, &options, effort, can.no_tools)?;
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
        no_tools: bool,
    ) -> Result<String, ChatTemplateError> {
        let environment = match effort {
            Effort::Quick => &self.quick,
            Effort::Probe => &self.probe,
            Effort::Full => &self.environment,
        };
        // Compiling takes less time than rendering, and the result would borrow from the source.
        let compiled = compile::compile(&entry.name, &entry.source).map_err(failure)?;
        let variables = self.variables(messages, options, no_tools);
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

    fn variables(&self, messages: &[Value], options: &ChatOptions, no_tools: bool) -> Jinja {
        // An absent list is passed as `none`, as transformers does: templates distinguish it from
        // an undefined variable and from an empty list. Templates for tools only fail with `none`.
        let list = |list: &[Value]| Jinja::from_serialize(list);
        let or_none =
            |items: &[Value]| if items.is_empty() { Jinja::from(()) } else { list(items) };
        let now = options.now.unwrap_or_else(SystemTime::now);
        let strftime_now = move |state: &State<'_, '_>, format: &str| {
            // A directive such as `%c` becomes several words.
            Budget::of(state).charge(format.len().saturating_mul(64))?;
            Ok::<_, minijinja::Error>(clock::format_utc(now, format))
        };
        let own = [
            ("messages", Jinja::from_serialize(messages)),
            ("tools", if no_tools { or_none(&options.tools) } else { list(&options.tools) }),
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

    /// Determines the capabilities of a template.
    fn probe(&self, entry: &Entry) -> Capabilities {
        Capabilities::probe(|messages, tools, can| {
            let options = ChatOptions { tools: tools.to_vec(), ..ChatOptions::default() };
            let mut messages = messages.to_vec();
            if entry.reads_responses() {
                messages = messages::with_responses(messages);
            }
            self.render_values(entry, &messages, &options, Effort::Probe, can.no_tools).ok()
        })
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
