//! The architectures and the names that checkpoints have for them.

use Architecture::*;

/// The architectures that the decoder supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// Llama 1 to 3.3 and models with the same architecture.
    Llama,
    /// Mistral, with or without a sliding window.
    Mistral,
    /// Qwen2 and Qwen2.5: the projections of q, k and v have biases.
    Qwen2,
    /// Qwen3: q and k of each head are normalized.
    Qwen3,
    /// Granite 3: factors of the embeddings, the residuals and the logits.
    Granite,
    /// OLMo 2: norms of the outputs of attention and MLP only, and of all heads of q and k
    /// together.
    Olmo2,
    /// SmolLM3: every fourth layer has no rotary embedding.
    SmolLm3,
    /// Phi-3, Phi-3.5 and Phi-4: q, k and v are stored as one tensor, and so are gate and up.
    Phi3,
    /// Gemma 2: four norms per layer, local and global layers, soft-capped scores and logits.
    Gemma2,
    /// The text part of Gemma 3: four norms per layer, local and global layers.
    Gemma3,
    /// Mixtral: Mistral with a mixture of experts in each layer.
    Mixtral,
    /// Qwen1.5-MoE and Qwen2-MoE: a mixture of experts with a shared expert.
    Qwen2Moe,
    /// Qwen3-MoE: a mixture of experts.
    Qwen3Moe,
    /// gpt-oss: a mixture of experts with biases and clamped gates, attention sinks, and windows in
    /// every other layer.
    GptOss,
}

/// The names of an architecture in checkpoints.
struct Names {
    architecture: Architecture,
    /// The values of `model_type` in `config.json`; the first is the architecture's name.
    model_types: &'static [&'static str],
    /// The names of the class in `architectures` of `config.json` for each of these types.
    classes: &'static [&'static str],
    /// `general.architecture` of GGUF files; none if it is that of another architecture.
    gguf: Option<&'static str>,
}

const fn names(
    architecture: Architecture,
    model_types: &'static [&'static str],
    classes: &'static [&'static str],
    gguf: Option<&'static str>,
) -> Names {
    Names { architecture, model_types, classes, gguf }
}

const NAMES: [Names; 14] = [
    names(Llama, &["llama"], &["LlamaForCausalLM"], Some("llama")),
    // GGUF files of Mistral and Mixtral have the name of Llama.
    names(Mistral, &["mistral"], &["MistralForCausalLM"], None),
    names(Qwen2, &["qwen2"], &["Qwen2ForCausalLM"], Some("qwen2")),
    names(Qwen3, &["qwen3"], &["Qwen3ForCausalLM"], Some("qwen3")),
    names(Granite, &["granite"], &["GraniteForCausalLM"], Some("granite")),
    names(Olmo2, &["olmo2"], &["Olmo2ForCausalLM"], Some("olmo2")),
    names(SmolLm3, &["smollm3"], &["SmolLM3ForCausalLM"], Some("smollm3")),
    names(Phi3, &["phi3"], &["Phi3ForCausalLM"], Some("phi3")),
    names(Gemma2, &["gemma2"], &["Gemma2ForCausalLM"], Some("gemma2")),
    names(
        Gemma3,
        &["gemma3_text", "gemma3"],
        &["Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"],
        Some("gemma3"),
    ),
    names(Mixtral, &["mixtral"], &["MixtralForCausalLM"], None),
    names(Qwen2Moe, &["qwen2_moe"], &["Qwen2MoeForCausalLM"], Some("qwen2moe")),
    names(Qwen3Moe, &["qwen3_moe"], &["Qwen3MoeForCausalLM"], Some("qwen3moe")),
    names(GptOss, &["gpt_oss"], &["GptOssForCausalLM"], Some("gpt-oss")),
];

impl Architecture {
    /// All architectures that the decoder supports.
    pub fn all() -> impl Iterator<Item = Self> {
        NAMES.iter().map(|names| names.architecture)
    }

    /// Hugging Face's `model_type`, which is used in messages and statistics.
    #[must_use]
    pub fn name(self) -> &'static str {
        let names = NAMES.iter().find(|names| names.architecture == self);
        names.map_or("unknown", |names| names.model_types[0])
    }

    /// The architecture with this `model_type`.
    pub(super) fn from_model_type(model_type: &str) -> Option<Self> {
        Self::find(|names| names.model_types.contains(&model_type))
    }

    /// The architecture with this class in `architectures`.
    pub(super) fn from_class(class: &str) -> Option<Self> {
        Self::find(|names| names.classes.contains(&class))
    }

    /// The architecture with this `general.architecture`.
    pub(super) fn from_gguf(name: &str) -> Option<Self> {
        Self::find(|names| names.gguf == Some(name))
    }

    fn find(matches: impl Fn(&Names) -> bool) -> Option<Self> {
        NAMES.iter().find(|names| matches(names)).map(|names| names.architecture)
    }

    /// The supported values of `model_type`, for messages.
    pub(super) fn model_types() -> String {
        let types: Vec<_> = NAMES.iter().flat_map(|names| names.model_types).copied().collect();
        types.join(", ")
    }

    /// The supported values of `general.architecture`, for messages.
    pub(super) fn gguf_names() -> String {
        NAMES.iter().filter_map(|names| names.gguf).collect::<Vec<_>>().join(", ")
    }
}
