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
    /// How groups of experts are chosen; `None` if there are no keys of groups.
    pub(in crate::config) groups: Option<GroupScore>,
    /// The factor of weights if the key `routed_scaling_factor` is missing; `None` if there is no
    /// such key.
    pub(in crate::config) scale: Option<f32>,
    pub(in crate::config) layers: ExpertLayers,
}

/// What says which layers have experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::config) enum ExpertLayers {
    /// The keys of Qwen2-MoE. Without them, all layers have experts.
    Steps,
    /// The key with the number of layers at the start without experts, and its default.
    AllButFirst(&'static str, usize),
    /// The key `mlp_layer_types`, or the number of layers at the start without experts.
    Types(usize),
    /// The kinds of the layers (Nemotron-H).
    Kinds,
}

/// What the score of a group of experts is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::config) enum GroupScore {
    /// The highest of its experts. There are groups only with the `topk_method`
    /// `group_limited_greedy`.
    Best,
    /// The sum of the two highest. The number of groups and of those that are used if the keys are
    /// missing.
    BestTwo([usize; 2]),
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
