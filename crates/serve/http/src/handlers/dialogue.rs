//! The conversation of any chat API, as it is given to the engine: messages, tools, and the format
//! by which the answer is parsed.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use serde_json::{Map, Value, json};
use stolon::{
    AnswerFormat, CacheMark, ChatMessage, ChatOptions, FunctionSchema, Grammar, GrammarError,
    MessageContent, Otherwise, Prompt, ReasoningFormat, Request, SchemaOptions, ToolCallFormat,
    ToolCallGrammar, ToolUse,
};

use crate::handlers::app::App;
use crate::handlers::context::RequestContext;
use crate::handlers::free_text::{self, Customs};
use crate::handlers::structured;
use crate::wire::advice::Ignored;
use crate::wire::body::brief;
use crate::wire::error::ApiError;
use crate::wire::{history, request_id};

/// Maximum length of a function's name, in bytes.
const MAX_NAME: usize = 256;

/// Number of tokens at the end of a prompt that can contain the tag that begins the reasoning.
const PROMPT_END: usize = 16;

/// The variable of chat templates for the effort of reasoning.
const EFFORT: &str = "reasoning_effort";

/// The variables of chat templates that switch reasoning on and off.
pub(crate) const SWITCHES: [&str; 2] = ["enable_thinking", "thinking"];

/// The effort that switches reasoning off.
const NO_EFFORT: &str = "none";

/// Types of tools that OpenAI's service executes. These are the beginnings of the types, because
/// some end with a date.
const HOSTED: &[&str] = &[
    "apply_patch",
    "code_interpreter",
    "computer",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "shell",
    "tool_search",
    "web_search",
];

/// The choice of a format of tool calls or of reasoning.
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
    pub(crate) fn or_else(self, of_template: impl FnOnce() -> Option<T>) -> Option<T> {
        match self {
            Self::Auto => of_template(),
            Self::Off => None,
            Self::Format(format) => Some(format),
        }
    }
}

impl<T: std::str::FromStr<Err = String>> std::str::FromStr for FormatChoice<T> {
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

/// A conversation to be answered.
#[derive(Debug)]
pub(crate) struct Dialogue {
    /// The messages, oldest first.
    pub(crate) messages: Vec<ChatMessage>,
    /// The parts of the conversation that the client expects to use again.
    pub(crate) marks: Vec<CacheMark>,
    /// Whether an image in the last message is refused by a model that takes none. Otherwise a
    /// placeholder stands for it, as in all other messages.
    pub(crate) keeps_images: bool,
    /// The tools that the model may call. Empty if it must not call any.
    pub(crate) tools: Vec<Tool>,
    /// Which of them it has to call.
    pub(crate) tool_choice: ToolChoice,
    /// Whether an answer may have only one call.
    pub(crate) single_call: bool,
    /// Variables of the chat template.
    pub(crate) variables: Map<String, Value>,
    /// The name in the request of the parameter for the effort of reasoning, and its value.
    pub(crate) effort: Option<(&'static str, String)>,
    /// Whether the prompt ends with the beginning of an answer.
    pub(crate) add_generation_prompt: bool,
    /// Whether the last message is continued.
    pub(crate) continue_final_message: bool,
}

impl Dialogue {
    /// A conversation without tools, as it is answered by default.
    pub(crate) fn new(messages: Vec<ChatMessage>) -> Self {
        Self {
            messages,
            marks: Vec::new(),
            keeps_images: true,
            tools: Vec::new(),
            tool_choice: ToolChoice::Auto,
            single_call: false,
            variables: Map::new(),
            effort: None,
            add_generation_prompt: true,
            continue_final_message: false,
        }
    }

    /// Sets the tools and the rules for calling them. `param` is the name of `tool_choice` in the
    /// request.
    pub(crate) fn set_tools(
        &mut self,
        tools: Vec<Tool>,
        choice: ToolChoice,
        param: &str,
    ) -> Result<(), ApiError> {
        match &choice {
            ToolChoice::None => return Ok(()),
            ToolChoice::Auto => {}
            ToolChoice::Required if tools.is_empty() => {
                let message = format!("`{param}`: a call is required, but there are no `tools`");
                return Err(ApiError::invalid(Some(param), message));
            }
            ToolChoice::Required => {}
            ToolChoice::Function(name) if !tools.iter().any(|tool| tool.name == *name) => {
                let name = brief(&json!(name));
                let message = format!("`{param}`: there is no function {name} in `tools`");
                return Err(ApiError::invalid(Some(param), message));
            }
            ToolChoice::Function(_) => self.single_call = true,
        }
        (self.tools, self.tool_choice) = (tools, choice);
        Ok(())
    }

    /// Number of calls in the conversation.
    fn earlier_calls(&self) -> usize {
        let calls =
            |message: &ChatMessage| message.extra.get("tool_calls")?.as_array().map(Vec::len);
        self.messages.iter().filter_map(calls).sum()
    }

    /// The ids of the calls of an answer to this conversation.
    pub(crate) fn call_ids(&self) -> CallIds {
        CallIds { format: None, earlier: self.earlier_calls() }
    }

    /// Sets the variables of the chat template for the effort of reasoning.
    fn set_effort(
        &mut self,
        app: &App,
        options: &mut ChatOptions,
        ignored: &Ignored,
    ) -> Result<(), ApiError> {
        let Some((param, effort)) = self.effort.take() else { return Ok(()) };
        let templates = app.engine.chat_template()?;
        let thinks = effort != NO_EFFORT;
        let (mut has_switch, mut is_used) = (false, false);
        for name in SWITCHES {
            if templates.reads_variable(options, name).map_err(stolon::Error::from)? {
                has_switch = true;
                // If the request sets the variable itself, that value has precedence.
                is_used |= !options.variables.contains_key(name);
                options.variables.entry(name).or_insert(Value::Bool(thinks));
            }
        }
        let template = templates.source(options).map_err(stolon::Error::from)?;
        if template.contains(EFFORT) && (thinks || !has_switch) {
            is_used = true;
            options.variables.entry(EFFORT).or_insert(Value::String(effort));
        }
        // A template that knows no effort already does what `none` requests.
        if thinks && !is_used {
            ignored.note(param);
        }
        Ok(())
    }

    /// The grammar of the answers; `None` if they are free. `content` is the grammar of an answer
    /// without calls, `tool_use` says how the model calls tools.
    fn grammar(
        &self,
        content: Option<Grammar>,
        tool_use: Option<ToolUse>,
    ) -> Result<Option<Grammar>, ApiError> {
        let is_described = tool_use.is_some_and(|tool_use| tool_use.is_described);
        // A model that was not trained to call tools needs the grammar for correct calls.
        let is_strict = is_described || self.tools.iter().any(|tool| tool.strict);
        let format = tool_use.map(|tool_use| tool_use.format);
        let (format, otherwise) = match (format, &self.tool_choice, content) {
            (Some(format), ToolChoice::Auto, Some(content)) => {
                (format, Otherwise::Grammar(Box::new(content)))
            }
            (Some(format), ToolChoice::Auto, None) if is_strict => (format, Otherwise::Text),
            (Some(format), ToolChoice::Required | ToolChoice::Function(_), _) => {
                (format, Otherwise::Nothing)
            }
            (_, _, content) => return Ok(content),
        };
        let is_auto = self.tool_choice == ToolChoice::Auto;
        let (mut functions, mut best_effort) = (Vec::new(), Vec::new());
        for tool in &self.tools {
            if matches!(&self.tool_choice, ToolChoice::Function(name) if *name != tool.name) {
                continue;
            }
            // The arguments of a function that is not strict are free.
            let parameters = match tool.strict || !is_auto || is_described {
                true => tool.parameters.clone(),
                false => json!({"type": "object"}),
            };
            let options = SchemaOptions {
                strict: tool.strict,
                refuse_unsupported: tool.strict,
                additional_properties: false,
            };
            let parameters = options.apply(parameters);
            if tool.strict {
                let checked = Grammar::JsonSchema(parameters.clone()).check();
                checked.map_err(|error| {
                    let error = GrammarError { function: Some(tool.name.clone()), ..error };
                    structured::refused(&tool.parameters_path, &error)
                })?;
            } else {
                best_effort.push(tool.name.clone());
            }
            functions.push(FunctionSchema { name: tool.name.clone(), parameters });
        }
        let single = self.single_call;
        let calls = ToolCallGrammar { format, functions, best_effort, single, otherwise };
        Ok(Some(Grammar::ToolCalls(calls)))
    }

    /// The tools with free text.
    pub(crate) fn customs(&self) -> Customs {
        let customs = self.tools.iter().filter(|tool| tool.is_custom);
        customs.map(|tool| tool.name.clone()).collect()
    }

    /// The text of the last message, if the answer continues it.
    fn prefill(&self) -> String {
        let last = self.messages.last().filter(|_| self.continue_final_message);
        match last.and_then(|message| message.content.as_ref()) {
            Some(MessageContent::Text(text)) => text.clone(),
            Some(MessageContent::Parts(parts)) => {
                parts.iter().filter_map(|part| part["text"].as_str()).collect()
            }
            None => String::new(),
        }
    }

    /// Paths of the schemas of the tools in the request, by name.
    pub(crate) fn schema_paths(&self) -> HashMap<String, String> {
        let path = |tool: &Tool| (tool.name.clone(), tool.parameters_path.clone());
        self.tools.iter().map(path).collect()
    }

    /// The request to the engine, and the format of its answers. `sign` sets whose request it is,
    /// and `content` is the grammar of an answer without calls.
    pub(crate) async fn prepare(
        mut self,
        context: &RequestContext,
        sign: impl Fn(Request) -> Request + Send,
        content: Option<Grammar>,
    ) -> Result<(Request, AnswerFormat), ApiError> {
        let RequestContext { app, ignored, .. } = context;
        let mut options = ChatOptions {
            add_generation_prompt: self.add_generation_prompt && !self.continue_final_message,
            continue_final_message: self.continue_final_message,
            tools: self.tools.iter().map(Tool::as_value).collect(),
            variables: std::mem::take(&mut self.variables),
            special_tokens_in_messages: app.special_tokens_in_messages,
            ..ChatOptions::default()
        };
        self.set_effort(app, &mut options, ignored)?;
        let templates = app.engine.chat_template()?;
        let template = templates.source(&options).map_err(stolon::Error::from)?;
        let tool_use = tool_use(app, &options)?;
        options.describe_tools = tool_use.is_described;
        let mut format = AnswerFormat {
            reasoning: app.reasoning.or_else(|| ReasoningFormat::of_template(template)),
            single_call: self.single_call,
            ..AnswerFormat::default()
        };
        let tool_use = (!self.tools.is_empty()).then_some(tool_use);
        if let Some(tool_use) = tool_use {
            if app.tool_calls == FormatChoice::Off {
                let message = "the operator has disabled tools with --tool-call-parser none";
                return Err(ApiError::invalid(Some("tools"), message));
            }
            format.tool_calls = Some(tool_use.format);
            format.functions = self.tools.iter().map(Tool::schema).collect();
        }
        let grammar = self.grammar(content, tool_use)?;
        format.guaranteed = matches!(grammar, Some(Grammar::ToolCalls(_)));
        let prefill = self.prefill();
        let messages =
            history::conversation(&app.engine, self.messages, self.keeps_images, ignored);
        let request = Request::chat(messages)
            .chat_options(options)
            .marks(self.marks)
            .show_special_tokens(format.special_tokens());
        // Rendering the conversation is work of the client.
        let mut request = sign(request);
        if let Some(reasoning) = format.reasoning {
            request = app.engine.tokenized(request).await?;
            if let Prompt::Tokens(tokens) = request.prompt() {
                // A token has at least one byte.
                let len = PROMPT_END + prefill.len();
                let end = &tokens[tokens.len().saturating_sub(len)..];
                let end = app.engine.detokenize(end, false)?;
                format.reasoning_is_open = reasoning.is_open_in(&end, &prefill);
            }
        }
        if let Some(grammar) = grammar {
            request = request.grammar(after_reasoning(grammar, &format));
        }
        Ok((request, format))
    }
}

/// The grammar of a whole answer, whose reasoning is free.
fn after_reasoning(grammar: Grammar, format: &AnswerFormat) -> Grammar {
    let Some(reasoning) = format.reasoning else { return grammar };
    let (is_open, then) = (format.reasoning_is_open, Box::new(grammar));
    Grammar::AfterReasoning { reasoning, is_open, then }
}

/// How the model calls tools in a conversation with these options.
pub(crate) fn tool_use(app: &App, options: &ChatOptions) -> Result<ToolUse, ApiError> {
    let chosen = app.tool_calls.or_else(|| None);
    let tool_use = app.engine.chat_template()?.tool_use(options, chosen);
    Ok(tool_use.map_err(stolon::Error::from)?)
}

/// A function that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tool {
    pub(crate) name: String,
    description: Option<String>,
    /// JSON schema of its arguments.
    parameters: Value,
    /// Path of the schema in the request.
    parameters_path: String,
    /// Whether arguments have to follow the schema even if the model decides to call.
    strict: bool,
    /// Whether the client gets the only argument as a text.
    is_custom: bool,
}

impl Tool {
    fn schema(&self) -> FunctionSchema {
        FunctionSchema { name: self.name.clone(), parameters: self.parameters.clone() }
    }

    /// OpenAI's form, which chat templates expect.
    pub(crate) fn as_value(&self) -> Value {
        let mut function = Map::new();
        function.insert("name".to_owned(), json!(self.name));
        if let Some(description) = &self.description {
            function.insert("description".to_owned(), json!(description));
        }
        function.insert("parameters".to_owned(), self.parameters.clone());
        json!({"type": "function", "function": function})
    }
}

/// A function of a request. `path` is the path of the object with its name, and `schema` the name
/// of the member with the schema of its arguments.
pub(crate) fn function_tool(
    (path, schema): (&str, &str),
    name: &str,
    description: Option<&str>,
    parameters: Option<Value>,
    strict: Option<bool>,
) -> Result<Tool, ApiError> {
    let is_of_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    if name.is_empty() || name.len() > MAX_NAME || !name.bytes().all(is_of_name) {
        let expected = format!("1 to {MAX_NAME} letters, digits, `_`, `-` or `.`");
        return Err(ApiError::expected(path, &expected, &json!(name)));
    }
    let parameters_path = format!("{}{schema}", path.trim_end_matches("name"));
    let parameters = match parameters {
        None | Some(Value::Null) => json!({"type": "object", "properties": {}}),
        Some(schema @ Value::Object(_)) => schema,
        Some(other) => return Err(ApiError::expected(&parameters_path, "an object", &other)),
    };
    Ok(Tool {
        name: name.to_owned(),
        description: description.map(str::to_owned),
        parameters,
        parameters_path,
        strict: strict.unwrap_or(false),
        is_custom: false,
    })
}

/// A tool with free text. `path` is the path of the object with its name. The model gets a function
/// with one argument.
pub(crate) fn custom_tool(
    path: &str,
    name: &str,
    description: Option<&str>,
    format: Option<&Value>,
) -> Result<Tool, ApiError> {
    let parameters = Some(free_text::parameters(format));
    let tool = function_tool((path, "format"), name, description, parameters, None)?;
    Ok(Tool { is_custom: true, ..tool })
}

/// Whether a tool of OpenAI's APIs is a function, which the model can call. Tools that it cannot
/// call are noted and left out.
pub(crate) fn is_function(path: &str, kind: &str, ignored: &Ignored) -> Result<bool, ApiError> {
    if kind == "function" {
        return Ok(true);
    }
    check_hosted(path, kind, HOSTED, ignored)?;
    Ok(false)
}

/// Notes a tool that is left out, or refuses one whose type is not known. `hosted` has the
/// beginnings of known types.
pub(crate) fn check_hosted(
    path: &str,
    kind: &str,
    hosted: &[&str],
    ignored: &Ignored,
) -> Result<(), ApiError> {
    if hosted.iter().any(|hosted| kind.starts_with(hosted)) {
        ignored.note(&format!("tools.{kind}"));
        return Ok(());
    }
    let path = format!("{path}type");
    Err(ApiError::expected(&path, "function or a type of tool that is known", &json!(kind)))
}

/// The rule of a request for calling tools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    /// The model must not call any.
    None,
    /// The model decides.
    Auto,
    /// The model has to call one or several.
    Required,
    /// The model has to call this function.
    Function(String),
}

/// Reads OpenAI's `tool_choice`. An object that names a function has the member `name` in
/// responses, and the member `function` with the name in chat completions.
pub(crate) fn tool_choice(choice: Option<&Value>) -> Result<ToolChoice, ApiError> {
    let Some(choice) = choice.filter(|choice| !choice.is_null()) else {
        return Ok(ToolChoice::Auto);
    };
    let named = || {
        let kind = choice["type"].as_str().filter(|kind| ["function", "custom"].contains(kind))?;
        choice[kind]["name"].as_str().or(choice["name"].as_str())
    };
    match choice.as_str() {
        Some("auto") => Ok(ToolChoice::Auto),
        Some("none") => Ok(ToolChoice::None),
        Some("required") => Ok(ToolChoice::Required),
        Some(_) | None => match named() {
            Some(name) => Ok(ToolChoice::Function(name.to_owned())),
            None => {
                let expected = "auto, none, required, a function or a custom tool";
                let error = ApiError::expected("tool_choice", expected, choice);
                Err(error.code("unsupported_parameter"))
            }
        },
    }
}

/// The ids of the calls of an answer, as the model's chat template prints them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CallIds {
    format: Option<ToolCallFormat>,
    /// Number of calls in the conversation before the answer.
    earlier: usize,
}

impl CallIds {
    /// The ids for a model that calls tools in this format.
    pub(crate) fn with_format(self, format: Option<ToolCallFormat>) -> Self {
        Self { format, ..self }
    }

    /// A new id of the call number `index` of an answer. Mistral's chat templates accept only ids
    /// of nine letters and digits. Kimi's print them into the next turn, and the model reads the
    /// name of the function in them and the number of the call in the conversation.
    pub(crate) fn id(self, prefix: &str, index: usize, name: &str) -> String {
        match self.format {
            Some(ToolCallFormat::Mistral) => short_id(),
            Some(ToolCallFormat::Kimi) => format!("functions.{name}:{}", self.earlier + index),
            _ => format!("{prefix}{}", request_id::fresh()),
        }
    }
}

/// A new id of nine letters and digits.
fn short_id() -> String {
    const DIGITS: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
    let mut hasher = DefaultHasher::new();
    request_id::fresh().hash(&mut hasher);
    let digit =
        |place: u32| char::from(DIGITS[(hasher.finish() / 36_u64.pow(place) % 36) as usize]);
    (0..9).map(digit).collect()
}
