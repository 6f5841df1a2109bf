//! A conversation as every chat API hands it to the engine: messages, tools, and how the answer is
//! taken apart.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde_json::{Map, Value, json};
use stolon::{
    AnswerFormat, ChatMessage, ChatOptions, Prompt, ReasoningFormat, Request, ToolCallFormat,
};

use super::App;
use super::body::brief;
use super::error::ApiError;
use super::request_id;

/// Most bytes of a function's name.
const MAX_NAME: usize = 256;

/// Number of tokens at the end of a prompt that can contain the tag that begins the reasoning.
const PROMPT_END: usize = 16;

/// How a format of answers is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FormatChoice<T> {
    /// By the model's chat template.
    #[default]
    Auto,
    /// Answers are not searched for it.
    Off,
    /// This format.
    Format(T),
}

impl<T: Copy> FormatChoice<T> {
    fn or_else(self, of_template: impl FnOnce() -> Option<T>) -> Option<T> {
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
pub(super) struct Dialogue {
    /// The messages, oldest first.
    pub(super) messages: Vec<ChatMessage>,
    /// The tools that the model may call, in OpenAI's form. Empty if it must not call any.
    pub(super) tools: Vec<Value>,
    /// Whether an answer may have only one call.
    pub(super) single_call: bool,
    /// Variables of the chat template.
    pub(super) variables: Map<String, Value>,
    /// Whether the prompt ends with the beginning of an answer.
    pub(super) add_generation_prompt: bool,
    /// Whether the last message is continued.
    pub(super) continue_final_message: bool,
}

impl Dialogue {
    /// A conversation without tools, as it is answered by default.
    pub(super) fn new(messages: Vec<ChatMessage>) -> Self {
        Self {
            messages,
            tools: Vec::new(),
            single_call: false,
            variables: Map::new(),
            add_generation_prompt: true,
            continue_final_message: false,
        }
    }

    /// The request to the engine, and the form of its answers.
    pub(super) async fn prepare(self, app: &App) -> Result<(Request, AnswerFormat), ApiError> {
        let options = ChatOptions {
            add_generation_prompt: self.add_generation_prompt && !self.continue_final_message,
            continue_final_message: self.continue_final_message,
            tools: self.tools,
            variables: self.variables,
            special_tokens_in_messages: app.special_tokens_in_messages,
            ..ChatOptions::default()
        };
        let template = app.engine.chat_template()?.source(&options).map_err(stolon::Error::from)?;
        let mut format = AnswerFormat {
            reasoning: app.reasoning.or_else(|| ReasoningFormat::of_template(template)),
            single_call: self.single_call,
            ..AnswerFormat::default()
        };
        if !options.tools.is_empty() {
            format.tool_calls = Some(tool_calls(app, template)?);
            format.functions = options.tools.iter().filter_map(function_name).collect();
        }
        let mut request = Request::chat(self.messages)
            .chat_options(options)
            .show_special_tokens(format.special_tokens());
        if let Some(reasoning) = format.reasoning {
            request = app.engine.tokenized(request).await?;
            if let Prompt::Tokens(tokens) = request.prompt() {
                let end = &tokens[tokens.len().saturating_sub(PROMPT_END)..];
                format.reasoning_is_open =
                    reasoning.is_open_after(&app.engine.detokenize(end, false)?);
            }
        }
        Ok((request, format))
    }
}

/// The format of the calls of a model that is given tools.
fn tool_calls(app: &App, template: &str) -> Result<ToolCallFormat, ApiError> {
    let refused = |message: &str| ApiError::invalid(Some("tools"), message);
    if !template.contains("tools") {
        return Err(refused(
            "the model's chat template does not support tools; the operator can choose another \
             template with --chat-template",
        ));
    }
    app.tool_calls.or_else(|| ToolCallFormat::of_template(template)).ok_or_else(|| {
        refused(
            "the format in which this model calls tools is not known; the operator can choose one \
             with --tool-call-parser",
        )
    })
}

/// The name of the function of a tool in OpenAI's form.
fn function_name(tool: &Value) -> Option<String> {
    tool["function"]["name"].as_str().map(str::to_owned)
}

/// A function in OpenAI's form, as chat templates expect it. `path` is where its name is in the
/// request.
pub(super) fn function_tool(
    path: &str,
    name: &str,
    description: Option<&str>,
    parameters: Option<Value>,
) -> Result<Value, ApiError> {
    let is_of_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    if name.is_empty() || name.len() > MAX_NAME || !name.bytes().all(is_of_name) {
        let expected = format!("1 to {MAX_NAME} letters, digits, `_`, `-` or `.`");
        return Err(ApiError::expected(path, &expected, &json!(name)));
    }
    let parameters = match parameters {
        None | Some(Value::Null) => json!({"type": "object", "properties": {}}),
        Some(schema @ Value::Object(_)) => schema,
        Some(other) => {
            let path = path.replace(".name", ".parameters");
            return Err(ApiError::expected(&path, "an object", &other));
        }
    };
    let mut function = Map::new();
    function.insert("name".to_owned(), json!(name));
    if let Some(description) = description {
        function.insert("description".to_owned(), json!(description));
    }
    function.insert("parameters".to_owned(), parameters);
    Ok(json!({"type": "function", "function": function}))
}

/// What a request says about calling tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ToolChoice {
    /// The model must not call any.
    None,
    /// The model decides.
    Auto,
}

/// Reads OpenAI's `tool_choice`.
pub(super) fn tool_choice(choice: Option<&Value>) -> Result<ToolChoice, ApiError> {
    match choice {
        None => Ok(ToolChoice::Auto),
        Some(choice) if choice.is_null() || choice == "auto" => Ok(ToolChoice::Auto),
        Some(choice) if choice == "none" => Ok(ToolChoice::None),
        Some(choice) => {
            let message = format!(
                "`tool_choice`: this server cannot guarantee {}; it supports `auto` and `none`",
                brief(choice)
            );
            Err(ApiError::invalid(Some("tool_choice"), message).code("unsupported_parameter"))
        }
    }
}

/// A new id of a call. Mistral's chat templates accept only ids of nine letters and digits.
pub(super) fn call_id(format: Option<ToolCallFormat>, prefix: &str) -> String {
    let id = request_id::fresh();
    if format != Some(ToolCallFormat::Mistral) {
        return format!("{prefix}{id}");
    }
    const DIGITS: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
    let mut hasher = DefaultHasher::new();
    id.hash(&mut hasher);
    let digit =
        |place: u32| char::from(DIGITS[(hasher.finish() / 36_u64.pow(place) % 36) as usize]);
    (0..9).map(digit).collect()
}
