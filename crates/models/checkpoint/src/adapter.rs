//! LoRA adapters. For some projections of a model, an adapter has two small matrices `A` and `B`,
//! whose product with a row is added to the product with the model's own matrix: `y = W x + scale *
//! B (A x)` (Hu et al., 2021).
//!
//! 1. `AdapterFiles` reads the files of PEFT, or a GGUF file, and gives the matrices the names of
//!    the model's matrices.
//! 2. [`SiteMatrices`] are the matrices of the projections with the same input. Their matrices `A`
//!    are one matrix, and the rows of each `B` have the same order as the rows of the model's matrix
//!    in memory.
//! 3. [`LoraWeights`] has them in the form that the forward pass of a backend needs, its
//!    [`AdapterFormat`].
//! 4. The forward pass computes `A x` for the rows of each adapter of a step, and adds `B (A x)` to
//!    the products with the model's matrices.
//!
//! Adapters with a feature that would change answers and is not implemented are refused, with the
//! name of the tensor or key: DoRA, trained biases, whole modules, routers with a norm of their
//! own, and per-layer embeddings.

mod files;
mod matrices;
mod packed;
mod parameters;
mod peft;
mod sites;

use std::collections::HashMap;
use std::fmt;
use std::path::Path as FilePath;
use std::sync::Arc;

use stolon_backend::{Adapter, AdapterLoadError, AdapterLoader, BackendError, StepBatch};
use stolon_kernels::{LowRank, Matrix, Path, TensorType, widen};

use crate::config::DecoderConfig;
use crate::error::ModelError;
use files::AdapterFiles;
pub(crate) use files::{CONFIG, PREFIX, WEIGHTS};
use matrices::Reader;
pub use matrices::{Budget, EmbeddingMatrices, PlainMatrix, PlainSecond, SiteMatrices};
pub use packed::Packed;
pub(crate) use peft::PeftSettings;
use sites::Sites;

/// Maximum rank of an adapter's matrices. Adapters have ranks up to 512.
pub(crate) const RANK_MAX: usize = 1024;

/// The suffix of the name of a matrix `A`. The matrix `B` has the name of the model's matrix.
const FIRST: &str = ".lora_a";

/// The form in which a backend keeps the matrices of adapters.
pub trait AdapterFormat: fmt::Debug + Send + Sync + 'static {
    /// The matrices of a site.
    type Site: fmt::Debug + Send + Sync + 'static;
    /// The matrices of the embedding.
    type Embedding: fmt::Debug + Send + Sync + 'static;

    /// Converts the matrices of a site, and counts the bytes in `budget` before they are allocated.
    ///
    /// # Errors
    /// [`AdapterLoadError`], among others `TooLarge` beyond the budget.
    fn site(
        &self,
        matrices: SiteMatrices,
        budget: &mut Budget,
    ) -> Result<Self::Site, AdapterLoadError>;

    /// The same for the matrices of the embedding.
    ///
    /// # Errors
    /// As for [`Self::site`].
    fn embedding(
        &self,
        matrices: EmbeddingMatrices,
        budget: &mut Budget,
    ) -> Result<Self::Embedding, AdapterLoadError>;
}

/// Reads adapters for a model.
#[derive(Debug)]
pub struct LoraLoader<F = Packed> {
    model: Arc<DecoderConfig>,
    format: F,
}

impl LoraLoader {
    /// Creates a loader for a model that is computed on the CPU with the instruction set `path`.
    pub fn new(config: &DecoderConfig, path: Path) -> Self {
        Self::with_format(config, Packed(path))
    }
}

impl<F: AdapterFormat> LoraLoader<F> {
    /// Creates a loader for a model whose adapters have the form `format`.
    pub fn with_format(config: &DecoderConfig, format: F) -> Self {
        Self { model: Arc::new(config.clone()), format }
    }

    /// The weights of an adapter that this loader has returned; `None` for an adapter of another
    /// model.
    pub fn own<'a>(&self, adapter: &'a Adapter) -> Option<&'a LoraWeights<F>> {
        let weights = adapter.weights::<LoraWeights<F>>();
        weights.filter(|weights| Arc::ptr_eq(&weights.model, &self.model))
    }

    /// Refuses a batch that has adapters of another model.
    ///
    /// # Errors
    /// [`BackendError::MalformedBatch`].
    pub fn check_slices(&self, batch: &StepBatch) -> Result<(), BackendError> {
        let mut adapters = batch.sequences.iter().filter_map(|slice| slice.adapter.as_ref());
        match adapters.find(|adapter| self.own(adapter).is_none()) {
            Some(foreign) => {
                Err(BackendError::MalformedBatch(format!("{foreign:?} is of another model")))
            }
            None => Ok(()),
        }
    }
}

impl<F: AdapterFormat> AdapterLoader for LoraLoader<F> {
    fn load(&self, path: &FilePath, bytes_max: u64) -> Result<Adapter, AdapterLoadError> {
        let files = AdapterFiles::open(path, &self.model, bytes_max)?;
        let mut reader = Reader::new(&files, bytes_max);
        let weights = LoraWeights::read(&self.model, files.sites(), &self.format, &mut reader)?;
        Ok(Adapter::new(files.fingerprint(), reader.budget.bytes(), reader.rank, weights))
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
type ExpertWeights<S> = HashMap<usize, [Option<S>; 2]>;

/// The weights of a layer at each site.
type LayerWeights<S> = [Option<S>; Site::COUNT];

/// The weights of an adapter in the form `F`.
#[derive(Debug)]
pub struct LoraWeights<F: AdapterFormat = Packed> {
    /// The configuration of the model that the adapter was loaded for.
    model: Arc<DecoderConfig>,
    /// The weights of each site, for each layer and for the output matrix.
    layers: Vec<LayerWeights<F::Site>>,
    /// The weights of the experts, for each layer.
    experts: Vec<ExpertWeights<F::Site>>,
    embedding: Option<F::Embedding>,
}

impl<F: AdapterFormat> LoraWeights<F> {
    /// Reads the matrices of all sites and converts them.
    fn read(
        model: &Arc<DecoderConfig>,
        sites: &Sites,
        format: &F,
        reader: &mut Reader<'_>,
    ) -> Result<Self, AdapterLoadError> {
        let convert = |matrices: Option<SiteMatrices>, reader: &mut Reader<'_>| {
            matrices.map(|matrices| format.site(matrices, &mut reader.budget)).transpose()
        };
        let mut layers = Vec::with_capacity(sites.layers.len());
        for layer in &sites.layers {
            let mut converted = [const { None }; Site::COUNT];
            for (site, parts) in layer.iter().enumerate() {
                let matrices = match layer[Site::Values as usize].first() {
                    Some(value) if site == Site::Keys as usize => reader.keys(parts, value)?,
                    _ if site == Site::Values as usize => reader.values(parts)?,
                    _ => reader.site(parts)?,
                };
                converted[site] = convert(matrices, reader)?;
            }
            layers.push(converted);
        }
        let mut experts = Vec::with_capacity(sites.experts.len());
        for layer in &sites.experts {
            let mut converted = ExpertWeights::new();
            for (index, [gate_up, down]) in layer.iter().enumerate() {
                let gate_up = reader.site(gate_up)?;
                let gate_up = convert(gate_up, reader)?;
                let down = reader.site(down)?;
                let expert = [gate_up, convert(down, reader)?];
                if expert.iter().any(Option::is_some) {
                    converted.insert(index, expert);
                }
            }
            experts.push(converted);
        }
        let embedding = reader.embedding()?;
        let embedding =
            embedding.map(|matrices| format.embedding(matrices, &mut reader.budget)).transpose()?;
        Ok(Self { model: Arc::clone(model), layers, experts, embedding })
    }

    /// The weights of a site, if the adapter changes a projection there.
    pub fn site(&self, layer: usize, site: Site) -> Option<&F::Site> {
        self.layers[layer][site as usize].as_ref()
    }

    /// The weights of an expert of a layer at a site, if the adapter changes a projection there.
    pub fn expert(&self, layer: usize, expert: usize, site: ExpertSite) -> Option<&F::Site> {
        self.experts[layer].get(&expert)?[site as usize].as_ref()
    }

    /// The weights of the embedding, if the adapter changes it.
    pub fn embedding(&self) -> Option<&F::Embedding> {
        self.embedding.as_ref()
    }
}

/// The packed weights of an adapter for the embedding. The input of `A` is a token, so `A x` is a
/// column of `A`.
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

/// The packed weights of an adapter for projections with the same input.
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
