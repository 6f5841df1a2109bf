//! The rows of Qwen3-VL.

use super::super::Architecture::*;
use super::super::{Defaults, Description, ExpertsDefaults, Rotation, Windows};
use super::mixtures::{MIXTRAL_EXPERTS, QWEN3_MOE};
use super::{QWEN3, gguf};

pub(super) const QWEN3_VL: Description = Description {
    architecture: Qwen3Vl,
    model_types: &["qwen3_vl_text", "qwen3_vl"],
    classes: &["Qwen3VLTextModel", "Qwen3VLForConditionalGeneration"],
    multimodal: &["qwen3_vl"],
    defaults: Defaults { max_positions: 128_000, sliding_window: None, ..QWEN3.defaults },
    rotation: Rotation { theta: 5e5, sections: Some([24, 20, 20]), ..QWEN3.rotation },
    windows: Windows::Nowhere,
    windows_need_flag: false,
    gguf: gguf(&["qwen3vl"]),
    ..QWEN3
};

pub(super) const QWEN3_VL_MOE: Description = Description {
    architecture: Qwen3VlMoe,
    model_types: &["qwen3_vl_moe_text", "qwen3_vl_moe"],
    classes: &["Qwen3VLMoeTextModel", "Qwen3VLMoeForConditionalGeneration"],
    multimodal: &["qwen3_vl_moe"],
    defaults: Defaults {
        intermediate_size: 5632,
        num_kv_heads: Some(16),
        max_positions: 128_000,
        sliding_window: None,
        ..QWEN3_MOE.defaults
    },
    rotation: QWEN3_VL.rotation,
    windows: Windows::Nowhere,
    windows_need_flag: false,
    experts: Some(ExpertsDefaults {
        count: 60,
        per_token: 4,
        width: Some(1408),
        normalized: Some(true),
        ..MIXTRAL_EXPERTS
    }),
    gguf: gguf(&["qwen3vlmoe"]),
    ..QWEN3_MOE
};
