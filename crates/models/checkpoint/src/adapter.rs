//! LoRA adapters. For some projections of a model, an adapter has two small matrices `A` and `B`,
//! whose product with a row is added to the product with the model's own matrix: `y = W x + scale *
//! B (A x)` (Hu et al., 2021).
//!
//! 1. `AdapterFiles` reads the files of PEFT, or a GGUF file, and gives the matrices the names of
//!    the model's matrices.
//! 2. [`LoraWeights`] has them in the form that the forward pass needs. The matrices `A` of all
//!    projections with the same input are one matrix, and the rows of each `B` have the same order
//!    as the rows of the model's matrix in memory.
//! 3. The forward pass (`decoder/adapters.rs`) computes `A x` for the rows of each adapter of a
//!    step, and adds `B (A x)` in the epilogues of the products with the model's matrices.
//!
//! Adapters with a feature that would change answers and is not implemented are refused, with the
//! name of the tensor or key: DoRA, trained biases, whole modules, routers with a norm of their
//! own, and per-layer embeddings.

mod files;
mod packer;
mod parameters;
mod peft;
mod sites;

use std::collections::HashMap;
use std::path::Path as FilePath;
use std::sync::Arc;

use stolon_backend::{Adapter, AdapterLoadError, AdapterLoader};
use stolon_kernels::{LowRank, Matrix, Path, TensorType, widen};

use crate::config::DecoderConfig;
use crate::error::ModelError;
use files::AdapterFiles;
use packer::Packer;

/// Maximum rank of an adapter's matrices. Adapters have ranks up to 512.
pub(crate) const RANK_MAX: usize = 1024;

/// The suffix of the name of a matrix `A`. The matrix `B` has the name of the model's matrix.
const FIRST: &str = ".lora_a";

/// Reads adapters for a model.
#[derive(Debug)]
pub struct LoraLoader {
    model: Arc<DecoderConfig>,
    path: Path,
}

impl LoraLoader {
    /// Creates a loader for a model that is computed with the instruction set `path`.
    pub fn new(config: &DecoderConfig, path: Path) -> Self {
        Self { model: Arc::new(config.clone()), path }
    }

    /// The weights of an adapter that this loader has returned; `None` for an adapter of another
    /// model.
    pub fn own<'a>(&self, adapter: &'a Adapter) -> Option<&'a LoraWeights> {
        adapter.weights::<LoraWeights>().filter(|weights| Arc::ptr_eq(&weights.model, &self.model))
    }
}

impl AdapterLoader for LoraLoader {
    fn load(&self, path: &FilePath, bytes_max: u64) -> Result<Adapter, AdapterLoadError> {
        let files = AdapterFiles::open(path, &self.model, bytes_max)?;
        let fingerprint = files.fingerprint();
        let mut packer = Packer::new(&files, self.path, bytes_max);
        let layers = packer.layers()?;
        let (experts, embedding) = (packer.experts()?, packer.embedding()?);
        let (bytes, rank) = (packer.bytes, packer.rank);
        let weights = LoraWeights { model: Arc::clone(&self.model), layers, experts, embedding };
        Ok(Adapter::new(fingerprint, bytes, rank, weights))
    }
}

impl From<ModelError> for AdapterLoadError {
    fn from(error: ModelError) -> Self {
        let text = error.to_string();
        match error {
            ModelError::TooLarge { .. } => Self::TooLarge(text),
            ModelError::MissingFile { .. } => Self::NotFound(text),
            ModelError::Io { error, .. } if error.kind() == std::io::ErrorKind::NotFound => {
                Self::NotFound(text)
            }
            _ => Self::Invalid(text),
        }
    }
}

/// The groups of a layer's projections that have the same input. The output matrix is at
/// [`Site::Inputs`] of an additional layer after the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Site {
    /// The input projections of a mixer other than Mamba-2. Attention has queries, keys, values,
    /// and the gates of its output, in this order. Latent attention has queries, or their low-rank
    /// vector, and the key head that is kept of a position. A convolution, Gated DeltaNet and Kimi
    /// Delta Attention have the parts of their weights, in the same order.
    Inputs,
    /// The input projections of Mamba-2, which may be next to attention.
    MambaInputs,
    /// The absorbed queries of each head of latent attention: the products of the head's queries
    /// with the transposed projection to its keys.
    Keys,
    /// The values of each head of latent attention.
    Values,
    /// The queries of latent attention, if they are projected from a low-rank vector.
    Queries,
    /// The second projection to the time steps of Kimi Delta Attention.
    Steps,
    /// The second projection to the gates of the outputs of Kimi Delta Attention.
    Gates,
    /// The output projection of attention, or of the mixer that replaces it.
    Output,
    /// The output projection of Mamba-2.
    MambaOutput,
    /// Gate and up of a dense MLP, in this order.
    GateUp,
    /// The output projection of a dense MLP.
    Down,
    /// The scores of the experts, and the score of the shared expert if it has one, in this order.
    Routers,
}

impl Site {
    /// Number of sites.
    pub const COUNT: usize = Self::Routers as usize + 1;

    /// The head whose input projection `part` reads; 0 at sites where all projections have one
    /// input.
    pub fn head(self, part: usize) -> usize {
        if matches!(self, Self::Keys | Self::Values) { part } else { 0 }
    }
}

/// The groups of an expert's projections that have the same input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertSite {
    /// Gate and up, in this order.
    GateUp,
    /// The output projection.
    Down,
}

/// The weights at each [`ExpertSite`] of the experts of a layer that an adapter changes, by the
/// index of the expert. The index of the shared expert is the number of the others.
type ExpertWeights = HashMap<usize, [Option<SiteWeights>; 2]>;

/// The weights of a layer at each site.
type LayerWeights = [Option<SiteWeights>; Site::COUNT];

/// The weights of an adapter.
#[derive(Debug)]
pub struct LoraWeights {
    /// The configuration of the model that the adapter was loaded for.
    model: Arc<DecoderConfig>,
    /// The weights of each site, for each layer and for the output matrix.
    layers: Vec<LayerWeights>,
    /// The weights of the experts, for each layer.
    experts: Vec<ExpertWeights>,
    embedding: Option<EmbeddingWeights>,
}

impl LoraWeights {
    /// The weights of a site, if the adapter changes a projection there.
    pub fn site(&self, layer: usize, site: Site) -> Option<&SiteWeights> {
        self.layers[layer][site as usize].as_ref()
    }

    /// The weights of an expert of a layer at a site, if the adapter changes a projection there.
    pub fn expert(&self, layer: usize, expert: usize, site: ExpertSite) -> Option<&SiteWeights> {
        self.experts[layer].get(&expert)?[site as usize].as_ref()
    }

    /// The weights of the embedding, if the adapter changes it.
    pub fn embedding(&self) -> Option<&EmbeddingWeights> {
        self.embedding.as_ref()
    }
}

/// The weights of an adapter for the embedding. The input of `A` is a token, so `A x` is a column
/// of `A`.
#[derive(Debug)]
pub struct EmbeddingWeights {
    /// `[vocab_size, rank]`: the columns of `A`, as values of the type `dtype`.
    columns: Vec<u8>,
    dtype: TensorType,
    scale: f32,
    /// The matrix `B`, `[hidden_size, rank]`.
    second: LowRank,
}

impl EmbeddingWeights {
    /// Adds the update of the embedding of `token` to `x`, `[hidden_size]`.
    pub fn add(&self, token: u32, x: &mut [f32]) {
        let bytes = self.second.rank() * self.dtype.block_bytes();
        let mut column = vec![0.0; self.second.rank()];
        widen(self.dtype, &self.columns[token as usize * bytes..][..bytes], &mut column);
        column.iter_mut().for_each(|value| *value *= self.scale);
        self.second.add(0, &column, x);
    }
}

/// The weights of an adapter for projections with the same input.
#[derive(Debug)]
pub struct SiteWeights {
    /// The matrices `A`, `[width, in]`, with the rows of all projections. [`Site::Keys`] has one
    /// for each head, and other sites have one in total.
    first: Vec<Matrix>,
    /// The scale of each row of `first`, `[width]`.
    pub scales: Vec<f32>,
    /// The matrix `B` of each projection of the site; `None` if the adapter does not change it. At
    /// [`Site::Keys`] and [`Site::Values`], there is one for each head.
    pub second: Vec<Option<Second>>,
}

impl SiteWeights {
    /// The matrix `A` of a head. All heads may have the same one.
    pub fn first(&self, head: usize) -> &Matrix {
        &self.first[head.min(self.first.len() - 1)]
    }
}

/// The matrix `B` of a projection.
#[derive(Debug)]
pub struct Second {
    /// Index of the first row of [`SiteWeights::first`] that belongs to it.
    pub start: usize,
    /// `[out, rank]`. All heads of [`Site::Keys`] share it.
    pub matrix: Arc<LowRank>,
}
