//! [`Estimates`]: what the scheduler has learned about the speed of steps, the lengths of answers
//! and the arrival of requests. The sizes of steps follow from it, and the [`Workload`] from which
//! callers estimate when another request would get its first token.

use std::collections::{HashMap, VecDeque};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::admission::Admission;
use super::batch::{Batch, InFlight, Running, Step};
use crate::budget::DecodeForecast;
use crate::config::AdmissionPolicy;
use crate::context::EngineContext;
use crate::permits::QueuePermit;
use crate::queue::Waiting;
use crate::schedule::{PrefillOrder, StepLimits, TenantLimit};
use crate::sequence::Sequence;
use crate::step_cost::StepCost;
use crate::step_plan::RowResult;
use crate::tenant::{RecentTenants, TenantId};
use crate::wait::{ARRIVALS_MAX, WAITING_MAX, WaitingWork, Work, Workload};

/// Number of arrivals from which their rate is known.
const ARRIVALS_MIN: usize = 8;

/// While several tenants send requests, a step with prompts takes at most this part of the target
/// duration, because one of them may send a request during the step. But it has up to
/// [`SHARED_PREFILL`] tokens if these fit the whole target.
const SHARED_STEP_SHARE: u32 = 4;

/// See [`SHARED_STEP_SHARE`]. Steps with more prompt tokens compute hardly more of them per second.
const SHARED_PREFILL: usize = 128;

/// Duration of the decodes of one tenant in a step that another tenant waits for, as a multiple of
/// the time of one decode alone.
const DECODES_PER_TENANT: f64 = 2.0;

/// The estimates. See the module documentation.
#[derive(Debug)]
pub(super) struct Estimates {
    context: EngineContext,
    /// Predicts how many tokens requests will generate.
    answers: DecodeForecast,
    /// Throughput in computed tokens per second, smoothed; 0 before the first step.
    rate: f64,
    /// The model of the time that steps take.
    cost: StepCost,
    /// The tokens that sequences which decode get in the time of a step without proposals.
    decode_speed: DecodeSpeed,
    /// The tenants that had requests last.
    recent_tenants: RecentTenants,
    /// Whether several tenants had requests recently.
    several_tenants: bool,
    /// The last requests that arrived, with the time.
    arrived: VecDeque<(Instant, Work)>,
}

impl Estimates {
    pub(super) fn new(context: &EngineContext) -> Estimates {
        Estimates {
            context: context.clone(),
            answers: DecodeForecast::default(),
            rate: 0.0,
            cost: StepCost::default(),
            decode_speed: DecodeSpeed::default(),
            recent_tenants: RecentTenants::default(),
            several_tenants: false,
            arrived: VecDeque::new(),
        }
    }

    /// Predicts how many tokens requests will generate.
    pub(super) fn answers(&self) -> DecodeForecast {
        self.answers
    }

    /// A request has arrived.
    pub(super) fn note_arrival(&mut self, sequence: &Sequence, permit: &QueuePermit) {
        if self.arrived.len() == ARRIVALS_MAX {
            self.arrived.pop_front();
        }
        let cached = sequence.tokens.len().saturating_sub(permit.tokens());
        let work = self.work(sequence, cached, permit.tokens());
        self.arrived.push_back((sequence.times.submitted, work));
    }

    /// These tenants have requests now.
    pub(super) fn note_tenants(&mut self, tenants: impl Iterator<Item = TenantId>, now: Instant) {
        tenants.for_each(|tenant| self.recent_tenants.note(tenant, now));
        self.several_tenants = self.recent_tenants.are_several(now);
    }

    /// Learns from the answer of a complete request. An embedding has none, and neither has a prompt
    /// that was computed in the background.
    pub(super) fn note_answer(&mut self, sequence: &Sequence) {
        if sequence.options.pooling.is_none() && !sequence.is_background {
            self.answers.finished(sequence.answer_limit(), sequence.generated());
        }
    }

    /// Learns from a preemption that answers get longer than predicted.
    pub(super) fn note_preemption(&mut self) {
        self.answers.preempted();
    }

    /// Counts the tokens that a step has computed, and learns its speed. `time` is that of its forward
    /// pass.
    pub(super) fn note_step(&mut self, step: &Step, results: &[RowResult], time: Duration) {
        let slices = &step.slices;
        let computed = slices.iter().zip(results).filter(|(_, result)| !result.skipped);
        let kept = |(slice, result): (&InFlight, &RowResult)| {
            slice.count + result.sampled.len().saturating_sub(1)
        };
        let computed: usize = computed.map(kept).sum();
        if computed == 0 {
            return;
        }
        let prompts = slices.iter().filter(|slice| slice.count > 1).map(|slice| slice.count).sum();
        let gauges = &self.context.gauges;
        gauges.computed_tokens.add(computed);
        gauges.histograms.step_tokens.count(computed);
        gauges.note_prefill(prompts, computed, time);
        let seconds = time.as_secs_f64();
        if seconds > 0.0 {
            let rate = computed as f64 / seconds;
            self.rate = if self.rate == 0.0 { rate } else { 0.9 * self.rate + 0.1 * rate };
            self.context.limits.set_rate(self.rate);
        }
    }

    /// Whether several tenants had requests recently.
    pub(super) fn are_several_tenants(&self) -> bool {
        self.several_tenants
    }

    /// Learns from the step that ends now how long steps take, together with everything that happens
    /// between its plan and its results. Proposed tokens make a step longer, so it says nothing about
    /// the time that others need, but how many tokens come in that time. `drafting` is the part of it
    /// that a draft model has taken.
    pub(super) fn note_cost(
        &mut self,
        step: &Step,
        results: &[RowResult],
        drafting: Duration,
        now: Instant,
    ) {
        let time = now.saturating_duration_since(step.began);
        if step.slices.iter().all(|slice| slice.proposed == 0) && drafting.is_zero() {
            self.cost.note(step.work(), time);
            if step.slices.iter().any(|slice| slice.count == 1) {
                self.decode_speed.note(1.0, 1.0);
            }
            return;
        }
        let plain = self.cost.seconds(step.work());
        if plain > 0.0 {
            let sampled: usize = results.iter().map(|result| result.sampled.len()).sum();
            let tokens = sampled as f64 / results.len().max(1) as f64;
            self.decode_speed.note(tokens, time.as_secs_f64() / plain);
        }
    }

    /// The sizes of the next step. Its duration is limited at the recent speed unless it is for one
    /// request alone, and more so while several tenants send requests.
    pub(super) fn step_limits(&self, is_alone: bool) -> StepLimits {
        let config = &self.context.config;
        let positions = |time| self.context.gauges.prefill_positions(time).unwrap_or(usize::MAX);
        let (mut timed, mut tenant) = (usize::MAX, None);
        if let Some(target) = config.step_time_target {
            if self.several_tenants {
                let shared = positions(target / SHARED_STEP_SHARE).max(SHARED_PREFILL);
                timed = positions(target).min(shared);
            } else if !is_alone {
                timed = positions(target);
            }
            let (cost, seconds) = (self.cost, DECODES_PER_TENANT * self.cost.one_decode());
            tenant = Some(TenantLimit { cost, seconds });
        }
        StepLimits { tokens: config.max_batched_tokens, timed, tenant }
    }

    /// In which order prompts are computed.
    pub(super) fn prefill_order(&self) -> PrefillOrder {
        match **self.context.policy.load() {
            _ if self.context.config.max_overtake_tokens == 0 => PrefillOrder::Arrival,
            AdmissionPolicy::Fcfs => PrefillOrder::Priority,
            AdmissionPolicy::LongestPrefix | AdmissionPolicy::Cost => PrefillOrder::FewestLeft,
        }
    }

    /// A request that has `pending` tokens to compute after `position`.
    fn work(&self, sequence: &Sequence, position: usize, pending: usize) -> Work {
        Work {
            position,
            pending: pending.max(1),
            decode: self.decode_speed.steps(sequence.likely(self.answers)),
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

    fn waiting_work(&self, waiting: &Waiting) -> WaitingWork {
        let Waiting { sequence, place, resume, .. } = waiting;
        let work = self.work(sequence, *resume, waiting.cost());
        WaitingWork { work, place: *place }
    }

    /// Publishes the requests, for callers that estimate when another one would get its first token.
    pub(super) fn publish(&self, admission: &Admission, batch: &Batch, now: Instant) {
        let config = &self.context.config;
        let waiting = admission.queue().entries();
        let slices = batch.step().into_iter().flat_map(|step| &step.slices);
        let in_step: HashMap<u64, usize> = slices.map(|slice| (slice.id, slice.count)).collect();
        let running = batch.running().filter(|running| {
            // A prompt that is computed in the background ends before the request is admitted.
            !running.was_stalled() && !running.sequence.is_background
        });
        let running = running.map(|Running { sequence, .. }| {
            let in_step = in_step.get(&sequence.id).copied().unwrap_or(0);
            self.work_after_step(sequence, in_step)
        });
        let step_left = batch.step().map_or(0.0, |step| {
            let since = now.saturating_duration_since(step.began).as_secs_f64();
            (self.cost.seconds(step.work()) - since).max(0.0)
        });
        // The blocks of the pool may limit their number more than the slots do.
        let is_short = admission.is_short_of_blocks();
        let slots = if is_short { batch.len() } else { config.max_running };
        let first = self.arrived.front().map(|&(first, _)| now.saturating_duration_since(first));
        let arrivals = match first.filter(|_| self.arrived.len() >= ARRIVALS_MIN) {
            Some(time) => self.arrived.len() as f64 / time.as_secs_f64().max(1e-3),
            None => 0.0,
        };
        self.context.limits.set_workload(Workload {
            arrived: self.arrived.iter().map(|&(_, work)| work).collect(),
            arrivals,
            running: running.collect(),
            waiting: waiting.iter().take(WAITING_MAX).map(|w| self.waiting_work(w)).collect(),
            later_tokens: waiting.iter().skip(WAITING_MAX).map(Waiting::cost).sum(),
            published: Some(now),
            step_left,
            slots: slots.max(1),
            max_overtake: config.max_overtake_tokens,
            limits: self.step_limits(false),
            limits_alone: self.step_limits(true),
            cost: self.cost,
            policy: **self.context.policy.load(),
            prefill_order: self.prefill_order(),
            starts: OnceLock::new(),
        });
    }
}

/// How many tokens a sequence that decodes gets in the time of a step without proposals, measured:
/// 1 if none are proposed.
#[derive(Clone, Copy, Debug)]
struct DecodeSpeed {
    /// Tokens per sequence in the last steps.
    tokens: f64,
    /// The duration of these steps, each as a multiple of its duration without proposals.
    time: f64,
}

impl Default for DecodeSpeed {
    fn default() -> DecodeSpeed {
        DecodeSpeed { tokens: 1.0, time: 1.0 }
    }
}

impl DecodeSpeed {
    /// Weight of the earlier steps when another one is added: about a hundred steps count.
    const KEPT: f64 = 0.99;

    /// Limits on the time of a step, which other programs may have delayed, as multiples of its
    /// time without proposals.
    const TIMES: std::ops::RangeInclusive<f64> = 0.5..=4.0;

    /// Learns from a step with `tokens` tokens per sequence that took `time` times as long as one
    /// without proposals.
    fn note(&mut self, tokens: f64, time: f64) {
        self.tokens = DecodeSpeed::KEPT * self.tokens + tokens;
        self.time =
            DecodeSpeed::KEPT * self.time + time.clamp(*Self::TIMES.start(), *Self::TIMES.end());
    }

    /// The duration of `tokens` tokens as a number of steps without proposals, at least 1.
    fn steps(self, tokens: usize) -> usize {
        let steps = tokens as f64 * self.time / self.tokens.max(f64::MIN_POSITIVE);
        (steps.round() as usize).max(1)
    }
}
