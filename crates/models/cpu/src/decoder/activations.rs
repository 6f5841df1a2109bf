//! The buffers of the forward pass. They grow to the largest batch so far and are reused.

use stolon_checkpoint::config::{
    DecoderConfig, FeedForwardConfig, LayerConfig, MixerConfig, QkNorm,
};
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
        let (mut attended, mut gates, mut keys) = (0, 0, 0);
        for mixer in config.mixers() {
            let (width, gate) = match mixer {
                MixerConfig::Attention(attention) => {
                    let width = attention.heads * attention.head_dim;
                    if attention.qk_norm == Some(QkNorm::Position) {
                        keys = keys.max(attention.kv_heads * attention.head_dim);
                    }
                    (width, if attention.output_gate { width } else { 0 })
                }
                MixerConfig::Latent(latent) => {
                    self.latent.reserve(latent, rows);
                    (latent.heads * latent.sizes.kept_dim(), 0)
                }
                MixerConfig::Convolution(_) => (0, config.hidden_size),
                MixerConfig::DeltaNet(delta_net) => {
                    let shape = delta_net.shape();
                    self.recurrent.reserve(&shape, delta_net.rank().unwrap_or(0), rows);
                    (0, shape.value_width())
                }
                MixerConfig::Mamba2(mamba2) => {
                    self.recurrent.reserve(&mamba2.shape(), 0, rows);
                    (0, mamba2.shape().value_width())
                }
            };
            (attended, gates) = (attended.max(width), gates.max(gate));
        }
        let has_projected = config.norms.outputs() || config.per_layer_input.is_some();
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
            (&mut self.q, attended),
            (&mut self.gates, gates),
            (&mut self.k, keys),
            (&mut self.attended, attended),
        ] {
            if buffer.len() < rows * width {
                buffer.resize(rows * width, 0.0);
            }
        }
    }
}
