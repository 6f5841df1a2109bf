//! The buffers of the forward pass. They grow to the largest batch so far and are reused.

use stolon_checkpoint::config::{DecoderConfig, FeedForwardConfig, LayerConfig};
use stolon_kernels::Operands;

use super::mixer::MixerBuffers;
use super::passes;
use super::routing::Routing;

/// The activations of a step. The f32 buffers have room for at least as many rows as the step has.
/// Packed operands are reset to the number of rows where they are computed.
#[derive(Debug, Default)]
pub(super) struct Activations {
    /// The residual stream, `[rows, hidden_size]`.
    pub(super) x: Vec<f32>,
    /// The normalized residual stream `[rows, hidden_size]`, packed for the next GEMM.
    pub(super) normed: Operands,
    /// The per-layer embeddings of all rows, `[rows, layers, per_layer_input]`. Used only by models
    /// that have them.
    pub(super) per_layer: Vec<f32>,
    /// Buffers of the mixers.
    pub(super) mixers: MixerBuffers,
    /// Output of a mixer, packed for the output projection.
    pub(super) mixed: Operands,
    /// Output of the gate function `[rows, intermediate_size]`, packed for the down projection.
    /// With experts, one group of rows for each expert.
    pub(super) inner: Operands,
    /// The rows of `inner`, `[rows, intermediate_size]`, if an adapter of the step reads them;
    /// empty otherwise.
    pub(super) inner_rows: Vec<f32>,
    /// The experts that each row uses.
    pub(super) routing: Routing,
    /// Output of a projection `[rows, hidden_size]` that is normalized before it is added to the
    /// residual stream. Used only if outputs or per-layer embeddings are normalized.
    pub(super) projected: Vec<f32>,
    /// Output of the experts `[rows, hidden_size]` before it is normalized. Used only in layers
    /// with an MLP and experts next to each other.
    pub(super) mixture: Vec<f32>,
}

impl Activations {
    /// Grows the f32 buffers to at least `rows` rows.
    pub(super) fn reserve(&mut self, config: &DecoderConfig, rows: usize) {
        self.mixers.reserve(config, rows);
        let has_projected = config.norms.placement.outputs() || config.per_layer_input.is_some();
        let projected = if has_projected { config.hidden_size } else { 0 };
        let has_mixture =
            |layer: &LayerConfig| matches!(layer.mlp, Some(FeedForwardConfig::DenseAndExperts(..)));
        let mixture = if config.layers.iter().any(has_mixture) { projected } else { 0 };
        let per_layer = config.per_layer_input.map_or(0, |input| config.layers.len() * input.width);
        for (buffer, width) in [
            (&mut self.x, config.hidden_size),
            (&mut self.projected, projected),
            (&mut self.mixture, mixture),
            (&mut self.per_layer, per_layer),
        ] {
            passes::grow(buffer, rows * width);
        }
    }
}
