//! An engine on the fake backend, and the helpers that the tests share.

use std::time::Duration;

use stolon_actors::{EngineHandle, SequenceStream};
use stolon_backend::fake::{FakeBackend, FakeHandle, FakeOptions, expected_next};
use stolon_scheduler::{EngineConfig, EngineError, Event, Finish, SequenceRequest};

/// An engine, and the handle by which a test controls and observes its backend.
pub(crate) struct Harness {
    pub(crate) engine: EngineHandle,
    pub(crate) fake: FakeHandle,
    pub(crate) vocab_size: usize,
}

/// Everything that a request returned.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Answer {
    /// The generated tokens.
    pub(crate) tokens: Vec<u32>,
    /// Number of prompt tokens found in the cache.
    pub(crate) cached: usize,
    pub(crate) finish: Finish,
}

/// Starts an engine on a fake backend.
pub(crate) async fn start(options: FakeOptions, config: EngineConfig) -> Harness {
    let vocab_size = options.vocab_size;
    let backend = FakeBackend::new(options);
    let fake = backend.handle();
    let engine = EngineHandle::start(Box::new(backend), config).await.expect("valid settings");
    Harness { engine, fake, vocab_size }
}

/// A fake backend that records its batches.
pub(crate) fn options(block_size: usize, block_count: usize) -> FakeOptions {
    FakeOptions { block_size, block_count, record: true, ..FakeOptions::default() }
}

/// A prompt of `len` tokens. Prompts with different seeds differ in their first token.
pub(crate) fn prompt(seed: u64, len: usize) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(seed);
    (0..len)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u32 % 256
        })
        .collect()
}

impl Harness {
    /// Submits a greedy request.
    pub(crate) fn submit(&self, tokens: &[u32], max_tokens: usize) -> SequenceStream {
        self.engine
            .submit(SequenceRequest::new(tokens.to_vec(), max_tokens))
            .expect("the request is accepted")
    }

    /// Runs a greedy request and checks its tokens.
    pub(crate) async fn check_greedy(&self, tokens: &[u32], max_tokens: usize) -> Answer {
        let answer =
            read_to_end(self.submit(tokens, max_tokens)).await.expect("the request finishes");
        self.check_tokens(tokens, &answer);
        answer
    }

    /// Checks greedy tokens against the fake model, evaluated without a cache.
    pub(crate) fn check_tokens(&self, prompt: &[u32], answer: &Answer) {
        let mut all = prompt.to_vec();
        for (index, &token) in answer.tokens.iter().enumerate() {
            assert_eq!(token, expected_next(&all, self.vocab_size), "token {index}");
            all.push(token);
        }
    }

    /// Waits until `count` steps have begun since the start of the engine.
    pub(crate) async fn wait_for_steps(&self, count: u64) {
        while self.fake.step_count() < count {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Waits until the engine is idle, then checks that every block is accounted for and that none
    /// is held.
    pub(crate) async fn check_nothing_held(&self) {
        assert!(
            self.engine.idle(Duration::from_secs(20)).await,
            "{:?}",
            self.engine.context().stats()
        );
        let audit = self.engine.audit().await.expect("a consistent accounting");
        assert_eq!((audit.running, audit.waiting), (0, 0));
        assert_eq!(audit.blocks_reserved, 0);
        assert_eq!(audit.blocks_evictable, audit.blocks_committed, "no request holds a block");
        assert_eq!(audit.blocks_free + audit.blocks_committed, audit.blocks_total);
    }
}

/// Reads a stream to its end.
pub(crate) async fn read_to_end(mut stream: SequenceStream) -> Result<Answer, EngineError> {
    let mut tokens = Vec::new();
    let mut cached = 0;
    while let Some(event) = stream.next().await {
        match event? {
            Event::Started { cached_tokens, prompt_tokens: _ } => cached = cached_tokens,
            Event::Token(token) => tokens.extend(token.id),
            Event::Finished(finish) => {
                assert!(stream.next().await.is_none(), "no event follows the last one");
                assert_eq!(finish.usage.completion_tokens, tokens.len());
                return Ok(Answer { tokens, cached, finish });
            }
            _ => {}
        }
    }
    panic!("the stream ended without a final event");
}
