//! `POST /v1/completions`: continues prompts given as text or as token ids.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::response::Response;
use serde_json::{Value, json};
use stolon::{Completion, Engine, Request, TokenLogprob};

use super::App;
use super::api::{self, Api, Piece};
use super::error::ApiError;
use super::fields::{self, Fields};
use super::logprobs::{Legacy, visible};
use super::params::{Common, MAX_CHOICES, MAX_LOGPROBS};

/// OpenAI's default for this endpoint.
const DEFAULT_MAX_TOKENS: usize = 16;

/// One prompt, as the client gave it.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// A prompt to be repeated at the head of its choices.
struct Echo {
    text: String,
    /// Its tokens; only where their log-probabilities are reported.
    tokens: Vec<u32>,
}

/// How the choices of one call look.
struct Completions {
    choices_per_prompt: usize,
    logprobs: bool,
    /// One a prompt when the prompt is to be repeated, empty otherwise.
    echoes: Vec<Echo>,
    /// `max_tokens` 0: the prompt alone.
    prompt_only: bool,
}

/// The handler.
pub(super) async fn create(
    State(app): State<Arc<App>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let mut fields = api::parse_body(body)?;
    let mut common = Common::take(&mut fields, &app)?;
    let prompts = parse_prompts(fields.take("prompt"))?;
    common.candidate_count = best_of(&mut fields, &common)?;
    let answers = prompts.len() * common.candidate_count.unwrap_or(common.choice_count);
    if answers > MAX_CHOICES {
        let message = format!(
            "expected at most {MAX_CHOICES} answers (prompts x `n`, or x `best_of`), got {answers}"
        );
        return Err(ApiError::invalid(Some("prompt"), message));
    }
    common.logprobs = fields.take_count("logprobs", 0, MAX_LOGPROBS)?;
    let echo = fields.take_bool("echo")?.unwrap_or(false);
    let max_tokens = fields.take_count("max_tokens", 0, usize::MAX)?.unwrap_or(DEFAULT_MAX_TOKENS);
    let prompt_only = max_tokens == 0;
    if prompt_only && !echo {
        return Err(ApiError::expected("max_tokens", "at least 1 without `echo`", &json!(0)));
    }
    // One token is generated even then, because the engine does so; it is not shown.
    common.max_tokens = Some(max_tokens.max(1));
    if prompt_only && common.candidate_count.is_some() {
        let message = "`best_of` is not possible with `max_tokens`: 0, which generates nothing";
        return Err(ApiError::invalid(Some("best_of"), message));
    }
    refuse_unsupported(fields)?;

    let mut requests: Vec<Request> = prompts.iter().map(Prompt::to_request).collect();
    let mut echoes = Vec::new();
    if echo {
        for (prompt, request) in prompts.iter().zip(&mut requests) {
            echoes.push(prompt.echo(&app.engine, request, common.logprobs.is_some())?);
            if let Some(top) = common.logprobs {
                *request = request.clone().prompt_logprobs(top);
            }
        }
    }
    let completions = Completions {
        choices_per_prompt: common.choice_count,
        logprobs: common.logprobs.is_some(),
        echoes,
        prompt_only,
    };
    api::respond(&app, completions, common, requests).await
}

/// `best_of`, unless it is 1: then there is nothing to choose from.
fn best_of(fields: &mut Fields, common: &Common) -> Result<Option<usize>, ApiError> {
    let least = common.choice_count; // `n`
    let candidates = fields.take_count("best_of", least, MAX_CHOICES)?.filter(|&count| count > 1);
    if candidates.is_some() && common.stream {
        let message = "`best_of` is not possible with `stream`: true, since it takes whole answers \
                       to say which are the best";
        return Err(ApiError::invalid(Some("best_of"), message));
    }
    Ok(candidates)
}

/// Refuses whatever is left, except values that ask for nothing.
fn refuse_unsupported(mut fields: Fields) -> Result<(), ApiError> {
    fields.accept_only("suffix", &[json!("")])?;
    fields.finish()
}

/// A string, a list of strings, a list of ids, or a list of lists of ids.
fn parse_prompts(value: Option<Value>) -> Result<Vec<Prompt>, ApiError> {
    let expected = "a string, a list of strings, a list of token ids or a list of such lists";
    let Some(value) = value else {
        return Err(ApiError::expected("prompt", expected, &Value::Null));
    };
    let prompts = match &value {
        Value::String(text) => Some(vec![Prompt::Text(text.clone())]),
        Value::Array(items) if items.iter().all(Value::is_string) => {
            items.iter().map(|item| Some(Prompt::Text(item.as_str()?.to_owned()))).collect()
        }
        Value::Array(items) if items.iter().all(Value::is_array) => {
            items.iter().map(|item| Some(Prompt::Tokens(fields::token_ids(item)?))).collect()
        }
        Value::Array(_) => fields::token_ids(&value).map(|ids| vec![Prompt::Tokens(ids)]),
        _ => None,
    };
    prompts
        .filter(|prompts| !prompts.is_empty())
        .ok_or_else(|| ApiError::expected("prompt", expected, &value))
}

impl Prompt {
    fn to_request(&self) -> Request {
        match self {
            Self::Text(text) => Request::text(text.clone()),
            Self::Tokens(tokens) => Request::tokens(tokens.clone()),
        }
    }

    fn echo(&self, engine: &Engine, request: &Request, tokens: bool) -> Result<Echo, ApiError> {
        let text = match self {
            Self::Text(text) => text.clone(),
            Self::Tokens(tokens) => engine.detokenize(tokens, false)?,
        };
        let tokens = if tokens { engine.prompt_tokens(request)? } else { Vec::new() };
        Ok(Echo { text, tokens })
    }
}

impl Completions {
    fn echo(&self, choice: usize) -> Option<&Echo> {
        self.echoes.get(choice / self.choices_per_prompt)
    }

    /// The lists filled with the prompt's tokens, so far as it is repeated.
    fn prompt_lists(
        &self,
        engine: &Engine,
        choice: usize,
        prompt: &[Option<TokenLogprob>],
    ) -> Legacy {
        let mut lists = Legacy::default();
        if let Some(echo) = self.echo(choice) {
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

fn choice_object(choice: usize, text: &str, logprobs: Value, finish_reason: Option<&str>) -> Value {
    json!({"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish_reason})
}

impl Api for Completions {
    const ID_PREFIX: &'static str = "cmpl";
    const OBJECT: &'static str = "text_completion";
    const CHUNK_OBJECT: &'static str = "text_completion";

    fn whole(&self, engine: &Engine, choice: usize, completion: &Completion) -> Value {
        let mut text = self.echo(choice).map(|echo| echo.text.clone()).unwrap_or_default();
        let mut lists = self.prompt_lists(engine, choice, &completion.prompt_logprobs);
        let mut finish_reason = completion.finish.reason.as_str();
        if self.prompt_only {
            finish_reason = "length";
        } else {
            text.push_str(&completion.text);
            visible(engine, &completion.logprobs).for_each(|entry| lists.push(engine, entry));
        }
        let logprobs = if self.logprobs { lists.into_json() } else { Value::Null };
        choice_object(choice, &text, logprobs, Some(finish_reason))
    }

    fn opening(
        &self,
        engine: &Engine,
        choice: usize,
        prompt: &[Option<TokenLogprob>],
    ) -> Option<(Value, usize)> {
        let echo = self.echo(choice)?;
        let logprobs = match self.logprobs {
            true => self.prompt_lists(engine, choice, prompt).into_json(),
            false => Value::Null,
        };
        Some((choice_object(choice, &echo.text, logprobs, None), echo.text.chars().count()))
    }

    fn delta(&self, engine: &Engine, choice: usize, piece: &Piece<'_>) -> Option<Value> {
        let mut logprobs = Value::Null;
        if let Some(entry) = visible(engine, piece.logprob).next() {
            let mut lists = Legacy::starting_at(piece.offset);
            lists.push(engine, entry);
            logprobs = lists.into_json();
        }
        let silent = piece.text.is_empty() && logprobs.is_null();
        (!silent).then(|| choice_object(choice, piece.text, logprobs, None))
    }

    fn closing(&self, choice: usize, finish_reason: &str) -> Value {
        let finish_reason = if self.prompt_only { "length" } else { finish_reason };
        choice_object(choice, "", Value::Null, Some(finish_reason))
    }

    fn opens_late(&self) -> bool {
        self.logprobs && !self.echoes.is_empty()
    }

    fn prompt_only(&self) -> bool {
        self.prompt_only
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the four forms of a prompt are told apart, and nothing else is taken for one.
    #[test]
    fn the_forms_of_a_prompt() {
        let parse = |value| parse_prompts(Some(value));
        let text = |text: &str| Prompt::Text(text.to_owned());
        assert_eq!(parse(json!("a")), Ok(vec![text("a")]));
        assert_eq!(parse(json!(["a", "b"])), Ok(vec![text("a"), text("b")]));
        assert_eq!(parse(json!([1, 2])), Ok(vec![Prompt::Tokens(vec![1, 2])]));
        let lists = vec![Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])];
        assert_eq!(parse(json!([[1], [2, 3]])), Ok(lists));
        for bad in
            [json!([]), json!(7), json!({}), json!(["a", 1]), json!([1.5]), json!([[1], "a"])]
        {
            let error = parse(bad).expect_err("no prompt").to_json();
            assert_eq!(error["error"]["param"], "prompt");
        }
        assert!(parse_prompts(None).is_err());
    }
}
