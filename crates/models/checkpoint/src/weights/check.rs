//! Compares the stored tensors with the tensors that a configuration requires.

use stolon_kernels::TensorType;

use super::rows::RowRuns;
use super::{Stored, Weights};
use crate::config::{DecoderConfig, TensorSpec};
use crate::error::ModelError;

impl Weights {
    /// Checks that all tensors that `config` requires are present with the right shape and a
    /// supported type, and that no two tensors share bytes, without reading their data.
    ///
    /// # Errors
    /// The error of [`tensor`](Self::tensor) for the first tensor that does not pass, or
    /// [`ModelError::Malformed`] for tensors that overlap.
    pub fn check(&self, config: &DecoderConfig) -> Result<(), ModelError> {
        self.problems(config).next().map_or(Ok(()), Err)
    }

    /// The same as [`check`](Self::check) for a list of tensors.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn check_all(
        &self,
        tensors: impl IntoIterator<Item = TensorSpec>,
    ) -> Result<(), ModelError> {
        self.check_disjoint()?;
        tensors.into_iter().try_for_each(|spec| {
            let stored = self.stored(&spec.name, &spec.shape)?;
            self.checked(&spec.name, stored, &spec.shape).map(drop)
        })
    }

    /// All errors that [`check`](Self::check) can find.
    pub(crate) fn problems(&self, config: &DecoderConfig) -> impl Iterator<Item = ModelError> {
        let of_tensor = |spec: TensorSpec| {
            let stored = self
                .stored(&spec.name, &spec.shape)
                .and_then(|stored| self.checked(&spec.name, stored, &spec.shape));
            stored.err()
        };
        let overlap = self.check_disjoint().err();
        overlap.into_iter().chain(config.tensors().into_iter().filter_map(of_tensor))
    }

    /// Checks that tensors do not overlap. Each one is packed separately, so a small file with
    /// overlapping tensors would need much memory.
    pub(crate) fn check_disjoint(&self) -> Result<(), ModelError> {
        // Tensors with interleaved rows share their range, so only the first of them is checked.
        let first = |stored: &Stored| {
            stored.interleaved.as_ref().is_none_or(|interleaved| interleaved.first == 0)
                && stored.runs.as_ref().is_none_or(RowRuns::has_first)
        };
        let stored =
            self.tensors.iter().filter(|(_, stored)| !stored.range.is_empty() && first(stored));
        let mut ranges: Vec<_> = stored
            .map(|(name, stored)| (stored.region, stored.range.start, stored.range.end, name))
            .collect();
        ranges.sort_unstable();
        for pair in ranges.windows(2) {
            let [(region, _, end, first), (next_region, start, _, second)] = pair else { continue };
            if region == next_region && start < end {
                let reason = format!("the tensors `{first}` and `{second}` overlap");
                return Err(ModelError::malformed(&self.regions[*region].file, reason));
            }
        }
        Ok(())
    }

    /// Removes a tensor that is about to be divided; `None` if there is no tensor with this name.
    ///
    /// # Errors
    /// [`ModelError::WrongShape`] if it has another shape than `expected`.
    pub(super) fn take_whole(
        &mut self,
        name: &str,
        expected: Vec<usize>,
    ) -> Result<Option<Stored>, ModelError> {
        let Some(stored) = self.tensors.get(name) else { return Ok(None) };
        if stored.shape != expected {
            return Err(ModelError::WrongShape {
                file: self.regions[stored.region].file.clone(),
                tensor: name.to_owned(),
                expected,
                got: stored.shape.clone(),
            });
        }
        Ok(self.tensors.remove(name))
    }

    /// Divides tensors that contain the rows of several of the configuration's matrices. Nothing is
    /// copied: each matrix is a range of the bytes.
    pub(super) fn split_fused(&mut self, config: &DecoderConfig) -> Result<(), ModelError> {
        self.split_stacked(config.stacked())
    }

    /// Divides matrices or vectors. Each has a name and the tensors whose rows it contains.
    pub(crate) fn split_stacked(
        &mut self,
        stacked: Vec<(String, Vec<TensorSpec>)>,
    ) -> Result<(), ModelError> {
        for (name, parts) in stacked {
            let rows: usize = parts.iter().map(|part| part.shape[0]).sum();
            let shape = [&[rows], &parts[0].shape[1..]].concat();
            let Some(stored) = self.take_whole(&name, shape)? else { continue };
            // Tensors of unsupported types may have any length. They are never read.
            let row_bytes = if stored.dtype.is_ok() { stored.range.len() / rows } else { 0 };
            let mut start = stored.range.start;
            for TensorSpec { name, shape, role: _ } in parts {
                let end = start + shape[0] * row_bytes;
                self.insert(name, Stored { shape, range: start..end, ..stored.clone() })?;
                start = end;
            }
        }
        Ok(())
    }

    /// The entry of the tensor `name`. `shape` is used only in the error.
    pub(super) fn stored(&self, name: &str, shape: &[usize]) -> Result<&Stored, ModelError> {
        self.tensors.get(name).ok_or_else(|| ModelError::MissingTensor {
            file: self.origin.clone(),
            tensor: name.into(),
            expected: shape.to_vec(),
        })
    }

    /// Checks that the type of a stored tensor is supported and that it has the shape `shape`.
    /// Returns the type.
    pub(super) fn checked(
        &self,
        name: &str,
        stored: &Stored,
        shape: &[usize],
    ) -> Result<TensorType, ModelError> {
        let file = &self.regions[stored.region].file;
        let dtype = match &stored.dtype {
            Ok(dtype) => *dtype,
            Err(other) => {
                return Err(ModelError::WrongType {
                    file: file.clone(),
                    tensor: name.into(),
                    expected: supported_types().join(", "),
                    got: other.clone(),
                });
            }
        };
        // Dimensions of 1 do not matter. For example, a matrix with one row may be stored as a
        // vector, and a convolution may have a dimension of 1 between channels and taps. The
        // projection of patches may be stored as the kernel of a convolution, and the norm of
        // several groups with one row per group.
        let larger = |shape: &[usize]| -> Vec<usize> {
            shape.iter().copied().filter(|size| *size != 1).collect()
        };
        let is_same = match (&stored.shape[..], shape) {
            (stored, wanted) if larger(stored) == larger(wanted) => true,
            ([rows, kernel @ ..], [wanted, columns]) if kernel.len() >= 3 => {
                rows == wanted && kernel.iter().product::<usize>() == *columns
            }
            ([groups, width], [wanted]) => groups * width == *wanted,
            _ => false,
        };
        if !is_same {
            return Err(ModelError::WrongShape {
                file: file.clone(),
                tensor: name.into(),
                expected: shape.to_vec(),
                got: stored.shape.clone(),
            });
        }
        Ok(dtype)
    }
}

/// The names of the types that files may have.
fn supported_types() -> Vec<&'static str> {
    let types = TensorType::ALL.into_iter().filter(|dtype| dtype.gguf_id().is_some());
    types.map(TensorType::name).collect()
}
