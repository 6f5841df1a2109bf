//! `POST /generative_scoring`: the probability of a token after each of many prompts.

use std::sync::Arc;

use axum::response::Response;
use stolon::{LabelScores, Request};

use super::labels::{check_paths, usage};
use super::list;
use crate::api::completions::{Prompt, PromptInput};
use crate::api::embeddings::MAX_INPUTS;
use crate::api::scores::{GenerativeScoringRequest, PairScore};
use crate::handlers::app::App;
use crate::handlers::context::{Incoming, RequestContext};
use crate::handlers::embeddings::truncation;
use crate::handlers::pooled::{self, Inputs, MAX_TOKENS};
use crate::wire::error::ApiError;

/// Scores all items.
pub(crate) async fn score(
    Incoming { body: mut request, context }: Incoming<GenerativeScoringRequest>,
) -> Result<Response, ApiError> {
    let RequestContext { app, caller, ignored, held, .. } = context;
    let options = std::mem::take(&mut request.options);
    let (model, adapter) = app.chosen(options.model, &ignored)?;
    let paths = labels(&app, std::mem::take(&mut request.label_token_ids))?;
    let (normalizes, salt) = (request.apply_softmax.unwrap_or(true), request.cache_salt.take());
    let salt = caller.tenant.salt(salt.as_deref());
    let inputs = Inputs::new(&app, &caller, "items", true);
    let prompts = prompts(&inputs, request, paths.len()).await?;
    let prompts = prompts.into_iter().map(|tokens| Some(caller.sign(Request::tokens(tokens))));
    let tokens = inputs.tokenize(prompts, truncation(&app, options.truncate_prompt_tokens)).await?;
    drop(held);
    let priority = app.priority.of(options.priority);
    let requests = tokens.into_iter();
    let requests = requests.map(|tokens| {
        pooled::request(&caller, tokens, adapter.as_deref(), salt.as_deref(), priority)
    });
    let score = move |app: Arc<App>, prompt| {
        let paths = paths.clone();
        async move { app.engine.score_label_tokens(prompt, paths).await }
    };
    let scores = inputs.compute(requests.collect(), score).await?;
    let first = |scores: &LabelScores| match normalizes {
        true => scores.probabilities()[0],
        false => scores.logprobs[0].exp(),
    };
    let data = scores.iter().map(first).enumerate();
    let data = data.map(|(index, score)| PairScore { index, object: "score", score }).collect();
    Ok(list("generative-scoring", model, data, usage(&scores)))
}

/// The labels of one token each.
fn labels(app: &App, ids: Vec<u32>) -> Result<Vec<Vec<u32>>, ApiError> {
    const PARAM: &str = "label_token_ids";
    if ids.is_empty() {
        let message = format!("`{PARAM}`: expected at least 1 token id, got none");
        return Err(ApiError::invalid(Some(PARAM), message).code("invalid_value"));
    }
    for id in &ids {
        let checked = app.engine.check_embedding(std::slice::from_ref(id));
        checked.map_err(|error| ApiError::from(error).of_prompt(PARAM))?;
    }
    Ok(ids.into_iter().map(|id| vec![id]).collect())
}

/// The token ids of the query with each item, for this number of labels.
async fn prompts(
    inputs: &Inputs,
    request: GenerativeScoringRequest,
    labels: usize,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let GenerativeScoringRequest { query, items, item_first, add_special_tokens, .. } = request;
    let items = match items {
        PromptInput::Texts(_) | PromptInput::TokenLists(_) => items.into_prompts(),
        PromptInput::Text(_) | PromptInput::Tokens(_) => {
            let message =
                "`items`: expected a list of texts or of lists of token ids, got one item";
            return Err(ApiError::invalid(Some("items"), message));
        }
    };
    let query = match query {
        PromptInput::Text(text) => Prompt::Text(text),
        PromptInput::Tokens(tokens) => Prompt::Tokens(tokens),
        PromptInput::Texts(_) | PromptInput::TokenLists(_) => {
            let message =
                "`query`: expected a text, or the token ids of one, got a list of several";
            return Err(ApiError::invalid(Some("query"), message));
        }
    };
    inputs.check_count(items.len(), MAX_INPUTS)?;
    check_paths("label_token_ids", labels, items.len())?;
    let query = tokens(inputs, query, add_special_tokens.unwrap_or(true)).await?;
    // Every prompt has a copy of the query.
    if query.len().saturating_mul(items.len()) > MAX_TOKENS {
        let message =
            format!("`query`: expected at most {MAX_TOKENS} tokens in all prompts, got more");
        return Err(ApiError::invalid(Some("query"), message).code("invalid_value"));
    }
    let mut prompts = Vec::with_capacity(items.len());
    for item in items {
        let item = tokens(inputs, item, false).await?;
        prompts.push(match item_first {
            Some(true) => [item, query.clone()].concat(),
            _ => [query.clone(), item].concat(),
        });
    }
    Ok(prompts)
}

/// The token ids of a part of a prompt.
async fn tokens(inputs: &Inputs, prompt: Prompt, special: bool) -> Result<Vec<u32>, ApiError> {
    Ok(match prompt {
        Prompt::Text(text) => {
            inputs.app.engine.tokenize_for(text, special, inputs.client.clone()).await?
        }
        Prompt::Tokens(tokens) => tokens,
    })
}
