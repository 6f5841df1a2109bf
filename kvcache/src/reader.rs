//! The reader's handle. Any number of them, on any thread.

use crate::core::Core;
use crate::sync::{Arc, Ordering};
use crate::{Namespace, TreeDump, hash};

/// Asks the tree what is cached, lock-free, while the writer changes it.
///
/// Every method is pure: it writes no shared memory, allocates nothing that outlives the call,
/// counts nothing, and makes no namespace. The answer was true at some instant during the call;
/// it is a hint until [`TreeWriter::acquire`](crate::TreeWriter::acquire) has locked it.
#[derive(Clone, Debug)]
pub struct TreeReader {
    pub(crate) core: Arc<Core>,
}

impl TreeReader {
    /// How many of the leading `positions` are cached in `namespace`: a multiple of the block
    /// size, 0 to `positions.len()`. Does not end inside an atom.
    #[inline]
    pub fn query_match_len(&self, namespace: &Namespace, positions: &[u32]) -> usize {
        self.core.match_len(namespace, positions)
    }

    /// As [`query_match_len`](TreeReader::query_match_len) for many prompts of one namespace: one
    /// guard for all, and `out` gets one length a prompt appended.
    pub fn query_match_lens(
        &self,
        namespace: &Namespace,
        prompts: &[&[u32]],
        out: &mut Vec<usize>,
    ) {
        self.core.match_lens(namespace, prompts, out);
    }

    /// The chained hashes of the whole blocks of `positions`, as this tree computes them: for
    /// [`query_match_hashes`](TreeReader::query_match_hashes), and to compare with events.
    pub fn block_hashes(&self, namespace: &Namespace, positions: &[u32]) -> Vec<u64> {
        let root_hash = namespace.root_hash(self.core.seed);
        hash::block_hashes(root_hash, positions, self.core.block_size)
    }

    /// How many of the leading blocks are cached, for a caller that has their hashes already: an
    /// eighth of the memory to compare. Trusts the hashes instead of comparing positions, and
    /// knows nothing of atoms: good for routing, while `acquire` still verifies.
    #[inline]
    pub fn query_match_hashes(&self, namespace: &Namespace, hashes: &[u64]) -> usize {
        self.core.match_hashes(namespace, hashes)
    }

    /// A picture of the tree, taken without stopping the writer.
    pub fn dump(&self) -> TreeDump {
        self.core.dump()
    }

    /// Counts the changes published so far. Two equal answers: nothing changed between them.
    pub fn tree_version(&self) -> u64 {
        self.core.version.load(Ordering::Acquire)
    }

    /// The number of retired items that wait for a guard now, and the largest number that ever
    /// waited at once.
    #[cfg(all(loom, not(crossbeam_loom)))]
    #[doc(hidden)]
    pub fn retired_waiting(&self) -> (usize, usize) {
        self.core.reclaimer.waiting()
    }

    /// Positions in a block.
    pub fn block_size(&self) -> usize {
        self.core.block_size
    }
}
