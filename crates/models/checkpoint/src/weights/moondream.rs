//! The names of Moondream's tensors.
//!
//! | tensor in the file | tensors in this crate |
//! |---|---|
//! | `model.text.*` | the decoder's tensors, with the usual names |
//! | `attn.qkv` of a block | `q_proj`, `k_proj` and `v_proj`, one after the other |
//! | `mlp.fc1` and `mlp.fc2` of all experts | `gate_up_proj` and `down_proj` of all experts |
//! | `model.vision.*` | the encoder's tensors, with the names of SigLIP |

use super::encoder::in_block;
use super::{Weights, interleaved};
use crate::config::{DecoderConfig, MixerWeights};
use crate::error::ModelError;

/// Modules of a block of the text model, and their usual names.
const TEXT: [(&str, &str); 7] = [
    ("ln", "input_layernorm"),
    ("attn.qkv", "self_attn.qkv_proj"),
    ("attn.tau", "self_attn.tau"),
    ("attn.proj", "self_attn.o_proj"),
    // The router has this name in all current files.
    ("mlp.gate", "mlp.gate"),
    ("mlp.fc1", "mlp.up_proj"),
    ("mlp.fc2", "mlp.down_proj"),
];

/// The same for tensors with an additional dimension, which combine all experts of a block.
const EXPERTS: [(&str, &str); 2] = [
    ("mlp.up_proj.weight", "mlp.experts.gate_up_proj"),
    ("mlp.down_proj.weight", "mlp.experts.down_proj"),
];

/// Modules of a block of the image encoder, and the names of SigLIP.
const VISION: [(&str, &str); 6] = [
    ("ln1", "layer_norm1"),
    ("attn.qkv", "self_attn.qkv_proj"),
    ("attn.proj", "self_attn.out_proj"),
    ("ln2", "layer_norm2"),
    ("mlp.fc1", "mlp.fc1"),
    ("mlp.fc2", "mlp.fc2"),
];

/// The name in this crate of the tensor `name` in a file of Moondream.
fn renamed(name: &str) -> Option<String> {
    // In files of compiled models, some names contain this string.
    let name = name.replace("._orig_mod", "");
    match name.as_str() {
        "model.text.wte" => return Some("model.embed_tokens.weight".to_owned()),
        "model.vision.pos_emb" => {
            return Some("model.vision.embeddings.position_embedding.weight".to_owned());
        }
        _ => {}
    }
    if let Some(rest) = name.strip_prefix("model.text.blocks.") {
        return in_block(rest, &TEXT).map(|rest| format!("model.layers.{rest}"));
    }
    if let Some(rest) = name.strip_prefix("model.vision.blocks.") {
        return in_block(rest, &VISION).map(|rest| format!("model.vision.encoder.layers.{rest}"));
    }
    for (module, here) in [
        ("model.text.post_ln.", "model.norm."),
        ("model.text.lm_head.", "lm_head."),
        ("model.vision.patch_emb.", "model.vision.embeddings.patch_embedding."),
        ("model.vision.post_ln.", "model.vision.post_layernorm."),
    ] {
        if let Some(kind) = name.strip_prefix(module) {
            return Some(format!("{here}{kind}"));
        }
    }
    Some(name)
}

impl Weights {
    /// Renames the tensors of a Moondream model to the names in this crate, and divides the
    /// combined tensors of queries, keys and values.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] if two tensors would have the same name, and
    /// [`ModelError::WrongShape`] if a tensor cannot be divided.
    pub(crate) fn name_moondream(&mut self, config: &DecoderConfig) -> Result<(), ModelError> {
        for (name, stored) in std::mem::take(&mut self.tensors) {
            let Some(mut name) = renamed(&name) else { continue };
            if stored.shape.len() == 3 {
                EXPERTS.iter().for_each(|(one, all)| name = name.replace(one, all));
            }
            self.insert(name, stored)?;
        }
        interleaved::divide(self)?;
        let mut biases = Vec::new();
        for mixer in config.weights().layers.into_iter().flat_map(|layer| layer.mixers) {
            let MixerWeights::Attention(attention) = mixer else { continue };
            let name = attention.qkv.name.replace("weight", "bias");
            let parts = attention.qkv.parts().filter_map(|part| part.bias).collect();
            biases.push((name, parts));
        }
        self.split_stacked(biases)?;
        self.split_thirds("model.vision.encoder.layers.")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: names of all parts are translated, also of compiled models. Other names are kept or
    /// left out.
    #[test]
    fn names_are_translated() {
        for (name, expected) in [
            ("model.text.wte", Some("model.embed_tokens.weight")),
            ("model.text.blocks.3.ln.bias", Some("model.layers.3.input_layernorm.bias")),
            ("model.text._orig_mod.lm_head.bias", Some("lm_head.bias")),
            ("model.text.post_ln.weight", Some("model.norm.weight")),
            ("model.text.blocks.0.attn.kv_cache", None),
            ("model.text.blocks.5.attn.tau.wq", Some("model.layers.5.self_attn.tau.wq")),
            ("model.text.blocks.5.mlp.gate.bias", Some("model.layers.5.mlp.gate.bias")),
            (
                "model.vision.blocks.26.attn.qkv.weight",
                Some("model.vision.encoder.layers.26.self_attn.qkv_proj.weight"),
            ),
            ("model.vision.post_ln.bias", Some("model.vision.post_layernorm.bias")),
            ("model.vision.proj_mlp.fc1.bias", Some("model.vision.proj_mlp.fc1.bias")),
            ("model.region.size_features", Some("model.region.size_features")),
        ] {
            assert_eq!(renamed(name).as_deref(), expected);
        }
    }
}
