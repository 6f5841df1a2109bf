//! The reader's handle. Any number of them, on any thread.

use crate::Namespace;
use crate::core::Core;
use crate::reclaim::{Epoch, Reclaimer};
use crate::sync::{Arc, Ordering};

/// Asks the tree what is cached, lock-free, while the writer changes it.
///
/// Every method is pure: it writes no shared memory, allocates nothing that outlives the call,
/// counts nothing, and makes no namespace. The answer was true at some instant during the call;
/// it is a hint until [`TreeWriter::acquire`](crate::TreeWriter::acquire) has locked it.
#[derive(Debug)]
pub struct TreeReader<R: Reclaimer = Epoch> {
    pub(crate) core: Arc<Core<R>>,
}

impl<R: Reclaimer> Clone for TreeReader<R> {
    fn clone(&self) -> Self {
        TreeReader { core: self.core.clone() }
    }
}

impl<R: Reclaimer> TreeReader<R> {
    /// How many of the leading `positions` are cached in `namespace`: a multiple of the block
    /// size, 0 to `positions.len()`. Does not end inside an atom.
    #[inline]
    pub fn query_match_len(&self, namespace: &Namespace, positions: &[u32]) -> usize {
        self.core.match_len(namespace, positions)
    }

    /// Counts the changes published so far. Two equal answers: nothing changed between them.
    pub fn tree_version(&self) -> u64 {
        self.core.version.load(Ordering::Acquire)
    }

    /// Positions in a block.
    pub fn block_size(&self) -> usize {
        self.core.block_size
    }
}
