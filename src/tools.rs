//! How a conversation may be answered: with text that follows a grammar, with calls of functions,
//! and with reasoning before both. Models write these in formats of their own, which the chat
//! template tells.

mod run;
mod tool;

use std::str::FromStr;
use std::sync::Arc;

use serde_json::{Map, Value, json};
use stolon_text::{
    AnswerFormat, FunctionSchema, Grammar, GrammarError, MessageContent, Otherwise,
    ReasoningFormat, SchemaOptions, ToolCallGrammar, ToolUse,
};

use crate::{ChatMessage, Engine, Error, Prompt, Request};

pub use run::ToolRun;
pub use tool::{Tool, ToolOutput};

/// Number of tokens at the end of a prompt that can contain the tag that begins the reasoning.
const PROMPT_END: usize = 16;

/// A function that a model may call.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ToolSpec {
    /// The name; see [`ToolSpec::is_name`].
    pub name: String,
    /// What the function does, for the model.
    pub description: Option<String>,
    /// The JSON schema of its arguments, which are an object.
    pub parameters: Value,
    /// Whether the arguments follow the schema in every call. Otherwise they do if a call is
    /// required, or if the model was not trained to call functions.
    pub strict: bool,
    /// The grammar that the arguments of every call follow, if the schema does not say all about
    /// them: [`Grammar::text_argument`].
    pub arguments: Option<Grammar>,
}

impl ToolSpec {
    /// Maximum length of a name in bytes.
    pub const MAX_NAME: usize = 256;

    /// Creates a tool without a description. `strict` is false.
    pub fn new(name: impl Into<String>, parameters: Value) -> Self {
        Self { name: name.into(), description: None, parameters, strict: false, arguments: None }
    }

    /// Whether a function can have this name: letters and digits of ASCII, `_`, `-` and `.`, and at
    /// most [`ToolSpec::MAX_NAME`] of them.
    pub fn is_name(name: &str) -> bool {
        let fits = (1..=Self::MAX_NAME).contains(&name.len());
        fits && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte))
    }

    /// The definition in OpenAI's form, which chat templates expect.
    pub fn definition(&self) -> Value {
        let mut function = Map::new();
        function.insert("name".to_owned(), json!(self.name));
        if let Some(description) = &self.description {
            function.insert("description".to_owned(), json!(description));
        }
        function.insert("parameters".to_owned(), self.parameters.clone());
        json!({"type": "function", "function": function})
    }

    /// Whether the arguments of every call have a form.
    fn is_guaranteed(&self) -> bool {
        self.strict || self.arguments.is_some()
    }

    /// The schema of its calls, for a grammar.
    ///
    /// # Errors
    /// A keyword of a strict schema is not supported.
    fn call_schema(&self, is_guaranteed: bool) -> Result<FunctionSchema, GrammarError> {
        let parameters = match is_guaranteed || self.strict {
            true => self.parameters.clone(),
            false => json!({"type": "object"}),
        };
        let options = SchemaOptions {
            strict: self.strict,
            refuse_unsupported: self.strict,
            additional_properties: false,
        };
        let parameters = options.apply(parameters);
        if self.strict {
            let checked = Grammar::JsonSchema(parameters.clone()).check();
            let name = || Some(self.name.clone());
            checked.map_err(|error| GrammarError { function: name(), ..error })?;
        }
        let arguments = self.arguments.clone().map(Box::new);
        Ok(FunctionSchema { name: self.name.clone(), parameters, arguments })
    }
}

/// Whether a model calls functions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// It does not see them.
    None,
    /// It decides.
    #[default]
    Auto,
    /// The answer consists of one call or several.
    Required,
    /// The answer is a call of this function.
    Function(String),
}

/// The choice of a format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FormatChoice<T> {
    /// The format of the model's chat template.
    #[default]
    Auto,
    /// Answers are not parsed for it.
    Off,
    /// This format.
    Format(T),
}

impl<T: Copy> FormatChoice<T> {
    /// The chosen format, or the one of the template.
    pub fn or_else(self, of_template: impl FnOnce() -> Option<T>) -> Option<T> {
        match self {
            Self::Auto => of_template(),
            Self::Off => None,
            Self::Format(format) => Some(format),
        }
    }
}

impl<T: FromStr<Err = String>> FromStr for FormatChoice<T> {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "auto" => Ok(Self::Auto),
            "none" => Ok(Self::Off),
            name => {
                name.parse().map(Self::Format).map_err(|error| format!("{error}, auto or none"))
            }
        }
    }
}

/// How a conversation may be answered, for [`Engine::with_rules`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AnswerRules {
    /// The functions that the model may call. Of several with one name, the first counts.
    pub tools: Vec<ToolSpec>,
    /// Whether it calls them.
    pub tool_choice: ToolChoice,
    /// Whether an answer has at most one call.
    pub single_call: bool,
    /// The grammar of an answer without calls; `None` if its text is free.
    pub content: Option<Grammar>,
    /// The format of reasoning before the answer.
    pub reasoning: FormatChoice<ReasoningFormat>,
}

impl AnswerRules {
    /// # Errors
    /// `InvalidParameter`.
    fn check(&mut self) -> Result<(), Error> {
        if let Some(tool) = self.tools.iter().find(|tool| !ToolSpec::is_name(&tool.name)) {
            let most = ToolSpec::MAX_NAME;
            let expected = format!("names of 1 to {most} letters, digits, `_`, `-` or `.`");
            return Err(Error::invalid("tools", expected, format!("{:?}", tool.name)));
        }
        match &self.tool_choice {
            ToolChoice::None => self.tools.clear(),
            ToolChoice::Auto => {}
            ToolChoice::Required if self.tools.is_empty() => {
                return Err(Error::invalid("tool_choice", "tools", "a required call without them"));
            }
            ToolChoice::Required => {}
            ToolChoice::Function(name) if self.tools.iter().all(|tool| tool.name != *name) => {
                return Err(Error::invalid("tool_choice", "a name in `tools`", name));
            }
            ToolChoice::Function(_) => self.single_call = true,
        }
        Ok(())
    }

    /// The grammar of the answers; `None` if they are free. `tool_use` says how the model calls
    /// functions; `None` if there are none.
    fn grammar(&mut self, tool_use: Option<ToolUse>) -> Result<Option<Grammar>, GrammarError> {
        let content = self.content.take();
        let Some(ToolUse { format, is_described }) = tool_use else { return Ok(content) };
        let is_auto = self.tool_choice == ToolChoice::Auto;
        // A model that was not trained to call functions needs the grammar for correct calls.
        let is_strict = is_described || self.tools.iter().any(ToolSpec::is_guaranteed);
        let otherwise = match content {
            _ if !is_auto => Otherwise::Nothing,
            Some(content) => Otherwise::Grammar(Box::new(content)),
            None if is_strict => Otherwise::Text,
            None => return Ok(None),
        };
        let callable = |tool: &&ToolSpec| match &self.tool_choice {
            ToolChoice::Function(name) => *name == tool.name,
            _ => true,
        };
        let callable = self.tools.iter().filter(callable);
        let best_effort = callable
            .clone()
            .filter(|tool| !tool.is_guaranteed())
            .map(|tool| tool.name.clone())
            .collect();
        let functions = callable.map(|tool| tool.call_schema(!is_auto || is_described));
        let (functions, single) = (functions.collect::<Result<_, _>>()?, self.single_call);
        let calls = ToolCallGrammar { format, functions, best_effort, single, otherwise };
        Ok(Some(Grammar::ToolCalls(calls)))
    }
}

impl Engine {
    /// A request to answer a conversation by rules. Its functions are shown to the model: by the
    /// chat template, or in the messages if the template does not support functions. The answer's
    /// reasoning and calls are then told from its text, in
    /// [`Completion::answer`](crate::Completion::answer), and a grammar keeps the model to the
    /// rules.
    ///
    /// Functions that [`Request::tools`] or [`Request::chat_options`] has shown to the model are not
    /// shown a second time. For a model with reasoning, the conversation is tokenized, as by
    /// [`Engine::tokenized`].
    ///
    /// ```no_run
    /// use serde_json::json;
    /// use stolon::{AnswerRules, ChatMessage, Engine, Request, ToolSpec};
    ///
    /// # async fn weather(engine: Engine) -> Result<(), stolon::Error> {
    /// let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    /// let mut weather = ToolSpec::new("weather", parameters);
    /// weather.description = Some("The weather in a city.".to_owned());
    /// weather.strict = true;
    /// let rules = AnswerRules { tools: vec![weather], ..AnswerRules::default() };
    /// let request = Request::chat([ChatMessage::user("Do I need an umbrella in Lima?")]);
    /// let request = engine.with_rules(request, rules).await?;
    /// for call in engine.complete(request).await?.answer.calls {
    ///     println!("{}({})", call.name, call.arguments);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `InvalidParameter` for another prompt than a conversation and for rules that contradict each
    /// other, [`Error::Grammar`] for a strict schema with keywords that are not supported, and the
    /// errors of rendering and tokenizing the conversation.
    pub async fn with_rules(
        &self,
        mut request: Request,
        mut rules: AnswerRules,
    ) -> Result<Request, Error> {
        rules.check()?;
        let prefill = match request.prompt() {
            Prompt::Chat(messages) if request.chat.continue_final_message => {
                messages.last().map(text_of).unwrap_or_default()
            }
            Prompt::Chat(_) => String::new(),
            _ => return Err(Error::invalid("prompt", "a conversation", "another prompt")),
        };
        if request.chat.tools.is_empty() && request.tools.is_none() && !rules.tools.is_empty() {
            let options = Arc::make_mut(&mut request.chat);
            options.tools = rules.tools.iter().map(ToolSpec::definition).collect();
        }
        let template = self.chat_template()?;
        let source = template.source(&request.chat)?;
        let tool_use = match rules.tools.is_empty() {
            true => None,
            false => Some(template.tool_use(&request.chat)?),
        };
        let schema = |tool: &ToolSpec| FunctionSchema::new(&tool.name, tool.parameters.clone());
        let mut format = AnswerFormat {
            reasoning: rules.reasoning.or_else(|| ReasoningFormat::of_template(source)),
            tool_calls: tool_use.map(|tool_use| tool_use.format),
            functions: rules.tools.iter().map(schema).collect(),
            single_call: rules.single_call,
            ..AnswerFormat::default()
        };
        let grammar = rules.grammar(tool_use)?;
        format.guaranteed = matches!(grammar, Some(Grammar::ToolCalls(_)));
        request = request.show_special_tokens(format.special_tokens());
        if let Some(reasoning) = format.reasoning {
            request = self.tokenized(request).await?;
            if let Prompt::Tokens(tokens) = request.prompt() {
                // A token has at least one byte.
                let end = tokens.len().saturating_sub(PROMPT_END + prefill.len());
                let end = self.detokenize(&tokens[end..], false)?;
                format.reasoning_is_open = reasoning.is_open_in(&end, &prefill);
            }
        }
        if let Some(grammar) = grammar {
            let is_open = format.reasoning_is_open;
            request = request.grammar(match format.reasoning {
                Some(reasoning) => {
                    Grammar::AfterReasoning { reasoning, is_open, then: Box::new(grammar) }
                }
                None => grammar,
            });
        }
        Ok(request.answer_format(format))
    }
}

/// The text of a message.
fn text_of(message: &ChatMessage) -> String {
    match &message.content {
        Some(MessageContent::Text(text)) => text.clone(),
        Some(MessageContent::Parts(parts)) => {
            parts.iter().filter_map(|part| part["text"].as_str()).collect()
        }
        None => String::new(),
    }
}
