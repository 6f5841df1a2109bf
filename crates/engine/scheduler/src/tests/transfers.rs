//! Loads and saves: copied KV equals computed KV, and no request and no block is lost, even if a
//! copy fails.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use stolon_backend::fake::{FakeBackend, FakeOptions};
use stolon_backend::{Backend, LogitRows, SequenceSlice, SliceState, StateCheckpoint, StepBatch};
use stolon_kvcache::{BlockId, EvictedPrefix, Namespace, TokenSpan};

use super::{Harness, VOCAB_SIZE, group_prompt, ready, with_cached};
use crate::config::EngineConfig;
use crate::error::EngineError;
use crate::request::SequenceRequest;
use crate::transfer::{EvictedCopy, KvSink, SaveRequest, StoredKv};

/// The results of saves: the prompt, the first block, and the bytes.
pub(super) type Saves = Arc<Mutex<Vec<(Vec<u32>, usize, Vec<u8>)>>>;

/// The bytes of each full block of a prompt, computed by a backend of its own.
pub(super) fn block_bytes(prompt: &[u32], block_size: usize) -> Vec<Box<[u8]>> {
    let count = prompt.len() / block_size;
    let options = FakeOptions {
        // Rows of images are below it, too.
        vocab_size: 1 << 24,
        block_size,
        block_count: 128,
        ..FakeOptions::default()
    };
    let mut backend = FakeBackend::new(options);
    let table: Vec<BlockId> = (0..=count as u32).map(BlockId).collect();
    let slice = SequenceSlice {
        token_count: prompt.len(),
        start: 0,
        write_from: 0,
        block_table: table.clone(),
        logit_rows: LogitRows::None,
        ..SequenceSlice::default()
    };
    let batch = StepBatch { tokens: prompt.to_vec(), sequences: vec![slice] };
    backend.step(&batch).expect("a valid batch");
    let read = |block: &BlockId| {
        let mut bytes = vec![0; backend.spec().block_bytes].into_boxed_slice();
        backend.read_blocks(&[*block], &mut bytes).expect("it was written");
        bytes
    };
    table[..count].iter().map(read).collect()
}

/// Stored KV of a prompt's full blocks from `first_block` on.
pub(super) fn stored_kv(prompt: &[u32], block_size: usize, first_block: usize) -> StoredKv {
    stored_kv_of_size(prompt, (block_size, 0), first_block)
}

/// The same in blocks of at least `bytes` bytes, in which a draft model has no part.
pub(super) fn stored_kv_of_size(
    prompt: &[u32],
    (block_size, bytes): (usize, usize),
    first_block: usize,
) -> StoredKv {
    let blocks = block_bytes(prompt, block_size).into_iter().skip(first_block);
    StoredKv::new(block_size, first_block, blocks.map(|block| of_size(&block, bytes)).collect())
}

/// A block of at least `bytes` bytes.
fn of_size(block: &[u8], bytes: usize) -> bytes::Bytes {
    let mut block = block.to_vec();
    block.resize(block.len().max(bytes), 0xff);
    block.into()
}

/// As [`stored_kv`], for a model with a recurrent state whose checkpoints take `checkpoint_blocks`:
/// up to the last full block before the last position, with a checkpoint. It is the checkpoint alone
/// if `first_block` comes after that block. `None` if there is none.
pub(super) fn stored_state(
    prompt: &[u32],
    block_size: usize,
    first_block: usize,
    checkpoint_blocks: usize,
) -> Option<StoredKv> {
    stored_state_of_size(prompt, (block_size, 0), first_block, checkpoint_blocks)
}

/// The same in blocks of at least `bytes` bytes, in which a draft model has no part.
pub(super) fn stored_state_of_size(
    prompt: &[u32],
    (block_size, size): (usize, usize),
    first_block: usize,
    checkpoint_blocks: usize,
) -> Option<StoredKv> {
    let count = (prompt.len() - 1) / block_size;
    let (prefix, first_block) = (&prompt[..count * block_size], first_block.min(count));
    if count == 0 {
        return None;
    }
    let mut kv = block_bytes(prefix, block_size);
    let options = FakeOptions {
        vocab_size: VOCAB_SIZE,
        block_size,
        block_count: 256,
        state: Some((checkpoint_blocks, 1)),
        ..FakeOptions::default()
    };
    let mut backend = FakeBackend::new(options);
    let blocks: Vec<_> = (count..count + checkpoint_blocks).map(|id| BlockId(id as u32)).collect();
    let checkpoint = StateCheckpoint { len: prefix.len(), blocks: blocks.clone() };
    let slice = SequenceSlice {
        token_count: prefix.len(),
        start: 0,
        write_from: 0,
        block_table: (0..count as u32).map(BlockId).collect(),
        logit_rows: LogitRows::None,
        state: Some(SliceState { checkpoints: vec![checkpoint], ..SliceState::in_slot(0) }),
        ..SequenceSlice::default()
    };
    let batch = StepBatch { tokens: prefix.to_vec(), sequences: vec![slice] };
    backend.step(&batch).expect("a valid batch");
    let mut bytes = vec![0; checkpoint_blocks * backend.spec().block_bytes];
    backend.read_blocks(&blocks, &mut bytes).expect("it was written");
    kv.extend(bytes.chunks(backend.spec().block_bytes).map(Box::from));
    let blocks = kv.into_iter().skip(first_block).map(|block| of_size(&block, size)).collect();
    Some(StoredKv::new(block_size, first_block, blocks).with_checkpoint(checkpoint_blocks))
}

/// Takes everything that is evicted.
#[derive(Debug)]
pub(super) struct EvictedSink(pub(super) Saves);

impl KvSink for EvictedSink {
    fn wanted(
        &self,
        _: &Namespace,
        _: &Arc<Vec<u32>>,
        _: Range<usize>,
        _: i32,
    ) -> Option<SaveRequest> {
        None
    }

    fn takes_evicted(&self) -> bool {
        true
    }

    fn evicted(&self, prefix: EvictedPrefix) -> Option<EvictedCopy> {
        let copies = Arc::clone(&self.0);
        Some(EvictedCopy {
            blocks: prefix.blocks[prefix.evicted..].to_vec(),
            done: Box::new(move |bytes| {
                copies.lock().expect("no panic").push((prefix.positions, prefix.evicted, bytes));
            }),
        })
    }
}

impl Harness {
    /// Saves the full blocks of a prompt from `first_block` on.
    pub(super) fn save(&mut self, prompt: Vec<u32>, first_block: usize) {
        let block_count = prompt.len() / self.context.spec.block_size;
        let (saves, tokens) = (Arc::clone(&self.saves), prompt.clone());
        ready(self.scheduler.save(SaveRequest {
            namespace: Namespace::default(),
            tokens: Arc::new(tokens),
            blocks: first_block..block_count,
            done: Box::new(move |bytes| {
                saves.lock().expect("no panic").push((prompt, first_block, bytes));
            }),
        }));
        self.advance();
    }

    /// Checks that every save has yielded what computing its prompt yields. So must every copy of
    /// evicted blocks.
    pub(super) fn check_saves(&self) {
        let spec = &self.context.spec;
        let saves = self.saves.lock().expect("no panic").clone();
        let evicted = std::mem::take(&mut *self.evicted.lock().expect("no panic"));
        // Tokens do not say what is at the positions of images.
        let is_text =
            |prompt: &[u32]| !prompt.iter().any(|&position| TokenSpan::is_image(position));
        let all = saves.iter().chain(&evicted).filter(|(prompt, ..)| is_text(prompt));
        for (prompt, first_block, bytes) in all {
            assert!(!bytes.is_empty() && bytes.len().is_multiple_of(spec.block_bytes));
            let expected = block_bytes(prompt, spec.block_size)[*first_block..].concat();
            let bytes = &super::drafting::model_part(bytes, spec);
            assert!(expected.starts_with(bytes), "a save of {prompt:?} from {first_block}");
        }
    }
}

/// Goal: a prompt with stored KV computes only the positions that are not stored, and commits the
/// loaded ones, so that the next request finds it cached.
#[test]
fn stored_kv_is_loaded_instead_of_computed() {
    for (len, computed) in [(38, 2 + 1), (40, 1 + 1)] {
        let mut harness = Harness::new(4, 64, EngineConfig::default());
        let prompt = group_prompt(1, len);
        harness.submit_stored(prompt.clone(), 2, stored_kv(&prompt, 4, 0));
        harness.finish();
        let gauges = &harness.context.gauges;
        assert_eq!(gauges.loaded_tokens.get(), len as u64 / 4 * 4);
        assert_eq!(gauges.computed_tokens.get(), computed);
        assert_eq!(harness.callers[0].cached, Some(len / 4 * 4));
        harness.submit(prompt, 2, None);
        harness.finish();
        assert_eq!(harness.callers[1].cached, Some(len / 4 * 4));
    }
}

/// Goal: cached positions are not loaded again, and stored KV that begins after the cached prefix
/// is used from there on. If positions between them are neither cached nor stored, all are
/// computed.
#[test]
fn loads_continue_what_is_cached() {
    let prompt = group_prompt(1, 40);
    for (cached, first_block, loaded) in [(16, 0, 24), (16, 4, 24), (16, 3, 24), (16, 5, 0)] {
        let config = EngineConfig { max_batched_tokens: 512, ..EngineConfig::default() };
        let mut harness = with_cached(64, config, &[prompt[..cached].to_vec()]);
        let stored = stored_kv(&prompt, 4, first_block);
        harness.submit_stored(prompt.clone(), 1, stored);
        if loaded == 0 {
            // It asks for what is missing, which is not stored.
            harness.answer(0, None);
        }
        harness.finish();
        assert_eq!(harness.context.gauges.loaded_tokens.get(), loaded, "from {first_block}");
    }
}

/// Goal: a load that fails is computed, and the request ends as if there had been none.
#[test]
fn a_failed_load_is_computed() {
    let mut harness = Harness::new(4, 64, EngineConfig::default());
    let prompt = group_prompt(1, 40);
    harness.fake.fail_copies(1);
    harness.submit_stored(prompt.clone(), 4, stored_kv(&prompt, 4, 0));
    harness.finish();
    let gauges = &harness.context.gauges;
    assert_eq!((gauges.loads_failed.get(), gauges.loaded_tokens.get()), (1, 0));
    assert_eq!(gauges.computed_tokens.get(), 40 + 3);
}

/// Goal: the same step continues after the loaded positions. If the load fails, the other slices of
/// that step are computed as usual.
#[test]
fn a_step_computes_what_follows_its_loads() {
    let prompts = [1, 2].map(|group| group_prompt(group, 42));
    for failing in [0, 1] {
        let config = EngineConfig { max_batched_tokens: 64, ..EngineConfig::default() };
        let mut harness = Harness::new(4, 64, config);
        // The others come while its step is in flight, so that they begin in one step.
        harness.submit(group_prompt(3, 5), 1, None);
        harness.fake.fail_copies(failing);
        let stored = stored_kv(&prompts[0], 4, 0);
        harness.submit_stored(prompts[0].clone(), 1, stored);
        harness.submit(prompts[1].clone(), 1, None);
        harness.step(false);
        harness.step(false);
        harness.finish();
        let gauges = &harness.context.gauges;
        assert_eq!(gauges.steps.get(), 2 + failing as u64);
        let own = if failing == 0 { 2 } else { 42 };
        assert_eq!(gauges.computed_tokens.get(), 5 + 42 + own);
    }
}

/// Goal: a request that shares the prefix of one that loads it waits for that load.
#[test]
fn a_prefix_is_loaded_once_for_all_that_share_it() {
    let mut harness = Harness::new(4, 64, EngineConfig::default());
    let prompt = group_prompt(1, 40);
    let stored = stored_kv(&prompt, 4, 0);
    for tail in 0..4 {
        let prompt = [prompt.clone(), vec![tail; 3]].concat();
        harness.submit_stored(prompt, 2, stored.clone());
    }
    harness.finish();
    assert_eq!(harness.context.gauges.loaded_tokens.get(), 40);
    assert_eq!(harness.context.gauges.follows.get(), 3);
}

/// Goal: a save yields the cached blocks and no others, nothing is evicted while it runs, and a
/// request that needs its blocks waits for it instead of failing.
#[test]
fn a_save_holds_its_blocks_until_it_has_ended() {
    let prompt = group_prompt(1, 40);
    let mut harness = with_cached(16, EngineConfig::default(), std::slice::from_ref(&prompt));
    harness.save([prompt.clone(), vec![3; 20]].concat(), 2);
    harness.submit(group_prompt(2, 60), 3, None);
    assert_eq!(harness.scheduler.waiting().len(), 1, "it needs blocks that the save holds");
    harness.finish();
    let saves = harness.saves.lock().expect("no panic");
    let [(_, _, bytes)] = &saves[..] else { panic!("one save, got {}", saves.len()) };
    assert_eq!(bytes.len(), 8 * harness.context.spec.block_bytes);
}

/// Goal: blocks that are evicted to make room can be copied out before they are overwritten, and
/// all of it is copied.
#[test]
fn evicted_blocks_are_copied_before_they_are_overwritten() {
    let prompt = group_prompt(1, 40);
    let mut harness = with_cached(16, EngineConfig::default(), std::slice::from_ref(&prompt));
    harness.submit(group_prompt(2, 58), 3, None);
    while !harness.callers[1].is_done() {
        harness.step(false);
        harness.read(true);
    }
    let copies = harness.evicted.lock().expect("no panic").clone();
    let [(positions, 1, bytes)] = &copies[..] else { panic!("one copy, got {copies:?}") };
    assert_eq!(*positions, prompt);
    assert_eq!(bytes.len(), 9 * harness.context.spec.block_bytes);
    harness.finish();
}

/// Goal: a save that is requested during a step is part of the next one.
#[test]
fn a_save_that_comes_during_a_step_is_made_by_the_next() {
    let prompt = group_prompt(1, 40);
    let mut harness = with_cached(32, EngineConfig::default(), std::slice::from_ref(&prompt));
    harness.submit(group_prompt(2, 20), 3, None);
    assert!(harness.in_flight.is_some());
    harness.save(prompt, 0);
    harness.finish();
    assert_eq!(harness.saves.lock().expect("no panic").len(), 1);
}

/// Goal: a save that fails, or of blocks that are not cached, yields nothing and holds nothing.
#[test]
fn failed_saves_yield_nothing() {
    let prompt = group_prompt(1, 40);
    let mut harness = with_cached(16, EngineConfig::default(), std::slice::from_ref(&prompt));
    harness.save(group_prompt(2, 40), 0);
    harness.save(prompt.clone(), 10);
    assert!(harness.in_flight.is_none(), "there is nothing to copy");
    harness.fake.fail_copies(1);
    harness.save(prompt, 0);
    harness.finish();
    assert!(harness.saves.lock().expect("no panic").is_empty());
}

/// Goal: a prompt with a stored checkpoint computes only the positions after it, the tree gets KV
/// and checkpoint, and KV that the pool has already is not loaded again.
#[test]
fn a_stored_checkpoint_is_loaded_with_its_kv() {
    for cached in [0, 20, 40] {
        let config = EngineConfig { max_batched_tokens: 16, ..EngineConfig::default() };
        let mut harness = Harness::with_states(4, 100, Some(3), config);
        let prompt = group_prompt(1, 43);
        if cached > 0 {
            // The KV of a prompt that parts there, and no checkpoint.
            let other = [&prompt[..cached], &[9; 3]].concat();
            harness.submit_request(other, 1, |request| request.options.pooling = None);
            harness.finish();
        }
        let before = harness.context.gauges.computed_tokens.get();
        let stored = stored_state(&prompt, 4, cached / 4 / 2, 3).expect("full blocks");
        harness.submit_stored(prompt.clone(), 2, stored);
        harness.finish();
        let gauges = &harness.context.gauges;
        assert_eq!(harness.callers.last().and_then(|caller| caller.cached), Some(40));
        assert_eq!(gauges.computed_tokens.get() - before, 3 + 1);
        harness.submit(prompt, 2, None);
        harness.finish();
        assert_eq!(harness.callers.last().and_then(|caller| caller.cached), Some(40));
        let audit = ready(harness.scheduler.audit()).expect("a consistent accounting");
        assert!(audit.blocks_committed >= 10 + 3, "{audit:?}");
    }
}

/// Goal: a stored checkpoint whose KV was in the pool when it was looked up, and was evicted before
/// the request started, is not used: its positions are computed, and nothing is committed that was
/// not written.
#[test]
fn a_checkpoint_without_its_kv_is_not_loaded() {
    let prompt = group_prompt(1, 43);
    for (cached, first_block, loaded) in [(40, 10, 40), (36, 10, 0), (0, 10, 0), (0, 5, 0)] {
        let mut harness = Harness::with_states(4, 100, Some(3), EngineConfig::default());
        if cached > 0 {
            // The KV of a prompt that parts there, and a checkpoint further on only.
            let other = [&prompt[..cached], &[9; 7]].concat();
            harness.submit(other, 1, None);
            harness.finish();
        }
        let stored = stored_state(&prompt, 4, first_block, 3).expect("full blocks");
        harness.submit_stored(prompt.clone(), 2, stored);
        // The request looks again for the lost blocks, and finds nothing.
        while !harness.lookups.is_empty() {
            harness.answer(0, None);
        }
        harness.finish();
        assert_eq!(harness.callers.last().and_then(|caller| caller.cached), Some(loaded));
        harness.submit(prompt.clone(), 2, None);
        harness.finish();
    }
}

/// Goal: without a checkpoint, or with one of another size, stored KV is refused for a model with a
/// recurrent state; a load that fails is computed.
#[test]
fn stored_kv_needs_a_checkpoint() {
    let mut harness = Harness::with_states(4, 100, Some(3), EngineConfig::default());
    let prompt = group_prompt(1, 43);
    for stored in [stored_kv(&prompt, 4, 0), stored_state(&prompt, 4, 0, 2).expect("full blocks")] {
        let mut request = SequenceRequest::new(prompt.clone(), 1);
        request.stored = Some(stored);
        let refused = harness.context.submit(0, request, 0, 0, harness.now).map(|_| ());
        assert!(matches!(refused, Err(EngineError::InvalidParameter { .. })), "{refused:?}");
    }
    harness.fake.fail_copies(1);
    let stored = stored_state(&prompt, 4, 0, 3).expect("full blocks");
    harness.submit_stored(prompt, 2, stored);
    harness.finish();
    assert_eq!(harness.context.gauges.computed_tokens.get(), 43 + 1);
}
