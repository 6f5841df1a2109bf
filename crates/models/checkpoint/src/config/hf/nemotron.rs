//! Parses the keys of Nemotron-H: what each layer consists of, and the sizes of Mamba-2.

use super::super::keys::Keys;
use super::super::{LAYERS_MAX, LayerConfig, Mamba2Config, MixerKind, MlpKind};
use super::mamba;
use crate::error::ModelError;

/// The mixers and the MLP of a layer, of which it has one.
type Block = (&'static [MixerKind], Option<MlpKind>);

const MAMBA: Block = (&[MixerKind::Mamba2], None);
const ATTENTION: Block = (&[MixerKind::Attention], None);
const MLP: Block = (&[], Some(MlpKind::Dense));
const EXPERTS: Block = (&[], Some(MlpKind::Experts));

/// What each layer consists of: from a list of names, or else from a string with a character for
/// each layer, as older files have it.
pub(super) fn blocks(keys: &Keys<'_>) -> Result<Vec<Block>, ModelError> {
    let pattern = "hybrid_override_pattern";
    let (key, blocks) = match keys.texts("layers_block_type")? {
        Some(names) => ("layers_block_type", names.into_iter().map(named).collect()),
        None => match keys.text(pattern)? {
            Some(text) => (pattern, text.chars().map(of_character).collect::<Option<Vec<_>>>()),
            None => return Err(keys.invalid(pattern, "a string of M, *, - and E")),
        },
    };
    let Some(blocks) = blocks else {
        let expected = "M (mamba), * (attention), - (mlp) and E (moe)";
        return Err(keys.unsupported(key, expected));
    };
    let given = keys.size("num_hidden_layers")?;
    if !(1..=LAYERS_MAX).contains(&blocks.len()) || given.is_some_and(|n| n != blocks.len()) {
        let count = given.map_or_else(|| format!("1 to {LAYERS_MAX}"), |count| count.to_string());
        return Err(keys.invalid(key, &format!("{count} layers, got {}", blocks.len())));
    }
    Ok(blocks)
}

fn of_character(kind: char) -> Option<Block> {
    match kind {
        'M' => Some(MAMBA),
        '*' => Some(ATTENTION),
        '-' => Some(MLP),
        'E' => Some(EXPERTS),
        _ => None,
    }
}

fn named(kind: &str) -> Option<Block> {
    match kind {
        "linear_attention" | "mamba" => Some(MAMBA),
        "full_attention" | "attention" => Some(ATTENTION),
        "mlp" => Some(MLP),
        "moe" => Some(EXPERTS),
        _ => None,
    }
}

/// Sets what each layer consists of. Returns the sizes of the layers with Mamba-2.
pub(super) fn parse(
    keys: &Keys<'_>,
    layers: &mut [LayerConfig],
) -> Result<Option<Mamba2Config>, ModelError> {
    for (layer, (mixers, mlp)) in layers.iter_mut().zip(blocks(keys)?) {
        (layer.mixers, layer.mlp) = (mixers, mlp);
    }
    if !layers.iter().any(|layer| layer.has(MixerKind::Mamba2)) {
        return Ok(None);
    }
    // Biases of the projections, which published models do not have.
    for key in ["use_bias", "mamba_proj_bias"] {
        if keys.flag(key)?.unwrap_or(false) {
            return Err(keys.unsupported(key, "false"));
        }
    }
    // transformers bounds time steps by `time_step_min`, too, but only those of prompts. The code
    // of the models' authors does not.
    mamba::refuse_options(keys, "mamba_hidden_act")?;
    let size = |key, default| keys.size(key).map(|size| size.unwrap_or(default));
    Ok(Some(Mamba2Config {
        heads: size("mamba_num_heads", 128)?,
        head_dim: size("mamba_head_dim", 64)?,
        groups: size("n_groups", 8)?,
        state_dim: size("ssm_state_size", 128)?,
        taps: size("conv_kernel", 4)?,
        convolution_bias: keys.flag("use_conv_bias")?.unwrap_or(true),
        norm: true,
        log_rates: true,
    }))
}
