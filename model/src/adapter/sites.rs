//! Lists the projections that adapters may change.

use super::Site;
use crate::config::{
    AttentionWeights, DecoderConfig, DecoderWeights, DenseAndExpertsWeights, FeedForwardWeights,
    LayerWeights, LinearWeights, MixerWeights, MlpInputs, MlpWeights, NormPlacement,
    StackedWeights, TensorRole, TensorSpec,
};

/// The name of the output matrix.
pub(super) const HEAD: &str = "lm_head.weight";

/// A projection, and where its matrices may be in files.
#[derive(Clone, Debug)]
pub(super) struct Part {
    /// The model's matrix, `[out, in]`.
    pub(super) spec: TensorSpec,
    /// The names of the matrices of files that have its rows: its own, and that of a matrix which
    /// has the rows of others, too.
    pub(super) sources: Vec<String>,
}

/// The projections of a layer at each site, in the order of [`Site::ALL`].
pub(super) type Sites = [Vec<Part>; Site::ALL.len()];

/// The projections of each layer, and of the output matrix as if it were a layer after them.
pub(super) fn sites(config: &DecoderConfig) -> Vec<Sites> {
    let DecoderWeights { embedding, layers, head, .. } = config.weights();
    // An adapter of a matrix that is also the embedding changes only the output, as in PEFT.
    let tied = || TensorSpec { name: HEAD.into(), role: TensorRole::Matrix, ..embedding };
    let mut all: Vec<Sites> = layers.into_iter().map(|layer| of_layer(config, layer)).collect();
    let mut last = Sites::default();
    last[Site::Inputs as usize] = vec![single(head.unwrap_or_else(tied))];
    all.push(last);
    all
}

fn of_layer(config: &DecoderConfig, layer: LayerWeights) -> Sites {
    let attention = layer.mixers.into_iter().find_map(|mixer| match mixer {
        MixerWeights::Attention(AttentionWeights { qkv, gate, output, .. }) => {
            let query = qkv.query.weight.name.clone();
            let name = qkv.name.clone();
            let mut inputs: Vec<_> = qkv.parts().map(|part| of_stacked(&name, part)).collect();
            // Files have the gates in one matrix with the queries.
            inputs.extend(gate.map(|gate| Part { spec: gate.weight, sources: vec![query] }));
            Some((inputs, vec![single(output.weight)]))
        }
        MixerWeights::Convolution(_)
        | MixerWeights::DeltaNet(_)
        | MixerWeights::Mamba2(_)
        | MixerWeights::Latent(_) => None,
    });
    let (inputs, output) = attention.unwrap_or_default();
    // The MLP of parallel layers reads rows that are gone when it is computed.
    let parallel = config.norms == NormPlacement::Parallel;
    let (gate_up, down) = match layer.mlp {
        Some(
            FeedForwardWeights::Dense(mlp)
            | FeedForwardWeights::DenseAndExperts(DenseAndExpertsWeights { mlp, .. }),
        ) if !parallel => {
            let MlpWeights { inputs, down } = mlp;
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
    parts.into_iter().map(|part| of_stacked(&name, part)).collect()
}

/// A projection whose rows files may have in the matrix `name`.
fn of_stacked(name: &str, part: LinearWeights) -> Part {
    Part { sources: vec![part.weight.name.clone(), name.to_owned()], spec: part.weight }
}
