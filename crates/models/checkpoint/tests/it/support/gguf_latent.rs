//! What llama.cpp's converter makes of models with latent attention.

use stolon_checkpoint::config::{ExpertScores, MixerConfig, TensorSpec};
use stolon_checkpoint::{DecoderConfig, RopeScaling};

use super::interleaved;
use super::{GgufWriter, Meta};

/// Replaces and adds metadata.
pub(crate) fn metadata(config: &DecoderConfig, prefix: &str, file: &mut GgufWriter) {
    let Some(attention) = config.latent() else { return };
    let latent = attention.sizes;
    for (key, number) in [
        ("attention.key_length", Some(latent.kept_dim())),
        ("attention.value_length", Some(latent.width)),
        ("attention.key_length_mla", Some(latent.query_dim())),
        ("attention.value_length_mla", Some(latent.value_dim)),
        ("attention.kv_lora_rank", Some(latent.width)),
        ("attention.q_lora_rank", latent.query_rank),
        ("rope.dimension_count", Some(latent.rotary_dim)),
        ("leading_dense_block_count", Some(1)),
    ] {
        if let Some(number) = number {
            file.set(&format!("{prefix}.{key}"), Meta::U32(number as u32));
        }
    }
    if let RopeScaling::Yarn { factor, .. } = config.ropes[0].scaling {
        let scores = attention.scale * (latent.query_dim() as f32).sqrt();
        let multiplier = (scores.sqrt() - 1.0) / (factor as f32).ln();
        let key = format!("{prefix}.rope.scaling.yarn_log_multiplier");
        file.set(&key, Meta::F32(multiplier));
    }
    let Some(experts) = config.experts() else { return };
    let function = if experts.scores == ExpertScores::Softmax { 1 } else { 2 };
    file.set(&format!("{prefix}.expert_gating_func"), Meta::U32(function));
    file.set(&format!("{prefix}.expert_weights_norm"), Meta::Bool(experts.normalized));
    if let Some(groups) = experts.groups {
        for (key, number) in
            [("expert_group_count", groups.count), ("expert_group_used_count", groups.used)]
        {
            file.set(&format!("{prefix}.{key}"), Meta::U32(number as u32));
        }
    }
}

/// The rows of `spec` in the order of files, in which the rotated ones are the last of each head.
pub(crate) fn rows(config: &DecoderConfig, spec: &TensorSpec, values: Vec<f32>) -> Vec<f32> {
    let layer = spec.name.split('.').nth(2).and_then(|layer| layer.parse::<usize>().ok());
    let mixers = layer.map(|layer| &config.layers[layer].mixers[..]);
    let Some([MixerConfig::Latent(attention)]) = mixers else { return values };
    let latent = attention.sizes;
    let (heads, head_dim) = match spec.name.rsplit('.').nth(1) {
        Some("q_proj" | "q_b_proj") => (attention.heads, latent.query_dim()),
        Some("kv_a_proj_with_mqa") => (1, latent.kept_dim()),
        _ => return values,
    };
    let mut values = interleaved(&values, heads, head_dim, latent.rotary_dim);
    for head in values.chunks_exact_mut(head_dim * spec.shape[1]) {
        head.rotate_left(latent.rotary_dim * spec.shape[1]);
    }
    values
}
