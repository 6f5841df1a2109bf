//! What the two text endpoints have in common: running the requests of one call. The
//! [`Endpoint`] trait is where they differ.

use std::sync::Arc;

use axum::response::Response;
use futures::future::try_join_all;
use serde::Serialize;
use stolon::{Completion, Engine, Finish, Request, TokenLogprob, TokenStream};

use super::error::ApiError;
use super::options::Call;
use super::reply::UsageSum;
use super::{App, reply, request_id, unix_seconds};
use crate::api::reply::{FinishReason, Reply, Usage};

/// One of the two text endpoints: the form of its choices.
///
/// In a streamed reply, [`Endpoint::opening`] is called once for each choice, then
/// [`Endpoint::delta`] for each piece, then [`Endpoint::closing`] once. In a whole reply only
/// [`Endpoint::whole`] is called.
pub(super) trait Endpoint: Send + Sync + 'static {
    /// Prefix of the ids of replies.
    const ID_PREFIX: &'static str;
    /// The field `object` of a whole reply.
    const OBJECT: &'static str;
    /// The field `object` of a streamed piece.
    const CHUNK_OBJECT: &'static str;

    /// A choice of a whole reply.
    type Choice: Serialize;
    /// A piece of a choice of a streamed reply.
    type ChunkChoice: Serialize;
    /// What is known of a streamed choice between two of its tokens.
    type State: Send + 'static;

    /// A choice of a whole reply.
    fn whole(&self, engine: &Engine, index: usize, completion: &Completion) -> Self::Choice;

    /// The piece that begins a streamed choice, before any generated token; `None` if such a piece
    /// is not needed.
    fn opening(&self, index: usize) -> Option<Self::ChunkChoice>;

    /// The pieces for one generated token; none if they would be empty.
    fn delta(
        &self,
        engine: &Engine,
        index: usize,
        state: &mut Self::State,
        piece: Piece<'_>,
    ) -> Vec<Self::ChunkChoice>;

    /// The pieces that end a streamed choice.
    fn closing(
        &self,
        index: usize,
        state: &mut Self::State,
        reason: FinishReason,
    ) -> Vec<Self::ChunkChoice>;

    /// Token ids of the prompt, for endpoints that report them once for all choices, if they were
    /// requested.
    fn prompt_ids(&self) -> Option<Vec<u32>> {
        None
    }

    /// The state of a streamed choice before its first token.
    fn state(&self, index: usize) -> Self::State;
}

/// What one generated token adds to a choice.
pub(super) struct Piece<'a> {
    /// Text; may be empty.
    pub(super) text: &'a str,
    /// The token's id; `None` for text that was withheld until the end.
    pub(super) id: Option<u32>,
    /// The token's log-probability, if it was requested.
    pub(super) logprob: Option<&'a TokenLogprob>,
}

/// The fields that all pieces of a reply share.
#[derive(Clone, Debug)]
pub(super) struct Envelope {
    id: String,
    created: u64,
    model: String,
}

impl Envelope {
    fn new<E: Endpoint>(model: String) -> Self {
        let id = format!("{}-{}", E::ID_PREFIX, request_id::fresh());
        Self { id, created: unix_seconds(), model }
    }

    /// A reply, or a piece of one.
    pub(super) fn wrap<Choice>(
        &self,
        object: &'static str,
        choices: Vec<Choice>,
        usage: Option<Option<Usage>>,
    ) -> Reply<Choice> {
        Reply {
            id: self.id.clone(),
            object,
            created: self.created,
            model: self.model.clone(),
            choices,
            prompt_token_ids: None,
            usage,
        }
    }
}

/// Runs the prompts of one call, each with as many choices as were requested, and replies whole
/// or streamed. The choices of prompt `p` have the indices `p * n` to `p * n + n - 1`. `usage` has
/// what has been counted before.
pub(super) async fn respond<E: Endpoint>(
    app: &Arc<App>,
    endpoint: E,
    call: Call,
    prompts: Vec<Request>,
    mut usage: UsageSum,
) -> Result<Response, ApiError> {
    let engine = app.engine.clone();
    let requests = prompts.into_iter().map(|prompt| call.apply(prompt));
    if let Some(candidates) = call.candidate_count {
        // All prompts are submitted before the first is awaited. An error cancels the others.
        let asked = requests.map(|request| engine.best_of(request, candidates, call.choice_count));
        let mut completions = Vec::new();
        for best in try_join_all(asked).await? {
            usage.add_prompt(best.usage);
            completions.extend(best.completions);
        }
        let envelope = Envelope::new::<E>(call.model);
        return Ok(reply::whole(&engine, &endpoint, &envelope, usage, &completions));
    }
    let mut streams = Vec::new();
    for request in requests {
        // If a request is refused, the streams made so far are dropped, which cancels them.
        streams.extend(engine.generate_choices(request, call.choice_count).await?);
    }
    let envelope = Envelope::new::<E>(call.model);
    if call.stream {
        return Ok(reply::stream(engine, endpoint, envelope, usage, streams, call.include_usage));
    }
    // The first error is the reply; the other choices are then cancelled.
    let completions = try_join_all(streams.into_iter().map(TokenStream::collect_text)).await?;
    for (index, completion) in completions.iter().enumerate() {
        usage.add(index, completion.finish.usage);
    }
    Ok(reply::whole(&engine, &endpoint, &envelope, usage, &completions))
}

/// Replies with the prompts alone, of which each has as many choices as were requested.
pub(super) fn respond_without_answers<E: Endpoint>(
    app: &Arc<App>,
    endpoint: E,
    call: Call,
    prompt_count: usize,
    usage: UsageSum,
) -> Response {
    let envelope = Envelope::new::<E>(call.model);
    let (engine, choices) = (app.engine.clone(), prompt_count * call.choice_count);
    if call.stream {
        return reply::stream_of_prompts(
            engine,
            endpoint,
            envelope,
            usage,
            choices,
            call.include_usage,
        );
    }
    let finish = Finish {
        reason: stolon::FinishReason::Length,
        usage: stolon::Usage::default(),
        timings: stolon::Timings::default(),
    };
    let empty = Completion {
        text: String::new(),
        token_ids: Vec::new(),
        logprobs: Vec::new(),
        prompt_logprobs: Vec::new(),
        finish,
    };
    reply::whole(&engine, &endpoint, &envelope, usage, &vec![empty; choices])
}
