//! Turns the engine's events into a reply in the form of one API, whole or in pieces as server-sent
//! events. A whole reply is made by the same calls as a streamed one, so both have the same
//! content.

use std::convert::Infallible;

use axum::Json;
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::future::try_join_all;
use futures::stream::{self, BoxStream, SelectAll};
use futures::{Stream, StreamExt};
use serde::Serialize;
use stolon::{
    AnswerFormat, AnswerParser, AnswerPart, Completion, Error, Event, Finish, FinishReason,
    Request, Timings, TokenEvent, TokenLogprob, TokenStream,
};

use crate::App;
use crate::api::reply::{CompletionTokensDetails, PromptTokensDetails, Usage};
use crate::handlers::options::Call;
use crate::wire::error::ApiError;

/// The form of the replies of one API, and the reply in progress.
///
/// For each choice, [`Dialect::begin`] is called once, then [`Dialect::part`] any number of times,
/// then [`Dialect::end`] once; calls for different choices may alternate. [`Dialect::finish`]
/// follows when all choices have ended. Each call returns the events that it adds to a streamed
/// reply; [`Dialect::whole`] is the reply that the same calls make if it is not streamed.
pub(crate) trait Dialect: Send + Sized + 'static {
    /// The data of a server-sent event.
    type Event: Serialize + Send;
    /// A whole reply.
    type Whole: Serialize;

    /// The name of an event; `None` for APIs whose events have none.
    fn name(event: &Self::Event) -> Option<&'static str>;

    /// The data of the event after the last one, for a reply without an error.
    const TERMINATOR: Option<&'static str> = None;

    /// A choice begins. `usage` counts its prompt.
    fn begin(&mut self, choice: usize, usage: Usage) -> Vec<Self::Event>;

    /// The log-probabilities of the prompt of a choice, one entry per token. Called only for whole
    /// replies.
    fn prompt_logprobs(&mut self, _choice: usize, _entries: &[Option<TokenLogprob>]) {}

    /// A choice continues.
    fn part(&mut self, choice: usize, piece: Piece<'_>) -> Vec<Self::Event>;

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

/// The events of one call, each with the number of its choice.
type Events = SelectAll<BoxStream<'static, (usize, Result<Event, Error>)>>;

/// Runs the prompts of one call, each with as many choices as were requested, and replies. The
/// choices of prompt `p` have the indices `p * n` to `p * n + n - 1`. `usage` has the tokens that
/// were counted before, and `format` describes the parts of the answers.
pub(crate) async fn respond<D: Dialect>(
    app: &App,
    call: &mut Call,
    prompts: Vec<Request>,
    mut usage: UsageSum,
    format: AnswerFormat,
    dialect: D,
) -> Result<Response, ApiError> {
    let mut prompts = prompts;
    call.check_prompt_logprobs(&app.engine, &mut prompts, call.choice_count).await?;
    let rules = call.rules(&app.engine, &format).await?;
    let requests = prompts
        .into_iter()
        .map(|prompt| rules.apply(call.apply(prompt).answer_format(format.clone())));
    let mut choices = Vec::new();
    if let Some(candidates) = call.candidate_count {
        // All prompts are submitted before the first is awaited. An error cancels the others.
        let asked =
            requests.map(|request| app.engine.best_of(request, candidates, call.choice_count));
        for best in try_join_all(asked).await.map_err(|error| call.refused(error))? {
            usage.add_prompt(best.usage);
            choices.extend(best.completions.into_iter().map(replay));
        }
        usage = usage.closed();
    } else {
        for request in requests {
            // If a request is refused, the streams made so far are dropped, which cancels them.
            let streams = app.engine.generate_choices(request, call.choice_count).await;
            let streams = streams.map_err(|error| call.refused(error))?;
            choices.extend(streams.into_iter().map(TokenStream::boxed));
        }
    }
    // The prompts have been tokenized, and their images decoded.
    call.body = None;
    reply(call, choices, usage, &format, dialect).await
}

/// Replies with choices for which nothing is generated.
pub(crate) async fn respond_without_answers<D: Dialect>(
    call: &Call,
    choice_count: usize,
    usage: UsageSum,
    dialect: D,
) -> Result<Response, ApiError> {
    let finish = Finish {
        reason: FinishReason::Length,
        usage: stolon::Usage::default(),
        timings: Timings::default(),
    };
    let started = Event::Started { prompt_tokens: 0, cached_tokens: 0 };
    let events = [started, Event::Finished(finish)];
    let events = || stream::iter(events.clone()).map(Ok).boxed();
    let choices = (0..choice_count).map(|_| events()).collect();
    reply(call, choices, usage, &AnswerFormat::default(), dialect).await
}

/// A complete answer as the events of a stream.
fn replay(completion: Completion) -> BoxStream<'static, Result<Event, Error>> {
    let Completion { text, token_ids, logprobs, prompt_logprobs, finish, .. } = completion;
    let Finish { usage: stolon::Usage { prompt_tokens, cached_tokens, .. }, .. } = finish;
    let mut logprobs = logprobs.into_iter();
    let tokens: Vec<TokenEvent> = token_ids
        .into_iter()
        .map(|id| TokenEvent { id: Some(id), text: String::new(), logprob: logprobs.next() })
        .chain([TokenEvent { text, ..TokenEvent::default() }])
        .collect();
    let of_prompt = Some(prompt_logprobs).filter(|entries| !entries.is_empty());
    stream::iter([Event::Started { prompt_tokens, cached_tokens }])
        .chain(stream::iter(of_prompt).map(Event::PromptLogprobs))
        .chain(stream::iter(tokens).map(Event::Token))
        .chain(stream::iter([Event::Finished(finish)]))
        .map(Ok)
        .boxed()
}

async fn reply<D: Dialect>(
    call: &Call,
    choices: Vec<BoxStream<'static, Result<Event, Error>>>,
    usage: UsageSum,
    format: &AnswerFormat,
    dialect: D,
) -> Result<Response, ApiError> {
    // The engine has looked for stop strings in an answer that is text alone.
    let stops = call.stop_strings().filter(|_| !format.is_text());
    let parser = || match &stops {
        Some(stops) => AnswerParser::with_stops(format.clone(), stops.clone()),
        None => AnswerParser::new(format.clone()),
    };
    let parsers = choices.iter().map(|_| Some(parser())).collect();
    let (begun, tokens) = (vec![false; choices.len()], vec![0; choices.len()]);
    let min_tokens = call.min_tokens();
    let reasons = match format.reasoning {
        Some(_) => vec![format.reasoning_is_open; choices.len()],
        None => Vec::new(),
    };
    let numbered = choices
        .into_iter()
        .enumerate()
        .map(|(index, events)| events.map(move |event| (index, event)).boxed());
    let mut events: Events = stream::select_all(numbered);
    let unreported = call.unreported.clone();
    let mut replying =
        Replying { dialect, parsers, begun, tokens, min_tokens, reasons, usage, unreported };
    if call.stream {
        let events = replying.into_events(events).map(Ok::<_, Infallible>);
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
    /// [`Call::unreported`].
    unreported: Vec<u32>,
}

impl<D: Dialect> Replying<D> {
    /// The events of a streamed reply.
    fn into_events(self, events: Events) -> impl Stream<Item = sse::Event> {
        let batches = stream::unfold(Some((self, events)), |state| async move {
            let (mut replying, mut events) = state?;
            let sse_events =
                |events: Vec<D::Event>| events.iter().map(sse_event::<D>).collect::<Vec<_>>();
            let (batch, goes_on) = match events.next().await {
                Some((index, Ok(event))) => (sse_events(replying.on_event(index, event)), true),
                // The status line was sent long ago, so an error becomes an event.
                Some((_, Err(error))) => {
                    (sse_events(vec![replying.dialect.fail(&error.into())]), false)
                }
                None => {
                    let mut batch = sse_events(replying.dialect.finish(replying.usage.total()));
                    batch.extend(D::TERMINATOR.map(|text| sse::Event::default().data(text)));
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
                events.extend(self.dialect.end(index, &finish.reason));
                events
            }
            _ => Vec::new(),
        }
    }
}

fn sse_event<D: Dialect>(event: &D::Event) -> sse::Event {
    let data = serde_json::to_string(event);
    let data = data.expect("replies have string keys and cannot fail to serialise");
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
    fn closed(self) -> Self {
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
    fn add_prompt(&mut self, usage: stolon::Usage) {
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
