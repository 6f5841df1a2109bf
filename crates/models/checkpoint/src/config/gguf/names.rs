//! Maps the names of tensors in GGUF files to Hugging Face names.

use super::super::architecture::Dialect;
use super::super::{Architecture, DeltaNetKind};

/// The Hugging Face name of the tensor with the GGUF name `name`; `None` if the decoder does not
/// use this tensor. The first dimension of a stacked tensor is the expert or the head. Its name has
/// a `*` in place of the index.
pub(crate) fn tensor_name(architecture: Architecture, name: &str) -> Option<String> {
    match name {
        "token_embd.weight" => return Some("model.embed_tokens.weight".into()),
        // Files of LFM2 have the second name.
        "output_norm.weight" | "token_embd_norm.weight" => return Some("model.norm.weight".into()),
        "output_norm.bias" => return Some("model.norm.bias".into()),
        "output.weight" => return Some("lm_head.weight".into()),
        "per_layer_token_embd.weight" => return Some("model.embed_tokens_per_layer.weight".into()),
        "per_layer_model_proj.weight" => {
            return Some("model.per_layer_model_projection.weight".into());
        }
        "per_layer_proj_norm.weight" => {
            return Some("model.per_layer_projection_norm.weight".into());
        }
        _ => {}
    }
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    // Files of Falcon-H1 have this name without the suffix `.weight`.
    let rest = if rest == "ffn_norm" { "ffn_norm.weight" } else { rest };
    let row = architecture.description();
    let kind = row.delta_net.map(|config| config.kind);
    let (module, part) = match (row.mamba, kind) {
        (Some(_), _) => ("mamba", recurrent_name(rest, true)),
        (None, Some(DeltaNetKind::Gated)) => ("linear_attn", recurrent_name(rest, false)),
        (None, Some(DeltaNetKind::Kimi { .. })) => ("self_attn", kimi_name(rest)),
        (None, None) => ("", None),
    };
    if let Some(part) = part {
        return Some(format!("model.layers.{layer}.{module}.{part}"));
    }
    if row.dialect == Dialect::Gemma4
        && let Some(part) = gemma4_name(rest)
    {
        return Some(format!("model.layers.{layer}.{part}"));
    }
    let (module, kind) = rest.rsplit_once('.')?;
    let norms = row.norms.names();
    let shared_gate = row.experts.is_some_and(|experts| experts.shared.has_gate());
    let module = match module {
        "attn_norm" => norms.attention_input?,
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_qkv" => "self_attn.qkv_proj",
        "attn_gate" => "self_attn.gate_proj",
        "attn_output" => "self_attn.o_proj",
        "attn_q_a" => "self_attn.q_a_proj",
        "attn_q_a_norm" => "self_attn.q_a_layernorm",
        "attn_q_b" => "self_attn.q_b_proj",
        "attn_kv_a_mqa" => "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm" => "self_attn.kv_a_layernorm",
        "attn_kv_b" => "self_attn.kv_b_proj",
        "attn_k_b" => "self_attn.k_b_proj.*",
        "attn_v_b" => "self_attn.v_b_proj.*",
        "shortconv.in_proj" => "conv.in_proj",
        "shortconv.conv" => "conv.conv",
        "shortconv.out_proj" => "conv.out_proj",
        "attn_q_norm" => "self_attn.q_norm",
        "attn_k_norm" => "self_attn.k_norm",
        "ffn_norm" => norms.mlp_input?,
        "exp_probs_b" => return Some(format!("model.layers.{layer}.mlp.expert_bias")),
        "attn_sinks" => return Some(format!("model.layers.{layer}.self_attn.sinks")),
        // If outputs are not normalized, this is the norm before the MLP (gpt-oss).
        "post_attention_norm" => norms.attention_output.or(norms.mlp_input)?,
        "post_ffw_norm" => norms.mlp_output?,
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" if row.gguf.fused_mlp => "mlp.gate_up_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        "ffn_gate_inp" => "mlp.gate",
        "ffn_gate_inp_shexp" => "mlp.shared_expert_gate",
        "ffn_gate_shexp" if shared_gate => "mlp.shared_expert.gate_proj",
        "ffn_up_shexp" if shared_gate => "mlp.shared_expert.up_proj",
        "ffn_down_shexp" if shared_gate => "mlp.shared_expert.down_proj",
        "ffn_gate_shexp" => "mlp.gate_proj",
        "ffn_up_shexp" => "mlp.up_proj",
        "ffn_down_shexp" => "mlp.down_proj",
        "ffn_gate_exps" => "mlp.experts.*.gate_proj",
        "ffn_up_exps" => "mlp.experts.*.up_proj",
        "ffn_down_exps" => "mlp.experts.*.down_proj",
        "ffn_gate_up_exps" => "mlp.experts.*.gate_up_proj",
        _ => return expert_name(layer, module, kind),
    };
    Some(format!("model.layers.{layer}.{module}.{kind}"))
}

/// The name of a tensor in the head for multi-token prediction of a model with `layers` layers, which
/// is the layer after them: those of [`DecoderConfig::mtp_head`] and of
/// [`DecoderConfig::mtp_weights`]; `None` if the head does not have the tensor.
///
/// [`DecoderConfig::mtp_head`]: super::super::DecoderConfig::mtp_head
/// [`DecoderConfig::mtp_weights`]: super::super::DecoderConfig::mtp_weights
pub(crate) fn mtp_tensor_name(
    architecture: Architecture,
    layers: usize,
    name: &str,
) -> Option<String> {
    if let "token_embd.weight" | "output.weight" | "output_norm.weight" = name {
        return tensor_name(architecture, name);
    }
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    if layer.parse() != Ok(layers) {
        return None;
    }
    let own = match rest.strip_prefix("nextn.") {
        Some("eh_proj.weight") => "mtp.fc.weight",
        Some("enorm.weight") => "mtp.pre_fc_norm_embedding.weight",
        Some("hnorm.weight") => "mtp.pre_fc_norm_hidden.weight",
        Some("shared_head_norm.weight") => "model.norm.weight",
        // Copies of the model's embedding and output matrix, which some files have.
        Some(_) => return None,
        None => return tensor_name(architecture, &format!("blk.0.{rest}")),
    };
    Some(own.to_owned())
}

/// The name within its module of a tensor of Gated DeltaNet, or of Mamba-2 if `mamba` is true.
fn recurrent_name(name: &str, mamba: bool) -> Option<&'static str> {
    Some(match name {
        "ssm_in.weight" if mamba => "in_proj.weight",
        "ssm_conv1d.bias" => "conv1d.bias",
        "ssm_d" => "D",
        "attn_qkv.weight" | "attn_gate.weight" if mamba => return None,
        "attn_qkv.weight" => "in_proj_qkv.weight",
        "attn_gate.weight" => "in_proj_z.weight",
        // Older files of Qwen3-Next combine the parts in these two matrices.
        "ssm_in.weight" => "in_proj_qkvz.weight",
        "ssm_ba.weight" => "in_proj_ba.weight",
        "ssm_beta.weight" => "in_proj_b.weight",
        "ssm_alpha.weight" => "in_proj_a.weight",
        "ssm_conv1d.weight" => "conv1d.weight",
        "ssm_dt.bias" => "dt_bias",
        "ssm_a" => "A_log",
        "ssm_norm.weight" => "norm.weight",
        "ssm_out.weight" => "out_proj.weight",
        _ => return None,
    })
}

/// The name within its module of a tensor of Kimi Delta Attention; `None` for tensors that
/// attention has, too.
fn kimi_name(name: &str) -> Option<&'static str> {
    Some(match name {
        "ssm_conv1d_q.weight" => "q_conv1d.weight",
        "ssm_conv1d_k.weight" => "k_conv1d.weight",
        "ssm_conv1d_v.weight" => "v_conv1d.weight",
        "ssm_f_a.weight" => "f_a_proj.weight",
        "ssm_f_b.weight" => "f_b_proj.weight",
        "ssm_g_a.weight" => "g_a_proj.weight",
        "ssm_g_b.weight" => "g_b_proj.weight",
        "ssm_beta.weight" => "b_proj.weight",
        "ssm_dt.bias" => "dt_bias",
        "ssm_a" => "A_log",
        "ssm_norm.weight" => "o_norm.weight",
        _ => return None,
    })
}

/// The name of a tensor that only Gemma 4 has, or that has a different name in Gemma 4.
fn gemma4_name(name: &str) -> Option<&'static str> {
    Some(match name {
        "inp_gate.weight" => "per_layer_input_gate.weight",
        "proj.weight" => "per_layer_projection.weight",
        "post_norm.weight" => "post_per_layer_input_norm.weight",
        "layer_output_scale.weight" => "layer_scalar",
        "post_ffw_norm_1.weight" => "post_feedforward_layernorm_1.weight",
        "pre_ffw_norm_2.weight" => "pre_feedforward_layernorm_2.weight",
        "post_ffw_norm_2.weight" => "post_feedforward_layernorm_2.weight",
        "ffn_gate_inp.weight" => "router.proj.weight",
        "ffn_gate_inp.scale" => "router.scale",
        "ffn_down_exps.scale" => "router.per_expert_scale",
        "ffn_gate_exps.weight" => "experts.*.gate_proj.weight",
        "ffn_up_exps.weight" => "experts.*.up_proj.weight",
        "ffn_gate_up_exps.weight" => "experts.*.gate_up_proj.weight",
        "ffn_down_exps.weight" => "experts.*.down_proj.weight",
        _ => return None,
    })
}

/// The name of a tensor in older files, which have one tensor per expert, such as
/// `ffn_gate.7.weight`.
fn expert_name(layer: &str, module: &str, kind: &str) -> Option<String> {
    let (module, expert) = module.rsplit_once('.')?;
    let module = match module {
        "ffn_gate" => "gate_proj",
        "ffn_up" => "up_proj",
        "ffn_down" => "down_proj",
        _ => return None,
    };
    Some(format!("model.layers.{layer}.mlp.experts.{expert}.{module}.{kind}"))
}
