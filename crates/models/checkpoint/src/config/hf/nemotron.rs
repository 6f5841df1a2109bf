//! Parses the keys of Nemotron-H: the kind of each layer, and the sizes of Mamba-2.

use super::super::keys::Keys;
use super::super::{LAYERS_MAX, LayerConfig, Mamba2Config, MixerConfig};
use super::mamba;
use crate::error::ModelError;

/// The kind of a layer, which has either one mixer or an MLP or experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Block {
    Mamba,
    Attention,
    Mlp,
    Experts,
}

/// The kind of each layer. Newer files have a list of names, and older files have a string with one
/// character per layer.
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
        'M' => Some(Block::Mamba),
        '*' => Some(Block::Attention),
        '-' => Some(Block::Mlp),
        'E' => Some(Block::Experts),
        _ => None,
    }
}

fn named(kind: &str) -> Option<Block> {
    match kind {
        "linear_attention" | "mamba" => Some(Block::Mamba),
        "full_attention" | "attention" => Some(Block::Attention),
        "mlp" => Some(Block::Mlp),
        "moe" => Some(Block::Experts),
        _ => None,
    }
}

/// Leaves each layer its mixer or its MLP, and replaces the attention of layers that have Mamba-2.
pub(super) fn parse(keys: &Keys<'_>, layers: &mut [LayerConfig]) -> Result<(), ModelError> {
    let blocks = blocks(keys)?;
    let mamba2 = match blocks.contains(&Block::Mamba) {
        true => Some(MixerConfig::Mamba2(sizes(keys)?)),
        false => None,
    };
    for (layer, block) in layers.iter_mut().zip(blocks) {
        match block {
            Block::Mamba => (layer.mixers, layer.mlp) = (mamba2.into_iter().collect(), None),
            Block::Attention => layer.mlp = None,
            // The MLP of layers with experts is replaced later.
            Block::Mlp | Block::Experts => layer.mixers.clear(),
        }
    }
    Ok(())
}

/// The sizes of Mamba-2.
fn sizes(keys: &Keys<'_>) -> Result<Mamba2Config, ModelError> {
    // These are biases of the projections, which published models do not have.
    for key in ["use_bias", "mamba_proj_bias"] {
        if keys.flag(key)?.unwrap_or(false) {
            return Err(keys.unsupported(key, "false"));
        }
    }
    // transformers also bounds time steps by `time_step_min`, but only while it processes prompts.
    // The code of the models' authors does not.
    mamba::refuse_options(keys, "mamba_hidden_act")?;
    let size = |key, default| keys.size(key).map(|size| size.unwrap_or(default));
    Ok(Mamba2Config {
        heads: size("mamba_num_heads", 128)?,
        head_dim: size("mamba_head_dim", 64)?,
        groups: size("n_groups", 8)?,
        state_dim: size("ssm_state_size", 128)?,
        taps: size("conv_kernel", 4)?,
        convolution_bias: keys.flag("use_conv_bias")?.unwrap_or(true),
        norm: true,
        log_rates: true,
        input_factors: [1.0; 5],
        output_factor: 1.0,
    })
}
