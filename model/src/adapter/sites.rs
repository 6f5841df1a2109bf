//! The projections of a layer that adapters may change.

use super::Site;
use crate::config::{
    AttentionWeights, DecoderConfig, FeedForwardWeights, LayerWeights, MixerWeights, MlpInputs,
    MlpWeights, NormPlacement, StackedWeights, TensorSpec,
};

/// A projection, and where its matrices may be in files.
#[derive(Clone, Debug)]
pub(super) struct Part {
    /// The model's matrix, `[out, in]`.
    pub(super) spec: TensorSpec,
    /// The names of the matrices of files that have its rows: its own, and that of a matrix which
    /// has the rows of others, too.
    pub(super) sources: Vec<String>,
}

/// The projections of a layer of a model at each site, in the order of [`Site::ALL`].
pub(super) fn sites(config: &DecoderConfig, layer: LayerWeights) -> [Vec<Part>; Site::ALL.len()] {
    let attention = layer.mixers.into_iter().find_map(|mixer| match mixer {
        MixerWeights::Attention(AttentionWeights { qkv, gate, output, .. }) => {
            let query = qkv.parts[0].weight.name.clone();
            let mut inputs = stacked(qkv);
            // Files have the gates in one matrix with the queries.
            inputs.extend(gate.map(|gate| Part { spec: gate.weight, sources: vec![query] }));
            Some((inputs, vec![single(output.weight)]))
        }
        MixerWeights::Convolution(_) | MixerWeights::DeltaNet(_) | MixerWeights::Mamba2(_) => None,
    });
    let (inputs, output) = attention.unwrap_or_default();
    // The MLP of parallel layers reads rows that are gone when it is computed.
    let parallel = config.norms == NormPlacement::Parallel;
    let (gate_up, down) = match layer.mlp {
        Some(FeedForwardWeights::Dense(MlpWeights { inputs, down })) if !parallel => {
            let inputs = match inputs {
                MlpInputs::Gated(gate_up) => stacked(gate_up),
                MlpInputs::Plain(up) => vec![single(up.weight)],
            };
            (inputs, vec![single(down.weight)])
        }
        _ => Default::default(),
    };
    [inputs, output, gate_up, down]
}

fn single(spec: TensorSpec) -> Part {
    Part { sources: vec![spec.name.clone()], spec }
}

fn stacked<const N: usize>(weights: StackedWeights<N>) -> Vec<Part> {
    let StackedWeights { name, parts } = weights;
    let part = |part: crate::config::LinearWeights| Part {
        sources: vec![part.weight.name.clone(), name.clone()],
        spec: part.weight,
    };
    parts.into_iter().map(part).collect()
}
