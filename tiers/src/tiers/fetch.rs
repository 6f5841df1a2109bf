//! Loading: stored KV of a prompt is read before its request is submitted.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use stolon_kvcache::checkpoint_positions;
use stolon_scheduler::{KvSource, PendingKv, Prefetch, PromptLookup, StoredKv};

use super::{Open, Tiers};
use crate::load::LoadEnd;
use crate::place::Place;
use crate::plan::{Lookup, ReadPlan, Speeds, plan};
use crate::tier::Tier;

impl KvSource for Tiers {
    fn prefetch(&self, prompt: &PromptLookup) -> Prefetch {
        let Some(open) = self.open.get() else { return Prefetch::default() };
        let shape = open.disk.shape();
        let places: Vec<Place> = shape.places(&prompt.namespace, &prompt.tokens).collect();
        let save = self.note_use(open, prompt, &places);
        if prompt.checkpoint_positions == 0 {
            return Prefetch { save, load: self.load(open, prompt, places) };
        }
        let load = open.with_checkpoint(prompt, &places).and_then(|prompt| {
            let places = shape.places(&prompt.namespace, &prompt.tokens).collect();
            self.load(open, &prompt, places)
        });
        Prefetch { save, load }
    }
}

impl Tiers {
    /// Decides which records of a prompt are read, and begins to read them.
    fn load(&self, open: &Open, prompt: &PromptLookup, places: Vec<Place>) -> Option<PendingKv> {
        let shape = open.disk.shape();
        let record_positions = shape.record_positions();
        let (on_disk, stored) = open.stored(prompt.cached / record_positions, &places);
        let lookup = Lookup {
            cached: prompt.cached,
            resume: prompt.resume,
            checkpoint_records: prompt.checkpoint_positions / record_positions,
            record_positions,
            on_disk,
            stored,
            room: self.loads.room() / shape.full_record_bytes(),
        };
        let plan = plan(&lookup, &open.speeds(prompt.prefill_rate), self.prefetch);
        open.measure(&open.disk, prompt, &places[plan.slow_disk.clone()]);
        if let Some(remote) = &open.remote {
            open.measure(remote, prompt, &places[plan.slow_store.clone()]);
        }
        if plan.is_empty() { None } else { self.begin(open, prompt, places, plan) }
    }

    /// Begins to read a part of a prompt, or joins a read that has begun. `None` if there is no
    /// memory for it now.
    fn begin(
        &self,
        open: &Open,
        prompt: &PromptLookup,
        places: Vec<Place>,
        plan: ReadPlan,
    ) -> Option<PendingKv> {
        let (shape, records) = (*open.disk.shape(), plan.records());
        let key = (places.get(records.end - 1)?.key, records.start);
        let bytes = shape.record_bytes(records.len() * shape.record_positions());
        let (own, prompt, limit) = (open.clone(), prompt.clone(), plan.limit);
        let first_block = records.start * shape.record_positions() / shape.block_size;
        let checkpoint_blocks = prompt.checkpoint_positions / shape.block_size;
        let read = move |end: LoadEnd| {
            let blocks = own.read(&prompt, &places, &plan);
            let is_whole =
                blocks.len() == records.len() * shape.record_positions() / shape.block_size;
            let kv = StoredKv::new(shape.block_size, first_block, blocks);
            end.finish(match checkpoint_blocks {
                0 => Some(kv).filter(|kv| !kv.range().is_empty()),
                count => is_whole.then(|| kv.with_checkpoint(count)),
            });
            // This only affects eviction from the disk, so no request waits for it.
            own.disk.touch(&places[..plan.disk.end], prompt.priority);
        };
        let kv = self.loads.begin(key, bytes.unwrap_or(usize::MAX), read)?;
        Some(PendingKv { kv, limit })
    }
}

impl Open {
    /// For a model with a recurrent state: the longest prefix of a prompt, shorter than the prompt
    /// and longer than what need not be computed, that is stored with its checkpoint. It is followed
    /// by the positions of the checkpoint.
    fn with_checkpoint(&self, prompt: &PromptLookup, places: &[Place]) -> Option<PromptLookup> {
        let (shape, record) = (self.disk.shape(), self.disk.shape().record_positions());
        if !prompt.checkpoint_positions.is_multiple_of(record) {
            return None;
        }
        let (_, stored) = self.stored(prompt.cached / record, places);
        let last = stored.min((prompt.tokens.len().checked_sub(1)?) / record);
        let positions = checkpoint_positions(prompt.checkpoint_positions);
        let count = prompt.resume / record + 1..=last;
        let found = count.rev().find(|&count| {
            let checkpoint = shape.places_after(places[count - 1].key, &positions);
            let checkpoint: Vec<Place> = checkpoint.collect();
            self.stored(0, &checkpoint).1 == checkpoint.len()
        })?;
        let tokens = [&prompt.tokens[..found * record], &positions].concat();
        let cached = prompt.cached.min(found * record);
        Some(PromptLookup { tokens: Arc::new(tokens), cached, ..prompt.clone() })
    }

    fn speeds(&self, prefill_rate: Option<f64>) -> Speeds {
        let store = self.remote.as_ref().map(|remote| remote.record_time()).unwrap_or_default();
        Speeds { prefill_rate, disk: self.disk.record_time(), store }
    }

    /// Reads blocks, fewer than planned if something cannot be read. What comes from the object
    /// store is written to the disk. Blocks.
    fn read(&self, prompt: &PromptLookup, places: &[Place], plan: &ReadPlan) -> Vec<Bytes> {
        let (namespace, tokens) = (&prompt.namespace, &prompt.tokens);
        let shape = self.disk.shape();
        let position = |records: usize| records * shape.record_positions();
        let mut blocks = read(&*self.disk, prompt, places, plan.disk.clone());
        let expected = position(plan.disk.len()) / shape.block_size;
        if let (Some(remote), false, true) =
            (&self.remote, plan.store.is_empty(), blocks.len() == expected)
        {
            let claim = self.writer.claim(*namespace, tokens, 0..position(plan.store.end));
            let fetched = read(&**remote, prompt, places, plan.store.clone());
            // A claim that begins elsewhere has found other records to be written.
            let start = position(plan.store.start);
            if let Some(claim) = claim.filter(|claim| claim.positions().start == start) {
                claim.write(fetched.concat());
            }
            blocks.extend(fetched);
        }
        blocks
    }

    /// Reads records in the background if the speed of their tier was not measured for a while.
    /// Otherwise, a tier that was too slow once would not be tried again.
    fn measure<T: Tier + ?Sized + 'static>(
        &self,
        tier: &Arc<T>,
        prompt: &PromptLookup,
        places: &[Place],
    ) {
        if places.is_empty() || !tier.speed_is_due() {
            return;
        }
        let (tier, prompt, places) = (Arc::clone(tier), prompt.clone(), places.to_vec());
        let read = move || drop(tier.read(&prompt.namespace, &prompt.tokens, &places));
        // Without a thread, the speed is measured another time.
        let _ = std::thread::Builder::new().name("stolon-load".to_owned()).spawn(read);
    }
}

fn read(
    tier: &dyn Tier,
    prompt: &PromptLookup,
    places: &[Place],
    records: Range<usize>,
) -> Vec<Bytes> {
    match records.is_empty() {
        true => Vec::new(),
        false => tier.read(&prompt.namespace, &prompt.tokens, &places[records]),
    }
}
