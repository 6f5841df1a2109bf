//! The form in which the CPU's kernels read the matrices of an adapter.

use std::sync::Arc;

use stolon_backend::AdapterLoadError;
use stolon_kernels::{KernelError, LowRank, Matrix, Path};

use super::{
    AdapterFormat, Budget, EmbeddingMatrices, EmbeddingWeights, PlainMatrix, PlainSecond, Second,
    SiteMatrices, SiteWeights,
};
use crate::error::ModelError;

/// Packs the matrices of adapters for the kernels of an instruction set.
#[derive(Clone, Copy, Debug)]
pub struct Packed(pub(super) Path);

impl AdapterFormat for Packed {
    type Site = SiteWeights;
    type Embedding = EmbeddingWeights;

    fn site(
        &self,
        matrices: SiteMatrices,
        budget: &mut Budget,
    ) -> Result<SiteWeights, AdapterLoadError> {
        let SiteMatrices { first, scales, outputs: _, second, by_head: _ } = matrices;
        let mut packed = Vec::with_capacity(first.len());
        for matrix in &first {
            packed.push(self.first(matrix, budget)?);
        }
        let mut seconds: Vec<Option<Second>> = Vec::with_capacity(second.len());
        let mut before: Option<(&Arc<PlainMatrix>, Arc<LowRank>)> = None;
        for second in &second {
            let Some(PlainSecond { start, matrix }) = second else {
                seconds.push(None);
                continue;
            };
            // Heads may share a matrix, which is packed once.
            let shared = before.as_ref().filter(|(known, _)| Arc::ptr_eq(known, matrix));
            let low_rank = match shared {
                Some((_, low_rank)) => Arc::clone(low_rank),
                None => Arc::new(self.low_rank(matrix, budget)?),
            };
            before = Some((matrix, Arc::clone(&low_rank)));
            seconds.push(Some(Second { start: *start, matrix: low_rank }));
        }
        Ok(SiteWeights { first: packed, scales, second: seconds })
    }

    fn embedding(
        &self,
        matrices: EmbeddingMatrices,
        budget: &mut Budget,
    ) -> Result<EmbeddingWeights, AdapterLoadError> {
        let EmbeddingMatrices { columns, scale, second } = matrices;
        let PlainMatrix { dtype, rows, columns: rank, bytes, name: _ } = columns;
        budget.take(rows, rank, dtype)?;
        let second = self.low_rank(&second, budget)?;
        Ok(EmbeddingWeights { columns: bytes, dtype, scale, second })
    }
}

impl Packed {
    /// Packs a matrix `A`.
    fn first(self, matrix: &PlainMatrix, budget: &mut Budget) -> Result<Matrix, ModelError> {
        let PlainMatrix { name, dtype, rows, columns, bytes } = matrix;
        budget.take(rows.next_multiple_of(Matrix::ROWS_STEP), *columns, *dtype)?;
        Matrix::pack(*dtype, *rows, *columns, bytes, self.0).map_err(|e| unpackable(name, e))
    }

    /// Packs a matrix `B`.
    fn low_rank(self, matrix: &PlainMatrix, budget: &mut Budget) -> Result<LowRank, ModelError> {
        let PlainMatrix { name, dtype, rows, columns, bytes } = matrix;
        budget.take(rows.next_multiple_of(Matrix::ROWS_STEP), *columns, *dtype)?;
        LowRank::pack(*dtype, *rows, *columns, bytes, self.0).map_err(|e| unpackable(name, e))
    }
}

fn unpackable(tensor: &str, error: KernelError) -> ModelError {
    ModelError::Unpackable { tensor: tensor.to_owned(), error }
}
