//! What is published of the requests, for estimates of when another one would get its first token.

use std::time::Instant;

use super::Scheduler;
use crate::memory::Memory;
use crate::permits::QueuePermit;
use crate::sequence::Sequence;
use crate::wait::{ARRIVALS_MAX, Speeds, WAITING_MAX, WaitingWork, Work, Workload};

/// Number of arrivals from which their rate is known.
const ARRIVALS_MIN: usize = 8;

impl<M: Memory> Scheduler<M> {
    /// Remembers a request that has arrived.
    pub(super) fn note_arrival(&mut self, sequence: &Sequence, permit: &QueuePermit) {
        if self.arrived.len() == ARRIVALS_MAX {
            self.arrived.pop_front();
        }
        let work = self.work(sequence, permit.tokens());
        self.arrived.push_back((sequence.times.submitted, work));
    }

    /// A request that has `prefill` tokens to compute.
    fn work(&self, sequence: &Sequence, prefill: usize) -> Work {
        Work {
            prefill: prefill as f64,
            decode: sequence.expected(self.forecast) as f64,
            tenant: sequence.tenant,
        }
    }

    /// Publishes the requests, for estimates.
    pub(super) fn publish_workload(&self, now: Instant) {
        let config = &self.context.config;
        let waiting = self.queue.entries();
        let running = self.running.iter().filter(|running| !running.stalled).map(|running| {
            let sequence = &running.sequence;
            match sequence.tokens.get(sequence.held.computed..).unwrap_or_default() {
                [] | [_] => self.work(sequence, 0),
                left if sequence.images.all().is_empty() => self.work(sequence, left.len()),
                left => {
                    let encoding = self.context.encoding_cost(&sequence.namespace, left);
                    self.work(sequence, left.len() + encoding)
                }
            }
        });
        let later = waiting.iter().skip(WAITING_MAX).map(|waiting| waiting.cost()).sum();
        let prefill = self.context.gauges.prefill_rate.get() as f64;
        // If requests wait although slots are free, the blocks of the pool limit their number.
        let slots = if waiting.is_empty() { config.max_running } else { self.running.len() };
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
                    work: self.work(&waiting.sequence, waiting.cost()),
                    slack: waiting.slack(),
                    bound: waiting.bound,
                })
                .collect(),
            later_tokens: later,
            slots: slots.max(1),
            max_overtake: config.max_overtake_tokens,
            step_tokens: config.max_batched_tokens,
            step_target: config.step_time_target.map_or(0.0, |target| target.as_secs_f64()),
            speeds: Speeds {
                prefill: if prefill > 0.0 { prefill } else { self.rate },
                decode_step: self.decode_step,
            },
            policy: **self.context.policy.load(),
            ..Workload::default()
        });
    }
}
