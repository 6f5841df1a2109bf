//! The projections of latent vectors to the keys and values of all heads, which files have in one
//! matrix: the rows of a head's keys, then those of its values. Newer GGUF files have them as they
//! are in memory, by head and with the keys transposed.

use super::interleaved::Interleaved;
use super::{Stored, Weights};
use crate::config::{DecoderConfig, LatentConfig, LatentWeights, MixerWeights};
use crate::error::ModelError;

impl Weights {
    /// Divides the matrices with the keys and values of all heads of `config`. Those of keys are
    /// transposed when they are read. Matrices of adapters have any number of columns
    /// (`any_columns`).
    ///
    /// # Errors
    /// [`ModelError::WrongShape`] if there is another number of rows, and [`ModelError::WrongType`]
    /// if the matrix is quantised, so that it cannot be transposed.
    pub(super) fn split_latent(
        &mut self,
        config: &DecoderConfig,
        any_columns: bool,
    ) -> Result<(), ModelError> {
        let Some(latent) = config.latent else { return Ok(()) };
        for mixer in config.weights().layers.into_iter().flat_map(|layer| layer.mixers) {
            if let MixerWeights::Latent(weights) = mixer {
                let columns = self.shape(&weights.name).and_then(|shape| shape.last().copied());
                let columns = columns.filter(|_| any_columns).unwrap_or(latent.width);
                self.split_heads(latent, weights, columns)?;
            }
        }
        Ok(())
    }

    fn split_heads(
        &mut self,
        LatentConfig { key_dim, value_dim, .. }: LatentConfig,
        LatentWeights { name, keys, values, .. }: LatentWeights,
        columns: usize,
    ) -> Result<(), ModelError> {
        if keys.first().is_none_or(|key| self.contains(&key.name)) {
            return Ok(());
        }
        let rows = keys.len() * (key_dim + value_dim);
        // `check` finds missing ones.
        let Some(stored) = self.take_whole(&name, vec![rows, columns])? else { return Ok(()) };
        let row_bytes = match &stored.dtype {
            Ok(dtype) if dtype.block_len() == 1 && stored.converted.is_none() => {
                stored.range.len() / rows
            }
            dtype => {
                let got = match &stored.converted {
                    Some(converted) => converted.format.to_owned(),
                    None => dtype.clone().map_or_else(|other| other, |dtype| dtype.name().into()),
                };
                let file = self.regions[stored.region].file.clone();
                let expected = "F32, F16 or BF16, or a matrix of keys and one of values".into();
                return Err(ModelError::WrongType { file, tensor: name, expected, got });
            }
        };
        let mut start = stored.range.start;
        let mut next = |rows: usize| {
            let range = start..start + rows * row_bytes;
            start = range.end;
            range
        };
        for (key, value) in keys.into_iter().zip(values) {
            let interleaved = Some(Interleaved::TRANSPOSED);
            let (shape, range) = (vec![columns, key_dim], next(key_dim));
            self.insert(key.name, Stored { shape, range, interleaved, ..stored.clone() })?;
            let (shape, range) = (vec![value_dim, columns], next(value_dim));
            self.insert(value.name, Stored { shape, range, ..stored.clone() })?;
        }
        Ok(())
    }
}
