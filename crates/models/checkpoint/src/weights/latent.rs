//! The projections of latent vectors to the keys and values of all heads. Files have them in one
//! matrix, in which the rows of each head's keys are followed by the rows of its values. Newer GGUF
//! files have them in the same form as in memory, divided by head and with transposed keys.

use super::interleaved::Interleaved;
use super::{Stored, Weights};
use crate::config::{
    DecoderConfig, LatentSizes, LatentWeights, MixerWeights, TensorRole, TensorSpec,
};
use crate::error::ModelError;

impl DecoderConfig {
    /// The matrices that combine the keys and values of all heads.
    pub(super) fn latent_matrices(&self) -> Vec<TensorSpec> {
        let mixers = self.weights().layers.into_iter().flat_map(|layer| layer.mixers);
        let matrix = |mixer| match mixer {
            MixerWeights::Latent(LatentWeights { config, name, keys, .. }) => {
                let LatentSizes { key_dim, value_dim, width, .. } = config.sizes;
                let shape = vec![keys.len() * (key_dim + value_dim), width];
                Some(TensorSpec { name, shape, role: TensorRole::Matrix })
            }
            _ => None,
        };
        mixers.filter_map(matrix).collect()
    }
}

impl Weights {
    /// Divides the matrices that combine the keys and values of all heads of `config`. The parts
    /// with keys are transposed when they are read. With `any_columns`, the matrices are adapters'
    /// and may have any number of columns.
    ///
    /// # Errors
    /// [`ModelError::WrongShape`] for another number of rows, and [`ModelError::WrongType`] if the
    /// matrix consists of blocks and therefore cannot be transposed.
    pub(super) fn split_latent(
        &mut self,
        config: &DecoderConfig,
        any_columns: bool,
    ) -> Result<(), ModelError> {
        for mixer in config.weights().layers.into_iter().flat_map(|layer| layer.mixers) {
            if let MixerWeights::Latent(weights) = mixer {
                let columns = self.shape(&weights.name).and_then(|shape| shape.last().copied());
                let columns = columns.filter(|_| any_columns).unwrap_or(weights.config.sizes.width);
                self.split_heads(weights, columns)?;
            }
        }
        Ok(())
    }

    fn split_heads(
        &mut self,
        LatentWeights { config, name, keys, values, .. }: LatentWeights,
        columns: usize,
    ) -> Result<(), ModelError> {
        let LatentSizes { key_dim, value_dim, .. } = config.sizes;
        if keys.first().is_none_or(|key| self.contains(&key.name)) {
            return Ok(());
        }
        let rows = keys.len() * (key_dim + value_dim);
        // `check` reports missing matrices.
        let Some(stored) = self.take_whole(&name, vec![rows, columns])? else { return Ok(()) };
        let is_converted = stored.converted.is_some();
        let row_bytes = match &stored.dtype {
            // The rows of a converted matrix are computed when they are read.
            Ok(dtype) if dtype.block_len() == 1 && is_converted => 0,
            Ok(dtype) if dtype.block_len() == 1 => stored.range.len() / rows,
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
        let mut next_row = 0;
        // A part of the matrix, with the next rows. Two tensors must not share bytes, so only the
        // first part of a converted matrix has its bytes.
        let mut next = |rows: usize| {
            let (first, start) = (next_row, stored.range.start + next_row * row_bytes);
            next_row += rows;
            let range = match (is_converted, first) {
                (true, 0) => stored.range.clone(),
                _ => start..start + rows * row_bytes,
            };
            let converted = stored.converted.as_ref();
            let converted =
                converted.map(|whole| Box::new(whole.part(first..next_row, first == 0)));
            Stored { range, converted, ..stored.clone() }
        };
        for (key, value) in keys.into_iter().zip(values) {
            let (interleaved, shape) = (Some(Interleaved::TRANSPOSED), vec![columns, key_dim]);
            let part = Stored { shape, interleaved, ..next(key_dim) };
            self.insert(key.name, part)?;
            let part = Stored { shape: vec![value_dim, columns], ..next(value_dim) };
            self.insert(value.name, part)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use half::f16;
    use safetensors::tensor::{Dtype, TensorView, serialize};
    use serde_json::json;

    use super::*;
    use crate::config::quantization::Quantization;
    use crate::mmap::Bytes;

    const NAME: &str = "model.layers.0.self_attn.kv_b_proj.weight";
    /// The rows of the matrix: two heads with 32 rows of keys and 16 rows of values each.
    const ROWS: usize = 96;
    const WIDTH: usize = 64;

    fn config() -> DecoderConfig {
        let config = json!({
            "model_type": "deepseek_v2", "vocab_size": 8, "hidden_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 2, "kv_lora_rank": WIDTH, "q_lora_rank": null,
            "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 16,
            "first_k_dense_replace": 1,
        });
        DecoderConfig::from_json("config.json", &config).unwrap()
    }

    /// A value of the matrix, which is exact in f16.
    fn value(row: usize, column: usize) -> f32 {
        code(row, column) as f32 * 0.5
    }

    fn code(row: usize, column: usize) -> i8 {
        ((row * 7 + column * 3) % 200) as i8
    }

    /// Goal: a quantized matrix of latent attention is divided by head, with transposed keys, in
    /// the same way as one that is not quantized. Both have the values of the file.
    #[test]
    fn quantized_matrices_are_divided() {
        let config = config();
        let cells = || (0..ROWS).flat_map(|row| (0..WIDTH).map(move |column| (row, column)));
        let codes: Vec<u8> = cells().map(|(row, column)| code(row, column) as u8).collect();
        let scales: Vec<u8> =
            [0.5_f32; ROWS].iter().flat_map(|scale| scale.to_le_bytes()).collect();
        let plain: Vec<u8> = cells()
            .flat_map(|(row, column)| f16::from_f32(value(row, column)).to_le_bytes())
            .collect();
        let scale_name = format!("{NAME}_scale");
        let quantized = serialize(
            [
                (NAME, TensorView::new(Dtype::I8, vec![ROWS, WIDTH], &codes).unwrap()),
                (&scale_name, TensorView::new(Dtype::F32, vec![ROWS, 1], &scales).unwrap()),
            ],
            None,
        );
        let plain = serialize(
            [(NAME, TensorView::new(Dtype::F16, vec![ROWS, WIDTH], &plain).unwrap())],
            None,
        );
        let quantization = Quantization::Integers {
            bits: 8,
            packed: false,
            symmetric: true,
            group: None,
            act_order: false,
        };
        for file in [quantized, plain] {
            let mut weights =
                Weights::from_safetensors("file", Bytes::Owned(file.unwrap())).unwrap();
            weights.convert(&quantization, &config).unwrap();
            weights.split_latent(&config, false).unwrap();
            weights.check_disjoint().unwrap();
            let mixers = config.weights().layers.remove(0).mixers;
            let Some(MixerWeights::Latent(LatentWeights { keys, values, .. })) =
                mixers.into_iter().next()
            else {
                panic!("expected latent attention");
            };
            for (head, (key, values)) in keys.iter().zip(&values).enumerate() {
                let floats = |spec: &TensorSpec| weights.floats(spec).unwrap();
                let first = head * 48;
                let expected: Vec<f32> = (0..WIDTH)
                    .flat_map(|column| (0..32).map(move |row| value(first + row, column)))
                    .collect();
                assert_eq!(floats(key), expected);
                let expected: Vec<f32> = (0..16)
                    .flat_map(|row| (0..WIDTH).map(move |column| value(first + 32 + row, column)))
                    .collect();
                assert_eq!(floats(values), expected);
            }
        }
    }
}
