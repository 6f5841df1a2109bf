//! How long a request waits: [`Workload`] describes the requests of the scheduler, which publishes
//! it after each step. It predicts when another request would get its first token.
//!
//! The prediction runs the requests ahead in time with the scheduler's own rules: `policy.rs` and
//! `tenant.rs` say which waiting request starts, `schedule.rs` what a step computes, and
//! `step_cost.rs` how long that takes. Equal steps are not repeated one by one: the prediction jumps
//! to the step in which a prompt or an answer ends, or after which a request arrives. Answers have
//! their expected lengths, and requests are expected to arrive as they did recently, and may
//! overtake.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use stolon_backend::LogitRows;

use crate::config::AdmissionPolicy;
use crate::policy::{self, Candidate, Place};
use crate::schedule::{self, PrefillOrder, SequenceView, Slice, StepLimits};
use crate::step_cost::{StepCost, StepWork};
use crate::tenant::{SlotShares, TenantId};

/// Maximum number of waiting requests that are published one by one, which bounds the time of a
/// prediction. For later requests only the tokens count.
pub(crate) const WAITING_MAX: usize = 256;
/// Number of arrivals that are remembered.
pub(crate) const ARRIVALS_MAX: usize = 64;
/// Maximum number of jumps of a prediction, and of arrivals.
const ROUNDS_MAX: usize = 200;

/// A request that runs or waits, as far as its duration is concerned.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Work {
    /// Number of its tokens that are computed or cached.
    pub(crate) position: usize,
    /// Number of tokens to compute before the next one can be sampled; at least 1.
    pub(crate) pending: usize,
    /// The work of the tokens that it is still expected to generate, as a number of steps without
    /// proposed tokens; at least 1.
    pub(crate) decode: usize,
    /// The request's priority. Larger values come first.
    pub(crate) class: i32,
    pub(crate) tenant: TenantId,
}

/// A request that waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitingWork {
    pub(crate) work: Work,
    pub(crate) place: Place,
}

/// The requests of an engine at one moment.
#[derive(Clone, Debug)]
pub(crate) struct Workload {
    /// As they are when the step in flight has ended, in order of admission.
    pub(crate) running: Vec<Work>,
    /// In order of arrival, at most [`WAITING_MAX`].
    pub(crate) waiting: Vec<WaitingWork>,
    /// Number of tokens to compute of the further waiting requests.
    pub(crate) later_tokens: usize,
    /// The last requests that arrived, with their work at that time.
    pub(crate) arrived: Vec<Work>,
    /// Number of requests that arrived per second recently.
    pub(crate) arrivals: f64,
    /// When this was published; `None` if it was not.
    pub(crate) published: Option<Instant>,
    /// Number of seconds from then until the step in flight is expected to end; 0 if none is.
    pub(crate) step_left: f64,
    /// Number of requests that can run at a time.
    pub(crate) slots: usize,
    /// Number that is added to the waiting tokens to get the overtaking bound of a new request.
    pub(crate) max_overtake: usize,
    /// The sizes of a step while several requests run or wait.
    pub(crate) limits: StepLimits,
    /// The sizes of a step with one request alone.
    pub(crate) limits_alone: StepLimits,
    /// The model of the time that steps take.
    pub(crate) cost: StepCost,
    pub(crate) policy: AdmissionPolicy,
    /// The order in which the prompts of a tenant are computed.
    pub(crate) prefill_order: PrefillOrder,
    /// When each of the waiting requests starts, in seconds from `published`, once it was asked for.
    pub(crate) starts: OnceLock<Vec<f64>>,
}

impl Default for Workload {
    fn default() -> Workload {
        let limits = StepLimits { tokens: 1, timed: usize::MAX, tenant: None };
        Workload {
            running: Vec::new(),
            waiting: Vec::new(),
            later_tokens: 0,
            arrived: Vec::new(),
            arrivals: 0.0,
            published: None,
            step_left: 0.0,
            slots: 1,
            max_overtake: 0,
            limits,
            limits_alone: limits,
            cost: StepCost::default(),
            policy: AdmissionPolicy::default(),
            prefill_order: PrefillOrder::Arrival,
            starts: OnceLock::new(),
        }
    }
}

/// A request that may arrive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    /// Number of its prompt tokens that are cached.
    pub(crate) cached: usize,
    /// Number of the others, at least 1.
    pub(crate) uncached: usize,
    /// The request's priority.
    pub(crate) class: i32,
    pub(crate) tenant: TenantId,
}

/// A request of a prediction.
#[derive(Clone, Copy, Debug)]
struct Request {
    work: Work,
    place: Place,
    /// The last step that it was part of.
    last_step: u64,
    /// It is the one whose first token is predicted.
    is_new: bool,
}

/// The state of a prediction.
struct Ahead<'a> {
    load: &'a Workload,
    running: Vec<Request>,
    /// In order of arrival.
    waiting: Vec<Request>,
    /// Number of seconds from now.
    time: f64,
    /// Number of steps so far.
    step: u64,
    /// Order of arrival of the next request.
    next_arrival: u64,
    /// Number of requests that have arrived since.
    arrived: usize,
    /// When requests have started since, and their tenants.
    started: Vec<(f64, TenantId)>,
    /// The new request has its first token.
    is_done: bool,
}

impl Workload {
    /// The time until the first token of a request that arrives `now`, and the part of it that the
    /// request waits for others. `None` before any speed is known.
    pub(crate) fn first_token(
        &self,
        arrival: Arrival,
        now: Instant,
    ) -> Option<(Duration, Duration)> {
        if !self.cost.is_known() {
            return None;
        }
        let Arrival { cached, uncached, class, tenant } = arrival;
        let work = Work { position: cached, pending: uncached.max(1), decode: 1, class, tenant };
        let alone = self.alone(work);
        let since = self.published.map(|published| now.saturating_duration_since(published));
        let left = self.step_left - since.unwrap_or_default().as_secs_f64();
        let mut ahead = Ahead::new(self, left.max(0.0));
        ahead.arrive(work, true);
        if !ahead.run(|ahead| ahead.is_done) {
            ahead.time += ahead.time_of_start(tenant) + alone;
        }
        let later = self.cost.share(StepWork::prompt(0.0, self.later_tokens as f64));
        let total = (ahead.time + later).max(alone);
        Some((duration(total), duration(total - alone)))
    }

    /// The seconds until the first token of a request that runs alone.
    fn alone(&self, work: Work) -> f64 {
        let steps = work.pending.div_ceil(self.limits_alone.tokens.max(1));
        let constant = self.cost.seconds(StepWork::default()) * steps as f64;
        constant + self.cost.share(StepWork::prompt(work.position as f64, work.pending as f64))
    }

    /// The time until `count` of the waiting requests have started, at least 1. `None` before any
    /// speed is known. Each workload is run ahead once, so that refusing a flood takes no time.
    pub(crate) fn starts(&self, count: usize) -> Option<Duration> {
        if !self.cost.is_known() {
            return None;
        }
        let starts = self.starts.get_or_init(|| {
            let mut ahead = Ahead::new(self, self.step_left);
            ahead.run(|ahead| ahead.started.len() >= self.waiting.len());
            ahead.started.iter().map(|&(time, _)| time).collect()
        });
        let last = starts.last().copied().unwrap_or_default();
        let later = last * count as f64 / starts.len().max(1) as f64;
        Some(duration(starts.get(count - 1).copied().unwrap_or(later)))
    }
}

impl Ahead<'_> {
    /// `step_left` is the number of seconds until the step in flight ends.
    fn new(load: &Workload, step_left: f64) -> Ahead<'_> {
        let mut ahead = Ahead {
            load,
            running: Vec::new(),
            waiting: Vec::new(),
            time: step_left,
            step: 0,
            next_arrival: 0,
            arrived: 0,
            started: Vec::new(),
            is_done: false,
        };
        for &work in &load.running {
            let running = ahead.request(work, Place::new(0, 0, 0));
            ahead.running.push(running);
        }
        for &WaitingWork { work, place } in &load.waiting {
            let waiting = ahead.request(work, place);
            ahead.waiting.push(waiting);
        }
        ahead
    }

    /// A request that arrives after those before.
    fn request(&mut self, work: Work, place: Place) -> Request {
        let place = Place { arrival: self.next_arrival, ..place };
        self.next_arrival += 1;
        Request { work, place, last_step: 0, is_new: false }
    }

    /// Goes ahead in time until `is_done`. Returns false if that takes too many rounds.
    fn run(&mut self, is_done: impl Fn(&Self) -> bool) -> bool {
        for _ in 0..ROUNDS_MAX {
            self.admit();
            if is_done(self) {
                return true;
            }
            if !self.repeat_step() {
                return true;
            }
            if is_done(self) {
                return true;
            }
            while self.until_arrival() <= 0.0 && self.arrived < ROUNDS_MAX {
                let arrived = &self.load.arrived;
                let next = arrived[self.arrived % arrived.len()];
                self.arrived += 1;
                self.arrive(next, false);
            }
        }
        false
    }

    /// Computes a step as often as it stays the same. Returns false if nothing runs.
    fn repeat_step(&mut self) -> bool {
        let is_alone = self.running.len() <= 1 && self.waiting.is_empty();
        let limits = if is_alone { self.load.limits_alone } else { self.load.limits };
        let views: Vec<SequenceView> = self.running.iter().map(view).collect();
        let slices = schedule::plan(&views, limits, self.load.prefill_order);
        if slices.is_empty() {
            return false;
        }
        let cost = &self.load.cost;
        let once = self.until_arrival() / cost.seconds(work_of(&slices, 1)).max(1e-9);
        let ends = slices.iter().map(|slice| match self.running[slice.index].work {
            Work { pending: 1, decode, .. } => decode,
            Work { pending, .. } => pending / slice.count,
        });
        let is_decode = |slice: &&Slice| self.running[slice.index].work.pending == 1;
        let decodes = self.running.iter().filter(|request| request.work.pending == 1).count();
        let times = match slices.iter().filter(is_decode).count() < decodes {
            // The others take part in the next step.
            true => 1,
            false => ends.min().unwrap_or(1).min(once.ceil() as usize).max(1),
        };
        self.time += times as f64 * cost.seconds(work_of(&slices, times));
        self.step += times as u64;
        for slice in slices {
            let request = &mut self.running[slice.index];
            request.last_step = self.step;
            let work = &mut request.work;
            work.position += times * slice.count;
            if work.pending > 1 {
                work.pending -= times * slice.count;
                if work.pending > 0 {
                    continue;
                }
                work.pending = 1;
                work.decode = work.decode.saturating_sub(1);
            } else {
                work.decode = work.decode.saturating_sub(times);
            }
            self.is_done |= request.is_new;
        }
        self.running.retain(|request| request.work.decode > 0);
        true
    }

    /// The time until the new request of this tenant starts, at the rate at which requests of the
    /// tenant have started so far.
    fn time_of_start(&self, tenant: TenantId) -> f64 {
        let Some(new) = self.waiting.iter().position(|waiting| waiting.is_new) else { return 0.0 };
        let own = &self.waiting[new];
        let is_ahead = |(index, other): &(usize, &Request)| {
            let comes_first = match self.load.policy {
                AdmissionPolicy::Cost => other.work.pending <= own.work.pending,
                AdmissionPolicy::Fcfs | AdmissionPolicy::LongestPrefix => *index < new,
            };
            other.work.tenant == tenant && comes_first
        };
        let ahead = self.waiting.iter().enumerate().filter(is_ahead).count();
        let started = self.started.iter().filter(|(_, other)| *other == tenant).count();
        self.time * ahead as f64 / started.max(1) as f64
    }

    /// The seconds until the next request arrives, not above 0 if it has arrived. Requests are
    /// expected to be like the last ones.
    fn until_arrival(&self) -> f64 {
        match self.load.arrivals > 0.0 && !self.load.arrived.is_empty() {
            true => (self.arrived + 1) as f64 / self.load.arrivals - self.time,
            false => f64::INFINITY,
        }
    }

    fn arrive(&mut self, work: Work, is_new: bool) {
        let waiting = self.waiting.iter().map(|waiting| waiting.work.pending).sum();
        let request = self.request(work, Place::new(0, waiting, self.load.max_overtake));
        self.waiting.push(Request { is_new, ..request });
    }

    /// Starts waiting requests as the scheduler does: while there are slots, and in place of others
    /// if their tenants have less than their share.
    fn admit(&mut self) {
        let Workload { slots, policy, .. } = *self.load;
        while !self.waiting.is_empty() {
            let is_full = self.running.len() >= slots;
            let running = self.running.iter().map(|request| request.work.tenant);
            let waiting = self.waiting.iter().map(|request| request.work.tenant);
            let shares = SlotShares::new(slots, running, waiting);
            let above = |request: &Request| shares.is_exceeded(request.work.tenant);
            let youngest = self.running.iter().rposition(above);
            if is_full && youngest.is_none() {
                return;
            }
            let candidates: Vec<Candidate> =
                self.waiting.iter().map(|waiting| candidate(waiting, &shares)).collect();
            let Some(&next) = policy::order(policy, &candidates, 1).first() else { return };
            if is_full && candidates[next].has_share {
                return;
            }
            let started = self.waiting.remove(next);
            for (waiting, candidate) in self.waiting[..next].iter_mut().zip(&candidates) {
                if candidate.binds(&candidates[next]) {
                    waiting.place.overtake(candidates[next].cost());
                }
            }
            if let Some(youngest) = youngest.filter(|_| is_full) {
                let preempted = self.running.remove(youngest);
                let Place { arrival, .. } = preempted.place;
                let index = self.waiting.partition_point(|w| w.place.arrival < arrival);
                self.waiting
                    .insert(index, Request { place: Place::new(arrival, 0, 0), ..preempted });
            }
            self.started.push((self.time, started.work.tenant));
            self.running.push(started);
        }
    }
}

/// What the plan of a step needs to know about a running request.
fn view(request: &Request) -> SequenceView {
    let Work { position, pending, class, tenant, .. } = request.work;
    SequenceView {
        computed: position,
        tokens: position + pending,
        committed: 0,
        covered: usize::MAX,
        last_step: request.last_step,
        arrival: request.place.arrival,
        class,
        tenant,
        chunk_max: usize::MAX,
        image: None,
        chunk_rows: LogitRows::None,
        last_rows: LogitRows::None,
        paused: false,
    }
}

/// The average work of a step, if it is repeated `times` times.
fn work_of(slices: &[Slice], times: usize) -> StepWork {
    let work = |slice: &Slice| {
        let start = slice.start + slice.count * (times - 1) / 2;
        StepWork::of_slice(start, slice.count)
    };
    slices.iter().map(work).fold(StepWork::default(), StepWork::and)
}

/// What the policy needs to know about a waiting request.
fn candidate(waiting: &Request, shares: &SlotShares) -> Candidate {
    let Work { position, pending, class, tenant, .. } = waiting.work;
    Candidate {
        arrival: waiting.place.arrival,
        class,
        tenant,
        has_share: shares.is_reached(tenant),
        tokens: position + pending,
        matched: position,
        prefix_sharers: 1,
        slack: waiting.place.slack(),
        bound: waiting.place.bound,
        quota: None,
        held: false,
        ready: true,
        stalled: false,
    }
}

fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)
}
