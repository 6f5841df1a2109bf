//! The scheduler on the real tree and pool, without actors, threads or clocks: random schedules
//! of arrivals, cancels, slow readers, failures and steps, with all books checked after each.

use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use futures::FutureExt;
use proptest::prelude::*;
use stolon_backend::Backend;
use stolon_backend::fake::{FakeBackend, FakeFault, FakeOptions, expected_next};

use crate::config::{AdmissionPolicy, EngineConfig};
use crate::context::{AdmissionContext, EmptyCache, Submission};
use crate::error::EngineError;
use crate::event::Event;
use crate::event_channel::EventReceiver;
use crate::execute;
use crate::memory::{ActorStopped, DirectMemory};
use crate::request::SequenceRequest;
use crate::scheduler::Scheduler;
use crate::step_plan::{StepDone, StepPlan};

mod depth;

const VOCAB_SIZE: usize = 16;

/// The result of a call to a scheduler whose memory answers at once.
fn ready<T>(call: impl Future<Output = Result<T, ActorStopped>>) -> T {
    call.now_or_never().expect("the memory answers at once").expect("no actor is involved")
}

/// A scheduler, a backend, and the callers' ends of all streams.
struct World {
    scheduler: Scheduler<DirectMemory>,
    context: AdmissionContext,
    backend: FakeBackend,
    in_flight: Option<StepPlan>,
    callers: Vec<Caller>,
    now: Instant,
}

/// One request from its caller's side.
struct Caller {
    prompt: Vec<u32>,
    max_tokens: usize,
    events: Option<EventReceiver>,
    tokens: Vec<u32>,
    /// Positions found cached when it began to run.
    cached: Option<usize>,
    /// It asked for its prompt's log-probabilities.
    logprobs: bool,
    /// Prompt log-probabilities it was told.
    told: usize,
    end: Option<Result<(), EngineError>>,
    slow: bool,
}

impl World {
    fn new(block_size: usize, block_count: usize, config: EngineConfig) -> World {
        let backend = FakeBackend::new(FakeOptions {
            vocab_size: VOCAB_SIZE,
            max_positions: 512,
            block_size,
            block_count,
            ..FakeOptions::default()
        });
        let context =
            AdmissionContext::new(config, backend.spec().clone()).expect("valid settings");
        let EmptyCache { writer, reader, allocator, fence } = context.empty_cache().expect("valid");
        let memory = DirectMemory { writer, allocator };
        let scheduler = Scheduler::new(context.clone(), memory, reader, fence);
        let now = Instant::now();
        World { scheduler, context, backend, in_flight: None, callers: Vec::new(), now }
    }

    fn submit(&mut self, prompt: Vec<u32>, max_tokens: usize, timeout: Option<Duration>) {
        self.submit_with(prompt, max_tokens, timeout, false);
    }

    fn submit_with(
        &mut self,
        prompt: Vec<u32>,
        max_tokens: usize,
        timeout: Option<Duration>,
        logprobs: bool,
    ) {
        let spec = &self.context.spec;
        let pool = spec.block_count * spec.block_size;
        let max_tokens = max_tokens.min(pool + 1 - prompt.len());
        let mut request = SequenceRequest::new(prompt.clone(), max_tokens);
        request.options.priority = prompt[0] as i32;
        request.options.prompt_logprobs = logprobs.then_some(1);
        request.options.timeout = timeout;
        let id = self.callers.len() as u64;
        let entered = self.context.submit(id, request, max_tokens, 0, self.now);
        let Ok(Submission { sequence, permit, events }) = entered else { return };
        self.scheduler.submit(sequence, permit);
        self.callers.push(Caller {
            prompt,
            max_tokens,
            events: Some(events),
            tokens: Vec::new(),
            cached: None,
            logprobs,
            told: 0,
            end: None,
            slow: false,
        });
        self.advance();
    }

    fn cancel(&mut self, caller: usize) {
        if let Some(events) = self.callers[caller].events.take() {
            drop(events);
            self.scheduler.cancel(caller as u64);
            self.advance();
        }
    }

    /// Computes the step in flight and takes its result; false when there is none.
    fn step(&mut self, fail: bool) -> bool {
        let Some(plan) = self.in_flight.take() else { return false };
        if fail {
            self.backend.handle().inject_next(FakeFault::Fail);
        }
        let done = execute(&mut self.backend, plan);
        assert!(fail || done.outcome.is_ok(), "{:?}", done.outcome);
        self.complete(done);
        true
    }

    fn complete(&mut self, done: StepDone) {
        self.now += Duration::from_millis(1);
        ready(self.scheduler.complete(done, self.now));
        self.advance();
    }

    fn advance(&mut self) {
        let plan = ready(self.scheduler.advance(self.now));
        if let Some(plan) = plan {
            assert!(self.in_flight.is_none(), "one step at a time");
            self.in_flight = Some(plan);
        }
        ready(self.scheduler.audit()).expect("clean books");
    }

    /// Lets callers read what is there.
    fn read(&mut self, also_slow: bool) {
        let mut resume = false;
        let mut context = Context::from_waker(Waker::noop());
        for caller in &mut self.callers {
            if caller.slow && !also_slow {
                continue;
            }
            let Some(events) = &mut caller.events else { continue };
            while let Poll::Ready(received) = events.poll(&mut context) {
                resume |= received.resume;
                match received.event {
                    Some(Ok(Event::Token(token))) => caller.tokens.extend(token.id),
                    Some(Ok(Event::Finished(_))) => caller.end = Some(Ok(())),
                    Some(Err(error)) => caller.end = Some(Err(error)),
                    Some(Ok(Event::PromptLogprobs(rows))) => {
                        assert!(caller.tokens.is_empty() && caller.told == 0, "told once, first");
                        caller.told = rows.len();
                    }
                    Some(Ok(Event::Started { cached_tokens, .. })) => {
                        caller.cached = Some(cached_tokens);
                    }
                    None => break,
                }
            }
        }
        if resume {
            self.scheduler.resume();
            self.advance();
        }
    }

    /// Runs everything to its end and checks every answer and every block.
    fn finish(&mut self) {
        for _ in 0..20_000 {
            self.read(true);
            if !self.step(false) && self.callers.iter().all(Caller::is_done) {
                break;
            }
        }
        for (index, caller) in self.callers.iter().enumerate() {
            assert!(caller.is_done(), "request {index} hangs");
            let mut tokens = caller.prompt.clone();
            for &token in &caller.tokens {
                assert_eq!(token, expected_next(&tokens, VOCAB_SIZE), "request {index}");
                tokens.push(token);
            }
            if let Some(Ok(())) = caller.end {
                assert_eq!(caller.tokens.len(), caller.max_tokens, "request {index}");
                let expected = if caller.logprobs { caller.prompt.len() } else { 0 };
                assert_eq!(caller.told, expected, "request {index}");
            }
        }
        self.advance();
        let audit = ready(self.scheduler.audit()).expect("clean books");
        assert_eq!((audit.running, audit.waiting, audit.blocks_reserved), (0, 0, 0));
        assert_eq!(audit.blocks_evictable, audit.blocks_committed);
        assert_eq!(self.context.limits.waiting(), 0, "every permit is back");
    }
}

impl Caller {
    fn is_done(&self) -> bool {
        self.events.is_none() || self.end.is_some()
    }
}

/// One thing that happens.
#[derive(Clone, Debug)]
enum Move {
    Submit { seed: u32, len: usize, max_tokens: usize, timeout: Option<u64>, logprobs: bool },
    Cancel(usize),
    Step { fail: bool },
    Read,
    Slow(usize, bool),
    Flush,
    Policy(AdmissionPolicy),
}

fn moves() -> impl Strategy<Value = Move> {
    prop_oneof![
        6 => (
            0u32..4,
            1usize..60,
            1usize..30,
            prop::option::weighted(0.1, 1u64..40),
            prop::bool::weighted(0.1),
        )
            .prop_map(|(seed, len, max_tokens, timeout, logprobs)| {
                Move::Submit { seed, len, max_tokens, timeout, logprobs }
            }),
        2 => (0usize..40).prop_map(Move::Cancel),
        20 => Just(Move::Step { fail: false }),
        1 => Just(Move::Step { fail: true }),
        8 => Just(Move::Read),
        2 => (0usize..40, any::<bool>()).prop_map(|(caller, slow)| Move::Slow(caller, slow)),
        1 => Just(Move::Flush),
        1 => prop::sample::select(vec![
            AdmissionPolicy::Fcfs,
            AdmissionPolicy::LongestPrefix,
            AdmissionPolicy::Cost,
            AdmissionPolicy::Priority,
        ])
        .prop_map(Move::Policy),
    ]
}

/// Prompts of few seeds, so that many share prefixes of any length.
fn prompt(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|n| (seed + n * n / 3 + n * seed) % VOCAB_SIZE as u32).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// Goal: whatever happens in whatever order, every request ends, every answer is the one
    /// of a lone request, no block is lost, and nothing is read that was not written.
    #[test]
    fn any_schedule_ends_well(
        moves in prop::collection::vec(moves(), 1..150),
        block_size in prop::sample::select(vec![1usize, 4, 16]),
        pool in 64usize..200,
        max_batched_tokens in 1usize..70,
        max_running in 1usize..6,
        prefix_caching in prop::bool::weighted(0.8),
        conservative in prop::bool::weighted(0.2),
        max_overtake_tokens in prop::sample::select(vec![0usize, 50, 10_000]),
        logit_cache_bytes in prop::sample::select(vec![0usize, 1000, 1 << 20]),
    ) {
        let mut world = World::new(block_size, pool.div_ceil(block_size), EngineConfig {
            max_batched_tokens,
            max_running,
            prefix_caching,
            conservative,
            max_overtake_tokens,
            logit_cache_bytes,
            max_queued_requests: 20,
            event_capacity: 8,
            look_ahead: 4,
            ..EngineConfig::default()
        });
        for step in moves {
            match step {
                Move::Submit { seed, len, max_tokens, timeout, logprobs } => {
                    let timeout = timeout.map(Duration::from_millis);
                    world.submit_with(prompt(seed, len), max_tokens, timeout, logprobs);
                }
                Move::Cancel(caller) if caller < world.callers.len() => world.cancel(caller),
                Move::Step { fail } => drop(world.step(fail)),
                Move::Read => world.read(false),
                Move::Slow(caller, slow) if caller < world.callers.len() => {
                    world.callers[caller].slow = slow;
                }
                Move::Flush => {
                    ready(world.scheduler.flush());
                    world.advance();
                }
                Move::Policy(policy) => world.context.policy.store(Arc::new(policy)),
                Move::Cancel(_) | Move::Slow(..) => {}
            }
        }
        world.finish();
    }
}

/// Goal: a follower goes on when its leader leaves between two steps: by its deadline, or
/// because its caller has gone.
#[test]
fn a_follower_outlives_its_leader() {
    for by_deadline in [true, false] {
        let config = EngineConfig { max_batched_tokens: 1, ..EngineConfig::default() };
        let mut world = World::new(1, 64, config);
        let timeout = by_deadline.then_some(Duration::from_millis(1));
        world.submit(prompt(2, 24), 1, timeout);
        world.submit(prompt(2, 4), 1, None);
        assert_eq!(world.context.gauges.follows.get(), 1);
        if !by_deadline {
            world.cancel(0);
        }
        world.finish();
    }
}

/// Goal: a prompt repeated to its last token gets its first token from the kept row, without a
/// step, whole blocks or not; when its block is evicted the row is gone, too.
#[test]
fn a_repeated_prompt_needs_no_step_for_its_first_token() {
    for len in [16, 18] {
        let mut world = warmed(16, EngineConfig::default(), &[prefix_hash(1, len)]);
        world.submit(prefix_hash(1, len), 1, None);
        world.read(true);
        assert_eq!(world.callers[1].tokens.len(), 1, "before any step");
        assert!(world.in_flight.is_none());
        world.submit(prefix_hash(1, len), 6, None);
        world.finish();
        assert_eq!(world.context.gauges.first_tokens_from_cache.get(), 2);
        // Fills the pool, so that all else is evicted.
        world.submit(prefix_hash(2, 60), 1, None);
        world.finish();
        world.submit(prefix_hash(1, len), 3, None);
        world.finish();
        assert_eq!(world.context.gauges.first_tokens_from_cache.get(), 2);
    }
}

/// Goal: prompts that are equal to the last token are computed once between them, a partial
/// block at their end included.
#[test]
fn equal_prompts_are_computed_once() {
    let config = EngineConfig { max_batched_tokens: 16, ..EngineConfig::default() };
    let mut world = World::new(4, 64, config);
    for _ in 0..4 {
        world.submit(prefix_hash(1, 38), 3, None);
    }
    world.finish();
    // Four decodes of the second and third token; those of the followers go with the two
    // positions after the last whole block.
    assert_eq!(world.context.gauges.computed_tokens.get(), 38 + 2 + 3 * (2 + 2));
    assert_eq!(world.context.gauges.first_tokens_from_cache.get(), 3);
}

/// Goal: blocks that followers will take once their leader is done are not given to others that
/// cost more.
#[test]
fn followers_blocks_are_not_given_away() {
    // 40 blocks: a prefix_hash of four takes 10 and 4 times 3.
    let config = EngineConfig { max_batched_tokens: 8, ..EngineConfig::default() };
    let mut world = World::new(4, 40, config);
    let of = |group, own: u32| [prefix_hash(group, 40), vec![own; 8]].concat();
    world.submit(of(1, 1), 4, None);
    world.submit(of(2, 1), 4, None);
    for own in 2..5 {
        world.submit(of(1, own), 4, None);
    }
    for own in 2..5 {
        world.submit(of(2, own), 4, None);
    }
    let mut most = 0;
    while world.step(false) {
        world.read(true);
        most = most.max(world.context.gauges.running.get());
    }
    world.finish();
    assert!(most >= 4, "{most} ran at once");
    // Each prefix_hash's beginning was computed once.
    assert_eq!(world.context.gauges.computed_tokens.get(), 2 * 40 + 8 * (8 + 3));
}

/// Goal: the conservative form admits by whole prompts, the default by what is not cached.
#[test]
fn admission_by_cost_runs_more_at_once_than_the_conservative_form() {
    let most_running = |conservative| {
        let config =
            EngineConfig { conservative, max_batched_tokens: 256, ..EngineConfig::default() };
        // 20 blocks of 16: the shared prompt takes 8 of them.
        let mut world = World::new(16, 20, config);
        world.submit(prompt(1, 128), 1, None);
        while world.step(false) {}
        for tail in 0..8 {
            let mut tokens = prompt(1, 128);
            tokens.extend([tail, tail, 3]);
            world.submit(tokens, 8, None);
        }
        let mut most = 0;
        while world.step(false) {
            world.read(true);
            most = most.max(world.context.gauges.running.get());
        }
        world.finish();
        most
    };
    // 138 positions each, 9 blocks: two of them fill 20.
    assert_eq!(most_running(true), 2);
    assert_eq!(most_running(false), 8);
}

/// A world of 4-position blocks whose cache holds `prompts`, computed one after the other.
fn warmed(block_count: usize, config: EngineConfig, prompts: &[Vec<u32>]) -> World {
    let mut world = World::new(4, block_count, config);
    for prompt in prompts {
        world.submit(prompt.clone(), 1, None);
        while world.step(false) {}
    }
    world
}

/// A prompt that starts with `prefix_hash` and shares nothing with another prefix_hash's.
fn prefix_hash(prefix_hash: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|n| if n == 0 { prefix_hash } else { (n * 5 + prefix_hash) % 16 }).collect()
}

/// Goal: the match of the request that is next but does not fit is not evicted by what is tried
/// past it.
#[test]
fn what_is_next_keeps_its_match_while_others_pass() {
    let config = EngineConfig {
        max_batched_tokens: 64,
        policy: AdmissionPolicy::Fcfs,
        ..EngineConfig::default()
    };
    // Of 32 blocks each prefix_hash's prefix takes 8, and the first request 11 of the others.
    let mut world = warmed(32, config, &[prefix_hash(1, 32), prefix_hash(2, 32)]);
    world.submit(prefix_hash(3, 40), 8, None);
    let mut head = prefix_hash(1, 32);
    head.extend([9; 84]);
    world.submit(head, 4, None);
    assert_eq!(world.scheduler.waiting().len(), 1, "it needs 21 more blocks");
    world.submit(prefix_hash(4, 60), 1, None);
    assert_eq!(world.scheduler.waiting().len(), 2, "its 15 blocks are there, but not to be had");
    world.submit(prefix_hash(5, 40), 1, None);
    // What is evicted beside a step can be had when that has ended.
    world.step(false);
    assert_eq!(world.scheduler.waiting().len(), 2, "10 blocks are free or another prefix_hash's");
    world.finish();
    assert_eq!(world.callers[3].cached, Some(32), "it found its prefix where it was");
}

/// Goal: a request whose match is not what it was does not pass others at the price it had.
#[test]
fn a_stale_match_does_not_break_the_bound() {
    let config = EngineConfig { max_overtake_tokens: 16, ..EngineConfig::default() };
    let mut world = World::new(4, 32, config);
    world.submit(prefix_hash(1, 16), 8, None);
    world.submit(prefix_hash(2, 110), 1, None);
    world.submit(prefix_hash(3, 65), 1, None);
    assert_eq!(world.scheduler.waiting().len(), 2, "one does not fit, one is too much to pass");
    let version = world.scheduler.waiting()[1].version;
    let waiting = world.scheduler.waiting_mut();
    (waiting[1].matched, waiting[1].version) = (64, version);
    world.scheduler.resume();
    world.advance();
    assert_eq!(world.scheduler.waiting().len(), 2, "it passed at a price it no longer has");
    world.finish();
    assert!(world.context.gauges.most_overtaken_tokens.get() <= 16);
}
