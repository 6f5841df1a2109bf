//! The buffers of the forward pass. They grow to the largest batch so far and are reused.

use stolon_checkpoint::config::{DecoderConfig, LayerConfig, MlpKind, QkNorm};
use stolon_kernels::Operands;

use super::latent::LatentBuffers;
use super::recurrent::RecurrentBuffers;
use super::routing::Routing;
use super::selective::SelectiveBuffers;

/// The activations of a step. The f32 buffers have room for at least as many rows as the step has.
/// Packed operands are reset to the number of rows where they are computed.
#[derive(Debug, Default)]
pub(super) struct Activations {
    /// The residual stream, `[rows, hidden_size]`.
    pub(super) x: Vec<f32>,
    /// The normalized residual stream `[rows, hidden_size]`, packed for the next GEMM.
    pub(super) normed: Operands,
    /// The values of all rows for all layers, `[rows, layers, per_layer_input]`. Used only with
    /// per-layer embeddings.
    pub(super) per_layer: Vec<f32>,
    /// Queries, `[rows, num_heads, head_dim]`.
    pub(super) q: Vec<f32>,
    /// The gates of the outputs of attention, `[rows, num_heads, head_dim]`, of a convolution,
    /// `[rows, hidden_size]`, or of a recurrent layer, `[rows, heads, value_dim]`.
    pub(super) gates: Vec<f32>,
    /// Keys, `[rows, num_kv_heads, head_dim]`, that are normalized before they are written to the
    /// KV store. Used only with [`QkNorm::Position`].
    pub(super) k: Vec<f32>,
    /// Output of attention, `[rows, num_heads, head_dim]`.
    pub(super) attended: Vec<f32>,
    /// Output of attention or of a convolution, packed for the output projection.
    pub(super) mixed: Operands,
    /// Output of the gate function `[rows, intermediate_size]`, packed for the down projection.
    /// With experts, one group of rows for each expert.
    pub(super) inner: Operands,
    /// The rows of `inner`, `[rows, intermediate_size]`, if an adapter of the step reads them;
    /// empty otherwise.
    pub(super) inner_rows: Vec<f32>,
    /// The slots of the positions that enter the convolution at each row, `[rows, taps]`.
    pub(super) taps: Vec<Option<usize>>,
    /// Buffers of recurrent layers.
    pub(super) recurrent: RecurrentBuffers,
    /// Buffers of latent attention.
    pub(super) latent: LatentBuffers,
    /// Buffers of selective attention.
    pub(super) selective: SelectiveBuffers,
    /// Which experts each row uses.
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
        let head_dims = (0..config.layers.len()).map(|layer| config.heads(layer).head_dim);
        let attended = rows * config.num_heads * head_dims.max().unwrap_or(0);
        let gates = [
            config.convolution_taps.map(|_| rows * config.hidden_size),
            config.output_gate.then_some(attended),
            config.recurrent_shape().map(|shape| rows * shape.value_width()),
        ];
        if let Some(shape) = &config.recurrent_shape() {
            let rank = config.delta_net.and_then(|delta_net| delta_net.rank());
            self.recurrent.reserve(shape, rank.unwrap_or(0), rows);
        }
        if let Some(latent) = &config.latent {
            self.latent.reserve(latent, config.num_heads, rows);
        }
        let has_projected = config.norms.outputs() || config.per_layer_input.is_some();
        let projected = if has_projected { rows * config.hidden_size } else { 0 };
        let has_mixture = |layer: &LayerConfig| layer.mlp == Some(MlpKind::DenseAndExperts);
        let mixture = if config.layers.iter().any(has_mixture) { projected } else { 0 };
        let per_layer = config.per_layer_input.map_or(0, |width| config.layers.len() * width);
        let keys = match config.qk_norm {
            Some(QkNorm::Position) => rows * config.num_kv_heads * config.head_dim,
            _ => 0,
        };
        for (buffer, len) in [
            (&mut self.x, rows * config.hidden_size),
            (&mut self.projected, projected),
            (&mut self.mixture, mixture),
            (&mut self.per_layer, rows * per_layer),
            (&mut self.q, attended),
            (&mut self.gates, gates.into_iter().flatten().max().unwrap_or(0)),
            (&mut self.k, keys),
            (&mut self.attended, attended),
        ] {
            if buffer.len() < len {
                buffer.resize(len, 0.0);
            }
        }
    }
}
