//! Loading: stored KV of a prompt is read before its request is submitted, or while it waits.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use stolon_kvcache::{Namespace, checkpoint_positions};
use stolon_scheduler::{KvSource, PendingKv, Prefetch, PromptLookup, StoredKv};

use super::{Found, Open, Tiers};
use crate::load::LoadEnd;
use crate::place::Place;
use crate::plan::{Lookup, ReadPlan, Speeds, plan};
use crate::tier::Tier;
use crate::tokens::NamedTokens;
use crate::writer::Claim;

/// A prompt whose stored KV is looked for.
#[derive(Clone, Debug)]
struct Prompt {
    namespace: Namespace,
    tokens: NamedTokens,
    priority: i32,
}

impl KvSource for Tiers {
    fn prefetch(&self, lookup: &PromptLookup) -> Prefetch {
        let Some(open) = self.open.get() else { return Prefetch::default() };
        let tokens = NamedTokens::new(Arc::clone(&lookup.tokens), &open.interner);
        let save = match lookup.is_repeated {
            true => None,
            false => self.note_use(open, lookup, &tokens),
        };
        let load = match lookup.checkpoint_positions {
            0 => {
                let found = open.find(&lookup.namespace, &tokens, lookup.cached);
                self.load(open, lookup, &tokens, found)
            }
            _ => open.with_checkpoint(lookup, &tokens).and_then(|(cached, tokens, found)| {
                self.load(open, &PromptLookup { cached, ..lookup.clone() }, &tokens, found)
            }),
        };
        Prefetch { save, load }
    }
}

impl Tiers {
    /// Decides which of the records that were found of a prompt are read, and begins to read them.
    /// `tokens` are those of the prompt, or of its beginning and a checkpoint.
    fn load(
        &self,
        open: &Open,
        prompt: &PromptLookup,
        tokens: &NamedTokens,
        found: Found,
    ) -> Option<PendingKv> {
        let shape = open.disk.shape();
        let record_positions = shape.record_positions();
        let Found { places, on_disk, stored } = found;
        let last = stored.checked_sub(1).and_then(|last| places.get(last));
        let lookup = Lookup {
            cached: prompt.cached,
            resume: prompt.resume,
            checkpoint_records: prompt.checkpoint_positions / record_positions,
            record_positions,
            on_disk,
            stored,
            possible: open.possible(&places, stored),
            missing: last.map_or(0, |place| record_positions - place.positions),
            room: open.loads.room() / shape.full_record_bytes(),
        };
        let plan = plan(&lookup, &open.speeds(prompt.prefill_rate), self.prefetch);
        let (namespace, priority) = (prompt.namespace, prompt.priority);
        let checkpoint_blocks = prompt.checkpoint_positions / shape.block_size;
        let prompt = Prompt { namespace, tokens: tokens.clone(), priority };
        measure(&open.disk, &prompt, &places[plan.slow_disk.clone()]);
        if let Some(remote) = &open.remote {
            measure(remote, &prompt, &places[plan.slow_store.clone()]);
        }
        match plan.is_empty() {
            true => None,
            false => self.begin(open, prompt, places, plan, checkpoint_blocks),
        }
    }

    /// Begins to read a part of a prompt, whose last blocks may be a checkpoint, or joins a read
    /// that has begun. `None` if there is no memory for it now.
    fn begin(
        &self,
        open: &Open,
        prompt: Prompt,
        places: Vec<Place>,
        plan: ReadPlan,
        checkpoint_blocks: usize,
    ) -> Option<PendingKv> {
        let (shape, records) = (*open.disk.shape(), plan.records());
        let key = (places.get(records.end - 1)?.key, records.start);
        let bytes = places[records.clone()].iter().map(|place| place.bytes(&shape));
        let bytes = bytes.fold(0, usize::saturating_add);
        let (own, limit) = (open.clone(), plan.limit);
        let first_block = places[records.start].first / shape.block_size;
        let read = move |end: LoadEnd| {
            let blocks = own.read(&prompt, &places, &plan);
            let is_whole = blocks.len() == own.block_count(&places[records]);
            let kv = StoredKv::new(shape.block_size, first_block, blocks);
            end.finish(match checkpoint_blocks {
                0 => Some(kv).filter(|kv| !kv.range().is_empty()),
                count => is_whole.then(|| kv.with_checkpoint(count)),
            });
            // This only affects eviction from the disk, so no request waits for it.
            own.disk.touch(&places[..plan.disk.end], prompt.priority);
        };
        let kv = open.loads.begin(key, bytes, read)?;
        Some(PendingKv { kv, limit })
    }
}

impl Open {
    /// For a model with a recurrent state: the longest prefix of a prompt, shorter than the prompt
    /// and longer than the part that does not have to be computed anyway, that is stored with its
    /// checkpoint. It is followed by the positions of the checkpoint. The number is how many of its
    /// positions are in the pool.
    ///
    /// What was found is not looked up again. If a record is evicted meanwhile, it cannot be read,
    /// and then none of them is used. A second lookup would find fewer records, and take the last of
    /// these for the checkpoint.
    fn with_checkpoint(
        &self,
        prompt: &PromptLookup,
        tokens: &NamedTokens,
    ) -> Option<(usize, NamedTokens, Found)> {
        let (shape, record) = (self.disk.shape(), self.disk.shape().record_positions());
        if !prompt.checkpoint_positions.is_multiple_of(record) {
            return None;
        }
        let mut places: Vec<Place> = shape.places(&prompt.namespace, tokens).collect();
        let (on_disk, stored) = self.stored(prompt.cached / record, &places);
        let last = stored.min((prompt.tokens.len().checked_sub(1)?) / record);
        let positions = checkpoint_positions(prompt.checkpoint_positions);
        let positions = NamedTokens::from(positions.to_vec());
        let mut counts = (prompt.resume / record + 1..=last).rev();
        let (count, checkpoint, of_checkpoint) = counts.find_map(|count| {
            let checkpoint = shape.places_after(places[count - 1].key, 0, &positions);
            let checkpoint: Vec<Place> = checkpoint.collect();
            let (on_disk, stored) = self.stored(0, &checkpoint);
            (stored == checkpoint.len()).then_some((count, checkpoint, on_disk))
        })?;
        let end = count * record;
        places.truncate(count);
        places.extend(
            checkpoint.into_iter().map(|place| Place { first: end + place.first, ..place }),
        );
        let on_disk = if on_disk < count { on_disk } else { count + of_checkpoint };
        let found = Found { stored: places.len(), on_disk, places };
        Some((prompt.cached.min(end), tokens.prefix_with(end, positions.tokens()), found))
    }

    /// Number of blocks of consecutive records.
    fn block_count(&self, places: &[Place]) -> usize {
        places.iter().map(|place| place.positions).sum::<usize>() / self.disk.shape().block_size
    }

    fn speeds(&self, prefill_rate: Option<f64>) -> Speeds {
        let remote = self.remote.as_ref();
        let store = remote.map(|remote| remote.record_time()).unwrap_or_default();
        let look = remote.map(|remote| remote.look_time()).unwrap_or_default();
        Speeds { prefill_rate, disk: self.disk.record_time(), store, look }
    }

    /// Number of leading records that are stored, or may be in the object store.
    fn possible(&self, places: &[Place], stored: usize) -> usize {
        match (&self.remote, places.get(stored)) {
            (Some(remote), Some(next)) if remote.may_contain(&next.key) => places.len(),
            _ => stored,
        }
    }

    /// Reads blocks, fewer than planned if something cannot be read. Records that come from the
    /// object store are written to the disk. Blocks.
    fn read(&self, prompt: &Prompt, places: &[Place], plan: &ReadPlan) -> Vec<Bytes> {
        let (namespace, tokens) = (prompt.namespace, &prompt.tokens);
        let mut blocks = read(&*self.disk, prompt, places, plan.disk.clone());
        if blocks.len() < self.block_count(&places[plan.disk.clone()]) {
            return blocks;
        }
        let fetched = self.fetch(prompt, places, plan);
        let first = places[plan.disk.start].first + blocks.len() * self.disk.shape().block_size;
        let end = first + fetched.len() * self.disk.shape().block_size;
        // If another save has claimed part of this range, write nothing.
        let is_own = |claim: &Claim| claim.positions().start == first;
        if end > first
            && let Some(claim) = self.writer.claim(namespace, tokens, 0..end).filter(is_own)
        {
            claim.write(fetched.concat());
        }
        blocks.extend(fetched);
        blocks
    }

    /// The blocks of a plan that come from the object store.
    fn fetch(&self, prompt: &Prompt, places: &[Place], plan: &ReadPlan) -> Vec<Bytes> {
        let Some(remote) = &self.remote else { return Vec::new() };
        let mut blocks = read(&**remote, prompt, places, plan.store.clone());
        if !plan.look.is_empty() && blocks.len() == self.block_count(&places[plan.store.clone()]) {
            let (namespace, look) = (&prompt.namespace, &places[plan.look.clone()]);
            blocks.extend(remote.look(namespace, &prompt.tokens, look, plan.look_limit));
        }
        blocks
    }
}

/// Reads records in the background if the speed of their tier was not measured for a while.
/// Otherwise, a tier that was too slow once would not be tried again.
fn measure<T: Tier + ?Sized + 'static>(tier: &Arc<T>, prompt: &Prompt, places: &[Place]) {
    if places.is_empty() || !tier.speed_is_due() {
        return;
    }
    let (tier, prompt, places) = (Arc::clone(tier), prompt.clone(), places.to_vec());
    let read = move || drop(tier.read(&prompt.namespace, &prompt.tokens, &places));
    // Without a thread, the speed is measured another time.
    let _ = std::thread::Builder::new().name("stolon-load".to_owned()).spawn(read);
}

fn read(tier: &dyn Tier, prompt: &Prompt, places: &[Place], records: Range<usize>) -> Vec<Bytes> {
    match records.is_empty() {
        true => Vec::new(),
        false => tier.read(&prompt.namespace, &prompt.tokens, &places[records]),
    }
}
