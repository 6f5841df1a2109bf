//! The description of layers with Mamba-2.

use stolon_kernels::Rule;

use super::attention::check_positive;
use super::recurrent::{RecurrentShape, ShapeKeys, check_sizes};
use crate::error::ModelError;

/// Mamba-2 (Dao and Gu, 2024), which most layers of Granite 4 have instead of attention. Each head
/// has a state, a matrix `[state_dim, head_dim]`, which decays and to which every position adds the
/// product of a key (`B`) and its value (`x`). A query (`C`) reads it. Keys, queries and values
/// first pass through a short convolution.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mamba2Config {
    /// Number of heads, a multiple of `groups`.
    pub heads: usize,
    /// Number of elements of a head.
    pub head_dim: usize,
    /// Number of keys and of queries. Each is shared by `heads / groups` consecutive heads, whose
    /// outputs are normalized together.
    pub groups: usize,
    /// Number of elements of a key and of a query.
    pub state_dim: usize,
    /// Number of positions in the convolution, including the current one: from 2 to 64.
    pub taps: usize,
    /// Whether the convolution has biases.
    pub convolution_bias: bool,
    /// Whether the gated outputs are normalized.
    pub norm: bool,
    /// Whether the weights are the logarithms of the decay rates. Otherwise they are the negated
    /// rates, as in GGUF files.
    pub log_rates: bool,
    /// Factors of the gates, the values, the keys, the queries and the time steps (Falcon-H1). They
    /// are applied before the biases of the convolution and of the time steps. All are above 0.
    pub input_factors: [f32; 5],
    /// Factor of the output (Falcon-H1), above 0.
    pub output_factor: f32,
}

impl Mamba2Config {
    /// Number of elements of all keys, and of all queries.
    #[must_use]
    pub fn key_width(&self) -> usize {
        self.groups * self.state_dim
    }

    /// The sizes that all kinds of recurrent layers have.
    #[must_use]
    pub fn shape(&self) -> RecurrentShape {
        RecurrentShape {
            heads: self.heads,
            key_dim: self.state_dim,
            value_dim: self.head_dim,
            rule: Rule::Additive,
            channels: self.heads * self.head_dim + 2 * self.key_width(),
            taps: self.taps,
        }
    }

    /// Applies the factors of values, keys and queries to the taps of the convolution, `[channels,
    /// taps]`: it is linear in its inputs.
    pub fn scale_taps(&self, by_channel: &mut [f32]) {
        let [_, value, key, query, _] = self.input_factors;
        let (values, rest) = by_channel.split_at_mut(self.heads * self.head_dim * self.taps);
        let (keys, queries) = rest.split_at_mut(self.key_width() * self.taps);
        for (taps, factor) in [(values, value), (keys, key), (queries, query)] {
            taps.iter_mut().for_each(|tap| *tap *= factor);
        }
    }

    /// Checks the documented ranges. `file` is the file's name in error messages.
    pub(super) fn check(&self, file: &str) -> Result<(), ModelError> {
        let heads = "mamba_n_heads";
        let sizes = [
            (heads, self.heads),
            ("mamba_d_head", self.head_dim),
            ("mamba_n_groups", self.groups),
            ("mamba_d_state", self.state_dim),
        ];
        check_sizes(file, &sizes)?;
        if !self.heads.is_multiple_of(self.groups) {
            let expected = format!("a multiple of mamba_n_groups, {}", self.groups);
            return Err(ModelError::key(file, heads, expected, self.heads));
        }
        for factor in self.input_factors.into_iter().chain([self.output_factor]) {
            check_positive(file, "ssm_multipliers", factor)?;
        }
        self.shape().check(file, &ShapeKeys { heads, taps: "mamba_d_conv" })
    }
}
