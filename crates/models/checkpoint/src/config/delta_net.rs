//! The description of layers with Gated DeltaNet or Kimi Delta Attention.

use stolon_kernels::Rule;

use super::recurrent::{RecurrentShape, ShapeKeys, check_sizes};
use crate::error::ModelError;

/// Gated DeltaNet, which most layers of Qwen3.5, Qwen3-Next and Kimi Linear have instead of
/// attention. Each value head has a state, a matrix `[key_dim, value_dim]`, which every position
/// updates by the delta rule. Queries, keys and values first pass through a short convolution,
/// whose last inputs are a part of the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaNetConfig {
    /// The form of decays and gates.
    pub kind: DeltaNetKind,
    /// Number of query heads and of key heads.
    pub key_heads: usize,
    /// Number of value heads, a multiple of `key_heads`.
    pub value_heads: usize,
    /// Number of elements of a query head and of a key head.
    pub key_dim: usize,
    /// Number of elements of a value head.
    pub value_dim: usize,
    /// Number of positions in the convolution, including the current one: from 2 to 64.
    pub taps: usize,
    /// Whether consecutive value heads share a key head, as in safetensors files. Otherwise value
    /// head `h` uses the key head `h % key_heads`, as in GGUF files.
    pub grouped: bool,
    /// Whether the weights are the logarithms of the decay rates (`A_log` of safetensors files)
    /// instead of the negated rates (`ssm_a` of GGUF files).
    pub log_rates: bool,
}

/// The two published forms of Gated DeltaNet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeltaNetKind {
    /// Gated DeltaNet (Yang et al., 2024): the state of a head has one decay for each position, and
    /// outputs are multiplied by the SiLU of their gates.
    Gated,
    /// Kimi Delta Attention (Kimi Team, 2025): each element of the keys has a decay of its own, and
    /// outputs are multiplied by the sigmoid of their gates. The projections to time steps and
    /// gates have low rank: the residual stream is first projected to `rank` elements.
    Kimi {
        /// Number of elements of the low-rank vectors.
        rank: usize,
    },
}

impl DeltaNetConfig {
    /// Kimi Delta Attention in which heads and low-rank vectors all have `dim` elements.
    pub(super) const fn kimi(heads: usize, dim: usize, taps: usize, log_rates: bool) -> Self {
        Self {
            kind: DeltaNetKind::Kimi { rank: dim },
            key_heads: heads,
            value_heads: heads,
            key_dim: dim,
            value_dim: dim,
            taps,
            grouped: true,
            log_rates,
        }
    }

    /// Number of elements of all query heads, and of all key heads.
    #[must_use]
    pub fn key_width(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Number of elements of all value heads.
    #[must_use]
    pub fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// The sizes that all kinds of recurrent layers have.
    #[must_use]
    pub fn shape(&self) -> RecurrentShape {
        RecurrentShape {
            heads: self.value_heads,
            key_dim: self.key_dim,
            value_dim: self.value_dim,
            rule: match self.kind {
                DeltaNetKind::Gated => Rule::Delta,
                DeltaNetKind::Kimi { .. } => Rule::DeltaByKey,
            },
            channels: 2 * self.key_width() + self.value_width(),
            taps: self.taps,
        }
    }

    /// The key head that a value head uses.
    #[must_use]
    pub fn key_head(&self, value_head: usize) -> usize {
        match self.grouped {
            true => value_head / (self.value_heads / self.key_heads),
            false => value_head % self.key_heads,
        }
    }

    /// Whether the order of value heads is the same as with the value `grouped` of
    /// [`Self::grouped`].
    pub(crate) fn has_order(&self, grouped: bool) -> bool {
        self.grouped == grouped || self.key_heads == self.value_heads
    }

    /// Number of elements of the low-rank vectors of time steps and gates; `None` if these are
    /// projected directly from the residual stream.
    #[must_use]
    pub fn rank(&self) -> Option<usize> {
        match self.kind {
            DeltaNetKind::Gated => None,
            DeltaNetKind::Kimi { rank } => Some(rank),
        }
    }

    /// Checks the documented ranges. `file` is the file's name in error messages.
    pub(super) fn check(&self, file: &str) -> Result<(), ModelError> {
        let [key_heads, heads, key_dim, value_dim] = match self.kind {
            DeltaNetKind::Gated => [
                "linear_num_key_heads",
                "linear_num_value_heads",
                "linear_key_head_dim",
                "linear_value_head_dim",
            ],
            DeltaNetKind::Kimi { .. } => {
                ["linear_num_heads", "linear_num_heads", "linear_head_dim", "linear_head_dim"]
            }
        };
        let sizes = [
            (key_heads, self.key_heads),
            (heads, self.value_heads),
            (key_dim, self.key_dim),
            (value_dim, self.value_dim),
            (key_dim, self.rank().unwrap_or(1)),
        ];
        check_sizes(file, &sizes)?;
        if !self.value_heads.is_multiple_of(self.key_heads) {
            let expected = format!("a multiple of {key_heads}, {}", self.key_heads);
            return Err(ModelError::key(file, heads, expected, self.value_heads));
        }
        self.shape().check(file, &ShapeKeys { heads, taps: "linear_conv_kernel_dim" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: consecutive value heads share a key head if they are grouped; otherwise they use the
    /// key heads in turn.
    #[test]
    fn value_heads_share_key_heads() {
        let config = DeltaNetConfig {
            kind: DeltaNetKind::Gated,
            key_heads: 2,
            value_heads: 6,
            key_dim: 4,
            value_dim: 20,
            taps: 4,
            grouped: true,
            log_rates: true,
        };
        let heads = |config: DeltaNetConfig| (0..6).map(|head| config.key_head(head)).collect();
        let (grouped, tiled): (Vec<_>, Vec<_>) =
            (heads(config), heads(DeltaNetConfig { grouped: false, ..config }));
        assert_eq!(grouped, [0, 0, 0, 1, 1, 1]);
        assert_eq!(tiled, [0, 1, 0, 1, 0, 1]);
        assert_eq!(config.shape().state_len(), 3 * (8 + 8 + 120) + 6 * 4 * 32);
        assert!(config.check("f").is_ok());
    }
}
