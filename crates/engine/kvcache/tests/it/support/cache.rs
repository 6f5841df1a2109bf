//! A tree and a pool, used as an engine uses them: lock the cached prefix, reserve blocks for the
//! rest of the prompt, commit.

use stolon_kvcache::{
    BlockLease, BlockPool, Commit, EvictedBlock, Namespace, PrefixLease, Shortage, StepFence,
    TreeReader, TreeWriter, prefix_tree,
};

/// The tree and the pool.
pub(crate) struct Cache {
    pub(crate) writer: TreeWriter,
    pub(crate) reader: TreeReader,
    pub(crate) pool: BlockPool,
    pub(crate) base: Namespace,
    block_size: usize,
    _fence: StepFence,
}

/// One request: its locked prefix and its private blocks.
pub(crate) struct Running {
    pub(crate) lease: PrefixLease,
    pub(crate) private: BlockLease,
}

impl Cache {
    pub(crate) fn new(block_size: usize, block_count: usize) -> Cache {
        let (writer, reader) = prefix_tree(block_size).expect("a block size");
        let (pool, fence) = BlockPool::new(block_count).expect("a valid count");
        let base = Namespace::default();
        Cache { writer, reader, pool, base, block_size, _fence: fence }
    }

    /// Locks the cached prefix and reserves blocks for the rest, including a partial block. Evicts
    /// blocks if too few are free.
    pub(crate) fn start(&mut self, prompt: &[u32]) -> Result<Running, Shortage> {
        let lease = self.writer.acquire(&self.base, prompt);
        let need = prompt.len().div_ceil(self.block_size) - lease.blocks().len();
        let private = match self.pool.reserve(need) {
            Ok(private) => private,
            Err(shortage) => {
                self.evict(shortage.missing());
                self.pool.reserve(need)?
            }
        };
        Ok(Running { lease, private })
    }

    /// Commits the full blocks of the prompt, whose KV is written.
    pub(crate) fn publish(&mut self, running: &mut Running, prompt: &[u32]) -> Commit {
        let offered = running.private.blocks().to_vec();
        let before = running.lease.blocks().len();
        self.writer
            .commit_from(&mut running.lease, prompt, &mut running.private)
            .expect("a valid commit");
        let blocks = running.lease.blocks()[before..].to_vec();
        let duplicates = offered.iter().zip(&blocks).filter(|(offered, block)| offered != block);
        Commit { duplicates: duplicates.map(|(&offered, _)| offered).collect(), blocks }
    }

    pub(crate) fn run(&mut self, prompt: &[u32]) {
        let mut running = self.start(prompt).expect("fits");
        let _ = self.publish(&mut running, prompt);
    }

    pub(crate) fn match_len(&self, positions: &[u32]) -> usize {
        self.reader.query_match_len(&self.base, positions)
    }

    pub(crate) fn evict(&mut self, count: usize) -> Vec<EvictedBlock> {
        let evicted = self.writer.evict(count);
        let content = evicted.to_vec();
        self.pool.release(evicted);
        content
    }

    /// Checks that no block is lost or owned twice.
    pub(crate) fn audit(&mut self) {
        self.writer.audit().expect("consistent tree");
        self.pool.audit().expect("consistent pool");
        let (tree, pool) = (self.writer.counts(), self.pool.counts());
        assert_eq!(
            pool.committed,
            tree.cached + tree.detached,
            "the tree owns the committed blocks"
        );
        let all = pool.free + pool.fenced + pool.reserved + pool.committed;
        assert_eq!(all, self.pool.block_count(), "no block is lost");
    }
}
