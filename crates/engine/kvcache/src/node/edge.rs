//! The content of a node: a run of whole blocks. Immutable once built.

use crate::{BlockId, checkpoint};

/// Number of positions compared by one `memcmp`: a multiple of every block size, and large enough
/// to be worth the call.
const CHUNK: usize = 256;

/// A run of blocks: their positions, their ids and their chained hashes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Edge {
    /// All positions, followed by one block id per block. Both share one allocation because most
    /// edges are short.
    words: Box<[u32]>,
    /// One chained hash per block.
    hashes: Box<[u64]>,
}

impl Edge {
    /// Creates an edge of `blocks.len()` blocks. `positions` and `hashes` belong to the same
    /// blocks.
    pub(crate) fn new(positions: &[u32], blocks: &[BlockId], hashes: &[u64]) -> Edge {
        debug_assert_eq!(blocks.len(), hashes.len(), "one hash per block");
        let mut words = Vec::with_capacity(positions.len() + blocks.len());
        words.extend_from_slice(positions);
        words.extend(blocks.iter().map(|block| block.0));
        Edge { words: words.into(), hashes: hashes.into() }
    }

    /// Creates the edge of a namespace's root. Its positions are the namespace's digest; it
    /// counts as one block, whose id is never used.
    pub(crate) fn namespace(words: &[u32; 8], root_hash: u64) -> Edge {
        Edge::new(words, &[BlockId(u32::MAX)], &[root_hash])
    }

    #[inline(always)]
    pub(crate) fn block_count(&self) -> usize {
        self.hashes.len()
    }

    #[inline(always)]
    pub(crate) fn positions(&self) -> &[u32] {
        &self.words[..self.words.len() - self.hashes.len()]
    }

    pub(crate) fn blocks(
        &self,
    ) -> impl ExactSizeIterator<Item = BlockId> + DoubleEndedIterator + '_ {
        self.words[self.words.len() - self.hashes.len()..].iter().map(|&id| BlockId(id))
    }

    #[inline(always)]
    pub(crate) fn hashes(&self) -> &[u64] {
        &self.hashes
    }

    /// The hashes of the blocks that hold KV: all except the blocks of a checkpoint at the end.
    pub(crate) fn kv_hashes(&self) -> &[u64] {
        let block_size = self.positions().len() / self.block_count().max(1);
        let checkpoint = checkpoint::checkpoint_blocks(self, block_size.max(1));
        &self.hashes[..self.block_count() - checkpoint]
    }

    /// The hash of the first block: the node's key in its parent's table.
    pub(crate) fn first_hash(&self) -> u64 {
        self.hashes.first().copied().unwrap_or_default()
    }

    #[inline(always)]
    pub(crate) fn last_hash(&self) -> u64 {
        self.hashes.last().copied().unwrap_or_default()
    }

    /// The number of whole blocks that `rest` and this edge have in common from the start.
    #[inline(always)]
    pub(crate) fn common_blocks(&self, rest: &[u32], block_size: usize) -> usize {
        let own = self.positions();
        let shorter = own.len().min(rest.len() / block_size * block_size);
        let (own, rest) = (&own[..shorter], &rest[..shorter]);
        // Most comparisons fail in the first block, or reach the end of the shorter run.
        let mut equal = 0;
        while shorter - equal > CHUNK && own[equal..equal + CHUNK] == rest[equal..equal + CHUNK] {
            equal += CHUNK;
        }
        let blocks = own[equal..].chunks_exact(block_size);
        let same = blocks.zip(rest[equal..].chunks_exact(block_size)).take_while(|(a, b)| a == b);
        equal / block_size + same.count()
    }

    /// The number of hashes that `rest` and this edge have in common from the start.
    #[inline(always)]
    pub(crate) fn common_hashes(&self, rest: &[u64]) -> usize {
        const CHUNK: usize = 64;
        let shorter = self.hashes.len().min(rest.len());
        let (own, rest) = (&self.hashes[..shorter], &rest[..shorter]);
        let mut equal = 0;
        while shorter - equal >= CHUNK && own[equal..equal + CHUNK] == rest[equal..equal + CHUNK] {
            equal += CHUNK;
        }
        equal + own[equal..].iter().zip(&rest[equal..]).take_while(|(a, b)| a == b).count()
    }

    /// Returns a new edge with the blocks `from..to`.
    pub(crate) fn part(&self, from: usize, to: usize, block_size: usize) -> Edge {
        let blocks: Vec<BlockId> = self.blocks().skip(from).take(to - from).collect();
        let positions = &self.positions()[from * block_size..to * block_size];
        Edge::new(positions, &blocks, &self.hashes[from..to])
    }

    /// Returns one edge with the blocks of all `edges` in this order.
    pub(crate) fn concat<'a>(edges: impl Iterator<Item = &'a Edge> + Clone) -> Edge {
        let block_count = edges.clone().map(Edge::block_count).sum();
        let mut words = Vec::with_capacity(edges.clone().map(|edge| edge.words.len()).sum());
        let mut hashes = Vec::with_capacity(block_count);
        for edge in edges.clone() {
            words.extend_from_slice(edge.positions());
            hashes.extend_from_slice(&edge.hashes);
        }
        for edge in edges {
            words.extend(edge.blocks().map(|block| block.0));
        }
        Edge { words: words.into(), hashes: hashes.into() }
    }

    /// Number of bytes requested from the allocator.
    pub(crate) fn heap_bytes(&self) -> usize {
        size_of_val(&*self.words) + size_of_val(&*self.hashes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the common length is exact wherever two runs differ first, for every block size.
    #[test]
    fn common_blocks_equals_a_plain_scan() {
        for block_size in [1usize, 2, 16, 32, 256] {
            let positions: Vec<u32> = (0..1024).collect();
            let count = positions.len() / block_size;
            let blocks: Vec<BlockId> = (0..count as u32).map(BlockId).collect();
            let edge = Edge::new(&positions, &blocks, &vec![1; count]);
            for at in [0, 1, 15, 16, 31, 255, 256, 257, 511, 512, 1023] {
                let mut query = positions.clone();
                query[at] ^= 1;
                assert_eq!(edge.common_blocks(&query, block_size), at / block_size, "at {at}");
                assert_eq!(edge.common_blocks(&positions[..at], block_size), at / block_size);
            }
            let longer: Vec<u32> = (0..2000).collect();
            assert_eq!(edge.common_blocks(&longer, block_size), count);
        }
    }

    /// Goal: an edge that is cut anywhere and joined again is the same edge.
    #[test]
    fn parts_join_to_the_whole() {
        let positions: Vec<u32> = (0..32).collect();
        let blocks: Vec<BlockId> = (100..108).map(BlockId).collect();
        let hashes: Vec<u64> = (1..9).collect();
        let edge = Edge::new(&positions, &blocks, &hashes);
        for cut in 1..8 {
            let parts = [edge.part(0, cut, 4), edge.part(cut, 8, 4)];
            let joined = Edge::concat(parts.iter());
            assert_eq!(joined.positions(), positions);
            assert_eq!(joined.blocks().collect::<Vec<_>>(), blocks);
            assert_eq!(joined.hashes(), hashes);
        }
    }
}
