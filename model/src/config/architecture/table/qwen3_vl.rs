//! The row of Qwen3-VL.

use super::super::Architecture::*;
use super::super::{Defaults, Description, Rotation, Windows};
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
