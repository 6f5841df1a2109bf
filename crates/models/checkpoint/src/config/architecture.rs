//! The architectures, and the table with the description of each.

mod experts;
mod rotation;
mod table;

use super::{DeltaNetConfig, GateFunction, LatentSizes, MtpInput, NormKind, NormPlacement, QkNorm};
pub(crate) use experts::Scores;
pub(super) use experts::{ExpertLayers, ExpertsDefaults, GroupScore, Shared};
pub(crate) use rotation::Rotation;
use table::TABLE;

/// The architectures that the decoder supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// Llama 1 to 3.3 and models with the same architecture.
    Llama,
    /// Mistral, with or without a sliding window.
    Mistral,
    /// Ministral 3: queries have a factor that grows with the position.
    Ministral3,
    /// Qwen2, Qwen2.5 and MiMo: the projections of q, k and v have biases.
    Qwen2,
    /// Qwen3: q and k of each head are normalized.
    Qwen3,
    /// Granite 3: factors of the embeddings, the residuals and the logits.
    Granite,
    /// Granite 4: Granite 3 with other names, with or without Mamba-2 in most layers, and with or
    /// without a mixture of experts.
    GraniteHybrid,
    /// OLMo 2: norms of the outputs of attention and MLP only, and of all heads of q and k
    /// together.
    Olmo2,
    /// OLMo 3: OLMo 2 with windows in three of four layers.
    Olmo3,
    /// EXAONE 4: norms of the outputs only; if some layers have windows, the others have no rotary
    /// embedding.
    Exaone4,
    /// SmolLM3: every fourth layer has no rotary embedding.
    SmolLm3,
    /// Phi-3, Phi-3.5 and Phi-4: q, k and v are stored as one tensor, and so are gate and up.
    Phi3,
    /// GLM-4: four norms per layer, half of each head is rotated, in pairs of adjacent elements.
    Glm4,
    /// Ernie 4.5: adjacent elements of heads are rotated.
    Ernie45,
    /// LFM2: most layers have a short convolution in place of attention.
    Lfm2,
    /// LFM2-MoE: LFM2 with a mixture of experts in all layers but the first ones.
    Lfm2Moe,
    /// Gemma 2: four norms per layer, local and global layers, soft-capped scores and logits.
    Gemma2,
    /// The text part of Gemma 3: four norms per layer, local and global layers.
    Gemma3,
    /// The text part of Gemma 4: Gemma 3 with longer heads in global layers, optionally with
    /// per-layer embeddings, layers that read the keys and values of earlier ones, and a mixture of
    /// experts next to each MLP.
    Gemma4,
    /// The text part of Muse Glimmer: windows in three of four layers, which alone have a rotary
    /// embedding, norms of q, k and the embeddings without weights, gates of attention's output,
    /// four norms per layer.
    MuseGlimmer,
    /// Mixtral: Mistral with a mixture of experts in each layer.
    Mixtral,
    /// OLMoE: a mixture of experts, and norms of all heads of q and k together.
    Olmoe,
    /// Qwen1.5-MoE and Qwen2-MoE: a mixture of experts with a shared expert.
    Qwen2Moe,
    /// Qwen3-MoE: a mixture of experts.
    Qwen3Moe,
    /// The text part of Qwen3.5 and Qwen3.6: Gated DeltaNet in three of four layers, and gates of
    /// attention's output in the others.
    Qwen35,
    /// The text part of Qwen3.5-MoE and Qwen3.6-MoE: Qwen3.5 with a mixture of experts.
    Qwen35Moe,
    /// Qwen3-Next: Gated DeltaNet in three of four layers, and a mixture of experts.
    Qwen3Next,
    /// Nemotron-H, Nemotron Nano 2 and Nemotron 3 Nano: each layer is either Mamba-2, attention
    /// without a rotary embedding, or an MLP or a mixture of experts without gates.
    NemotronH,
    /// Falcon-H1: Mamba-2 next to attention in each layer, and many factors.
    FalconH1,
    /// Granite 3 with a mixture of experts.
    GraniteMoe,
    /// GLM-4.5: a mixture of experts, and a shared expert without a gate.
    Glm4Moe,
    /// DeepSeek-V2: latent attention, and a mixture of experts, possibly in groups.
    DeepseekV2,
    /// DeepSeek-V3, R1 and Kimi K2: DeepSeek-V2 with sigmoids of the experts' scores and biases of
    /// their choice.
    DeepseekV3,
    /// GLM-4.7-Flash: DeepSeek-V3 with other sizes.
    Glm4MoeLite,
    /// Mistral Small 4: latent attention as in DeepSeek-V3, queries with a factor as in Ministral 3,
    /// and a mixture of experts.
    Mistral4,
    /// Youtu-LLM: DeepSeek-V3 without experts.
    Youtu,
    /// Kimi Linear: Kimi Delta Attention in three of four layers, latent attention without a rotary
    /// embedding in the others, and a mixture of experts as in DeepSeek-V3.
    KimiLinear,
    /// gpt-oss: a mixture of experts with biases and clamped gates, attention sinks, and windows in
    /// every other layer.
    GptOss,
    /// StarCoder 2: layer norms, biases everywhere, and MLPs without gates.
    StarCoder2,
    /// Cohere 2 (Command A, Command R7B): attention and MLP side by side, layer norms without
    /// biases, and windows in three of four layers, which alone have a rotary embedding.
    Cohere2,
    /// The text part of Moondream 2, which is that of Phi-1.5: attention and MLP side by side,
    /// layer norms, biases everywhere, and no gates.
    Moondream2,
    /// The text part of Moondream 3: as in Moondream 2, with selective attention and a mixture of
    /// experts in most layers.
    Moondream3,
    /// The text part of Qwen3-VL: Qwen3 with rotary positions of three coordinates.
    Qwen3Vl,
    /// The text part of Qwen3-VL with a mixture of experts.
    Qwen3VlMoe,
}

/// The properties of an architecture that its files do not state: its names, the operations of the
/// forward pass, and the default values of keys that a `config.json` lacks. It is one row of
/// [`TABLE`].
#[derive(Debug)]
pub(crate) struct Description {
    pub(super) architecture: Architecture,
    /// The values of `model_type` in `config.json`; the first is the architecture's name.
    pub(super) model_types: &'static [&'static str],
    /// The names of the class in `architectures` of `config.json` for each of these types.
    pub(super) classes: &'static [&'static str],
    /// The values of `model_type` of multimodal models, whose object `text_config` has the
    /// decoder's keys. If several architectures share a value, this object says which one it is.
    pub(super) multimodal: &'static [&'static str],
    pub(super) defaults: Defaults,
    /// Biases of the projections to queries, keys and values.
    pub(super) qkv_bias: Bias,
    /// Bias of the projection of attention's output.
    pub(super) output_bias: Bias,
    /// Whether attention's output has a gate.
    pub(super) output_gate: bool,
    /// Whether files have the projection to these gates in a matrix of its own. Otherwise they
    /// combine it with the projection to queries.
    pub(crate) own_gate_matrix: bool,
    /// Biases of the projections of the MLP.
    pub(super) mlp_bias: Bias,
    /// Whether the MLP has a gate.
    pub(super) mlp_gate: bool,
    pub(super) norms: NormPlacement,
    pub(super) norm_kind: NormKind,
    /// The key of the epsilon of norms.
    pub(super) norm_eps: &'static str,
    /// Offset that is added to the weights of norms in safetensors files.
    pub(super) norm_offset: f32,
    /// Whether this offset is not added to the weights of the norm before the output matrix.
    pub(super) plain_final_norm: bool,
    /// The key of the epsilon of norms of outputs, and its default; `None` if they have the same
    /// epsilon as the other norms.
    pub(super) output_norm_eps: Option<(&'static str, f64)>,
    /// Whether embeddings are normalized, without weights.
    pub(super) embedding_norm: bool,
    pub(super) qk_norm: Option<QkNorm>,
    /// Whether queries and keys are normalized only with `use_qk_norm`.
    pub(super) qk_norm_needs_flag: bool,
    /// Whether the values of each head are normalized, without weights.
    pub(super) value_norm: bool,
    /// The set of keys in its files.
    pub(crate) dialect: Dialect,
    pub(super) gate: Gate,
    pub(super) attention_sinks: bool,
    pub(super) attention_scale: AttentionScale,
    /// The default of the factor `beta` of queries, which grows with the position; `None` if the
    /// architecture has no such factor.
    pub(super) query_scaling: Option<f32>,
    /// The soft caps of scores and logits if the keys are missing; `None` if there is no
    /// soft-capping.
    pub(super) softcaps: Option<Softcaps>,
    /// Whether embeddings are multiplied by the square root of `hidden_size`.
    pub(super) scaled_embedding: bool,
    /// Whether there are factors of embeddings, residuals and logits (Granite, Falcon-H1).
    pub(super) multipliers: bool,
    /// The key of the factor of the logits, and its default; `None` if there is no such key.
    pub(super) logit_scale: Option<(&'static str, f32)>,
    pub(crate) rotation: Rotation,
    pub(super) windows: Windows,
    /// Whether windows are used only with `use_sliding_window`.
    pub(super) windows_need_flag: bool,
    pub(super) experts: Option<ExpertsDefaults>,
    /// Latent attention, with the sizes if keys are missing; `None` for the usual attention.
    pub(super) latent: Option<LatentSizes>,
    /// The kind of keys for layers with Mamba-2; `None` if there are no such layers.
    pub(super) mamba: Option<Mamba>,
    /// Whether layers may have a convolution instead of attention (LFM2).
    pub(super) convolutions: bool,
    /// Gated DeltaNet or Kimi Delta Attention instead of attention in most layers, with the sizes
    /// if keys are missing.
    pub(super) delta_net: Option<DeltaNetConfig>,
    /// The input of a head for multi-token prediction with a layer as the last one with full or latent
    /// attention, if files may have one.
    pub(super) mtp: Option<MtpInput>,
    pub(crate) gguf: Gguf,
}

/// The defaults of transformers for keys that `config.json` lacks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Defaults {
    pub(super) vocab_size: usize,
    pub(super) hidden_size: usize,
    pub(super) intermediate_size: usize,
    pub(super) num_layers: usize,
    pub(super) num_heads: usize,
    /// `None` for as many as `num_heads`.
    pub(super) num_kv_heads: Option<usize>,
    /// `None` for `hidden_size / num_heads`.
    pub(super) head_dim: Option<usize>,
    pub(super) max_positions: usize,
    pub(super) rms_norm_eps: f64,
    pub(super) tie_word_embeddings: bool,
    pub(super) sliding_window: Option<usize>,
    pub(super) eos_token_ids: &'static [u32],
    pub(super) bos_token_id: Option<u32>,
}

/// The set of keys in the files of an architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// The usual keys of transformers.
    Transformers,
    /// The usual keys, and keys that only Gemma 4 has: for the heads of global layers, layers that
    /// share keys and values, per-layer embeddings, and experts next to MLPs.
    Gemma4,
    /// The keys and parts of Moondream: the keys are in the object `config`, and there are an image
    /// encoder, and coordinates and sizes as tokens.
    Moondream,
}

/// Whether a projection has a bias.
#[derive(Clone, Copy, Debug)]
pub(super) enum Bias {
    Never,
    Always,
    /// The value of this key of `config.json`, or the default if it is missing.
    Key(&'static str, bool),
}

/// The gate function of the MLP.
#[derive(Clone, Copy, Debug)]
pub(super) enum Gate {
    /// The function that this key of `config.json` names, or the default if it is missing.
    Key(&'static str, GateFunction),
    /// The squared ReLU of MLPs without a gate.
    SquaredRelu,
    /// The clamped gates of gpt-oss.
    ClampedSwiglu,
}

/// The factor of attention scores.
#[derive(Clone, Copy, Debug)]
pub(super) enum AttentionScale {
    /// `head_dim^-0.5`.
    HeadDim,
    /// `query_pre_attn_scalar^-0.5` (Gemma).
    QueryScalar,
    /// `attention_multiplier` (Granite).
    Multiplier,
    /// `qk_scale_factor * head_dim^-0.5` (Muse Glimmer).
    QkFactor,
    /// 1 (Gemma 4).
    One,
}

/// The soft caps of scores and logits if the keys are missing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Softcaps {
    pub(super) attention: Option<f32>,
    pub(super) logits: Option<f32>,
}

/// The layers that have a sliding window.
#[derive(Clone, Copy, Debug)]
pub(super) enum Windows {
    /// None. The keys are ignored, as in transformers.
    Nowhere,
    /// All layers.
    Everywhere,
    /// The layers that `layer_types` names, or this pattern if the key is missing.
    Some(Pattern),
}

/// A pattern of layers, which are counted from 0.
#[derive(Clone, Copy, Debug)]
pub(super) enum Pattern {
    /// All layers from `max_window_layers` on.
    From,
    /// The layers with even indices.
    Even,
    /// The layers with even indices below `max_window_layers`.
    EvenBelow,
    /// All layers except every n-th, where n is `sliding_window_pattern`, or this number if the key
    /// is missing.
    AllButEvery(usize),
    /// All layers except every n-th, where n is this number. The last layer has the number n.
    AllButEveryBeforeLast(usize),
    /// The layers without a rotary embedding.
    Unrotated,
}

impl Pattern {
    /// The distance of layers without a window, if all others have one and no key changes this.
    pub(super) fn step(self) -> Option<usize> {
        match self {
            Self::Even => Some(2),
            Self::AllButEvery(step) | Self::AllButEveryBeforeLast(step) => Some(step),
            Self::From | Self::EvenBelow | Self::Unrotated => None,
        }
    }
}

/// The sets of keys that files have for Mamba-2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mamba {
    /// Granite 4: layers have Mamba-2 or attention, as `layer_types` says, and an MLP.
    Granite,
    /// Nemotron-H: layers have Mamba-2, attention or an MLP, as `hybrid_override_pattern` or
    /// `layers_block_type` says.
    Nemotron,
    /// Falcon-H1: each layer has Mamba-2, attention and an MLP.
    Falcon,
}

/// The properties of an architecture's GGUF files.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gguf {
    /// The values of `general.architecture`. Empty if files have the name of another architecture,
    /// or if there are no GGUF files.
    pub(crate) names: &'static [&'static str],
    /// Whether the converter reorders the rows of q and k into pairs of adjacent elements.
    pub(crate) adjacent: bool,
    /// Whether gate and up are stored as one tensor, with the name of up.
    pub(super) fused_mlp: bool,
    /// Whether the converter reorders the value heads of Gated DeltaNet so that they use the key
    /// heads in turn.
    pub(crate) tiled_heads: bool,
    /// The default of the window, if the key is missing.
    pub(super) window: Option<usize>,
    /// Whether the weights of a token's experts add up to 1 if the key is missing.
    pub(super) normalized_experts: bool,
    /// Whether `rope.scaling.finetuned = false` marks a model without rotary embeddings.
    pub(super) marks_unrotated: bool,
    /// The number of layers of the only model size whose attention scale is computed from
    /// `hidden_size / num_heads`. No key says so.
    pub(super) wide_scale_layers: Option<usize>,
    /// The architecture of files that have this architecture's name and a window, if it is a
    /// different one.
    pub(super) windowed: Option<Architecture>,
}

impl Architecture {
    /// All architectures that the decoder supports.
    pub fn all() -> impl Iterator<Item = Self> {
        TABLE.iter().map(|row| row.architecture)
    }

    /// Hugging Face's `model_type`. It is used in messages and statistics.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.description().model_types[0]
    }

    /// The names of the classes in `architectures` of `config.json`.
    #[cfg(test)]
    pub(crate) fn classes(self) -> impl Iterator<Item = &'static str> {
        self.description().classes.iter().copied()
    }

    /// The row of the table.
    pub(crate) fn description(self) -> &'static Description {
        // The rows have the same order as the variants, which a test checks.
        &TABLE[self as usize]
    }

    /// The architecture with this `model_type`.
    pub(super) fn from_model_type(model_type: &str) -> Option<Self> {
        Self::find(|row| row.model_types.contains(&model_type))
    }

    /// The architecture with this class in `architectures`.
    pub(super) fn from_class(class: &str) -> Option<Self> {
        Self::find(|row| row.classes.contains(&class))
    }

    /// The architecture with this `general.architecture`.
    pub(super) fn from_gguf(name: &str) -> Option<Self> {
        Self::find(|row| row.gguf.names.contains(&name))
    }

    /// The architecture of the text model in a multimodal model. `model_type` and `text` are the
    /// types of the multimodal model and of its text model.
    pub(super) fn in_multimodal(model_type: &str, text: &str) -> Option<Self> {
        Self::from_model_type(text)
            .filter(|architecture| architecture.description().multimodal.contains(&model_type))
    }

    fn find(matches: impl Fn(&Description) -> bool) -> Option<Self> {
        TABLE.iter().find(|row| matches(row)).map(|row| row.architecture)
    }

    /// The supported values of `model_type`, for messages.
    pub(super) fn model_types() -> String {
        let types: Vec<_> = TABLE.iter().flat_map(|row| row.model_types).copied().collect();
        types.join(", ")
    }

    /// The supported values of `general.architecture`, for messages.
    pub(super) fn gguf_names() -> String {
        TABLE.iter().flat_map(|row| row.gguf.names).copied().collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
mod tests;
