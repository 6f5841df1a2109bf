//! The scheduler: the admission queue, the running sequences, and the step in flight.
//!
//! It depends on no actor and reads no clock. It reaches the cache and the blocks through
//! [`Memory`], returns plans for an executor, and takes the current time as an argument. A step:
//!
//! 1. [`Scheduler::advance`] ends sequences that were canceled or timed out, admits waiting
//!    requests, reserves blocks for the next positions, and returns a plan if no step is in flight.
//! 2. The plan is executed elsewhere. Meanwhile requests are submitted and canceled.
//! 3. [`Scheduler::complete`] takes the results: it sends tokens, commits full blocks and ends
//!    complete sequences. Then the caller calls `advance` again.
//!
//! Between these calls, a running sequence's blocks are exactly those in its two leases.

mod admit;
mod audit;
mod blocks;
mod checkpoints;
mod encode;
mod ending;
mod lookups;
mod room;
mod step;
mod transfers;
mod workload;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use stolon_kvcache::{BlockId, Namespace, PrefixMatch, StepFence, TreeReader};

use crate::budget::DecodeForecast;
use crate::context::EngineContext;
use crate::late_sampling::LateSampling;
use crate::memory::{ActorStopped, Memory};
use crate::permits::QueuePermit;
use crate::preempt::Holder;
use crate::queue::Queue;
#[cfg(test)]
use crate::queue::Waiting;
use crate::sequence::{Ending, Sequence};
use crate::states::{CheckpointItem, FreeSlots};
use crate::step_cost::StepCost;
use crate::step_plan::StepPlan;
use crate::tenant::RecentTenants;
use crate::transfer::{EvictedCopy, RepeatedLookup, Saving};
use crate::wait::Work;
use checkpoints::StateInFlight;
use encode::Encoding;

/// Maximum number of rounds of admission in one call of `advance` that yield no step.
const ROUNDS_MAX: usize = 4;

/// A running sequence, with its place in the order of arrival.
#[derive(Debug)]
struct Running {
    sequence: Sequence,
    /// Order of arrival; unique.
    arrival: u64,
    /// Total cost of later requests that were admitted before it. A preemption does not reset it.
    overtaken: usize,
    /// Maximum value of `overtaken`.
    bound: usize,
    /// It was stalled by a slow consumer when the scheduler last looked.
    stalled: bool,
}

impl Running {
    /// What the choice of a sequence to preempt needs to know about it.
    fn holder(&self) -> Holder {
        let Running { sequence, arrival, .. } = self;
        let (stalled, is_sampling) = (sequence.is_stalled(), sequence.is_sampling);
        Holder { arrival: *arrival, stalled, is_sampling }
    }
}

/// One slice of the step in flight.
#[derive(Debug)]
struct InFlight {
    /// The sequence's id.
    id: u64,
    /// Its index in `running` when the step began. It is smaller now if an earlier one has ended.
    index: usize,
    /// Position of its first token in the step.
    start: usize,
    /// Number of its tokens in the step.
    count: usize,
    /// What it holds for the recurrent state of its sequence.
    state: StateInFlight,
}

/// The scheduler. See the module documentation.
#[derive(Debug)]
pub struct Scheduler<M> {
    context: EngineContext,
    /// The prefix tree and the block pool.
    memory: M,
    /// Reads the prefix tree of `memory` without going through it.
    reader: TreeReader,
    /// Delays the reuse of released blocks until the step in flight has ended.
    fence: StepFence,
    queue: Queue,
    /// The running sequences, in order of admission.
    running: Vec<Running>,
    /// The slices of the step in flight.
    in_flight: Option<Vec<InFlight>>,
    /// The loads of the step in flight.
    loads: Vec<transfers::LoadInFlight>,
    /// The blocks that were reserved since the last step.
    reserved: Vec<BlockId>,
    /// Copies of evicted blocks that the next step makes before it overwrites the blocks.
    evicted: Vec<EvictedCopy>,
    /// Copies of evicted blocks that the step in flight makes.
    evicted_in_flight: Vec<EvictedCopy>,
    /// Repeated look-ups of stored KV that `Scheduler::take_lookups` has not returned yet.
    lookups: Vec<RepeatedLookup>,
    /// The saves. Each step makes a part of the first one.
    saves: VecDeque<Saving>,
    /// Whether the first save is part of the step in flight.
    save_in_flight: bool,
    /// The slots for recurrent states that no sequence has; `None` for a model without.
    free_slots: Option<Arc<FreeSlots>>,
    /// Checkpoints that steps have written and that are not in the tree yet.
    written: Vec<CheckpointItem>,
    /// The images that are encoded.
    encoding: Encoding,
    /// The rows that are sampled outside of steps.
    late_sampling: LateSampling,
    /// Predicts how many tokens requests will generate.
    forecast: DecodeForecast,
    /// Number of the last step.
    step: u64,
    /// Increases whenever a sequence starts to run, because it may become a leader.
    running_version: u64,
    /// A sequence has run since the last call of [`Memory::settle`].
    unsettled: bool,
    /// Something has changed that may make it possible to admit a waiting request.
    try_admission: bool,
    /// Throughput in computed tokens per second, smoothed; 0 before the first step.
    rate: f64,
    /// The model of the time that steps take.
    cost: StepCost,
    /// When the step in flight was planned.
    step_began: Instant,
    /// The tenants that had requests last.
    recent_tenants: RecentTenants,
    /// Whether several tenants had requests recently.
    several_tenants: bool,
    /// Whether a waiting request did not fit into the pool next to the running ones when the
    /// scheduler last looked.
    short_of_blocks: bool,
    /// The last requests that arrived, with the time.
    arrived: VecDeque<(Instant, Work)>,
    /// Whether a waiting or running sequence may have a deadline.
    has_deadlines: bool,
}

impl<M: Memory> Scheduler<M> {
    /// A scheduler with an empty queue. `reader` reads the tree behind `memory`; `fence` belongs to
    /// its block pool.
    pub fn new(
        context: EngineContext,
        memory: M,
        reader: TreeReader,
        fence: StepFence,
    ) -> Scheduler<M> {
        // Twice the number of requests, so that a tenant has one for each request that can run. Calls
        // of requests that have ended may still run.
        let late_sampling = LateSampling::new(2 * context.config.max_running);
        let encoding = Encoding::new(&context);
        let free_slots = context.spec.state.map(|state| FreeSlots::new(state.slots));
        Scheduler {
            context,
            memory,
            reader,
            fence,
            queue: Queue::default(),
            running: Vec::new(),
            in_flight: None,
            loads: Vec::new(),
            reserved: Vec::new(),
            evicted: Vec::new(),
            evicted_in_flight: Vec::new(),
            lookups: Vec::new(),
            saves: VecDeque::new(),
            save_in_flight: false,
            free_slots,
            written: Vec::new(),
            encoding,
            late_sampling,
            forecast: DecodeForecast::default(),
            step: 0,
            running_version: 0,
            unsettled: false,
            try_admission: false,
            rate: 0.0,
            cost: StepCost::default(),
            step_began: Instant::now(),
            recent_tenants: RecentTenants::default(),
            several_tenants: false,
            short_of_blocks: false,
            arrived: VecDeque::new(),
            has_deadlines: false,
        }
    }

    /// Sets the function that is called, on any thread, when [`Scheduler::advance`] should be
    /// called because a token was sampled outside of a step.
    pub fn set_wake(&mut self, wake: Arc<dyn Fn() + Send + Sync>) {
        self.late_sampling.set_wake(wake);
    }

    /// Adds a request to the admission queue.
    pub fn submit(&mut self, sequence: Sequence, permit: QueuePermit) {
        let times = &sequence.times;
        self.has_deadlines |= times.deadline.is_some() || times.queue_deadline.is_some();
        self.note_arrival(&sequence, &permit);
        self.queue.push(sequence, permit, self.context.config.max_overtake_tokens);
        self.try_admission = true;
    }

    /// Cancels a request: at once, or after the step that it is part of.
    pub fn cancel(&mut self, id: u64) {
        if let Some(waiting) = self.queue.take(id) {
            self.end_early(waiting.sequence, Ending::Cancelled);
            self.try_admission = true;
            return;
        }
        if let Some(running) = self.running.iter_mut().find(|r| r.sequence.id == id) {
            running.sequence.end.get_or_insert(Ending::Cancelled);
        }
    }

    /// A consumer that had stalled its request has room for events again.
    pub fn resume(&mut self) {
        self.try_admission = true;
    }

    /// Number of leading tokens that are cached now, and how many of them a request would not
    /// compute. A hint: it may change before a request runs.
    pub fn query_resume(&self, namespace: &Namespace, tokens: &[u32]) -> PrefixMatch {
        self.reader.query_resume(namespace, tokens)
    }

    /// Whether a step is in flight.
    pub fn has_step(&self) -> bool {
        self.in_flight.is_some()
    }

    /// The sequences of the step in flight, in the order of its slices.
    pub fn ids_in_flight(&self) -> Vec<u64> {
        self.in_flight.iter().flatten().map(|slice| slice.id).collect()
    }

    /// The waiting requests, in order of arrival.
    #[cfg(test)]
    pub(crate) fn waiting(&self) -> &[Waiting] {
        self.queue.entries()
    }

    #[cfg(test)]
    pub(crate) fn all_slots_are_free(&self) -> bool {
        let slots = self.context.spec.state.map(|state| state.slots);
        slots == self.free_slots.as_ref().map(|slots| slots.count())
    }

    #[cfg(test)]
    pub(crate) fn memory_mut(&mut self) -> &mut M {
        &mut self.memory
    }

    #[cfg(test)]
    pub(crate) fn waiting_mut(&mut self) -> &mut [Waiting] {
        self.queue.entries_mut()
    }

    /// The time of the next timeout, at which [`Scheduler::advance`] must be called.
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

    /// Ends, admits and grows sequences, and plans the next step if none is in flight.
    ///
    /// # Errors
    /// [`ActorStopped`] if the memory no longer answers.
    pub async fn advance(&mut self, now: Instant) -> Result<Option<StepPlan>, ActorStopped> {
        self.context.sessions.expire(now);
        self.note_tenants(now);
        let mut plan = None;
        for _ in 0..ROUNDS_MAX {
            self.apply_late_tokens(now).await?;
            self.end_overdue(now);
            self.end_lookups(now);
            self.notice_stalled();
            self.publish_checkpoints().await?;
            if self.try_admission && !self.queue.is_empty() {
                self.try_admission = false;
                self.admit(now).await?;
            }
            if self.in_flight.is_some() {
                break;
            }
            self.grow().await?;
            plan = self.plan().await?;
            // Without a step, no completion will call this again, so a request that cannot continue
            // must be ended now, and blocks that `grow` has released by preemption must be offered
            // to waiting requests.
            let has_ended = self.running.iter().any(|running| running.sequence.end.is_some());
            let can_admit = self.try_admission && !self.queue.is_empty();
            if plan.is_some() || !has_ended && !can_admit {
                break;
            }
        }
        let idle = self.running.is_empty() && self.saves.is_empty();
        if idle && std::mem::take(&mut self.unsettled) {
            self.memory.settle().await?;
        }
        if plan.is_some() {
            self.step_began = now;
        }
        self.publish_workload(now);
        Ok(plan)
    }

    /// Remembers the tenants that have requests now.
    fn note_tenants(&mut self, now: Instant) {
        let waiting = self.queue.entries().iter().map(|waiting| waiting.sequence.tenant);
        let running = self.running.iter().map(|running| running.sequence.tenant);
        waiting.chain(running).for_each(|tenant| self.recent_tenants.note(tenant, now));
        self.several_tenants = self.recent_tenants.are_several(now);
    }

    /// Tries admission if a sequence has been stalled by a slow consumer, because it can be
    /// preempted for a waiting request. There may be no other event that would trigger admission: a
    /// stalled sequence takes part in no step.
    fn notice_stalled(&mut self) {
        if self.queue.is_empty() {
            return;
        }
        for running in &mut self.running {
            let stalled = running.sequence.is_stalled();
            self.try_admission |= stalled && !running.stalled;
            running.stalled = stalled;
        }
    }

    /// Drops every request, which closes its event channel and counts it as failed.
    pub fn close(&mut self) {
        self.queue = Queue::default();
        self.running.clear();
        self.saves.clear();
        self.evicted.clear();
        self.written.clear();
    }

    /// Removes everything from the cache that no request uses.
    ///
    /// # Errors
    /// [`ActorStopped`] if the memory no longer answers.
    pub async fn flush(&mut self) -> Result<(), ActorStopped> {
        self.context.sessions.release_all();
        self.memory.flush().await
    }
}
