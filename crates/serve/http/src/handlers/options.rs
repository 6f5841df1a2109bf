//! The options of a call, which all APIs share, and how they become those of the engine's requests.

use std::collections::HashMap;

use serde_json::json;
use stolon::{
    AnswerFormat, CacheMark, Engine, Grammar, Prompt, Request, SamplingParams, SessionId, TokenSpan,
};

use crate::api::neutral::Scope;
use crate::api::options::{
    ChoiceOptions, GenerationOptions, MAX_STOP_STRINGS, StopStrings, StreamOptions, Truncation,
    TruncationSide,
};
use crate::guard::deadline::Deadline;
use crate::handlers::context::RequestContext;
use crate::handlers::dialogue::CallIds;
use crate::handlers::free_text::Customs;
use crate::handlers::hints::Hints;
use crate::handlers::logprobs::LogprobForm;
use crate::handlers::structured;
use crate::handlers::thinking::ThinkingBudget;
use crate::handlers::token_rules::{self, AllowedTokens, TokenRules};
use crate::wire::advice::Ignored;
use crate::wire::body::refuse_unknown;
use crate::wire::error::ApiError;
use crate::wire::reply::UsageSum;
use crate::wire::traces;

/// Maximum number of log-probabilities of prompts in one reply.
const MAX_PROMPT_LOGPROBS: usize = 1 << 19;

/// One call of an API that generates: its options, and its prompts as soon as they are known. Rules
/// that involve two parameters have been checked; ranges that depend on the model are checked by the
/// engine before it does any work.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) context: RequestContext,
    /// The prompts, without the options.
    pub(crate) prompts: Vec<Request>,
    /// Token ids of each prompt if they are to be reported, empty otherwise.
    pub(crate) prompt_ids: Vec<Vec<u32>>,
    /// The parts of the answers.
    pub(crate) format: AnswerFormat,
    /// The tokens that were counted so far.
    pub(crate) usage_sum: UsageSum,
    /// The model's name as the client wrote it.
    pub(crate) model: String,
    /// The adapter that the client chose by this name.
    adapter: Option<String>,
    /// Choices to return for each prompt: `n`.
    pub(crate) choice_count: usize,
    /// Answers to generate for each prompt, of which the best `choice_count` are returned, best
    /// first: `best_of`. `None` returns all, in the order of their seeds.
    pub(crate) candidate_count: Option<usize>,
    /// Whether to reply in pieces.
    pub(crate) stream: bool,
    /// When a streamed reply reports the usage.
    pub(crate) usage: StreamedUsage,
    /// Maximum number of tokens of a choice, at least 1.
    pub(crate) max_tokens: usize,
    /// Number of most likely tokens to report per position; `None` reports no log-probabilities.
    pub(crate) logprobs: Option<usize>,
    /// How log-probabilities are reported.
    pub(crate) logprob_form: LogprobForm,
    /// Number of most likely tokens to report per token of the prompt; `None` reports no
    /// log-probabilities of it.
    pub(crate) prompt_logprobs: Option<usize>,
    /// How much to keep of the prompt, and which end of it to remove.
    truncation: Option<(Truncation, TruncationSide)>,
    /// Maximum number of tokens of the reasoning.
    pub(crate) thinking_budget: Option<ThinkingBudget>,
    /// Whether to report token ids.
    pub(crate) return_token_ids: bool,
    /// The grammar of the answers, apart from their reasoning and tool calls.
    pub(crate) grammar: Option<Grammar>,
    /// Path of `grammar` in the request.
    grammar_path: Option<String>,
    /// Paths of the schemas of the offered tools in the request, by name.
    pub(crate) schema_paths: HashMap<String, String>,
    /// The offered tools with free text.
    pub(crate) customs: Customs,
    /// The ids of the calls of tools in the answers.
    pub(crate) call_ids: CallIds,
    /// Tokens whose log-probabilities are not reported: those that end an answer are not part of
    /// the text that clients align the log-probabilities with. With `ignore_eos` no token ends it.
    pub(crate) unreported: Vec<u32>,
    /// The parameters that are passed to the engine unchanged.
    options: GenerationOptions,
    sampling: SamplingParams,
    /// The priority for the engine, where larger ones come first.
    priority: i32,
    /// A mark of the whole prompt.
    mark: Option<CacheMark>,
    /// The session that the request is a turn of.
    session: Option<SessionId>,
    /// The salt of the tenant and of the request.
    salt: Option<String>,
    /// The time by which the answer has to be complete.
    deadline: Deadline,
}

/// The options that only some APIs have.
#[derive(Debug, Default)]
pub(crate) struct ApiOptions {
    pub(crate) choices: ChoiceOptions,
    /// The required format of the answers.
    pub(crate) format: Option<structured::Format>,
    /// Whether the prompt is a conversation.
    pub(crate) is_chat: bool,
    /// Maximum number of tokens of a choice, if the API or the request sets one.
    pub(crate) max_tokens: Option<usize>,
    /// Number of most likely tokens to report per position; `None` reports no log-probabilities.
    pub(crate) logprobs: Option<usize>,
    /// Maximum number of tokens of the reasoning, in addition to the option of all APIs.
    pub(crate) thinking_budget: Option<ThinkingBudget>,
    /// What the answer is expected to be.
    pub(crate) prediction: Option<String>,
}

impl Call {
    /// Checks the options of a call, whose prompts follow.
    pub(crate) fn new(
        context: RequestContext,
        mut options: GenerationOptions,
        own: ApiOptions,
    ) -> Result<Self, ApiError> {
        let RequestContext { app, caller, ignored, .. } = &context;
        let (model, adapter) = app.chosen(options.model.take(), ignored)?;
        let stream = options.stream.unwrap_or(false);
        let usage = streamed_usage(own.choices.stream_options.as_ref(), stream, ignored)?;
        let prompt_logprobs = own.choices.prompt_logprobs;
        if stream && prompt_logprobs.is_some() {
            let message = "`prompt_logprobs` is not possible with `stream`: true";
            return Err(ApiError::invalid(Some("prompt_logprobs"), message));
        }
        if let Some(stop) = &options.stop
            && stop.as_slice().len() > MAX_STOP_STRINGS
        {
            let expected = format!("a string or a list of at most {MAX_STOP_STRINGS} strings");
            return Err(ApiError::expected("stop", &expected, &json!(stop)));
        }
        let unlisted = own.choices.logprob_token_ids.as_ref().filter(|_| own.logprobs.is_none());
        if unlisted.is_some_and(|ids| !ids.is_empty()) {
            let message = "`logprob_token_ids` is allowed only with `logprobs`";
            return Err(ApiError::invalid(Some("logprob_token_ids"), message));
        }
        let vocab_size = app.engine.model_info().vocab_size;
        let named = own.choices.logprob_token_ids.as_deref().unwrap_or_default();
        token_rules::check_ids("logprob_token_ids", named, vocab_size)?;
        let grammar = structured::grammar(&mut options, own.format, ignored)?;
        let (grammar_path, grammar) = grammar.map(|given| (given.path, given.grammar)).unzip();
        let session = session(&mut options, ignored)?.map(|name| caller.session(name));
        let base = match own.is_chat {
            true => app.engine.chat_sampling(),
            false => app.engine.recommended_sampling(),
        };
        let sampling = SamplingParams {
            logprob_ids: own.choices.logprob_token_ids.unwrap_or_default().into(),
            ..sampling(&mut options, base)
        };
        // With `ignore_eos`, the client wants the full length even of a repetitive answer.
        let ends = own.is_chat && options.ignore_eos != Some(true);
        options.end_repetition.get_or_insert(ends);
        let choice_count = own.choices.n.unwrap_or(1);
        let default_budget = app.reasoning_budget.filter(|_| own.is_chat);
        let default_budget = default_budget.map(|tokens| ThinkingBudget { tokens, param: None });
        let hints = Hints::take(&mut options, ignored);
        let priority = match (options.priority, hints.priority) {
            (None, Some(priority)) => priority,
            (priority, _) => app.priority.of(priority),
        };
        Ok(Self {
            prompts: Vec::new(),
            prompt_ids: Vec::new(),
            format: AnswerFormat::default(),
            usage_sum: app.usage_sum(choice_count),
            model,
            adapter,
            choice_count,
            candidate_count: None,
            stream,
            usage,
            max_tokens: own.max_tokens.unwrap_or(app.default_max_tokens()),
            logprobs: own.logprobs,
            unreported: match options.ignore_eos {
                Some(true) => Vec::new(),
                _ => app.engine.model_info().eos_token_ids.clone(),
            },
            logprob_form: LogprobForm {
                names_ids: own.choices.return_tokens_as_token_ids.unwrap_or(false),
                lists_chosen: !sampling.logprob_ids.is_empty(),
            },
            prompt_logprobs,
            truncation: own
                .choices
                .truncate_prompt_tokens
                .map(|truncation| (truncation, own.choices.truncation_side.unwrap_or_default())),
            thinking_budget: options
                .thinking_token_budget
                .map(|tokens| ThinkingBudget { tokens, param: Some("thinking_token_budget") })
                .or(own.thinking_budget)
                .or(default_budget),
            return_token_ids: own.choices.return_token_ids.unwrap_or(false),
            session,
            salt: caller.tenant.salt(options.cache_salt.as_deref()),
            deadline: caller.deadline.within(app.request_timeout),
            grammar,
            grammar_path,
            schema_paths: HashMap::new(),
            customs: Customs::default(),
            call_ids: CallIds::default(),
            priority,
            mark: hints.mark,
            options,
            sampling,
            context,
        })
    }

    /// The engine that answers.
    pub(crate) fn engine(&self) -> &Engine {
        &self.context.app.engine
    }

    /// Whether the request is the turn of a session.
    pub(crate) fn has_session(&self) -> bool {
        self.session.is_some()
    }

    /// Makes the prompt the turn of the session that the request names, if it names one.
    pub(crate) fn join_session(&mut self) -> Result<(), ApiError> {
        let Some(id) = &self.session else { return Ok(()) };
        let answers = self.prompts.len() * self.candidate_count.unwrap_or(self.choice_count);
        if answers != 1 {
            let message = format!(
                "`session_id`: expected one prompt and one answer (`n`, `best_of`), got {answers} \
                 answers"
            );
            return Err(ApiError::invalid(Some("session_id"), message));
        }
        for prompt in &mut self.prompts {
            *prompt = prompt.clone().session(id);
        }
        Ok(())
    }

    /// Whether a prompt that is too long is cut.
    pub(crate) fn truncates(&self) -> bool {
        self.truncation.is_some()
    }

    /// The same prompt as token ids.
    pub(crate) async fn tokenized(&self, prompt: &Request) -> Result<Request, ApiError> {
        Ok(self.engine().tokenized(self.sign(prompt.clone())).await?)
    }

    /// The part of a prompt's tokens that the request wants; `None` if it is the whole prompt.
    ///
    /// # Errors
    /// The prompt has images, so it cannot be cut.
    pub(crate) fn kept_of(&self, tokens: &[u32]) -> Result<Option<Vec<u32>>, ApiError> {
        let Some((truncation, side)) = self.truncation else { return Ok(None) };
        let info = self.engine().model_info();
        let most = match truncation {
            Truncation::Tokens(count) => count,
            Truncation::Context => info.max_positions.saturating_sub(self.max_tokens).max(1),
        };
        if tokens.len() <= most {
            return Ok(None);
        }
        if tokens.iter().any(|&token| token as usize >= info.vocab_size) {
            let message = "`truncate_prompt_tokens` is not possible for a prompt with images";
            return Err(ApiError::invalid(Some("truncate_prompt_tokens"), message));
        }
        Ok(Some(match side {
            TruncationSide::Left => tokens[tokens.len() - most..].to_vec(),
            TruncationSide::Right => tokens[..most].to_vec(),
        }))
    }

    /// The rules for the tokens of answers.
    ///
    /// # Errors
    /// The reasoning cannot be limited, or an allowed token is not in the vocabulary.
    pub(crate) async fn rules(&self) -> Result<TokenRules, ApiError> {
        let engine = self.engine();
        let allowed = match &self.options.allowed_token_ids {
            Some(ids) => Some(AllowedTokens::new(ids, engine.model_info().vocab_size)?),
            None => None,
        };
        let thinking = match self.thinking_budget {
            Some(budget) => budget.processor(engine, &self.format).await?,
            None => None,
        };
        Ok(TokenRules { allowed, thinking })
    }

    /// Tokenizes the prompts if their log-probabilities are requested, and refuses the request if a
    /// reply would have too many of these.
    pub(crate) async fn check_prompt_logprobs(&mut self) -> Result<(), ApiError> {
        let Some(top) = self.prompt_logprobs else { return Ok(()) };
        let mut positions = 0_usize;
        for index in 0..self.prompts.len() {
            self.prompts[index] = self.tokenized(&self.prompts[index]).await?;
            if let Prompt::Tokens(tokens) = self.prompts[index].prompt() {
                positions = positions.saturating_add(tokens.len());
            }
        }
        let entries = positions.saturating_mul(self.choice_count).saturating_mul(top + 1);
        if entries <= MAX_PROMPT_LOGPROBS {
            return Ok(());
        }
        let message = format!(
            "expected at most {MAX_PROMPT_LOGPROBS} log-probabilities of prompts (tokens x `n` x \
             (`prompt_logprobs` + 1)), got {entries}"
        );
        Err(ApiError::invalid(Some("prompt_logprobs"), message))
    }

    /// Tokenizes the prompts if their token ids are to be reported.
    pub(crate) async fn set_prompt_ids(&mut self) -> Result<(), ApiError> {
        if !self.return_token_ids {
            return Ok(());
        }
        for index in 0..self.prompts.len() {
            // The prompt is replaced, so that it is tokenized once.
            self.prompts[index] = self.tokenized(&self.prompts[index]).await?;
            if let Prompt::Tokens(tokens) = self.prompts[index].prompt() {
                let ids = reported_ids(self.engine(), tokens);
                self.prompt_ids.push(ids);
            }
        }
        Ok(())
    }

    /// Adds the call's options to its trace.
    pub(crate) fn describe(&self) {
        traces::describe(traces::Asked {
            requested_model: &self.model,
            model: self.context.app.model_name(),
            max_tokens: self.max_tokens,
            choices: self.choice_count,
            stream: self.stream,
            sampling: &self.sampling,
        });
    }

    /// The reply for an error of the engine.
    pub(crate) fn refused(&self, error: stolon::Error) -> ApiError {
        structured::refused_by_engine(error, &self.schema_paths, self.grammar_path.as_deref())
    }

    /// Looks for the stop strings of the request; `None` if it has none.
    pub(crate) fn stop_strings(&self) -> Option<stolon::StopStrings> {
        let stops = self.options.stop.iter().flat_map(StopStrings::given);
        let stops: Vec<&String> = stops.collect();
        // The engine has refused wrong ones.
        let found = stolon::StopStrings::new(&stops, false).ok();
        found.filter(|_| !stops.is_empty())
    }

    /// Number of tokens before which stop strings are not looked for.
    pub(crate) fn min_tokens(&self) -> usize {
        self.options.min_tokens.unwrap_or(0)
    }

    /// Sets everything but the prompt in a request to the engine.
    pub(crate) fn apply(&self, request: Request) -> Request {
        let options = &self.options;
        let mut request = request
            .sampling(self.sampling.clone())
            .max_tokens(self.max_tokens)
            .stop(options.stop.iter().flat_map(StopStrings::given).cloned())
            .stop_ids(options.stop_token_ids.iter().flatten().copied())
            .ignore_eos(options.ignore_eos.unwrap_or(false))
            .min_tokens(options.min_tokens.unwrap_or(0))
            .end_repetition(options.end_repetition.unwrap_or(false))
            .skip_reading_prefix_cache(options.skip_reading_prefix_cache.unwrap_or(false))
            .skip_writing_prefix_cache(options.skip_writing_prefix_cache.unwrap_or(false))
            .priority(self.priority)
            .marks(self.mark);
        if let Some(top) = self.logprobs {
            request = request.logprobs(top);
        }
        if let Some(top) = self.prompt_logprobs {
            request = request.prompt_logprobs(top);
        }
        if let Some(grammar) = &self.grammar {
            request = request.grammar(grammar.clone());
        }
        if let Some(timeout) = self.deadline.left() {
            request = request.timeout(timeout);
        }
        self.sign(request)
    }

    /// Sets everything in a request to the engine that separates it from the requests of others:
    /// which earlier answers it may continue depends on that.
    pub(crate) fn sign(&self, request: Request) -> Request {
        let mut request = self.context.caller.sign(request);
        if let Some(salt) = &self.salt {
            request = request.cache_salt(salt.clone());
        }
        if let Some(adapter) = &self.adapter {
            request = request.adapter(adapter);
        }
        request
    }
}

/// The ids of a prompt as clients see them. The positions of an image, which have numbers of this
/// process, have the id of the token that stands for images.
pub(crate) fn reported_ids(engine: &Engine, tokens: &[u32]) -> Vec<u32> {
    let image = engine.model_info().image_token_id;
    let shown = |&token: &u32| match image {
        Some(image) if TokenSpan::is_image(token) => image,
        _ => token,
    };
    tokens.iter().map(shown).collect()
}

/// When a streamed reply reports the usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamedUsage {
    /// Never.
    Left,
    /// After the last piece.
    AtEnd,
    /// With each piece, and after the last one.
    Always,
}

fn streamed_usage(
    options: Option<&StreamOptions>,
    stream: bool,
    ignored: &Ignored,
) -> Result<StreamedUsage, ApiError> {
    let Some(options) = options else { return Ok(StreamedUsage::Left) };
    refuse_unknown("stream_options.", &options.unknown, Scope::StreamOptions, ignored)?;
    if !stream {
        // Clients leave them in the requests that they do not stream. A whole reply has the usage.
        ignored.note("stream_options");
    }
    Ok(match (options.include_usage, options.continuous_usage_stats) {
        (Some(true), Some(true)) => StreamedUsage::Always,
        (Some(true), _) => StreamedUsage::AtEnd,
        _ => StreamedUsage::Left,
    })
}

/// The name of the request's session, which can be given in one of two forms.
fn session(options: &mut GenerationOptions, ignored: &Ignored) -> Result<Option<String>, ApiError> {
    let Some(params) = options.session_params.take() else { return Ok(options.session_id.take()) };
    refuse_unknown("session_params.", &params.unknown, Scope::SglangSession, ignored)?;
    match (options.session_id.take(), params.id) {
        (Some(id), Some(other)) if id != other => {
            let message = "`session_id` and `session_params.id` contradict each other";
            Err(ApiError::invalid(Some("session_params.id"), message))
        }
        (id, other) => Ok(id.or(other)),
    }
}

/// The sampling parameters of a request; those that it leaves out are as in `base`.
fn sampling(options: &mut GenerationOptions, base: SamplingParams) -> SamplingParams {
    // `top_p` of 0 keeps the most likely token alone.
    let (temperature, top_p) = match options.top_p {
        Some(0.0) => (0.0, 1.0),
        top_p => (options.temperature.unwrap_or(base.temperature), top_p.unwrap_or(base.top_p)),
    };
    SamplingParams {
        temperature,
        top_p,
        top_k: match options.top_k {
            None => base.top_k,
            Some(k) => (k > 0).then_some(k), // 0 keeps all.
        },
        min_p: options.min_p.unwrap_or(base.min_p),
        repetition_penalty: options.repetition_penalty.unwrap_or(base.repetition_penalty),
        presence_penalty: options.presence_penalty.unwrap_or(base.presence_penalty),
        frequency_penalty: options.frequency_penalty.unwrap_or(base.frequency_penalty),
        logit_bias: options.logit_bias.take().unwrap_or_default().into(),
        seed: options.seed,
        ..base
    }
}

/// Whether the client has chosen this seed: -1 requests a fresh one in the APIs of Ollama and
/// llama.cpp.
pub(crate) fn is_chosen(seed: &u64) -> bool {
    *seed != u64::MAX
}
