//! The handlers of `POST /api/chat` and `POST /api/generate`, Ollama's API.

mod embed;
mod models;
mod reply;

use std::collections::VecDeque;

use axum::Json;
use axum::extract::Request as HttpRequest;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use stolon::{ChatMessage, Infill, MessageContent, Request, ToolChoice};

use crate::api::cache::Explanations;
use crate::api::chat::Role;
use crate::api::images::image_part;
use crate::api::neutral::Scope;
use crate::api::ollama::{
    OllamaChat, OllamaCommon, OllamaError, OllamaGenerate, OllamaMessage, OllamaOptions, Think,
};
use crate::api::options::GenerationOptions;
use crate::api::structured::ResponseFormat;
use crate::handlers::app::App;
use crate::handlers::chat::tools;
use crate::handlers::context::{Incoming, Purpose, RequestContext};
use crate::handlers::dialogue::{Dialogue, SWITCHES};
use crate::handlers::messages::converted;
use crate::handlers::options::{ApiOptions, Call, is_chosen};
use crate::wire::advice::Ignored;
use crate::wire::body::{note_unknown, refuse_unknown};
use crate::wire::error::ApiError;
use reply::{Form, Reply};

pub(crate) use embed::{embed, embeddings};
pub(crate) use models::{
    NEVER, details, digest, entry, ps, pull, show, tags, unavailable, version,
};

/// The tag of names without one.
pub(crate) const LATEST: &str = ":latest";

/// `POST /api/chat`.
pub(crate) async fn chat(
    Incoming { body: request, context }: Incoming<OllamaChat>,
) -> Result<Response, ApiError> {
    let messages = request.messages.unwrap_or_default();
    let asked = Asked::new(&context, request.model, request.common)?;
    if messages.is_empty() {
        return Ok(asked.loaded(context.purpose, Form::Chat));
    }
    let mut dialogue = Dialogue::new(conversation(messages, &context.ignored));
    let tools = tools(request.tools.unwrap_or_default(), &context.ignored)?;
    dialogue.set_tools(tools, ToolChoice::Auto, "tools")?;
    asked.answer(context, dialogue, Form::Chat).await
}

/// `POST /api/generate`.
pub(crate) async fn generate(
    Incoming { body: request, context }: Incoming<OllamaGenerate>,
) -> Result<Response, ApiError> {
    let (prompt, system) = (request.prompt.unwrap_or_default(), request.system.unwrap_or_default());
    let images = request.images.unwrap_or_default();
    let suffix = request.suffix.unwrap_or_default();
    let asked = Asked::new(&context, request.model, request.common)?;
    if prompt.is_empty() && suffix.is_empty() && images.is_empty() {
        return Ok(asked.loaded(context.purpose, Form::Generate));
    }
    let prompt = if !suffix.is_empty() {
        Request::infill(Infill { prefix: prompt, suffix, files: Vec::new() })
    } else if request.raw == Some(true) {
        Request::text(prompt)
    } else if context.app.engine.model_info().has_chat_template {
        let user = message(Role::User, prompt, images);
        let system = Some(system).filter(|text| !text.is_empty()).map(ChatMessage::system);
        let dialogue = Dialogue::new(system.into_iter().chain([user]).collect());
        return asked.answer(context, dialogue, Form::Generate).await;
    } else {
        let system = Some(system).filter(|text| !text.is_empty());
        Request::text(system.map_or_else(String::new, |text| text + "\n\n") + &prompt)
    };
    if !images.is_empty() {
        let message =
            "`images`: expected none with `suffix`, with `raw`, or without a chat template";
        return Err(ApiError::invalid(Some("images"), message));
    }
    let reply = asked.reply(Form::Generate);
    let mut call = Call::new(context, asked.options, asked.own)?;
    call.prompts = vec![prompt];
    call.describe();
    call.respond(reply).await
}

/// Middleware that turns errors into Ollama's form.
pub(crate) async fn errors(request: HttpRequest, next: Next) -> Response {
    converted(next.run(request).await, error_object)
}

/// An error in Ollama's form.
fn error_object(error: &ApiError) -> OllamaError {
    OllamaError { error: error.message().to_owned() }
}

/// The settings of a request in the form of all APIs.
struct Asked {
    /// The model's name for the reply.
    name: String,
    options: GenerationOptions,
    own: ApiOptions,
    think: Option<Think>,
}

impl Asked {
    fn new(
        context: &RequestContext,
        model: Option<String>,
        common: OllamaCommon,
    ) -> Result<Self, ApiError> {
        let app = &context.app;
        let name = model.clone().unwrap_or_else(|| app.model_name().to_owned());
        let given = common.options.unwrap_or_default();
        refuse_unknown("options.", &given.unknown, Scope::OllamaOptions, &context.ignored)?;
        let own = ApiOptions {
            format: format(common.format)?.map(|format| ("format", format)),
            max_tokens: max_tokens(&given)?,
            ..ApiOptions::default()
        };
        let options = GenerationOptions {
            model: model.map(|model| app.listed_name(model)),
            stream: Some(common.stream.unwrap_or(true)),
            temperature: given.temperature,
            top_p: given.top_p,
            top_k: given.top_k,
            min_p: given.min_p,
            repetition_penalty: given.repeat_penalty,
            presence_penalty: given.presence_penalty,
            frequency_penalty: given.frequency_penalty,
            seed: given.seed.filter(is_chosen),
            stop: given.stop,
            ..GenerationOptions::default()
        };
        Ok(Self { name, options, own, think: common.think })
    }

    /// The reply in progress to this request.
    fn reply(&self, form: Form) -> Reply {
        Reply::new(form, self.name.clone(), self.options.stream == Some(true))
    }

    /// The reply to a request without a prompt, for which nothing is generated.
    fn loaded(&self, purpose: Purpose, form: Form) -> Response {
        match purpose {
            Purpose::Explain => Json(Explanations { results: Vec::new() }).into_response(),
            Purpose::Answer | Purpose::Warm => Json(self.reply(form).loaded()).into_response(),
        }
    }

    /// Answers a conversation.
    async fn answer(
        self,
        context: RequestContext,
        mut dialogue: Dialogue,
        form: Form,
    ) -> Result<Response, ApiError> {
        let mut reply = self.reply(form);
        match self.think {
            Some(Think::Switch(true)) => {
                let switches = SWITCHES.map(|name| (name.to_owned(), Value::Bool(true)));
                dialogue.variables = Map::from_iter(switches);
            }
            Some(Think::Switch(false)) => dialogue.effort = Some(("think", "none".to_owned())),
            Some(Think::Effort(effort)) => dialogue.effort = Some(("think", effort)),
            None => {}
        }
        let call = Call::chat(context, self.options, self.own, dialogue).await?;
        reply.call_ids = call.call_ids;
        call.respond(reply).await
    }
}

impl App {
    /// The name by which the model or an adapter is listed, where `a` and `a:latest` mean the same.
    fn listed_name(&self, name: String) -> String {
        let untagged = name.strip_suffix(LATEST).unwrap_or(&name);
        let names = [name.clone(), format!("{untagged}{LATEST}"), untagged.to_owned()];
        names.into_iter().find(|name| self.listed(name).is_ok()).unwrap_or(name)
    }
}

/// Maximum number of tokens of the answer; `None` for no limit.
fn max_tokens(options: &OllamaOptions) -> Result<Option<usize>, ApiError> {
    match options.num_predict {
        Some(number) if number.fract() != 0.0 => {
            let expected = "a whole number";
            Err(ApiError::expected("options.num_predict", expected, &json!(number)))
        }
        // An answer has at least one token.
        Some(number) if number >= 0.0 => Ok(Some((number as usize).max(1))),
        _ => Ok(None),
    }
}

/// The required format of the answer.
fn format(format: Option<Value>) -> Result<Option<ResponseFormat>, ApiError> {
    let (kind, schema) = match format {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(name)) if name.is_empty() => return Ok(None),
        Some(Value::String(name)) if name == "json" => ("json_object", None),
        Some(schema @ Value::Object(_)) => ("json_schema", Some(schema)),
        Some(other) => {
            return Err(ApiError::expected("format", "`json` or a JSON schema", &other));
        }
    };
    Ok(Some(ResponseFormat { kind: kind.to_owned(), schema, ..ResponseFormat::default() }))
}

/// The conversation in the engine's types. Clients send calls and results without ids, so a result
/// belongs to the oldest call of its function that has none yet.
fn conversation(messages: Vec<OllamaMessage>, ignored: &Ignored) -> Vec<ChatMessage> {
    let mut open: VecDeque<(String, String)> = VecDeque::new();
    let mut count = 0;
    let convert = |given: OllamaMessage| {
        note_unknown(&given.unknown, Scope::None, ignored);
        let images = given.images.unwrap_or_default();
        let mut own = message(given.role, given.content.unwrap_or_default(), images);
        let calls: Vec<Value> = given
            .tool_calls
            .into_iter()
            .flatten()
            .map(|call| {
                // Some chat templates accept only ids of nine letters and digits.
                let id = call
                    .id
                    .filter(|id| !id.is_empty())
                    .unwrap_or_else(|| format!("call{count:05}"));
                count += 1;
                open.push_back((id.clone(), call.function.name.clone()));
                let arguments = call.function.arguments.unwrap_or_else(|| json!({}));
                let function = json!({"name": call.function.name, "arguments": arguments});
                json!({"id": id, "type": "function", "function": function})
            })
            .collect();
        if given.role == Role::Assistant && !calls.is_empty() {
            if own.content == Some(MessageContent::Text(String::new())) {
                own.content = None;
            }
            own.extra.insert("tool_calls".to_owned(), calls.into());
        }
        if given.role == Role::Tool {
            let name = given.tool_name.as_ref();
            let place = open.iter().position(|(id, called)| match &given.tool_call_id {
                Some(given) => given == id,
                None => name.is_none_or(|name| name == called),
            });
            let answered = place.or((!open.is_empty()).then_some(0)).and_then(|at| open.remove(at));
            let (id, called) = answered.unwrap_or_default();
            let id = given.tool_call_id.unwrap_or(id);
            own.extra.insert("tool_call_id".to_owned(), id.into());
            own.extra.insert("name".to_owned(), given.tool_name.unwrap_or(called).into());
        }
        if let Some(thinking) = given.thinking.filter(|text| !text.is_empty()) {
            own.extra.insert("reasoning_content".to_owned(), thinking.into());
        }
        own
    };
    messages.into_iter().map(convert).collect()
}

/// A message with images before its text.
fn message(role: Role, text: String, images: Vec<String>) -> ChatMessage {
    let mut message = ChatMessage::new(role.as_str(), "");
    message.content = Some(if images.is_empty() {
        MessageContent::Text(text)
    } else {
        // The type of a file is found in its content.
        let url = |image: &String| match image.starts_with("data:") {
            true => image.clone(),
            false => format!("data:image/png;base64,{image}"),
        };
        let text = json!({"type": "text", "text": text});
        let images = images.iter().map(|image| image_part(&url(image)));
        MessageContent::Parts(images.chain([text]).collect())
    });
    message
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::body::parse;

    /// Goal: calls without ids get one, and each result the id of its call: of the function that it
    /// names, the oldest one first, or the call that it names.
    #[test]
    fn results_find_their_calls() {
        let call = |name: &str| json!({"function": {"name": name, "arguments": {"x": 1}}});
        let result = |more: Value| {
            let mut message = json!({"role": "tool", "content": "r"});
            message
                .as_object_mut()
                .expect("an object")
                .extend(more.as_object().cloned().expect("one"));
            message
        };
        let own = json!({"id": "own", "function": {"name": "a"}});
        let body = json!({"messages": [
            {"role": "assistant", "content": "", "tool_calls": [call("a"), call("b"), call("a")]},
            result(json!({"tool_name": "b"})), result(json!({"name": "a"})), result(json!({})),
            {"role": "assistant", "content": "t", "thinking": "why", "tool_calls": [own, call("b")]},
            result(json!({"tool_call_id": "own"})), result(json!({"tool_name": "other"})),
            result(json!({})),
        ]});
        let body = body.to_string();
        let request: OllamaChat =
            parse(body.as_bytes(), usize::MAX, &Ignored::default()).expect("a request");
        let messages = conversation(request.messages.expect("messages"), &Ignored::default());
        let found: Vec<[&str; 2]> = messages
            .iter()
            .filter(|message| message.role == "tool")
            .map(|message| {
                ["tool_call_id", "name"].map(|name| message.extra[name].as_str().expect("text"))
            })
            .collect();
        let expected = [
            ["call00001", "b"],
            ["call00000", "a"],
            ["call00002", "a"],
            ["own", "a"],
            ["call00004", "other"],
            ["", ""],
        ];
        assert_eq!(found, expected);
        assert_eq!(
            (&messages[0].content, messages[4].extra["reasoning_content"].as_str()),
            (&None, Some("why"))
        );
        assert_eq!(messages[0].extra["tool_calls"][0]["function"]["arguments"], json!({"x": 1}));
        assert_eq!(messages[4].extra["tool_calls"][0]["function"]["arguments"], json!({}));
    }
}
