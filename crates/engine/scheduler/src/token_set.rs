//! [`TokenSet`]: the token ids that end a generation.

use std::collections::BTreeSet;
use std::sync::Arc;

/// A set of token ids. Clones share it. A lookup takes logarithmic time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenSet {
    /// In ascending order, without duplicates.
    ids: Arc<[u32]>,
}

impl TokenSet {
    /// The different ids of `ids`. Stops reading when it has found more than `limit`, so that the
    /// memory is bounded even for an endless iterator; the caller refuses such a set.
    pub fn bounded(ids: impl IntoIterator<Item = u32>, limit: usize) -> TokenSet {
        let mut different = BTreeSet::new();
        for id in ids {
            different.insert(id);
            if different.len() > limit {
                break;
            }
        }
        TokenSet { ids: different.into_iter().collect() }
    }

    /// Whether the set contains `id`.
    pub fn contains(&self, id: u32) -> bool {
        self.ids.binary_search(&id).is_ok()
    }

    /// The ids in ascending order.
    pub fn as_slice(&self) -> &[u32] {
        &self.ids
    }
}

impl FromIterator<u32> for TokenSet {
    fn from_iter<I: IntoIterator<Item = u32>>(ids: I) -> TokenSet {
        TokenSet::bounded(ids, usize::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: duplicates are dropped, and an endless list is read only up to the limit.
    #[test]
    fn a_set_is_sorted_and_bounded() {
        let set = TokenSet::bounded([9, 3, 9, 3, 7], 4);
        assert_eq!(set.as_slice(), [3, 7, 9]);
        assert!(set.contains(7) && !set.contains(8));
        assert_eq!(TokenSet::bounded(0.., 4).as_slice(), [0, 1, 2, 3, 4]);
    }
}
