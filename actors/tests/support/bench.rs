//! A core on the fake backend, with the few things every test does to it.

use std::time::Duration;

use stolon_actors::{CoreConfig, CoreError, CoreHandle, SequenceEvent, SequenceFinish};
use stolon_actors::{SequenceRequest, SequenceStream};
use stolon_backend::fake::expected_next;
use stolon_backend::fake::{FakeBackend, FakeHandle, FakeOptions};

/// A core and the test's hand on its backend.
pub(crate) struct Bench {
    pub(crate) core: CoreHandle,
    pub(crate) fake: FakeHandle,
    pub(crate) vocab_size: usize,
}

/// What a sequence gave.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Answer {
    pub(crate) tokens: Vec<u32>,
    pub(crate) cached: usize,
    pub(crate) finish: SequenceFinish,
}

pub(crate) async fn bench(options: FakeOptions, config: CoreConfig) -> Bench {
    let vocab_size = options.vocab_size;
    let backend = FakeBackend::new(options);
    let fake = backend.handle();
    let core = CoreHandle::start(Box::new(backend), config).await.expect("valid settings");
    Bench { core, fake, vocab_size }
}

pub(crate) fn options(block_size: usize, block_count: usize) -> FakeOptions {
    FakeOptions { block_size, block_count, record: true, ..FakeOptions::default() }
}

/// A prompt of `len` tokens; different seeds differ from the first token on.
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

impl Bench {
    pub(crate) fn submit(&self, tokens: &[u32], max_tokens: usize) -> SequenceStream {
        self.core
            .submit(SequenceRequest::new(tokens.to_vec(), max_tokens))
            .expect("a request that fits")
    }

    /// Runs a greedy request and compares its tokens with the plain definition.
    pub(crate) async fn check(&self, tokens: &[u32], max_tokens: usize) -> Answer {
        let answer = read(self.submit(tokens, max_tokens)).await.expect("it finishes");
        self.compare(tokens, &answer);
        answer
    }

    pub(crate) fn compare(&self, prompt: &[u32], answer: &Answer) {
        let mut all = prompt.to_vec();
        for (index, &token) in answer.tokens.iter().enumerate() {
            assert_eq!(token, expected_next(&all, self.vocab_size), "token {index}");
            all.push(token);
        }
    }

    /// Waits until so many steps have begun.
    pub(crate) async fn steps(&self, count: u64) {
        while self.fake.step_count() < count {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Waits until nothing runs and checks that every block is accounted for.
    pub(crate) async fn check_clean(&self) {
        assert!(self.core.idle(Duration::from_secs(20)).await, "{:?}", self.core.stats());
        let audit = self.core.audit().await.expect("clean books");
        assert_eq!((audit.running, audit.waiting), (0, 0));
        assert_eq!(audit.blocks_reserved, 0);
        assert_eq!(audit.blocks_evictable, audit.blocks_committed, "nobody holds a block");
        assert_eq!(audit.blocks_free + audit.blocks_committed, audit.blocks_total);
    }
}

/// Reads a stream to its end.
pub(crate) async fn read(mut stream: SequenceStream) -> Result<Answer, CoreError> {
    let mut tokens = Vec::new();
    let mut cached = 0;
    while let Some(event) = stream.next().await {
        match event? {
            SequenceEvent::Started { cached_tokens } => cached = cached_tokens,
            SequenceEvent::Token { id, .. } => tokens.push(id),
            SequenceEvent::PromptLogprobs(_) => {}
            SequenceEvent::Finished(finish) => {
                assert!(stream.next().await.is_none(), "nothing follows the end");
                assert_eq!(finish.completion_tokens, tokens.len());
                return Ok(Answer { tokens, cached, finish });
            }
        }
    }
    panic!("a stream ended without an end");
}
