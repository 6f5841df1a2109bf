//! The other indexes, dynamo-kv-router and kv-index, filled with the same prompts.

use crate::measure::Entry;
use crate::workload::{BLOCK, Workload};
use dynamo_kv_router::protocols::{
    BlockHashOptions, ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, RouterEvent, compute_block_hash_for_seq,
    compute_seq_hash_for_block,
};
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, ThreadPoolIndexer};
use std::hint::black_box;
use std::sync::Arc;

fn hashes(prompt: &[u32]) -> Vec<LocalBlockHash> {
    compute_block_hash_for_seq(prompt, BLOCK as u32, BlockHashOptions::default())
}

fn stored(event_id: u64, prompt: &[u32]) -> RouterEvent {
    let local = hashes(prompt);
    let sequence = compute_seq_hash_for_block(&local);
    let block = |(local, sequence): (&LocalBlockHash, &u64)| KvCacheStoredBlockData {
        block_hash: ExternalSequenceBlockHash(*sequence),
        tokens_hash: *local,
        mm_extra_info: None,
    };
    let blocks = local.iter().zip(&sequence).map(block).collect();
    let data = KvCacheStoreData { parent_hash: None, start_position: Some(0), blocks };
    let data = KvCacheEventData::Stored(data);
    RouterEvent::new(1, KvCacheEvent { event_id, dp_rank: 0, data })
}

pub fn entries(workload: &Workload) -> Vec<Entry<'_>> {
    let mut entries = dynamo(workload);
    entries.push(chain_index(workload));
    entries.push(token_tree(workload));
    entries
}

fn dynamo(workload: &Workload) -> Vec<Entry<'_>> {
    let index = ThreadPoolIndexer::new(ConcurrentRadixTreeCompressed::new(), 1, BLOCK as u32);
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    for (event_id, prompt) in workload.prompts.iter().enumerate() {
        index.enqueue_event(stored(event_id as u64, prompt)).expect("room");
    }
    runtime.block_on(index.flush());
    let queries = [&workload.prompts, &workload.partial, &workload.miss];
    let hashed = queries.map(|all| all.iter().map(|p| hashes(p)).collect::<Vec<_>>());
    let blocks = |tokens: usize| Some(tokens / BLOCK);
    let expected = [blocks(workload.prompts[3].len()), blocks(workload.shared), None];
    for (kind, expected) in expected.into_iter().enumerate() {
        let scores = index.backend().find_matches_impl(&hashed[kind][3], false).scores;
        assert_eq!(scores.values().next().map(|&score| score as usize), expected);
    }
    let index = Arc::new(index);
    let shared = index.clone();
    let counted = move |kind: usize, i: usize| {
        let hashed = hashes(&queries[kind][i]);
        black_box(shared.backend().find_matches_impl(&hashed, false));
    };
    let given = move |kind: usize, i: usize| {
        black_box(index.backend().find_matches_impl(&hashed[kind][i], false));
    };
    let only = move |kind: usize, i: usize| {
        black_box(hashes(&queries[kind][i]));
    };
    vec![
        Entry { name: "hashing alone (XXH3)", lookup: Box::new(only) },
        Entry { name: "dynamo CRTC: including hashing", lookup: Box::new(counted) },
        Entry { name: "dynamo CRTC: hashes given", lookup: Box::new(given) },
    ]
}

fn chain_index(workload: &Workload) -> Entry<'_> {
    let index = kv_index::ChainIndex::with_max_workers(64);
    let worker = index.intern_worker("w0").expect("room");
    let mut map = kv_index::ChainBlockMap::new();
    let queries = [&workload.prompts, &workload.partial, &workload.miss];
    let hash = |prompt: &Vec<u32>| kv_index::compute_request_content_hashes(prompt, BLOCK);
    let hashed = queries.map(|all| all.iter().map(hash).collect::<Vec<_>>());
    for prompt in &hashed[0] {
        let mut last = None;
        let blocks: Vec<kv_index::StoredBlock> = prompt
            .iter()
            .map(|&content_hash| {
                let seq_hash = match last {
                    None => kv_index::SequenceHash(content_hash.0),
                    Some(parent) => kv_index::chain_prefix_hash(parent, content_hash),
                };
                last = Some(seq_hash);
                kv_index::StoredBlock { seq_hash, content_hash }
            })
            .collect();
        index.apply_stored(worker, &blocks, None, &mut map).expect("stored");
    }
    let lookup = move |kind: usize, i: usize| {
        let key = |hash: &kv_index::ContentHash| hash.0;
        index.score_into(&hashed[kind][i], key, false, |worker, score| {
            black_box((worker, score));
        });
    };
    Entry { name: "kv-index ChainIndex: hashes given", lookup: Box::new(lookup) }
}

fn token_tree(workload: &Workload) -> Entry<'_> {
    let index = kv_index::TokenTree::new();
    for prompt in &workload.prompts {
        index.insert_tokens(prompt, "w0");
    }
    let queries = [&workload.prompts, &workload.partial, &workload.miss];
    let lookup = move |kind: usize, i: usize| {
        black_box(index.match_prefix_with_counts(&queries[kind][i]));
    };
    Entry { name: "kv-index TokenTree: tokens in", lookup: Box::new(lookup) }
}
