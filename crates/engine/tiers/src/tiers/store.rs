//! Storing: which blocks are copied out of the pool to be written to the disk, and when.

use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::Arc;

use stolon_kvcache::{EvictedPrefix, Namespace, len_before_checkpoint};
use stolon_scheduler::{EvictedCopy, KvSink, PromptLookup, SaveRequest, StoredPin};

use super::{Open, Tiers};
use crate::place::{Place, ends_image};
use crate::policy::WritePolicy;
use crate::shared::lock;
use crate::tokens::NamedTokens;
use crate::writer::Claim;

/// Number of bytes that are copied out and written at a time when the whole pool is stored.
const POOL_PART_BYTES: usize = 64 << 20;

impl Tiers {
    /// Notes that a request begins with this prompt. If the write policy stores records that are
    /// used often, returns the records that are in the pool, have been used often enough and are
    /// not stored yet.
    pub(super) fn note_use(
        &self,
        open: &Open,
        prompt: &PromptLookup,
        tokens: &NamedTokens,
    ) -> Option<SaveRequest> {
        let (shape, len) = (open.disk.shape(), tokens.tokens().len());
        let places: Vec<Place> = shape.stored_places(&prompt.namespace, tokens, len).collect();
        let in_pool = places.iter().copied().filter(|place| place.end() <= prompt.cached);
        let in_pool: Vec<Place> = in_pool.collect();
        // Records whose KV is in the pool are not read, but they are in use nonetheless.
        open.disk.note_use(&in_pool, prompt.priority);
        let WritePolicy::WriteThroughSelective { hits } = self.write else { return None };
        lock(&self.uses).note(places.iter().map(|place| place.key));
        let end = self.used_often(in_pool.into_iter(), hits);
        let claim = open.writer.claim(prompt.namespace, tokens, 0..end)?;
        Some(claim.priority(prompt.priority).save())
    }

    /// Number of the first `end` positions that the write policy stores once they are computed:
    /// all, or the length of the whole records among them that are used often.
    fn wanted_len(
        &self,
        open: &Open,
        namespace: &Namespace,
        tokens: &NamedTokens,
        end: usize,
    ) -> usize {
        match self.write {
            WritePolicy::WriteThrough => end,
            WritePolicy::WriteThroughSelective { hits } => {
                // A checkpoint is used as often as its prefix.
                let prefix = len_before_checkpoint(&tokens.tokens()[..end]);
                let places = open.disk.shape().stored_places(namespace, tokens, prefix);
                let often = self.used_often(places, hits);
                if often == prefix { end } else { often }
            }
            WritePolicy::WriteBack => 0,
        }
    }

    /// The end of the last one of these records that was used `hits` times after its first use.
    /// Records before it were used as often.
    fn used_often(&self, places: impl Iterator<Item = Place>, hits: NonZeroU32) -> usize {
        let (uses, count) = (lock(&self.uses), hits.saturating_add(1).get());
        let often = places.filter(|place| uses.at_least(count, &place.key));
        often.map(|place| place.end()).max().unwrap_or(0)
    }

    /// Whether the pool is stored only before it is lost. In that case, when the engine stops or
    /// everything is to be stored on the disk, the caller gives each cached prefix to
    /// [`Tiers::claims`].
    pub fn stores_pool(&self) -> bool {
        self.open.get().is_some() && self.write == WritePolicy::WriteBack
    }

    /// Claims the records of a prefix in the pool that are not stored yet, part by part. The caller
    /// copies the blocks of each claim out of the pool and calls [`Claim::write`] before it asks
    /// for the next one, so that the memory of the copies is bounded.
    pub fn claims(
        &self,
        namespace: Namespace,
        tokens: Vec<u32>,
    ) -> impl Iterator<Item = Claim> + Send + use<> {
        let tokens = Arc::new(tokens);
        self.open.get().cloned().into_iter().flat_map(move |open| {
            let shape = *open.disk.shape();
            let tokens = NamedTokens::new(Arc::clone(&tokens), &open.interner);
            let part = (POOL_PART_BYTES / shape.block_bytes.max(1)).max(1) * shape.block_size;
            let part = part.next_multiple_of(shape.record_positions());
            let len = tokens.tokens().len();
            (0..len).step_by(part).filter_map(move |start| {
                let positions = start..len.min(start + part);
                open.writer.claim(namespace, &tokens, positions)
            })
        })
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
        let open = self.open.get()?;
        let block_size = open.disk.shape().block_size;
        let blocks_per_record = open.disk.shape().record_positions() / block_size;
        let record = |block: usize| block / blocks_per_record;
        let end = committed.end * block_size;
        let new = &tokens[committed.start * block_size..end];
        if record(committed.start) == record(committed.end) && !new.iter().any(ends_image) {
            return None;
        }
        let tokens = NamedTokens::new(Arc::clone(tokens), &open.interner);
        let end = self.wanted_len(open, namespace, &tokens, end);
        Some(open.writer.claim(*namespace, &tokens, 0..end)?.priority(priority).save())
    }

    /// Whole records only, so that a checkpoint begins with a record.
    fn checkpoint_distance(&self, block_size: usize) -> usize {
        let open = self.open.get();
        open.map_or(block_size, |open| open.disk.shape().record_positions())
    }

    fn takes_evicted(&self) -> bool {
        self.write == WritePolicy::WriteBack
    }

    fn evicted(&self, prefix: EvictedPrefix) -> Option<EvictedCopy> {
        let open = self.open.get()?;
        let shape = open.disk.shape();
        let (block_size, record) = (shape.block_size, shape.record_positions());
        let len = prefix.positions.len();
        let tokens = NamedTokens::new(Arc::new(prefix.positions), &open.interner);
        // Include every record that loses a block.
        let start = prefix.evicted * block_size / record * record;
        let claim = open.writer.claim(prefix.namespace, &tokens, start..len)?;
        let claim = claim.priority(prefix.priority);
        Some(EvictedCopy {
            blocks: prefix.blocks[claim.blocks()].to_vec(),
            done: Box::new(|bytes| claim.write(bytes)),
        })
    }

    fn stores_pins(&self) -> bool {
        true
    }

    fn pinned(&self, namespace: &Namespace, tokens: &Arc<Vec<u32>>) -> Option<StoredPin> {
        let open = self.open.get()?;
        let (shape, len) = (open.disk.shape(), tokens.len());
        let tokens = NamedTokens::new(Arc::clone(tokens), &open.interner);
        let keys = shape.stored_places(namespace, &tokens, len).map(|place| place.key).collect();
        let held = Box::new(open.disk.protect(keys));
        let claim = open.writer.claim(*namespace, &tokens, 0..len);
        Some(StoredPin { save: claim.map(Claim::save), held })
    }
}
