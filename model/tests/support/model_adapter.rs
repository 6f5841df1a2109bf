//! Adapters that change every projection of a model which adapters may change.

use stolon_model::DecoderConfig;
use stolon_model::config::{
    AttentionWeights, ConvolutionWeights, DeltaNetWeights, DenseAndExpertsWeights,
    FeedForwardWeights, LatentWeights, LinearWeights, Mamba2Weights, MixerWeights, MlpInputs,
    StackedWeights, TensorSpec,
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
        // Of several projections in one matrix, and the number of its rows.
        let mut fused: Vec<(String, usize, TensorSpec)> = Vec::new();
        for mixer in layer.mixers {
            match mixer {
                MixerWeights::Attention(AttentionWeights { qkv, output, gate, .. }) => {
                    gated = gate.is_some();
                    linears.extend(qkv.parts());
                    linears.push(output);
                }
                MixerWeights::Convolution(ConvolutionWeights { inputs, output, .. })
                | MixerWeights::Mamba2(Mamba2Weights { inputs, output, .. }) => {
                    let StackedWeights { name, parts } = inputs;
                    let rows = parts.iter().map(|part| part.weight.shape[0]).sum();
                    fused.push((name, rows, parts[0].weight.clone()));
                    linears.push(output);
                }
                MixerWeights::DeltaNet(delta_net) => {
                    let DeltaNetWeights { qkv, gate, strength, step, output, .. } = delta_net;
                    let factored = [gate, step].into_iter();
                    linears
                        .extend(factored.flat_map(|part| part.down.into_iter().chain([part.up])));
                    linears.extend(qkv.into_iter().chain([strength, output]));
                }
                MixerWeights::Latent(latent) => {
                    let (name, values) = (latent.name.clone(), latent.values.clone());
                    let of_key = latent.keys.iter().map(|key| key.shape[1]);
                    let rows = of_key.chain(values.iter().map(|value| value.shape[0])).sum();
                    let LatentWeights { query_down, query, latent, output, .. } = latent;
                    linears.extend(query_down.map(|(down, _)| down));
                    linears.extend([query, latent, output]);
                    fused.push((name, rows, values[0].clone()));
                }
            }
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
        for (name, rows, part) in fused {
            let module = name.strip_suffix(".weight").expect("a matrix");
            adapter.add(module, [rows, part.shape[1]], dtype);
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
