//! The reader's handle.

use crate::core::Core;
use crate::sync::{Arc, Ordering};
use crate::{BlockHasher, CachedPrefix, Namespace, PrefixMatch, TreeDump};

/// Queries the tree without a lock, while the writer changes it. Cheap to clone; may be used on any
/// thread, also after the writer was dropped.
///
/// No method has a side effect on the tree: none changes a statistic or the recency of an entry,
/// creates a namespace, or frees what the writer has removed. The only shared memory that a query
/// writes is the calling thread's own record in crossbeam-epoch and, if it finds that no query can
/// reach a batch of removed nodes any longer, one number for the writer. An answer was exact at
/// some instant during the call. Afterward it is a hint, until
/// [`TreeWriter::acquire`](crate::TreeWriter::acquire) has locked the prefix.
#[derive(Clone, Debug)]
pub struct TreeReader {
    pub(crate) core: Arc<Core>,
}

impl TreeReader {
    /// Bound on the number of continuations of a block that [`TreeReader::continuation`] looks at. If
    /// a block has more, others are not found.
    pub const CONTINUATIONS: usize = 256;

    /// Returns how many of the first `positions` are cached in `namespace`: a multiple of the block
    /// size, from 0 to `positions.len()`. The match does not end inside an atomic token span.
    #[inline]
    pub fn query_match_len(&self, namespace: &Namespace, positions: &[u32]) -> usize {
        self.core.match_len(namespace, positions)
    }

    /// As [`query_match_len`](TreeReader::query_match_len), and from where a request for this prompt
    /// can resume: for models with a recurrent state, whose requests can use the cached positions
    /// only up to a checkpoint. Each of the two lengths was exact at some instant during the call.
    pub fn query_resume(&self, namespace: &Namespace, positions: &[u32]) -> PrefixMatch {
        self.core.resume(namespace, positions)
    }

    /// As [`query_match_len`](TreeReader::query_match_len), for many prompts of one namespace. Pins
    /// the epoch once for all of them, and appends one length per prompt to `out`.
    pub fn query_match_lens(
        &self,
        namespace: &Namespace,
        prompts: &[&[u32]],
        out: &mut Vec<usize>,
    ) {
        self.core.match_lens(namespace, prompts, out);
    }

    /// The tokens with which what is cached in `namespace` goes on after exactly `positions`, at
    /// most `limit`: a guess of how another sequence that begins alike goes on. Where several
    /// continuations are cached, the one that was used last. Empty if there is none. Ends before an
    /// atomic token span.
    ///
    /// Unlike a match, `positions` may end inside of a block. Compares all of them, and at most
    /// [`TreeReader::CONTINUATIONS`] continuations of a block.
    pub fn continuation(&self, namespace: &Namespace, positions: &[u32], limit: usize) -> Vec<u32> {
        self.core.continuation(namespace, positions, limit)
    }

    /// Computes the chained hashes of the whole blocks of `positions`: the input of
    /// [`query_match_hashes`](TreeReader::query_match_hashes), and the hashes that appear in
    /// [`CacheEvent`](crate::CacheEvent)s. Depends only on the block size and the hash seed, not on
    /// the content of the cache.
    pub fn block_hashes(&self, namespace: &Namespace, positions: &[u32]) -> Vec<u64> {
        self.block_hasher().block_hashes(namespace, positions)
    }

    /// The hasher behind [`block_hashes`](TreeReader::block_hashes), for use without the tree.
    pub fn block_hasher(&self) -> BlockHasher {
        BlockHasher { block_size: self.core.block_size, seed: self.core.seed }
    }

    /// Returns how many of the first blocks are cached, in blocks, for a caller that has their
    /// hashes already. This reads less memory than a query by positions, but it trusts the hashes
    /// and may end inside an atomic token span. It suits routing; `acquire` compares positions.
    #[inline]
    pub fn query_match_hashes(&self, namespace: &Namespace, hashes: &[u64]) -> usize {
        self.core.match_hashes(namespace, hashes)
    }

    /// Describes all nodes of the tree, without stopping the writer.
    pub fn dump(&self) -> TreeDump {
        self.core.dump()
    }

    /// Returns the cached prefix that ends with the block of this chained hash, as
    /// [`TreeReader::block_hashes`] computes it, or `None` if no such block is cached. The time is
    /// proportional to the number of cached blocks. If hashes collide, it is one of the prefixes.
    pub fn cached_prefix(&self, hash: u64) -> Option<CachedPrefix> {
        self.core.cached_prefix(hash)
    }

    /// Returns the number of changes published so far. If two calls return the same number, nothing
    /// in the tree changed in between.
    pub fn tree_version(&self) -> u64 {
        self.core.version.load(Ordering::Acquire)
    }

    /// Tries to end grace periods and calls the functions that wait for them, as every 128th query
    /// of a thread does with crossbeam-epoch.
    #[cfg(loom)]
    #[doc(hidden)]
    pub fn end_grace_periods(&self) {
        self.core.epochs.advance(&self.core.epochs.pin());
    }

    /// Number of positions in a block.
    pub fn block_size(&self) -> usize {
        self.core.block_size
    }
}
