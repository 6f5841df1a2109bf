//! The order of the rows of q and k.

use super::{AttentionConfig, LatentSizes};

/// The order of the rows of q or k in a file in which adjacent rows form the pairs that are
/// rotated. In memory, a pair consists of the rows `i` and `i + rotary_dim / 2` of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AdjacentPairs {
    /// Number of heads, which divides the number of rows.
    heads: usize,
    /// Number of rows of a head.
    head_dim: usize,
    /// Number of rows of each head that come before the rotated rows in the file. In memory, they
    /// follow the rotated rows.
    skipped: usize,
    /// Number of rows of each head that are rotated, which is even.
    rotary_dim: usize,
}

impl AdjacentPairs {
    /// The order of the rows of `heads` heads.
    pub(crate) fn of(attention: &AttentionConfig, heads: usize) -> Self {
        let AttentionConfig { head_dim, rotary_dim, .. } = *attention;
        Self { heads, head_dim, skipped: 0, rotary_dim }
    }

    /// The order of the rows of the queries of latent attention.
    pub(crate) fn of_latent_queries(latent: LatentSizes, heads: usize) -> Self {
        let LatentSizes { rotary_dim, key_dim: skipped, .. } = latent;
        Self { heads, head_dim: latent.query_dim(), skipped, rotary_dim }
    }

    /// The order of the rows of latent attention's projection to the key head.
    pub(crate) fn of_latent(latent: LatentSizes) -> Self {
        let LatentSizes { rotary_dim, width: skipped, .. } = latent;
        Self { heads: 1, head_dim: latent.kept_dim(), skipped, rotary_dim }
    }

    /// Number of rows.
    pub(crate) fn rows(self) -> usize {
        self.heads * self.head_dim
    }

    /// Reorders the rows in `bytes`, [`Self::rows`] of them, from the order in the file to the
    /// order in memory. Whole rows are moved, so this also works for quantized rows.
    pub(crate) fn separate(self, bytes: &[u8]) -> Vec<u8> {
        let row_bytes = bytes.len() / self.rows();
        let half = self.rotary_dim / 2;
        let mut out = Vec::with_capacity(bytes.len());
        for head in 0..self.heads {
            let rotated = |i: usize, first| self.skipped + 2 * i + first;
            let halves = (0..2).flat_map(|first| (0..half).map(move |i| rotated(i, first)));
            let last = self.skipped + self.rotary_dim..self.head_dim;
            for row in halves.chain(0..self.skipped).chain(last) {
                let start = (head * self.head_dim + row) * row_bytes;
                out.extend_from_slice(&bytes[start..start + row_bytes]);
            }
        }
        debug_assert_eq!(out.len(), bytes.len());
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: adjacent rows move to a distance of half the rotated part, the rows before them move
    /// behind them, and all other rows keep their places.
    #[test]
    fn pairs_are_separated() {
        // Two heads with two bytes in each row. Row r in memory is [r, r].
        let bytes = |rows: &[u8]| rows.iter().flat_map(|row| [*row, *row]).collect::<Vec<_>>();
        for (head_dim, skipped, rotary_dim, stored) in [
            (4, 0, 4, vec![0, 2, 1, 3, 4, 6, 5, 7]),
            (6, 0, 4, vec![0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]),
            (4, 0, 2, (0..8).collect()),
            (6, 1, 4, vec![4, 0, 2, 1, 3, 5, 10, 6, 8, 7, 9, 11]),
        ] {
            let pairs = AdjacentPairs { heads: 2, head_dim, skipped, rotary_dim };
            let expected: Vec<u8> = (0..2 * head_dim as u8).collect();
            assert_eq!(pairs.separate(&bytes(&stored)), bytes(&expected));
        }
    }
}
