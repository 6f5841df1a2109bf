//! Parts that a program can implement itself with only the crate `stolon`: a backend and an
//! eviction order. Both are the ones in `examples/own_backend.rs`.

#[expect(dead_code, reason = "the tests use the example's types, not its main function")]
#[path = "../../examples/own_backend.rs"]
mod example;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use example::{AttentionBackend, ShortestPrefixFirst};
use stolon::backend::{
    Backend, BackendError, BackendSpec, BlockId, ImageEmbeddings, ImageInput, SliceImage,
    SliceState, StateCheckpoint, StateSpec, StepBatch, StepOutput,
};
use stolon::{Completion, Engine, EngineBuilder, EngineError, Error, Event, LengthBound, Request};

fn builder(block_count: usize) -> EngineBuilder {
    // Without cached logits, a prompt that is cached completely computes its last position again.
    Engine::builder()
        .backend("attention", Box::new(AttentionBackend::new(block_count)))
        .logit_cache_bytes(0)
}

/// A prompt of `length` tokens whose first token is `first`.
fn prompt(first: u32, length: u32) -> Vec<u32> {
    (0..length).map(|n| (first + n * n * 5) % 64).collect()
}

async fn run(engine: &Engine, tokens: &[u32]) -> Completion {
    let request = Request::tokens(tokens).max_tokens(12).logprobs(3);
    let stream = engine.generate(request).await.expect("a valid request");
    stream.collect_text().await.expect("a complete answer")
}

/// Goal: with a backend of the caller's own, an answer is the same, bit for bit, with an empty
/// cache, with a cached prefix, and with the whole prompt cached, however the prompt is cut into
/// chunks.
#[tokio::test]
async fn own_backend_answers_the_same_with_a_warm_and_a_cold_cache() {
    let cold = builder(64).prefix_caching(false).build().await.expect("valid settings");
    for chunk in [5, 512] {
        let warm = builder(64).max_batched_tokens(chunk).build().await.expect("valid settings");
        let shared = prompt(1, 64);
        for (tail, cached_tokens) in [(vec![5, 6], 0), (vec![7, 8, 9], 64), (vec![], 64)] {
            let tokens = [shared.clone(), tail].concat();
            let expected = run(&cold, &tokens).await;
            let answer = run(&warm, &tokens).await;
            assert_eq!(answer.finish.usage.cached_tokens, cached_tokens, "chunk {chunk}");
            assert_eq!(answer.token_ids, expected.token_ids, "chunk {chunk}");
            assert_eq!(answer.logprobs, expected.logprobs, "chunk {chunk}");
        }
        warm.audit().await.expect("consistent accounting");
    }
}

/// Goal: the next token depends on early tokens of the prompt too, so that the test above would
/// notice if keys and values were read from a wrong block.
#[tokio::test]
async fn own_backend_reads_the_whole_prefix() {
    let engine = builder(64).prefix_caching(false).build().await.expect("valid settings");
    let tokens = prompt(1, 40);
    let original = run(&engine, &tokens).await;
    for index in [0, 17, 38] {
        let mut changed = tokens.clone();
        changed[index] = (changed[index] + 9) % 64;
        assert_ne!(run(&engine, &changed).await.logprobs, original.logprobs, "index {index}");
    }
}

/// Goal: a custom eviction order decides which prefix is evicted. LRU evicts the oldest one, the
/// custom order the shortest one.
#[tokio::test]
async fn custom_eviction_order_selects_the_victim() {
    for (is_custom, evicted) in [(false, "long"), (true, "short")] {
        let mut builder = builder(8);
        if is_custom {
            builder = builder.eviction_order(|| Box::new(ShortestPrefixFirst));
        }
        let engine = builder.build().await.expect("valid settings");
        let prompts = [("long", prompt(2, 64)), ("short", prompt(3, 32))];
        for (_, tokens) in &prompts {
            engine.cache().warm(Request::tokens(tokens.clone())).await.expect("it fits");
        }
        // Six of the eight blocks are cached, so that three new ones need room.
        engine.cache().warm(Request::tokens(prompt(4, 48))).await.expect("it fits");
        for (name, tokens) in prompts {
            let length = tokens.len();
            let cached =
                engine.cache().query_match_len(&Request::tokens(tokens)).expect("token ids");
            assert_eq!(cached < length, name == evicted, "{name}: {cached}, custom: {is_custom}");
        }
        assert!(engine.stats().evictions > 0);
        engine.audit().await.expect("consistent accounting");
    }
}

/// Goal: a caller can match on the fields of an error, down to the type of the limit.
#[tokio::test]
async fn error_payloads_are_public() {
    let engine = builder(8).build().await.expect("valid settings");
    let error = engine.generate(Request::tokens(prompt(1, 500))).await.expect_err("it cannot fit");
    let Error::Engine(EngineError::PromptTooLong { got: 500, limit, bound }) = error else {
        panic!("{error}");
    };
    assert_eq!((limit, bound), (128, LengthBound::Pool { blocks: 8, block_size: 16 }));
}

/// Goal: a stream can be read without any other crate, and ends after its last event.
#[tokio::test]
async fn streams_are_read_without_further_crates() {
    let engine = builder(8).build().await.expect("valid settings");
    let request = Request::tokens(prompt(1, 20)).max_tokens(3);
    let mut stream = engine.generate(request).await.expect("a valid request");
    let (mut tokens, mut is_finished) = (0, false);
    while let Some(event) = stream.next().await {
        match event.expect("no error") {
            Event::Token(_) => tokens += 1,
            Event::Finished(_) => is_finished = true,
            _ => {}
        }
    }
    assert_eq!((tokens, is_finished), (3, true));
    // The engine still runs, so one more read is reported as an error of the caller.
    let error = stream.collect_text().await.expect_err("it was read to its end");
    assert!(matches!(error, Error::Engine(EngineError::InvalidParameter { .. })), "{error}");
    run(&engine, &prompt(1, 20)).await;
}

/// A recurrent model, whose state is a hash of the tokens so far. Its encoder makes zeros.
struct HashBackend {
    spec: BackendSpec,
    slots: Vec<u64>,
    checkpoints: HashMap<BlockId, u64>,
}

impl HashBackend {
    fn new() -> HashBackend {
        let state = StateSpec { bytes: 8, slots: 4 };
        let spec = BackendSpec {
            vocab_size: 64,
            max_positions: 1024,
            block_size: 4,
            block_count: 64,
            block_bytes: 8,
            state: Some(state),
            ..BackendSpec::default()
        };
        HashBackend { spec, slots: vec![0; state.slots], checkpoints: HashMap::new() }
    }

    /// The hash before the first token of a slice.
    fn begin(&self, start: usize, state: &SliceState) -> u64 {
        match &state.resume {
            Some(blocks) => self.checkpoints[&blocks[0]],
            None if start == 0 => 0,
            None => self.slots[state.slot as usize],
        }
    }
}

impl Backend for HashBackend {
    fn spec(&self) -> &BackendSpec {
        &self.spec
    }

    fn step(&mut self, batch: &StepBatch) -> Result<StepOutput, BackendError> {
        let mut output = StepOutput::default();
        let mut tokens = batch.tokens.iter();
        for slice in &batch.sequences {
            if let [SliceImage { start, .. }, ..] = slice.images[..] {
                return Err(BackendError::MalformedBatch(format!("an image at {start}")));
            }
            let missing = || BackendError::MalformedBatch("no state".to_owned());
            let state = slice.state.as_ref().ok_or_else(missing)?;
            let mut hash = self.begin(slice.start, state);
            for (index, &token) in tokens.by_ref().take(slice.token_count).enumerate() {
                hash = hash.wrapping_mul(31).wrapping_add(u64::from(token) + 1);
                for StateCheckpoint { len, blocks } in &state.checkpoints {
                    if *len == slice.start + index + 1 {
                        self.checkpoints.insert(blocks[0], hash);
                    }
                }
                if slice.logit_rows.logits(slice.token_count).contains(&index) {
                    output
                        .logits
                        .extend((0..64).map(|next| f32::from(u8::from(next == hash % 64))));
                }
            }
            self.slots[state.slot as usize] = hash;
        }
        Ok(output)
    }

    fn encode(
        &mut self,
        image: &Arc<ImageInput>,
        _: Duration,
    ) -> Result<Option<ImageEmbeddings>, BackendError> {
        Ok(Some(ImageEmbeddings { values: vec![0.0; image.kv_len].into() }))
    }
}

/// Goal: a backend of the caller's own can have a recurrent state, and an encoder. A request that
/// resumes from a checkpoint gets the same answer as one that computes its whole prompt.
#[tokio::test]
async fn own_backend_has_states() {
    let builder = || Engine::builder().backend("hash", Box::new(HashBackend::new()));
    let builder = || builder().logit_cache_bytes(0);
    let cold = builder().prefix_caching(false).build().await.expect("valid settings");
    let warm = builder().build().await.expect("valid settings");
    let mut cached_tokens = 0;
    for tail in [vec![5, 6], vec![7, 8, 9], vec![]] {
        let tokens = [prompt(1, 64), tail].concat();
        let expected = run(&cold, &tokens).await;
        let answer = run(&warm, &tokens).await;
        cached_tokens += answer.finish.usage.cached_tokens;
        assert_eq!(answer.token_ids, expected.token_ids);
    }
    assert!(cached_tokens > 0, "no request resumed from a checkpoint");
}
