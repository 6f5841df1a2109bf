//! Adapters that change every projection of a model which adapters may change.

use stolon_model::DecoderConfig;
use stolon_model::config::{
    AttentionWeights, DenseAndExpertsWeights, FeedForwardWeights, LinearWeights, MixerWeights,
    MlpInputs,
};

use crate::adapter_writer::AdapterWriter;

/// A random adapter for all projections of the model with the configuration `config`.
pub(crate) fn whole_adapter(
    config: &DecoderConfig,
    rank: usize,
    dtype: &'static str,
    seed: u64,
) -> AdapterWriter {
    let mut adapter = AdapterWriter::new(rank, seed);
    for layer in config.weights().layers {
        let mut linears: Vec<LinearWeights> = Vec::new();
        let mut gated = false;
        for mixer in layer.mixers {
            let MixerWeights::Attention(attention) = mixer else { continue };
            let AttentionWeights { qkv, output, gate, .. } = attention;
            gated = gate.is_some();
            linears.extend(qkv.parts());
            linears.push(output);
        }
        if let Some(
            FeedForwardWeights::Dense(mlp)
            | FeedForwardWeights::DenseAndExperts(DenseAndExpertsWeights { mlp, .. }),
        ) = layer.mlp
        {
            match mlp.inputs {
                MlpInputs::Gated(gate_up) => linears.extend(gate_up.parts),
                MlpInputs::Plain(up) => linears.push(up),
            }
            linears.push(mlp.down);
        }
        for LinearWeights { weight, .. } in linears {
            let module = weight.name.strip_suffix(".weight").expect("a matrix");
            // Queries and their gates are in one matrix.
            let parts = if gated && module.ends_with("q_proj") { 2 } else { 1 };
            adapter.add(module, [parts * weight.shape[0], weight.shape[1]], dtype);
        }
    }
    adapter
}
