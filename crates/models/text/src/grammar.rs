//! Structured output: grammars that an answer has to follow, token by token.
//!
//! A [`Grammar`] describes the form of an answer. `GrammarCompiler` turns it into a
//! `CompiledGrammar` for the vocabulary of one model, and `GrammarState` follows one sequence: it
//! knows which tokens may come next. The parser is the crate `llguidance`, an Earley parser over a
//! lexer of regular expression derivatives.
//!
//! 1. The vocabulary becomes a trie when a model is loaded.
//! 2. A grammar is checked against the limits of this module and compiled on a separate thread,
//!    within a limit on its processor time. A bounded cache keeps the parsers of recent grammars as
//!    they are before the first token, and each request gets a copy.
//! 3. A token is accepted: `GrammarState::begin` starts the work for the next mask on a worker
//!    thread, while the model computes the next step.
//! 4. `GrammarState::mask` waits for it when the logits are there.

#[cfg(feature = "grammar")]
mod cache;
#[cfg(feature = "grammar")]
mod calls;
#[cfg(feature = "grammar")]
mod compile;
mod disjoint;
#[cfg(feature = "grammar")]
mod gbnf;
#[cfg(feature = "grammar")]
mod json_text;
#[cfg(feature = "grammar")]
mod mask;
#[cfg(feature = "grammar")]
mod messages;
#[cfg(feature = "grammar")]
mod regex;
mod relax;
mod schema;
#[cfg(feature = "grammar")]
mod state;
#[cfg(feature = "grammar")]
mod workers;

use serde_json::Value;
#[cfg(feature = "grammar")]
use serde_json::json;

#[cfg(feature = "grammar")]
pub use self::compile::{CompiledGrammar, GrammarCompiler};
#[cfg(feature = "grammar")]
pub use self::mask::TokenMask;
pub use self::relax::SchemaOptions;
#[cfg(feature = "grammar")]
pub use self::state::GrammarState;
use crate::{Busy, ReasoningFormat, ToolCallFormat};

/// A grammar that an answer has to follow.
///
/// Between the parts of JSON there may be a space, or a line break and up to 16 spaces. Objects
/// have their properties in the order of the schema.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Grammar {
    /// A JSON object.
    JsonObject,
    /// A JSON value that is valid under this JSON schema (draft 2020-12). Keywords that are not
    /// implemented are errors; [`Grammar::check`] names them. Annotations, such as `title`, have no
    /// effect. The alternatives of `oneOf` must be disjoint: by their types, or by constants of a
    /// property that all require. [`SchemaOptions`] takes schemas less strictly. The only
    /// references that are supported are paths in the schema: `#/$defs/name`.
    JsonSchema(Value),
    /// A text that a regular expression matches as a whole, in the syntax of the crate `regex`
    /// without look-around and back-references. `^` at the beginning and `$` at the end are
    /// allowed.
    Regex(String),
    /// A text of a context-free grammar in the syntax of Lark, with the extensions of
    /// `llguidance`. The start rule is `start`.
    Lark(String),
    /// A text of a context-free grammar in GBNF, the syntax of llama.cpp. The start rule is `root`.
    Gbnf(String),
    /// One of these strings.
    Choice(Vec<String>),
    /// Calls of functions, in the format of the model.
    ToolCalls(ToolCallGrammar),
    /// The model's reasoning, which is free, and then an answer that follows a grammar.
    AfterReasoning {
        /// The tags around the reasoning.
        reasoning: ReasoningFormat,
        /// Whether the prompt ends with the tag that begins the reasoning. If not, the answer may
        /// have no reasoning.
        is_open: bool,
        /// The grammar of the answer after the reasoning.
        then: Box<Grammar>,
    },
}

/// An answer that calls functions. Names and arguments are those of `functions`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCallGrammar {
    /// The format of the calls.
    pub format: ToolCallFormat,
    /// The functions that may be called; at least one.
    pub functions: Vec<FunctionSchema>,
    /// The names of functions whose arguments may be any object if a grammar cannot follow their
    /// schemas. If it cannot follow the schema of another function, it is refused.
    pub best_effort: Vec<String>,
    /// Whether the answer may have only one call.
    pub single: bool,
    /// The form of the answer if it has no call, and of the text before its calls.
    pub otherwise: Otherwise,
}

/// A function that may be called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionSchema {
    /// Its name: letters, digits, `_`, `-` and `.`.
    pub name: String,
    /// JSON schema of its arguments, which are an object.
    pub parameters: Value,
    /// The grammar of its arguments, if the schema does not say all about them:
    /// [`Grammar::text_argument`].
    pub arguments: Option<Box<Grammar>>,
}

/// The form of an answer without calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Otherwise {
    /// Nothing: the answer has at least one call.
    Nothing,
    /// Any text, also before and between calls.
    Text,
    /// An answer without calls follows this grammar.
    Grammar(Box<Grammar>),
}

/// The reason why a grammar is refused, or cannot be followed any further.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}{reason}", place(function.as_deref(), path))]
pub struct GrammarError {
    /// The function whose schema is the cause, if it is the schema of a function.
    pub function: Option<String>,
    /// Path of the cause in a JSON schema, for example `properties.name.uniqueItems`. Empty if the
    /// cause is the grammar as a whole.
    pub path: String,
    /// What was expected and what was found.
    pub reason: String,
}

/// Why a grammar could not be compiled, or is not followed any further.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarFailure {
    /// The grammar is invalid, not supported or too large.
    #[error(transparent)]
    Invalid(#[from] GrammarError),
    /// The machine was too busy.
    #[error(transparent)]
    Busy(#[from] Busy),
}

impl GrammarError {
    pub(crate) fn new(reason: impl Into<String>) -> Self {
        Self { function: None, path: String::new(), reason: reason.into() }
    }
}

/// The place of an error's cause.
fn place(function: Option<&str>, path: &str) -> String {
    match (function, path) {
        (None, "") => String::new(),
        (None, path) => format!("`{path}`: "),
        (Some(function), "") => format!("the function `{function}`: "),
        (Some(function), path) => format!("the function `{function}`: `{path}`: "),
    }
}

impl Grammar {
    /// Maximum length of a grammar in Lark or GBNF, in bytes.
    pub const MAX_BYTES: usize = 64 << 10;
    /// Maximum length of a regular expression in bytes, also of one in a JSON schema, and of a line
    /// of a grammar.
    pub const MAX_REGEX_BYTES: usize = 4 << 10;
    /// Maximum number of strings of a choice.
    pub const MAX_CHOICES: usize = 4096;
    /// Maximum length in bytes of all names and strings of a JSON schema, and of all strings of a
    /// choice.
    pub const MAX_SCHEMA_BYTES: usize = 256 << 10;
    /// Maximum number of values of a JSON schema.
    pub const MAX_SCHEMA_VALUES: usize = 64 << 10;
    /// Maximum depth of nested values of a JSON schema.
    pub const MAX_SCHEMA_DEPTH: usize = 64;
    /// Maximum number of different patterns in all `patternProperties` of a JSON schema. Each two
    /// are compared, because a name may match only one.
    pub const MAX_SCHEMA_PATTERNS: usize = 32;
    /// Maximum value of `maxLength`, `maxItems` and the like in a JSON schema.
    pub const MAX_SCHEMA_COUNT: u64 = 65_536;

    /// An object with one member, a string whose text follows a grammar in Lark.
    ///
    /// # Errors
    /// The grammar has parts that are not possible in a JSON string: special tokens, other grammars,
    /// attributes of rules, complements and intersections of terminals, assertions.
    #[cfg(feature = "grammar")]
    pub fn text_argument(name: &str, lark: &str) -> Result<Self, GrammarError> {
        json_text::to_lark(name, lark).map(Self::Lark)
    }

    /// Without the feature `grammar`, this is an error.
    ///
    /// # Errors
    /// In each case.
    #[cfg(not(feature = "grammar"))]
    pub fn text_argument(_name: &str, _lark: &str) -> Result<Self, GrammarError> {
        Err(GrammarError::new("this library was built without the feature `grammar`"))
    }

    /// A context-free grammar in Lark or GBNF. Only GBNF has `::=` between the name of a rule and
    /// its body.
    #[must_use]
    pub fn of_text(text: String) -> Self {
        if text.contains("::=") { Self::Gbnf(text) } else { Self::Lark(text) }
    }

    /// Checks the limits of a grammar, and the keywords of its JSON schemas. Takes time in
    /// proportion to the length of the grammar.
    ///
    /// # Errors
    /// [`GrammarError`] with the path of the first keyword that is not supported.
    pub fn check(&self) -> Result<(), GrammarError> {
        match self {
            Self::JsonObject => Ok(()),
            Self::JsonSchema(value) => schema::supported(value).map(|_| ()),
            Self::Regex(text) => {
                check_len("a regular expression", text.len(), Self::MAX_REGEX_BYTES)
            }
            Self::Lark(text) | Self::Gbnf(text) => {
                check_len("a grammar", text.len(), Self::MAX_BYTES)?;
                // A regular expression is in one line.
                let longest = text.lines().map(str::len).max().unwrap_or(0);
                check_len("lines of a grammar", longest, Self::MAX_REGEX_BYTES)
            }
            Self::Choice(texts) => check_choice(texts),
            Self::ToolCalls(calls) => calls.check(),
            Self::AfterReasoning { then, .. } => match **then {
                Self::AfterReasoning { .. } => Err(GrammarError::new("reasoning after reasoning")),
                ref then => then.check(),
            },
        }
    }
}

impl ToolCallGrammar {
    /// The functions whose schemas have to be followed.
    fn followed(&self) -> impl Iterator<Item = &FunctionSchema> {
        self.functions.iter().filter(|function| !self.best_effort.contains(&function.name))
    }

    fn check(&self) -> Result<(), GrammarError> {
        if self.functions.is_empty() || self.functions.len() > Grammar::MAX_CHOICES {
            let (max, got) = (Grammar::MAX_CHOICES, self.functions.len());
            return Err(GrammarError::new(format!("expected 1 to {max} functions, got {got}")));
        }
        let is_of_name = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
        for function in &self.functions {
            if function.name.is_empty() || !function.name.bytes().all(is_of_name) {
                let expected = "expected a name of letters, digits, `_`, `-` and `.`";
                return Err(GrammarError::new(format!("{expected}, got {:?}", function.name)));
            }
        }
        for function in self.followed() {
            schema::supported(&function.parameters).map_err(|error| {
                let function = Some(function.name.clone());
                GrammarError { function, ..error }
            })?;
        }
        let values = self.followed().map(|function| schema::count(&function.parameters));
        if values.sum::<usize>() > Grammar::MAX_SCHEMA_VALUES {
            let max = Grammar::MAX_SCHEMA_VALUES;
            let reason = format!("expected at most {max} values in the schemas of all functions");
            return Err(GrammarError::new(reason));
        }
        match &self.otherwise {
            Otherwise::Nothing | Otherwise::Text => Ok(()),
            Otherwise::Grammar(grammar) => match **grammar {
                Grammar::ToolCalls(_) | Grammar::AfterReasoning { .. } => {
                    Err(GrammarError::new("expected a grammar of a text instead of calls"))
                }
                ref grammar => grammar.check(),
            },
        }
    }
}

#[cfg(feature = "grammar")]
impl Grammar {
    /// The calls that an answer may have.
    fn calls(&self) -> Option<&ToolCallGrammar> {
        match self {
            Self::ToolCalls(calls) => Some(calls),
            Self::AfterReasoning { then, .. } => then.calls(),
            _ => None,
        }
    }

    /// The same with any object as arguments of the functions with these names.
    fn with_free_arguments(&self, names: &[String]) -> Grammar {
        let mut grammar = self.clone();
        let calls = match &mut grammar {
            Self::ToolCalls(calls) => calls,
            Self::AfterReasoning { then, .. } => {
                **then = then.with_free_arguments(names);
                return grammar;
            }
            _ => return grammar,
        };
        for function in &mut calls.functions {
            if names.contains(&function.name) {
                function.parameters = json!({"type": "object"});
            }
        }
        grammar
    }
}

impl FunctionSchema {
    /// A function whose arguments follow a JSON schema.
    pub fn new(name: impl Into<String>, parameters: Value) -> Self {
        Self { name: name.into(), parameters, arguments: None }
    }
}

#[cfg(feature = "grammar")]
impl FunctionSchema {
    /// The grammar of the arguments, which are always an object, also if the schema allows other
    /// values.
    fn arguments(&self) -> Grammar {
        if let Some(grammar) = &self.arguments {
            return Grammar::clone(grammar);
        }
        let mut schema = self.parameters.clone();
        match &mut schema {
            Value::Object(members) => drop(members.insert("type".to_owned(), json!("object"))),
            Value::Bool(true) => schema = json!({"type": "object"}),
            // Refused where it is compiled.
            _ => {}
        }
        Grammar::JsonSchema(schema)
    }
}

fn check_len(what: &str, got: usize, max: usize) -> Result<(), GrammarError> {
    if (1..=max).contains(&got) {
        return Ok(());
    }
    Err(GrammarError::new(format!("expected {what} of 1 to {max} bytes, got {got} bytes")))
}

fn check_choice(texts: &[String]) -> Result<(), GrammarError> {
    if texts.is_empty() || texts.len() > Grammar::MAX_CHOICES {
        let (max, got) = (Grammar::MAX_CHOICES, texts.len());
        return Err(GrammarError::new(format!("expected 1 to {max} choices, got {got}")));
    }
    check_len("choices", texts.iter().map(String::len).sum(), Grammar::MAX_SCHEMA_BYTES)
}
