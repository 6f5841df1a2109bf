//! The scheduler on the real tree and pool, without actors, threads or clocks. Random schedules of
//! submissions, cancellations, slow consumers, failures and steps, with an audit after each.

use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use futures::FutureExt;
use proptest::prelude::*;
use stolon_backend::fake::{
    FakeBackend, FakeFault, FakeHandle, FakeOptions, expected_hidden, expected_next,
};
use stolon_backend::{Backend, BackendSpec, Pooler, Pooling};
use stolon_kvcache::{BlockPool, Namespace};

use crate::config::{AdmissionPolicy, EngineConfig};
use crate::context::{EmptyCache, EngineContext};
use crate::error::EngineError;
use crate::event::Event;
use crate::event_channel::EventReceiver;
use crate::execute;
use crate::memory::{ActorStopped, DirectMemory};
use crate::quota::Quota;
use crate::request::{RequestOptions, SequenceRequest};
use crate::scheduler::Scheduler;
use crate::session::{NewSession, SessionId};
use crate::step_plan::{StepDone, StepPlan};
use crate::transfer::{RepeatedLookup, StoredKv};

mod background;
mod depth;
mod drafting;
mod estimates;
mod fairness;
mod images;
mod lookups;
mod priorities;
mod processors;
mod quota;
mod speculation;
mod states;
mod transfers;
mod unsteady;

use images::Part;
pub(crate) use images::image_input;
use speculation::Guess;
use unsteady::Unsteady;

const VOCAB_SIZE: usize = 16;
const HIDDEN_SIZE: usize = 3;

/// The result of a call to a scheduler whose memory answers at once.
fn ready<T>(call: impl Future<Output = Result<T, ActorStopped>>) -> T {
    call.now_or_never().expect("the memory answers at once").expect("no actor is involved")
}

/// A scheduler, a backend, and the callers' ends of all event channels.
struct Harness {
    scheduler: Scheduler<Unsteady>,
    context: EngineContext,
    backend: Box<dyn Backend>,
    /// Injects faults into the model, and not into a draft model.
    fake: FakeHandle,
    in_flight: Option<StepPlan>,
    callers: Vec<Caller>,
    /// The callers' ends of the prompts that are computed in the background.
    background: Vec<EventReceiver>,
    saves: transfers::Saves,
    /// Copies of evicted blocks that were not checked yet.
    evicted: transfers::Saves,
    /// Repeated look-ups that were not answered yet.
    lookups: Vec<RepeatedLookup>,
    now: Instant,
    /// Requests are of several tenants, by their first token.
    tenants: bool,
    /// Requests have priorities, by their first token.
    priorities: bool,
    /// The last turn of each session that was opened: the index of its caller.
    sessions: [Option<usize>; 2],
}

/// One request, from the point of view of its caller.
struct Caller {
    prompt: Vec<u32>,
    max_tokens: usize,
    events: Option<EventReceiver>,
    tokens: Vec<u32>,
    /// Number of prompt tokens found in the cache when it started to run; `None` before that.
    cached: Option<usize>,
    /// It requested prompt log-probabilities.
    logprobs: bool,
    /// It requested an embedding.
    pooling: Option<Pooling>,
    /// The embedding that it received.
    embedding: Vec<f32>,
    /// Number of prompt log-probabilities it received.
    prompt_logprobs: usize,
    /// How it ended.
    end: Option<Result<(), EngineError>>,
    /// It does not read its events.
    slow: bool,
}

impl Harness {
    fn new(block_size: usize, block_count: usize, config: EngineConfig) -> Harness {
        Harness::with_states(block_size, block_count, None, config)
    }

    /// With `checkpoint_blocks`, the model has a recurrent state, and this is the size of a
    /// checkpoint in blocks.
    fn with_states(
        block_size: usize,
        block_count: usize,
        checkpoint_blocks: Option<usize>,
        config: EngineConfig,
    ) -> Harness {
        Harness::guessing(block_size, block_count, checkpoint_blocks, Guess::Nothing, config)
    }

    /// With the draft model of `guess`, if it has one.
    fn guessing(
        block_size: usize,
        block_count: usize,
        checkpoint_blocks: Option<usize>,
        guess: Guess,
        config: EngineConfig,
    ) -> Harness {
        let (saves, evicted) = (transfers::Saves::default(), transfers::Saves::default());
        let sink = transfers::EvictedSink(Arc::clone(&evicted));
        let config = EngineConfig {
            kv_sink: Some(Arc::new(sink)),
            kv_source: Some(Arc::new(lookups::NoSource)),
            ..config
        };
        let options = FakeOptions {
            vocab_size: VOCAB_SIZE,
            max_positions: 4096,
            block_size,
            block_count,
            hidden_size: Some(HIDDEN_SIZE),
            draws: true,
            state: checkpoint_blocks.map(|blocks| (blocks, config.max_running)),
            encode_calls: 3,
            ..FakeOptions::default()
        };
        let backend = FakeBackend::new(options.clone());
        let fake = backend.handle();
        let backend = guess.with_draft_model(backend, options);
        let context = EngineContext::new(config, backend.spec().clone()).expect("valid settings");
        let EmptyCache { writer, reader, allocator, fence } = context.empty_cache().expect("valid");
        let memory = Unsteady::new(DirectMemory { writer, allocator });
        let scheduler = Scheduler::new(context.clone(), memory, reader, fence);
        Harness {
            scheduler,
            context,
            backend,
            fake,
            in_flight: None,
            callers: Vec::new(),
            background: Vec::new(),
            saves,
            evicted,
            lookups: Vec::new(),
            now: Instant::now(),
            tenants: false,
            priorities: false,
            sessions: [None; 2],
        }
    }

    fn submit(&mut self, prompt: Vec<u32>, max_tokens: usize, timeout: Option<Duration>) {
        self.submit_request(prompt, max_tokens, |request| request.options.timeout = timeout);
    }

    fn submit_stored(&mut self, prompt: Vec<u32>, max_tokens: usize, stored: StoredKv) {
        self.submit_request(prompt, max_tokens, |request| request.stored = Some(stored));
    }

    /// Stored KV of a prompt from `first_block` on, as the model needs it.
    fn stored(&self, prompt: &[u32], first_block: usize) -> Option<StoredKv> {
        let spec = &self.context.spec;
        let sizes = (spec.block_size, spec.block_bytes);
        match spec.checkpoint_blocks() {
            0 => Some(transfers::stored_kv_of_size(prompt, sizes, first_block)),
            count => transfers::stored_state_of_size(prompt, sizes, first_block, count),
        }
    }

    /// A request for an embedding, with stored KV if there is any.
    fn submit_embedding(
        &mut self,
        prompt: Vec<u32>,
        pooling: Pooling,
        timeout: Option<Duration>,
        stored: Option<StoredKv>,
    ) {
        let submit = |request: &mut SequenceRequest| {
            request.options.pooling = Some(pooling);
            request.options.timeout = timeout;
            request.stored = stored;
        };
        self.submit_request(prompt, 1, submit);
    }

    fn submit_request(
        &mut self,
        prompt: Vec<u32>,
        max_tokens: usize,
        set: impl FnOnce(&mut SequenceRequest),
    ) {
        let spec = &self.context.spec;
        let pool = spec.block_count * spec.block_size;
        let max_tokens = max_tokens.min(pool + 1 - prompt.len());
        let mut request = SequenceRequest::new(prompt.clone(), max_tokens);
        if self.priorities {
            request.options.priority = prompt[0] as i32;
        }
        if self.tenants {
            request.options.tenant = Some((prompt[0] % 3).to_string().into());
        }
        set(&mut request);
        let RequestOptions { prompt_logprobs, pooling, .. } = request.options;
        let id = self.callers.len() as u64;
        let found = match self.context.config.prefix_caching {
            true => self.scheduler.query_resume(&request.namespace, &request.tokens).resume,
            false => 0,
        };
        let entered = self.context.submit(id, request, 0, found, self.now);
        let (sequence, permit, events) = match entered {
            Ok(entered) => entered,
            Err(error) => {
                use EngineError::{Overloaded, QuotaExceeded};
                assert!(matches!(error, Overloaded { .. } | QuotaExceeded { .. }), "{error}");
                return;
            }
        };
        self.scheduler.submit(sequence, permit);
        self.callers.push(Caller {
            prompt,
            max_tokens,
            events: Some(events),
            tokens: Vec::new(),
            cached: None,
            logprobs: prompt_logprobs.is_some(),
            pooling,
            embedding: Vec::new(),
            prompt_logprobs: 0,
            end: None,
            slow: false,
        });
        self.advance();
    }

    /// A turn of a session, which adds `more` to the turn before if that has ended well. Does nothing
    /// while that turn runs.
    fn submit_turn(&mut self, session: usize, more: Vec<u32>, max_tokens: usize) {
        let (id, namespace) = (SessionId::new(session.to_string()), Namespace::default());
        let before = self.sessions[session].map(|caller| &self.callers[caller]);
        let before = before.filter(|caller| caller.end == Some(Ok(())));
        let prompt = match before.map(|caller| [&caller.prompt[..], &caller.tokens, &more].concat())
        {
            Some(prompt) if prompt.len() <= 60 => prompt,
            _ => more,
        };
        let new = NewSession { id: id.clone(), namespace, ttl: None };
        // It may be open already, and may have been closed by a flush.
        let _ = self.context.sessions.open(new, self.now);
        let turn = self.context.sessions.begin_turn(&id, &namespace, self.now);
        let Ok(turn) = turn else { return };
        let caller = self.callers.len();
        self.submit_request(prompt, max_tokens, |request| request.turn = Some(turn));
        self.sessions[session] = (self.callers.len() > caller).then_some(caller);
    }

    fn cancel(&mut self, caller: usize) {
        if let Some(events) = self.callers[caller].events.take() {
            drop(events);
            self.scheduler.cancel(caller as u64);
            self.advance();
        }
    }

    /// Executes the step in flight and applies its results. Returns false if there is none.
    fn step(&mut self, fail: bool) -> bool {
        let Some(plan) = self.in_flight.take() else { return false };
        // A step that has only copies, or whose loads fail, is no step of the backend.
        if fail && !plan.batch.sequences.is_empty() && plan.loads.is_empty() {
            self.fake.inject_next(FakeFault::Fail);
        }
        let done = execute(&mut *self.backend, plan);
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
            self.check_background(&plan);
            self.in_flight = Some(plan);
        }
        self.lookups.extend(self.scheduler.take_lookups());
        ready(self.scheduler.audit()).expect("a consistent accounting");
    }

    /// Lets callers read all available events.
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
                    Some(Ok(Event::Embedding(values))) => {
                        assert!(caller.embedding.is_empty(), "it comes once");
                        caller.embedding = values;
                    }
                    Some(Ok(Event::Finished(_))) => caller.end = Some(Ok(())),
                    Some(Err(error)) => caller.end = Some(Err(error)),
                    Some(Ok(Event::PromptLogprobs(rows))) => {
                        assert!(
                            caller.tokens.is_empty() && caller.prompt_logprobs == 0,
                            "they come once, before the tokens"
                        );
                        caller.prompt_logprobs = rows.len();
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

    /// Runs all requests to their ends and checks every answer and the block accounting.
    fn finish(&mut self) {
        for _ in 0..20_000 {
            self.read(true);
            while !self.lookups.is_empty() {
                self.answer(0, Some(0));
            }
            if !self.step(false) && self.callers.iter().all(Caller::is_done) {
                break;
            }
        }
        for (index, caller) in self.callers.iter().enumerate() {
            assert!(caller.is_done(), "request {index} hangs");
            let is_defect = matches!(caller.end, Some(Err(EngineError::Audit(_))));
            assert!(!is_defect, "request {index}: {:?}", caller.end);
            let mut tokens = caller.prompt.clone();
            for &token in &caller.tokens {
                assert_eq!(token, expected_next(&tokens, VOCAB_SIZE), "request {index}");
                tokens.push(token);
            }
            if caller.end == Some(Ok(()))
                && let Some(pooling) = caller.pooling
            {
                assert_eq!(caller.embedding, expected_embedding(&caller.prompt, pooling));
                assert!(caller.tokens.is_empty(), "an embedding generates nothing");
            } else if let Some(Ok(())) = caller.end {
                assert_eq!(caller.tokens.len(), caller.max_tokens, "request {index}");
                let expected = if caller.logprobs { caller.prompt.len() } else { 0 };
                assert_eq!(caller.prompt_logprobs, expected, "request {index}");
            }
        }
        self.context.sessions.release_all();
        self.advance();
        assert!(self.scheduler.all_slots_are_free());
        let audit = ready(self.scheduler.audit()).expect("a consistent accounting");
        assert_eq!((audit.running, audit.waiting, audit.blocks_reserved), (0, 0, 0));
        assert_eq!(audit.blocks_evictable, audit.blocks_committed);
        assert_eq!(self.context.limits.waiting(), 0, "every permit was returned");
        self.check_saves();
    }
}

impl Caller {
    fn is_done(&self) -> bool {
        self.events.is_none() || self.end.is_some()
    }
}

/// One step of a random schedule.
#[derive(Clone, Debug)]
enum Action {
    Submit {
        seed: u32,
        len: usize,
        max_tokens: usize,
        timeout: Option<u64>,
        logprobs: bool,
        /// Whether it skips reading the cache, and whether writing it.
        skips: [bool; 2],
        /// Index of the quota that it is charged to.
        quota: Option<usize>,
    },
    /// A request for an embedding, with stored KV if it has a first block.
    Embed {
        seed: u32,
        len: usize,
        mean: bool,
        timeout: Option<u64>,
        first_block: Option<usize>,
    },
    /// A request with stored KV of its blocks from the given one on, as far as the prompt has them.
    SubmitStored {
        seed: u32,
        len: usize,
        max_tokens: usize,
        first_block: usize,
    },
    /// A turn of a session that adds a prompt to the conversation.
    Turn {
        session: usize,
        seed: u32,
        len: usize,
        max_tokens: usize,
    },
    /// A request with an image between two texts. The first text may be empty.
    SubmitImage {
        seed: u32,
        before: usize,
        image: Part,
        after: usize,
        max_tokens: usize,
        timeout: Option<u64>,
    },
    Save {
        seed: u32,
        len: usize,
        first_block: usize,
    },
    FailCopies(usize),
    /// A prompt to compute while there is no request.
    Background {
        seed: u32,
        len: usize,
    },
    /// Answers a repeated look-up with stored KV from a block on, or with nothing.
    Answer(usize, Option<usize>),
    Cancel(usize),
    Step {
        fail: bool,
    },
    Read,
    Slow(usize, bool),
    Flush,
    Policy(AdmissionPolicy),
}

fn actions() -> impl Strategy<Value = Action> {
    prop_oneof![
        6 => (
            0u32..4,
            1usize..60,
            1usize..30,
            prop::option::weighted(0.1, 1u64..40),
            prop::bool::weighted(0.1),
            [prop::bool::weighted(0.1), prop::bool::weighted(0.2)],
            prop::option::weighted(0.5, 0usize..2),
        )
            .prop_map(|(seed, len, max_tokens, timeout, logprobs, skips, quota)| {
                Action::Submit { seed, len, max_tokens, timeout, logprobs, skips, quota }
            }),
        2 => (0u32..4, 1usize..60, 1usize..30, 0usize..16).prop_map(
            |(seed, len, max_tokens, first_block)| {
                Action::SubmitStored { seed, len, max_tokens, first_block }
            }
        ),
        3 => (
            0u32..4,
            1usize..60,
            any::<bool>(),
            prop::option::weighted(0.1, 1u64..40),
            prop::option::weighted(0.2, 0usize..4),
        )
            .prop_map(|(seed, len, mean, timeout, first_block)| {
                Action::Embed { seed, len, mean, timeout, first_block }
            }),
        2 => (0usize..2, 0u32..4, 1usize..30, 1usize..20).prop_map(
            |(session, seed, len, max_tokens)| Action::Turn { session, seed, len, max_tokens }
        ),
        3 => (
            0u32..3,
            0usize..16,
            images::image(),
            1usize..16,
            1usize..20,
            prop::option::weighted(0.1, 1u64..40),
        )
            .prop_map(|(seed, before, image, after, max_tokens, timeout)| {
                Action::SubmitImage { seed, before, image, after, max_tokens, timeout }
            }),
        2 => (0u32..4, 1usize..60, 0usize..3)
            .prop_map(|(seed, len, first_block)| Action::Save { seed, len, first_block }),
        1 => (1usize..3).prop_map(Action::FailCopies),
        3 => (0u32..4, 1usize..60).prop_map(|(seed, len)| Action::Background { seed, len }),
        3 => (0usize..3, prop::option::weighted(0.8, 0usize..4))
            .prop_map(|(index, first_block)| Action::Answer(index, first_block)),
        2 => (0usize..40).prop_map(Action::Cancel),
        20 => Just(Action::Step { fail: false }),
        1 => Just(Action::Step { fail: true }),
        8 => Just(Action::Read),
        2 => (0usize..40, any::<bool>()).prop_map(|(caller, slow)| Action::Slow(caller, slow)),
        1 => Just(Action::Flush),
        1 => prop::sample::select(vec![
            AdmissionPolicy::Fcfs,
            AdmissionPolicy::LongestPrefix,
            AdmissionPolicy::Cost,
        ])
        .prop_map(Action::Policy),
    ]
}

/// A prompt. With only a few seeds, many prompts share prefixes of any length.
fn prompt(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|n| (seed + n * n / 3 + n * seed) % VOCAB_SIZE as u32).collect()
}

/// The embedding of a prompt, from hidden states that are computed directly from its tokens.
fn expected_embedding(prompt: &[u32], pooling: Pooling) -> Vec<f32> {
    let mut pooler = Pooler::new(pooling);
    for end in 1..=prompt.len() {
        pooler.push(&expected_hidden(&prompt[..end], HIDDEN_SIZE), HIDDEN_SIZE);
    }
    pooler.finish()
}

/// Goal: a backend with more blocks than the prefix cache supports is refused, with the setting at
/// fault.
#[test]
fn a_backend_with_too_many_blocks_is_refused() {
    let spec = FakeBackend::new(FakeOptions::default()).spec().clone();
    for block_count in [(1 << 28) + 1, usize::MAX] {
        let spec = BackendSpec { block_count, ..spec.clone() };
        let error = EngineContext::new(EngineConfig::default(), spec).expect_err("too many");
        assert!(error.to_string().contains("num_blocks"), "{error}");
    }
}

/// Goal: a step whose ticket is not dropped is named by the audit, because its blocks are lost.
#[test]
fn an_audit_finds_a_forgotten_ticket() {
    let mut harness = Harness::new(4, 16, EngineConfig::default());
    harness.submit(prompt(1, 10), 1, None);
    let mut plan = harness.in_flight.take().expect("a step");
    let of_another_pool = BlockPool::new(1).expect("a valid count").1.begin();
    std::mem::forget(std::mem::replace(&mut plan.ticket, of_another_pool));
    let done = execute(&mut *harness.backend, plan);
    ready(harness.scheduler.complete(done, harness.now));
    let error = ready(harness.scheduler.audit()).expect_err("a ticket is missing");
    assert!(error.contains("the tickets of 1 were not dropped"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// Goal: under any schedule every request ends, every answer is the same as if the request ran
    /// alone, no block is lost, and no position is read that was not written, whatever is removed
    /// from the cache between any two messages.
    #[test]
    fn any_schedule_completes_with_correct_answers(
        actions in prop::collection::vec(actions(), 1..150),
        block_size in prop::sample::select(vec![1usize, 4, 16]),
        pool in 64usize..200,
        max_batched_tokens in 1usize..70,
        max_running in 1usize..6,
        prefix_caching in prop::bool::weighted(0.8),
        conservative in prop::bool::weighted(0.2),
        max_overtake_tokens in prop::sample::select(vec![0usize, 50, 10_000]),
        logit_cache_bytes in prop::sample::select(vec![0usize, 1000, 1 << 20]),
        (tenants, priorities, guess) in (any::<bool>(), any::<bool>(), speculation::guess()),
        checkpoint_blocks in prop::option::of(1usize..12),
        removals in prop::sample::select(vec![0.0, 0.02, 0.2]),
    ) {
        let block_count = pool.div_ceil(block_size);
        let mut harness = Harness::guessing(block_size, block_count, checkpoint_blocks, guess, EngineConfig {
            max_batched_tokens,
            max_running,
            prefix_caching,
            conservative,
            max_overtake_tokens,
            logit_cache_bytes,
            max_queued_requests: 20,
            event_capacity: 8,
            look_ahead: 4,
            speculation: guess.speculation(),
            ..EngineConfig::default()
        });
        (harness.tenants, harness.priorities) = (tenants, priorities);
        harness.scheduler.memory_mut().rate = removals;
        let quotas = [Quota::new(40, Some(60)), Quota::new(100, None)];
        for action in actions {
            match action {
                Action::Submit { seed, len, max_tokens, timeout, logprobs, skips, quota } => {
                    harness.submit_request(prompt(seed, len), max_tokens, |request| {
                        let options = &mut request.options;
                        options.timeout = timeout.map(Duration::from_millis);
                        options.prompt_logprobs = logprobs.then_some(1);
                        [options.skip_reading_prefix_cache, options.skip_writing_prefix_cache] =
                            skips;
                        options.quota = quota.map(|index| quotas[index].clone());
                    });
                }
                Action::SubmitStored { seed, len, max_tokens, first_block } => {
                    let prompt = prompt(seed, len);
                    let stored = harness.stored(&prompt, first_block);
                    harness.submit_request(prompt, max_tokens, |request| request.stored = stored);
                }
                Action::Turn { session, seed, len, max_tokens } => {
                    harness.submit_turn(session, prompt(seed, len), max_tokens);
                }
                Action::SubmitImage { seed, before, image, after, max_tokens, timeout } => {
                    let [before, after] = [before, after].map(|len| Part::Text(prompt(seed, len)));
                    harness.submit_parts(&[before, image, after], max_tokens, |request| {
                        request.options.timeout = timeout.map(Duration::from_millis);
                    });
                }
                Action::Embed { seed, len, mean, timeout, first_block } => {
                    let (prompt, timeout) = (prompt(seed, len), timeout.map(Duration::from_millis));
                    let stored = first_block.and_then(|first| harness.stored(&prompt, first));
                    let pooling = if mean { Pooling::Mean } else { Pooling::Last };
                    harness.submit_embedding(prompt, pooling, timeout, stored);
                }
                Action::Save { seed, len, first_block } => {
                    harness.save(prompt(seed, len), first_block);
                }
                Action::Background { seed, len } => harness.submit_background(prompt(seed, len)),
                Action::FailCopies(count) => harness.fake.fail_copies(count),
                Action::Answer(index, first_block) if index < harness.lookups.len() => {
                    harness.answer(index, first_block);
                }
                Action::Cancel(caller) if caller < harness.callers.len() => harness.cancel(caller),
                Action::Step { fail } => drop(harness.step(fail)),
                Action::Read => harness.read(false),
                Action::Slow(caller, slow) if caller < harness.callers.len() => {
                    harness.callers[caller].slow = slow;
                }
                Action::Flush => {
                    ready(harness.scheduler.flush());
                    harness.advance();
                }
                Action::Policy(policy) => harness.context.policy.store(Arc::new(policy)),
                Action::Answer(..) | Action::Cancel(_) | Action::Slow(..) => {}
            }
        }
        harness.finish();
        assert!(quotas.iter().all(|quota| quota.tokens_in_flight() == 0));
    }
}

/// Goal: a follower continues if its leader ends between two steps, by a timeout or by
/// cancellation.
#[test]
fn a_follower_continues_when_its_leader_ends() {
    for by_deadline in [true, false] {
        let config = EngineConfig { max_batched_tokens: 1, ..EngineConfig::default() };
        let mut harness = Harness::new(1, 64, config);
        let timeout = by_deadline.then_some(Duration::from_millis(1));
        harness.submit(prompt(2, 24), 1, timeout);
        harness.submit(prompt(2, 4), 1, None);
        assert_eq!(harness.context.gauges.follows.get(), 1);
        if !by_deadline {
            harness.cancel(0);
        }
        harness.finish();
    }
}

/// Goal: a request for the log-probabilities of its prompt reads the cache once they are reported,
/// for example after a preemption; one that skips reading never does.
#[test]
fn the_cache_is_bypassed_for_as_long_as_needed() {
    for skips in [false, true] {
        let harness = Harness::new(4, 16, EngineConfig::default());
        let mut request = SequenceRequest::new(prompt(1, 8), 4);
        request.options.prompt_logprobs = Some(1);
        request.options.skip_reading_prefix_cache = skips;
        let entered = harness.context.submit(0, request, 0, 0, harness.now);
        let (mut sequence, _permit, _events) = entered.expect("it fits");
        assert!(sequence.bypasses_match());
        sequence.held.computed = sequence.prompt_len;
        sequence.gather_prompt_logprobs(Vec::new());
        assert_eq!(sequence.bypasses_match(), skips);
    }
}

/// Goal: a repeated prompt gets its first token from cached logits, without a step, also if its
/// last block is not full. When the block of the logits is evicted, the logits are dropped.
#[test]
fn a_repeated_prompt_needs_no_step_for_its_first_token() {
    for len in [16, 18] {
        let mut harness = with_cached(16, EngineConfig::default(), &[group_prompt(1, len)]);
        harness.submit(group_prompt(1, len), 1, None);
        harness.read(true);
        assert_eq!(harness.callers[1].tokens.len(), 1, "before any step");
        assert!(harness.in_flight.is_none());
        harness.submit(group_prompt(1, len), 6, None);
        harness.finish();
        assert_eq!(harness.context.gauges.first_tokens_from_cache.get(), 2);
        // Fills the pool, so that everything else is evicted.
        harness.submit(group_prompt(2, 60), 1, None);
        harness.finish();
        harness.submit(group_prompt(1, len), 3, None);
        harness.finish();
        assert_eq!(harness.context.gauges.first_tokens_from_cache.get(), 2);
    }
}

/// Goal: equal prompts are computed once, including the partial block at their end.
#[test]
fn equal_prompts_are_computed_once() {
    let config = EngineConfig { max_batched_tokens: 16, ..EngineConfig::default() };
    let mut harness = Harness::new(4, 64, config);
    for _ in 0..4 {
        harness.submit(group_prompt(1, 38), 3, None);
    }
    harness.finish();
    // Each of the four requests decodes its second and third token. The three followers also
    // compute the two positions after the last full block.
    assert_eq!(harness.context.gauges.computed_tokens.get(), 38 + 2 + 3 * (2 + 2));
    assert_eq!(harness.context.gauges.first_tokens_from_cache.get(), 3);
}

/// Goal: blocks that followers will need once their leader has committed its prefix are not given
/// to requests that cost more.
#[test]
fn blocks_are_set_aside_for_followers() {
    // 40 blocks: a group of four requests takes 10 shared blocks and 3 more for each request.
    let config = EngineConfig { max_batched_tokens: 8, ..EngineConfig::default() };
    let mut harness = Harness::new(4, 40, config);
    let of = |group, own: u32| [group_prompt(group, 40), vec![own; 8]].concat();
    harness.submit(of(1, 1), 4, None);
    harness.submit(of(2, 1), 4, None);
    for own in 2..5 {
        harness.submit(of(1, own), 4, None);
    }
    for own in 2..5 {
        harness.submit(of(2, own), 4, None);
    }
    let mut most = 0;
    while harness.step(false) {
        harness.read(true);
        most = most.max(harness.context.stats().running);
    }
    harness.finish();
    assert!(most >= 4, "{most} ran at once");
    // The shared prefix of each group was computed once.
    assert_eq!(harness.context.gauges.computed_tokens.get(), 2 * 40 + 8 * (8 + 3));
}

/// Goal: conservative admission counts all blocks of a request, the default only those that are not
/// cached.
#[test]
fn default_admission_runs_more_requests_at_once_than_conservative_admission() {
    let most_running = |conservative| {
        let config =
            EngineConfig { conservative, max_batched_tokens: 256, ..EngineConfig::default() };
        // 20 blocks of 16: the shared prompt takes 8 of them.
        let mut harness = Harness::new(16, 20, config);
        harness.submit(prompt(1, 128), 1, None);
        while harness.step(false) {}
        for tail in 0..8 {
            let mut tokens = prompt(1, 128);
            tokens.extend([tail, tail, 3]);
            harness.submit(tokens, 8, None);
        }
        let mut most = 0;
        while harness.step(false) {
            harness.read(true);
            most = most.max(harness.context.stats().running);
        }
        harness.finish();
        most
    };
    // Each request has 138 positions in 9 blocks, so two of them nearly fill the 20 blocks.
    assert_eq!(most_running(true), 2);
    assert_eq!(most_running(false), 8);
}

/// A harness with blocks of 4 positions whose cache holds `prompts`, computed one after another.
fn with_cached(block_count: usize, config: EngineConfig, prompts: &[Vec<u32>]) -> Harness {
    let mut harness = Harness::new(4, block_count, config);
    for prompt in prompts {
        harness.submit(prompt.clone(), 1, None);
        while harness.step(false) {}
    }
    harness
}

/// A prompt that starts with the token `group`, so that prompts of different groups share no
/// prefix.
fn group_prompt(group: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|n| if n == 0 { group } else { (n * 5 + group) % 16 }).collect()
}

/// Goal: if the request at the head of the order does not fit, its match is not evicted for
/// requests that are tried after it.
#[test]
fn the_head_of_the_queue_keeps_its_match_while_others_are_tried() {
    let config = EngineConfig {
        max_batched_tokens: 64,
        policy: AdmissionPolicy::Fcfs,
        ..EngineConfig::default()
    };
    // Of the 32 blocks, the two cached prefixes take 8 each, and the first request 11 more.
    let mut harness = with_cached(32, config, &[group_prompt(1, 32), group_prompt(2, 32)]);
    harness.submit(group_prompt(3, 40), 8, None);
    let mut head = group_prompt(1, 32);
    head.extend([9; 84]);
    harness.submit(head, 4, None);
    assert_eq!(harness.scheduler.waiting().len(), 1, "it needs 21 more blocks");
    harness.submit(group_prompt(4, 60), 1, None);
    assert_eq!(harness.scheduler.waiting().len(), 2, "it needs 15 blocks, which cannot be evicted");
    harness.submit(group_prompt(5, 40), 1, None);
    // Blocks that are evicted during a step can be reserved when the step has ended.
    harness.step(false);
    assert_eq!(harness.scheduler.waiting().len(), 2, "10 blocks are free or of another group");
    harness.finish();
    assert_eq!(harness.callers[3].cached, Some(32), "its prefix is still cached");
}

/// Goal: a request whose match has shrunk since its last query is charged its actual cost, so that
/// the bound on overtaking holds.
#[test]
fn a_stale_match_does_not_break_the_overtaking_bound() {
    let config = EngineConfig { max_overtake_tokens: 16, ..EngineConfig::default() };
    let mut harness = Harness::new(4, 32, config);
    harness.submit(group_prompt(1, 16), 8, None);
    harness.submit(group_prompt(2, 110), 1, None);
    harness.submit(group_prompt(3, 65), 1, None);
    assert_eq!(
        harness.scheduler.waiting().len(),
        2,
        "one does not fit, the other would exceed the bound"
    );
    let version = harness.scheduler.waiting()[1].version;
    let waiting = harness.scheduler.waiting_mut();
    (waiting[1].matched, waiting[1].resume, waiting[1].version) = (64, 64, version);
    harness.scheduler.resume();
    harness.advance();
    assert_eq!(
        harness.scheduler.waiting().len(),
        2,
        "it was admitted at a cost that is out of date"
    );
    harness.finish();
    assert!(harness.context.gauges.most_overtaken_tokens.get() <= 16);
}
