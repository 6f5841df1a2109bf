//! Lists the projections that adapters may change, and the matrices in files that contain their
//! rows.

use std::collections::{HashMap, HashSet};

use super::Site;
use crate::config::{
    Architecture, AttentionWeights, ConvolutionWeights, DecoderConfig, DecoderWeights,
    DeltaNetWeights, DenseAndExpertsWeights, FactoredWeights, FeedForwardWeights, LatentWeights,
    LayerWeights, LinearWeights, Mamba2Weights, MixerWeights, MlpInputs, MlpWeights, TensorRole,
    TensorSpec,
};

/// The name of the embedding.
pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";
/// The name of the output matrix.
pub(super) const HEAD: &str = "lm_head.weight";

/// The projections that adapters of a model may change, each given by its matrix `[out, in]`.
#[derive(Debug)]
pub(super) struct Sites {
    /// The projections of each layer at each site. The output matrix is listed as an additional
    /// layer.
    pub(super) layers: Vec<[Vec<TensorSpec>; Site::COUNT]>,
    /// The projections of each expert of each layer: gate and up, then down. The shared expert is
    /// last.
    pub(super) experts: Vec<Vec<[Vec<TensorSpec>; 2]>>,
    /// The embedding as a projection of tokens: `[hidden_size, vocab_size]`. `None` for Moondream,
    /// because the values of an image begin with the embedding of a token.
    pub(super) embedding: Option<TensorSpec>,
    /// The matrices that files may have instead of several projections. Each has a name, a number
    /// of rows, and the projections whose rows it contains.
    combined: Vec<(String, usize, Vec<TensorSpec>)>,
}

impl Sites {
    /// The projections of the model with the configuration `config`. `grouped` says whether
    /// consecutive value heads of Gated DeltaNet share a key head in the adapter's file. If the
    /// order of heads is different in the model, adapters cannot change these layers.
    pub(super) fn of(config: &DecoderConfig, grouped: bool) -> Self {
        let same_heads = config.delta_net().is_none_or(|delta_net| delta_net.has_order(grouped));
        let DecoderWeights { mut embedding, layers, head, .. } = config.weights();
        // An adapter of an output matrix that is also the embedding changes only the output, as in
        // PEFT.
        let tied =
            || TensorSpec { name: HEAD.into(), role: TensorRole::Matrix, ..embedding.clone() };
        let head = head.unwrap_or_else(tied);
        embedding.shape.reverse();
        let mut last = [const { Vec::new() }; Site::COUNT];
        last[Site::Inputs as usize].push(head);
        let (mut sites, mut experts) = (Vec::new(), Vec::new());
        for layer in layers {
            experts.push(of_experts(&layer));
            sites.push(of_layer(layer, same_heads));
        }
        sites.push(last);
        let of_experts = experts.iter().flatten().flatten();
        let all = sites.iter().flatten().chain(of_experts).flatten();
        let known: HashSet<_> = all.map(|spec| &spec.name).collect();
        let mut combined = config.combined();
        combined.retain(|(.., parts)| parts.iter().all(|part| known.contains(&part.name)));
        let moondream = [Architecture::Moondream2, Architecture::Moondream3];
        let embedding = Some(embedding).filter(|_| !moondream.contains(&config.architecture));
        Self { layers: sites, experts, embedding, combined }
    }

    /// The shapes `[out, in]` of all matrices that an adapter may change, by their names in files.
    pub(super) fn matrices(&self) -> HashMap<String, [usize; 2]> {
        // Files of adapters have no matrices of single heads.
        let of_heads = [Site::Keys as usize, Site::Values as usize];
        let sites = self.layers.iter().flat_map(|sites| sites.iter().enumerate());
        let whole = sites.filter(|(site, _)| !of_heads.contains(site));
        let experts = self.experts.iter().flatten().flatten().flatten();
        let parts = whole.flat_map(|(_, parts)| parts).chain(experts).chain(&self.embedding);
        let parts = parts.map(|spec| (spec.name.clone(), [spec.shape[0], spec.shape[1]]));
        let combined = self.combined.iter();
        let combined = combined
            .map(|(name, rows, parts)| (name.clone(), [*rows, parts[parts.len() - 1].shape[1]]));
        // The combined matrix of queries and output gates has the name of the queries, and
        // overrides them.
        parts.chain(combined).collect()
    }

    /// For each projection, the names of the matrices in which a file may combine it with others.
    pub(super) fn sources(&self) -> HashMap<String, Vec<String>> {
        let mut sources: HashMap<String, Vec<String>> = HashMap::new();
        for (name, _, parts) in &self.combined {
            for part in parts {
                sources.entry(part.name.clone()).or_default().push(name.clone());
            }
        }
        sources
    }
}

/// The projections of a layer at each site. `same_heads` says whether the value heads of Gated
/// DeltaNet have the same order in the file and in the model.
fn of_layer(layer: LayerWeights, same_heads: bool) -> [Vec<TensorSpec>; Site::COUNT] {
    let mut sites = [const { Vec::new() }; Site::COUNT];
    let mut add = |site: Site, parts: &mut dyn Iterator<Item = LinearWeights>| {
        sites[site as usize].extend(parts.map(|part| part.weight));
    };
    for mixer in layer.mixers {
        match mixer {
            MixerWeights::Attention(AttentionWeights { qkv, gate, output, .. }) => {
                add(Site::Inputs, &mut qkv.parts().chain(gate));
                add(Site::Output, &mut [output].into_iter());
            }
            MixerWeights::Latent(LatentWeights {
                query_down,
                query,
                latent,
                keys,
                values,
                output,
                ..
            }) => {
                let first = match query_down {
                    Some((down, _)) => {
                        add(Site::Queries, &mut [query].into_iter());
                        down
                    }
                    None => query,
                };
                add(Site::Inputs, &mut [first, latent].into_iter());
                add(Site::Output, &mut [output].into_iter());
                let linear = |weight| LinearWeights { weight, bias: None };
                add(Site::Keys, &mut keys.into_iter().map(linear));
                add(Site::Values, &mut values.into_iter().map(linear));
            }
            MixerWeights::Convolution(ConvolutionWeights { inputs, output, .. }) => {
                add(Site::Inputs, &mut inputs.parts.into_iter());
                add(Site::Output, &mut [output].into_iter());
            }
            MixerWeights::Mamba2(Mamba2Weights { inputs, output, .. }) => {
                add(Site::MambaInputs, &mut inputs.parts.into_iter());
                add(Site::MambaOutput, &mut [output].into_iter());
            }
            MixerWeights::DeltaNet(delta_net) if same_heads => {
                let DeltaNetWeights { qkv, gate, strength, step, output, .. } = delta_net;
                let mut first = |site: Site, FactoredWeights { down, up }| match down {
                    Some(down) => {
                        add(site, &mut [up].into_iter());
                        down
                    }
                    None => up,
                };
                let [gate, step] = [first(Site::Gates, gate), first(Site::Steps, step)];
                add(Site::Inputs, &mut qkv.into_iter().chain([gate, strength, step]));
                add(Site::Output, &mut [output].into_iter());
            }
            MixerWeights::DeltaNet(_) => {}
        }
    }
    // The adapter of a router with a norm of its own is not supported, because its input is
    // different.
    if let Some(FeedForwardWeights::Experts(experts)) = &layer.mlp
        && experts.router_norm.is_none()
    {
        let gate = experts.shared.as_ref().and_then(|shared| shared.gate.clone());
        let routers = [experts.router.clone()].into_iter().chain(gate);
        sites[Site::Routers as usize] = routers.map(|router| router.weight).collect();
    }
    if let Some(
        FeedForwardWeights::Dense(mlp)
        | FeedForwardWeights::DenseAndExperts(DenseAndExpertsWeights { mlp, .. }),
    ) = layer.mlp
    {
        let [gate_up, down] = of_mlp(mlp);
        sites[Site::GateUp as usize] = gate_up;
        sites[Site::Down as usize] = down;
    }
    sites
}

/// The projections of each expert of a layer.
fn of_experts(layer: &LayerWeights) -> Vec<[Vec<TensorSpec>; 2]> {
    let weights = layer.mlp.as_ref().and_then(FeedForwardWeights::experts);
    let mlps = weights.into_iter().flat_map(|weights| {
        weights.experts.iter().chain(weights.shared.iter().map(|shared| &shared.mlp))
    });
    mlps.cloned().map(of_mlp).collect()
}

/// The projections of an MLP: gate and up, then down.
fn of_mlp(mlp: MlpWeights) -> [Vec<TensorSpec>; 2] {
    let MlpWeights { inputs, down, output_factor: _ } = mlp;
    let inputs = match inputs {
        MlpInputs::Gated(gate_up, _) => gate_up.parts.map(|part| part.weight).into(),
        MlpInputs::Plain(up, _) => vec![up.weight],
    };
    [inputs, vec![down.weight]]
}
