//! Cached logits of the last position of prompts. A prompt that is repeated token by token needs
//! no forward pass for its first generated token.
//!
//! An entry belongs to the block that holds the prompt's last full block of positions. It is
//! dropped when that block leaves the tree, or, least recently used first, when the budget is
//! exhausted. The block only decides how long an entry lives. Whether an entry belongs to a prompt
//! is decided by comparing the namespace and all of the tokens.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use stolon_kvcache::{BlockId, Namespace};

/// The logits of a prompt's last position.
#[derive(Clone, Debug)]
pub struct PromptLogits {
    /// The block of the prompt's last full block of positions.
    pub(crate) block: BlockId,
    /// The prompt's namespace.
    pub(crate) namespace: Namespace,
    /// The whole prompt.
    pub(crate) tokens: Vec<u32>,
    /// `[vocab_size]` values, as the backend returned them.
    pub(crate) logits: Arc<[f32]>,
}

impl PromptLogits {
    fn bytes(&self) -> usize {
        size_of_val(&*self.logits)
            + self.tokens.len() * size_of::<u32>()
            + size_of::<PromptLogits>()
    }

    fn is_of(&self, namespace: &Namespace, tokens: &[u32]) -> bool {
        self.tokens == tokens && self.namespace == *namespace
    }
}

/// The cache.
#[derive(Debug)]
pub(crate) struct CachedLogits {
    budget_bytes: usize,
    bytes: usize,
    /// Entries by block, each with the tick of its last use.
    by_block: HashMap<BlockId, Vec<(u64, PromptLogits)>>,
    /// Blocks by the tick of an entry's last use, least recent first.
    order: BTreeMap<u64, BlockId>,
    tick: u64,
}

impl CachedLogits {
    /// An empty cache of at most `budget_bytes` bytes.
    pub(crate) fn new(budget_bytes: usize) -> CachedLogits {
        CachedLogits {
            budget_bytes,
            bytes: 0,
            by_block: HashMap::new(),
            order: BTreeMap::new(),
            tick: 0,
        }
    }

    /// Adds an entry and drops others to stay within the budget. An entry larger than the budget
    /// is not added.
    pub(crate) fn insert(&mut self, entry: PromptLogits) {
        let bytes = entry.bytes();
        let known = self.get(entry.block, &entry.namespace, &entry.tokens).is_some();
        if known || bytes > self.budget_bytes {
            return;
        }
        while self.bytes + bytes > self.budget_bytes {
            let Some((tick, block)) = self.order.pop_first() else { break };
            let entries = self.by_block.entry(block).or_default();
            if let Some(index) = entries.iter().position(|&(used, _)| used == tick) {
                self.bytes -= entries.swap_remove(index).1.bytes();
            }
            if entries.is_empty() {
                self.by_block.remove(&block);
            }
        }
        self.tick += 1;
        self.bytes += bytes;
        self.order.insert(self.tick, entry.block);
        self.by_block.entry(entry.block).or_default().push((self.tick, entry));
    }

    /// Looks up the logits of a prompt whose last full block is `block`, `[vocab_size]` values.
    pub(crate) fn get(
        &mut self,
        block: BlockId,
        namespace: &Namespace,
        tokens: &[u32],
    ) -> Option<Arc<[f32]>> {
        let entries = self.by_block.get_mut(&block)?;
        let (used, entry) = entries.iter_mut().find(|(_, entry)| entry.is_of(namespace, tokens))?;
        self.order.remove(used);
        self.tick += 1;
        *used = self.tick;
        self.order.insert(self.tick, block);
        Some(Arc::clone(&entry.logits))
    }

    /// Drops the entries of blocks that have left the tree.
    pub(crate) fn remove_blocks(&mut self, blocks: impl Iterator<Item = BlockId>) {
        for block in blocks {
            for (used, entry) in self.by_block.remove(&block).into_iter().flatten() {
                self.order.remove(&used);
                self.bytes -= entry.bytes();
            }
        }
    }

    /// Drops all entries.
    pub(crate) fn clear(&mut self) {
        *self = CachedLogits::new(self.budget_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(block: u32, tokens: &[u32]) -> PromptLogits {
        PromptLogits {
            block: BlockId(block),
            namespace: Namespace::default(),
            tokens: tokens.to_vec(),
            logits: vec![tokens[0] as f32; 100].into(),
        }
    }

    fn has(rows: &mut CachedLogits, block: u32, tokens: &[u32]) -> bool {
        let found = rows.get(BlockId(block), &Namespace::default(), tokens);
        assert!(found.as_ref().is_none_or(|row| row[0] == tokens[0] as f32));
        found.is_some()
    }

    #[test]
    fn an_entry_is_found_by_its_whole_prompt() {
        let mut rows = CachedLogits::new(1 << 20);
        rows.insert(row(3, &[1, 2, 3]));
        rows.insert(row(3, &[1, 2, 4]));
        assert!(has(&mut rows, 3, &[1, 2, 3]) && has(&mut rows, 3, &[1, 2, 4]));
        assert!(!has(&mut rows, 3, &[1, 2]) && !has(&mut rows, 3, &[1, 2, 5]));
        assert!(!has(&mut rows, 4, &[1, 2, 3]), "another block");
        let salted = Namespace::builder().salt("a").build();
        assert!(rows.get(BlockId(3), &salted, &[1, 2, 3]).is_none(), "another tenant");
    }

    #[test]
    fn entries_are_dropped_with_their_block() {
        let mut rows = CachedLogits::new(1 << 20);
        rows.insert(row(3, &[1, 2, 3]));
        rows.insert(row(4, &[7, 8]));
        rows.remove_blocks([3, 9].map(BlockId).into_iter());
        assert!(!has(&mut rows, 3, &[1, 2, 3]) && has(&mut rows, 4, &[7, 8]));
        rows.remove_blocks(std::iter::once(BlockId(4)));
        assert_eq!((rows.bytes, rows.order.len(), rows.by_block.len()), (0, 0, 0));
    }

    #[test]
    fn the_budget_drops_the_least_recently_used_entry() {
        let one = row(0, &[0]).bytes();
        let mut rows = CachedLogits::new(3 * one);
        for n in 0..3 {
            rows.insert(row(n, &[n]));
        }
        assert!(has(&mut rows, 0, &[0]));
        rows.insert(row(3, &[3]));
        assert!(rows.bytes <= 3 * one);
        assert!(!has(&mut rows, 1, &[1]), "the least recently used");
        assert!(has(&mut rows, 0, &[0]) && has(&mut rows, 2, &[2]) && has(&mut rows, 3, &[3]));
        rows.insert(row(3, &[3]));
        assert_eq!(rows.bytes, 3 * one, "known already");
        let mut none = CachedLogits::new(one - 1);
        none.insert(row(0, &[0]));
        assert_eq!(none.bytes, 0, "larger than the budget");
    }
}
