//! Goal: a prefix that is stored with a checkpoint of the recurrent state is read with all of it or
//! not at all, also while records are evicted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use stolon_kvcache::{EvictionPolicy, Namespace, TokenSpanInterner, checkpoint_positions};
use stolon_scheduler::{KvSink, KvSource, PromptLookup};
use stolon_tiers::{PrefetchPolicy, RecordShape, TierSettings, Tiers, WritePolicy};

const SHAPE: RecordShape = RecordShape { fingerprint: [5; 32], block_size: 16, block_bytes: 10 };

/// Positions of the prefix, two records, and of its checkpoint, one record.
const PREFIX: usize = 128;
const CHECKPOINT: usize = 64;

/// Stores blocks for all of `tokens` that are not stored.
fn store(tiers: &Tiers, tokens: &Arc<Vec<u32>>) {
    let blocks = tokens.len() / SHAPE.block_size;
    let Some(save) = tiers.wanted(&Namespace::default(), tokens, 0..blocks, 0) else { return };
    let bytes = save.blocks.flat_map(|block| [block as u8; 10]).collect();
    (save.done)(bytes);
    tiers.flush_disk();
}

#[test]
fn a_checkpoint_is_read_with_its_prefix_or_not_at_all() {
    let directory = tempfile::tempdir().expect("a directory");
    let tiers = Tiers::new(WritePolicy::WriteThrough, PrefetchPolicy::WaitComplete);
    let settings = TierSettings {
        directory: directory.path().to_owned(),
        // Room for three records: each new one evicts the end of another prefix.
        budget_bytes: 3 * SHAPE.record_bytes(64, 0).expect("a size") as u64,
        eviction: EvictionPolicy::Lru.order(),
        read_memory: 1 << 20,
        object_store: None,
    };
    tiers.open(settings, SHAPE, Arc::new(TokenSpanInterner::new(1000))).expect("it is free");
    let prompt: Vec<u32> = (0..PREFIX as u32 + 20).collect();
    let whole = Arc::new([&prompt[..PREFIX], &checkpoint_positions(CHECKPOINT)[..]].concat());
    let other = Arc::new(vec![7; 64]);
    let lookup = PromptLookup {
        namespace: Namespace::default(),
        tokens: Arc::new(prompt),
        cached: 0,
        resume: 0,
        checkpoint_positions: CHECKPOINT,
        priority: 0,
        prefill_rate: None,
        is_repeated: true,
    };
    let (ends, read) = (AtomicBool::new(false), &mut 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ends.load(Ordering::Relaxed) {
                store(&tiers, &other);
                store(&tiers, &whole);
            }
        });
        for _ in 0..100_000 {
            let Some(load) = tiers.prefetch(&lookup).load else { continue };
            let Some(kv) = futures::executor::block_on(load.kv) else { continue };
            *read += 1;
            let expected = (0..(PREFIX + CHECKPOINT) / SHAPE.block_size, PREFIX);
            if (kv.range(), kv.kv_end()) != expected {
                // The scope waits for the other thread before it panics.
                ends.store(true, Ordering::Relaxed);
                panic!("expected {expected:?}, got {:?}", (kv.range(), kv.kv_end()));
            }
        }
        ends.store(true, Ordering::Relaxed);
    });
    assert!(*read > 0, "it is never stored");
}
