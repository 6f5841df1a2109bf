//! How long a request waits: [`Workload`] is what the scheduler publishes of its requests after each
//! step, and predicts from it when another request would get its first token.
//!
//! The prediction runs the requests ahead in time, as the scheduler would: waiting requests take the
//! slots of those that end, prompts are computed in the shares of [`crate::schedule`], and running
//! requests generate a token per step. It jumps from one end of a prompt or an answer to the next
//! instead of going step by step, with the speeds of recent steps and the expected lengths of
//! answers. Requests are expected to arrive as they did recently, and may overtake.

use std::sync::OnceLock;
use std::time::Duration;

use crate::config::AdmissionPolicy;
use crate::policy::{self, Candidate};
use crate::schedule::{REORDERED_SHARE, TIMED_PREFILL_MIN};
use crate::tenant::{SlotShares, TenantId};

/// Maximum number of waiting requests that are published one by one, which bounds the time of a
/// prediction. Of later ones only the tokens count.
pub(crate) const WAITING_MAX: usize = 256;
/// Number of arrivals that are remembered.
pub(crate) const ARRIVALS_MAX: usize = 64;
/// Maximum number of ends and arrivals of a prediction.
const ROUNDS_MAX: usize = 200;

/// A request that runs or waits, as far as its duration is concerned.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    /// Number of tokens to compute before the next one can be sampled; 0 while it only generates.
    pub(crate) prefill: f64,
    /// Number of tokens that it is expected to generate still.
    pub(crate) decode: f64,
    pub(crate) tenant: TenantId,
}

/// A request that waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitingWork {
    pub(crate) work: Work,
    /// Total cost of later requests that may still be admitted before it, in tokens.
    pub(crate) slack: usize,
    /// The initial value of `slack`.
    pub(crate) bound: usize,
}

/// How fast the engine is.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Speeds {
    /// Positions per second of steps that compute prompts; 0 before the first one.
    pub(crate) prefill: f64,
    /// Duration in seconds of a step that only generates tokens; 0 before the first one.
    pub(crate) decode_step: f64,
}

/// The requests of an engine at one moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct Workload {
    /// In order of arrival.
    pub(crate) running: Vec<Work>,
    /// In order of arrival, at most [`WAITING_MAX`].
    pub(crate) waiting: Vec<WaitingWork>,
    /// Number of tokens to compute of the further waiting requests.
    pub(crate) later_tokens: usize,
    /// The last requests that arrived, as they were then.
    pub(crate) arrived: Vec<Work>,
    /// Number of requests that arrived per second recently.
    pub(crate) arrivals: f64,
    /// Number of requests that can run at a time.
    pub(crate) slots: usize,
    /// What is added to the waiting tokens as the bound of a new request on overtaking.
    pub(crate) max_overtake: usize,
    /// Maximum number of tokens of a step.
    pub(crate) step_tokens: usize,
    /// Aim for the duration of a step in seconds, while others wait or decode.
    pub(crate) step_target: f64,
    pub(crate) speeds: Speeds,
    pub(crate) policy: AdmissionPolicy,
    /// When each of the waiting requests starts, in seconds from now, once it was asked for.
    pub(crate) starts: OnceLock<Vec<f64>>,
}

/// A request that may arrive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    /// Number of its prompt tokens that are not cached, at least 1.
    pub(crate) uncached: usize,
    pub(crate) tenant: TenantId,
}

/// The state of a prediction.
struct Ahead<'a> {
    load: &'a Workload,
    /// The requests that run, and whether each is the new one.
    running: Vec<(Work, bool)>,
    /// The requests that wait, in order of arrival.
    waiting: Vec<(WaitingWork, bool)>,
    /// Number of seconds from now.
    time: f64,
    /// Number of requests that have arrived since.
    arrived: usize,
    /// When requests have started since, and their tenants.
    started: Vec<(f64, TenantId)>,
}

impl Workload {
    /// The time until the first token of a request that arrives now, and the part of it that the
    /// request waits for others. `None` before any speed is known.
    pub(crate) fn first_token(&self, arrival: Arrival) -> Option<(Duration, Duration)> {
        if self.speeds.prefill <= 0.0 {
            return None;
        }
        let Arrival { uncached, tenant } = arrival;
        let alone = uncached.max(1) as f64 / self.speeds.prefill;
        let mut ahead = Ahead::new(self);
        // It takes part in steps after the one in flight, of which half is left on average.
        let step = if self.running.is_empty() { 0.0 } else { ahead.step().0 };
        ahead.arrive(Work { prefill: uncached.max(1) as f64, decode: 1.0, tenant }, true);
        let is_done = |(work, is_new): &(Work, bool)| *is_new && work.prefill == 0.0;
        if !ahead.run(|ahead| ahead.running.iter().any(is_done)) {
            ahead.time += ahead.time_of_start(tenant) + alone;
        }
        let later = self.later_tokens as f64 / self.speeds.prefill;
        let total = (ahead.time + later).max(alone).max(step) + step / 2.0;
        Some((duration(total), duration(total - alone)))
    }

    /// The time until `count` of the waiting requests have started, at least 1. `None` before any
    /// speed is known. Each workload is run ahead once, so that refusing a flood takes no time.
    pub(crate) fn starts(&self, count: usize) -> Option<Duration> {
        if self.speeds.prefill <= 0.0 {
            return None;
        }
        let starts = self.starts.get_or_init(|| {
            let mut ahead = Ahead::new(self);
            ahead.run(|ahead| ahead.started.len() >= self.waiting.len());
            ahead.started.iter().map(|&(time, _)| time).collect()
        });
        let last = starts.last().copied().unwrap_or_default();
        let later = last * count as f64 / starts.len().max(1) as f64;
        Some(duration(starts.get(count - 1).copied().unwrap_or(later)))
    }
}

impl Ahead<'_> {
    fn new(load: &Workload) -> Ahead<'_> {
        let running = load.running.iter().map(|&work| (work, false)).collect();
        let waiting = load.waiting.iter().map(|&waiting| (waiting, false)).collect();
        Ahead { load, running, waiting, time: 0.0, arrived: 0, started: Vec::new() }
    }

    /// Goes ahead in time until `is_done`. Returns false if that takes too many rounds.
    fn run(&mut self, is_done: impl Fn(&Self) -> bool) -> bool {
        // Each round ends a prompt or an answer, or is an arrival.
        for _ in 0..ROUNDS_MAX {
            self.admit();
            if is_done(self) {
                return true;
            }
            let progress = self.progress();
            let left = |work: &Work| if work.prefill > 0.0 { work.prefill } else { work.decode };
            let ends =
                self.running.iter().zip(&progress).map(|((work, _), rate)| left(work) / rate);
            let Some(end) = ends.reduce(f64::min).filter(|end| end.is_finite()) else {
                return true;
            };
            let jump = end.min(self.until_arrival());
            self.time += jump;
            for ((work, _), rate) in self.running.iter_mut().zip(progress) {
                let left = if work.prefill > 0.0 { &mut work.prefill } else { &mut work.decode };
                // The one that ends may be left with a rounding error.
                let rest = *left - rate * jump;
                *left = if rest < 1e-6 { 0.0 } else { rest };
            }
            if is_done(self) {
                return true;
            }
            if jump < end {
                let arrived = &self.load.arrived;
                let next = arrived[self.arrived % arrived.len()];
                self.arrived += 1;
                self.arrive(next, false);
            }
            self.running.retain(|(work, _)| work.prefill > 0.0 || work.decode > 0.0);
        }
        false
    }

    /// The time until the new request of this tenant starts, at the rate at which requests of the
    /// tenant have started so far.
    fn time_of_start(&self, tenant: TenantId) -> f64 {
        let new = self.waiting.iter().position(|(_, is_new)| *is_new).unwrap_or(0);
        let Some((own, _)) = self.waiting.get(new) else { return 0.0 };
        let is_ahead = |(index, (other, _)): &(usize, &(WaitingWork, bool))| {
            let comes_first = match self.load.policy {
                AdmissionPolicy::Cost => other.work.prefill <= own.work.prefill,
                AdmissionPolicy::Fcfs | AdmissionPolicy::LongestPrefix => *index < new,
            };
            other.work.tenant == tenant && comes_first
        };
        let ahead = self.waiting.iter().enumerate().filter(is_ahead).count();
        let started = self.started.iter().filter(|(_, other)| *other == tenant).count();
        self.time * ahead as f64 / started.max(1) as f64
    }

    /// The seconds until the next request arrives: they are expected to be like the last ones.
    fn until_arrival(&self) -> f64 {
        match self.load.arrivals > 0.0 && !self.load.arrived.is_empty() {
            true => ((self.arrived + 1) as f64 / self.load.arrivals - self.time).max(0.0),
            false => f64::INFINITY,
        }
    }

    fn arrive(&mut self, work: Work, is_new: bool) {
        let cost = |(waiting, _): &(WaitingWork, bool)| waiting.work.prefill as usize;
        let bound = match self.load.max_overtake {
            0 => 0,
            more => self.waiting.iter().map(cost).sum::<usize>().saturating_add(more),
        };
        self.waiting.push((WaitingWork { work, slack: bound, bound }, is_new));
    }

    /// Starts waiting requests as the scheduler does: while there are slots, and in place of others
    /// if their tenants have less than their share.
    fn admit(&mut self) {
        let Workload { slots, policy, .. } = *self.load;
        while !self.waiting.is_empty() {
            let is_full = self.running.len() >= slots;
            let running = self.running.iter().map(|(work, _)| work.tenant);
            let waiting = self.waiting.iter().map(|(waiting, _)| waiting.work.tenant);
            let shares = SlotShares::new(slots, running, waiting);
            let above = |(work, _): &(Work, bool)| shares.is_exceeded(work.tenant);
            let youngest = self.running.iter().rposition(above);
            if is_full && youngest.is_none() {
                return;
            }
            let candidates: Vec<Candidate> = (self.waiting.iter().enumerate())
                .map(|(index, (waiting, _))| candidate(index, waiting, &shares))
                .collect();
            let Some(&next) = policy::order(policy, &candidates, 1).first() else { return };
            if is_full && candidates[next].has_share {
                return;
            }
            let (started, is_new) = self.waiting.remove(next);
            for ((waiting, _), candidate) in self.waiting[..next].iter_mut().zip(&candidates) {
                if candidate.binds(&candidates[next]) {
                    waiting.slack = waiting.slack.saturating_sub(candidates[next].cost());
                }
            }
            if let Some(youngest) = youngest.filter(|_| is_full) {
                let (work, is_new) = self.running.remove(youngest);
                self.waiting.insert(0, (WaitingWork { work, slack: 0, bound: 0 }, is_new));
            }
            self.started.push((self.time, started.work.tenant));
            self.running.push((started.work, is_new));
        }
    }

    /// The seconds that a step takes now, and the number of its prompt tokens.
    fn step(&self) -> (f64, f64) {
        let Workload { speeds, step_tokens, step_target, .. } = self.load;
        let prompts = self.running.iter().filter(|(work, _)| work.prefill > 0.0);
        let answers = self.running.len() - prompts.clone().count();
        let left: f64 = prompts.map(|(work, _)| work.prefill).sum();
        let is_alone = self.running.len() <= 1 && self.waiting.is_empty();
        let timed = match is_alone || *step_target <= 0.0 {
            true => f64::INFINITY,
            false => (speeds.prefill * step_target).max(TIMED_PREFILL_MIN as f64),
        };
        let room = step_tokens.saturating_sub(answers).max(step_tokens / 4) as f64;
        let chunk = room.min(timed).min(left);
        // A step with a prompt takes at least as long as one that only generates.
        let least = speeds.decode_step.max(1.0 / speeds.prefill);
        let step = if left > 0.0 { (chunk + answers as f64) / speeds.prefill } else { 0.0 };
        (step.max(least), chunk)
    }

    /// The tokens per second of each running request, of its prompt or of its answer.
    fn progress(&self) -> Vec<f64> {
        let (step, chunk) = self.step();
        let prompts =
            || self.running.iter().enumerate().filter(|(_, (work, _))| work.prefill > 0.0);
        let mut progress = vec![1.0 / step; self.running.len()];
        // Of each tenant: its first prompt, and the one that gets what is not given in order.
        let mut tenants: Vec<(TenantId, usize, usize)> = Vec::new();
        for (index, (work, _)) in prompts() {
            progress[index] = 0.0;
            match tenants.iter_mut().find(|(tenant, ..)| *tenant == work.tenant) {
                None => tenants.push((work.tenant, index, index)),
                Some((.., least)) => {
                    let is_less = work.prefill < self.running[*least].0.prefill;
                    if self.load.policy != AdmissionPolicy::Fcfs && is_less {
                        *least = index;
                    }
                }
            }
        }
        let each = chunk / step / tenants.len().max(1) as f64;
        let reordered = each / REORDERED_SHARE as f64;
        for (_, first, least) in tenants {
            progress[first] += each - reordered;
            progress[least] += reordered;
        }
        progress
    }
}

/// What the policy needs to know about a waiting request.
fn candidate(index: usize, waiting: &WaitingWork, shares: &SlotShares) -> Candidate {
    Candidate {
        arrival: index as u64,
        class: 0,
        has_share: shares.is_reached(waiting.work.tenant),
        tokens: (waiting.work.prefill as usize).max(1),
        matched: 0,
        prefix_sharers: 1,
        slack: waiting.slack,
        bound: waiting.bound,
        quota: None,
        held: false,
        ready: true,
        stalled: false,
    }
}

fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)
}
