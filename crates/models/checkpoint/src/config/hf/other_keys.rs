//! Handles the keys of a `config.json` that no part of the decoder has read. Every key is used, or
//! refused by the code that reads it, or in a list below because it has no effect. For any other
//! key, users are told that it has no effect. No key is ignored silently.

use serde_json::Value;

use super::super::keys::Keys;
use crate::error::quoted;

/// Maximum number of keys in the notes.
const NOTES_MAX: usize = 20;

/// Keys of other parts of a model, which have their own readers: encoders of images and sounds,
/// embeddings and skills, and the tokens that stand for images and sounds.
const OTHER_PARTS: [&str; 44] = [
    "_pad_token_id",
    "audio_config",
    "audio_seq_length",
    "audio_token_id",
    "audio_token_index",
    "boa_token_id",
    "boa_token_index",
    "boi_token_id",
    "boi_token_index",
    "eoa_token_id",
    "eoa_token_index",
    "eoi_token_id",
    "eoi_token_index",
    "image_seq_len",
    "image_token_id",
    "image_token_index",
    "image_token_num",
    "is_matryoshka",
    "matryoshka_dimensions",
    "mm_tokens_per_image",
    "modality_projector",
    "multimodal_projector_bias",
    "out_hidden_size",
    "pad_token_id",
    "perceiver_config",
    "processor_class",
    "projector_hidden_act",
    "projector_hidden_size",
    "quantization_config",
    "scale_factor",
    "sentence_transformers",
    "sep_token_id",
    "spatial_merge_size",
    "tokenizer_class",
    "tokenizer_id",
    "region",
    "unk_token_id",
    "video_token_id",
    "video_token_index",
    "vision",
    "vision_config",
    "vision_end_token_id",
    "vision_feature_layer",
    "vision_start_token_id",
];

/// Keys about training and initial weights.
const TRAINING: [&str; 36] = [
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "aux_loss_alpha",
    "classifier_dropout",
    "embd_pdrop",
    "embedding_dropout",
    "embedding_initializer_range",
    "ep_size",
    "freeze_vision_layers",
    "hidden_dropout",
    "hidden_dropout_prob",
    "initializer_factor",
    "initializer_range",
    "keys_to_ignore_at_inference",
    "moe_loss_weight",
    "moe_router_force_load_balancing",
    "moe_token_dispatcher_type",
    "neftune_noise_alpha",
    "output_router_logits",
    "qk_layernorms_for_training",
    "qk_layers_dropout",
    "rescale_prenorm_residual",
    "resid_pdrop",
    "residual_dropout",
    "router_aux_loss_coef",
    "router_dtype",
    "router_jitter_noise",
    "router_z_loss_coef",
    "seq_aux",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "use_gradient_checkpointing",
];

/// Keys about how the forward pass is computed or what it returns, which do not change its result,
/// and descriptions of the file.
const COMPUTATION: [&str; 67] = [
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_attn_implementation_internal",
    "_commit_hash",
    "_flash_attn_2_enabled",
    "_from_model_config",
    "_name_or_path",
    "_sliding_window_pattern",
    "architectures",
    "attn_implementation",
    "auto_map",
    "base_model_pp_plan",
    "base_model_tp_plan",
    "chunk_size",
    "chunk_size_feed_forward",
    "cache_implementation",
    "dtype",
    "enable_expert_parallel",
    "expand",
    "finetuning_task",
    "fp32_residual",
    "id2label",
    "is_llama_config",
    "label2id",
    "mamba_chunk_size",
    "mamba_ssm_cache_dtype",
    "mamba_ssm_dtype",
    "max_window_layers",
    "mlp_expansion_factor",
    "model_max_length",
    "model_name",
    "model_type",
    "moe_shared_expert_overlap",
    "mtp_layers_block_type",
    "mtp_loss_scaling_factor",
    "mtp_num_hidden_layers",
    "mtp_num_layers",
    "mtp_use_dedicated_embeddings",
    "num_logits_to_keep",
    "num_mtp_layers",
    "num_mtp_modules",
    "num_nextn_predict_layers",
    "output_attentions",
    "output_hidden_states",
    "pretraining_tp",
    "problem_type",
    "qk_head_dim",
    "residual_in_fp32",
    "return_dict",
    "rope_interleave",
    "subfolder",
    "tf_legacy_loss",
    "time_step_floor",
    "time_step_max",
    "time_step_min",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "transformers_weights",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
    "use_flash_attn",
    "use_mamba_kernels",
    "use_mtp",
];

/// Keys that are not read because another key of the file has the same meaning, or because the
/// model lacks the part that they describe.
const REPLACED: [&str; 14] = [
    // Latent attention has its own sizes.
    "head_dim",
    "num_key_value_heads",
    // The MLPs of gpt-oss and Nemotron-H always have the same activation function.
    "hidden_act",
    // These are unused in models without windows.
    "sliding_window",
    "use_sliding_window",
    // These are replaced by `layer_types` and `no_rope_layers`.
    "full_attn_idxs",
    "no_rope_layer_interval",
    "sliding_window_pattern",
    // These are in `rope_parameters`, and are replaced by `rope_type` and the outer key.
    "max_position_embeddings",
    "type",
    // These are unused without a norm in Mamba-2, or next to `mamba_d_ssm`.
    "mamba_expand",
    "mamba_norm_before_gate",
    // These are unused with one group of experts, or next to the width of shared experts.
    "n_shared_experts",
    "topk_group",
];

/// Keys that older versions of transformers wrote for text generation. Without a
/// `generation_config.json`, the loader reads the ones that it supports.
const GENERATION: [&str; 40] = [
    "bad_words_ids",
    "begin_suppress_tokens",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "min_length",
    "min_p",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "prefix",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict_in_generate",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "add_cross_attention",
    "cross_attention_hidden_size",
    "is_decoder",
    "is_encoder_decoder",
    "pruned_heads",
    "tie_encoder_decoder",
    "eos_token",
    "bos_token",
    "bos_token_id",
    "eos_token_id",
];

/// Notes for users about the keys of `root` that have not been read and are not in one of the
/// lists. Keys whose value switches something off are left out.
pub(super) fn notes(root: &Keys<'_>) -> Vec<String> {
    let lists: [&[&str]; 5] = [&OTHER_PARTS, &TRAINING, &COMPUTATION, &REPLACED, &GENERATION];
    // Quantization tools write many keys about their settings. The relevant ones are read.
    let skipped = ["quantization_config.", "compression_config."];
    let is_listed = |path: &str| {
        if skipped.iter().any(|object| path.contains(object)) {
            return true;
        }
        let key = path.rsplit('.').next().unwrap_or(path);
        lists.iter().any(|list| list.contains(&key))
    };
    let unread = root.unread().into_iter();
    let named = unread.filter(|(path, value)| !is_off(value) && !is_listed(path));
    let note = |(path, _): (String, _)| {
        quoted(&format!(
            "{}: key `{path}` is not known for this model and has no effect",
            root.file
        ))
    };
    named.take(NOTES_MAX).map(note).collect()
}

/// Whether a value switches something off.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::String(text) => text.is_empty(),
        Value::Number(_) | Value::Bool(true) => false,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::super::parse;
    use super::*;

    /// Goal: every key of transformers' configurations of every supported type is used or in one of
    /// the lists, and the lists have each key once.
    #[test]
    fn every_published_key_is_decided() {
        let lists: [&[&str]; 5] = [&OTHER_PARTS, &TRAINING, &COMPUTATION, &REPLACED, &GENERATION];
        let mut all = lists.concat();
        all.sort_unstable();
        let twice: Vec<_> = all.windows(2).filter(|pair| pair[0] == pair[1]).collect();
        assert!(twice.is_empty(), "{twice:?}");

        let types: BTreeMap<String, Value> =
            serde_json::from_str(include_str!("tests/published.json")).unwrap();
        assert!(types.len() > 45);
        let mut undecided = BTreeMap::new();
        for (name, config) in &types {
            match parse(name, config) {
                Ok(parsed) if parsed.notes.is_empty() => {}
                Ok(parsed) => drop(undecided.insert(name, parsed.notes)),
                Err(error) => drop(undecided.insert(name, vec![error.to_string()])),
            }
        }
        assert!(undecided.is_empty(), "{undecided:#?}");
    }

    /// Goal: unknown keys with a value are named, also in nested objects. Other keys are not named.
    #[test]
    fn unknown_keys_are_named() {
        let config = json!({
            "model_type": "mistral3", "vision_config": {"a": 1}, "new": 0, "off": false, "no": [],
            "text_config": {
                "model_type": "ministral3", "attention_dropout": 0.1, "use_new_norm": true,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "twist": 2},
            },
        });
        let notes = parse("f", &config).unwrap().notes;
        let path = |path: &str| {
            let what = "is not known for this model and has no effect";
            format!("f: key `{path}` {what}")
        };
        let mut expected = ["new", "text_config.rope_parameters.twist", "text_config.use_new_norm"];
        let mut named: Vec<_> = notes.iter().map(String::as_str).collect();
        expected.sort_unstable();
        named.sort_unstable();
        assert_eq!(named, expected.map(path));
        let many: serde_json::Map<_, _> = (0..99).map(|i| (format!("k{i}"), json!(1))).collect();
        let mut config = Value::Object(many);
        config["model_type"] = "llama".into();
        assert_eq!(parse("f", &config).unwrap().notes.len(), NOTES_MAX);
    }
}
