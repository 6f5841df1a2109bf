//! What is known of the mixture of experts of an architecture.

/// The mixture of experts, with the defaults of transformers for keys that `config.json` lacks.
#[derive(Clone, Copy, Debug)]
pub(in crate::config) struct ExpertsDefaults {
    pub(in crate::config) count: usize,
    pub(in crate::config) per_token: usize,
    /// `None`: the width is `intermediate_size`, and all layers have experts.
    pub(in crate::config) width: Option<usize>,
    pub(in crate::config) shared: Shared,
    /// `None`: always normalized, without a key.
    pub(in crate::config) normalized: Option<bool>,
    pub(in crate::config) router_bias: bool,
    pub(in crate::config) scores: Scores,
    pub(in crate::config) layers: ExpertLayers,
}

/// What says which layers have experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::config) enum ExpertLayers {
    /// The keys of Qwen2-MoE. Without them, all layers have experts.
    Steps,
    /// The key with the number of layers at the start without experts, and its default.
    AllButFirst(&'static str, usize),
    /// The kinds of the layers (Nemotron-H).
    Kinds,
}

/// The expert that all tokens use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::config) enum Shared {
    None,
    /// With a gate, and this width if the key `shared_expert_intermediate_size` is missing.
    Gated(usize),
    /// With the width that the MLP of layers without experts has (Granite 4).
    Dense,
    /// As many times as wide as the others as the key `n_shared_experts` says, or this number.
    Times(usize),
    /// With this width if the key `moe_shared_expert_intermediate_size` is missing (Nemotron-H).
    Width(usize),
}

impl Shared {
    /// Whether the weight of the shared expert is computed.
    pub(in crate::config) fn has_gate(self) -> bool {
        matches!(self, Self::Gated(_))
    }
}

/// How the scores of routers become weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scores {
    Softmax,
    /// With biases, unless the file says otherwise.
    Sigmoid,
}
