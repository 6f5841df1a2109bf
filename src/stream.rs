//! The stream of one request's events. Detokenization and stop strings run in the reader's task.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use futures::Stream;
use stolon_actors::SequenceStream;
use stolon_scheduler::{
    Event, Finish, FinishReason, PrefixMark, SessionContent, Timings, TokenEvent, TokenSet, Turn,
    TurnEnd, Usage,
};
use stolon_text::{Answer, AnswerFormat, AnswerParser, AnswerPart, StopStrings};

use crate::cache_miss::Missed;
use crate::marks::Marking;
use crate::next_turn::NextTurn;
use crate::repetition::RepetitionDetector;
use crate::text::{Detokenizer, Recording};
use crate::{CacheMiss, Completion, Error};

/// The events of one request. Dropping the stream cancels the request.
///
/// If the reader stops reading, its request is paused. Other requests are not affected, and no
/// event is lost.
#[derive(Debug)]
pub struct TokenStream {
    /// `None` once the request has ended.
    sequence: Option<SequenceStream>,
    /// Events that were produced but not yet read.
    ready: VecDeque<Event>,
    answer: AnswerState,
    /// The turn of a session, if the request is one.
    turn: Option<TurnStream>,
}

/// The turn of a session whose answer a stream reads. It ends the turn if it ends or is dropped
/// before the engine has ended it.
#[derive(Debug)]
struct TurnStream {
    turn: Arc<Turn>,
    /// Prompt, and the answer up to the last token that was read.
    content: SessionContent,
}

impl Drop for TurnStream {
    fn drop(&mut self) {
        self.turn.abandon(Instant::now());
    }
}

/// Turns the events of the engine into those of the stream, and remembers what was read so far. The
/// streams of several answers to one prompt begin with clones of it.
#[derive(Clone, Debug)]
pub(crate) struct AnswerState {
    /// Turns token ids into text and looks for stop strings. `None` if there is no tokenizer, and
    /// when the answer has ended.
    pub(crate) text: Option<(Detokenizer, StopStrings)>,
    /// Finds the text of the answer, the only part that is searched for stop strings. `None` if the
    /// whole answer is text, or if there are no stop strings and the parts are not collected.
    pub(crate) parser: Option<AnswerParser>,
    /// The parts of the answer; `None` if the whole answer is text.
    pub(crate) format: Option<Arc<AnswerFormat>>,
    /// The parts that were read so far; `None` if they are not collected.
    pub(crate) parts: Option<Answer>,
    /// Records the answer for the next request of the conversation; `None` if it is not recorded.
    pub(crate) recording: Option<Recording>,
    /// The conversation, if its next turn is to be prepared after the answer.
    pub(crate) next_turn: Option<NextTurn>,
    /// Why a part of the prompt was not cached when the request was submitted.
    pub(crate) missed: Option<Missed>,
    /// The marked parts of the prompt; `None` if there are none, or if they were marked.
    pub(crate) marking: Option<Marking>,
    /// The stop strings as given, for the finish reason.
    pub(crate) stops: Arc<[String]>,
    pub(crate) eos_ids: TokenSet,
    pub(crate) stop_ids: TokenSet,
    /// The token after which the text begins, because reasoning comes before it; `None` if it has
    /// begun.
    pub(crate) text_after: Option<u32>,
    /// Number of tokens before which stop strings are not looked for.
    pub(crate) min_tokens: usize,
    /// `None` if the answer may repeat itself.
    pub(crate) repetition: Option<RepetitionDetector>,
    pub(crate) submitted: Instant,
    /// Usage and timings so far. If a stop string or a repetition ends the request, the final event
    /// is made from them, because the engine does not send one.
    pub(crate) usage: Usage,
    pub(crate) timings: Timings,
}

impl AnswerState {
    /// Collects the parts of the answer from here on, unless all of it is text.
    fn collect_parts(&mut self) {
        if let Some(format) = &self.format {
            self.parser.get_or_insert_with(|| AnswerParser::new(format.as_ref().clone()));
            self.parts = Some(Answer::default());
        }
    }

    /// Adds parts that the parser has found.
    fn add_parts(parts: &mut Option<Answer>, found: Vec<AnswerPart>) {
        if let Some(answer) = parts {
            found.into_iter().for_each(|part| answer.add(part));
        }
    }
}

impl TokenStream {
    /// `turn` is the turn of a session, with its prompt, if the request is one.
    pub(crate) fn new(
        sequence: SequenceStream,
        answer: AnswerState,
        turn: Option<(Arc<Turn>, SessionContent)>,
    ) -> TokenStream {
        let turn = turn.map(|(turn, content)| TurnStream { turn, content });
        TokenStream { sequence: Some(sequence), ready: VecDeque::new(), answer, turn }
    }

    /// Number of tokens of the prompt.
    pub fn prompt_tokens(&self) -> usize {
        self.answer.usage.prompt_tokens
    }

    /// Why a part of the prompt was not cached when the request was submitted; `None` if all was, or
    /// if the engine remembers nothing.
    pub fn cache_miss(&self) -> Option<&CacheMiss> {
        self.answer.missed.as_ref().map(|missed| &*missed.miss)
    }

    /// The parts of the prompt that its marks protect, in ascending order; none after they were
    /// protected, when the second token was read or the stream has ended.
    pub fn marks(&self) -> &[PrefixMark] {
        self.answer.marking.as_ref().map_or(&[], |marking| &*marking.marks)
    }

    /// Waits for the next event. Returns `None` after [`Event::Finished`] or an error.
    ///
    /// Cancel safe: no event is lost if the future is dropped before it completes.
    pub async fn next(&mut self) -> Option<Result<Event, Error>> {
        std::future::poll_fn(|context| Pin::new(&mut *self).poll_next(context)).await
    }

    /// Reads the stream to its end and returns the whole generation.
    ///
    /// # Errors
    /// The error that the stream ended with; `InvalidParameter` if [`next`](TokenStream::next) has
    /// already returned its last event.
    pub async fn collect_text(mut self) -> Result<Completion, Error> {
        self.answer.collect_parts();
        let mut text = String::new();
        let mut token_ids = Vec::new();
        let mut logprobs = Vec::new();
        let mut prompt_logprobs = Vec::new();
        while let Some(event) = self.next().await {
            match event? {
                Event::PromptLogprobs(entries) => prompt_logprobs = entries,
                Event::Token(token) => {
                    text.push_str(&token.text);
                    token_ids.extend(token.id);
                    logprobs.extend(token.logprob);
                }
                Event::Finished(finish) => {
                    let answer = match self.answer.parts.take() {
                        Some(parts) => parts,
                        None => Answer { text: text.clone(), ..Answer::default() },
                    };
                    return Ok(Completion {
                        text,
                        answer,
                        token_ids,
                        logprobs,
                        prompt_logprobs,
                        finish,
                    });
                }
                _ => {}
            }
        }
        Err(Error::invalid(
            "stream",
            "one whose end was not read yet",
            "one that was read to its end",
        ))
    }

    /// Processes one event of the engine: adds text to it and queues it for the reader.
    fn take(&mut self, event: Event) {
        let answer = &mut self.answer;
        match event {
            Event::Started { cached_tokens, .. } => {
                if let Some(missed) = &mut answer.missed {
                    missed.started(cached_tokens);
                }
                answer.usage.cached_tokens = cached_tokens;
                answer.timings.queue = answer.submitted.elapsed();
            }
            Event::Token(token) => return self.take_token(token),
            Event::Finished(finish) => return self.end(finish),
            _ => {}
        }
        self.ready.push_back(event);
    }

    fn take_token(&mut self, mut token: TokenEvent) {
        let answer = &mut self.answer;
        if answer.usage.completion_tokens == 0 {
            answer.timings.ttft = answer.submitted.elapsed();
        }
        if answer.usage.completion_tokens == 1 {
            // The engine has added the prompt to the cache after the first token.
            answer.marking.take().into_iter().for_each(Marking::mark);
        }
        answer.usage.completion_tokens += 1;
        let is_early = answer.usage.completion_tokens < answer.min_tokens;
        let mut matched = None;
        // A token that ends the generation, or that comes before the text, is not part of it.
        if let (Some(id), Some((detokenizer, stop_strings))) = (token.id, &mut answer.text)
            && !is_before_text(id, &mut answer.text_after)
            && !answer.eos_ids.contains(id)
            && !answer.stop_ids.contains(id)
        {
            let text = detokenizer.push(id);
            if let Some(parser) = &mut answer.parser {
                let found = match is_early {
                    true => parser.push_before_stops(&text),
                    false => parser.push(&text),
                };
                AnswerState::add_parts(&mut answer.parts, found);
                (token.text, matched) = (text, parser.matched());
            } else if is_early {
                token.text = text;
            } else {
                let scan = stop_strings.push(&text);
                (token.text, matched) = (scan.text, scan.matched);
            }
        }
        if let Some((recording, id)) = answer.recording.as_mut().zip(token.id)
            && !answer.eos_ids.contains(id)
            && !answer.stop_ids.contains(id)
        {
            recording.push_token(id);
            recording.push_text(&token.text);
        }
        let repeats =
            self.answer.repetition.as_mut().zip(token.id).is_some_and(|(it, id)| it.push(id));
        if let Some((turn, id)) = self.turn.as_mut().zip(token.id) {
            Arc::make_mut(&mut turn.content.tokens).push(id);
        }
        self.ready.push_back(Event::Token(token));
        if let Some(index) = matched {
            self.answer.text = None;
            let stop = self.answer.stops.get(index).cloned();
            self.end_early(FinishReason::StopString(stop.unwrap_or_default()));
        } else if repeats && !is_early {
            self.end_early(FinishReason::Repetition);
        }
    }

    /// Ends the request before the engine does, so that it computes no further tokens of it.
    fn end_early(&mut self, reason: FinishReason) {
        if let Some(turn) = self.turn.take() {
            let Usage { prompt_tokens, cached_tokens, .. } = self.answer.usage;
            let content = turn.content.clone();
            let end = TurnEnd { content, prompt_tokens, cached_tokens };
            // This comes before the engine learns that the request is complete.
            turn.turn.complete(end, Instant::now());
        }
        if let Some(sequence) = self.sequence.take() {
            sequence.complete();
        }
        let answer = &mut self.answer;
        answer.timings.total = answer.submitted.elapsed();
        let finish = Finish { reason, usage: answer.usage, timings: answer.timings };
        self.end(finish);
    }

    /// Ends the stream after the last token. Text that was withheld because it could have
    /// become a stop string is emitted first.
    fn end(&mut self, mut finish: Finish) {
        self.sequence = None;
        self.answer.marking.take().into_iter().for_each(Marking::mark);
        if let Some((detokenizer, mut stop_strings)) = self.answer.text.take() {
            let mut text = detokenizer.finish();
            let matched = match &mut self.answer.parser {
                Some(parser) => {
                    let mut found = parser.push(&text);
                    found.extend(match finish.reason.is_cut() {
                        true => parser.cut_off(),
                        false => parser.finish(),
                    });
                    AnswerState::add_parts(&mut self.answer.parts, found);
                    parser.matched()
                }
                None => {
                    let scan = stop_strings.push(&text);
                    text = scan.text;
                    if scan.matched.is_none() {
                        text.push_str(&stop_strings.finish());
                    }
                    scan.matched
                }
            };
            if let Some(stop) = matched.and_then(|index| self.answer.stops.get(index).cloned()) {
                finish.reason = FinishReason::StopString(stop);
            }
            if !text.is_empty() {
                self.answer.recording.iter_mut().for_each(|recording| recording.push_text(&text));
                self.ready.push_back(Event::Token(TokenEvent { text, ..TokenEvent::default() }));
            }
        }
        if let Some(recording) = self.answer.recording.take() {
            let said = recording.finish(&finish.reason);
            if let Some((next_turn, said)) = self.answer.next_turn.take().zip(said) {
                next_turn.begin(said);
            }
        }
        self.ready.push_back(Event::Finished(finish));
    }
}

/// Whether a token comes before the text, or is `text_after`, which is then taken.
fn is_before_text(id: u32, text_after: &mut Option<u32>) -> bool {
    let is_before = text_after.is_some();
    text_after.take_if(|last| *last == id);
    is_before
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
                    self.turn = None;
                    return Poll::Ready(Some(Err(error.into())));
                }
                None => self.sequence = None,
            }
        }
    }
}
