//! The properties of an architecture's mixture of experts.

/// The mixture of experts, with the defaults of transformers for keys that `config.json` lacks.
#[derive(Clone, Copy, Debug)]
pub(in crate::config) struct ExpertsDefaults {
    pub(in crate::config) count: usize,
    pub(in crate::config) per_token: usize,
    /// `None` if the width is `intermediate_size` and all layers have experts.
    pub(in crate::config) width: Option<usize>,
    pub(in crate::config) shared: Shared,
    /// `None` if weights are always normalized and there is no key.
    pub(in crate::config) normalized: Option<bool>,
    pub(in crate::config) router_bias: bool,
    pub(in crate::config) scores: Scores,
    /// How groups of experts are scored; `None` if there are no groups.
    pub(in crate::config) groups: Option<GroupScore>,
    /// The default of the factor of weights, `routed_scaling_factor`; `None` if there is no such
    /// key.
    pub(in crate::config) scale: Option<f32>,
    pub(in crate::config) layers: ExpertLayers,
}

/// The keys that say which layers have experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::config) enum ExpertLayers {
    /// The keys of Qwen2-MoE. Without them, all layers have experts.
    Steps,
    /// The key with the number of layers without experts at the start, and its default.
    AllButFirst(&'static str, usize),
    /// The key `mlp_layer_types`, or the number of layers without experts at the start.
    Types(usize),
    /// The keys with the kinds of the layers (Nemotron-H).
    Kinds,
}

/// The score of a group of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::config) enum GroupScore {
    /// The highest weight of its experts. Groups are used only if `topk_method` is
    /// `group_limited_greedy`.
    Best,
    /// The sum of the two highest weights of its experts. The numbers are the defaults of the
    /// number of groups and of the number of used groups.
    BestTwo([usize; 2]),
}

/// The expert that all tokens use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::config) enum Shared {
    None,
    /// It has a gate, and this width if the key `shared_expert_intermediate_size` is missing.
    Gated(usize),
    /// It has the width of the MLP in layers without experts (Granite 4).
    Dense,
    /// Its width is a multiple of the width of other experts. The multiple is the key
    /// `n_shared_experts`, or this number if the key is missing.
    Times(usize),
    /// It has this width if the key `moe_shared_expert_intermediate_size` is missing (Nemotron-H).
    Width(usize),
}

impl Shared {
    /// Whether the weight of the shared expert is computed. Otherwise it is 1.
    pub(in crate::config) fn has_gate(self) -> bool {
        matches!(self, Self::Gated(_))
    }
}

/// The function from the scores of routers to weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scores {
    Softmax,
    /// Sigmoids with biases, unless the file says otherwise.
    Sigmoid,
}
