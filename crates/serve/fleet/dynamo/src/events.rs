//! Changes of the prefix cache, as the events of Dynamo's router.

use std::sync::Arc;

use dynamo_backend_common::KvEventPublisher;
use dynamo_kv_router::protocols::{
    BlockHashOptions, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, compute_block_hash_for_seq,
};
use stolon::{CacheEvent, Namespace};
use stolon_fleet::CacheFeed;

/// The number of the only rank: a worker is one engine.
pub(crate) const RANK: u32 = 0;

/// Publishes the content of the cache and its changes until the engine stops.
pub(crate) async fn publish(mut feed: CacheFeed, publisher: Arc<KvEventPublisher>) {
    while let Some(batch) = feed.next().await {
        let data = batch.events.iter().filter_map(convert);
        let number =
            |data| KvCacheEvent { event_id: publisher.next_event_id(), data, dp_rank: RANK };
        if publisher.publish_batch(data.map(number).collect()).is_err() {
            // Dynamo's runtime has ended.
            return;
        }
    }
}

/// The event as Dynamo defines it; none for one that the feed replaces by the whole cache.
fn convert(event: &CacheEvent) -> Option<KvCacheEventData> {
    match event {
        CacheEvent::Stored { namespace, parent, hashes, positions } => {
            let blocks = blocks(namespace, hashes, positions);
            let parent_hash = parent.map(Into::into);
            Some(KvCacheEventData::Stored(KvCacheStoreData {
                parent_hash,
                start_position: None,
                blocks,
            }))
        }
        CacheEvent::Removed { hashes } => {
            let block_hashes = hashes.iter().map(|&hash| hash.into()).collect();
            Some(KvCacheEventData::Removed(KvCacheRemoveData { block_hashes }))
        }
        CacheEvent::Cleared => Some(KvCacheEventData::Cleared),
        CacheEvent::Reset { .. } => None,
    }
}

/// The blocks with Stolon's chained hashes, and Dynamo's own hashes of their tokens. Blocks of a
/// namespace match no request outside of it.
fn blocks(namespace: &Namespace, hashes: &[u64], positions: &[u32]) -> Vec<KvCacheStoredBlockData> {
    let size = u32::try_from(positions.len() / hashes.len().max(1)).unwrap_or(u32::MAX);
    let name: Option<String> = (!namespace.is_base()).then(|| hexadecimal(&namespace.to_bytes()));
    let options =
        BlockHashOptions { cache_namespace: name.as_deref(), ..BlockHashOptions::default() };
    let tokens = compute_block_hash_for_seq(positions, size, options);
    let pairs = hashes.iter().zip(tokens);
    pairs
        .map(|(&hash, tokens_hash)| KvCacheStoredBlockData {
            block_hash: hash.into(),
            tokens_hash,
            mm_extra_info: None,
        })
        .collect()
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(namespace: Namespace) -> KvCacheStoreData {
        let event = CacheEvent::Stored {
            namespace,
            parent: Some(7),
            hashes: vec![8, 9],
            positions: (0..8).collect(),
        };
        match convert(&event) {
            Some(KvCacheEventData::Stored(data)) => data,
            other => panic!("expected stored blocks, got {other:?}"),
        }
    }

    /// Goal: a block has the hash by which the router finds the tokens of a request, and its own.
    #[test]
    fn blocks_are_found_by_their_tokens() {
        let data = stored(Namespace::default());
        let request: Vec<u32> = (0..8).collect();
        let wanted = compute_block_hash_for_seq(&request, 4, BlockHashOptions::default());
        let found: Vec<_> = data.blocks.iter().map(|block| block.tokens_hash).collect();
        assert_eq!(found, wanted);
        assert_eq!(data.parent_hash, Some(7_u64.into()));
        assert_eq!(data.blocks[1].block_hash, 9_u64.into());
    }

    /// Goal: blocks of a namespace are not offered to requests outside of it.
    #[test]
    fn namespaces_are_kept_apart() {
        let (base, other) = (stored(Namespace::default()), stored(Namespace::from_bytes([1; 32])));
        assert_ne!(base.blocks[0].tokens_hash, other.blocks[0].tokens_hash);
    }

    /// Goal: a removed block has the hash with which it was stored.
    #[test]
    fn removals_name_the_blocks() {
        let event = CacheEvent::Removed { hashes: vec![8] };
        let Some(KvCacheEventData::Removed(data)) = convert(&event) else { panic!("removed") };
        assert_eq!(data.block_hashes, vec![8_u64.into()]);
        assert!(convert(&CacheEvent::Reset { missed: 1 }).is_none());
    }
}
