//! A request: a prompt and how to continue it.
//!
//! A [`Request`] is plain data. Nothing is validated while it is built; [`Engine::generate`]
//! validates all of it before it does anything else.
//!
//! [`Engine::generate`]: crate::Engine::generate

mod images;
mod parts;
mod sharing;

use std::sync::Arc;
use std::time::Duration;

use stolon_scheduler::{PrefixMark, PromptImage, Quota, RequestOptions, TokenSet};

pub(crate) use images::{ImageFile, prompt_usage};
#[cfg(feature = "images")]
pub(crate) use images::{is_image, url_of};
pub use parts::PromptPart;
pub(crate) use parts::tokens as part_tokens;

use crate::text::{ChatOptions, Exchange};
use crate::{
    AnswerFormat, CacheMark, ChatMessage, Grammar, Infill, LogitsProcessor, MessageContent,
    SamplingParams, SessionId, SharedProcessor, Skill,
};

/// A prompt.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Prompt {
    /// Text. It is tokenized with the model's beginning-of-sequence token, if it has one.
    Text(String),
    /// Token ids, used as they are.
    Tokens(Vec<u32>),
    /// Parts of any kind.
    Parts(Vec<PromptPart>),
    /// A conversation. It is rendered with the model's chat template.
    Chat(Vec<ChatMessage>),
    /// A task for which the model was trained with a prompt of its own.
    Skill(Skill),
    /// A gap in a text, for models that were trained to fill it.
    Infill(Infill),
    /// Two texts that a model for pairs reads together: a question and a document, for example.
    Pair(String, String),
}

impl Prompt {
    /// Size in bytes of the text and of everything that becomes text; 0 for token ids. The
    /// variables of chat templates do not count.
    pub(crate) fn len_bytes(&self) -> usize {
        /// A lower bound of the bytes that a template adds to each message, and that JSON adds to
        /// each part.
        const ADDED: usize = 16;
        let part = |part: &serde_json::Value| {
            part["text"].as_str().map_or(ADDED, |text| ADDED.saturating_add(text.len()))
        };
        let message = |message: &ChatMessage| match &message.content {
            None => ADDED,
            Some(MessageContent::Text(text)) => ADDED + text.len(),
            Some(MessageContent::Parts(parts)) => ADDED + parts.iter().map(part).sum::<usize>(),
        };
        match self {
            Prompt::Text(text) => text.len(),
            Prompt::Tokens(_) => 0,
            Prompt::Parts(parts) => parts.iter().map(PromptPart::len_bytes).sum(),
            Prompt::Chat(messages) => messages.iter().map(message).sum(),
            Prompt::Skill(skill) => skill.words().len(),
            Prompt::Infill(infill) => infill.len_bytes(),
            Prompt::Pair(first, second) => first.len().saturating_add(second.len()),
        }
    }
}

/// A request to generate. Make one with [`Request::text`], [`Request::tokens`] or
/// [`Request::chat`]; every setter is optional.
#[derive(Clone, Debug)]
pub struct Request {
    pub(crate) prompt: Arc<Prompt>,
    /// The images, as files, that are not in the prompt yet.
    pub(crate) images: Vec<ImageFile>,
    /// The images that are in the prompt, which is token ids.
    pub(crate) placed: Arc<[PromptImage]>,
    /// The chat template's variable `tools`.
    pub(crate) tools: Option<Arc<serde_json::Value>>,
    /// What the history keeps of the conversation that the prompt was; `None` for other prompts.
    pub(crate) exchange: Option<Arc<Exchange>>,
    pub(crate) marks: Arc<[CacheMark]>,
    /// The ends of marked parts of a conversation with images, which is token ids now; the last one
    /// first.
    pub(crate) placed_marks: Arc<[PrefixMark]>,
    /// The request before its prompt became token ids, if it has marks within a conversation.
    pub(crate) conversation: Option<Arc<Request>>,
    /// How a conversation is rendered, apart from the tools.
    pub(crate) chat: Arc<ChatOptions>,
    pub(crate) stop: Arc<[String]>,
    /// Further tokens that end the answer, because of the kind of prompt that the request had.
    pub(crate) prompt_ends: TokenSet,
    pub(crate) ignore_eos: bool,
    pub(crate) min_tokens: usize,
    pub(crate) end_repetition: bool,
    /// What the answer is expected to be.
    pub(crate) prediction: Option<Arc<str>>,
    pub(crate) shown_tokens: Arc<[String]>,
    pub(crate) logprobs: Option<usize>,
    pub(crate) processor: Option<SharedProcessor>,
    pub(crate) grammar: Option<Arc<Grammar>>,
    /// The token after which the text of the answer begins; `None` if it begins at once.
    pub(crate) text_after: Option<u32>,
    /// The parts of the answer. Only its text is searched for stop strings.
    pub(crate) answer_format: Option<Arc<AnswerFormat>>,
    pub(crate) cache_salt: Option<String>,
    /// The name of the adapter. `options` has its weights when the request is submitted.
    pub(crate) adapter: Option<String>,
    pub(crate) session: Option<SessionId>,
    pub(crate) append: bool,
    /// The tokens of the session that the prompt begins with.
    pub(crate) after: Option<Arc<Vec<u32>>>,
    /// Maximum number of tokens that are used of the prompt.
    pub(crate) truncate: Option<usize>,
    /// The task by which a reranker judges a pair.
    pub(crate) instruction: Option<Arc<str>>,
    /// The task whose matrices compute an embedding.
    pub(crate) task: Option<Arc<str>>,
    pub(crate) options: RequestOptions,
}

impl Request {
    /// A request to continue `prompt`.
    pub fn new(prompt: Prompt) -> Request {
        Request {
            prompt: Arc::new(prompt),
            images: Vec::new(),
            placed: Arc::default(),
            tools: None,
            exchange: None,
            marks: Arc::default(),
            placed_marks: Arc::default(),
            conversation: None,
            chat: Arc::default(),
            stop: Arc::default(),
            prompt_ends: TokenSet::default(),
            ignore_eos: false,
            min_tokens: 0,
            end_repetition: false,
            prediction: None,
            shown_tokens: Arc::default(),
            logprobs: None,
            processor: None,
            grammar: None,
            text_after: None,
            answer_format: None,
            cache_salt: None,
            adapter: None,
            session: None,
            append: false,
            after: None,
            truncate: None,
            instruction: None,
            task: None,
            options: RequestOptions::default(),
        }
    }

    /// Two texts that a text encoder reads together, for [`Engine::score`](crate::Engine::score): a
    /// question and a document, for example.
    pub fn pair(first: impl Into<String>, second: impl Into<String>) -> Request {
        Request::new(Prompt::Pair(first.into(), second.into()))
    }

    /// The task by which a reranker that answers with a token judges a [`Request::pair`], for example
    /// `Given a question about biology, find the passage that answers it`. It replaces the one in the
    /// model's template. A model whose template has no place for it refuses the request.
    pub fn instruction(mut self, instruction: impl Into<Arc<str>>) -> Request {
        self.instruction = Some(instruction.into());
        self
    }

    /// Computes an embedding with the matrices that the model has for this task
    /// ([`ModelInfo::tasks`](crate::ModelInfo::tasks)): `retrieval.query`, for example. Default: with
    /// those of no task; a model that has none of these refuses the request
    /// ([`ModelInfo::task_required`](crate::ModelInfo::task_required)). The text is used as it is: the prompt that the model has for the task
    /// ([`ModelInfo::prompts`](crate::ModelInfo::prompts)) is not added.
    ///
    /// A task that the model does not have is refused, and so is any task where nothing is embedded.
    pub fn task(mut self, task: impl Into<Arc<str>>) -> Request {
        self.task = Some(task.into());
        self
    }

    /// Uses at most this many tokens of the prompt of a text encoder or a classifier, with its special
    /// tokens: the first ones of a text, and of two texts those that are left after tokens were
    /// removed from the end of the longer one. In the template of a reranker that answers with a
    /// token, the document is cut. Default: a prompt that is too long is an error.
    ///
    /// It has no effect on other prompts.
    pub fn truncate(mut self, tokens_max: usize) -> Request {
        self.truncate = Some(tokens_max);
        self
    }

    /// Continues a text.
    pub fn text(text: impl Into<String>) -> Request {
        Request::new(Prompt::Text(text.into()))
    }

    /// Continues a sequence of token ids, each below the model's vocabulary size.
    pub fn tokens(tokens: impl Into<Vec<u32>>) -> Request {
        Request::new(Prompt::Tokens(tokens.into()))
    }

    /// Answers a conversation.
    pub fn chat(messages: impl Into<Vec<ChatMessage>>) -> Request {
        Request::new(Prompt::Chat(messages.into()))
    }

    /// Fills a gap in a text, with a model that was trained for it ([`Engine::supports_infill`]).
    /// The special tokens of the model end the answer. Files that do not fit the context are left
    /// out, from the first one on.
    ///
    /// Most models see the prefix before the suffix. So while somebody types, all that precedes the
    /// cursor is in the prefix cache, and the suffix is computed again.
    ///
    /// [`Engine::supports_infill`]: crate::Engine::supports_infill
    pub fn infill(infill: Infill) -> Request {
        Request::new(Prompt::Infill(infill))
    }

    /// The functions that the model may call: a JSON array of definitions in OpenAI's form. They are
    /// the chat template's variable `tools`; if the template does not support functions, they are
    /// described in the messages. Only chat prompts use them.
    ///
    /// The answer is text all the same. `Engine::with_rules` also tells the calls from the text and
    /// keeps them to their schemas.
    pub fn tools(mut self, tools: serde_json::Value) -> Request {
        self.tools = Some(Arc::new(tools));
        self
    }

    /// Replaces the messages of a conversation.
    #[cfg(feature = "text")]
    pub(crate) fn with_messages(mut self, messages: Vec<ChatMessage>) -> Request {
        self.prompt = Arc::new(Prompt::Chat(messages));
        self
    }

    /// Replaces the prompt, with its images, by token ids and keeps everything else. With the ids from
    /// [`Engine::prompt_tokens`], nothing is tokenized again.
    ///
    /// [`Engine::prompt_tokens`]: crate::Engine::prompt_tokens
    pub fn with_tokens(mut self, tokens: impl Into<Vec<u32>>) -> Request {
        self.prompt = Arc::new(Prompt::Tokens(tokens.into()));
        (self.tools, self.chat, self.exchange) = (None, Arc::default(), None);
        self.marks = self.marks.iter().filter(|mark| mark.is_whole()).copied().collect();
        (self.conversation, self.placed_marks) = (None, Arc::default());
        (self.images, self.placed) = (Vec::new(), Arc::default());
        self.prompt_ends = TokenSet::default();
        self
    }

    /// The prompt.
    pub fn prompt(&self) -> &Prompt {
        &self.prompt
    }

    /// The prompt's token ids; `None` if it is of another kind. [`Engine::tokenized`] makes them.
    ///
    /// [`Engine::tokenized`]: crate::Engine::tokenized
    pub fn token_ids(&self) -> Option<&[u32]> {
        match self.prompt() {
            Prompt::Tokens(tokens) => Some(tokens),
            _ => None,
        }
    }

    /// The value of [`Request::max_tokens`]; `None` if it was not called.
    pub fn get_max_tokens(&self) -> Option<usize> {
        self.options.max_tokens
    }

    /// The value of [`Request::sampling`].
    pub fn get_sampling(&self) -> &SamplingParams {
        &self.options.sampling
    }

    /// The value of [`Request::stop`].
    pub fn get_stop(&self) -> &[String] {
        &self.stop
    }

    /// The value of [`Request::min_tokens`].
    pub fn get_min_tokens(&self) -> usize {
        self.min_tokens
    }

    /// The ids of [`Request::stop_ids`], in ascending order.
    pub fn get_stop_ids(&self) -> &[u32] {
        self.options.stop_ids.as_slice()
    }

    /// The value of [`Request::cache_salt`]; `None` if it was not called.
    pub fn get_cache_salt(&self) -> Option<&str> {
        self.cache_salt.as_deref()
    }

    /// The value of [`Request::timeout`]; `None` if it was not called.
    pub fn get_timeout(&self) -> Option<Duration> {
        self.options.timeout
    }

    /// Maximum number of tokens to generate, at least 1. Default:
    /// [`EngineBuilder::default_max_tokens`](crate::EngineBuilder::default_max_tokens). Fewer are
    /// generated if the context length or the KV pool is exhausted first (finish reason `length`).
    pub fn max_tokens(mut self, max_tokens: usize) -> Request {
        self.options.max_tokens = Some(max_tokens);
        self
    }

    /// How tokens are sampled. Default: greedy.
    pub fn sampling(mut self, sampling: SamplingParams) -> Request {
        self.options.sampling = sampling;
        self
    }

    /// Strings that end the generation when they appear in the text. They are not part of the
    /// returned text. An empty string is an error.
    pub fn stop<S: Into<String>>(mut self, stop: impl IntoIterator<Item = S>) -> Request {
        self.stop = stop.into_iter().map(Into::into).collect();
        self
    }

    /// Token ids that end the generation, in addition to the model's end-of-sequence ids. At most
    /// 4,096 different ones, each below the model's vocabulary size.
    pub fn stop_ids(mut self, ids: impl IntoIterator<Item = u32>) -> Request {
        self.options.stop_ids = TokenSet::bounded(ids, RequestOptions::MAX_STOP_IDS);
        self
    }

    /// Whether to continue after the model's end-of-sequence ids. Default: false.
    pub fn ignore_eos(mut self, ignore: bool) -> Request {
        self.ignore_eos = ignore;
        self
    }

    /// Whether to end an answer that repeats itself without end, with the finish reason
    /// [`FinishReason::Repetition`](crate::FinishReason::Repetition): the same sequence of at most
    /// 256 tokens, five times or more and over more than 256 tokens. Default: false.
    pub fn end_repetition(mut self, end: bool) -> Request {
        self.end_repetition = end;
        self
    }

    /// What the answer is expected to be, for example the file that it changes. The parts that are
    /// right are generated faster, because several of their tokens are computed in one step. It never
    /// changes the answer. At most the first 128 KiB are used. Default: nothing is expected, and
    /// repetitions of the prompt are recognized all the same.
    pub fn prediction(mut self, text: impl Into<Arc<str>>) -> Request {
        self.prediction = Some(text.into());
        self
    }

    /// Minimum number of tokens to generate. Until then, the model's end-of-sequence ids and the
    /// stop ids cannot be chosen, stop strings are not looked for, and a repetition does not end the
    /// answer. Default: 0.
    pub fn min_tokens(mut self, min_tokens: usize) -> Request {
        self.min_tokens = min_tokens;
        self
    }

    /// The parts of the answer. Stop strings then end it only where they are in its text: reasoning
    /// and calls of tools may contain them. The text of the events is what the model has written,
    /// up to the token that completes a stop string; [`AnswerParser::with_stops`] takes it apart.
    /// By default the whole answer is text, which ends before the stop string.
    ///
    /// [`AnswerParser::with_stops`]: crate::AnswerParser::with_stops
    pub fn answer_format(mut self, format: AnswerFormat) -> Request {
        self.answer_format = (!format.is_text()).then(|| Arc::new(format));
        self
    }

    /// The value of [`Request::answer_format`]; `None` if the whole answer is text.
    pub fn get_answer_format(&self) -> Option<&AnswerFormat> {
        self.answer_format.as_deref()
    }

    /// Special tokens, by their spelling, that are part of the answer's text. Other special tokens
    /// have no text. The tokens of tool calls, for example, are special in some vocabularies.
    /// Spellings that are not in the vocabulary are ignored.
    pub fn show_special_tokens<S: Into<String>>(
        mut self,
        spellings: impl IntoIterator<Item = S>,
    ) -> Request {
        self.shown_tokens = spellings.into_iter().map(Into::into).collect();
        self
    }

    /// Reports the log-probability of each generated token and of the `top` most likely ones; 0 for
    /// the generated token alone, at most the vocabulary size and 1,024.
    pub fn logprobs(mut self, top: usize) -> Request {
        self.logprobs = Some(top);
        self
    }

    /// Changes the logits before each token is chosen, for example to exclude tokens.
    ///
    /// ```
    /// use stolon::{LogitsProcessor, Request, SamplingError};
    ///
    /// /// Allows each token once.
    /// struct NoRepetition;
    ///
    /// impl LogitsProcessor for NoRepetition {
    ///     fn process(&self, output: &[u32], logits: &mut [f32]) -> Result<(), SamplingError> {
    ///         for &token in output {
    ///             logits[token as usize] = f32::NEG_INFINITY;
    ///         }
    ///         Ok(())
    ///     }
    /// }
    ///
    /// let request = Request::text("one, two,").logits_processor(NoRepetition);
    /// # drop(request);
    /// ```
    pub fn logits_processor(mut self, processor: impl LogitsProcessor + 'static) -> Request {
        self.processor = Some(SharedProcessor::new(processor));
        self
    }

    /// The grammar that the answer has to follow from its first token to its end: a JSON schema,
    /// for example. The answer may end only where it is complete. An answer that reaches the
    /// maximum number of tokens before that (finish reason `length`), or that a stop string or stop
    /// id ends, is the beginning of a complete one.
    ///
    /// Log-probabilities are those of the model's own distribution, without the grammar. The
    /// grammar applies after [`Request::logits_processor`]. Bias and penalties choose among the
    /// tokens that it allows. If it is complete before [`Request::min_tokens`], the answer ends.
    ///
    /// ```no_run
    /// # async fn extract(engine: stolon::Engine) -> Result<(), Box<dyn std::error::Error>> {
    /// use serde_json::{Value, json};
    /// use stolon::{Grammar, Request};
    ///
    /// let schema = json!({
    ///     "type": "object",
    ///     "properties": {
    ///         "city": {"type": "string", "maxLength": 40},
    ///         "degrees": {"type": "integer", "minimum": -60, "maximum": 60},
    ///     },
    ///     "required": ["city", "degrees"],
    ///     "additionalProperties": false,
    /// });
    /// let request = Request::text("It is 21 degrees in Lisbon today. As JSON: ")
    ///     .grammar(Grammar::JsonSchema(schema))
    ///     .max_tokens(100);
    /// let weather: Value = serde_json::from_str(&engine.complete(request).await?.text)?;
    /// println!("{} degrees", weather["degrees"]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn grammar(mut self, grammar: Grammar) -> Request {
        self.grammar = Some(Arc::new(grammar));
        self
    }

    /// The value of [`Request::grammar`]; `None` if it was not called.
    pub fn get_grammar(&self) -> Option<&Grammar> {
        self.grammar.as_deref()
    }

    /// Reports the log-probability of each prompt token and of the `top` most likely ones in its
    /// place; at most the vocabulary size and 128. Such a request computes its whole prompt,
    /// because cached positions have no logits. With several choices, the first one reports them.
    pub fn prompt_logprobs(mut self, top: usize) -> Request {
        self.options.prompt_logprobs = Some(top);
        self
    }

    /// Marks parts of the prompt that are expected to be used again: they are evicted after
    /// everything that is neither marked nor pinned, for a mark's time to live after its last use. A
    /// mark takes nothing from a running request and changes no answer. All marks together protect at most
    /// [`EngineBuilder::pin_budget`](crate::EngineBuilder::pin_budget) blocks (default: a quarter of
    /// the pool), which tenants share fairly; what is beyond is evicted as if it were not marked.
    /// At most four marks of a request have an effect, and a mark within a conversation with images
    /// has none.
    pub fn marks(mut self, marks: impl IntoIterator<Item = CacheMark>) -> Request {
        let more = marks.into_iter().map(|mark| mark.in_prompt(&self.prompt));
        self.marks = self.marks.iter().copied().chain(more).collect();
        self
    }

    /// Requests with a larger value are admitted earlier, under every
    /// [`AdmissionPolicy`](crate::AdmissionPolicy). The bound on overtaking holds for them too. A
    /// prefix has the largest priority of the requests that used it, which
    /// [`EvictionPolicy::Priority`](crate::EvictionPolicy::Priority) evicts last. Default: 0.
    pub fn priority(mut self, priority: i32) -> Request {
        self.options.priority = priority;
        self
    }

    /// Name of the client that the request is for, if several share an engine: the user of a
    /// server, for example. Unlike [`Request::cache_salt`], it does not affect what is shared in
    /// the cache. Default: the tenant without a name.
    pub fn tenant(mut self, name: impl Into<Arc<str>>) -> Request {
        self.options.tenant = Some(name.into());
        self
    }

    /// Limits the tokens of all requests with the same quota. A request that does not fit into it
    /// waits in the admission queue, where others are admitted before it, or fails with
    /// [`EngineError::QuotaExceeded`](crate::EngineError::QuotaExceeded). Default: no limit.
    pub fn quota(mut self, quota: Quota) -> Request {
        self.options.quota = Some(quota);
        self
    }

    /// Maximum time in the admission queue. After that the stream ends with
    /// [`EngineError::QueueTimeout`](crate::EngineError::QueueTimeout). Requires a tokio runtime
    /// with a time driver.
    pub fn queue_timeout(mut self, timeout: Duration) -> Request {
        self.options.queue_timeout = Some(timeout);
        self
    }

    /// Maximum time from submission to the last token. After that the stream ends with
    /// [`EngineError::Timeout`](crate::EngineError::Timeout). Requires a tokio runtime with a time
    /// driver.
    pub fn timeout(mut self, timeout: Duration) -> Request {
        self.options.timeout = Some(timeout);
        self
    }
}
