//! From the engine's streams to a reply: all at once, or piece by piece as server-sent events.

use axum::Json;
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::stream::{self, SelectAll};
use futures::{Stream, StreamExt};
use serde_json::{Value, json};
use stolon::{Completion, Engine, Error, Event, TokenLogprob, TokenStream, Usage};

use super::api::{Api, Envelope, Piece};
use super::error::ApiError;

/// Usage over all choices of a call. A prompt counts once, however many choices it has: for it
/// stands its first choice.
#[derive(Clone, Copy, Debug)]
pub(super) struct UsageSum {
    choices_per_prompt: usize,
    /// Nothing was asked for but the prompt; what was generated is not counted.
    prompt_only: bool,
    sum: Usage,
}

impl UsageSum {
    pub(super) fn new(choices_per_prompt: usize, prompt_only: bool) -> Self {
        Self { choices_per_prompt, prompt_only, sum: Usage::default() }
    }

    /// Adds a choice, numbered over all prompts.
    pub(super) fn add(&mut self, choice: usize, mut usage: Usage) {
        if !choice.is_multiple_of(self.choices_per_prompt) {
            (usage.prompt_tokens, usage.cached_tokens) = (0, 0);
        }
        self.add_prompt(usage);
    }

    /// Adds a prompt with all that was generated for it.
    pub(super) fn add_prompt(&mut self, usage: Usage) {
        self.sum.prompt_tokens += usage.prompt_tokens;
        self.sum.cached_tokens += usage.cached_tokens;
        if !self.prompt_only {
            self.sum.completion_tokens += usage.completion_tokens;
        }
    }

    fn to_json(self) -> Value {
        let Usage { prompt_tokens, cached_tokens, completion_tokens } = self.sum;
        json!({
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        })
    }
}

/// Replies with all choices at once.
pub(super) fn whole<A: Api>(
    engine: &Engine,
    api: &A,
    envelope: &Envelope,
    usage: UsageSum,
    completions: &[Completion],
) -> Response {
    let choices = completions.iter().enumerate();
    let choices = choices.map(|(choice, completion)| api.whole(engine, choice, completion));
    let mut reply = envelope.wrap(A::OBJECT, choices.collect());
    reply["usage"] = usage.to_json();
    Json(reply).into_response()
}

/// One choice's stream, its events numbered by the choice.
type NumberedEvent = stream::BoxStream<'static, (usize, Result<Event, Error>)>;

/// What a streamed reply needs to know between two events.
struct Streaming<A> {
    engine: Engine,
    api: A,
    envelope: Envelope,
    usage: UsageSum,
    include_usage: bool,
    choices: Vec<StreamedChoice>,
    events: SelectAll<NumberedEvent>,
    /// The last event has been sent.
    done: bool,
}

/// What has been sent of a choice.
#[derive(Clone, Default)]
struct StreamedChoice {
    opened: bool,
    /// Characters sent.
    offset: usize,
}

/// Replies with server-sent events as the engine produces them. Dropping the response's body, as
/// happens when the client goes away, drops the streams and so cancels their requests.
pub(super) fn stream<A: Api>(
    engine: Engine,
    api: A,
    envelope: Envelope,
    usage: UsageSum,
    streams: Vec<TokenStream>,
    include_usage: bool,
) -> Response {
    let choices = vec![StreamedChoice::default(); streams.len()];
    let numbered = streams
        .into_iter()
        .enumerate()
        .map(|(choice, stream)| stream.map(move |event| (choice, event)).boxed());
    let streaming = Streaming {
        engine,
        api,
        envelope,
        usage,
        include_usage,
        choices,
        events: stream::select_all(numbered),
        done: false,
    };
    Sse::new(streaming.into_events()).keep_alive(KeepAlive::default()).into_response()
}

impl<A: Api> Streaming<A> {
    fn into_events(self) -> impl Stream<Item = Result<sse::Event, std::convert::Infallible>> {
        let batches = stream::unfold(self, |mut state| async move {
            if state.done {
                return None;
            }
            let payloads = match state.events.next().await {
                Some((choice, Ok(event))) => state.on_event(choice, event),
                Some((_, Err(error))) => state.end_with(ApiError::from(error).to_json()),
                None => state.end(),
            };
            Some((stream::iter(payloads), state))
        });
        batches.flatten().map(|payload| Ok(sse::Event::default().data(payload)))
    }

    /// The payloads of one engine event.
    fn on_event(&mut self, choice: usize, event: Event) -> Vec<String> {
        let mut objects = Vec::new();
        match event {
            // A choice with the prompt's log-probabilities opens when they are there.
            Event::Started { .. } if self.api.opens_late() => {}
            Event::Started { .. } => objects.extend(self.open(choice, Vec::new())),
            Event::PromptLogprobs(prompt) => objects.extend(self.open(choice, prompt)),
            Event::Token(token) if !self.api.prompt_only() => {
                let logprob = token.logprob.as_ref();
                let state = &mut self.choices[choice];
                let piece = Piece { text: &token.text, logprob, offset: state.offset };
                objects.extend(self.api.delta(&self.engine, choice, &piece));
                state.offset += token.text.chars().count();
            }
            Event::Finished(finish) => {
                self.usage.add(choice, finish.usage);
                objects.push(self.api.closing(choice, finish.reason.as_str()));
            }
            _ => {}
        }
        objects.into_iter().map(|object| self.chunk(vec![object])).collect()
    }

    fn open(&mut self, choice: usize, prompt: Vec<Option<TokenLogprob>>) -> Option<Value> {
        if std::mem::replace(&mut self.choices[choice].opened, true) {
            return None; // A request that was interrupted by another one starts twice.
        }
        let (object, offset) = self.api.opening(&self.engine, choice, &prompt)?;
        self.choices[choice].offset = offset;
        Some(object)
    }

    fn chunk(&self, choices: Vec<Value>) -> String {
        let mut chunk = self.envelope.wrap(A::CHUNK_OBJECT, choices);
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        chunk.to_string()
    }

    /// All choices have ended.
    fn end(&mut self) -> Vec<String> {
        self.done = true;
        let mut payloads = Vec::new();
        if self.include_usage {
            let mut last = self.envelope.wrap(A::CHUNK_OBJECT, Vec::new());
            last["usage"] = self.usage.to_json();
            payloads.push(last.to_string());
        }
        payloads.push("[DONE]".to_owned());
        payloads
    }

    /// The status line has long been sent, so an error is told in the stream; no `[DONE]` follows.
    fn end_with(&mut self, error: Value) -> Vec<String> {
        self.done = true;
        self.events.clear();
        vec![error.to_string()]
    }
}
