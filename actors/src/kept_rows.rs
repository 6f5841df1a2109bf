//! The last rows of logits of prompts: a prompt repeated to its last token needs no forward pass
//! for its first token.
//!
//! A row is kept with the block in which its prompt's last whole block of positions lies, and
//! goes when that block leaves the tree, or when the budget is spent and it is the row that was
//! not asked for the longest. The block only says when a row goes: that a row is a prompt's is
//! told by comparing all of the prompt's tokens.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use stolon_kvcache::{BlockId, Namespace};

/// A prompt's last row of logits.
#[derive(Clone, Debug)]
pub(crate) struct PromptRow {
    /// Where the prompt's last whole block is.
    pub(crate) block: BlockId,
    pub(crate) namespace: Namespace,
    /// The whole prompt.
    pub(crate) tokens: Vec<u32>,
    /// `[vocab_size]`, as the backend gave it.
    pub(crate) logits: Arc<[f32]>,
}

impl PromptRow {
    fn bytes(&self) -> usize {
        size_of_val(&*self.logits) + self.tokens.len() * size_of::<u32>() + size_of::<PromptRow>()
    }

    fn is_of(&self, namespace: &Namespace, tokens: &[u32]) -> bool {
        self.tokens == tokens && self.namespace == *namespace
    }
}

/// The rows that are kept.
#[derive(Debug)]
pub(crate) struct KeptRows {
    budget_bytes: usize,
    bytes: usize,
    /// With the tick of each row's last use.
    by_block: HashMap<BlockId, Vec<(u64, PromptRow)>>,
    /// By last use.
    order: BTreeMap<u64, BlockId>,
    tick: u64,
}

impl KeptRows {
    pub(crate) fn new(budget_bytes: usize) -> KeptRows {
        KeptRows {
            budget_bytes,
            bytes: 0,
            by_block: HashMap::new(),
            order: BTreeMap::new(),
            tick: 0,
        }
    }

    /// Keeps a row, in the place of others where the budget ends; not one that exceeds it alone.
    pub(crate) fn keep(&mut self, row: PromptRow) {
        let bytes = row.bytes();
        let known = self.get(row.block, &row.namespace, &row.tokens).is_some();
        if known || bytes > self.budget_bytes {
            return;
        }
        while self.bytes + bytes > self.budget_bytes {
            let Some((tick, block)) = self.order.pop_first() else { break };
            let rows = self.by_block.entry(block).or_default();
            if let Some(index) = rows.iter().position(|&(used, _)| used == tick) {
                self.bytes -= rows.swap_remove(index).1.bytes();
            }
            if rows.is_empty() {
                self.by_block.remove(&block);
            }
        }
        self.tick += 1;
        self.bytes += bytes;
        self.order.insert(self.tick, row.block);
        self.by_block.entry(row.block).or_default().push((self.tick, row));
    }

    /// The row of a prompt whose last whole block is `block`.
    pub(crate) fn get(
        &mut self,
        block: BlockId,
        namespace: &Namespace,
        tokens: &[u32],
    ) -> Option<Arc<[f32]>> {
        let rows = self.by_block.get_mut(&block)?;
        let (used, row) = rows.iter_mut().find(|(_, row)| row.is_of(namespace, tokens))?;
        self.order.remove(used);
        self.tick += 1;
        *used = self.tick;
        self.order.insert(self.tick, block);
        Some(Arc::clone(&row.logits))
    }

    /// Drops the rows of blocks that have left the tree.
    pub(crate) fn forget(&mut self, blocks: &[BlockId]) {
        for block in blocks {
            for (used, row) in self.by_block.remove(block).into_iter().flatten() {
                self.order.remove(&used);
                self.bytes -= row.bytes();
            }
        }
    }

    /// Drops all.
    pub(crate) fn clear(&mut self) {
        *self = KeptRows::new(self.budget_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(block: u32, tokens: &[u32]) -> PromptRow {
        PromptRow {
            block: BlockId(block),
            namespace: Namespace::default(),
            tokens: tokens.to_vec(),
            logits: vec![tokens[0] as f32; 100].into(),
        }
    }

    fn has(rows: &mut KeptRows, block: u32, tokens: &[u32]) -> bool {
        let found = rows.get(BlockId(block), &Namespace::default(), tokens);
        assert!(found.as_ref().is_none_or(|row| row[0] == tokens[0] as f32));
        found.is_some()
    }

    #[test]
    fn a_row_is_found_by_its_whole_prompt_alone() {
        let mut rows = KeptRows::new(1 << 20);
        rows.keep(row(3, &[1, 2, 3]));
        rows.keep(row(3, &[1, 2, 4]));
        assert!(has(&mut rows, 3, &[1, 2, 3]) && has(&mut rows, 3, &[1, 2, 4]));
        assert!(!has(&mut rows, 3, &[1, 2]) && !has(&mut rows, 3, &[1, 2, 5]));
        assert!(!has(&mut rows, 4, &[1, 2, 3]), "another block");
        let salted = Namespace::builder().salt("a").build();
        assert!(rows.get(BlockId(3), &salted, &[1, 2, 3]).is_none(), "another tenant");
    }

    #[test]
    fn rows_go_with_their_block() {
        let mut rows = KeptRows::new(1 << 20);
        rows.keep(row(3, &[1, 2, 3]));
        rows.keep(row(4, &[7, 8]));
        rows.forget(&[BlockId(3), BlockId(9)]);
        assert!(!has(&mut rows, 3, &[1, 2, 3]) && has(&mut rows, 4, &[7, 8]));
        rows.forget(&[BlockId(4)]);
        assert_eq!((rows.bytes, rows.order.len(), rows.by_block.len()), (0, 0, 0));
    }

    #[test]
    fn the_budget_holds_and_takes_what_was_not_asked_for_longest() {
        let one = row(0, &[0]).bytes();
        let mut rows = KeptRows::new(3 * one);
        for n in 0..3 {
            rows.keep(row(n, &[n]));
        }
        assert!(has(&mut rows, 0, &[0]));
        rows.keep(row(3, &[3]));
        assert!(rows.bytes <= 3 * one);
        assert!(!has(&mut rows, 1, &[1]), "the least recently used");
        assert!(has(&mut rows, 0, &[0]) && has(&mut rows, 2, &[2]) && has(&mut rows, 3, &[3]));
        rows.keep(row(3, &[3]));
        assert_eq!(rows.bytes, 3 * one, "known already");
        let mut none = KeptRows::new(one - 1);
        none.keep(row(0, &[0]));
        assert_eq!(none.bytes, 0, "larger than the budget");
    }
}
