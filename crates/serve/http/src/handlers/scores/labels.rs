//! `POST /classify` with labels: the probabilities of given answers of a language model.

use std::sync::Arc;

use axum::response::Response;
use stolon::{ChatOptions, LabelScores, Request};

use super::{classified, list};
use crate::api::embeddings::{EmbeddingsUsage, MAX_INPUTS};
use crate::api::scores::{ClassifyRequest, MAX_LABEL_BYTES, Texts};
use crate::handlers::app::App;
use crate::handlers::chat::messages;
use crate::handlers::context::RequestContext;
use crate::handlers::embeddings::truncation;
use crate::handlers::pooled::Inputs;
use crate::wire::error::ApiError;
use crate::wire::history;

/// Maximum number of texts times the number of labels.
const MAX_PATHS: usize = 8192;

/// Finds the labels of texts, or of the next message of a conversation.
pub(super) async fn classify(
    request: ClassifyRequest,
    labels: Vec<String>,
    context: RequestContext,
) -> Result<Response, ApiError> {
    let RequestContext { app, caller, ignored, held, .. } = context;
    let ClassifyRequest { input, messages: conversation, chat_template_kwargs, options, .. } =
        request;
    let (model, _) = app.chosen(options.model, &ignored)?;
    let texts = input.as_ref().map_or(1, |texts| match texts {
        Texts::One(_) => 1,
        Texts::Several(texts) => texts.len(),
    });
    check_labels(&labels, texts)?;
    let mut most = truncation(&app, options.truncate_prompt_tokens);
    let (param, is_list, prompts) = match (input, conversation) {
        (Some(_), None) if chat_template_kwargs.is_some() => {
            let message = "`chat_template_kwargs`: expected none without `messages`, got a value";
            return Err(ApiError::invalid(Some("chat_template_kwargs"), message));
        }
        (Some(input), None) => {
            let is_list = matches!(input, Texts::Several(_));
            ("input", is_list, input.into_list().into_iter().map(Request::text).collect())
        }
        (None, Some(conversation)) => {
            let conversation = messages(conversation, &ignored)?;
            let conversation = history::conversation(&app.engine, conversation, true, &ignored);
            let variables = chat_template_kwargs.unwrap_or_default();
            let chat = ChatOptions { variables, ..app.chat_options() };
            most = None;
            ("messages", false, vec![Request::chat(conversation).chat_options(chat)])
        }
        (None, None) => return Err(ApiError::missing("input")),
        (Some(_), Some(_)) => {
            let message = "expected either `input` or `messages`, got both";
            return Err(ApiError::invalid(Some("messages"), message));
        }
    };
    let inputs = Inputs::new(&app, &caller, param, is_list);
    inputs.check_count(texts, MAX_INPUTS)?;
    let signed = prompts.into_iter().map(|prompt: Request| Some(caller.sign(prompt)));
    let tokens = inputs.tokenize(signed, most).await?;
    drop(held);
    let priority = app.priority.of(options.priority);
    let prompts = tokens.into_iter();
    let prompts = prompts.map(|tokens| caller.sign(Request::tokens(tokens).priority(priority)));
    let labels: Arc<[String]> = labels.into();
    let all = Arc::clone(&labels);
    let score = move |app: Arc<App>, prompt| {
        let labels = Arc::clone(&all);
        async move { app.engine.score_labels(prompt, &labels).await }
    };
    let scores = inputs.compute(prompts.collect(), score).await?;
    let data = scores.iter().map(LabelScores::probabilities).enumerate();
    let data = data.map(|(index, probs)| classified(index, &labels, probs)).collect();
    Ok(list("classify", model, data, usage(&scores)))
}

/// The numbers of tokens of all prompts.
pub(super) fn usage(scores: &[LabelScores]) -> EmbeddingsUsage {
    let prompt_tokens = scores.iter().map(|scores| scores.prompt_tokens).sum();
    EmbeddingsUsage { prompt_tokens, total_tokens: prompt_tokens, prompt_tokens_details: None }
}

/// Checks the labels of this number of texts.
fn check_labels(labels: &[String], texts: usize) -> Result<(), ApiError> {
    let invalid =
        |message: String| ApiError::invalid(Some("labels"), message).code("invalid_value");
    if labels.len() < 2 {
        return Err(invalid(format!("`labels`: expected at least 2 labels, got {}", labels.len())));
    }
    let is_wrong = |label: &&String| !(1..=MAX_LABEL_BYTES).contains(&label.len());
    if let Some(label) = labels.iter().find(is_wrong) {
        let message = format!(
            "`labels`: expected labels of 1 to {MAX_LABEL_BYTES} bytes, got one of {}",
            label.len()
        );
        return Err(invalid(message));
    }
    check_paths("labels", labels.len(), texts)
}

/// Refuses more labels of all texts together than [`MAX_PATHS`].
pub(super) fn check_paths(
    param: &'static str,
    labels: usize,
    texts: usize,
) -> Result<(), ApiError> {
    let paths = labels.saturating_mul(texts);
    if paths <= MAX_PATHS {
        return Ok(());
    }
    let message = format!(
        "`{param}`: expected at most {MAX_PATHS} labels of all texts together, got {paths}"
    );
    Err(ApiError::invalid(Some(param), message).code("invalid_value"))
}
