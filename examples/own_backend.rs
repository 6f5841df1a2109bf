//! A backend of your own under the engine, and an eviction order of your own in its cache.
//!
//! The backend runs a model with one attention layer. The engine schedules requests, shares
//! prefixes and samples; the backend only computes logits and stores keys and values where the
//! block tables say. Everything that it needs comes from the crate `stolon`.
//!
//! ```sh
//! cargo run -p stolon --example own_backend
//! ```

#![allow(clippy::print_stdout, reason = "an example prints its results")]

use std::array;

use stolon::backend::{
    Backend, BackendError, BackendSpec, BatchChecker, SequenceSlice, StepBatch, StepOutput,
};
use stolon::{
    Engine, EngineError, Error, Event, EvictionCandidate, EvictionOrder, EvictionRank, Request,
};

/// Number of tokens that the model knows.
const VOCAB_SIZE: usize = 64;
/// Number of elements of a key and of a value.
const HEAD_DIM: usize = 8;
/// How much the attention score falls per position of distance (ALiBi), so that order matters.
const DISTANCE_PENALTY: f32 = 0.02;

/// The key and the value of one position, as they are in the KV store.
#[derive(Clone, Copy, Debug, Default)]
struct KeyValue {
    key: [f32; HEAD_DIM],
    value: [f32; HEAD_DIM],
}

/// A model with one attention head, whose weights are computed from a formula, and its paged KV
/// store.
#[derive(Debug)]
pub(crate) struct AttentionBackend {
    spec: BackendSpec,
    checker: BatchChecker,
    /// `[block_count, block_size]`.
    kv: Vec<KeyValue>,
}

impl AttentionBackend {
    /// A backend whose KV store has `block_count` blocks of 16 positions.
    pub(crate) fn new(block_count: usize) -> AttentionBackend {
        let block_size = 16;
        let spec = BackendSpec {
            vocab_size: VOCAB_SIZE,
            max_positions: 1024,
            block_size,
            block_count,
            block_bytes: block_size * size_of::<KeyValue>(),
            hidden_size: None,
            draws: false,
            ..BackendSpec::default()
        };
        let kv = vec![KeyValue::default(); block_count * block_size];
        AttentionBackend { spec, checker: BatchChecker::new(block_count), kv }
    }

    /// Index in `kv` of a position of the sequence, which the block table determines.
    fn kv_index(&self, slice: &SequenceSlice, position: usize) -> usize {
        let block = slice.block_table[position / self.spec.block_size];
        block.0 as usize * self.spec.block_size + position % self.spec.block_size
    }

    /// Attention of `position` over itself and all earlier positions, in order of position. The
    /// fixed order makes the sum independent of how the prompt was cut into steps.
    fn attention(&self, slice: &SequenceSlice, position: usize, token: u32) -> [f32; HEAD_DIM] {
        let query = weights(token, 0);
        let (mut sum, mut total) = ([0.0; HEAD_DIM], 0.0);
        for past in 0..=position {
            let KeyValue { key, value } = self.kv[self.kv_index(slice, past)];
            let weight = (dot(&query, &key) - DISTANCE_PENALTY * (position - past) as f32).exp();
            total += weight;
            sum = array::from_fn(|i| sum[i] + weight * value[i]);
        }
        sum.map(|element| element / total)
    }

    /// Computes the tokens of one slice and appends the rows of logits that it requests.
    fn compute_slice(&mut self, slice: &SequenceSlice, tokens: &[u32], logits: &mut Vec<f32>) {
        for (index, &token) in tokens.iter().enumerate() {
            let position = slice.start + index;
            // Positions before `write_from` are in a shared block already. It must not be written.
            if position >= slice.write_from {
                let kv_index = self.kv_index(slice, position);
                self.kv[kv_index] = KeyValue { key: weights(token, 1), value: weights(token, 2) };
            }
            if slice.logit_rows.logits(tokens.len()).contains(&index) {
                let hidden = self.attention(slice, position, token);
                logits.extend(
                    (0..VOCAB_SIZE as u32).map(|next| 4.0 * dot(&hidden, &weights(next, 3))),
                );
            }
        }
    }
}

impl Backend for AttentionBackend {
    fn spec(&self) -> &BackendSpec {
        &self.spec
    }

    fn step(&mut self, batch: &StepBatch) -> Result<StepOutput, BackendError> {
        let row_count = self.checker.check(batch, &self.spec)?;
        let mut logits = Vec::with_capacity(row_count * VOCAB_SIZE);
        let mut tokens = batch.tokens.as_slice();
        for slice in &batch.sequences {
            let (slice_tokens, rest) = tokens.split_at(slice.token_count);
            self.compute_slice(slice, slice_tokens, &mut logits);
            tokens = rest;
        }
        Ok(StepOutput { logits, ..StepOutput::default() })
    }
}

/// The row of weight matrix `matrix` for a token, with elements from -1 to 1.
fn weights(token: u32, matrix: u32) -> [f32; HEAD_DIM] {
    array::from_fn(|i| (token as f32 * 1.7 + matrix as f32 * 5.3 + i as f32 * 2.9).sin())
}

fn dot(a: &[f32; HEAD_DIM], b: &[f32; HEAD_DIM]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Evicts the leaf with the shortest prefix first, because it is the cheapest to compute again.
/// The least recently used leaf goes first among equals.
#[derive(Debug)]
pub(crate) struct ShortestPrefixFirst;

impl EvictionOrder for ShortestPrefixFirst {
    fn rank(&mut self, leaf: &EvictionCandidate) -> EvictionRank {
        let prefix_blocks = leaf.start_block + leaf.block_count;
        EvictionRank(prefix_blocks as u64, leaf.last_use)
    }
}

/// A prompt of `length` tokens that differs from the first token on for each `topic`.
fn prompt(topic: u32, length: u32) -> Vec<u32> {
    (0..length).map(|n| (topic * 11 + n * n) % VOCAB_SIZE as u32).collect()
}

/// Generates a few tokens and prints them.
async fn ask(engine: &Engine, name: &str, tokens: Vec<u32>) -> Result<(), Error> {
    let mut stream = engine.generate(Request::tokens(tokens).max_tokens(8)).await?;
    let mut answer = Vec::new();
    while let Some(event) = stream.next().await {
        match event? {
            Event::Token(token) => answer.extend(token.id),
            Event::Finished(end) => println!(
                "{name}: {answer:?}, {} of {} prompt tokens were cached",
                end.usage.cached_tokens, end.usage.prompt_tokens
            ),
            _ => {}
        }
    }
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    let engine = Engine::builder()
        .backend("attention", Box::new(AttentionBackend::new(8)))
        .eviction_order(|| Box::new(ShortestPrefixFirst))
        .build()
        .await?;

    // Two prompts that begin with the same 40 tokens. The second request finds the full blocks
    // of the shared part, 2 blocks of 16 positions, in the cache.
    let shared = prompt(1, 40);
    ask(&engine, "first request", [shared.clone(), vec![5, 6]].concat()).await?;
    ask(&engine, "second request", [shared.clone(), vec![7, 8, 9]].concat()).await?;

    // The engine validates a request before it queues it. A prompt that can never fit is refused.
    match engine.generate(Request::tokens(prompt(1, 500))).await {
        Err(Error::Engine(EngineError::PromptTooLong { got, limit, .. })) => {
            println!("a prompt of {got} tokens is refused, the limit is {limit}");
        }
        other => println!("unexpected: {other:?}"),
    }

    // The 8 blocks do not hold everything. LRU would evict the long prompt, which is the oldest.
    engine.cache().flush().await?;
    let prompts = [("long", prompt(2, 64)), ("short", prompt(3, 32)), ("new", prompt(4, 48))];
    for (_, tokens) in &prompts {
        engine.cache().warm(Request::tokens(tokens.clone())).await?;
    }
    for (name, tokens) in prompts {
        let cached = engine.cache().query_match_len(&Request::tokens(tokens))?;
        println!("{name} prompt: {cached} tokens are cached");
    }
    engine.shutdown().await;
    Ok(())
}
