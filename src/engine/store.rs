//! Storing: what is copied out of the pool to be written to the disk, and when.

use std::collections::HashSet;
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::Arc;

use stolon_actors::EngineHandle;
use stolon_kvcache::{EvictedPrefix, Namespace};
use stolon_scheduler::{EvictedCopy, KvSink, SaveRequest};
use stolon_tiers::{ChainKey, Claim};

use super::tier_policy::WritePolicy;
use super::tiers::{Disk, Lookup, Tiers};

/// How much of the pool is copied out and written at a time when all of it is.
const POOL_PART_BYTES: usize = 64 << 20;

impl Tiers {
    /// Notes that a request begins with this prompt. Stores what of it is in the pool and has been
    /// used often enough, if the write policy asks for it.
    pub(super) fn note_use(&self, disk: &Disk, handle: &EngineHandle, lookup: &Lookup) {
        let Lookup { namespace, tokens, places, cached, priority } = lookup;
        // What is found in the pool is not read, but is in use nonetheless.
        let positions = disk.tier.shape().record_positions();
        let in_pool = &places[..cached / positions];
        disk.tier.note_use(in_pool, *priority);
        let WritePolicy::WriteThroughSelective { hits } = self.write else { return };
        self.uses().note(places.iter().map(|place| place.key));
        let end = positions * self.used_often(in_pool.iter().map(|place| place.key), hits);
        if let Some(claim) = disk.writer.claim(*namespace, tokens, 0..end) {
            let (claim, handle) = (claim.priority(*priority), handle.clone());
            let runtime = handle.runtime().clone();
            runtime.spawn(async move { copy_out(&handle, claim).await });
        }
    }

    /// Number of leading positions that the write policy stores when they have been computed: whole
    /// records, or all.
    fn wanted_len(&self, disk: &Disk, namespace: &Namespace, tokens: &[u32]) -> usize {
        match self.write {
            WritePolicy::WriteThrough => tokens.len(),
            WritePolicy::WriteThroughSelective { hits } => {
                let keys = disk.tier.places(namespace, tokens).map(|place| place.key);
                self.used_often(keys, hits) * disk.tier.shape().record_positions()
            }
            WritePolicy::WriteBack => 0,
        }
    }

    /// Number of leading records that were found `hits` times after their first use.
    fn used_often(&self, keys: impl Iterator<Item = ChainKey>, hits: NonZeroU32) -> usize {
        let uses = self.uses();
        keys.take_while(|key| uses.at_least(hits.saturating_add(1).get(), key)).count()
    }

    /// Stores everything that is in the pool.
    pub(super) async fn store_pool(&self, handle: &EngineHandle) {
        let (Some(disk), Ok(tree)) = (self.disk.get(), handle.dump()) else { return };
        let shape = disk.tier.shape();
        let part = (POOL_PART_BYTES / shape.block_bytes.max(1)).max(1) * shape.block_size;
        let part = part.next_multiple_of(shape.record_positions());
        let inner: HashSet<usize> = tree.nodes.iter().filter_map(|node| node.parent).collect();
        let leaves = tree.nodes.iter().enumerate().filter(|(index, _)| !inner.contains(index));
        for (_, leaf) in leaves {
            // It may have been evicted in between.
            let Ok(Some(prefix)) = handle.cached_prefix(leaf.last_hash) else { continue };
            let tokens = Arc::new(prefix.positions);
            for start in (0..tokens.len()).step_by(part) {
                let positions = start..tokens.len().min(start + part);
                let claim = disk.writer.claim(prefix.namespace, &tokens, positions);
                let Some(claim) = claim else { continue };
                copy_out(handle, claim).await;
                let writer = disk.writer.clone();
                // Fails only if the runtime ends.
                let _ = tokio::task::spawn_blocking(move || writer.flush()).await;
            }
        }
    }
}

impl KvSink for Tiers {
    fn wanted(
        &self,
        namespace: &Namespace,
        tokens: &Arc<Vec<u32>>,
        committed: Range<usize>,
        priority: i32,
    ) -> Option<SaveRequest> {
        let disk = self.disk.get()?;
        let block_size = disk.tier.shape().block_size;
        let blocks_per_record = disk.tier.shape().record_positions() / block_size;
        let record = |block: usize| block / blocks_per_record;
        if record(committed.start) == record(committed.end) {
            return None;
        }
        let end = self.wanted_len(disk, namespace, &tokens[..committed.end * block_size]);
        let claim = disk.writer.claim(*namespace, tokens, 0..end)?.priority(priority);
        Some(SaveRequest {
            namespace: *namespace,
            tokens: Arc::clone(tokens),
            blocks: claim.blocks(),
            done: Box::new(|bytes| claim.write(bytes)),
        })
    }

    fn takes_evicted(&self) -> bool {
        self.write == WritePolicy::WriteBack
    }

    fn evicted(&self, prefix: EvictedPrefix) -> Option<EvictedCopy> {
        let disk = self.disk.get()?;
        let (block_size, record) =
            (disk.tier.shape().block_size, disk.tier.shape().record_positions());
        let tokens = Arc::new(prefix.positions);
        // All records that lose a block.
        let start = prefix.evicted * block_size / record * record;
        let claim = disk.writer.claim(prefix.namespace, &tokens, start..tokens.len())?;
        let claim = claim.priority(prefix.priority);
        Some(EvictedCopy {
            blocks: prefix.blocks[claim.blocks()].to_vec(),
            done: Box::new(|bytes| claim.write(bytes)),
        })
    }
}

/// Copies claimed positions out of the pool and writes them. What is not in the pool is left out.
async fn copy_out(handle: &EngineHandle, claim: Claim) {
    let (namespace, tokens) = (claim.namespace(), Arc::clone(claim.tokens()));
    if let Ok(Some(bytes)) = handle.save_blocks(namespace, tokens, claim.blocks()).await {
        claim.write(bytes);
    }
}
