//! What the two text endpoints have in common, and the seam at which they differ.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::response::Response;
use futures::future::try_join_all;
use serde_json::{Value, json};
use stolon::{Completion, Engine, Request, TokenLogprob, TokenStream};

use super::error::ApiError;
use super::fields::Fields;
use super::params::Common;
use super::reply::UsageSum;
use super::{App, reply, unix_seconds};

/// One of the two text endpoints: how its choices look.
///
/// A choice's life in a streamed reply: [`Api::opening`] once, [`Api::delta`] for each piece,
/// [`Api::closing`] once. In a whole reply: [`Api::whole`] alone.
pub(super) trait Api: Send + Sync + 'static {
    /// What ids of replies begin with.
    const ID_PREFIX: &'static str;
    /// `object` of a whole reply.
    const OBJECT: &'static str;
    /// `object` of a streamed piece.
    const CHUNK_OBJECT: &'static str;

    /// The choice object of a whole reply.
    fn whole(&self, engine: &Engine, choice: usize, completion: &Completion) -> Value;

    /// The choice object that opens a streamed choice, before any token of it, and how many
    /// characters of text it holds; `None` when a choice needs no opening.
    fn opening(
        &self,
        engine: &Engine,
        choice: usize,
        prompt: &[Option<TokenLogprob>],
    ) -> Option<(Value, usize)>;

    /// The choice object of one streamed piece; `None` when there is nothing to tell.
    fn delta(&self, engine: &Engine, choice: usize, piece: &Piece<'_>) -> Option<Value>;

    /// The choice object that ends a streamed choice.
    fn closing(&self, choice: usize, finish_reason: &str) -> Value;

    /// Whether a streamed choice opens with the prompt's log-probabilities rather than at the
    /// start: they come later.
    fn opens_late(&self) -> bool {
        false
    }

    /// Whether generated tokens are left out: only the prompt was asked about.
    fn prompt_only(&self) -> bool {
        false
    }
}

/// One streamed piece of a choice.
pub(super) struct Piece<'a> {
    /// Its text; may be empty.
    pub(super) text: &'a str,
    /// The log-probability of its token, where asked for.
    pub(super) logprob: Option<&'a TokenLogprob>,
    /// Characters of the reply's text before this piece.
    pub(super) offset: usize,
}

/// The parts of a reply that all its pieces share.
#[derive(Clone, Debug)]
pub(super) struct Envelope {
    id: String,
    created: u64,
    model: String,
}

impl Envelope {
    fn new<A: Api>(model: String) -> Self {
        // Unique in this process by the count, and between processes by the time it started at.
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let created = unix_seconds();
        let id = format!("{}-{created:x}{:08x}{count:08x}", A::ID_PREFIX, std::process::id());
        Self { id, created, model }
    }

    /// A reply or a piece of one.
    pub(super) fn wrap(&self, object: &str, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }
}

/// Reads a body that may be too large.
pub(super) fn parse_body(body: Result<Bytes, BytesRejection>) -> Result<Fields, ApiError> {
    let body =
        body.map_err(|rejection| ApiError::new(rejection.status(), rejection.body_text()))?;
    Fields::parse(&body)
}

/// Runs the prompts of one call, each with as many choices as asked for, and replies in the form
/// asked for. Choices of prompt `p` are numbers `p * n` to `p * n + n - 1`.
pub(super) async fn respond<A: Api>(
    app: &Arc<App>,
    api: A,
    common: Common,
    prompts: Vec<Request>,
) -> Result<Response, ApiError> {
    let engine = app.engine.clone();
    let mut usage = UsageSum::new(common.choice_count, api.prompt_only());
    let requests = prompts.into_iter().map(|prompt| common.apply(prompt));
    if let Some(candidates) = common.candidate_count {
        // All prompts are let in before the first is waited for. An error cancels the others.
        let asked =
            requests.map(|request| engine.best_of(request, candidates, common.choice_count));
        let mut completions = Vec::new();
        for best in try_join_all(asked).await? {
            usage.add_prompt(best.usage);
            completions.extend(best.completions);
        }
        let envelope = Envelope::new::<A>(common.model);
        return Ok(reply::whole(&engine, &api, &envelope, usage, &completions));
    }
    let mut streams = Vec::new();
    for request in requests {
        // A refusal drops the streams made so far, which cancels them.
        streams.extend(engine.generate_choices(request, common.choice_count)?);
    }
    let envelope = Envelope::new::<A>(common.model);
    if common.stream {
        return Ok(reply::stream(engine, api, envelope, usage, streams, common.include_usage));
    }
    // The first error is the reply; the other choices are then cancelled.
    let completions = try_join_all(streams.into_iter().map(TokenStream::collect_text)).await?;
    for (choice, completion) in completions.iter().enumerate() {
        usage.add(choice, completion.finish.usage);
    }
    Ok(reply::whole(&engine, &api, &envelope, usage, &completions))
}
