//! The owned stream of one request's events: token ids in, text out, in the reader's own task.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use futures::Stream;
use stolon_actors::{SequenceEnd, SequenceEvent, SequenceFinish, SequenceStream};
use stolon_model::{Detokenizer, StopStrings};

use crate::{Completion, Error, Event, Finish, FinishReason, Timings, TokenEvent, Usage};

/// A running request's events. Owned and `'static`; dropping it cancels the request.
///
/// A reader that stops reading pauses its own request and nobody else's; no event is lost.
#[derive(Debug)]
pub struct TokenStream {
    /// `None` once the request has ended.
    sequence: Option<SequenceStream>,
    /// Made but not yet read.
    ready: VecDeque<Event>,
    text: Option<TextState>,
    eos_token_ids: Vec<u32>,
    stop_ids: Vec<u32>,
    progress: Progress,
}

/// How tokens become text.
#[derive(Debug)]
struct TextState {
    detokenizer: Detokenizer,
    stop_strings: StopStrings,
    /// As given, for the finish reason.
    stops: Vec<String>,
}

/// What is needed to tell the end of a request that a stop string ended.
#[derive(Debug)]
struct Progress {
    usage: Usage,
    submitted: Instant,
    timings: Timings,
}

/// What a stream is made from, besides the core's own stream.
#[derive(Clone, Debug)]
pub(crate) struct StreamParts {
    pub(crate) detokenizer: Option<Detokenizer>,
    pub(crate) stops: Vec<String>,
    pub(crate) stop_strings: StopStrings,
    pub(crate) eos_token_ids: Vec<u32>,
    pub(crate) stop_ids: Vec<u32>,
    pub(crate) prompt_tokens: usize,
    pub(crate) submitted: Instant,
}

impl TokenStream {
    pub(crate) fn new(sequence: SequenceStream, parts: StreamParts) -> TokenStream {
        let StreamParts { detokenizer, stops, stop_strings, .. } = parts;
        TokenStream {
            sequence: Some(sequence),
            ready: VecDeque::new(),
            text: detokenizer.map(|detokenizer| TextState { detokenizer, stop_strings, stops }),
            eos_token_ids: parts.eos_token_ids,
            stop_ids: parts.stop_ids,
            progress: Progress {
                usage: Usage { prompt_tokens: parts.prompt_tokens, ..Usage::default() },
                submitted: parts.submitted,
                timings: Timings::default(),
            },
        }
    }

    /// Tokens of the prompt, after rendering and tokenising.
    pub fn prompt_tokens(&self) -> usize {
        self.progress.usage.prompt_tokens
    }

    /// The next event; `None` after the end.
    pub async fn next(&mut self) -> Option<Result<Event, Error>> {
        std::future::poll_fn(|context| Pin::new(&mut *self).poll_next(context)).await
    }

    /// Reads the stream to its end.
    ///
    /// # Errors
    /// The error the stream ended with.
    pub async fn collect_text(mut self) -> Result<Completion, Error> {
        let mut text = String::new();
        let mut token_ids = Vec::new();
        let mut logprobs = Vec::new();
        let mut prompt_logprobs = Vec::new();
        while let Some(event) = self.next().await {
            match event? {
                Event::Started { .. } => {}
                Event::PromptLogprobs(told) => prompt_logprobs = told,
                Event::Token(token) => {
                    text.push_str(&token.text);
                    token_ids.extend(token.id);
                    logprobs.extend(token.logprob);
                }
                Event::Finished(finish) => {
                    return Ok(Completion { text, token_ids, logprobs, prompt_logprobs, finish });
                }
            }
        }
        // A stream that was read to its end before has nothing left to collect.
        Err(Error::EngineStopped)
    }

    /// Turns one event of the core into events for the reader.
    fn take(&mut self, event: SequenceEvent) {
        match event {
            SequenceEvent::Started { cached_tokens } => {
                self.progress.usage.cached_tokens = cached_tokens;
                self.progress.timings.queue = self.progress.submitted.elapsed();
                let prompt_tokens = self.progress.usage.prompt_tokens;
                self.ready.push_back(Event::Started { prompt_tokens, cached_tokens });
            }
            SequenceEvent::PromptLogprobs(told) => {
                self.ready.push_back(Event::PromptLogprobs(told));
            }
            SequenceEvent::Token { id, logprob } => {
                if self.progress.usage.completion_tokens == 0 {
                    self.progress.timings.ttft = self.progress.submitted.elapsed();
                }
                self.progress.usage.completion_tokens += 1;
                // A token that ends the generation is no part of its text.
                let ends = self.eos_token_ids.contains(&id) || self.stop_ids.contains(&id);
                let (text, matched) = match &mut self.text {
                    Some(state) if !ends => {
                        let piece = state.detokenizer.push(id);
                        let scan = state.stop_strings.push(&piece);
                        (scan.text, scan.matched)
                    }
                    _ => (String::new(), None),
                };
                self.ready.push_back(Event::Token(TokenEvent { id: Some(id), text, logprob }));
                if let Some(index) = matched {
                    self.end_at_stop_string(index);
                }
            }
            SequenceEvent::Finished(finish) => self.end(&finish),
        }
    }

    /// A stop string is complete: the rest of the sequence is not wanted.
    fn end_at_stop_string(&mut self, index: usize) {
        self.sequence = None;
        let stop = self.text.take().and_then(|state| state.stops.into_iter().nth(index));
        self.progress.timings.total = self.progress.submitted.elapsed();
        self.ready.push_back(Event::Finished(Finish {
            reason: FinishReason::StopString(stop.unwrap_or_default()),
            usage: self.progress.usage,
            timings: self.progress.timings,
        }));
    }

    /// The core is done: what was held back comes out, then the end.
    fn end(&mut self, finish: &SequenceFinish) {
        self.sequence = None;
        let mut reason = match finish.end {
            SequenceEnd::StopId(id) if self.eos_token_ids.contains(&id) => FinishReason::Stop,
            SequenceEnd::StopId(id) => FinishReason::StopToken(id),
            SequenceEnd::Length => FinishReason::Length,
        };
        if let Some(TextState { detokenizer, mut stop_strings, stops }) = self.text.take() {
            let scan = stop_strings.push(&detokenizer.finish());
            let mut text = scan.text;
            match scan.matched.and_then(|index| stops.into_iter().nth(index)) {
                Some(stop) => reason = FinishReason::StopString(stop),
                None => text.push_str(&stop_strings.finish()),
            }
            if !text.is_empty() {
                let last = TokenEvent { id: None, text, logprob: None };
                self.ready.push_back(Event::Token(last));
            }
        }
        self.ready.push_back(Event::Finished(Finish {
            reason,
            usage: Usage {
                prompt_tokens: finish.prompt_tokens,
                cached_tokens: finish.cached_tokens,
                completion_tokens: finish.completion_tokens,
            },
            timings: Timings { queue: finish.queue, ttft: finish.ttft, total: finish.total },
        }));
    }
}

impl Stream for TokenStream {
    type Item = Result<Event, Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(event)));
            }
            let Some(sequence) = &mut self.sequence else { return Poll::Ready(None) };
            match ready!(Pin::new(sequence).poll_next(context)) {
                Some(Ok(event)) => self.take(event),
                Some(Err(error)) => {
                    self.sequence = None;
                    return Poll::Ready(Some(Err(error.into())));
                }
                None => self.sequence = None,
            }
        }
    }
}
