//! The table of architectures. An architecture that needs no new operation is one more row. It
//! lists the fields that differ from the row on which it is based.

mod adjacent;
mod deepseek;
mod gemma;
mod granite;
mod layer_norms;
mod mixtures;
mod qwen3_vl;
mod recurrent;

use super::Architecture::*;
use super::{
    AttentionScale, Bias, Defaults, Description, Dialect, Gate, Gguf, Pattern, Rotation, Softcaps,
    Windows,
};
use crate::config::{GateFunction, MtpInput, NormKind, NormPlacement, QkNorm, RopeScaling};
use adjacent::{ERNIE45, GLM4};
use deepseek::{DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE, MISTRAL4, YOUTU};
use gemma::{GEMMA2, GEMMA3, GEMMA4};
use granite::{GRANITE, GRANITE_HYBRID, GRANITE_MOE};
use layer_norms::{COHERE2, MOONDREAM2, MOONDREAM3, STARCODER2};
use mixtures::{GLM4_MOE, GPT_OSS, LFM2_MOE, MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE};
use qwen3_vl::{QWEN3_VL, QWEN3_VL_MOE};
use recurrent::{FALCON_H1, KIMI_LINEAR, NEMOTRON_H, QWEN3_NEXT, QWEN35, QWEN35_MOE};

const LLAMA: Description = Description {
    architecture: Llama,
    model_types: &["llama"],
    classes: &["LlamaForCausalLM"],
    multimodal: &["idefics3", "smolvlm"],
    defaults: Defaults {
        vocab_size: 32_000,
        hidden_size: 4096,
        intermediate_size: 11_008,
        num_layers: 32,
        num_heads: 32,
        num_kv_heads: None,
        head_dim: None,
        max_positions: 2048,
        rms_norm_eps: 1e-6,
        tie_word_embeddings: false,
        sliding_window: None,
        eos_token_ids: &[2],
        bos_token_id: Some(1),
    },
    qkv_bias: Bias::Key("attention_bias", false),
    output_bias: Bias::Key("attention_bias", false),
    output_gate: false,
    own_gate_matrix: false,
    mlp_bias: Bias::Key("mlp_bias", false),
    mlp_gate: true,
    norms: NormPlacement::Input,
    norm_kind: NormKind::Rms,
    norm_eps: "rms_norm_eps",
    norm_offset: 0.0,
    plain_final_norm: false,
    output_norm_eps: None,
    embedding_norm: false,
    qk_norm: None,
    qk_norm_needs_flag: false,
    value_norm: false,
    dialect: Dialect::Transformers,
    gate: Gate::Key("hidden_act", GateFunction::Silu),
    attention_sinks: false,
    attention_scale: AttentionScale::HeadDim,
    query_scaling: None,
    softcaps: None,
    scaled_embedding: false,
    multipliers: false,
    logit_scale: None,
    rotation: Rotation {
        theta: 1e4,
        local_theta: None,
        partial: None,
        proportional: None,
        adjacent: false,
        unrotated_step: None,
        nowhere: false,
        local_only: false,
        original_context: None,
        sections: None,
        scaling: None,
    },
    windows: Windows::Nowhere,
    windows_need_flag: false,
    experts: None,
    latent: None,
    mamba: None,
    convolutions: false,
    delta_net: None,
    mtp: None,
    gguf: Gguf {
        names: &["llama"],
        adjacent: true,
        fused_mlp: false,
        tiled_heads: false,
        window: None,
        normalized_experts: true,
        marks_unrotated: false,
        wide_scale_layers: None,
        windowed: None,
    },
};

/// No name in GGUF files, and no converter that reorders the rows of q and k.
const NO_GGUF: Gguf = Gguf { names: &[], adjacent: false, ..LLAMA.gguf };

const fn gguf(names: &'static [&'static str]) -> Gguf {
    Gguf { names, ..NO_GGUF }
}

const MISTRAL: Description = Description {
    architecture: Mistral,
    model_types: &["mistral"],
    classes: &["MistralForCausalLM"],
    multimodal: &["mistral3"],
    defaults: Defaults {
        intermediate_size: 14_336,
        num_kv_heads: Some(8),
        max_positions: 131_072,
        sliding_window: Some(4096),
        ..LLAMA.defaults
    },
    qkv_bias: Bias::Never,
    output_bias: Bias::Never,
    mlp_bias: Bias::Never,
    windows: Windows::Everywhere,
    // GGUF files of Mistral and Mixtral have the name `llama`.
    gguf: NO_GGUF,
    ..LLAMA
};

/// The scaling of Ministral 3.
static MINISTRAL3_SCALING: RopeScaling = RopeScaling::Yarn {
    factor: 16.0,
    beta_fast: 32.0,
    beta_slow: 1.0,
    truncate: true,
    original_max_position_embeddings: 16_384,
    attention_factor: 1.0,
};

const MINISTRAL3: Description = Description {
    architecture: Ministral3,
    model_types: &["ministral3"],
    classes: &["Ministral3ForCausalLM"],
    defaults: Defaults {
        vocab_size: 131_072,
        num_layers: 34,
        head_dim: Some(128),
        max_positions: 262_144,
        rms_norm_eps: 1e-5,
        sliding_window: None,
        ..MISTRAL.defaults
    },
    query_scaling: Some(0.1),
    rotation: Rotation { theta: 1e6, scaling: Some(&MINISTRAL3_SCALING), ..LLAMA.rotation },
    gguf: Gguf { names: &["mistral3"], ..LLAMA.gguf },
    ..MISTRAL
};

const QWEN2: Description = Description {
    architecture: Qwen2,
    model_types: &["qwen2", "mimo"],
    classes: &["Qwen2ForCausalLM", "MiMoForCausalLM"],
    defaults: Defaults {
        vocab_size: 151_936,
        intermediate_size: 22_016,
        num_kv_heads: Some(32),
        max_positions: 32_768,
        sliding_window: Some(4096),
        eos_token_ids: &[],
        bos_token_id: None,
        ..LLAMA.defaults
    },
    qkv_bias: Bias::Always,
    output_bias: Bias::Never,
    mlp_bias: Bias::Never,
    windows: Windows::Some(Pattern::From),
    windows_need_flag: true,
    // MiMo's; Qwen2 has none.
    mtp: Some(MtpInput::StateFirst),
    gguf: gguf(&["qwen2"]),
    ..LLAMA
};

const QWEN3: Description = Description {
    architecture: Qwen3,
    // The second is jina-embeddings-v5-text-small; without a decoder, it is EuroBERT.
    model_types: &["qwen3", "jina_embeddings_v5"],
    classes: &["Qwen3ForCausalLM"],
    defaults: Defaults { head_dim: Some(128), ..QWEN2.defaults },
    qkv_bias: Bias::Key("attention_bias", false),
    output_bias: Bias::Key("attention_bias", false),
    qk_norm: Some(QkNorm::Head),
    mtp: None,
    gguf: gguf(&["qwen3"]),
    ..QWEN2
};

const OLMO2: Description = Description {
    architecture: Olmo2,
    model_types: &["olmo2"],
    classes: &["Olmo2ForCausalLM"],
    defaults: Defaults {
        vocab_size: 50_304,
        rms_norm_eps: 1e-5,
        eos_token_ids: &[50_279],
        bos_token_id: None,
        ..LLAMA.defaults
    },
    mlp_bias: Bias::Never,
    norms: NormPlacement::Output,
    qk_norm: Some(QkNorm::Position),
    gguf: Gguf { windowed: Some(Olmo3), ..gguf(&["olmo2"]) },
    ..LLAMA
};

const OLMO3: Description = Description {
    architecture: Olmo3,
    model_types: &["olmo3"],
    classes: &["Olmo3ForCausalLM"],
    defaults: Defaults { sliding_window: Some(4096), ..OLMO2.defaults },
    rotation: Rotation { theta: 5e5, local_theta: Some(5e5), ..OLMO2.rotation },
    windows: Windows::Some(Pattern::AllButEvery(4)),
    gguf: NO_GGUF,
    ..OLMO2
};

const EXAONE4: Description = Description {
    architecture: Exaone4,
    model_types: &["exaone4"],
    classes: &["Exaone4ForCausalLM"],
    defaults: Defaults {
        vocab_size: 102_400,
        intermediate_size: 16_384,
        rms_norm_eps: 1e-5,
        sliding_window: Some(4096),
        bos_token_id: Some(0),
        ..LLAMA.defaults
    },
    qkv_bias: Bias::Never,
    output_bias: Bias::Never,
    mlp_bias: Bias::Never,
    norms: NormPlacement::Output,
    qk_norm: Some(QkNorm::Head),
    rotation: Rotation { local_only: true, ..LLAMA.rotation },
    windows: Windows::Some(Pattern::AllButEvery(4)),
    gguf: gguf(&["exaone4"]),
    ..LLAMA
};

const SMOLLM3: Description = Description {
    architecture: SmolLm3,
    model_types: &["smollm3"],
    classes: &["SmolLM3ForCausalLM"],
    defaults: Defaults {
        vocab_size: 128_256,
        hidden_size: 2048,
        num_layers: 36,
        num_heads: 16,
        num_kv_heads: Some(4),
        max_positions: 32_768,
        tie_word_embeddings: true,
        eos_token_ids: &[128_001],
        bos_token_id: Some(128_000),
        ..LLAMA.defaults
    },
    rotation: Rotation { theta: 2e6, unrotated_step: Some(4), ..LLAMA.rotation },
    windows: Windows::Some(Pattern::Unrotated),
    windows_need_flag: true,
    gguf: Gguf { names: &["smollm3"], ..LLAMA.gguf },
    ..LLAMA
};

const PHI3: Description = Description {
    architecture: Phi3,
    model_types: &["phi3"],
    classes: &["Phi3ForCausalLM"],
    defaults: Defaults {
        vocab_size: 32_064,
        hidden_size: 3072,
        intermediate_size: 8192,
        max_positions: 4096,
        rms_norm_eps: 1e-5,
        eos_token_ids: &[32_000],
        ..LLAMA.defaults
    },
    qkv_bias: Bias::Never,
    output_bias: Bias::Never,
    mlp_bias: Bias::Never,
    rotation: Rotation { partial: Some(1.0), original_context: Some(4096), ..LLAMA.rotation },
    windows: Windows::Everywhere,
    gguf: Gguf { fused_mlp: true, ..gguf(&["phi3"]) },
    ..LLAMA
};

const LFM2: Description = Description {
    architecture: Lfm2,
    model_types: &["lfm2"],
    classes: &["Lfm2ForCausalLM"],
    defaults: Defaults {
        vocab_size: 65_536,
        hidden_size: 2560,
        intermediate_size: 12_288,
        num_kv_heads: Some(8),
        max_positions: 128_000,
        rms_norm_eps: 1e-5,
        tie_word_embeddings: true,
        ..LLAMA.defaults
    },
    qkv_bias: Bias::Never,
    output_bias: Bias::Never,
    mlp_bias: Bias::Never,
    norm_eps: "norm_eps",
    qk_norm: Some(QkNorm::Head),
    rotation: Rotation { theta: 1e6, ..LLAMA.rotation },
    convolutions: true,
    gguf: gguf(&["lfm2"]),
    ..LLAMA
};

const MUSE_GLIMMER: Description = Description {
    architecture: MuseGlimmer,
    model_types: &["muse_glimmer_text", "muse_glimmer"],
    classes: &["MuseGlimmerForConditionalGeneration"],
    multimodal: &["muse_glimmer"],
    defaults: Defaults {
        vocab_size: 202_048,
        hidden_size: 6656,
        intermediate_size: 19_968,
        num_layers: 52,
        num_kv_heads: Some(2),
        head_dim: Some(128),
        max_positions: 131_072,
        rms_norm_eps: 1e-5,
        sliding_window: Some(2048),
        eos_token_ids: &[200_001],
        bos_token_id: Some(200_000),
        ..LLAMA.defaults
    },
    mlp_bias: Bias::Never,
    output_gate: true,
    own_gate_matrix: true,
    norms: NormPlacement::InputAndOutput,
    norm_offset: 1.0,
    plain_final_norm: true,
    output_norm_eps: Some(("post_norm_eps", 1e-8)),
    embedding_norm: true,
    qk_norm: Some(QkNorm::HeadWithoutWeights),
    gate: Gate::Key("hidden_activation", GateFunction::Silu),
    attention_scale: AttentionScale::QkFactor,
    softcaps: Some(Softcaps { attention: None, logits: Some(20.0) }),
    logit_scale: Some(("output_multiplier", 0.196_116_14)),
    rotation: Rotation { local_only: true, ..LLAMA.rotation },
    windows: Windows::Some(Pattern::AllButEveryBeforeLast(4)),
    gguf: Gguf { adjacent: true, ..gguf(&["muse-glimmer"]) },
    ..LLAMA
};

/// One row per architecture, in the order of [`Architecture`](super::Architecture).
pub(super) static TABLE: [Description; 44] = [
    LLAMA,
    MISTRAL,
    MINISTRAL3,
    QWEN2,
    QWEN3,
    GRANITE,
    GRANITE_HYBRID,
    OLMO2,
    OLMO3,
    EXAONE4,
    SMOLLM3,
    PHI3,
    GLM4,
    ERNIE45,
    LFM2,
    LFM2_MOE,
    GEMMA2,
    GEMMA3,
    GEMMA4,
    MUSE_GLIMMER,
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_MOE,
    QWEN35,
    QWEN35_MOE,
    QWEN3_NEXT,
    NEMOTRON_H,
    FALCON_H1,
    GRANITE_MOE,
    GLM4_MOE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4_MOE_LITE,
    MISTRAL4,
    YOUTU,
    KIMI_LINEAR,
    GPT_OSS,
    STARCODER2,
    COHERE2,
    MOONDREAM2,
    MOONDREAM3,
    QWEN3_VL,
    QWEN3_VL_MOE,
];
