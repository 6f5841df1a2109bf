//! Recurrent states, for models that have them: the slots of running sequences, and where
//! checkpoints are taken.
//!
//! A sequence of such a model resumes from a checkpoint only, so a checkpoint is worth as much as
//! the requests that will resume from it. It is taken
//!
//! - before the last position of a prompt, from which a repeated prompt, and the next turn of a
//!   conversation, resume;
//! - after the last image of a prompt, from which another question about it resumes;
//! - after the first message of a conversation, which is its instructions as a rule, and the same in
//!   the next conversation;
//! - where the request says that a part of its prompt ends that is used again;
//! - where the prompt parts from cached prompts, if the KV matched further than the last
//!   checkpoint: the next prompt that parts there resumes there;
//! - where followers part from the prompt that they wait for;
//! - at regular distances within a long prompt, so that also the first prompt that parts from this
//!   one resumes close to that place;
//! - after the last full block of an answer, as the next turn of a conversation begins with it. The
//!   end of an answer is not known in advance, so a sequence overwrites one checkpoint of its own
//!   while it generates, and publishes it when it ends or is preempted.
//!
//! Taking one costs a copy of the state, never a second pass. It is never necessary: if there are
//! no blocks for it, the sequence continues without a checkpoint.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use stolon_kvcache::{BlockId, BlockLease, CheckpointLease, Namespace};

use crate::token_set::TokenSet;

/// Minimum distance of regular checkpoints, in positions. Larger ones are multiples of it.
const DISTANCE_MIN: usize = 512;

/// The regular checkpoints of a prompt take at most this part of the pool.
const PART_OF_POOL: usize = 8;

/// Number of checkpoints' worth of KV between two regular checkpoints that are stored elsewhere,
/// too, or for which the pool is too small, so that they take at most a fifth of the memory of the
/// KV that they belong to.
const KV_PER_CHECKPOINT: usize = 4;

/// Minimum length of a first message that gets a checkpoint, in positions. A shorter one is computed
/// again sooner than it is worth the memory.
const FIRST_MESSAGE_MIN: usize = 128;

/// Minimum distance of the checkpoints of an answer, in positions: with small blocks, a copy of the
/// state for each block would take longer than the tokens.
const ANSWER_DISTANCE_MIN: usize = 16;

/// The slots of a backend that no sequence has.
#[derive(Debug)]
pub(crate) struct FreeSlots(Mutex<Vec<u32>>);

impl FreeSlots {
    /// The slots `0..count`.
    pub(crate) fn new(count: usize) -> Arc<FreeSlots> {
        Arc::new(FreeSlots(Mutex::new((0..count as u32).rev().collect())))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<u32>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a slot. Dropping it returns it.
    pub(crate) fn take(self: &Arc<Self>) -> Option<StateSlot> {
        let id = self.lock().pop()?;
        Some(StateSlot { id, slots: Arc::clone(self) })
    }

    /// Number of slots that no sequence has.
    pub(crate) fn count(&self) -> usize {
        self.lock().len()
    }
}

/// A slot of the backend, which a running sequence has.
#[derive(Debug)]
pub(crate) struct StateSlot {
    id: u32,
    slots: Arc<FreeSlots>,
}

impl StateSlot {
    pub(crate) fn id(&self) -> u32 {
        self.id
    }
}

impl Drop for StateSlot {
    fn drop(&mut self) {
        self.slots.lock().push(self.id);
    }
}

/// A checkpoint from which a sequence resumes.
#[derive(Debug)]
pub(crate) enum Resume {
    /// One of the tree.
    Cached(CheckpointLease),
    /// One that was loaded, and that the tree does not have yet.
    Loaded(BlockLease),
}

impl Resume {
    /// The blocks of the checkpoint.
    pub(crate) fn blocks(&self) -> &[BlockId] {
        match self {
            Resume::Cached(lease) => lease.blocks(),
            Resume::Loaded(blocks) => blocks.blocks(),
        }
    }

    /// Number of its blocks that the pool counts as reserved.
    pub(crate) fn reserved(&self) -> usize {
        match self {
            Resume::Cached(_) => 0,
            Resume::Loaded(blocks) => blocks.len(),
        }
    }
}

/// A load of stored KV that ends with a checkpoint.
#[derive(Debug)]
pub(crate) struct StateLoad {
    /// The blocks for the checkpoint.
    pub(crate) blocks: BlockLease,
    /// Index of the next block of the stored KV to load. The checkpoint comes last.
    pub(crate) next: usize,
}

/// The recurrent state that a running sequence holds.
#[derive(Debug, Default)]
pub(crate) struct HeldState {
    /// Its slot, from its first step on.
    pub(crate) slot: Option<StateSlot>,
    /// When a turn of a session ends: the checkpoint from which the next turn resumes.
    pub(crate) of_session: Option<CheckpointLease>,
    /// The checkpoint that its first step resumes from.
    pub(crate) resume: Option<Resume>,
    /// The load before its first step. Until it has ended, the sequence takes part in no step.
    pub(crate) load: Option<StateLoad>,
    /// Number of positions of the first message of its prompt; 0 if it is not known.
    pub(crate) first_message: usize,
    /// Number of its positions whose KV was cached when it started, which is where it diverges from
    /// other prompts. 0 unless this is more than a checkpoint's distance beyond the position from
    /// which it resumed.
    pub(crate) parted: usize,
    /// End of the last step that it was part of. Checkpoints can be taken after it only.
    pub(crate) planned: usize,
    /// The checkpoint of its answer, with the number of positions that it covers.
    pub(crate) answer: Option<(usize, BlockLease)>,
}

impl HeldState {
    /// Number of blocks that are reserved for checkpoints.
    pub(crate) fn reserved(&self) -> usize {
        let answer = self.answer.as_ref().map_or(0, |(_, blocks)| blocks.len());
        let load = self.load.as_ref().map_or(0, |load| load.blocks.len());
        answer + load + self.resume.as_ref().map_or(0, Resume::reserved)
    }
}

/// A checkpoint that a step has written, to be added to the tree.
#[derive(Debug)]
pub struct CheckpointItem {
    /// The namespace of the sequence.
    pub namespace: Namespace,
    /// The sequence's tokens.
    pub tokens: Arc<Vec<u32>>,
    /// Number of leading positions that the state covers, a multiple of the block size. Their KV is
    /// cached.
    pub len: usize,
    /// The priority of the request.
    pub priority: i32,
    /// The blocks of the checkpoint.
    pub blocks: BlockLease,
}

/// Where checkpoints of a model are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CheckpointRule {
    /// Positions per block.
    pub(crate) block_size: usize,
    /// Number of blocks of a checkpoint, at least 1.
    pub(crate) blocks: usize,
    /// The lengths of the prefixes that get one are multiples of this number of positions, which is
    /// a multiple of the block size.
    pub(crate) distance: usize,
    /// Number of blocks of the pool; 0 if checkpoints are stored elsewhere, too.
    pub(crate) pool_blocks: usize,
}

/// Number of positions of the first message of a prompt, up to the one of `ends` that ends it; 0 if
/// there is none. The very first token may be one that begins a text.
pub(crate) fn first_message(prompt: &[u32], ends: &TokenSet) -> usize {
    let end = prompt.iter().skip(1).position(|&token| ends.contains(token));
    end.map_or(0, |index| index + 2)
}

/// The properties of a sequence on which the choice of its checkpoints depends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CheckpointWishes {
    /// Number of tokens of the prompt.
    pub(crate) prompt_len: usize,
    /// [`HeldState::first_message`].
    pub(crate) first_message: usize,
    /// Ends of the marked parts of the prompt.
    pub(crate) marks: Vec<usize>,
    /// End of the last image of the prompt; 0 if there is none.
    pub(crate) images_end: usize,
    /// [`HeldState::parted`].
    pub(crate) parted: usize,
    /// Where followers part from it, in positions.
    pub(crate) followers: Vec<usize>,
}

impl CheckpointRule {
    /// The last position, from the start of a prompt, at which a checkpoint serves a repetition of
    /// it: a full block before its last position.
    pub(crate) fn end_of_prompt(&self, prompt_len: usize) -> usize {
        self.whole(prompt_len.saturating_sub(1))
    }

    fn whole(&self, len: usize) -> usize {
        len / self.distance * self.distance
    }

    /// Distance of the checkpoints of an answer, in positions.
    fn answer_distance(&self) -> usize {
        self.distance.max(ANSWER_DISTANCE_MIN)
    }

    /// The first position after `len` at which a checkpoint of an answer may be taken.
    pub(crate) fn answer_checkpoint_after(&self, len: usize) -> usize {
        (len / self.answer_distance() + 1) * self.answer_distance()
    }

    /// Distance of the regular checkpoints of a prompt of `prompt_len` positions.
    fn regular_distance(&self, prompt_len: usize) -> usize {
        let sparse = (KV_PER_CHECKPOINT * self.blocks * self.block_size).max(DISTANCE_MIN);
        let needed = prompt_len.saturating_mul(self.blocks).saturating_mul(PART_OF_POOL);
        let dense = needed.checked_div(self.pool_blocks).map(|distance| distance.max(1));
        let dense = dense.and_then(|distance| distance.checked_next_multiple_of(DISTANCE_MIN));
        let distance = dense.map_or(sparse, |dense| dense.min(sparse));
        distance.next_multiple_of(self.distance)
    }

    /// The lengths of the prefixes after which a step that computes the positions `start..end`
    /// takes checkpoints, in ascending order.
    pub(crate) fn choose(&self, wishes: &CheckpointWishes, start: usize, end: usize) -> Vec<usize> {
        let prompt_end = self.end_of_prompt(wishes.prompt_len);
        let distance = self.regular_distance(wishes.prompt_len);
        let regular = (start / distance + 1..=end / distance).map(|n| n * distance);
        let mut lens: Vec<usize> = regular.filter(|&len| len < prompt_end).collect();
        lens.push(prompt_end);
        let message = Some(wishes.first_message).filter(|&len| len >= FIRST_MESSAGE_MIN);
        lens.extend(message.map(|len| self.whole(len).min(prompt_end)));
        lens.push(self.whole(wishes.images_end).min(prompt_end));
        lens.push(self.whole(wishes.parted).min(prompt_end));
        lens.extend(wishes.marks.iter().map(|&len| self.whole(len).min(prompt_end)));
        lens.extend(wishes.followers.iter().map(|&len| self.whole(len).min(prompt_end)));
        let of_answer = end / self.answer_distance() * self.answer_distance();
        lens.extend((of_answer > prompt_end).then_some(of_answer));
        lens.retain(|&len| len > start && len <= end);
        lens.sort_unstable();
        lens.dedup();
        lens
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: CheckpointRule =
        CheckpointRule { block_size: 16, blocks: 10, distance: 16, pool_blocks: 1000 };

    fn wishes(prompt_len: usize) -> CheckpointWishes {
        CheckpointWishes { prompt_len, ..CheckpointWishes::default() }
    }

    /// Goal: there is a checkpoint before the last position of a prompt, however it is cut.
    #[test]
    fn a_prompt_gets_a_checkpoint_before_its_last_position() {
        assert_eq!(RULE.choose(&wishes(100), 0, 100), [96]);
        assert_eq!(RULE.choose(&wishes(95), 0, 95), [80]);
        assert_eq!(RULE.choose(&wishes(96), 0, 96), [80, 96], "the last one is of the answer");
        assert_eq!(RULE.choose(&wishes(97), 90, 97), [96]);
        assert_eq!(RULE.choose(&wishes(97), 96, 97), [0; 0]);
        assert_eq!(RULE.choose(&wishes(10), 0, 10), [0; 0]);
        let cuts = [(0, 40), (40, 95), (95, 100)];
        let all: Vec<_> = cuts.map(|(start, end)| RULE.choose(&wishes(100), start, end)).concat();
        assert_eq!(all, [96]);
    }

    /// Goal: a prompt gets one where it parts from others, running and cached ones.
    #[test]
    fn a_prompt_gets_checkpoints_where_it_parts_from_others() {
        let wishes = CheckpointWishes { parted: 48, followers: vec![70, 200], ..wishes(100) };
        assert_eq!(RULE.choose(&wishes, 0, 100), [48, 64, 96]);
        assert_eq!(RULE.choose(&wishes, 48, 100), [64, 96]);
    }

    /// Goal: a prompt gets one at the end of each part that is used again.
    #[test]
    fn marks_get_checkpoints() {
        let wishes = CheckpointWishes { marks: vec![40, 100, 7], ..wishes(100) };
        assert_eq!(RULE.choose(&wishes, 0, 100), [32, 96]);
        assert_eq!(RULE.choose(&wishes, 32, 100), [96]);
    }

    /// Goal: a first message gets one if it is long enough, inside of the prompt only.
    #[test]
    fn a_first_message_gets_a_checkpoint() {
        let after = |first_message| CheckpointWishes { first_message, ..wishes(300) };
        assert_eq!(RULE.choose(&after(150), 0, 300), [144, 288]);
        assert_eq!(RULE.choose(&after(150), 144, 300), [288]);
        assert_eq!(RULE.choose(&after(127), 0, 300), [288]);
        assert_eq!(RULE.choose(&after(300), 0, 300), [288]);
    }

    /// Goal: a prompt gets one after its last image, if a block ends there.
    #[test]
    fn the_last_image_gets_a_checkpoint() {
        let small = CheckpointRule { block_size: 1, distance: 1, ..RULE };
        let wishes = CheckpointWishes { images_end: 70, ..wishes(100) };
        assert_eq!(small.choose(&wishes, 0, 100), [70, 99]);
        assert_eq!(small.choose(&wishes, 70, 100), [99]);
        assert_eq!(RULE.choose(&wishes, 0, 100), [64, 96]);
        let last = CheckpointWishes { images_end: 100, ..wishes };
        assert_eq!(small.choose(&last, 0, 100), [99], "no prompt resumes at its end");
    }

    /// Goal: long prompts get one at regular distances, which do not depend on how they are cut.
    #[test]
    fn long_prompts_get_regular_checkpoints() {
        assert_eq!(RULE.choose(&wishes(1601), 0, 1601), [512, 1024, 1536, 1600]);
        assert_eq!(RULE.choose(&wishes(1600), 1024, 1535), [0; 0]);
        assert_eq!(RULE.choose(&wishes(1600), 1500, 1536), [1536]);
        // In a small pool, or if they are stored elsewhere, too.
        let large = CheckpointRule { blocks: 100, ..RULE };
        assert_eq!(large.choose(&wishes(14_001), 0, 14_001), [6400, 12_800, 14_000]);
        let stored = CheckpointRule { pool_blocks: 0, ..large };
        assert_eq!(stored.choose(&wishes(14_001), 0, 14_001), [6400, 12_800, 14_000]);
    }

    /// Goal: the regular checkpoints of a prompt take at most an eighth of the pool, unless they
    /// take at most a fifth of the memory of the KV that they belong to.
    #[test]
    fn regular_checkpoints_have_a_part_of_the_pool() {
        for (pool_blocks, prompt_len, expected) in
            [(20_000, 8000, 512), (20_000, 16_000, 1024), (20_000, 100_000, 4096), (100, 10, 512)]
        {
            let rule = CheckpointRule { blocks: 100, pool_blocks, ..RULE };
            let distance = rule.regular_distance(prompt_len);
            assert_eq!(distance, expected, "{pool_blocks} {prompt_len}");
            assert!(prompt_len / distance * 100 <= pool_blocks / 8 || distance >= 6400);
        }
        assert_eq!(CheckpointRule { pool_blocks: 1, ..RULE }.regular_distance(usize::MAX), 640);
    }

    /// Goal: an answer gets one after each full block, and with small blocks not more often than
    /// every 16 positions.
    #[test]
    fn answers_get_checkpoints_at_the_ends_of_blocks() {
        let of = |rule: CheckpointRule, end: usize| rule.choose(&wishes(100), end - 1, end);
        assert_eq!(of(RULE, 112), [112]);
        assert_eq!(of(RULE, 113), [0; 0]);
        let small = CheckpointRule { block_size: 4, distance: 4, ..RULE };
        let ends: Vec<usize> = (101..150).flat_map(|end| of(small, end)).collect();
        assert_eq!(ends, [112, 128, 144]);
    }

    /// Goal: if a tier stores checkpoints only at larger distances, none are taken in between.
    #[test]
    fn the_distance_of_a_tier_is_kept() {
        let rule = CheckpointRule { distance: 64, ..RULE };
        let wishes = CheckpointWishes { parted: 100, followers: vec![150], ..wishes(300) };
        assert_eq!(rule.choose(&wishes, 0, 300), [64, 128, 256]);
        assert_eq!(rule.choose(&wishes, 300, 320), [320]);
        assert_eq!(rule.choose(&wishes, 320, 383), [0; 0]);
    }

    /// Goal: a slot belongs to one sequence at a time and returns when it is dropped.
    #[test]
    fn slots_are_returned() {
        let slots = FreeSlots::new(2);
        let (first, second) = (slots.take(), slots.take());
        let ids = [&first, &second].map(|slot| slot.as_ref().map(StateSlot::id));
        assert_eq!(ids, [Some(0), Some(1)]);
        assert!(slots.take().is_none());
        drop(first);
        assert_eq!((slots.count(), slots.take().map(|slot| slot.id())), (1, Some(0)));
    }
}
