//! LoRA adapters: for some projections of a model, two small matrices `A` and `B`, whose product
//! with a row is added to that of the model's own matrix: `y = W x + scale * B (A x)` (Hu et al.,
//! 2021).
//!
//! 1. `AdapterFiles` reads the files of PEFT, or a GGUF file, and gives the matrices the names of
//!    the model's own.
//! 2. [`LoraWeights`] has them in the form that the forward pass needs: the matrices `A` of all
//!    projections of the same rows as one matrix, and the rows of each `B` in the order of the rows
//!    in memory.
//! 3. The pass (`decoder/adapters.rs`) computes `A x` for the rows of each adapter of a step, and
//!    adds `B (A x)` in the epilogues of the products with the model's own matrices.
//!
//! What would change answers and is not implemented is refused by the name of its tensor or key:
//! DoRA, trained biases, whole modules, routers, and per-layer embeddings.

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

/// The ending of the name of a matrix `A`. The matrix `B` has the name of the model's matrix.
const FIRST: &str = ".lora_a";

/// Reads adapters for a model.
#[derive(Debug)]
pub struct LoraLoader {
    model: Arc<DecoderConfig>,
    path: Path,
}

impl LoraLoader {
    /// A loader for a model that is computed with the instruction set `path`.
    pub fn new(config: &DecoderConfig, path: Path) -> Self {
        Self { model: Arc::new(config.clone()), path }
    }

    /// The weights of an adapter that this loader has returned; `None` for one of another model.
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

/// The projections of a layer that read the same rows. The output matrix is at [`Site::Inputs`] of
/// the layer after the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Site {
    /// Of attention: queries, keys, values, and the gates of its output, in this order. Of latent
    /// attention: queries, or the vector that they are projections of, and what is kept of a
    /// position. Of a convolution, Gated DeltaNet or Kimi Delta Attention: the parts of their
    /// weights, in their order.
    Inputs,
    /// The same of Mamba-2, which may be next to attention.
    MambaInputs,
    /// The queries of each head of latent attention that are compared with what is kept, whose
    /// products with the transposed projection to the head's keys they are.
    Keys,
    /// The values of each head of latent attention.
    Values,
    /// The queries of latent attention, if they are projections of another vector.
    Queries,
    /// The time steps of Kimi Delta Attention.
    Steps,
    /// The gates of the outputs of Kimi Delta Attention.
    Gates,
    /// The projection of the output of attention, or of what the layer has in its place.
    Output,
    /// The same of Mamba-2.
    MambaOutput,
    /// Gate and up of a dense MLP, in this order.
    GateUp,
    /// The projection of a dense MLP's output.
    Down,
    /// The scores of the experts, and that of the shared expert if it has one, in this order.
    Routers,
}

impl Site {
    /// Number of sites.
    pub const COUNT: usize = Self::Routers as usize + 1;

    /// The head whose inputs projection `part` reads; 0 where all read the same.
    pub fn head(self, part: usize) -> usize {
        if matches!(self, Self::Keys | Self::Values) { part } else { 0 }
    }
}

/// The projections of an expert that read the same rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertSite {
    /// Gate and up, in this order.
    GateUp,
    /// The projection of the output.
    Down,
}

/// The weights of the experts of a layer that an adapter changes, by their index, at each
/// [`ExpertSite`]. The index of the shared expert is the number of the others.
type ExpertWeights = HashMap<usize, [Option<SiteWeights>; 2]>;

/// The weights of a layer at each site.
type LayerWeights = [Option<SiteWeights>; Site::COUNT];

/// The weights of an adapter.
#[derive(Debug)]
pub struct LoraWeights {
    /// The configuration of the model that it belongs to.
    model: Arc<DecoderConfig>,
    /// For each layer, and for the output matrix, the weights of each site.
    layers: Vec<LayerWeights>,
    /// For each layer the weights of its experts.
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
    /// `[hidden_size, rank]`.
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

/// The weights of an adapter for the projections of the same rows.
#[derive(Debug)]
pub struct SiteWeights {
    /// `[width, in]`: the rows of `A` of all projections. At [`Site::Keys`], one for each head.
    first: Vec<Matrix>,
    /// `[width]`: the scale of each row of `first`.
    pub scales: Vec<f32>,
    /// For each projection of the site its matrix `B`, if the adapter changes it. For each head at
    /// [`Site::Keys`] and [`Site::Values`].
    pub second: Vec<Option<Second>>,
}

impl SiteWeights {
    /// The matrix `A` of a head; all may have the same one.
    pub fn first(&self, head: usize) -> &Matrix {
        &self.first[head.min(self.first.len() - 1)]
    }
}

/// The matrix `B` of a projection.
#[derive(Debug)]
pub struct Second {
    /// Index of the first row of [`SiteWeights::first`] that belongs to it.
    pub start: usize,
    /// `[out, rank]`. The heads of [`Site::Keys`] share it.
    pub matrix: Arc<LowRank>,
}
