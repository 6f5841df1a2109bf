//! Turns the engine's events into a reply in the form of one API, whole or in pieces as server-sent
//! events. A whole reply is made by the same calls as a streamed one, so both have the same
//! content.

use std::convert::Infallible;

use axum::Json;
use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::stream::{self, BoxStream, SelectAll};
use futures::{Stream, StreamExt};
use serde::Serialize;
use stolon::{
    AnswerFormat, AnswerParser, AnswerPart, Error, Event, FinishReason, PrefixMark, StopStrings,
    Timings, TokenEvent, TokenLogprob,
};

use crate::api::reply::{CompletionTokensDetails, PromptTokensDetails, Usage};
use crate::wire::error::ApiError;

/// The media type of lines of JSON.
pub(crate) const LINES: &str = "application/x-ndjson";

/// The form of the replies of one API, and the reply in progress.
///
/// For each choice, [`Dialect::begin`] is called once, then [`Dialect::part`] any number of times,
/// then [`Dialect::timed`] and [`Dialect::end`] once; calls for different choices may alternate.
/// [`Dialect::finish`] follows when all choices have ended. Each call returns the events that it
/// adds to a streamed reply; [`Dialect::whole`] is the reply that the same calls make if it is not
/// streamed.
pub(crate) trait Dialect: Send + Sized + 'static {
    /// The data of a server-sent event.
    type Event: Serialize + Send;
    /// A whole reply.
    type Whole: Serialize;

    /// The name of an event; `None` for APIs whose events have none.
    fn name(event: &Self::Event) -> Option<&'static str>;

    /// Whether the events are lines of JSON instead of server-sent events.
    const IS_LINES: bool = false;

    /// The data of the event after the last one, for a reply without an error.
    const TERMINATOR: Option<&'static str> = None;

    /// The marked parts of a prompt, in ascending order. Called before everything else.
    fn marked(&mut self, _marks: &[PrefixMark]) {}

    /// A choice begins. `usage` counts its prompt.
    fn begin(&mut self, choice: usize, usage: Usage) -> Vec<Self::Event>;

    /// The log-probabilities of the prompt of a choice, one entry per token. Called only for whole
    /// replies.
    fn prompt_logprobs(&mut self, _choice: usize, _entries: &[Option<TokenLogprob>]) {}

    /// A choice continues.
    fn part(&mut self, choice: usize, piece: Piece<'_>) -> Vec<Self::Event>;

    /// The times of a choice that ends now.
    fn timed(&mut self, _choice: usize, _timings: &Timings) {}

    /// A choice has ended.
    fn end(&mut self, choice: usize, reason: &FinishReason) -> Vec<Self::Event>;

    /// All choices have ended. `usage` counts all of them.
    fn finish(&mut self, usage: Usage) -> Vec<Self::Event>;

    /// The reply cannot be completed, and some of it has been sent.
    fn fail(&mut self, error: &ApiError) -> Self::Event;

    /// The whole reply, after [`Dialect::finish`].
    fn whole(self) -> Self::Whole;
}

/// The additions of one engine event to a choice.
#[derive(Debug, Default)]
pub(crate) struct Piece<'a> {
    /// Parts of the answer; empty while a character or a tag is incomplete.
    pub(crate) parts: Vec<AnswerPart>,
    /// The generated token; `None` for text that was withheld until the end.
    pub(crate) id: Option<u32>,
    /// The token's log-probability, if it was requested and the token does not end the answer.
    pub(crate) logprob: Option<&'a TokenLogprob>,
}

/// How the choices of a call become its reply.
#[derive(Debug)]
pub(crate) struct ReplyOptions {
    /// Whether to reply in pieces.
    pub(crate) stream: bool,
    /// The parts of the answers.
    pub(crate) format: AnswerFormat,
    /// Strings that end an answer, if the engine has not looked for them.
    pub(crate) stops: Option<StopStrings>,
    /// Number of tokens of a choice before which stop strings are not looked for.
    pub(crate) min_tokens: usize,
    /// Tokens whose log-probabilities are not reported.
    pub(crate) unreported: Vec<u32>,
    /// The tokens that were counted before.
    pub(crate) usage: UsageSum,
}

/// The events of one choice.
pub(crate) type Choice = BoxStream<'static, Result<Event, Error>>;

/// The events of one call, each with the number of its choice.
type Events = SelectAll<BoxStream<'static, (usize, Result<Event, Error>)>>;

/// Replies with these choices.
///
/// # Errors
/// The first error of a choice, unless the reply is sent in pieces.
pub(crate) async fn reply<D: Dialect>(
    choices: Vec<Choice>,
    options: ReplyOptions,
    dialect: D,
) -> Result<Response, ApiError> {
    let ReplyOptions { stream, format, stops, min_tokens, unreported, usage } = options;
    let parser = || match &stops {
        Some(stops) => AnswerParser::with_stops(format.clone(), stops.clone()),
        None => AnswerParser::new(format.clone()),
    };
    let parsers = choices.iter().map(|_| Some(parser())).collect();
    let (begun, tokens) = (vec![false; choices.len()], vec![0; choices.len()]);
    let reasons = match format.reasoning {
        Some(_) => vec![format.reasoning_is_open; choices.len()],
        None => Vec::new(),
    };
    let numbered = choices
        .into_iter()
        .enumerate()
        .map(|(index, events)| events.map(move |event| (index, event)).boxed());
    let mut events: Events = stream::select_all(numbered);
    let mut replying =
        Replying { dialect, parsers, begun, tokens, min_tokens, reasons, usage, unreported };
    if stream && D::IS_LINES {
        let lines = replying.into_events(events, line::<D>, || None).map(Ok::<_, Infallible>);
        let kind = (header::CONTENT_TYPE, HeaderValue::from_static(LINES));
        return Ok(([kind], Body::from_stream(lines)).into_response());
    }
    if stream {
        let terminator = || D::TERMINATOR.map(|text| sse::Event::default().data(text));
        let events = replying.into_events(events, sse_event::<D>, terminator);
        let events = events.map(Ok::<_, Infallible>);
        return Ok(Sse::new(events).keep_alive(KeepAlive::default()).into_response());
    }
    // The first error is the reply; the other choices are then canceled.
    while let Some((index, event)) = events.next().await {
        replying.on_event(index, event?);
    }
    replying.dialect.finish(replying.usage.total());
    Ok(Json(replying.dialect.whole()).into_response())
}

/// A reply in progress. When the client disconnects, the response's body and the events are
/// dropped, which cancels their requests.
struct Replying<D> {
    dialect: D,
    /// The parser of each choice's answer; `None` after the choice's end.
    parsers: Vec<Option<AnswerParser>>,
    begun: Vec<bool>,
    /// Number of tokens of each choice.
    tokens: Vec<usize>,
    /// Number of tokens before which stop strings are not looked for.
    min_tokens: usize,
    /// Whether each choice is in its reasoning; empty if the format has none.
    reasons: Vec<bool>,
    usage: UsageSum,
    /// [`ReplyOptions::unreported`].
    unreported: Vec<u32>,
}

impl<D: Dialect> Replying<D> {
    /// The events of a streamed reply, each in the form that `framed` gives it, and then the
    /// `terminator`.
    fn into_events<T>(
        self,
        events: Events,
        framed: fn(&D::Event) -> T,
        terminator: fn() -> Option<T>,
    ) -> impl Stream<Item = T> {
        let batches = stream::unfold(Some((self, events)), move |state| async move {
            let (mut replying, mut events) = state?;
            let all = |events: Vec<D::Event>| events.iter().map(framed).collect::<Vec<_>>();
            let (batch, goes_on) = match events.next().await {
                Some((index, Ok(event))) => (all(replying.on_event(index, event)), true),
                // The status line was sent long ago, so an error becomes an event.
                Some((_, Err(error))) => (all(vec![replying.dialect.fail(&error.into())]), false),
                None => {
                    let mut batch = all(replying.dialect.finish(replying.usage.total()));
                    batch.extend(terminator());
                    (batch, false)
                }
            };
            Some((stream::iter(batch), goes_on.then_some((replying, events))))
        });
        batches.flatten()
    }

    /// Counts a token that belongs to the reasoning of a choice. A token whose text is withheld
    /// counts as reasoning if the choice is in its reasoning.
    fn count_reasoning(&mut self, index: usize, id: Option<u32>, parts: &[AnswerPart]) {
        let Some(reasons) = self.reasons.get_mut(index) else { return };
        let is_reasoning = |part: &AnswerPart| matches!(part, AnswerPart::Reasoning(_));
        if let Some(last) = parts.last() {
            *reasons = is_reasoning(last);
        }
        let counts = *reasons || parts.iter().any(is_reasoning);
        *self.usage.reasoning.get_or_insert(0) += usize::from(counts && id.is_some());
    }

    fn on_event(&mut self, index: usize, event: Event) -> Vec<D::Event> {
        match event {
            // A preempted request starts a second time.
            Event::Started { prompt_tokens, cached_tokens } if !self.begun[index] => {
                self.begun[index] = true;
                let usage =
                    stolon::Usage { prompt_tokens, cached_tokens, ..stolon::Usage::default() };
                self.dialect.begin(index, self.usage.shown(usage))
            }
            Event::Token(TokenEvent { id, text, logprob }) => {
                self.tokens[index] += usize::from(id.is_some());
                let parts = match &mut self.parsers[index] {
                    // Stop strings are found where the engine finds them.
                    Some(parser) if self.tokens[index] < self.min_tokens => {
                        parser.push_before_stops(&text)
                    }
                    Some(parser) => parser.push(&text),
                    None => Vec::new(),
                };
                self.count_reasoning(index, id, &parts);
                let is_reported =
                    |entry: &&TokenLogprob| !self.unreported.contains(&entry.token_id);
                let logprob = logprob.as_ref().filter(is_reported);
                self.dialect.part(index, Piece { parts, id, logprob })
            }
            Event::PromptLogprobs(entries) => {
                self.dialect.prompt_logprobs(index, &entries);
                Vec::new()
            }
            Event::Finished(finish) => {
                self.usage.add(index, finish.usage);
                let rest = self.parsers[index].take().map(|mut parser| {
                    if finish.reason.is_cut() { parser.cut_off() } else { parser.finish() }
                });
                let rest = Piece { parts: rest.unwrap_or_default(), ..Piece::default() };
                let mut events = self.dialect.part(index, rest);
                self.dialect.timed(index, &finish.timings);
                events.extend(self.dialect.end(index, &finish.reason));
                events
            }
            _ => Vec::new(),
        }
    }
}

/// An event as JSON.
fn data<D: Dialect>(event: &D::Event) -> String {
    let data = serde_json::to_string(event);
    data.expect("replies have string keys and cannot fail to serialize")
}

fn line<D: Dialect>(event: &D::Event) -> String {
    data::<D>(event) + "\n"
}

fn sse_event<D: Dialect>(event: &D::Event) -> sse::Event {
    let data = data::<D>(event);
    let named = match D::name(event) {
        Some(name) => sse::Event::default().event(name),
        None => sse::Event::default(),
    };
    named.data(data)
}

/// Adds up the usage of all choices of a call. A prompt counts once, however many choices it has:
/// the usage of its first choice is taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UsageSum {
    choices_per_prompt: usize,
    hides_cached_tokens: bool,
    /// Whether the prompts have been counted already.
    prompts_counted: bool,
    /// Whether everything has been counted already.
    is_closed: bool,
    /// Number of tokens of reasoning; `None` if the format has none.
    reasoning: Option<usize>,
    sum: stolon::Usage,
}

impl UsageSum {
    pub(crate) fn new(choices_per_prompt: usize, hides_cached_tokens: bool) -> Self {
        let sum = stolon::Usage::default();
        let (prompts_counted, is_closed, reasoning) = (false, false, None);
        Self { choices_per_prompt, hides_cached_tokens, prompts_counted, is_closed, reasoning, sum }
    }

    /// Counts the prompts now instead of with their choices.
    pub(crate) fn with_prompts(mut self, prompts: &[stolon::Usage]) -> Self {
        prompts.iter().for_each(|&usage| self.add_prompt(usage));
        Self { prompts_counted: true, ..self }
    }

    /// The sum as it is: choices that are added later do not count.
    pub(crate) fn closed(self) -> Self {
        Self { is_closed: true, ..self }
    }

    /// Adds the choice with this index.
    fn add(&mut self, index: usize, mut usage: stolon::Usage) {
        if self.is_closed {
            return;
        }
        if !index.is_multiple_of(self.choices_per_prompt) {
            (usage.prompt_tokens, usage.cached_tokens) = (0, 0);
        }
        self.add_prompt(usage);
    }

    /// Adds a prompt together with all that was generated for it.
    pub(crate) fn add_prompt(&mut self, usage: stolon::Usage) {
        if !self.prompts_counted {
            self.sum.prompt_tokens += usage.prompt_tokens;
            self.sum.cached_tokens += usage.cached_tokens;
            self.sum.image_tokens += usage.image_tokens;
        }
        self.sum.completion_tokens += usage.completion_tokens;
    }

    pub(crate) fn total(self) -> Usage {
        self.shown(self.sum)
    }

    /// The usage in a reply, without the cached tokens if the operator hides them.
    fn shown(self, usage: stolon::Usage) -> Usage {
        let stolon::Usage { prompt_tokens, cached_tokens, image_tokens, completion_tokens } = usage;
        Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: (!self.hides_cached_tokens)
                .then_some(PromptTokensDetails { cached_tokens, image_tokens }),
            completion_tokens_details: self
                .reasoning
                .map(|reasoning_tokens| CompletionTokensDetails { reasoning_tokens }),
        }
    }
}
