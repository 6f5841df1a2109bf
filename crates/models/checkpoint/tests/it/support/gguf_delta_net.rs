//! What llama.cpp's converter does to the tensors of models with Gated DeltaNet or Kimi Delta
//! Attention.

use stolon_checkpoint::config::TensorSpec;
use stolon_checkpoint::{Architecture, DecoderConfig, DeltaNetConfig, DeltaNetKind, Weights};

use super::floats;
use super::{GgufWriter, Meta};

/// Adds the metadata of these layers. Every second layer has attention.
pub(crate) fn metadata(config: &DeltaNetConfig, prefix: &str, file: &mut GgufWriter) {
    if let DeltaNetKind::Kimi { rank } = config.kind {
        for (key, number) in [("kda.head_dim", rank), ("ssm.conv_kernel", config.taps)] {
            file.set(&format!("{prefix}.{key}"), Meta::U32(number as u32));
        }
        return;
    }
    for (key, number) in [
        ("ssm.group_count", config.key_heads),
        ("ssm.time_step_rank", config.value_heads),
        ("ssm.state_size", config.key_dim),
        ("ssm.inner_size", config.value_width()),
        ("ssm.conv_kernel", config.taps),
        ("full_attention_interval", 2),
    ] {
        file.set(&format!("{prefix}.{key}"), Meta::U32(number as u32));
    }
}

/// The values and the shape of the tensor that the converter makes of `spec`; `None` if it is a part
/// of another one.
pub(crate) fn converted(
    config: &DecoderConfig,
    weights: &Weights,
    spec: &TensorSpec,
) -> Option<(Vec<f32>, Vec<usize>)> {
    let values = floats(weights, &spec.name, &spec.shape);
    let mut shape = spec.shape.clone();
    let columns = spec.shape.get(1).copied().unwrap_or(1);
    let other = |own: &str, other: &str| {
        let name = spec.name.replace(own, other);
        floats(weights, &name, &spec.shape)
    };
    // Muse Glimmer has a matrix of gates.
    let is_combined = config.architecture != Architecture::MuseGlimmer;
    let gated = config.attention().filter(|attention| attention.output_gate && is_combined);
    if gated.is_some() && spec.name.contains("self_attn.gate_proj") {
        return None;
    }
    if let Some(attention) = gated.filter(|_| spec.name.contains("self_attn.q_proj")) {
        shape[0] *= 2;
        let gates = other("q_proj", "gate_proj");
        return Some((alternating(&values, &gates, attention.head_dim * columns), shape));
    }
    if config.architecture == Architecture::KimiLinear {
        if spec.name.ends_with("A_log") {
            let rates = values.iter().map(|value| -value.exp()).collect();
            return Some((rates, vec![1, 1, shape[0], 1]));
        }
        if spec.name.contains("conv1d") {
            shape = vec![1, shape[0], 1, columns];
        }
        return Some((values, shape));
    }
    let Some(delta_net) = config.delta_net().filter(|_| spec.name.contains("linear_attn")) else {
        return Some((values, shape));
    };
    if config.architecture == Architecture::Qwen3Next {
        let heads = delta_net.value_heads / delta_net.key_heads;
        match spec.name.split("linear_attn.").nth(1) {
            Some("in_proj_a.weight") => return None,
            Some("in_proj_b.weight") => {
                shape[0] *= 2;
                let steps = other("in_proj_b", "in_proj_a");
                return Some((alternating(&values, &steps, heads * columns), shape));
            }
            Some("A_log") => {}
            _ => return Some((values, shape)),
        }
    }
    let rates = spec.name.ends_with("A_log");
    let values: Vec<f32> =
        values.into_iter().map(|value| if rates { -value.exp() } else { value }).collect();
    if config.architecture == Architecture::Qwen3Next {
        return Some((values, shape));
    }
    Some((tiled(delta_net, spec, values, columns), shape))
}

/// `len` values of `a`, then as many of `b`, and so on.
fn alternating(a: &[f32], b: &[f32], len: usize) -> Vec<f32> {
    a.chunks(len).zip(b.chunks(len)).flat_map(|(a, b)| [a, b].concat()).collect()
}

/// Brings value heads into the order in which they use the key heads in turn.
fn tiled(config: &DeltaNetConfig, spec: &TensorSpec, values: Vec<f32>, columns: usize) -> Vec<f32> {
    let heads = |values: &[f32], head_len: usize| -> Vec<f32> {
        let group = config.value_heads / config.key_heads;
        let head = |index: usize| {
            let (member, key_head) = (index / config.key_heads, index % config.key_heads);
            &values[(key_head * group + member) * head_len..][..head_len]
        };
        (0..config.value_heads).flat_map(head).copied().collect()
    };
    match spec.name.split("linear_attn.").nth(1) {
        Some("in_proj_qkv.weight" | "conv1d.weight") => {
            let (first, own) = values.split_at(2 * config.key_width() * columns);
            [first, &heads(own, config.value_dim * columns)].concat()
        }
        Some("in_proj_z.weight") => heads(&values, config.value_dim * columns),
        Some("in_proj_a.weight" | "in_proj_b.weight" | "dt_bias" | "A_log") => {
            heads(&values, columns)
        }
        Some("out_proj.weight") => {
            values.chunks(columns).flat_map(|row| heads(row, config.value_dim)).collect()
        }
        _ => values,
    }
}
