//! The sizes that all kinds of recurrent layers have.

use stolon_kernels::{Recurrence, Rule};

use super::keys::SIZE_MAX;
use super::{DecoderConfig, DeltaNetConfig, Mamba2Config, MixerConfig};
use crate::error::ModelError;

/// Maximum number of taps of the convolution. Known models have 4.
const TAPS_MAX: usize = 64;

/// The sizes of a recurrent layer. Its state consists of the last inputs of a short convolution,
/// followed by a matrix `[key_dim, value_dim]` for each head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecurrentShape {
    /// Number of heads that have a state.
    pub heads: usize,
    /// Number of elements of a key and of a query.
    pub key_dim: usize,
    /// Number of elements of a value.
    pub value_dim: usize,
    /// The update rule of the state. It also determines whether there is one decay for each head
    /// and position, or one for each element of a key.
    pub rule: Rule,
    /// Number of channels of the convolution: all queries, keys and values.
    pub channels: usize,
    /// Number of positions in the convolution, including the current one: from 2 to 64.
    pub taps: usize,
}

/// The decay rates per time step, all negative, from those of a file, which are their logarithms if
/// `log` is true.
#[must_use]
pub fn decay_rates(mut rates: Vec<f32>, log: bool) -> Vec<f32> {
    if log {
        rates.iter_mut().for_each(|rate| *rate = -rate.exp());
    }
    rates
}

/// The names of the configuration's keys from which the sizes are read, for messages.
pub(super) struct ShapeKeys {
    pub(super) heads: &'static str,
    pub(super) taps: &'static str,
}

impl RecurrentShape {
    /// Number of elements of all values, and of all outputs.
    #[must_use]
    pub fn value_width(&self) -> usize {
        self.heads * self.value_dim
    }

    /// Number of decays of a head at each position.
    #[must_use]
    pub fn decays(&self) -> usize {
        self.rule.decays(self.key_dim)
    }

    /// Number of decays of all heads at each position.
    #[must_use]
    pub fn decay_width(&self) -> usize {
        self.heads * self.decays()
    }

    /// Number of decays and strengths of all heads at each position.
    #[must_use]
    pub fn factor_width(&self) -> usize {
        self.decay_width() + self.heads
    }

    /// Number of values of the last inputs of the convolution, `[taps - 1, channels]`.
    #[must_use]
    pub fn inputs_len(&self) -> usize {
        (self.taps - 1) * self.channels
    }

    /// Number of values of the state of one head.
    #[must_use]
    pub fn head_len(&self) -> usize {
        Recurrence::state_len(self.key_dim, self.value_dim)
    }

    /// Number of f32 values of the state of a layer.
    #[must_use]
    pub fn state_len(&self) -> usize {
        self.inputs_len() + self.heads * self.head_len()
    }

    /// Checks the documented ranges. The caller has checked that all sizes but the taps are from 1
    /// to 2^30, and `channels` is a sum of three products of two of them.
    pub(super) fn check(&self, file: &str, keys: &ShapeKeys) -> Result<(), ModelError> {
        if !(2..=TAPS_MAX).contains(&self.taps) {
            let expected = format!("2 to {TAPS_MAX}");
            return Err(ModelError::key(file, keys.taps, expected, self.taps));
        }
        let product =
            |a: usize, b: usize| Some(a.saturating_mul(b)).filter(|n| *n as u64 <= SIZE_MAX);
        let state = product(self.key_dim, self.value_dim.next_multiple_of(16))
            .and_then(|head| product(head, self.heads));
        if state.is_some() && self.channels as u64 <= 3 * SIZE_MAX {
            return Ok(());
        }
        let expected = format!("at most {SIZE_MAX} elements of all heads and their states");
        Err(ModelError::key(file, keys.heads, expected, self.heads))
    }
}

/// Checks that sizes are from 1 to 2^30.
pub(super) fn check_sizes(file: &str, sizes: &[(&str, usize)]) -> Result<(), ModelError> {
    match sizes.iter().find(|(_, size)| *size == 0 || *size as u64 > SIZE_MAX) {
        Some((key, size)) => Err(ModelError::key(file, key, format!("1 to {SIZE_MAX}"), size)),
        None => Ok(()),
    }
}

impl MixerConfig {
    /// The sizes of a recurrent layer; `None` for other mixers.
    #[must_use]
    pub fn recurrent_shape(&self) -> Option<RecurrentShape> {
        match self {
            Self::DeltaNet(delta_net) => Some(delta_net.shape()),
            Self::Mamba2(mamba2) => Some(mamba2.shape()),
            Self::Attention(_) | Self::Latent(_) | Self::Convolution(_) => None,
        }
    }
}

impl DecoderConfig {
    /// The first Gated DeltaNet or Kimi Delta Attention, if there is one.
    #[must_use]
    pub fn delta_net(&self) -> Option<&DeltaNetConfig> {
        self.mixers().find_map(|mixer| match mixer {
            MixerConfig::DeltaNet(delta_net) => Some(delta_net),
            _ => None,
        })
    }

    /// The first Mamba-2, if there is one.
    #[must_use]
    pub fn mamba2(&self) -> Option<&Mamba2Config> {
        self.mixers().find_map(|mixer| match mixer {
            MixerConfig::Mamba2(mamba2) => Some(mamba2),
            _ => None,
        })
    }

    /// The sizes of the recurrent layers, which are all the same; `None` if there are none.
    #[must_use]
    pub fn recurrent_shape(&self) -> Option<RecurrentShape> {
        self.mixers().find_map(MixerConfig::recurrent_shape)
    }

    /// Number of recurrent layers.
    #[must_use]
    pub fn recurrent_layers(&self) -> usize {
        self.mixers().filter_map(MixerConfig::recurrent_shape).count()
    }

    /// Checks that the states of all recurrent layers have the same size. `file` is the file's name
    /// in error messages.
    pub(super) fn check_states(&self, file: &str) -> Result<(), ModelError> {
        let mut shapes = self.mixers().filter_map(MixerConfig::recurrent_shape);
        let first = shapes.next();
        if shapes.all(|shape| Some(shape) == first) {
            return Ok(());
        }
        let expected = "the sizes of recurrent layers of one kind";
        Err(ModelError::key(file, "layer_types", expected, "others"))
    }
}
