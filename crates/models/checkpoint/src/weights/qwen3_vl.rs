//! The names of the tensors of the image encoder of Qwen3-VL and Qwen3.5.
//!
//! | tensor in the file | tensors in this crate |
//! |---|---|
//! | `model.visual.*` | the encoder's tensors, with the names of SigLIP |
//! | `attn.qkv` of a block | `q_proj`, `k_proj` and `v_proj`, one after the other |
//! | `merger.norm` | the norm after the last layer of the tower |

use super::Weights;
use super::encoder::in_block;
use crate::error::ModelError;

/// Modules of a block of the image encoder, and the names of SigLIP.
const BLOCK: [(&str, &str); 6] = [
    ("norm1", "layer_norm1"),
    ("attn.qkv", "self_attn.qkv_proj"),
    ("attn.proj", "self_attn.out_proj"),
    ("norm2", "layer_norm2"),
    ("mlp.linear_fc1", "mlp.fc1"),
    ("mlp.linear_fc2", "mlp.fc2"),
];

/// The name in this crate of the tensor `name` in a file.
fn renamed(name: String) -> String {
    let Some(own) = name.strip_prefix("model.").unwrap_or(&name).strip_prefix("visual.") else {
        return name;
    };
    let here = match own.strip_prefix("blocks.") {
        Some(rest) => in_block(rest, &BLOCK).map(|rest| format!("encoder.layers.{rest}")),
        None => None,
    };
    let modules = [
        ("patch_embed.proj.", "embeddings.patch_embedding."),
        ("pos_embed.", "embeddings.position_embedding."),
        ("merger.norm.", "post_layernorm."),
    ];
    let module = || {
        modules
            .iter()
            .find_map(|(module, here)| Some(format!("{here}{}", own.strip_prefix(module)?)))
    };
    let here = here.or_else(module).unwrap_or_else(|| own.to_owned());
    format!("model.vision_tower.{here}")
}

impl Weights {
    /// Renames the tensors of this image encoder to the names in this crate, and divides the
    /// combined tensors of queries, keys and values.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] if two tensors would have the same name.
    pub(crate) fn name_qwen3_vl(&mut self) -> Result<(), ModelError> {
        for (name, stored) in std::mem::take(&mut self.tensors) {
            self.insert(renamed(name), stored)?;
        }
        self.split_thirds("model.vision_tower.encoder.layers.")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: names of all parts are translated, and others are kept.
    #[test]
    fn names_are_translated() {
        let tower = "model.vision_tower.";
        for (name, expected) in [
            ("model.visual.blocks.2.attn.qkv.bias", "encoder.layers.2.self_attn.qkv_proj.bias"),
            ("visual.blocks.2.norm1.weight", "encoder.layers.2.layer_norm1.weight"),
            ("model.visual.blocks.0.mlp.linear_fc2.bias", "encoder.layers.0.mlp.fc2.bias"),
            ("model.visual.patch_embed.proj.weight", "embeddings.patch_embedding.weight"),
            ("model.visual.pos_embed.weight", "embeddings.position_embedding.weight"),
            ("model.visual.merger.norm.bias", "post_layernorm.bias"),
            ("model.visual.merger.linear_fc1.bias", "merger.linear_fc1.bias"),
            (
                "model.visual.deepstack_merger_list.1.norm.weight",
                "deepstack_merger_list.1.norm.weight",
            ),
        ] {
            assert_eq!(renamed(name.to_owned()), format!("{tower}{expected}"));
        }
        let text = "model.layers.0.mlp.up_proj.weight";
        assert_eq!(renamed(text.to_owned()), text);
    }
}
