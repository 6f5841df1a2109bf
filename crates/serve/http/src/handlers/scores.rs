//! The handlers of `POST /v1/rerank`, `/score`, `/classify` and `/generative_scoring`, and of
//! `/pooling` for models that compute scores.

mod generative;
mod labels;

use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use stolon::{Error, Request, ScoreConfig, Scores};

use crate::api::completions::PromptInput;
use crate::api::embeddings::{EmbeddingsRequest, EmbeddingsUsage, MAX_INPUTS, PooledVector};
use crate::api::options::Truncation;
use crate::api::scores::{
    Classified, ClassifyRequest, Document, DocumentText, PairScore, RerankRequest, RerankResult,
    Reranked, ScoreList, ScoreRequest, ScoringOptions, Texts,
};
use crate::handlers::app::App;
use crate::handlers::completions::engine_request;
use crate::handlers::context::{Incoming, RequestContext};
use crate::handlers::embeddings::{truncation, vector};
use crate::handlers::pooled::Inputs;
use crate::wire::error::ApiError;
use crate::wire::{request_id, unix_seconds};

pub(crate) use generative::score as generative;

/// Maximum size of all pairs of a request in bytes. A text counts in every pair that has it, because
/// each pair is tokenized as a whole.
const MAX_BYTES: usize = 64 << 20;

/// Ranks documents for a query.
pub(crate) async fn rerank(
    Incoming { body: request, context }: Incoming<RerankRequest>,
) -> Result<Response, ApiError> {
    let app = Arc::clone(&context.app);
    check_labels(&app, true)?;
    let documents: Vec<String> = request.documents.into_iter().map(Document::into_text).collect();
    let (query, instruction) = (request.query, Instruction::new(request.instruction));
    let start = query.len() + instruction.len();
    check_bytes("documents", documents.iter().map(|document| start + document.len()))?;
    let pair = |document: &String| instruction.of(Request::pair(query.clone(), document.clone()));
    let pairs = documents.iter().map(pair);
    let mut options = request.options;
    // A document that is too long would make the whole request fail.
    options.truncate_prompt_tokens.get_or_insert(Truncation::Context);
    let asked = Asked { param: "documents", is_list: true, options };
    let (model, scores) = scores(context, asked, pairs.collect()).await?;
    let usage = usage(&scores);
    let mut order: Vec<(usize, f32)> =
        scores.iter().map(|scores| scores.values[0]).enumerate().collect();
    order.sort_by(|a, b| b.1.total_cmp(&a.1));
    order.truncate(request.top_n.unwrap_or(usize::MAX));
    let returns = request.return_documents.unwrap_or(true);
    let results = order.into_iter().map(|(index, relevance_score)| {
        let document = returns.then(|| DocumentText { text: documents[index].clone() });
        RerankResult { index, document, relevance_score }
    });
    let id = format!("rerank-{}", request_id::fresh());
    Ok(Json(Reranked { id, model, usage, results: results.collect() }).into_response())
}

/// Scores pairs of texts.
pub(crate) async fn score(
    Incoming { body: request, context }: Incoming<ScoreRequest>,
) -> Result<Response, ApiError> {
    check_labels(&context.app, true)?;
    let is_list = matches!(request.text_2, Texts::Several(_));
    let (first, second) = (request.text_1.into_list(), request.text_2.into_list());
    if first.len() != 1 && first.len() != second.len() {
        let message = format!(
            "`text_1`: expected one text, or as many as in `text_2` ({}), got {}",
            second.len(),
            first.len()
        );
        return Err(ApiError::invalid(Some("text_1"), message));
    }
    let one = first.len() == 1;
    let first = |index: usize| &first[if one { 0 } else { index }];
    let instruction = Instruction::new(request.instruction);
    let size =
        |(index, second): (usize, &String)| first(index).len() + second.len() + instruction.len();
    check_bytes("text_2", second.iter().enumerate().map(size))?;
    let pairs = second.into_iter().enumerate();
    let pairs =
        pairs.map(|(index, second)| instruction.of(Request::pair(first(index).clone(), second)));
    let asked = Asked { param: "text_2", is_list, options: request.options };
    let (model, scores) = scores(context, asked, pairs.collect()).await?;
    let score = |(index, scores): (usize, &Scores)| PairScore {
        index,
        object: "score",
        score: scores.values[0],
    };
    let data = scores.iter().enumerate().map(score).collect();
    Ok(list("score", model, data, usage(&scores)))
}

/// Finds the labels of texts, among those of the model, or by the probabilities with which a language
/// model answers with those of the request.
pub(crate) async fn classify(
    Incoming { body: mut request, context }: Incoming<ClassifyRequest>,
) -> Result<Response, ApiError> {
    if let Some(labels) = request.labels.take() {
        return labels::classify(request, labels, context).await;
    }
    let labels = check_labels(&context.app, false)?.labels.clone();
    let unused = [
        ("messages", request.messages.is_some()),
        ("chat_template_kwargs", request.chat_template_kwargs.is_some()),
    ];
    if let Some((name, _)) = unused.into_iter().find(|(_, is_set)| *is_set) {
        let message = format!("`{name}`: expected none without `labels`, got a value");
        return Err(ApiError::invalid(Some(name), message));
    }
    let input = request.input.ok_or_else(|| ApiError::missing("input"))?;
    let is_list = matches!(input, Texts::Several(_));
    let texts = input.into_list().into_iter().map(Request::text).collect();
    let asked = Asked { param: "input", is_list, options: request.options };
    let (model, scores) = scores(context, asked, texts).await?;
    let data = scores.iter().map(|scores| scores.values.clone()).enumerate();
    let data = data.map(|(index, probs)| classified(index, &labels, probs)).collect();
    Ok(list("classify", model, data, usage(&scores)))
}

/// The scores of texts, in the form of vectors. Only the options that concern scores are allowed.
pub(crate) async fn pool(
    Incoming { body: request, context }: Incoming<EmbeddingsRequest>,
) -> Result<Response, ApiError> {
    check_labels(&context.app, false)?;
    let unused = [
        ("dimensions", request.dimensions.is_some()),
        ("prompt_name", request.prompt_name.is_some()),
        ("input_type", request.input_type.is_some()),
        ("cache_salt", request.cache_salt.is_some()),
    ];
    if let Some((name, _)) = unused.into_iter().find(|(_, is_set)| *is_set) {
        let message =
            format!("`{name}`: expected none, because the model computes scores, got a value");
        return Err(ApiError::invalid(Some(name), message));
    }
    let is_list = matches!(request.input, PromptInput::Texts(_) | PromptInput::TokenLists(_));
    let texts = request.input.into_prompts().into_iter().map(engine_request).collect();
    let EmbeddingsRequest { model, truncate_prompt_tokens, priority, .. } = request;
    let options = ScoringOptions { model, truncate_prompt_tokens, priority };
    let (model, scores) =
        scores(context, Asked { param: "input", is_list, options }, texts).await?;
    let (usage, format) = (usage(&scores), request.encoding_format.unwrap_or_default());
    let data = scores.into_iter().enumerate().map(|(index, scores)| PooledVector {
        index,
        object: "pooling",
        data: vector(scores.values, format),
    });
    Ok(list("pool", model, data.collect(), usage))
}

/// The label with the largest score.
fn classified(index: usize, labels: &[String], probs: Vec<f32>) -> Classified {
    let best = probs.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    let label = best.and_then(|(best, _)| labels.get(best)).cloned().unwrap_or_default();
    Classified { index, label, probs, num_classes: labels.len() }
}

/// The task by which a model judges all pairs of a request.
struct Instruction(Option<Arc<str>>);

impl Instruction {
    fn new(instruction: Option<String>) -> Self {
        Self(instruction.map(Into::into))
    }

    /// Its size in bytes.
    fn len(&self) -> usize {
        self.0.as_ref().map_or(0, |instruction| instruction.len())
    }

    /// The request with the instruction.
    fn of(&self, request: Request) -> Request {
        match &self.0 {
            Some(instruction) => request.instruction(Arc::clone(instruction)),
            None => request,
        }
    }
}

/// What the requests of all routes have.
struct Asked {
    /// The parameter with the texts.
    param: &'static str,
    is_list: bool,
    options: ScoringOptions,
}

/// The labels of the model. `is_ranking` says whether one label is needed.
fn check_labels(app: &App, is_ranking: bool) -> Result<&ScoreConfig, ApiError> {
    let info = app.engine.model_info();
    let config = info.scores.as_ref();
    let config = config.filter(|config| !is_ranking || config.labels.len() == 1);
    Ok(config.ok_or_else(|| Error::NotForScores { model: info.id.clone() })?)
}

/// Refuses pairs of these sizes if they are larger than [`MAX_BYTES`] together.
fn check_bytes(
    param: &'static str,
    mut sizes: impl Iterator<Item = usize>,
) -> Result<(), ApiError> {
    let sum =
        sizes.try_fold(0_usize, |sum, size| sum.checked_add(size).filter(|s| *s <= MAX_BYTES));
    if sum.is_some() {
        return Ok(());
    }
    let message =
        format!("`{param}`: expected pairs of at most {MAX_BYTES} bytes in all, got more");
    Err(ApiError::invalid(Some(param), message).code("invalid_value"))
}

/// The name of the model and the scores of all texts.
async fn scores(
    context: RequestContext,
    Asked { param, is_list, options }: Asked,
    texts: Vec<Request>,
) -> Result<(String, Vec<Scores>), ApiError> {
    let RequestContext { app, caller, ignored, held, .. } = context;
    let (model, _) = app.chosen(options.model, &ignored)?;
    let inputs = Inputs::new(&app, &caller, param, is_list);
    inputs.check_count(texts.len(), MAX_INPUTS)?;
    let signed = texts.into_iter().map(|text| Some(caller.sign(text)));
    let tokens = inputs.tokenize(signed, truncation(&app, options.truncate_prompt_tokens)).await?;
    drop(held);
    let priority = app.priority.of(options.priority);
    let prompts = tokens.into_iter();
    let prompts = prompts.map(|tokens| caller.sign(Request::tokens(tokens).priority(priority)));
    let score = |app: Arc<App>, prompt| async move { app.engine.score(prompt).await };
    let scores = inputs.compute(prompts.collect(), score).await?;
    Ok((model, scores))
}

fn usage(scores: &[Scores]) -> EmbeddingsUsage {
    let prompt_tokens = scores.iter().map(|scores| scores.prompt_tokens).sum();
    EmbeddingsUsage { prompt_tokens, total_tokens: prompt_tokens, prompt_tokens_details: None }
}

/// A reply in vLLM's form, whose id begins with `id`.
pub(crate) fn list<T: serde::Serialize>(
    id: &str,
    model: String,
    data: Vec<T>,
    usage: EmbeddingsUsage,
) -> Response {
    let id = format!("{id}-{}", request_id::fresh());
    let (object, created) = ("list", unix_seconds());
    Json(ScoreList { id, object, created, model, data, usage }).into_response()
}
