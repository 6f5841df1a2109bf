//! Adapters that change every projection of a model which adapters may change.

use stolon_checkpoint::DecoderConfig;
use stolon_checkpoint::config::{
    AttentionWeights, ConvolutionWeights, DeltaNetWeights, ExpertsWeights, FeedForwardWeights,
    LatentWeights, LinearWeights, Mamba2Weights, MixerWeights, MlpWeights, TensorSpec,
};

use super::adapter_writer::AdapterWriter;

/// A random adapter for all projections of the model with the configuration `config`.
pub(crate) fn whole_adapter(
    config: &DecoderConfig,
    rank: usize,
    dtype: &'static str,
    seed: u64,
) -> AdapterWriter {
    let mut adapter = AdapterWriter::new(rank, seed);
    for layer in config.weights().layers {
        let gated = config.attention().is_some_and(|attention| attention.output_gate);
        let mut linears: Vec<LinearWeights> = layer.mixers.into_iter().flat_map(of_mixer).collect();
        let mlps: Vec<MlpWeights> = match layer.mlp {
            Some(FeedForwardWeights::Dense(mlp)) => vec![mlp],
            Some(FeedForwardWeights::Experts(experts)) => of_experts(experts).collect(),
            Some(FeedForwardWeights::DenseAndExperts(both)) => {
                of_experts(both.experts).chain([both.mlp]).collect()
            }
            None => Vec::new(),
        };
        linears.extend(mlps.into_iter().flat_map(MlpWeights::linears));
        for LinearWeights { weight, .. } in linears {
            let module = weight.name.strip_suffix(".weight").expect("a matrix");
            // Queries and their gates are in one matrix.
            let parts = if gated && module.ends_with("q_proj") { 2 } else { 1 };
            adapter.add(module, [parts * weight.shape[0], weight.shape[1]], dtype);
        }
    }
    adapter
}

/// The projections of a mixer as files of adapters have them.
fn of_mixer(mixer: MixerWeights) -> Vec<LinearWeights> {
    // Several projections in one matrix, of which `part` is one.
    let fused = |name: String, rows: usize, part: &TensorSpec| {
        let weight = TensorSpec { name, shape: vec![rows, part.shape[1]], role: part.role };
        LinearWeights { weight, bias: None }
    };
    match mixer {
        MixerWeights::Attention(AttentionWeights { qkv, output, .. }) => {
            qkv.parts().chain([output]).collect()
        }
        MixerWeights::Convolution(ConvolutionWeights { inputs, output, .. })
        | MixerWeights::Mamba2(Mamba2Weights { inputs, output, .. }) => {
            let rows = inputs.parts.iter().map(|part| part.weight.shape[0]).sum();
            vec![fused(inputs.name, rows, &inputs.parts[0].weight), output]
        }
        MixerWeights::DeltaNet(delta_net) => {
            let DeltaNetWeights { qkv, gate, strength, step, output, .. } = delta_net;
            let factored = [gate, step].into_iter().flat_map(|part| [part.down, Some(part.up)]);
            qkv.into_iter().chain(factored.flatten()).chain([strength, output]).collect()
        }
        MixerWeights::Latent(latent) => {
            let LatentWeights { query_down, query, latent, name, keys, values, output, .. } =
                latent;
            let of_key = keys.iter().map(|key| key.shape[1]);
            let rows = of_key.chain(values.iter().map(|value| value.shape[0])).sum();
            let down = query_down.map(|(down, _)| down);
            let heads = fused(name, rows, &values[0]);
            down.into_iter().chain([query, latent, heads, output]).collect()
        }
    }
}

/// The MLPs of all experts.
fn of_experts(weights: ExpertsWeights) -> impl Iterator<Item = MlpWeights> {
    weights.experts.into_iter().chain(weights.shared.map(|shared| shared.mlp))
}
