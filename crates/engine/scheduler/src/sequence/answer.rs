//! Turns the results of a step into the events of a request.

use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

use stolon_backend::{Pooler, Sampled, SamplingError, TokenLogprob};

use super::{Ending, Sequence, unusable_logits};
use crate::error::EngineError;
use crate::event::{Event, Finish, FinishReason, Timings, TokenEvent, Usage};
use crate::request_counts::Outcome;

impl Sequence {
    /// Collects the prompt log-probabilities of a chunk and sends them when the prompt is complete.
    pub(crate) fn gather_prompt_logprobs(&mut self, rows: Vec<TokenLogprob>) {
        let Some(wanted) = &mut self.prompt_logprobs else { return };
        if wanted.gathered.is_empty() {
            wanted.gathered.push(None);
        }
        wanted.gathered.extend(rows.into_iter().map(Some));
        if self.held.computed >= self.prompt_len {
            let gathered = mem::take(&mut wanted.gathered);
            self.prompt_logprobs = None;
            self.send(Event::PromptLogprobs(gathered));
        }
    }

    /// Takes the pooler back from a step, and sends the embedding if the prompt is complete.
    /// Returns a reason if the sequence is complete.
    pub(crate) fn pooled(&mut self, pooler: Pooler) -> Option<FinishReason> {
        if self.held.computed < self.prompt_len {
            self.pooler = Some(pooler);
            return None;
        }
        let values = pooler.finish();
        if let Some(&value) = values.iter().find(|value| !value.is_finite()) {
            self.end = Some(Ending::Failed(EngineError::InvalidEmbedding { value }));
            return None;
        }
        self.send(Event::Embedding(values));
        Some(FinishReason::Stop)
    }

    /// Appends the tokens that were sampled in a step: one, after those that were accepted of the
    /// proposed ones. `failure` is why there is none after them. Returns a reason if the sequence is
    /// complete.
    pub(crate) fn accept(
        &mut self,
        sampled: Vec<Sampled>,
        failure: Option<SamplingError>,
        now: Instant,
    ) -> Option<FinishReason> {
        self.record.gauges().accepted_tokens.add(sampled.len().saturating_sub(1));
        if let Some(drafts) = &mut self.drafts {
            let tokens: Vec<u32> = sampled.iter().map(|sampled| sampled.token).collect();
            let modeled = drafts.learn(&tokens);
            self.record.gauges().model_accepted_tokens.add(modeled);
        }
        let mut end = None;
        for Sampled { token, logprob } in sampled {
            debug_assert!(end.is_none(), "no token that ends an answer is proposed");
            self.reached_last();
            end = self.push(token, logprob, now);
        }
        if let Some(failure) = failure {
            self.end.get_or_insert(Ending::Failed(unusable_logits(&failure)));
        }
        end
    }

    /// The row of its last token was computed and is sampled from. If that token had been proposed,
    /// its position was computed by the same step.
    pub(crate) fn reached_last(&mut self) {
        let (computed, end) = (self.held.computed, self.tokens.len());
        if computed < end {
            self.held.stepped(computed, end);
        }
    }

    /// Appends and counts a sampled token. Returns a reason if the sequence is complete.
    pub(crate) fn push(
        &mut self,
        id: u32,
        logprob: Option<TokenLogprob>,
        now: Instant,
    ) -> Option<FinishReason> {
        Arc::make_mut(&mut self.tokens).push(id);
        let gauges = self.record.gauges();
        gauges.completion_tokens.add(1);
        match self.times.last_token.replace(now) {
            None => gauges.histograms.time_to_first_token.time(since(self.times.submitted, now)),
            Some(last) => gauges.histograms.inter_token.time(since(last, now)),
        }
        self.times.first_token.get_or_insert(now);
        self.send(Event::Token(TokenEvent { id: Some(id), text: String::new(), logprob }));
        if self.eos_ids.contains(id) {
            Some(FinishReason::Stop)
        } else if self.options.stop_ids.contains(id) {
            Some(FinishReason::StopToken(id))
        } else if self.remaining() == 0 {
            Some(FinishReason::Length)
        } else {
            None
        }
    }

    /// Sends an event. If the caller has dropped the stream, the sequence is canceled.
    pub(crate) fn send(&mut self, event: Event) {
        if !self.events.send(Ok(event)) && self.end.is_none() {
            self.end = Some(Ending::Canceled);
        }
    }

    /// Counts the end of a sequence, and records its times and sizes, whatever its outcome: the
    /// sums over all requests are then those of the counters of tokens.
    pub(crate) fn ended(&mut self, outcome: Outcome, now: Instant) {
        self.record.end(outcome);
        if self.is_background {
            return;
        }
        let histograms = &self.record.gauges().histograms;
        histograms.end_to_end.time(since(self.times.submitted, now));
        // The tokens of a request count from its start.
        let Some(started) = self.times.started else { return };
        histograms.prompt_tokens.count(self.prompt_len);
        histograms.generation_tokens.count(self.generated());
        histograms.queue_time.time(since(self.times.submitted, started));
        let (Some(first), Some(last)) = (self.times.first_token, self.times.last_token) else {
            return;
        };
        histograms.prefill_time.time(since(started, first));
        histograms.decode_time.time(since(first, last));
        let intervals = u32::try_from(self.generated().saturating_sub(1)).unwrap_or(u32::MAX);
        if intervals > 0 {
            histograms.time_per_output_token.time(since(first, last) / intervals);
        }
    }

    /// The last event of a complete sequence.
    pub(crate) fn finish_event(&self, reason: FinishReason, now: Instant) -> Event {
        let since = |moment: Option<Instant>| {
            moment.unwrap_or(now).saturating_duration_since(self.times.submitted)
        };
        Event::Finished(Finish {
            reason,
            usage: Usage {
                prompt_tokens: self.prompt_len,
                cached_tokens: self.cached_tokens.unwrap_or(0),
                image_tokens: self.images.positions(),
                completion_tokens: self.generated(),
            },
            timings: Timings {
                queue: since(self.times.started),
                ttft: since(self.times.first_token),
                total: since(Some(now)),
            },
        })
    }
}

fn since(earlier: Instant, later: Instant) -> Duration {
    later.saturating_duration_since(earlier)
}
