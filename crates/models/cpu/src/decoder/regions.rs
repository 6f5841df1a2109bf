//! Coordinates and sizes as tokens of the decoder (Moondream). Their embeddings are computed from
//! Fourier features, and the logits of their bins from the residual stream.

use stolon_backend::{RegionBins, RegionToken, StepBatch};
use stolon_checkpoint::config::{RegionWeights, ValueWeights, VisionConfig};
use stolon_checkpoint::error::ModelError;
use stolon_kernels::{self as kernels, Operands, Path, RowSums, Sink};

use super::Decoder;
use super::linear::{Linear, Loader, multiply, project};
use super::passes::{Norm, NormVectors};
use crate::workers::Workers;

/// The weights of coordinates and sizes.
#[derive(Debug)]
pub(crate) struct Regions {
    bins: RegionBins,
    path: Path,
    /// The norm of the residual stream before the projections to the bins; `None` if MLPs compute
    /// the bins.
    norm: Option<NormVectors>,
    coordinates: Values,
    sizes: Values,
}

/// The weights of one kind of values: coordinates or sizes.
#[derive(Debug)]
struct Values {
    /// Frequencies of the Fourier features, `[numbers, features / 2]`. A coordinate is one number,
    /// and a size is two.
    frequencies: Vec<f32>,
    encoder: Linear,
    /// The first projection of the MLP that computes the bins, if it is an MLP.
    inner: Option<Linear>,
    /// The projection to the logits of the bins.
    bins: Linear,
}

impl Regions {
    /// Packs the weights, if the model has any.
    ///
    /// # Errors
    /// [`ModelError`] with the name of a tensor that is missing or has the wrong shape or type.
    pub(crate) fn load(
        config: &VisionConfig,
        loader: &mut Loader<'_>,
    ) -> Result<Option<Self>, ModelError> {
        let (Some(regions), Some(weights)) = (config.regions, config.region_weights()) else {
            return Ok(None);
        };
        let RegionWeights { norm, coordinates, sizes } = weights;
        Ok(Some(Self {
            bins: regions.bins(),
            path: loader.path,
            norm: NormVectors::optional(norm.as_ref(), loader)?,
            coordinates: Values::load(&coordinates, loader)?,
            sizes: Values::load(&sizes, loader)?,
        }))
    }

    /// Size in bytes of all packed matrices.
    pub(crate) fn bytes(&self) -> usize {
        [&self.coordinates, &self.sizes].map(Values::bytes).iter().sum()
    }

    /// The numbers of bins of coordinates and sizes.
    pub(crate) fn bins(&self) -> RegionBins {
        self.bins
    }

    /// Writes the embedding of a token to `row`, `[hidden_size]`, if it is a coordinate or a size.
    fn embed(&self, token: u32, row: &mut [f32], workers: &Workers) {
        match RegionToken::of(token) {
            Some(RegionToken::Coordinate { bin }) => {
                let numbers = [self.bins.coordinate(bin)];
                self.coordinates.encode(&numbers, row, self.path, workers);
            }
            Some(RegionToken::Size { width_bin, height_bin }) => {
                let numbers = [width_bin, height_bin].map(|bin| self.bins.size(bin));
                self.sizes.encode(&numbers, row, self.path, workers);
            }
            None => {}
        }
    }

    /// The logits of the bins, `[rows, bins.width()]`, of rows of the residual stream. If there is
    /// a norm, the rows have been normalized.
    fn logits(&self, x: &[f32], workers: &Workers) -> Vec<f32> {
        let rows = x.len() / self.coordinates.encoder.out_features();
        let coordinates = self.coordinates.decode(x, self.path, workers);
        let sizes = self.sizes.decode(x, self.path, workers);
        let mut logits = Vec::with_capacity(rows * self.bins.width());
        let rows = coordinates.chunks_exact(self.bins.coordinates);
        for (coordinates, sizes) in rows.zip(sizes.chunks_exact(2 * self.bins.sizes)) {
            logits.extend_from_slice(coordinates);
            logits.extend_from_slice(sizes);
        }
        logits
    }
}

impl Values {
    fn load(spec: &ValueWeights, loader: &mut Loader<'_>) -> Result<Self, ModelError> {
        let ValueWeights { frequencies, encoder, inner, bins } = spec;
        Ok(Self {
            frequencies: loader.vector(frequencies)?,
            encoder: loader.linear(encoder)?,
            inner: loader.optional(inner.as_ref())?,
            bins: loader.linear(bins)?,
        })
    }

    fn bytes(&self) -> usize {
        let inner = self.inner.as_ref().map_or(0, Linear::bytes);
        self.encoder.bytes() + inner + self.bins.bytes()
    }

    /// Writes the embedding of a value to `out`. The angle of each feature is the sum of the
    /// value's numbers, each multiplied with its frequency and 2 pi. The cosines and sines of the
    /// angles are projected to the embedding.
    fn encode(&self, numbers: &[f32], out: &mut [f32], path: Path, workers: &Workers) {
        let half = self.frequencies.len() / numbers.len();
        let mut features = vec![0.0; 2 * half];
        for index in 0..half {
            let of_number = |(number, frequencies): (&f32, &[f32])| {
                std::f32::consts::TAU * number * frequencies[index]
            };
            let angle: f32 =
                numbers.iter().zip(self.frequencies.chunks_exact(half)).map(of_number).sum();
            features[index] = angle.cos();
            features[half + index] = angle.sin();
        }
        let mut packed = Operands::default();
        packed.reset(1, &[&self.encoder.matrix]);
        packed.pack(workers.for_pass(1, features.len()), &features);
        project(&self.encoder, &packed, Sink::Rows(out), path, workers);
    }

    /// The logits of the bins of rows of the residual stream.
    fn decode(&self, x: &[f32], path: Path, workers: &Workers) -> Vec<f32> {
        let width = self.encoder.out_features();
        let rows = x.len() / width;
        let first = self.inner.as_ref().unwrap_or(&self.bins);
        let mut packed = Operands::default();
        packed.reset(rows, &[&first.matrix]);
        packed.pack(workers.for_pass(rows, width), x);
        if let Some(up) = &self.inner {
            let gelu = |sums: RowSums<'_>| {
                up.add_bias(path, sums.feature, sums.first);
                kernels::gelu_tanh_in_place(path, sums.first);
            };
            let mut inner = Operands::default();
            inner.reset(rows, &[&self.bins.matrix]);
            multiply(up, &packed, &gelu, Sink::Operands(inner.only()), (path, workers));
            packed = inner;
        }
        let mut logits = vec![0.0; rows * self.bins.out_features()];
        project(&self.bins, &packed, Sink::Rows(&mut logits), path, workers);
        logits
    }
}

impl Decoder {
    /// Adds support for coordinates and sizes, if the model has them.
    pub(crate) fn with_regions(self, regions: Option<Regions>) -> Self {
        Self { regions, ..self }
    }

    /// Writes the embeddings of the batch's coordinates and sizes to the residual stream.
    pub(super) fn embed_regions(&mut self, batch: &StepBatch, workers: &Workers) {
        let Some(regions) = &self.regions else { return };
        let width = self.config.hidden_size;
        for (row, token) in self.activations.x.chunks_exact_mut(width).zip(&batch.tokens) {
            regions.embed(*token, row, workers);
        }
    }

    /// Inserts the logits of bins into `logits`, `[rows, vocab_size]`, after each row that requests
    /// them. The rows are the first rows of the residual stream.
    pub(super) fn add_regions(&self, logits: Vec<f32>, workers: &Workers) -> Vec<f32> {
        let Some(regions) = &self.regions else { return logits };
        let wanted = self.plan.region_rows.iter().filter(|wanted| **wanted).count();
        if wanted == 0 {
            return logits;
        }
        let width = self.config.hidden_size;
        let rows = self.activations.x.chunks_exact(width).zip(&self.plan.region_rows);
        let x: Vec<f32> =
            rows.filter(|(_, wanted)| **wanted).flat_map(|(row, _)| row).copied().collect();
        let mut normed = vec![0.0; x.len()];
        let norm = Norm::of(self.config.hidden_size, regions.norm.as_ref(), self.path);
        norm.rows(&x, &mut normed, workers);
        let more = regions.logits(&normed, workers);
        let mut all = Vec::with_capacity(logits.len() + more.len());
        let mut more = more.chunks_exact(regions.bins.width());
        let rows = logits.chunks_exact(self.config.vocab_size);
        for (row, wanted) in rows.zip(&self.plan.region_rows) {
            all.extend_from_slice(row);
            if *wanted {
                all.extend(more.next().into_iter().flatten());
            }
        }
        all
    }
}
