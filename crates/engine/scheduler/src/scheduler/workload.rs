//! Publishes the requests, so that callers can estimate when another one would get its first token.

use std::collections::HashMap;
use std::sync::OnceLock;
use std::time::Instant;

use super::Scheduler;
use super::step::work_of;
use crate::memory::Memory;
use crate::permits::QueuePermit;
use crate::sequence::Sequence;
use crate::wait::{ARRIVALS_MAX, WAITING_MAX, WaitingWork, Work, Workload};

/// Number of arrivals from which their rate is known.
const ARRIVALS_MIN: usize = 8;

impl<M: Memory> Scheduler<M> {
    /// Remembers a request that has arrived.
    pub(super) fn note_arrival(&mut self, sequence: &Sequence, permit: &QueuePermit) {
        if self.arrived.len() == ARRIVALS_MAX {
            self.arrived.pop_front();
        }
        let cached = sequence.tokens.len().saturating_sub(permit.tokens());
        let work = self.work(sequence, cached, permit.tokens());
        self.arrived.push_back((sequence.times.submitted, work));
    }

    /// A request that has `pending` tokens to compute after `position`.
    fn work(&self, sequence: &Sequence, position: usize, pending: usize) -> Work {
        Work {
            position,
            pending: pending.max(1),
            decode: sequence.likely(self.forecast),
            class: sequence.options.priority,
            tenant: sequence.tenant,
        }
    }

    /// A running request as it is after the step in flight, which computes `in_step` of its tokens.
    fn work_after_step(&self, sequence: &Sequence, in_step: usize) -> Work {
        let position = (sequence.held.computed + in_step).min(sequence.tokens.len());
        let left = sequence.tokens.get(position..).unwrap_or_default();
        let encoding = match sequence.images.all().is_empty() {
            true => 0,
            false => self.context.encoding_cost(&sequence.namespace, left),
        };
        let mut work = self.work(sequence, position, left.len() + encoding);
        if left.is_empty() && in_step > 0 {
            // The step samples a token.
            work.decode = work.decode.saturating_sub(1).max(1);
        }
        work
    }

    /// Publishes the requests, for estimates.
    pub(super) fn publish_workload(&self, now: Instant) {
        let config = &self.context.config;
        let waiting = self.queue.entries();
        let slices = self.in_flight.iter().flatten();
        let in_step: HashMap<u64, usize> = slices.map(|slice| (slice.id, slice.count)).collect();
        let running = self.running.iter().filter(|running| !running.stalled).map(|running| {
            let in_step = in_step.get(&running.sequence.id).copied().unwrap_or(0);
            self.work_after_step(&running.sequence, in_step)
        });
        let step_left = self.in_flight.as_ref().map_or(0.0, |slices| {
            let since = now.saturating_duration_since(self.step_began).as_secs_f64();
            (self.cost.seconds(work_of(slices)) - since).max(0.0)
        });
        let later = waiting.iter().skip(WAITING_MAX).map(|waiting| waiting.cost()).sum();
        // The blocks of the pool may limit their number more than the slots do.
        let is_short = self.short_of_blocks && !waiting.is_empty();
        let slots = if is_short { self.running.len() } else { config.max_running };
        let first = self.arrived.front().map(|&(first, _)| now.saturating_duration_since(first));
        let arrivals = match first.filter(|_| self.arrived.len() >= ARRIVALS_MIN) {
            Some(time) => self.arrived.len() as f64 / time.as_secs_f64().max(1e-3),
            None => 0.0,
        };
        self.context.limits.set_workload(Workload {
            arrived: self.arrived.iter().map(|&(_, work)| work).collect(),
            arrivals,
            running: running.collect(),
            waiting: (waiting.iter().take(WAITING_MAX))
                .map(|waiting| WaitingWork {
                    work: self.work(&waiting.sequence, waiting.resume, waiting.cost()),
                    slack: waiting.slack(),
                    bound: waiting.bound,
                })
                .collect(),
            later_tokens: later,
            published: Some(now),
            step_left,
            slots: slots.max(1),
            max_overtake: config.max_overtake_tokens,
            limits: self.step_limits_if(false),
            limits_alone: self.step_limits_if(true),
            cost: self.cost,
            policy: **self.context.policy.load(),
            prefill_order: self.prefill_order(),
            starts: OnceLock::new(),
        });
    }
}
