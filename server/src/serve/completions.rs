//! The handler of `POST /v1/completions`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde_json::json;
use stolon::{Completion, Engine, Request, TokenLogprob};

use super::App;
use super::body::{Body, accept_only, parse_generation};
use super::error::ApiError;
use super::generation::{Endpoint, Piece, respond};
use super::logprobs::{CompletionLists, visible};
use super::options::Call;
use crate::api::completions::{CompletionChoice, CompletionRequest, Prompt};
use crate::api::options::MAX_CHOICES;
use crate::api::reply::FinishReason;

/// OpenAI's default for this endpoint.
const DEFAULT_MAX_TOKENS: usize = 16;

/// A prompt that is repeated at the beginning of its choices.
struct Echo {
    text: String,
    /// Its token ids; empty unless their log-probabilities are reported.
    tokens: Vec<u32>,
}

/// The form of the choices of one call.
struct Completions {
    choices_per_prompt: usize,
    /// Whether log-probabilities were requested.
    logprobs: bool,
    /// One entry per prompt if prompts are repeated, empty otherwise.
    echoes: Vec<Echo>,
    /// `max_tokens` is 0: the reply has the prompt alone.
    prompt_only: bool,
}

/// The handler.
pub(super) async fn create(State(app): State<Arc<App>>, body: Body) -> Result<Response, ApiError> {
    let request: CompletionRequest = parse_generation(body)?;
    accept_only("suffix", request.suffix.as_ref(), &[json!("")])?;
    let mut call = Call::new(request.options, &app)?;
    let prompts = request.prompt.into_prompts();
    if prompts.is_empty() {
        return Err(ApiError::expected("prompt", "at least one prompt", &json!([])));
    }
    call.candidate_count = candidates(request.best_of, &call)?;
    let answers = prompts.len() * call.candidate_count.unwrap_or(call.choice_count);
    if answers > MAX_CHOICES {
        let message = format!(
            "expected at most {MAX_CHOICES} answers (prompts x `n`, or x `best_of`), got {answers}"
        );
        return Err(ApiError::invalid(Some("prompt"), message));
    }
    let echo = request.echo.unwrap_or(false);
    let max_tokens = request.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS);
    let prompt_only = max_tokens == 0;
    if prompt_only && !echo {
        return Err(ApiError::expected("max_tokens", "at least 1 without `echo`", &json!(0)));
    }
    if prompt_only && call.candidate_count.is_some() {
        let message = "`best_of` is not possible with `max_tokens`: 0, which generates nothing";
        return Err(ApiError::invalid(Some("best_of"), message));
    }
    // The engine generates at least one token. With `max_tokens` 0 the reply leaves it out.
    call.max_tokens = Some(max_tokens.max(1));
    call.logprobs = request.logprobs;

    let mut requests: Vec<Request> = prompts.iter().map(engine_request).collect();
    let mut echoes = Vec::new();
    if echo {
        for (prompt, engine_request) in prompts.iter().zip(&mut requests) {
            let with_tokens = request.logprobs.is_some();
            echoes.push(echo_of(prompt, &app.engine, engine_request, with_tokens).await?);
            if let Some(top) = request.logprobs {
                *engine_request = engine_request.clone().prompt_logprobs(top);
            }
        }
    }
    let completions = Completions {
        choices_per_prompt: call.choice_count,
        logprobs: request.logprobs.is_some(),
        echoes,
        prompt_only,
    };
    respond(&app, completions, call, requests).await
}

/// The number of candidates of `best_of`; `None` for 1, which leaves nothing to choose from.
fn candidates(best_of: Option<usize>, call: &Call) -> Result<Option<usize>, ApiError> {
    let Some(count) = best_of else { return Ok(None) };
    if count < call.choice_count {
        let expected = format!("a whole number from {} (`n`) to {MAX_CHOICES}", call.choice_count);
        return Err(ApiError::expected("best_of", &expected, &json!(count)));
    }
    if count > 1 && call.stream {
        let message = "`best_of` is not possible with `stream`: true, because answers can only be \
                       compared when they are complete";
        return Err(ApiError::invalid(Some("best_of"), message));
    }
    Ok((count > 1).then_some(count))
}

fn engine_request(prompt: &Prompt) -> Request {
    match prompt {
        Prompt::Text(text) => Request::text(text.clone()),
        Prompt::Tokens(tokens) => Request::tokens(tokens.clone()),
    }
}

async fn echo_of(
    prompt: &Prompt,
    engine: &Engine,
    request: &Request,
    with_tokens: bool,
) -> Result<Echo, ApiError> {
    let text = match prompt {
        Prompt::Text(text) => text.clone(),
        Prompt::Tokens(tokens) => engine.detokenize(tokens, false)?,
    };
    let tokens = if with_tokens { engine.prompt_tokens(request).await? } else { Vec::new() };
    Ok(Echo { text, tokens })
}

impl Completions {
    fn echo(&self, index: usize) -> Option<&Echo> {
        self.echoes.get(index / self.choices_per_prompt)
    }

    /// Lists with the prompt's tokens, if the prompt is repeated.
    fn prompt_lists(
        &self,
        engine: &Engine,
        index: usize,
        prompt: &[Option<TokenLogprob>],
    ) -> CompletionLists {
        let mut lists = CompletionLists::default();
        if let Some(echo) = self.echo(index) {
            for (&token, entry) in echo.tokens.iter().zip(prompt) {
                match entry {
                    Some(entry) => lists.push(engine, entry),
                    None => lists.push_first(engine, token),
                }
            }
        }
        lists
    }
}

impl Endpoint for Completions {
    const ID_PREFIX: &'static str = "cmpl";
    const OBJECT: &'static str = "text_completion";
    const CHUNK_OBJECT: &'static str = "text_completion";

    type Choice = CompletionChoice;
    type ChunkChoice = CompletionChoice;

    fn whole(&self, engine: &Engine, index: usize, completion: &Completion) -> CompletionChoice {
        let mut text = self.echo(index).map(|echo| echo.text.clone()).unwrap_or_default();
        let mut lists = self.prompt_lists(engine, index, &completion.prompt_logprobs);
        let mut finish_reason = FinishReason::from(&completion.finish.reason);
        if self.prompt_only {
            finish_reason = FinishReason::Length;
        } else {
            text.push_str(&completion.text);
            visible(engine, &completion.logprobs).for_each(|entry| lists.push(engine, entry));
        }
        let logprobs = self.logprobs.then(|| lists.finish());
        CompletionChoice { index, text, logprobs, finish_reason: Some(finish_reason) }
    }

    fn opening(
        &self,
        engine: &Engine,
        index: usize,
        prompt: &[Option<TokenLogprob>],
    ) -> Option<(CompletionChoice, usize)> {
        let text = self.echo(index)?.text.clone();
        let logprobs = self.logprobs.then(|| self.prompt_lists(engine, index, prompt).finish());
        let characters = text.chars().count();
        Some((CompletionChoice { index, text, logprobs, finish_reason: None }, characters))
    }

    fn delta(&self, engine: &Engine, index: usize, piece: &Piece<'_>) -> Option<CompletionChoice> {
        let logprobs = visible(engine, piece.logprob).next().map(|entry| {
            let mut lists = CompletionLists::starting_at(piece.offset);
            lists.push(engine, entry);
            lists.finish()
        });
        if piece.text.is_empty() && logprobs.is_none() {
            return None;
        }
        let text = piece.text.to_owned();
        Some(CompletionChoice { index, text, logprobs, finish_reason: None })
    }

    fn closing(&self, index: usize, reason: FinishReason) -> CompletionChoice {
        let reason = if self.prompt_only { FinishReason::Length } else { reason };
        let (text, finish_reason) = (String::new(), Some(reason));
        CompletionChoice { index, text, logprobs: None, finish_reason }
    }

    fn opens_with_prompt_logprobs(&self) -> bool {
        self.logprobs && !self.echoes.is_empty()
    }

    fn prompt_only(&self) -> bool {
        self.prompt_only
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Bytes;
    use serde_json::Value;

    use super::*;

    fn parse(prompt: &Value) -> Result<Vec<Prompt>, ApiError> {
        let body = Bytes::from(json!({ "prompt": prompt }).to_string());
        Ok(parse_generation::<CompletionRequest>(Ok(body))?.prompt.into_prompts())
    }

    /// Goal: the four forms of a prompt are recognised, and nothing else is accepted as a prompt.
    #[test]
    fn a_prompt_has_four_forms() {
        let text = |text: &str| Prompt::Text(text.to_owned());
        assert_eq!(parse(&json!("a")), Ok(vec![text("a")]));
        assert_eq!(parse(&json!(["a", "b"])), Ok(vec![text("a"), text("b")]));
        assert_eq!(parse(&json!([1, 2])), Ok(vec![Prompt::Tokens(vec![1, 2])]));
        let lists = vec![Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])];
        assert_eq!(parse(&json!([[1], [2, 3]])), Ok(lists));
        for bad in [json!(7), json!({}), json!(["a", 1]), json!([1.5]), json!([[1], "a"])] {
            let error = parse(&bad).expect_err("not a prompt").reply().error;
            assert_eq!(error.param.as_deref(), Some("prompt"));
        }
        // The handler refuses an empty list.
        assert_eq!(parse(&json!([])), Ok(Vec::new()));
    }
}
