//! From the engine's streams to a reply: all at once, or in pieces as server-sent events.

use axum::Json;
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::stream::{self, SelectAll};
use futures::{Stream, StreamExt};
use stolon::{Completion, Engine, Error, Event, TokenEvent, TokenStream};

use super::error::ApiError;
use super::generation::{Endpoint, Envelope, Piece};
use crate::api::reply::{FinishReason, PromptTokensDetails, Usage};

/// Adds up the usage of all choices of a call. A prompt counts once, however many choices it has:
/// the usage of its first choice is taken.
#[derive(Clone, Copy, Debug)]
pub(super) struct UsageSum {
    choices_per_prompt: usize,
    hides_cached_tokens: bool,
    /// The prompts have been counted already.
    prompts_counted: bool,
    sum: stolon::Usage,
}

impl UsageSum {
    pub(super) fn new(choices_per_prompt: usize, hides_cached_tokens: bool) -> Self {
        let (prompts_counted, sum) = (false, stolon::Usage::default());
        Self { choices_per_prompt, hides_cached_tokens, prompts_counted, sum }
    }

    /// Counts the prompts, so that those of the choices do not count.
    pub(super) fn with_prompts(mut self, prompts: &[stolon::Usage]) -> Self {
        prompts.iter().for_each(|&usage| self.add_prompt(usage));
        Self { prompts_counted: true, ..self }
    }

    /// Adds the choice with this index.
    pub(super) fn add(&mut self, index: usize, mut usage: stolon::Usage) {
        if !index.is_multiple_of(self.choices_per_prompt) {
            (usage.prompt_tokens, usage.cached_tokens) = (0, 0);
        }
        self.add_prompt(usage);
    }

    /// Adds a prompt together with all that was generated for it.
    pub(super) fn add_prompt(&mut self, usage: stolon::Usage) {
        if !self.prompts_counted {
            self.sum.prompt_tokens += usage.prompt_tokens;
            self.sum.cached_tokens += usage.cached_tokens;
        }
        self.sum.completion_tokens += usage.completion_tokens;
    }

    fn total(self) -> Usage {
        let stolon::Usage { prompt_tokens, cached_tokens, completion_tokens } = self.sum;
        Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: (!self.hides_cached_tokens)
                .then_some(PromptTokensDetails { cached_tokens }),
        }
    }
}

/// Replies with all choices at once.
pub(super) fn whole<E: Endpoint>(
    engine: &Engine,
    endpoint: &E,
    envelope: &Envelope,
    usage: UsageSum,
    completions: &[Completion],
) -> Response {
    let choices = completions.iter().enumerate();
    let choices = choices.map(|(index, completion)| endpoint.whole(engine, index, completion));
    let usage = Some(Some(usage.total()));
    let mut reply = envelope.wrap(E::OBJECT, choices.collect(), usage);
    reply.prompt_token_ids = endpoint.prompt_ids();
    Json(reply).into_response()
}

/// One choice's stream, its events paired with the choice's index.
type Numbered = stream::BoxStream<'static, (usize, Result<Event, Error>)>;

/// State of a streamed reply.
struct Streaming<E: Endpoint> {
    engine: Engine,
    endpoint: E,
    envelope: Envelope,
    usage: UsageSum,
    include_usage: bool,
    choices: Vec<StreamedChoice<E::State>>,
    events: SelectAll<Numbered>,
    /// Token ids of the prompt, for the first piece.
    prompt_ids: Option<Vec<u32>>,
    /// The last payload has been sent.
    done: bool,
}

/// What has been sent of a choice.
struct StreamedChoice<State> {
    /// The piece that begins the choice has been sent, or is not needed.
    opened: bool,
    /// What the endpoint keeps between two tokens.
    state: State,
}

/// Replies with server-sent events as the engine produces them. When the client disconnects, the
/// response's body is dropped and with it the token streams, which cancels their requests.
pub(super) fn stream<E: Endpoint>(
    engine: Engine,
    endpoint: E,
    envelope: Envelope,
    usage: UsageSum,
    streams: Vec<TokenStream>,
    include_usage: bool,
) -> Response {
    let choice = |index| StreamedChoice { opened: false, state: endpoint.state(index) };
    let choices = (0..streams.len()).map(choice).collect();
    let numbered = streams
        .into_iter()
        .enumerate()
        .map(|(index, stream)| stream.map(move |event| (index, event)).boxed());
    let events = stream::select_all(numbered);
    let streaming =
        Streaming::new(engine, endpoint, envelope, usage, choices, events, include_usage);
    Sse::new(streaming.into_events()).keep_alive(KeepAlive::default()).into_response()
}

/// Replies with the beginnings and the ends of choices that have no answers.
pub(super) fn stream_of_prompts<E: Endpoint>(
    engine: Engine,
    endpoint: E,
    envelope: Envelope,
    usage: UsageSum,
    choice_count: usize,
    include_usage: bool,
) -> Response {
    let (choices, events) = (Vec::new(), SelectAll::new());
    let mut streaming =
        Streaming::new(engine, endpoint, envelope, usage, choices, events, include_usage);
    let mut payloads = Vec::new();
    for index in 0..choice_count {
        let mut state = streaming.endpoint.state(index);
        let opening = streaming.endpoint.opening(index);
        let closing = streaming.endpoint.closing(index, &mut state, FinishReason::Length);
        for piece in opening.into_iter().chain(closing) {
            payloads.push(streaming.chunk(vec![piece], None));
        }
    }
    payloads.extend(streaming.end());
    Sse::new(stream::iter(payloads.into_iter().map(event))).into_response()
}

fn event(payload: String) -> Result<sse::Event, std::convert::Infallible> {
    Ok(sse::Event::default().data(payload))
}

impl<E: Endpoint> Streaming<E> {
    fn new(
        engine: Engine,
        endpoint: E,
        envelope: Envelope,
        usage: UsageSum,
        choices: Vec<StreamedChoice<E::State>>,
        events: SelectAll<Numbered>,
        include_usage: bool,
    ) -> Self {
        let (prompt_ids, done) = (endpoint.prompt_ids(), false);
        Self { engine, endpoint, envelope, usage, include_usage, choices, events, prompt_ids, done }
    }

    fn into_events(self) -> impl Stream<Item = Result<sse::Event, std::convert::Infallible>> {
        let batches = stream::unfold(self, |mut state| async move {
            if state.done {
                return None;
            }
            let payloads = match state.events.next().await {
                Some((index, Ok(event))) => state.on_event(index, event),
                Some((_, Err(error))) => state.end_with(&ApiError::from(error)),
                None => state.end(),
            };
            Some((stream::iter(payloads), state))
        });
        batches.flatten().map(event)
    }

    /// The payloads for one event of the engine.
    fn on_event(&mut self, index: usize, event: Event) -> Vec<String> {
        let mut pieces = Vec::new();
        match event {
            Event::Started { .. } => pieces.extend(self.open(index)),
            Event::Token(token) => {
                let state = &mut self.choices[index].state;
                let TokenEvent { id, text, logprob } = &token;
                let piece = Piece { text, id: *id, logprob: logprob.as_ref() };
                pieces.extend(self.endpoint.delta(&self.engine, index, state, piece));
            }
            Event::Finished(finish) => {
                self.usage.add(index, finish.usage);
                let (state, reason) = (&mut self.choices[index].state, (&finish.reason).into());
                pieces.extend(self.endpoint.closing(index, state, reason));
            }
            _ => {}
        }
        pieces.into_iter().map(|piece| self.chunk(vec![piece], None)).collect()
    }

    fn open(&mut self, index: usize) -> Option<E::ChunkChoice> {
        if std::mem::replace(&mut self.choices[index].opened, true) {
            return None; // A preempted request starts a second time.
        }
        self.endpoint.opening(index)
    }

    /// One piece of the reply as JSON. Every piece has the field `usage` if the client asked for
    /// it; it is `null` in all but the last.
    fn chunk(&mut self, choices: Vec<E::ChunkChoice>, usage: Option<Usage>) -> String {
        let usage = self.include_usage.then_some(usage);
        let mut piece = self.envelope.wrap(E::CHUNK_OBJECT, choices, usage);
        piece.prompt_token_ids = self.prompt_ids.take();
        to_json(&piece)
    }

    /// All choices have ended.
    fn end(&mut self) -> Vec<String> {
        self.done = true;
        let mut payloads = Vec::new();
        if self.include_usage {
            let usage = self.usage.total();
            payloads.push(self.chunk(Vec::new(), Some(usage)));
        }
        payloads.push("[DONE]".to_owned());
        payloads
    }

    /// The status line was sent long ago, so an error becomes a payload; `[DONE]` does not follow.
    fn end_with(&mut self, error: &ApiError) -> Vec<String> {
        self.done = true;
        self.events.clear();
        vec![to_json(&error.reply())]
    }
}

/// The value as JSON on one line.
fn to_json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).expect("replies have string keys and cannot fail to serialise")
}
