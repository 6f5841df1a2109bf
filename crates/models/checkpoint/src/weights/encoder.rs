//! The tensors of image encoders: whether they are there, and those of files that have queries,
//! keys and values in one tensor.

use super::{Stored, TensorType, Weights};
use crate::config::{TensorRole, TensorSpec, VisionConfig};
use crate::error::ModelError;
use crate::mmap::Bytes;

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
    /// The error of [`tensor`](Self::tensor) for the first tensor that is not.
    pub fn check_encoder(&self, encoder: &VisionConfig) -> Result<(), ModelError> {
        for spec in encoder.tensors() {
            let stored = self.stored(&spec.name, &spec.shape)?;
            self.checked(&spec.name, stored, &spec.shape)?;
        }
        Ok(())
    }

    /// Replaces the first of two tensors, which have the shape of `spec`, by their sum in f32. Its
    /// name is that of `spec`, and the other one's is `other`.
    ///
    /// # Errors
    /// Those of [`floats`](Self::floats).
    pub(crate) fn add_up(&mut self, spec: &TensorSpec, other: &str) -> Result<(), ModelError> {
        let mut sum = self.floats(spec)?;
        let other_spec = TensorSpec { name: other.to_owned(), ..spec.clone() };
        let more = self.floats(&other_spec)?;
        sum.iter_mut().zip(&more).for_each(|(sum, value)| *sum += value);
        self.remove(&spec.name);
        self.remove(other);
        let bytes: Vec<u8> = sum.iter().flat_map(|value| value.to_le_bytes()).collect();
        let file = self.origin.clone();
        let range = 0..bytes.len();
        let region = self.add_region(&file, Bytes::Owned(bytes));
        let stored = Stored::whole(region, Ok(TensorType::F32), spec.shape.clone(), range);
        self.insert(spec.name.clone(), stored)
    }

    /// Divides the tensors of queries, keys and values of an encoder into parts of the same size.
    pub(crate) fn split_thirds(&mut self, prefix: &str) -> Result<(), ModelError> {
        let is_qkv = |name: &&String| name.starts_with(prefix) && name.contains(".qkv_proj.");
        let names: Vec<String> = self.tensors.keys().filter(is_qkv).cloned().collect();
        let mut list = Vec::with_capacity(names.len());
        for name in names {
            let Some(Stored { shape, .. }) = self.tensors.get(&name) else { continue };
            // `check_encoder` finds the parts that are missing.
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

/// The name of a tensor in a block: its number, the module and the kind of tensor.
pub(crate) fn in_block(rest: &str, modules: &[(&str, &str)]) -> Option<String> {
    let (block, rest) = rest.split_once('.')?;
    let (module, kind) = rest.rsplit_once('.')?;
    let (_, here) = modules.iter().find(|(own, _)| *own == module)?;
    Some(format!("{block}.{here}.{kind}"))
}
