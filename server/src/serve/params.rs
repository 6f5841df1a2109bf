//! Parameters that both text endpoints take: read from the request's fields, put into the
//! engine's requests.

use serde_json::json;
use stolon::{Request, SamplingParams};

use super::App;
use super::error::ApiError;
use super::fields::Fields;

/// Most answers that one call generates: prompts times `n`, or times `best_of`.
pub(super) const MAX_CHOICES: usize = 128;

/// Most likely tokens that can be asked for at a place.
pub(super) const MAX_LOGPROBS: usize = 20;

/// The parameters, checked as far as it needs no engine. Values out of an engine's range are
/// refused by the engine, before it does any work.
#[derive(Debug)]
pub(super) struct Common {
    /// The model's name as the client wrote it.
    pub(super) model: String,
    /// `n`.
    pub(super) choice_count: usize,
    /// `best_of`: how many answers to generate of each prompt, of which the best `choice_count`
    /// are told, best first; `None` tells all, in the order of their seeds.
    pub(super) candidate_count: Option<usize>,
    /// Whether to reply piece by piece.
    pub(super) stream: bool,
    /// Whether a streamed reply ends with the usage.
    pub(super) include_usage: bool,
    /// Most tokens of a choice; `None` leaves it to the engine.
    pub(super) max_tokens: Option<usize>,
    /// How many of the likeliest tokens to report at each place; `None` reports nothing.
    pub(super) logprobs: Option<usize>,
    sampling: SamplingParams,
    stop: Vec<String>,
    stop_ids: Vec<u32>,
    ignore_eos: bool,
    cache_salt: Option<String>,
    priority: i32,
}

impl Common {
    /// Takes the common parameters out of a request. `max_tokens`, `logprobs` and `best_of` differ
    /// between the endpoints and are set by them.
    pub(super) fn take(fields: &mut Fields, app: &App) -> Result<Self, ApiError> {
        let model = match fields.take_string("model")? {
            Some(name) => {
                app.check_model(&name)?;
                name
            }
            None => app.engine.model_info().id.clone(),
        };
        let stream = fields.take_bool("stream")?.unwrap_or(false);
        let include_usage = match fields.take_object("stream_options")? {
            Some(_) if !stream => {
                let message = "`stream_options` is allowed only with `stream`: true";
                return Err(ApiError::invalid(Some("stream_options"), message));
            }
            Some(mut options) => {
                let include = options.take_bool("include_usage")?.unwrap_or(false);
                options.accept_only("include_obfuscation", &[json!(false)])?;
                options.finish()?;
                include
            }
            None => false,
        };
        // Labels of hosted services; none of them changes what is generated.
        fields.ignore(&["user", "metadata", "safety_identifier", "prompt_cache_key"]);
        fields.accept_only("store", &[json!(false)])?;
        fields.accept_only("service_tier", &[json!("auto"), json!("default")])?;
        let choice_count = fields.take_count("n", 1, MAX_CHOICES)?.unwrap_or(1);
        Ok(Self {
            model,
            choice_count,
            candidate_count: None,
            stream,
            include_usage,
            max_tokens: None,
            logprobs: None,
            sampling: sampling(fields, app.engine.recommended_sampling())?,
            stop: fields.take_strings("stop", 16)?,
            stop_ids: fields.take_token_ids("stop_token_ids")?,
            ignore_eos: fields.take_bool("ignore_eos")?.unwrap_or(false),
            cache_salt: fields.take_string("cache_salt")?,
            priority: fields.take_i32("priority")?.unwrap_or(0),
        })
    }

    /// Puts the parameters into a request.
    pub(super) fn apply(&self, request: Request) -> Request {
        let mut request = request
            .sampling(self.sampling.clone())
            .stop(self.stop.iter().cloned())
            .stop_ids(self.stop_ids.iter().copied())
            .ignore_eos(self.ignore_eos)
            .priority(self.priority);
        if let Some(max_tokens) = self.max_tokens {
            request = request.max_tokens(max_tokens);
        }
        if let Some(top) = self.logprobs {
            request = request.logprobs(top);
        }
        if let Some(salt) = &self.cache_salt {
            request = request.cache_salt(salt.clone());
        }
        request
    }
}

/// How tokens are chosen; what the client does not say is as the model's makers recommend.
fn sampling(fields: &mut Fields, base: SamplingParams) -> Result<SamplingParams, ApiError> {
    let mut number =
        |name: &str, base: f32| Ok::<_, ApiError>(fields.take_f32(name)?.unwrap_or(base));
    let sampling = SamplingParams {
        temperature: number("temperature", base.temperature)?,
        top_p: number("top_p", base.top_p)?,
        min_p: number("min_p", base.min_p)?,
        repetition_penalty: number("repetition_penalty", base.repetition_penalty)?,
        presence_penalty: number("presence_penalty", base.presence_penalty)?,
        frequency_penalty: number("frequency_penalty", base.frequency_penalty)?,
        ..base
    };
    let top_k = match fields.take_count("top_k", 0, u32::MAX as usize)? {
        None => sampling.top_k,
        Some(k) => (k > 0).then_some(k), // 0 keeps all.
    };
    let logit_bias = fields.take_logit_bias("logit_bias")?;
    Ok(SamplingParams { top_k, logit_bias, seed: fields.take_seed("seed")?, ..sampling })
}
