//! A request, as JSON, and how its answer is read.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};
use stolon::{
    AnswerRules, ChatMessage, ChatOptions, Engine, Grammar, Request, SamplingParams, SchemaOptions,
    SessionId, ToolChoice, ToolSpec,
};

use crate::error::Failure;
use crate::options::seconds;

/// A request, as `stolon.RequestOptions` describes it, with its prompt.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Spec {
    prompt: PromptSpec,
    #[serde(default)]
    options: Options,
}

/// A prompt.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum PromptSpec {
    Text(String),
    Tokens(Vec<u32>),
    Messages(Vec<ChatMessage>),
}

/// The members of `stolon.RequestOptions`, except images.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Options {
    adapter: Option<String>,
    append: bool,
    cache_salt: Option<String>,
    choice: Option<Vec<String>>,
    end_repetition: bool,
    frequency_penalty: Option<f32>,
    gbnf: Option<String>,
    ignore_eos: bool,
    json_object: bool,
    json_schema: Option<Value>,
    lark: Option<String>,
    logit_bias: BTreeMap<u32, f32>,
    logprobs: Option<usize>,
    max_tokens: Option<usize>,
    min_p: Option<f32>,
    min_tokens: usize,
    presence_penalty: Option<f32>,
    priority: i32,
    prompt_logprobs: Option<usize>,
    queue_timeout: Option<f64>,
    regex: Option<String>,
    repetition_penalty: Option<f32>,
    sampling: Sampling,
    seed: Option<u64>,
    session: Option<String>,
    stop: Vec<String>,
    stop_ids: Vec<u32>,
    temperature: Option<f32>,
    template_variables: Map<String, Value>,
    tenant: Option<String>,
    timeout: Option<f64>,
    tool_choice: Option<Choice>,
    tools: Vec<Value>,
    top_k: Option<usize>,
    top_p: Option<f32>,
}

/// The sampling parameters that others replace.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Sampling {
    #[default]
    Greedy,
    Recommended,
    Chat,
}

/// Whether the model calls a tool.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum Choice {
    Auto,
    Required,
}

/// A tool in OpenAI's form.
#[derive(Deserialize)]
struct Tool {
    function: Function,
}

#[derive(Deserialize)]
struct Function {
    name: String,
    #[serde(default)]
    description: Option<String>,
    #[serde(default = "any_object")]
    parameters: Value,
    #[serde(default)]
    strict: Option<bool>,
}

fn any_object() -> Value {
    serde_json::json!({"type": "object"})
}

impl Spec {
    /// The request to the engine. `images` are the contents of files.
    ///
    /// # Errors
    /// [`Failure::Invalid`] for options that contradict each other, and the errors of rendering a
    /// conversation.
    pub(crate) async fn prepare(
        self,
        engine: &Engine,
        images: Vec<Vec<u8>>,
    ) -> Result<Request, Failure> {
        let Spec { prompt, options } = self;
        let grammar = options.grammar()?;
        let request = match prompt {
            PromptSpec::Messages(messages) => {
                return options.answer(engine, messages, images, grammar).await;
            }
            PromptSpec::Text(text) => Request::text(text),
            PromptSpec::Tokens(ids) => Request::tokens(ids),
        };
        options.refuse_chat_options()?;
        let mut request = with_images(options.set(engine, request)?, images);
        if let Some(grammar) = grammar {
            request = request.grammar(grammar);
        }
        Ok(request)
    }
}

impl Options {
    /// The request with the options that concern any kind of prompt.
    fn set(&self, engine: &Engine, mut request: Request) -> Result<Request, Failure> {
        let mut sampling = match self.sampling {
            Sampling::Greedy => SamplingParams::default(),
            Sampling::Recommended => engine.recommended_sampling(),
            Sampling::Chat => engine.chat_sampling(),
        };
        macro_rules! replace {
            ($($name:ident),*) => { $(sampling.$name = self.$name.unwrap_or(sampling.$name);)* };
        }
        replace!(
            temperature,
            top_p,
            min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty
        );
        sampling.top_k = self.top_k.or(sampling.top_k);
        sampling.seed = self.seed.or(sampling.seed);
        if !self.logit_bias.is_empty() {
            sampling.logit_bias = self.logit_bias.iter().map(|(&id, &bias)| (id, bias)).collect();
        }
        request = request
            .sampling(sampling)
            .min_tokens(self.min_tokens)
            .stop(self.stop.clone())
            .stop_ids(self.stop_ids.clone())
            .ignore_eos(self.ignore_eos)
            .end_repetition(self.end_repetition)
            .priority(self.priority);
        macro_rules! set {
            ($($name:ident),*) => {
                $(if let Some(value) = self.$name.clone() {
                    request = request.$name(value);
                })*
            };
        }
        set!(adapter, cache_salt, logprobs, max_tokens, prompt_logprobs, tenant);
        if let Some(time) = self.timeout {
            request = request.timeout(seconds("timeout", time)?);
        }
        if let Some(time) = self.queue_timeout {
            request = request.queue_timeout(seconds("queue_timeout", time)?);
        }
        if let Some(name) = &self.session {
            request = request.session(SessionId::new(name.as_str()));
        }
        Ok(if self.append { request.append() } else { request })
    }

    /// The grammar of the answer, or of its text.
    fn grammar(&self) -> Result<Option<Grammar>, Failure> {
        let schema = |schema: &Value| {
            let options = SchemaOptions {
                strict: false,
                refuse_unsupported: false,
                additional_properties: false,
            };
            Grammar::JsonSchema(options.apply(schema.clone()))
        };
        let given = [
            self.json_schema.as_ref().map(|value| ("json_schema", schema(value))),
            self.json_object.then_some(("json_object", Grammar::JsonObject)),
            self.regex.clone().map(|text| ("regex", Grammar::Regex(text))),
            self.choice.clone().map(|texts| ("choice", Grammar::Choice(texts))),
            self.lark.clone().map(|text| ("lark", Grammar::Lark(text))),
            self.gbnf.clone().map(|text| ("gbnf", Grammar::Gbnf(text))),
        ];
        let mut given: Vec<(&str, Grammar)> = given.into_iter().flatten().collect();
        if let [(first, _), (second, _), ..] = &given[..] {
            let got = format!("`{first}` and `{second}`");
            return Err(Failure::invalid("options", "one form of the answer", got));
        }
        Ok(given.pop().map(|(_, grammar)| grammar))
    }

    /// Refuses what has an effect on conversations only.
    fn refuse_chat_options(&self) -> Result<(), Failure> {
        let given = [
            ("tools", !self.tools.is_empty()),
            ("tool_choice", self.tool_choice.is_some()),
            ("template_variables", !self.template_variables.is_empty()),
        ];
        match given.into_iter().find(|(_, is_given)| *is_given) {
            Some((name, _)) => Err(Failure::invalid(name, "a conversation", "another prompt")),
            None => Ok(()),
        }
    }

    /// The request to answer a conversation. Reasoning and calls of tools are told from the text by
    /// the marks that the model's template uses. A template that has no tools gets their
    /// description in the messages, as the server does it.
    async fn answer(
        self,
        engine: &Engine,
        messages: Vec<ChatMessage>,
        images: Vec<Vec<u8>>,
        grammar: Option<Grammar>,
    ) -> Result<Request, Failure> {
        let is_required = self.tool_choice == Some(Choice::Required);
        if is_required && (self.tools.is_empty() || grammar.is_some()) {
            let got = if grammar.is_some() { "another form of the answer" } else { "no tools" };
            return Err(Failure::invalid("tool_choice", "only tools with `required`", got));
        }
        let rules = AnswerRules {
            tools: self.functions()?,
            tool_choice: if is_required { ToolChoice::Required } else { ToolChoice::Auto },
            content: grammar,
            ..AnswerRules::default()
        };
        let chat = ChatOptions {
            tools: self.tools.clone(),
            variables: self.template_variables.clone(),
            ..ChatOptions::default()
        };
        let request = self.set(engine, Request::chat(messages).chat_options(chat))?;
        Ok(engine.with_rules(with_images(request, images), rules).await?)
    }

    /// The tools.
    fn functions(&self) -> Result<Vec<ToolSpec>, Failure> {
        let function = |(index, tool): (usize, &Value)| {
            let Tool { function: Function { name, description, parameters, strict } } =
                Tool::deserialize(tool)
                    .map_err(|error| Failure::Invalid(format!("tools[{index}]: {error}")))?;
            let mut spec = ToolSpec::new(name, parameters);
            (spec.description, spec.strict) = (description, strict.unwrap_or(false));
            Ok(spec)
        };
        self.tools.iter().enumerate().map(function).collect()
    }
}

/// Adds images, each the content of a file.
fn with_images(request: Request, images: Vec<Vec<u8>>) -> Request {
    images.into_iter().fold(request, Request::image)
}
