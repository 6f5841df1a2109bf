//! The state behind the admission actor: queue, running sequences, and the step in flight.
//!
//! It knows no actor: the cache and the blocks are behind [`Memory`], the executor behind the
//! plans it returns, and the time is told to it. A step's life:
//!
//! 1. [`Scheduler::advance`] ends what is cancelled or late, admits what fits, reserves the
//!    blocks the next positions need, and returns a plan when no step is in flight;
//! 2. the plan is computed elsewhere, while requests come and go;
//! 3. [`Scheduler::complete`] takes the results: tokens are told, full blocks are committed, and
//!    what is done is dropped. Then `advance` again.
//!
//! Between the calls, a running sequence's blocks are exactly those in its two leases.

mod admit;
mod blocks;
mod ending;
mod room;
mod step;

use std::time::Instant;

use stolon_kvcache::{Namespace, StepFence, TreeReader};

use crate::budget::DecodeForecast;
use crate::context::AdmissionContext;
use crate::memory::{ActorStopped, Memory};
use crate::permits::QueuePermit;
use crate::queue::{Queue, Waiting};
use crate::sequence::{Ending, Sequence};
use crate::stats::AuditReport;
use crate::step_plan::StepPlan;

/// Rounds of admission without a step to show for them, after which the next event is awaited.
const ROUNDS_MAX: usize = 4;

/// A running sequence, with its place in the order of arrival.
#[derive(Debug)]
struct Running {
    sequence: Sequence,
    arrival: u64,
    overtaken: usize,
    bound: usize,
}

/// One slice of the step in flight.
#[derive(Debug)]
struct InFlight {
    id: u64,
    /// Where the sequence stands among the running ones, unless some before it have left.
    index: usize,
    start: usize,
    count: usize,
}

/// The state. See the module's documentation.
#[derive(Debug)]
pub struct Scheduler<M> {
    context: AdmissionContext,
    memory: M,
    reader: TreeReader,
    fence: StepFence,
    queue: Queue,
    /// In order of admission.
    running: Vec<Running>,
    in_flight: Option<Vec<InFlight>>,
    forecast: DecodeForecast,
    step: u64,
    /// Grows whenever a sequence begins to run: there may be new leaders.
    running_version: u64,
    /// Something has run since the memory was last settled.
    unsettled: bool,
    /// Something has changed that may let a waiting request in.
    try_admission: bool,
    /// Tokens computed a second, smoothed.
    rate: f64,
    /// Some sequence may have a deadline.
    has_deadlines: bool,
}

impl<M: Memory> Scheduler<M> {
    /// A scheduler with an empty queue. `reader` reads the tree behind `memory`; `fence` belongs to
    /// its block pool.
    pub fn new(
        context: AdmissionContext,
        memory: M,
        reader: TreeReader,
        fence: StepFence,
    ) -> Scheduler<M> {
        Scheduler {
            context,
            memory,
            reader,
            fence,
            queue: Queue::default(),
            running: Vec::new(),
            in_flight: None,
            forecast: DecodeForecast::default(),
            step: 0,
            running_version: 0,
            unsettled: false,
            try_admission: false,
            rate: 0.0,
            has_deadlines: false,
        }
    }

    /// Takes a request in.
    pub fn submit(&mut self, sequence: Sequence, permit: QueuePermit) {
        let times = &sequence.times;
        self.has_deadlines |= times.deadline.is_some() || times.queue_deadline.is_some();
        self.queue.push(sequence, permit, self.context.config.max_overtake_tokens);
        self.try_admission = true;
    }

    /// Ends a sequence whose reader is gone: at once, or with the step it is part of.
    pub fn cancel(&mut self, id: u64) {
        if self.queue.take(id).is_some() {
            self.context.gauges.cancelled.add(1);
            self.try_admission = true;
            return;
        }
        if let Some(running) = self.running.iter_mut().find(|r| r.sequence.id == id) {
            running.sequence.end.get_or_insert(Ending::Cancelled);
        }
    }

    /// A slow reader wants more.
    pub fn resume(&mut self) {
        self.try_admission = true;
    }

    /// How much of a prompt is cached: a hint, as at the limits.
    pub fn query_match_len(&self, namespace: &Namespace, tokens: &[u32]) -> usize {
        self.reader.query_match_len(namespace, tokens)
    }

    /// The sequences of the step in flight, in the order of its slices.
    pub fn ids_in_flight(&self) -> Vec<u64> {
        self.in_flight.iter().flatten().map(|slice| slice.id).collect()
    }

    /// What waits, in order of arrival.
    #[cfg(test)]
    pub(crate) fn waiting(&self) -> &[Waiting] {
        self.queue.entries()
    }

    #[cfg(test)]
    pub(crate) fn waiting_mut(&mut self) -> &mut [Waiting] {
        self.queue.entries_mut()
    }

    /// The next moment at which [`Scheduler::advance`] has something to do by itself.
    pub fn next_deadline(&mut self) -> Option<Instant> {
        if !self.has_deadlines {
            return None;
        }
        let running = self.running.iter().filter(|r| r.sequence.end.is_none());
        let running = running.filter_map(|r| r.sequence.times.deadline).min();
        let next = [running, self.queue.next_deadline()].into_iter().flatten().min();
        self.has_deadlines = next.is_some();
        next
    }

    /// Does all that can be done now; returns the next step when none is in flight.
    pub async fn advance(&mut self, now: Instant) -> Result<Option<StepPlan>, ActorStopped> {
        let mut plan = None;
        for _ in 0..ROUNDS_MAX {
            self.end_overdue(now);
            if self.try_admission && !self.queue.is_empty() {
                self.try_admission = false;
                self.admit(now).await?;
            }
            if self.in_flight.is_some() {
                break;
            }
            self.grow().await?;
            plan = self.plan();
            // Without a step nothing will call again: what growing has set free is tried now.
            if plan.is_some() || !self.try_admission || self.queue.is_empty() {
                break;
            }
        }
        if self.running.is_empty() && std::mem::take(&mut self.unsettled) {
            self.memory.settle().await?;
        }
        self.publish();
        Ok(plan)
    }

    /// Drops every request: their streams see their channel close.
    pub fn close(&mut self) {
        self.queue = Queue::default();
        self.running.clear();
    }

    /// Empties the cache as far as nobody uses it.
    pub async fn flush(&mut self) -> Result<(), ActorStopped> {
        self.memory.flush().await
    }

    /// Checks blocks, tree and sequences against each other.
    pub async fn audit(&mut self) -> Result<Result<AuditReport, String>, ActorStopped> {
        let mut report = match self.memory.audit().await? {
            Ok(report) => report,
            Err(problem) => return Ok(Err(problem)),
        };
        report.running = self.running.len();
        report.waiting = self.queue.len();
        let reserved: usize = self
            .running
            .iter()
            .filter_map(|r| r.sequence.held.reserved.as_ref())
            .map(|lease| lease.blocks().len())
            .sum();
        if reserved != report.blocks_reserved {
            return Ok(Err(format!(
                "reserved blocks: running sequences hold {reserved}, the pool counts {}",
                report.blocks_reserved
            )));
        }
        if let Some(waiting) = self.queue.entries().iter().find(|w| w.overtaken > w.bound) {
            return Ok(Err(format!(
                "sequence {}: overtaken by {} tokens, expected at most {}",
                waiting.sequence.id, waiting.overtaken, waiting.bound
            )));
        }
        for running in &self.running {
            let held = &running.sequence.held;
            let covered = held.table.len() * self.context.spec.block_size;
            if held.computed > covered || held.committed() > held.computed {
                return Ok(Err(format!(
                    "sequence {}: {} positions committed, {} computed, {covered} covered",
                    running.sequence.id,
                    held.committed(),
                    held.computed
                )));
            }
        }
        Ok(Ok(report))
    }

    fn publish(&self) {
        let gauges = &self.context.gauges;
        if gauges.preemptions.get() > 0 {
            let waits_again = |waiting: &&Waiting| waiting.permit.is_none();
            gauges.preempted.set(self.queue.entries().iter().filter(waits_again).count());
        }
        gauges.running.set(self.running.len());
    }
}
