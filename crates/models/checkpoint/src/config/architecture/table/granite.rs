//! The rows of Granite.

use super::super::Architecture::*;
use super::super::{AttentionScale, Description, ExpertsDefaults, Gguf, Mamba, Shared};
use super::LLAMA;
use super::mixtures::MIXTRAL_EXPERTS;

pub(super) const GRANITE: Description = Description {
    architecture: Granite,
    model_types: &["granite"],
    classes: &["GraniteForCausalLM"],
    attention_scale: AttentionScale::Multiplier,
    multipliers: true,
    gguf: Gguf { names: &["granite"], marks_unrotated: true, ..LLAMA.gguf },
    ..LLAMA
};

pub(super) const GRANITE_HYBRID: Description = Description {
    architecture: GraniteHybrid,
    model_types: &["granitemoehybrid"],
    classes: &["GraniteMoeHybridForCausalLM"],
    experts: Some(ExpertsDefaults { shared: Shared::Dense, ..MIXTRAL_EXPERTS }),
    mamba: Some(Mamba::Granite),
    // GGUF files of models without Mamba layers have the name of Granite 3.
    gguf: Gguf { names: &["granitehybrid"], ..GRANITE.gguf },
    ..GRANITE
};

pub(super) const GRANITE_MOE: Description = Description {
    architecture: GraniteMoe,
    model_types: &["granitemoe"],
    classes: &["GraniteMoeForCausalLM"],
    experts: Some(MIXTRAL_EXPERTS),
    gguf: Gguf { names: &["granitemoe"], ..GRANITE.gguf },
    ..GRANITE
};
