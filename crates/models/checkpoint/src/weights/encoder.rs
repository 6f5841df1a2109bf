//! The tensors of image encoders: checks that they exist, and divides tensors with queries, keys
//! and values.

use super::{Stored, Weights};
use crate::config::{TensorRole, TensorSpec, VisionConfig};
use crate::error::ModelError;

impl Weights {
    /// Whether the weights have an image encoder. Some checkpoints of vision models have only the
    /// decoder.
    pub(crate) fn has_encoder(&self, encoder: &VisionConfig) -> bool {
        let prefix = &encoder.tower.prefix;
        self.names().any(|name| name.starts_with(prefix))
    }

    /// Checks that all tensors that `encoder` requires are present with the right shape and a
    /// supported type, without reading their data.
    ///
    /// # Errors
    /// The error of [`tensor`](Self::tensor) for the first tensor that does not pass.
    pub fn check_encoder(&self, encoder: &VisionConfig) -> Result<(), ModelError> {
        for spec in encoder.tensors() {
            let stored = self.stored(&spec.name, &spec.shape)?;
            self.checked(&spec.name, stored, &spec.shape)?;
        }
        Ok(())
    }

    /// Replaces two tensors with the shape of `spec` by their sum in f32. The first tensor and the
    /// sum have the name of `spec`, and the second tensor has the name `other`.
    ///
    /// # Errors
    /// The errors of [`floats`](Self::floats).
    pub(crate) fn add_up(&mut self, spec: &TensorSpec, other: &str) -> Result<(), ModelError> {
        let mut sum = self.floats(spec)?;
        let other_spec = TensorSpec { name: other.to_owned(), ..spec.clone() };
        let more = self.floats(&other_spec)?;
        sum.iter_mut().zip(&more).for_each(|(sum, value)| *sum += value);
        self.remove(&spec.name);
        self.remove(other);
        self.add_floats(spec, &sum)
    }

    /// Divides the combined tensors of queries, keys and values of an encoder into thirds.
    pub(crate) fn split_thirds(&mut self, prefix: &str) -> Result<(), ModelError> {
        let is_qkv = |name: &&String| name.starts_with(prefix) && name.contains(".qkv_proj.");
        let names: Vec<String> = self.tensors.keys().filter(is_qkv).cloned().collect();
        let mut list = Vec::with_capacity(names.len());
        for name in names {
            let Some(Stored { shape, .. }) = self.tensors.get(&name) else { continue };
            // `check_encoder` reports missing parts.
            let Some((rows, rest)) = shape.split_first() else { continue };
            if *rows == 0 || !rows.is_multiple_of(3) {
                continue;
            }
            let shape: Vec<usize> = [rows / 3].into_iter().chain(rest.iter().copied()).collect();
            let part = |own: &str| TensorSpec {
                name: name.replace("qkv_proj", own),
                shape: shape.clone(),
                role: TensorRole::Matrix,
            };
            list.push((name.clone(), ["q_proj", "k_proj", "v_proj"].map(part).to_vec()));
        }
        self.split_stacked(list)
    }
}

/// Translates the name of a tensor in a block, `rest`: its number, the module and the kind of
/// tensor.
pub(crate) fn in_block(rest: &str, modules: &[(&str, &str)]) -> Option<String> {
    let (block, rest) = rest.split_once('.')?;
    let (module, kind) = rest.rsplit_once('.')?;
    let (_, here) = modules.iter().find(|(own, _)| *own == module)?;
    Some(format!("{block}.{here}.{kind}"))
}
