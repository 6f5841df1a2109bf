//! The conversation of any chat API, as it is given to the engine: messages, tools, and the format
//! by which the answer is parsed.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use serde_json::{Map, Value, json};
use stolon::{
    AnswerRules, CacheMark, ChatMessage, ChatOptions, FormatChoice, Grammar, Request,
    ToolCallFormat, ToolChoice, ToolSpec,
};

use crate::handlers::app::App;
use crate::handlers::context::RequestContext;
use crate::handlers::free_text::{self, Customs};
use crate::handlers::structured;
use crate::wire::advice::Ignored;
use crate::wire::body::brief;
use crate::wire::error::ApiError;
use crate::wire::{history, request_id};

/// The variables of chat templates for the effort of reasoning. Muse Glimmer has the second one.
const EFFORTS: [&str; 2] = ["reasoning_effort", "reasoning_strength"];

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
            ToolChoice::Required if tools.is_empty() => {
                let message = format!("`{param}`: a call is required, but there are no `tools`");
                return Err(ApiError::invalid(Some(param), message));
            }
            ToolChoice::Function(name) if !tools.iter().any(|tool| tool.spec.name == *name) => {
                let name = brief(&json!(name));
                let message = format!("`{param}`: there is no function {name} in `tools`");
                return Err(ApiError::invalid(Some(param), message));
            }
            ToolChoice::Auto | ToolChoice::Required | ToolChoice::Function(_) => {}
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
        let variable = EFFORTS.into_iter().find(|name| template.contains(name));
        if let Some(name) = variable.filter(|_| thinks || !has_switch) {
            is_used = true;
            options.variables.entry(name).or_insert(Value::String(effort));
        }
        // A template that knows no effort already does what `none` requests.
        if thinks && !is_used {
            ignored.note(param);
        }
        Ok(())
    }

    /// The tools with free text.
    pub(crate) fn customs(&self) -> Customs {
        let customs = self.tools.iter().filter(|tool| tool.is_custom);
        customs.map(|tool| tool.spec.name.clone()).collect()
    }

    /// Paths of the schemas of the tools in the request, by name.
    pub(crate) fn schema_paths(&self) -> HashMap<String, String> {
        let path = |tool: &Tool| (tool.spec.name.clone(), tool.parameters_path.clone());
        self.tools.iter().map(path).collect()
    }

    /// The request to the engine, which has the format of its answers. `sign` sets whose request it
    /// is, and `content` is the grammar of an answer without calls.
    ///
    /// # Errors
    /// [`stolon::Error::Grammar`] names the tool whose schema is refused.
    pub(crate) async fn prepare(
        mut self,
        context: &RequestContext,
        sign: impl Fn(Request) -> Request + Send,
        content: Option<Grammar>,
    ) -> Result<Request, ApiError> {
        let RequestContext { app, ignored, .. } = context;
        if app.tool_calls == FormatChoice::Off && !self.tools.is_empty() {
            let message = "the operator has disabled tools with --tool-call-parser none";
            return Err(ApiError::invalid(Some("tools"), message));
        }
        let mut options = ChatOptions {
            add_generation_prompt: self.add_generation_prompt && !self.continue_final_message,
            continue_final_message: self.continue_final_message,
            tools: self.tools.iter().map(|tool| tool.spec.definition()).collect(),
            variables: std::mem::take(&mut self.variables),
            ..app.chat_options()
        };
        self.set_effort(app, &mut options, ignored)?;
        let schema_paths = self.schema_paths();
        let rules = AnswerRules {
            tools: self.tools.into_iter().map(|tool| tool.spec).collect(),
            tool_choice: self.tool_choice,
            single_call: self.single_call,
            content,
            reasoning: app.reasoning,
        };
        let messages =
            history::conversation(&app.engine, self.messages, self.keeps_images, ignored);
        // Rendering the conversation is work of the client.
        let request = sign(Request::chat(messages).chat_options(options).marks(self.marks));
        let prepared = app.engine.with_rules(request, rules).await;
        prepared.map_err(|error| structured::refused_by_engine(error, &schema_paths, None))
    }
}

/// A function that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tool {
    pub(crate) spec: ToolSpec,
    /// Path of the schema of its arguments in the request.
    parameters_path: String,
    /// Whether the client gets the only argument as a text.
    is_custom: bool,
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
    if !ToolSpec::is_name(name) {
        let expected = format!("1 to {} letters, digits, `_`, `-` or `.`", ToolSpec::MAX_NAME);
        return Err(ApiError::expected(path, &expected, &json!(name)));
    }
    let parameters_path = format!("{}{schema}", path.trim_end_matches("name"));
    let parameters = match parameters {
        None | Some(Value::Null) => json!({"type": "object", "properties": {}}),
        Some(schema @ Value::Object(_)) => schema,
        Some(other) => return Err(ApiError::expected(&parameters_path, "an object", &other)),
    };
    let mut spec = ToolSpec::new(name, parameters);
    spec.description = description.map(str::to_owned);
    spec.strict = strict.unwrap_or(false);
    Ok(Tool { spec, parameters_path, is_custom: false })
}

/// A tool with free text. `path` is the path of the object with its name. The model gets a function
/// with one argument.
pub(crate) fn custom_tool(
    path: &str,
    name: &str,
    description: Option<&str>,
    format: Option<&Value>,
    ignored: &Ignored,
) -> Result<Tool, ApiError> {
    let (parameters, strict) = free_text::parameters(format);
    let mut tool =
        function_tool((path, "format"), name, description, Some(parameters), Some(strict))?;
    tool.is_custom = true;
    match free_text::arguments(format) {
        Ok(arguments) => tool.spec.arguments = arguments,
        // The description of the tool still has the grammar.
        Err(_) => ignored.note(&tool.parameters_path),
    }
    Ok(tool)
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
