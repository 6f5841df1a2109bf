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
//!
//! Each field of [`Scheduler`] owns a part of the state, which only its own file changes. The
//! methods of the scheduler are the parts of a step that concern several of them.

mod admission;
mod admit;
mod audit;
mod background;
mod batch;
mod blocks;
mod checkpoints;
mod encoding;
mod ending;
mod estimates;
mod growth;
mod preemption;
mod room;
mod speculating;
mod step;
mod transfers;

use std::sync::Arc;
use std::time::Instant;

use stolon_kvcache::{Namespace, PrefixMatch, StepFence, TreeReader};

use crate::context::EngineContext;
use crate::memory::{ActorStopped, Memory};
use crate::permits::QueuePermit;
#[cfg(test)]
use crate::queue::Waiting;
use crate::sequence::{Ending, Sequence};
use crate::step_plan::StepPlan;
use crate::transfer::{RepeatedLookup, SaveRequest, StoredKv};
use admission::Admission;
use background::Background;
pub(crate) use background::CHUNK as BACKGROUND_CHUNK;
use batch::Batch;
use blocks::Blocks;
use checkpoints::Checkpoints;
use encoding::Encoding;
use estimates::Estimates;
use speculating::Speculating;
use transfers::Transfers;

/// Maximum number of rounds of admission in one call of `advance` that yield no step.
const ROUNDS_MAX: usize = 4;

/// The scheduler. See the module documentation.
#[derive(Debug)]
pub struct Scheduler<M> {
    context: EngineContext,
    /// The prefix tree and the block pool.
    blocks: Blocks<M>,
    /// The waiting requests.
    admission: Admission,
    /// The prompts that are computed while there is no request.
    background: Background,
    /// The running sequences and the step in flight.
    batch: Batch,
    /// The copies of KV into and out of the pool.
    transfers: Transfers,
    /// The recurrent states of running sequences, and their checkpoints.
    checkpoints: Checkpoints,
    /// The images that are encoded.
    encoding: Encoding,
    /// The speed of steps and the lengths of answers.
    estimates: Estimates,
    /// The tokens that are proposed to follow sequences.
    speculating: Speculating,
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
        Scheduler {
            blocks: Blocks::new(&context, memory, reader, fence),
            admission: Admission::new(&context),
            background: Background::default(),
            batch: Batch::new(&context),
            transfers: Transfers::new(&context),
            checkpoints: Checkpoints::new(&context),
            encoding: Encoding::new(&context),
            estimates: Estimates::new(&context),
            speculating: Speculating::new(&context),
            context,
        }
    }

    /// Sets the function that is called, on any thread, when [`Scheduler::advance`] should be
    /// called because a token was sampled outside of a step.
    pub fn set_wake(&mut self, wake: Arc<dyn Fn() + Send + Sync>) {
        self.batch.set_wake(wake);
    }

    /// Adds a request to the admission queue.
    pub fn submit(&mut self, sequence: Sequence, permit: QueuePermit) {
        self.estimates.note_arrival(&sequence, &permit);
        self.admission.submit(sequence, Some(permit));
    }

    /// Cancels a request: at once, or after the step that it is part of.
    pub fn cancel(&mut self, id: u64) {
        if let Some(waiting) = self.admission.cancel(id) {
            self.end_early(waiting.sequence, Ending::Canceled);
        } else if let Some(sequence) = self.background.cancel(id) {
            self.end_early(sequence, Ending::Canceled);
        } else if let Some(sequence) = self.batch.get_mut(id) {
            sequence.end.get_or_insert(Ending::Canceled);
        }
    }

    /// A consumer that had stalled its request has room for events again.
    pub fn resume(&mut self) {
        self.admission.retry();
    }

    /// Number of leading tokens that are cached now, and how many of them a request would not
    /// compute. A hint: it may change before a request runs.
    pub fn query_resume(&self, namespace: &Namespace, tokens: &[u32]) -> PrefixMatch {
        self.blocks.reader().query_resume(namespace, tokens)
    }

    /// Copies cached blocks out of the pool during the next steps. If too many saves are waiting,
    /// or nothing is cached, the request is dropped.
    ///
    /// # Errors
    /// [`ActorStopped`] if the memory no longer answers.
    pub async fn save(&mut self, request: SaveRequest) -> Result<(), ActorStopped> {
        self.transfers.save(request, &mut self.blocks).await
    }

    /// The look-ups of stored KV that waiting requests have asked for since the last call. The
    /// scheduler does no I/O: its caller makes them, and passes the results to
    /// [`Scheduler::stored_read`].
    pub fn take_lookups(&mut self) -> Vec<RepeatedLookup> {
        self.admission.take_lookups()
    }

    /// A repeated look-up has ended, with the KV that it has read. Without any, the request runs
    /// with what it has, and so it does if it does not wait for the answer any longer.
    pub fn stored_read(&mut self, id: u64, kv: Option<StoredKv>) {
        self.admission.stored_read(id, kv);
    }

    /// Whether a step is in flight.
    pub fn has_step(&self) -> bool {
        self.batch.step().is_some()
    }

    /// The sequences of the step in flight, in the order of its slices.
    pub fn ids_in_flight(&self) -> Vec<u64> {
        let slices = self.batch.step().into_iter().flat_map(|step| &step.slices);
        slices.map(|slice| slice.id).collect()
    }

    /// The time of the next timeout, at which [`Scheduler::advance`] must be called.
    pub fn next_deadline(&mut self) -> Option<Instant> {
        self.admission.next_deadline(&self.batch)
    }

    /// Ends, admits and grows sequences, and plans the next step if none is in flight.
    ///
    /// # Errors
    /// [`ActorStopped`] if the memory no longer answers.
    pub async fn advance(&mut self, now: Instant) -> Result<Option<StepPlan>, ActorStopped> {
        self.context.sessions.expire(now);
        let waiting = self.admission.queue().entries().iter().map(|w| &w.sequence);
        let running = self.batch.sequences().filter(|sequence| !sequence.is_background);
        let all = waiting.chain(running);
        self.estimates.note_tenants(all.map(|sequence| sequence.tenant), now);
        let mut plan = None;
        for _ in 0..ROUNDS_MAX {
            self.apply_late_tokens(now).await?;
            self.end_background();
            self.end_overdue(now);
            self.admission.end_lookups(now);
            self.admission.notice_stalled(&mut self.batch);
            self.checkpoints.publish(&mut self.blocks, &mut self.transfers).await?;
            if self.admission.is_due() {
                self.admit(now).await?;
            }
            if self.has_step() {
                break;
            }
            self.start_background(now).await?;
            self.grow().await?;
            self.grow_for_proposals().await?;
            plan = self.plan(now).await?;
            // Without a step, no completion will call this again, so a request that cannot continue
            // must be ended now, and blocks that `grow` has released by preemption must be offered
            // to waiting requests.
            if plan.is_some() || !self.batch.has_ending() && !self.admission.is_due() {
                break;
            }
        }
        let idle = self.batch.is_empty() && !self.transfers.has_saves();
        if idle && self.batch.take_unsettled() {
            self.blocks.memory().settle().await?;
        }
        self.estimates.publish(&self.admission, &self.batch, now);
        Ok(plan)
    }

    /// Drops every request, which closes its event channel and counts it as failed.
    pub fn close(&mut self) {
        self.admission.close();
        self.background.close();
        self.batch.close();
        self.transfers.close();
        self.blocks.close();
        self.checkpoints.close();
    }

    /// Removes everything from the cache that no request uses.
    ///
    /// # Errors
    /// [`ActorStopped`] if the memory no longer answers.
    pub async fn flush(&mut self) -> Result<(), ActorStopped> {
        self.context.sessions.release_all();
        self.blocks.memory().flush().await
    }
}

#[cfg(test)]
impl<M: Memory> Scheduler<M> {
    /// The waiting requests, in order of arrival.
    pub(crate) fn waiting(&self) -> &[Waiting] {
        self.admission.queue().entries()
    }

    pub(crate) fn waiting_mut(&mut self) -> &mut [Waiting] {
        self.admission.queue_mut().entries_mut()
    }

    pub(crate) fn all_slots_are_free(&self) -> bool {
        self.batch.is_empty() && self.checkpoints.audit(&self.batch).is_ok()
    }

    pub(crate) fn memory_mut(&mut self) -> &mut M {
        self.blocks.memory()
    }
}
