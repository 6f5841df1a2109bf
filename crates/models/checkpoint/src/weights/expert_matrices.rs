//! Divides matrices of an adapter that combine all experts of a layer.

use super::{Stored, Weights};
use crate::error::ModelError;
use crate::mmap::Bytes;

/// Matrices `A` and `B` for a projection of all experts of a layer.
#[derive(Debug)]
pub(crate) struct ExpertMatrices {
    /// Number of experts, above 0.
    pub(crate) count: usize,
    /// Whether the rows of `B` alternate between gate and up.
    pub(crate) alternating: bool,
    /// The name of `A`, `[count * rank, in]`: the rows of the first expert, followed by the rows of
    /// the next one, and so on.
    pub(crate) first: String,
    /// The name of `B`, `[out, rank * count]`: the first column of each expert, followed by the
    /// second column of each, and so on.
    pub(crate) second: String,
}

impl Weights {
    /// Replaces the matrices of `updates` with matrices of single experts, `[rank, in]` and `[out,
    /// rank]`. `names` returns the names of an expert's `A` and `B`. In the new matrices, the rows
    /// of gate come before the rows of up. `B` is copied.
    ///
    /// # Errors
    /// [`ModelError::WrongType`] if the kernels do not support a type,
    /// [`ModelError::MissingTensor`] if a matrix does not exist, and [`ModelError::Malformed`] if
    /// an expert has matrices already.
    ///
    /// # Panics
    /// If the matrices have other shapes.
    pub(crate) fn split_expert_matrices(
        &mut self,
        updates: &ExpertMatrices,
        names: impl Fn(usize) -> [String; 2],
    ) -> Result<(), ModelError> {
        let ExpertMatrices { count, alternating, first, second } = updates;
        let (a, b) = (self.taken(first)?, self.taken(second)?);
        let (&[rows, inputs], &[out, columns]) = (&*a.shape, &*b.shape) else {
            panic!("expected matrices, got {:?} and {:?}", a.shape, b.shape);
        };
        assert!(rows == columns && rows.is_multiple_of(*count), "{rows}, {columns}, {count}");
        let rank = rows / count;
        let step = if *alternating { 2 } else { 1 };
        let width = b.range.len() / (out * columns);
        let file = self.regions[b.region].file.clone();
        let all = &self.regions[b.region].bytes[b.range.clone()];
        let mut by_expert = Vec::with_capacity(all.len());
        for expert in 0..*count {
            for row in (0..step).flat_map(|first| (first..out).step_by(step)) {
                let row = &all[row * columns * width..][..columns * width];
                for element in row.chunks_exact(width).skip(expert).step_by(*count) {
                    by_expert.extend_from_slice(element);
                }
            }
        }
        let region = self.add_region(&file, Bytes::Owned(by_expert));
        let (a_bytes, b_bytes) = (a.range.len() / count, b.range.len() / count);
        for expert in 0..*count {
            let [first, second] = names(expert);
            let start = a.range.start + expert * a_bytes;
            let range = start..start + a_bytes;
            self.insert(first, Stored { shape: vec![rank, inputs], range, ..a.clone() })?;
            let range = expert * b_bytes..(expert + 1) * b_bytes;
            self.insert(second, Stored { shape: vec![out, rank], range, region, ..b.clone() })?;
        }
        Ok(())
    }

    /// Removes a tensor whose type is supported, and returns its entry.
    fn taken(&mut self, name: &str) -> Result<Stored, ModelError> {
        let stored = self.stored(name, &[])?;
        self.checked(name, stored, &stored.shape)?;
        self.stored(name, &[]).cloned().inspect(|_| drop(self.tensors.remove(name)))
    }
}
