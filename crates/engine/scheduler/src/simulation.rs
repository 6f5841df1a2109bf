//! The scheduler in virtual time: the same code that the engine runs, on its own prefix tree and
//! block pool. A function of the batch says how long a step takes.
//!
//! 1. [`Simulation::submit`] submits a request at the current virtual time, with the same
//!    validation and the same queue limits as the engine;
//! 2. [`Simulation::wait_until`] advances the clock to the next arrival;
//! 3. [`Simulation::finish_step`] advances it to the end of the step in flight and returns the
//!    events up to that time. The caller decides which of the two comes first.
//!
//! Nothing is computed: token ids are a hash of the request's id and the token's number, and prompt
//! log-probabilities are not available.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use futures::FutureExt;
use stolon_backend::{BackendSpec, Sampled, StepBatch};

use crate::config::EngineConfig;
use crate::context::{EmptyCache, EngineContext};
use crate::error::EngineError;
use crate::event::Event;
use crate::event_channel::EventReceiver;
use crate::memory::{ActorStopped, DirectMemory};
use crate::request::SequenceRequest;
use crate::scheduler::Scheduler;
use crate::stats::{AuditReport, EngineStats};
use crate::step_plan::{DraftDone, RowResult, StepDone, StepPlan};

/// A scheduler with a cache and a clock that only its owner advances. See the module documentation.
#[derive(Debug)]
pub struct Simulation<C> {
    context: EngineContext,
    scheduler: Scheduler<DirectMemory>,
    /// Returns the duration of a step.
    cost: C,
    /// The `Instant` at virtual time 0. The scheduler's interface uses `Instant`s.
    epoch: Instant,
    now: Duration,
    step: Option<Step>,
    streams: HashMap<u64, Stream>,
    next_id: u64,
}

/// An event of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct SimulationEvent {
    /// The id that [`Simulation::submit`] returned.
    pub request: u64,
    /// The event. It happened at [`Simulation::now`].
    pub event: Result<Event, EngineError>,
}

/// The step in flight.
#[derive(Debug)]
struct Step {
    plan: StepPlan,
    began: Duration,
    end: Duration,
}

/// The receiving end of a request's event channel.
#[derive(Debug)]
struct Stream {
    events: EventReceiver,
    /// Number of generated tokens.
    generated: u32,
}

impl<C: FnMut(&StepBatch) -> Duration> Simulation<C> {
    /// A scheduler with an empty cache of `spec.block_count` blocks, at time 0. `cost` returns the
    /// duration of a step.
    ///
    /// # Errors
    /// [`EngineError::InvalidParameter`] for impossible sizes or settings.
    pub fn new(
        spec: BackendSpec,
        config: EngineConfig,
        cost: C,
    ) -> Result<Simulation<C>, EngineError> {
        let context = EngineContext::new(config, spec)?;
        let EmptyCache { writer, reader, allocator, fence } = context.empty_cache()?;
        let memory = DirectMemory { writer, allocator };
        Ok(Simulation {
            scheduler: Scheduler::new(context.clone(), memory, reader, fence),
            context,
            cost,
            epoch: Instant::now(),
            now: Duration::ZERO,
            step: None,
            streams: HashMap::new(),
            next_id: 0,
        })
    }

    /// The current virtual time.
    pub fn now(&self) -> Duration {
        self.now
    }

    /// Submits a request now. Prompt log-probabilities are not computed, even if requested, and a
    /// request for an embedding generates tokens instead.
    ///
    /// # Errors
    /// Every way in which a request can be invalid, and [`EngineError::Overloaded`].
    pub fn submit(&mut self, mut request: SequenceRequest) -> Result<u64, EngineError> {
        request.options.prompt_logprobs = None;
        request.options.pooling = None;
        let matched = match self.context.config.prefix_caching {
            true => self.scheduler.query_resume(&request.namespace, &request.tokens).resume,
            false => 0,
        };
        let (id, now) = (self.next_id, self.instant());
        let (sequence, permit, events) = self.context.submit(id, request, 0, matched, now)?;
        self.next_id += 1;
        self.streams.insert(id, Stream { events, generated: 0 });
        self.scheduler.submit(sequence, permit);
        self.advance()?;
        Ok(id)
    }

    /// Number of leading tokens of a request's prompt that are cached now and would not be computed.
    pub fn cached(&self, request: &SequenceRequest) -> usize {
        self.scheduler.query_resume(&request.namespace, &request.tokens).resume
    }

    /// The expected time until the first token of a request that would be submitted now, and the
    /// part of it that the request would wait for others. `None` before anything was computed.
    pub fn first_token_estimate(&self, request: &SequenceRequest) -> Option<(Duration, Duration)> {
        let cached = self.cached(request);
        let uncached = request.tokens.len().saturating_sub(cached);
        self.context.first_token_estimate(cached, uncached, &request.options, self.instant())
    }

    /// Cancels a request by dropping its stream.
    ///
    /// # Errors
    /// None: an [`EngineError::Interrupted`] can only come from an actor.
    pub fn cancel(&mut self, request: u64) -> Result<(), EngineError> {
        if self.streams.remove(&request).is_some() {
            self.scheduler.cancel(request);
            self.advance()?;
        }
        Ok(())
    }

    /// When the step in flight ends; `None` if no step is in flight.
    pub fn step_end(&self) -> Option<Duration> {
        self.step.as_ref().map(|step| step.end)
    }

    /// Advances the clock, but not past the end of the step in flight.
    pub fn wait_until(&mut self, moment: Duration) {
        let latest = self.step_end().map_or(moment, |end| end.min(moment));
        self.now = self.now.max(latest);
    }

    /// Ends the step in flight, if there is one, and returns all events since the last call.
    ///
    /// # Errors
    /// None: an [`EngineError::Interrupted`] can only come from an actor.
    pub fn finish_step(&mut self) -> Result<Vec<SimulationEvent>, EngineError> {
        if let Some(Step { plan, began, end }) = self.step.take() {
            self.now = end;
            let vocab_size = self.context.spec.vocab_size as u64;
            let ids = self.scheduler.ids_in_flight();
            let mut results = Vec::with_capacity(ids.len());
            for (id, task) in ids.into_iter().zip(plan.tasks) {
                let mut result = RowResult::default();
                if task.sampler.is_some() {
                    let mut proposals = task.proposals.iter();
                    loop {
                        let number = self.streams.get_mut(&id).map_or(0, Stream::next_number);
                        let token = simulated_token(id, number, vocab_size);
                        result.sampled.push(Sampled { token, logprob: None });
                        if proposals.next() != Some(&token) {
                            break;
                        }
                    }
                }
                result.logits = task.return_logits.then(|| vec![0.0; vocab_size as usize].into());
                result.sampler = task.sampler;
                results.push(result);
            }
            drop(plan.ticket);
            let done = StepDone {
                draft: DraftDone::default(),
                encoded: None,
                encoding: Duration::ZERO,
                saved: Vec::new(),
                // Copying stored KV into the pool takes no time next to computing.
                loaded: vec![true; plan.loads.len()],
                outcome: Ok(results),
                compute: end - began,
            };
            let instant = self.instant();
            ready(self.scheduler.complete(done, instant))?;
            self.advance()?;
        }
        let events = self.read();
        // Reading may have resumed a paused request.
        self.advance()?;
        Ok(events)
    }

    /// Counters and gauges. The gauges of blocks are 0; see [`Simulation::audit`].
    pub fn stats(&self) -> EngineStats {
        self.context.stats()
    }

    /// Verifies the block accounting.
    ///
    /// # Errors
    /// [`EngineError::Audit`] describes the first inconsistency.
    pub fn audit(&mut self) -> Result<AuditReport, EngineError> {
        ready(self.scheduler.audit())?.map_err(EngineError::Audit)
    }

    fn advance(&mut self) -> Result<(), EngineError> {
        let instant = self.instant();
        if let Some(plan) = ready(self.scheduler.advance(instant))? {
            let end = self.now + (self.cost)(&plan.batch);
            self.step = Some(Step { plan, began: self.now, end });
        }
        Ok(())
    }

    fn read(&mut self) -> Vec<SimulationEvent> {
        let mut events = Vec::new();
        let mut resume = false;
        let scheduler = &mut self.scheduler;
        self.streams.retain(|&request, stream| {
            while let Some(received) = stream.events.try_next() {
                resume |= received.resume;
                let Some(event) = received.event else { return false };
                let last = matches!(event, Err(_) | Ok(Event::Finished(_)));
                events.push(SimulationEvent { request, event });
                if last {
                    return false;
                }
            }
            true
        });
        if resume {
            scheduler.resume();
        }
        events.sort_by_key(|event| event.request);
        events
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

/// The result of a call to the scheduler, which never waits: its memory answers at once.
fn ready<T>(call: impl Future<Output = Result<T, ActorStopped>>) -> Result<T, EngineError> {
    let answer = call.now_or_never().unwrap_or(Err(ActorStopped("the simulated memory")));
    answer.map_err(|stopped| EngineError::Interrupted { reason: stopped.to_string() })
}

/// The token of a request with this number, counted from 1.
pub(crate) fn simulated_token(request: u64, number: u32, vocab_size: u64) -> u32 {
    (hash(request, number) % vocab_size) as u32
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
            ..BackendSpec::default()
        }
    }

    /// Runs to the end. Returns the time of the first token of each request, and the time of the
    /// end.
    fn run<C: FnMut(&StepBatch) -> Duration>(
        simulation: &mut Simulation<C>,
    ) -> (HashMap<u64, Duration>, Duration) {
        let mut firsts = HashMap::new();
        while simulation.step_end().is_some() {
            for happened in simulation.finish_step().expect("no actor is involved") {
                if let Ok(Event::Token { .. }) = happened.event {
                    firsts.entry(happened.request).or_insert(simulation.now());
                }
            }
        }
        (firsts, simulation.now())
    }

    /// Goal: virtual time advances by exactly the cost of each step.
    #[test]
    fn time_is_the_sum_of_the_steps() {
        let cost = |batch: &StepBatch| Duration::from_millis(batch.tokens.len() as u64);
        let config = EngineConfig { max_batched_tokens: 64, ..EngineConfig::default() };
        let mut simulation = Simulation::new(spec(), config, cost).expect("valid");
        simulation.wait_until(Duration::from_millis(500));
        simulation.submit(SequenceRequest::new(vec![7; 100], 5)).expect("the request is accepted");
        let (firsts, end) = run(&mut simulation);
        // 100 prompt tokens in two chunks, then four decodes of one token each.
        assert_eq!(firsts[&0], Duration::from_millis(600));
        assert_eq!(end, Duration::from_millis(604));
        let audit = simulation.audit().expect("a consistent accounting");
        assert_eq!((audit.running, audit.blocks_reserved), (0, 0));
    }

    /// Goal: a request computes only what an earlier one with the same prefix has not computed.
    #[test]
    fn a_second_request_finds_what_the_first_computed() {
        let cost = |batch: &StepBatch| Duration::from_micros(batch.tokens.len() as u64);
        let mut simulation = Simulation::new(spec(), EngineConfig::default(), cost).expect("valid");
        let first = simulation
            .submit(SequenceRequest::new(vec![7; 160], 1))
            .expect("the request is accepted");
        let (_, end) = run(&mut simulation);
        assert_eq!((first, end), (0, Duration::from_micros(160)));
        let mut longer = vec![7; 160];
        longer.extend([8; 10]);
        simulation.submit(SequenceRequest::new(longer, 1)).expect("the request is accepted");
        let (_, end) = run(&mut simulation);
        assert_eq!(end, Duration::from_micros(170));
        assert_eq!(simulation.stats().cached_tokens, 160);
    }

    /// Goal: a caller that submits all requests before it reads any event loses no event.
    #[test]
    fn no_event_is_lost_if_all_requests_are_submitted_first() {
        let cost = |_: &StepBatch| Duration::from_micros(10);
        let mut simulation = Simulation::new(spec(), EngineConfig::default(), cost).expect("valid");
        for seed in 0..400 {
            simulation
                .submit(SequenceRequest::new(vec![seed; 20], 2))
                .expect("the request is accepted");
        }
        let (firsts, _) = run(&mut simulation);
        assert_eq!(firsts.len(), 400);
    }
}
