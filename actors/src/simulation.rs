//! The scheduler in virtual time: the very code that runs behind the admission actor, on a tree
//! and a pool of its own, with a function of the batch in place of the backend's time.
//!
//! 1. [`Simulation::submit`] lets a request in at the present moment, through the same checks
//!    and the same door as [`CoreHandle::submit`](crate::CoreHandle::submit);
//! 2. [`Simulation::wait_until`] moves the clock to the next arrival;
//! 3. [`Simulation::finish_step`] moves it to the end of the step in flight, and tells what
//!    happened by then. The caller decides which comes first.
//!
//! Nothing is computed: tokens are a hash of the request and their number, and log-probabilities
//! of prompts are not to be had.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use futures::executor::block_on;
use stolon_model::sampling::Sampled;
use stolon_model::{BackendSpec, StepBatch};

use crate::admission::scheduler::Scheduler;
use crate::config::CoreConfig;
use crate::error::CoreError;
use crate::executor::plan::{RowResult, StepDone, StepPlan};
use crate::gauges::CoreStats;
use crate::memory::direct::DirectMemory;
use crate::memory::{CoreAudit, Gone};
use crate::request::{SequenceEvent, SequenceRequest};
use crate::stream::EventReceiver;
use crate::surroundings::{EmptyCache, Entered, Surroundings};

/// A scheduler, its cache, and a clock that only its owner moves. See the module's documentation.
#[derive(Debug)]
pub struct Simulation<C> {
    around: Surroundings,
    scheduler: Scheduler<DirectMemory>,
    /// Time that a step takes.
    cost: C,
    /// What the virtual clock counts from; an `Instant` only because the scheduler speaks it.
    epoch: Instant,
    now: Duration,
    step: Option<Step>,
    streams: HashMap<u64, Stream>,
    next_id: u64,
}

/// One thing that happened to a request; requests are known by the ids that
/// [`Simulation::submit`] gave.
#[derive(Clone, Debug, PartialEq)]
pub struct Told {
    /// Which request.
    pub request: u64,
    /// What happened; the moment is [`Simulation::now`].
    pub event: Result<SequenceEvent, CoreError>,
}

/// The step in flight.
#[derive(Debug)]
struct Step {
    plan: StepPlan,
    began: Duration,
    end: Duration,
}

/// A request's end of its channel.
#[derive(Debug)]
struct Stream {
    events: EventReceiver,
    generated: u32,
}

impl<C: FnMut(&StepBatch) -> Duration> Simulation<C> {
    /// A scheduler with an empty cache of `spec.block_count` blocks, at time 0. `cost` says how
    /// long a step takes.
    ///
    /// # Errors
    /// [`CoreError::InvalidParameter`] for sizes or settings that cannot work.
    pub fn new(spec: BackendSpec, config: CoreConfig, cost: C) -> Result<Simulation<C>, CoreError> {
        let around = Surroundings::new(config, spec)?;
        let EmptyCache { writer, reader, blocks, fence } = around.empty_cache()?;
        let memory = DirectMemory { writer, blocks };
        Ok(Simulation {
            scheduler: Scheduler::new(around.clone(), memory, reader, fence),
            around,
            cost,
            epoch: Instant::now(),
            now: Duration::ZERO,
            step: None,
            streams: HashMap::new(),
            next_id: 0,
        })
    }

    /// The present moment.
    pub fn now(&self) -> Duration {
        self.now
    }

    /// Lets a request in now. Its prompt's log-probabilities are not computed if asked for.
    ///
    /// # Errors
    /// As [`CoreHandle::submit`](crate::CoreHandle::submit).
    pub fn submit(&mut self, mut request: SequenceRequest) -> Result<u64, CoreError> {
        request.prompt_logprobs = None;
        let max_tokens = self.around.check(&request)?;
        let matched = match self.around.config.prefix_caching {
            true => self.scheduler.query_match_len(&request.namespace, &request.tokens),
            false => 0,
        };
        let (id, now) = (self.next_id, self.instant());
        let entered = self.around.enter(id, request, max_tokens, matched, now)?;
        let Entered { sequence, permit, events } = entered;
        self.next_id += 1;
        self.around.gauges.requests.add(1);
        self.streams.insert(id, Stream { events, generated: 0 });
        self.scheduler.submit(sequence, permit);
        self.advance()?;
        Ok(id)
    }

    /// Drops a request's stream, which cancels it.
    ///
    /// # Errors
    /// [`CoreError::Interrupted`], which cannot happen here.
    pub fn cancel(&mut self, request: u64) -> Result<(), CoreError> {
        if self.streams.remove(&request).is_some() {
            self.scheduler.cancel(request);
            self.advance()?;
        }
        Ok(())
    }

    /// When the step in flight ends; `None` when nothing is being computed.
    pub fn step_end(&self) -> Option<Duration> {
        self.step.as_ref().map(|step| step.end)
    }

    /// Moves the clock, but not past the end of the step in flight.
    pub fn wait_until(&mut self, moment: Duration) {
        let latest = self.step_end().map_or(moment, |end| end.min(moment));
        self.now = self.now.max(latest);
    }

    /// Ends the step in flight, if there is one, and tells what has happened since last asked.
    ///
    /// # Errors
    /// [`CoreError::Interrupted`], which cannot happen here.
    pub fn finish_step(&mut self) -> Result<Vec<Told>, CoreError> {
        if let Some(Step { plan, began, end }) = self.step.take() {
            self.now = end;
            let vocab_size = self.around.spec.vocab_size as u64;
            let ids = self.scheduler.ids_in_flight();
            let mut results = Vec::with_capacity(ids.len());
            for (id, task) in ids.into_iter().zip(plan.tasks) {
                let mut result = RowResult::default();
                if task.sampler.is_some() {
                    let number = self.streams.get_mut(&id).map_or(0, Stream::next_number);
                    let token = (hash(id, number) % vocab_size) as u32;
                    result.sampled = Some(Sampled { token, logprob: None });
                }
                result.row = task.keep_row.then(|| vec![0.0; vocab_size as usize].into());
                result.sampler = task.sampler;
                results.push(result);
            }
            drop(plan.ticket);
            let done = StepDone { outcome: Ok(results), compute: end - began };
            let instant = self.instant();
            block_on(self.scheduler.complete(done, instant)).map_err(gone)?;
            self.advance()?;
        }
        let told = self.read();
        // What was read may have let a paused request go on.
        self.advance()?;
        Ok(told)
    }

    /// Counts and gauges; those of blocks are in [`Simulation::audit`].
    pub fn stats(&self) -> CoreStats {
        self.around.stats()
    }

    /// Checks all bookkeeping.
    ///
    /// # Errors
    /// [`CoreError::Audit`] with what is wrong.
    pub fn audit(&mut self) -> Result<CoreAudit, CoreError> {
        block_on(self.scheduler.audit()).map_err(gone)?.map_err(CoreError::Audit)
    }

    fn advance(&mut self) -> Result<(), CoreError> {
        let instant = self.instant();
        if let Some(plan) = block_on(self.scheduler.advance(instant)).map_err(gone)? {
            let end = self.now + (self.cost)(&plan.batch);
            self.step = Some(Step { plan, began: self.now, end });
        }
        Ok(())
    }

    fn read(&mut self) -> Vec<Told> {
        let mut told = Vec::new();
        let mut resume = false;
        let scheduler = &mut self.scheduler;
        self.streams.retain(|&request, stream| {
            while let Some((event, goes_on)) = stream.events.try_next() {
                resume |= goes_on;
                let last = matches!(event, Err(_) | Ok(SequenceEvent::Finished(_)));
                told.push(Told { request, event });
                if last {
                    return false;
                }
            }
            true
        });
        if resume {
            scheduler.resume();
        }
        told.sort_by_key(|told| told.request);
        told
    }

    fn instant(&self) -> Instant {
        self.epoch + self.now
    }
}

impl Stream {
    fn next_number(&mut self) -> u32 {
        self.generated += 1;
        self.generated
    }
}

/// The plain tree and pool behind a simulation are always there.
fn gone(gone: Gone) -> CoreError {
    CoreError::Interrupted { reason: gone.to_string() }
}

/// SplitMix64's finish (Steele, Lea and Flood 2014).
fn hash(request: u64, number: u32) -> u64 {
    let mut bits = (request << 32 | u64::from(number)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> BackendSpec {
        BackendSpec {
            vocab_size: 1000,
            max_positions: 4096,
            block_size: 16,
            block_count: 64,
            block_bytes: 1,
        }
    }

    /// Runs to the end; returns the times of first tokens by request, and the end.
    fn run<C: FnMut(&StepBatch) -> Duration>(
        simulation: &mut Simulation<C>,
    ) -> (HashMap<u64, Duration>, Duration) {
        let mut firsts = HashMap::new();
        while simulation.step_end().is_some() {
            for told in simulation.finish_step().expect("nothing is gone") {
                if let Ok(SequenceEvent::Token { .. }) = told.event {
                    firsts.entry(told.request).or_insert(simulation.now());
                }
            }
        }
        (firsts, simulation.now())
    }

    /// Goal: time passes by the cost function alone, and exactly as it says.
    #[test]
    fn time_is_the_sum_of_the_steps() {
        let cost = |batch: &StepBatch| Duration::from_millis(batch.tokens.len() as u64);
        let config = CoreConfig { max_batched_tokens: 64, ..CoreConfig::default() };
        let mut simulation = Simulation::new(spec(), config, cost).expect("valid");
        simulation.wait_until(Duration::from_millis(500));
        simulation.submit(SequenceRequest::new(vec![7; 100], 5)).expect("it fits");
        let (firsts, end) = run(&mut simulation);
        // 100 prompt tokens in two chunks; then four decodes of a token each.
        assert_eq!(firsts[&0], Duration::from_millis(600));
        assert_eq!(end, Duration::from_millis(604));
        let audit = simulation.audit().expect("clean books");
        assert_eq!((audit.running, audit.blocks_reserved), (0, 0));
    }

    /// Goal: what is shared is found, at the door and by the scheduler, as in the engine.
    #[test]
    fn a_second_request_finds_what_the_first_computed() {
        let cost = |batch: &StepBatch| Duration::from_micros(batch.tokens.len() as u64);
        let mut simulation = Simulation::new(spec(), CoreConfig::default(), cost).expect("valid");
        let first = simulation.submit(SequenceRequest::new(vec![7; 160], 1)).expect("it fits");
        let (_, end) = run(&mut simulation);
        assert_eq!((first, end), (0, Duration::from_micros(160)));
        let mut longer = vec![7; 160];
        longer.extend([8; 10]);
        simulation.submit(SequenceRequest::new(longer, 1)).expect("it fits");
        let (_, end) = run(&mut simulation);
        assert_eq!(end, Duration::from_micros(170));
        assert_eq!(simulation.stats().cached_tokens, 160);
    }

    /// Goal: a task that never yields to its runtime, and so runs out of what that lets it receive
    /// at a time, is told of every request all the same.
    #[tokio::test]
    async fn a_whole_run_fits_one_task() {
        let cost = |_: &StepBatch| Duration::from_micros(10);
        let mut simulation = Simulation::new(spec(), CoreConfig::default(), cost).expect("valid");
        for seed in 0..400 {
            simulation.submit(SequenceRequest::new(vec![seed; 20], 2)).expect("it fits");
        }
        let (firsts, _) = run(&mut simulation);
        assert_eq!(firsts.len(), 400);
    }
}
