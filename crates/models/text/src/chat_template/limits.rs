//! Limits for chat templates and their input. A template comes from a downloaded file, and the
//! conversation from a client. Neither may use more than a known amount of memory and time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use minijinja::value::{Object, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};
use serde_json::Value as Json;

use super::ChatOptions;
use crate::bounded::is_told_to_stop;
use crate::{ChatMessage, ChatTemplateError, MessageContent};

/// Maximum size of a template's source in bytes. Published templates have at most 30 KB.
pub(super) const MAX_SOURCE: usize = 256 << 10;
/// Maximum number of templates of a model.
pub(super) const MAX_TEMPLATES: usize = 64;
/// Maximum number of tokens between `{{` and `}}` or between `{%` and `%}`. The compiler is
/// recursive, so this bounds its use of the stack.
pub(super) const MAX_TAG_TOKENS: usize = 4000;
/// Maximum size in bytes of the values that the compiler may compute from the constants of a
/// template.
pub(super) const MAX_CONSTANTS: usize = 16 << 20;
/// Number of instructions that a template may execute.
pub(super) const FUEL: u64 = 4_000_000;
/// The same for a rendering that must be quick: about a millisecond.
pub(super) const QUICK_FUEL: u64 = 20_000;
/// The same for a rendering that probes the capabilities of a template: some words with a tool.
pub(super) const PROBE_FUEL: u64 = 200_000;
/// Processor time that a template may take.
pub(super) const MAX_WORK: Duration = Duration::from_secs(10);
/// Maximum size of the rendered text in bytes.
pub(super) const MAX_OUTPUT: usize = 16 << 20;
/// Maximum size of the texts of a conversation in bytes: messages, tools, documents, variables.
pub(super) const MAX_INPUT: usize = 16 << 20;
/// Maximum number of values in a conversation: texts, numbers, lists, objects.
pub(super) const MAX_INPUT_VALUES: usize = 500_000;
/// How deep values may be nested, in the conversation and in what a template prints or compares.
pub(super) const MAX_DEPTH: usize = 100;
/// Bytes that all values made by one rendering may take together, whether still in use or not.
const BUDGET: usize = 256 << 20;
/// The same for a rendering that must be quick.
const QUICK_BUDGET: usize = 1 << 20;
/// Bytes that a value takes in addition to its text.
pub(super) const VALUE: usize = 24;
/// Maximum width of an indentation or of a formatted value, and maximum length of a separator.
pub(super) const MAX_WIDTH: usize = 1000;
/// Maximum length in bytes of a failure's description. It may quote values of the template.
const MAX_DESCRIPTION: usize = 4 << 10;

/// The memory that one rendering may still allocate.
#[derive(Debug)]
pub(super) struct Budget {
    left: AtomicUsize,
}

impl Object for Budget {}

/// The size of a value with everything that it contains.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Size {
    /// Length of all texts in bytes.
    pub(super) text: usize,
    /// Number of values.
    pub(super) values: usize,
    /// Depth of nesting, 1 for a text.
    pub(super) depth: usize,
}

impl Size {
    /// Bytes that the value takes, also when it is printed.
    pub(super) fn bytes(self) -> usize {
        self.text.saturating_add(self.values.saturating_mul(VALUE))
    }
}

pub(super) fn refused(reason: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason.into())
}

impl Budget {
    /// The budget of the rendering that `state` belongs to.
    pub(super) fn of(state: &State<'_, '_>) -> Arc<Self> {
        let new = || {
            let fuel = state.fuel_levels().map(|(used, left)| used + left);
            let bytes = if fuel == Some(QUICK_FUEL) { QUICK_BUDGET } else { BUDGET };
            Self { left: AtomicUsize::new(bytes) }
        };
        state.get_or_set_temp_object("budget", new)
    }

    /// Takes `bytes` from the budget. Fails if the rendering has been told to stop: all operations
    /// that can take long are charged.
    pub(super) fn charge(&self, bytes: usize) -> Result<(), Error> {
        if is_told_to_stop() {
            return Err(refused("it takes too long"));
        }
        self.left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes))
            .map(|_| ())
            .map_err(|_| refused(format!("the values need more than {BUDGET} bytes")))
    }

    /// Takes room for `count` values from the budget.
    pub(super) fn charge_values(&self, count: usize) -> Result<(), Error> {
        self.charge(count.saturating_mul(VALUE))
    }

    /// Takes the length of a string or list, without the contents of the list.
    pub(super) fn charge_items(&self, value: &Value) -> Result<(), Error> {
        match value.as_bytes() {
            Some(text) => self.charge(text.len().saturating_add(VALUE)),
            None => self.charge_values(value.len().unwrap_or(0).saturating_add(1)),
        }
    }

    /// Takes the cost of beginning an iteration, or of reading one item. It costs nothing for a
    /// list or mapping in memory, but the characters of a text are counted, and a sum or product of
    /// lists is read from its beginning.
    pub(super) fn charge_iterated(&self, value: &Value) -> Result<(), Error> {
        let is_counted = value.as_str().is_some() || value.kind() == ValueKind::Iterable;
        if is_counted { self.charge_items(value) } else { Ok(()) }
    }

    /// Determines the size of a value and takes it from the budget. Fails for values that are
    /// nested too deeply, such as a namespace that contains itself.
    pub(super) fn measure(&self, value: &Value) -> Result<Size, Error> {
        let mut size = Size::default();
        self.add(value, 1, &mut size)?;
        Ok(size)
    }

    fn add(&self, value: &Value, depth: usize, size: &mut Size) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(refused(format!("expected at most {MAX_DEPTH} levels of nested values")));
        }
        let text = value.as_bytes().map_or(0, <[u8]>::len);
        self.charge(text.saturating_add(VALUE))?;
        size.text += text;
        size.values += 1;
        size.depth = size.depth.max(depth);
        match value.kind() {
            ValueKind::Seq | ValueKind::Iterable => {
                for item in value.try_iter()? {
                    self.add(&item, depth + 1, size)?;
                }
            }
            ValueKind::Map => {
                for key in value.try_iter()? {
                    self.add(&key, depth + 1, size)?;
                    self.add(&value.get_item(&key).unwrap_or_default(), depth + 1, size)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Converts the result of a lazy operation to a list, so that lazy values are never nested.
    pub(super) fn eager(&self, value: Value) -> Result<Value, Error> {
        if value.kind() != ValueKind::Iterable {
            return Ok(value);
        }
        let mut items = Vec::new();
        for item in value.try_iter()? {
            self.charge_values(1)?;
            items.push(item);
        }
        Ok(items.into())
    }
}

/// Refuses a conversation that is too large.
pub(super) fn check_input(
    messages: &[ChatMessage],
    options: &ChatOptions,
) -> Result<(), ChatTemplateError> {
    let mut input = Input::default();
    for message in messages {
        input.add_text(&message.role)?;
        match &message.content {
            Some(MessageContent::Text(text)) => input.add_text(text)?,
            Some(MessageContent::Parts(parts)) => input.add_all(parts, 1)?,
            None => {}
        }
        for (name, value) in &message.extra {
            input.add_text(name)?;
            input.add(value, 1)?;
        }
    }
    input.add_all(&options.tools, 1)?;
    input.add_all(&options.documents, 1)?;
    for (name, value) in &options.variables {
        input.add_text(name)?;
        input.add(value, 1)?;
    }
    Ok(())
}

/// The size of a conversation so far.
#[derive(Default)]
struct Input {
    bytes: usize,
    values: usize,
}

impl Input {
    fn add_text(&mut self, text: &str) -> Result<(), ChatTemplateError> {
        self.bytes = self.bytes.saturating_add(text.len());
        self.values += 1;
        let check = |what, limit, got| {
            if got > limit { Err(ChatTemplateError::TooLarge { what, limit }) } else { Ok(()) }
        };
        check("bytes of text", MAX_INPUT, self.bytes)?;
        check("values", MAX_INPUT_VALUES, self.values)
    }

    fn add_all(&mut self, values: &[Json], depth: usize) -> Result<(), ChatTemplateError> {
        values.iter().try_for_each(|value| self.add(value, depth))
    }

    fn add(&mut self, value: &Json, depth: usize) -> Result<(), ChatTemplateError> {
        if depth > MAX_DEPTH {
            let what = "levels of nested values";
            return Err(ChatTemplateError::TooLarge { what, limit: MAX_DEPTH });
        }
        match value {
            Json::Array(items) => {
                self.add_text("")?;
                self.add_all(items, depth + 1)
            }
            Json::Object(fields) => {
                self.add_text("")?;
                fields.iter().try_for_each(|(name, value)| {
                    self.add_text(name)?;
                    self.add(value, depth + 1)
                })
            }
            Json::String(text) => self.add_text(text),
            _ => self.add_text(""),
        }
    }
}

/// `text`, shortened to a length that fits in an error message.
pub(super) fn shortened(mut text: String) -> String {
    if text.len() > MAX_DESCRIPTION {
        let end = (0..=MAX_DESCRIPTION).rev().find(|&end| text.is_char_boundary(end));
        text.truncate(end.unwrap_or(0));
        text.push_str("...");
    }
    text
}
