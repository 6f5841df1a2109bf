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

use std::sync::Arc;
use std::time::Instant;

use arc_swap::ArcSwap;
use stolon_kvcache::{StepFence, TreeReader};
use stolon_model::{BackendSpec, SequenceSlice, StepBatch};

use super::budget::{self, Capacity, DecodeForecast};
use super::preempt::{self, Holder};
use super::queue::{Queue, Waiting};
use super::schedule;
use super::sequence::{Ending, Held, Sequence};
use super::sharing::{self, Leader};
use super::{blocks_for, policy};
use crate::config::{AdmissionPolicy, CoreConfig};
use crate::door::{Door, Permit};
use crate::error::CoreError;
use crate::executor::plan::{StepDone, StepPlan};
use crate::gauges::Gauges;
use crate::memory::{CommitItem, CoreAudit, Gone, Memory};
use crate::request::{SequenceEnd, SequenceEvent};

/// Waiting requests whose match is queried again in one round at most.
const QUERIES_A_ROUND: usize = 32;

/// Blocks reserved ahead for a sequence that generates, where there is room.
const BLOCKS_AHEAD: usize = 4;

/// A running sequence, with its place in the order of arrival.
#[derive(Debug)]
struct Running {
    sequence: Sequence,
    arrival: u64,
    overtaken: usize,
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

/// What outlives a scheduler and is shared with the door.
#[derive(Clone, Debug)]
pub(crate) struct Surroundings {
    pub(crate) config: Arc<CoreConfig>,
    pub(crate) policy: Arc<ArcSwap<AdmissionPolicy>>,
    pub(crate) door: Arc<Door>,
    pub(crate) gauges: Arc<Gauges>,
    pub(crate) spec: BackendSpec,
}

/// The state. See the module's documentation.
#[derive(Debug)]
pub(crate) struct Scheduler<M> {
    around: Surroundings,
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
    /// Something has changed that may let a waiting request in.
    try_admission: bool,
    /// Tokens computed a second, smoothed.
    rate: f64,
    /// Some sequence may have a deadline.
    has_deadlines: bool,
}

impl<M: Memory> Scheduler<M> {
    pub(crate) fn new(
        around: Surroundings,
        memory: M,
        reader: TreeReader,
        fence: StepFence,
    ) -> Scheduler<M> {
        Scheduler {
            around,
            memory,
            reader,
            fence,
            queue: Queue::default(),
            running: Vec::new(),
            in_flight: None,
            forecast: DecodeForecast::default(),
            step: 0,
            running_version: 0,
            try_admission: false,
            rate: 0.0,
            has_deadlines: false,
        }
    }

    /// Takes a request in.
    pub(crate) fn submit(&mut self, sequence: Sequence, permit: Permit) {
        let times = &sequence.times;
        self.has_deadlines |= times.deadline.is_some() || times.queue_deadline.is_some();
        self.queue.push(sequence, permit);
        self.try_admission = true;
    }

    /// Ends a sequence whose reader is gone: at once, or with the step it is part of.
    pub(crate) fn cancel(&mut self, id: u64) {
        if self.queue.take(id).is_some() {
            self.around.gauges.cancelled.add(1);
            self.try_admission = true;
            return;
        }
        if let Some(running) = self.running.iter_mut().find(|r| r.sequence.id == id) {
            running.sequence.end.get_or_insert(Ending::Cancelled);
        }
    }

    /// A slow reader wants more.
    pub(crate) fn resume(&mut self) {
        self.try_admission = true;
    }

    /// The next moment at which [`Scheduler::advance`] has something to do by itself.
    pub(crate) fn next_deadline(&mut self) -> Option<Instant> {
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
    pub(crate) async fn advance(&mut self, now: Instant) -> Result<Option<StepPlan>, Gone> {
        self.end_overdue(now);
        if self.try_admission && !self.queue.is_empty() {
            self.try_admission = false;
            self.admit(now).await?;
        }
        let plan = if self.in_flight.is_some() {
            None
        } else {
            self.grow().await?;
            self.plan()
        };
        self.publish();
        Ok(plan)
    }

    /// Takes a step's results.
    pub(crate) async fn complete(&mut self, done: StepDone, now: Instant) -> Result<(), Gone> {
        let slices = self.in_flight.take().unwrap_or_default();
        let gauges = Arc::clone(&self.around.gauges);
        gauges.steps.add(1);
        let mut finished: Vec<(u64, SequenceEnd)> = Vec::new();
        match done.outcome {
            Ok(results) => {
                debug_assert_eq!(results.len(), slices.len());
                let computed: usize = slices.iter().map(|slice| slice.count).sum();
                gauges.computed_tokens.add(computed);
                self.note_rate(computed, done.compute.as_secs_f64());
                for (slice, result) in slices.iter().zip(results) {
                    let Some(index) = self.find(slice) else { continue };
                    let sequence = &mut self.running[index].sequence;
                    sequence.in_step = false;
                    if let Some(failure) = result.failure {
                        // What it computed is not to be trusted, so it does not count as done.
                        let reason = format!("sampling: {failure}");
                        sequence.end = Some(Ending::Failed(CoreError::Interrupted { reason }));
                        continue;
                    }
                    let end = slice.start + slice.count;
                    sequence.held.computed = sequence.held.computed.max(end);
                    if result.sampler.is_some() {
                        sequence.sampler = result.sampler;
                    }
                    sequence.gather_prompt_logprobs(result.prompt);
                    if sequence.end.is_some() {
                        continue;
                    }
                    if let Some(sampled) = result.sampled {
                        gauges.completion_tokens.add(1);
                        if let Some(end) = sequence.push(sampled.token, sampled.logprob, now) {
                            finished.push((sequence.id, end));
                        }
                    }
                }
                self.commit().await?;
            }
            Err(reason) => {
                for slice in &slices {
                    let Some(index) = self.find(slice) else { continue };
                    let sequence = &mut self.running[index].sequence;
                    sequence.in_step = false;
                    let reason = reason.clone();
                    sequence.end = Some(Ending::Failed(CoreError::Interrupted { reason }));
                }
                self.end_overdue(now);
                self.memory.flush().await?;
            }
        }
        for (id, end) in finished {
            self.finish(id, end, now);
        }
        self.look_after_followers();
        self.end_overdue(now);
        if self.running.is_empty() {
            self.memory.settle().await?;
        }
        Ok(())
    }

    /// Drops every request: their streams see their channel close.
    pub(crate) fn close(&mut self) {
        self.queue = Queue::default();
        self.running.clear();
    }

    /// Empties the cache as far as nobody uses it.
    pub(crate) async fn flush(&mut self) -> Result<(), Gone> {
        self.memory.flush().await
    }

    /// Checks blocks, tree and sequences against each other.
    pub(crate) async fn audit(&mut self) -> Result<Result<CoreAudit, String>, Gone> {
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
        for running in &self.running {
            let held = &running.sequence.held;
            let covered = held.table.len() * self.around.spec.block_size;
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
        let gauges = &self.around.gauges;
        if gauges.preemptions.get() > 0 {
            let waits_again = |waiting: &&Waiting| waiting.permit.is_none();
            gauges.preempted.set(self.queue.entries().iter().filter(waits_again).count());
        }
        gauges.running.set(self.running.len());
    }

    fn find(&self, slice: &InFlight) -> Option<usize> {
        let at = |index: usize| self.running.get(index).is_some_and(|r| r.sequence.id == slice.id);
        if at(slice.index) {
            return Some(slice.index);
        }
        self.running.iter().position(|r| r.sequence.id == slice.id)
    }

    fn note_rate(&mut self, tokens: usize, seconds: f64) {
        if seconds > 0.0 {
            let rate = tokens as f64 / seconds;
            self.rate = if self.rate == 0.0 { rate } else { 0.9 * self.rate + 0.1 * rate };
            self.around.door.set_rate(self.rate);
        }
    }

    /// Ends a sequence that is done: its leases go first, so that whoever reads its last event
    /// finds them returned.
    fn finish(&mut self, id: u64, end: SequenceEnd, now: Instant) {
        let Some(index) = self.running.iter().position(|r| r.sequence.id == id) else { return };
        let mut sequence = self.running.remove(index).sequence;
        sequence.held = Held::default();
        self.forecast.finished(sequence.max_tokens, sequence.generated());
        self.around.gauges.finished.add(1);
        self.around.gauges.running.set(self.running.len());
        self.try_admission = true;
        let event = sequence.finish_event(end, now);
        sequence.tell(event);
    }

    /// Ends what is cancelled or late and not part of the step in flight.
    fn end_overdue(&mut self, now: Instant) {
        let gauges = Arc::clone(&self.around.gauges);
        for waiting in self.queue.take_overdue(now) {
            let Waiting { sequence, permit, .. } = waiting;
            drop(permit);
            let ending = sequence.end.clone().unwrap_or_else(|| late(&sequence, now));
            end_early(sequence, ending, &gauges);
            self.try_admission = true;
        }
        let mut index = 0;
        while index < self.running.len() {
            let sequence = &mut self.running[index].sequence;
            let overdue = sequence.times.deadline.is_some_and(|deadline| deadline <= now);
            if sequence.end.is_none() {
                if sequence.events.is_closed() {
                    sequence.end = Some(Ending::Cancelled);
                } else if overdue {
                    sequence.end = Some(late(sequence, now));
                }
            }
            match sequence.end.clone() {
                Some(ending) if !sequence.in_step => {
                    end_early(self.running.remove(index).sequence, ending, &gauges);
                    self.try_admission = true;
                }
                _ => index += 1,
            }
        }
    }

    /// Puts the full blocks of every running sequence into the tree.
    async fn commit(&mut self) -> Result<(), Gone> {
        if !self.around.config.prefix_caching {
            return Ok(());
        }
        let block_size = self.around.spec.block_size;
        let mut indices = Vec::new();
        let mut items = Vec::new();
        for (index, running) in self.running.iter_mut().enumerate() {
            let sequence = &mut running.sequence;
            let held = &mut sequence.held;
            let len = held.computed / block_size * block_size;
            let committed = held.committed();
            if len <= committed || sequence.in_step {
                continue;
            }
            let (Some(lease), Some(reserved)) = (held.lease.take(), held.reserved.as_mut()) else {
                continue;
            };
            let blocks = reserved.commit_front((len - committed) / block_size);
            indices.push(index);
            items.push(CommitItem {
                tokens: std::mem::take(&mut sequence.tokens),
                len,
                lease,
                blocks,
            });
        }
        if items.is_empty() {
            return Ok(());
        }
        let mut duplicates = Vec::new();
        for (index, committed) in indices.into_iter().zip(self.memory.commit(items).await?) {
            let sequence = &mut self.running[index].sequence;
            sequence.tokens = committed.tokens;
            sequence.held.lease = Some(committed.lease);
            sequence.held.rebuild_table();
            // A tree that took less than it was offered keeps the sequence right all the same:
            // what is no longer in its table is computed again.
            let covered = sequence.held.table.len() * block_size;
            sequence.held.computed = sequence.held.computed.min(covered);
            duplicates.extend(committed.duplicates);
        }
        if !duplicates.is_empty() {
            self.memory.release(duplicates)?;
        }
        Ok(())
    }

    /// After a step: lets go those who waited for blocks that are there now, or in vain.
    fn look_after_followers(&mut self) {
        for waiting in self.queue.entries_mut() {
            let Some(follow) = &mut waiting.follow else { continue };
            let leader = self.running.iter().find(|r| r.sequence.id == follow.leader);
            let progress = leader
                .filter(|leader| leader.sequence.end.is_none())
                .map(|leader| (leader.sequence.held.computed, leader.sequence.held.committed()));
            if sharing::keep_waiting(follow, progress) {
                continue;
            }
            match progress {
                Some((_, committed)) if committed >= follow.shared => {
                    waiting.matched = follow.shared;
                }
                Some(_) => waiting.follows_no_more = true,
                // The leader is gone: another may lead, or this one does.
                None => waiting.leaders_seen = None,
            }
            waiting.follow = None;
            waiting.version = None;
            self.try_admission = true;
        }
    }

    /// Lets in what fits, best first, until nothing more does.
    async fn admit(&mut self, now: Instant) -> Result<(), Gone> {
        while !self.queue.is_empty() {
            if self.running.len() >= self.around.config.max_running && !self.yield_paused() {
                break;
            }
            self.refresh_matches();
            let config = Arc::clone(&self.around.config);
            let policy = **self.around.policy.load();
            let candidates = self.queue.candidates(config.max_overtake_tokens);
            let order =
                policy::order(policy, &candidates, config.max_overtake_tokens, config.look_ahead);
            if order.is_empty() {
                break;
            }
            let counts = self.memory.counts().await?;
            let capacity = Capacity { free: counts.free, evictable: counts.evictable };
            let mut outcome = Attempt::NoRoom;
            for index in order {
                outcome = self.try_start(index, capacity, now).await?;
                if outcome != Attempt::NoRoom {
                    break;
                }
            }
            if outcome == Attempt::NoRoom && !self.yield_paused() {
                break;
            }
        }
        Ok(())
    }

    fn refresh_matches(&mut self) {
        if !self.around.config.prefix_caching {
            return;
        }
        let reader = &self.reader;
        self.queue.refresh_matches(reader.tree_version(), QUERIES_A_ROUND, |sequence| {
            if sequence.bypasses_match() {
                0
            } else {
                reader.query_match_len(&sequence.namespace, &sequence.tokens)
            }
        });
    }

    /// Tries to let one waiting request run.
    async fn try_start(
        &mut self,
        index: usize,
        capacity: Capacity,
        now: Instant,
    ) -> Result<Attempt, Gone> {
        if self.follow_a_leader(index) {
            return Ok(Attempt::Follows);
        }
        let caching = self.around.config.prefix_caching;
        let block_size = self.around.spec.block_size;
        let promised = self.promised();
        let alone = self.running.is_empty();
        let hint = self.queue.entries()[index].matched;
        if !alone && !budget::fits(capacity, promised, self.demand(index, hint)) {
            return Ok(Attempt::NoRoom);
        }
        // The hint was good enough; from here on what counts is what is locked.
        let waiting = &mut self.queue.entries_mut()[index];
        let mut lease = None;
        let mut capacity = capacity;
        if caching {
            let tokens = std::mem::take(&mut waiting.sequence.tokens);
            let namespace = waiting.sequence.namespace.clone();
            let limit = if waiting.sequence.bypasses_match() { 0 } else { tokens.len() };
            let acquired = self.memory.acquire(&namespace, tokens, limit).await?;
            let waiting = &mut self.queue.entries_mut()[index];
            waiting.sequence.tokens = acquired.tokens;
            waiting.matched = acquired.lease.len();
            capacity.evictable = acquired.evictable;
            lease = Some(acquired.lease);
        }
        let matched = lease.as_ref().map_or(0, |lease| lease.len());
        let demand = self.demand(index, matched);
        if !alone && !budget::fits(capacity, promised, demand) {
            return Ok(Attempt::NoRoom);
        }
        let mut reserved = None;
        if demand.now > 0 {
            reserved = self.memory.reserve(demand.now).await?;
            if reserved.is_none() {
                return Ok(self.short_of_blocks(index, alone));
            }
        }
        debug_assert_eq!(
            matched / block_size + demand.now,
            blocks_for(block_size, self.queue.entries()[index].sequence.tokens.len())
        );
        let waiting = self.queue.remove(index);
        self.start(waiting, Held { lease, reserved, computed: matched, ..Held::default() }, now);
        Ok(Attempt::Started)
    }

    /// Blocks were counted as available and could not be had. While a step is in flight that
    /// is so until it ends; without one it is a bug, and the request is told rather than kept
    /// waiting for ever.
    fn short_of_blocks(&mut self, index: usize, alone: bool) -> Attempt {
        if !alone || self.in_flight.is_some() {
            self.try_admission = true;
            return Attempt::NoRoom;
        }
        let waiting = self.queue.remove(index);
        tracing::error!(sequence = waiting.sequence.id, "no blocks though nothing runs");
        let reason = "no blocks could be had though nothing runs".to_owned();
        let ending = Ending::Failed(CoreError::Interrupted { reason });
        end_early(waiting.sequence, ending, &self.around.gauges);
        Attempt::Ended
    }

    /// Ties a waiting request to a running one that is computing its prefix, if there is one.
    fn follow_a_leader(&mut self, index: usize) -> bool {
        let config = &self.around.config;
        let block_size = self.around.spec.block_size;
        let waiting = &self.queue.entries()[index];
        let seen = waiting.leaders_seen == Some(self.running_version);
        let patient = waiting.overtaken < config.max_overtake_tokens && !waiting.follows_no_more;
        if !config.prefix_caching || seen || !patient || waiting.sequence.bypasses_match() {
            return false;
        }
        let leaders = self.running.iter().map(|r| &r.sequence).filter(|leader| {
            let to_commit = leader.prompt_len / block_size * block_size;
            leader.held.committed() < to_commit
                && leader.end.is_none()
                && leader.namespace == waiting.sequence.namespace
        });
        let leaders = leaders.map(|leader| Leader {
            id: leader.id,
            tokens: &leader.tokens,
            committed: leader.held.committed(),
        });
        let follow =
            sharing::choose(&waiting.sequence.tokens, waiting.matched, block_size, leaders);
        let waiting = &mut self.queue.entries_mut()[index];
        waiting.leaders_seen = Some(self.running_version);
        waiting.follow = follow;
        if follow.is_some() {
            self.around.gauges.follows.add(1);
        }
        follow.is_some()
    }

    /// A waiting request's demand, if `matched` of its tokens are cached.
    fn demand(&self, index: usize, matched: usize) -> budget::Demand {
        let sequence = &self.queue.entries()[index].sequence;
        budget::demand(
            self.around.spec.block_size,
            sequence.tokens.len(),
            matched,
            self.expected_decode(sequence),
            self.around.config.conservative,
        )
    }

    fn expected_decode(&self, sequence: &Sequence) -> usize {
        if self.around.config.conservative {
            sequence.remaining()
        } else {
            self.forecast.remaining(sequence.max_tokens, sequence.generated())
        }
    }

    /// Blocks that running sequences are expected to take beyond those they hold.
    fn promised(&self) -> usize {
        let block_size = self.around.spec.block_size;
        let conservative = self.around.config.conservative;
        let promise = |running: &Running| {
            let sequence = &running.sequence;
            let tokens = sequence.tokens.len() + self.expected_decode(sequence).saturating_sub(1);
            let shared = sequence.held.committed() / block_size;
            let held = sequence.held.table.len() - if conservative { shared } else { 0 };
            blocks_for(block_size, tokens).saturating_sub(held)
        };
        self.running.iter().map(promise).sum()
    }

    /// Moves a request from waiting to running.
    fn start(&mut self, waiting: Waiting, held: Held, now: Instant) {
        let Waiting { mut sequence, arrival, permit, overtaken, .. } = waiting;
        let matched = held.computed;
        let cost = sequence.tokens.len().saturating_sub(matched).max(1);
        self.queue.note_overtaking(arrival, cost);
        sequence.held = held;
        sequence.held.rebuild_table();
        sequence.held.last_step = self.step;
        sequence.times.started.get_or_insert(now);
        if sequence.cached_tokens.is_none() {
            sequence.cached_tokens = Some(matched);
            let gauges = &self.around.gauges;
            gauges.started.add(1);
            gauges.hits.add(usize::from(matched > 0));
            gauges.prompt_tokens.add(sequence.prompt_len);
            gauges.cached_tokens.add(matched);
            sequence.tell(SequenceEvent::Started { cached_tokens: matched });
        }
        self.running.push(Running { sequence, arrival, overtaken });
        self.running_version += 1;
        self.try_admission = true;
        // Counted as running before it is no longer counted as waiting: whoever looks sees it.
        self.around.gauges.running.set(self.running.len());
        drop(permit);
    }

    /// Reserves the blocks that the next positions of running sequences need; where there are
    /// none, the youngest give theirs up.
    async fn grow(&mut self) -> Result<(), Gone> {
        let block_size = self.around.spec.block_size;
        let short = |running: &Running| {
            let sequence = &running.sequence;
            let needed = blocks_for(block_size, sequence.tokens.len());
            needed.saturating_sub(sequence.held.table.len())
        };
        let mut wanting: Vec<(u64, usize)> = Vec::new();
        for running in &self.running {
            if short(running) > 0 && !running.sequence.is_paused() {
                let sequence = &running.sequence;
                let last = sequence.tokens.len() + sequence.remaining().saturating_sub(1);
                let most = blocks_for(block_size, last).saturating_sub(sequence.held.table.len());
                wanting.push((sequence.id, most.min(BLOCKS_AHEAD).max(short(running))));
            }
        }
        if wanting.is_empty() {
            return Ok(());
        }
        let total: usize = wanting.iter().map(|(_, count)| count).sum();
        if let Some(mut blocks) = self.memory.reserve(total).await? {
            for (id, count) in wanting {
                let share = blocks.split(count);
                let running = self.running.iter_mut().find(|r| r.sequence.id == id);
                if let Some(running) = running {
                    running.sequence.held.add_reserved(share);
                }
            }
            return Ok(());
        }
        self.grow_one_by_one(wanting.into_iter().map(|(id, _)| id).collect()).await
    }

    /// There is not enough for all: the oldest first, a block each, at the youngest's expense.
    async fn grow_one_by_one(&mut self, mut wanting: Vec<u64>) -> Result<(), Gone> {
        let arrival = |running: &[Running], id: u64| {
            running.iter().find(|r| r.sequence.id == id).map(|r| r.arrival)
        };
        wanting.sort_by_key(|&id| arrival(&self.running, id));
        for id in wanting {
            while let Some(index) = self.running.iter().position(|r| r.sequence.id == id) {
                if let Some(block) = self.memory.reserve(1).await? {
                    self.running[index].sequence.held.add_reserved(block);
                    break;
                }
                let holders: Vec<Holder> = self
                    .running
                    .iter()
                    .map(|r| Holder { arrival: r.arrival, paused: r.sequence.is_paused() })
                    .collect();
                match preempt::victim(&holders) {
                    Some(victim) => self.preempt(victim),
                    None => break,
                }
            }
        }
        Ok(())
    }

    /// Takes a sequence's blocks away. Its full ones are in the tree, where they may last until
    /// it comes back.
    fn preempt(&mut self, index: usize) {
        let Running { mut sequence, arrival, overtaken } = self.running.remove(index);
        sequence.surrender();
        self.around.gauges.preemptions.add(1);
        self.forecast.preempted();
        let mut waiting = Waiting::new(sequence, arrival, None);
        waiting.overtaken = overtaken;
        self.queue.put_back(waiting);
        self.around.gauges.preempted.set(1);
        self.try_admission = true;
    }

    /// Takes the blocks of the youngest sequence whose reader is slow; false if there is none.
    fn yield_paused(&mut self) -> bool {
        let paused = |r: &Running| !r.sequence.in_step && r.sequence.is_paused();
        let youngest = (0..self.running.len())
            .filter(|&index| paused(&self.running[index]))
            .max_by_key(|&index| self.running[index].arrival);
        match youngest {
            Some(index) => {
                self.preempt(index);
                true
            }
            None => false,
        }
    }

    /// Makes the next step of what is running.
    fn plan(&mut self) -> Option<StepPlan> {
        let block_size = self.around.spec.block_size;
        let views: Vec<_> = self.running.iter().map(|r| r.sequence.view(block_size)).collect();
        let slices = schedule::plan(&views, self.around.config.max_batched_tokens);
        if slices.is_empty() {
            return None;
        }
        self.step += 1;
        let mut batch = StepBatch::default();
        let mut tasks = Vec::with_capacity(slices.len());
        let mut in_flight = Vec::with_capacity(slices.len());
        for slice in slices {
            let sequence = &mut self.running[slice.index].sequence;
            let end = slice.start + slice.count;
            batch.tokens.extend_from_slice(&sequence.tokens[slice.start..end]);
            batch.sequences.push(SequenceSlice {
                token_count: slice.count,
                start: slice.start,
                write_from: slice.write_from,
                block_table: sequence.held.table[..blocks_for(block_size, end)].to_vec(),
                logit_rows: slice.rows,
            });
            tasks.push(sequence.row_task(slice.start, slice.count));
            sequence.in_step = true;
            sequence.held.last_step = self.step;
            in_flight.push(InFlight {
                id: sequence.id,
                index: slice.index,
                start: slice.start,
                count: slice.count,
            });
        }
        self.in_flight = Some(in_flight);
        Some(StepPlan { batch, tasks, ticket: self.fence.begin() })
    }
}

/// What came of trying to let a request run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attempt {
    /// It runs.
    Started,
    /// It waits for a running one's blocks.
    Follows,
    /// It was ended.
    Ended,
    /// It does not fit now.
    NoRoom,
}

/// How a sequence whose time is up ends.
fn late(sequence: &Sequence, now: Instant) -> Ending {
    let elapsed = now.saturating_duration_since(sequence.times.submitted);
    let total = sequence.times.deadline.is_some_and(|deadline| deadline <= now);
    Ending::Failed(if total {
        CoreError::Timeout { elapsed }
    } else {
        CoreError::QueueTimeout { waited: elapsed }
    })
}

/// Ends a sequence before it is done; its leases go first.
fn end_early(mut sequence: Sequence, ending: Ending, gauges: &Gauges) {
    sequence.held = Held::default();
    match ending {
        Ending::Cancelled => gauges.cancelled.add(1),
        Ending::Failed(error) => {
            gauges.failed.add(1);
            // Nobody may be there to read it.
            let _ = sequence.events.send(Err(error));
        }
    }
}
