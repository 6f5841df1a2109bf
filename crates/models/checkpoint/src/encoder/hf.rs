//! Reads the configuration of an encoder from `config.json`.

use serde_json::Value;

use super::{
    EncoderActivation, EncoderConfig, EncoderFamily, EncoderLayer, EncoderNorm, EncoderRope,
    LearnedPositions, NormOrder, QueryKeyNorms, ScoreBias, TasksConfig, TensorNames, add_experts,
};
use crate::config::{Keys, LAYERS_MAX};
use crate::error::ModelError;

/// The buckets of MPNet, which are constants in its code.
const MPNET_BUCKETS: usize = 32;
const MPNET_DISTANCE: usize = 128;

/// The family of the model with this `config.json`; `None` if it is not an encoder. The models of
/// Jina AI have the `model_type` of BERT or XLM-RoBERTa, and classes of their own.
pub(crate) fn family(config: &Value) -> Option<EncoderFamily> {
    if has_task_adapters(config) {
        return (config["is_decoder"] == false).then_some(EncoderFamily::EuroBert);
    }
    let family = EncoderFamily::of_model_type(config.get("model_type")?.as_str()?)?;
    let class = config["architectures"][0].as_str().unwrap_or_default();
    let code = config["auto_map"]["AutoConfig"].as_str().unwrap_or_default();
    match family {
        // The same `model_type` is a language model otherwise.
        EncoderFamily::Gemma if config["use_bidirectional_attention"] != true => None,
        EncoderFamily::Bert if class.starts_with("JinaBert") => Some(EncoderFamily::JinaBert),
        EncoderFamily::NomicBert
            if config["num_experts"].as_u64().is_some_and(|count| count > 0) =>
        {
            Some(EncoderFamily::NomicBertMoe)
        }
        EncoderFamily::Roberta if code.ends_with(".XLMRobertaFlashConfig") => {
            Some(EncoderFamily::JinaRoberta)
        }
        other => Some(other),
    }
}

/// Whether the model with this `config.json` has an adapter for each task in its directory.
pub(crate) fn has_task_adapters(config: &Value) -> bool {
    config["model_type"] == "jina_embeddings_v5"
}

/// Reads the configuration of an encoder. `file` is the name of the file in errors.
///
/// # Errors
/// [`ModelError::InvalidKey`], and [`ModelError::Unsupported`] for an option that is not
/// implemented.
pub(crate) fn parse(
    file: &str,
    value: &Value,
    family: EncoderFamily,
) -> Result<EncoderConfig, ModelError> {
    let keys = Keys::root(file, value)?;
    refuse(&keys, family)?;
    let config = match family {
        EncoderFamily::Bert => bert(&keys, family, None)?,
        EncoderFamily::Roberta => bert(&keys, family, Some(padding_id(&keys)?))?,
        EncoderFamily::MpNet => mpnet(&keys)?,
        EncoderFamily::DistilBert => distilbert(&keys)?,
        EncoderFamily::ModernBert => modernbert(&keys)?,
        EncoderFamily::NomicBert => nomic_bert(&keys)?,
        EncoderFamily::NomicBertMoe => nomic_bert_moe(&keys)?,
        EncoderFamily::JinaBert | EncoderFamily::JinaCode => jina_bert(&keys)?,
        EncoderFamily::Gemma => gemma(&keys)?,
        EncoderFamily::EuroBert => eurobert(&keys)?,
        EncoderFamily::Gte => gte(&keys)?,
        EncoderFamily::JinaRoberta => jina_roberta(&keys)?,
    };
    config.check(file)?;
    Ok(config)
}

/// Refuses options that would change the output.
fn refuse(keys: &Keys<'_>, family: EncoderFamily) -> Result<(), ModelError> {
    for key in ["is_decoder", "add_cross_attention"] {
        if keys.flag(key)? == Some(true) {
            return Err(
                keys.unsupported(key, "false, because an encoder attends in both directions")
            );
        }
    }
    if keys.value("quantization_config").is_some() {
        return Err(keys.unsupported("quantization_config", "an encoder that is not quantized"));
    }
    match keys.text("position_embedding_type")? {
        None | Some("absolute" | "rope" | "rotary") => Ok(()),
        Some("alibi") if family == EncoderFamily::JinaBert => Ok(()),
        Some(_) => Err(keys.unsupported("position_embedding_type", "`absolute`")),
    }
}

fn padding_id(keys: &Keys<'_>) -> Result<u32, ModelError> {
    let id = keys.count("pad_token_id")?.unwrap_or(1);
    u32::try_from(id).map_err(|_| keys.invalid("pad_token_id", "a token id"))
}

/// Layers whose queries and keys are not rotated, and which see all positions.
fn plain_layers(keys: &Keys<'_>, key: &str) -> Result<Vec<EncoderLayer>, ModelError> {
    let count = keys.required(key)?;
    if count > LAYERS_MAX {
        return Err(keys.invalid(key, &format!("an integer from 1 to {LAYERS_MAX}")));
    }
    Ok(vec![EncoderLayer::default(); count])
}

fn activation(keys: &Keys<'_>, key: &str) -> Result<EncoderActivation, ModelError> {
    match keys.text(key)? {
        None | Some("gelu") => Ok(EncoderActivation::Gelu),
        Some("gelu_new" | "gelu_pytorch_tanh" | "gelu_fast") => Ok(EncoderActivation::GeluTanh),
        Some("relu") => Ok(EncoderActivation::Relu),
        Some(_) => Err(keys.unsupported(key, "`gelu`, `gelu_new` or `relu`")),
    }
}

/// The keys of the sizes that every encoder has.
struct SizeKeys {
    hidden: &'static str,
    heads: &'static str,
    inner: &'static str,
    layers: &'static str,
}

const SIZES: SizeKeys = SizeKeys {
    hidden: "hidden_size",
    heads: "num_attention_heads",
    inner: "intermediate_size",
    layers: "num_hidden_layers",
};

/// The layers of BERT, without positions and token types. Other families change what they have of
/// their own.
fn base(
    keys: &Keys<'_>,
    family: EncoderFamily,
    sizes: &SizeKeys,
) -> Result<EncoderConfig, ModelError> {
    let (hidden_size, heads) = (keys.required(sizes.hidden)?, keys.required(sizes.heads)?);
    let head_dim = hidden_size / heads;
    Ok(EncoderConfig {
        family,
        names: TensorNames::HuggingFace,
        tasks: None,
        prefix: String::new(),
        vocab_size: keys.required("vocab_size")?,
        token_types: 0,
        hidden_size,
        max_positions: keys.size("max_position_embeddings")?.unwrap_or(512),
        learned_positions: None,
        score_bias: None,
        embedding_scale: None,
        embedding_norm: true,
        norm: EncoderNorm::Layer,
        norm_eps: 1e-12,
        norm_bias: true,
        order: NormOrder::After,
        heads,
        kv_heads: heads,
        head_dim,
        query_key_norms: QueryKeyNorms::None,
        score_scale: score_scale(head_dim),
        attention_bias: true,
        inner_size: keys.required(sizes.inner)?,
        activation: EncoderActivation::Gelu,
        inner_bias: true,
        down_bias: true,
        layers: plain_layers(keys, sizes.layers)?,
    })
}

/// BERT, and RoBERTa with a `padding_id`.
fn bert(
    keys: &Keys<'_>,
    family: EncoderFamily,
    padding_id: Option<u32>,
) -> Result<EncoderConfig, ModelError> {
    let config = base(keys, family, &SIZES)?;
    if keys.size("embedding_size")?.is_some_and(|size| size != config.hidden_size) {
        return Err(keys.unsupported("embedding_size", "hidden_size"));
    }
    let (rows, first) = (config.max_positions, padding_id.map_or(0, |id| id as usize + 1));
    if rows <= first {
        return Err(keys.invalid("max_position_embeddings", &format!("more than {first}")));
    }
    Ok(EncoderConfig {
        token_types: keys.count("type_vocab_size")?.unwrap_or(2),
        max_positions: rows - first,
        learned_positions: Some(LearnedPositions { rows, padding_id }),
        norm_eps: keys.positive_f32("layer_norm_eps")?.unwrap_or(1e-12),
        activation: activation(keys, "hidden_act")?,
        ..config
    })
}

fn mpnet(keys: &Keys<'_>) -> Result<EncoderConfig, ModelError> {
    let key = "relative_attention_num_buckets";
    if keys.size(key)?.unwrap_or(MPNET_BUCKETS) != MPNET_BUCKETS {
        return Err(keys.unsupported(key, "32"));
    }
    let bias = ScoreBias::Buckets { count: MPNET_BUCKETS, distance_max: MPNET_DISTANCE };
    // Whatever `pad_token_id` says, positions begin after 1.
    let config = bert(keys, EncoderFamily::MpNet, Some(1))?;
    Ok(EncoderConfig { score_bias: Some(bias), token_types: 0, ..config })
}

/// JinaBERT (jina-embeddings-v2): BERT with ALiBi instead of positions, and gated MLPs. The
/// configuration of models for code differs in nothing but the place of their published code;
/// [`EncoderConfig::prepare`] knows them by their tensors.
fn jina_bert(keys: &Keys<'_>) -> Result<EncoderConfig, ModelError> {
    if keys.text("position_embedding_type")? != Some("alibi") {
        return Err(keys.unsupported("position_embedding_type", "`alibi`"));
    }
    let function = match keys.text("feed_forward_type")? {
        Some("geglu") => EncoderActivation::GeluGate,
        _ => return Err(keys.unsupported("feed_forward_type", "`geglu`")),
    };
    let config = bert(keys, EncoderFamily::JinaBert, None)?;
    Ok(EncoderConfig {
        learned_positions: None,
        score_bias: Some(ScoreBias::Alibi),
        activation: function,
        inner_bias: false,
        ..config
    })
}

/// XLM-RoBERTa in the files of Jina AI: with learned positions, or with a rotary embedding and
/// matrices for single tasks (jina-embeddings-v3).
fn jina_roberta(keys: &Keys<'_>) -> Result<EncoderConfig, ModelError> {
    let config = bert(keys, EncoderFamily::JinaRoberta, Some(padding_id(keys)?))?;
    let config = EncoderConfig { tasks: tasks(keys)?, ..config };
    if keys.text("position_embedding_type")? != Some("rotary") {
        return Ok(config);
    }
    let key = "rotary_emb_base";
    let theta = keys.positive(key)?.ok_or_else(|| keys.invalid(key, "a number above 0"))?;
    let layer = EncoderRope::unscaled(theta).layer(None);
    Ok(EncoderConfig {
        max_positions: keys.required("max_position_embeddings")?,
        learned_positions: None,
        layers: vec![layer; config.layers.len()],
        ..config
    })
}

/// The tasks of a model of Jina AI.
fn tasks(keys: &Keys<'_>) -> Result<Option<TasksConfig>, ModelError> {
    let Some(names) = keys.texts("lora_adaptations")? else { return Ok(None) };
    let rank = keys.size("lora_rank")?.unwrap_or(4);
    let alpha = keys.positive("lora_alpha")?.unwrap_or(1.0);
    let names = names.into_iter().map(str::to_owned).collect();
    let scale = (alpha / rank as f64) as f32;
    Ok(Some(TasksConfig { names, rank, scale, tables: true, required: false }))
}

/// GTE: BERT with a rotary embedding instead of learned positions, and gated MLPs.
fn gte(keys: &Keys<'_>) -> Result<EncoderConfig, ModelError> {
    if keys.text("position_embedding_type")? == Some("absolute") {
        return Err(keys.unsupported("position_embedding_type", "`rope`"));
    }
    check_function(keys, "layer_norm_type", "layer_norm")?;
    check_function(keys, "hidden_act", "gelu")?;
    check_false(keys, &["logn_attention_scale", "logn_attention_clip1"])?;
    let config = bert(keys, EncoderFamily::Gte, None)?;
    let layer = gte_rope(keys, config.head_dim)?.layer(None);
    Ok(EncoderConfig {
        token_types: keys.count("type_vocab_size")?.unwrap_or(1),
        learned_positions: None,
        activation: EncoderActivation::GeluGate,
        inner_bias: false,
        layers: vec![layer; config.layers.len()],
        ..config
    })
}

/// The rotary embedding of GTE. The published files scale it by `ntk` with the factor `s`: the base
/// is `s` times as large, and the frequencies are divided by `s^(2 / head_dim)`, for texts of any
/// length.
fn gte_rope(keys: &Keys<'_>, head_dim: usize) -> Result<EncoderRope, ModelError> {
    if let Some(rope) = keys.object("rope_parameters")? {
        return Ok(EncoderRope::unscaled(unscaled_theta(&rope, 160_000.0)?));
    }
    let theta = keys.positive("rope_theta")?.unwrap_or(10_000.0);
    let Some(scaling) = keys.object("rope_scaling")? else {
        return Ok(EncoderRope::unscaled(theta));
    };
    check_absent(&scaling, &["mixed_b"])?;
    let kind = scaling.name_of(["type", "rope_type"]);
    if scaling.text(kind)? != Some("ntk") {
        return Err(scaling.unsupported(kind, "`ntk`"));
    }
    let factor = scaling.positive("factor")?.unwrap_or(1.0);
    Ok(EncoderRope { theta: theta * factor, divisor: factor.powf(2.0 / head_dim as f64) })
}

fn distilbert(keys: &Keys<'_>) -> Result<EncoderConfig, ModelError> {
    let sizes =
        SizeKeys { hidden: "dim", heads: "n_heads", inner: "hidden_dim", layers: "n_layers" };
    let config = base(keys, EncoderFamily::DistilBert, &sizes)?;
    let rows = config.max_positions;
    Ok(EncoderConfig {
        learned_positions: Some(LearnedPositions { rows, padding_id: None }),
        activation: activation(keys, "activation")?,
        ..config
    })
}

/// The factor of scores of heads of this length.
fn score_scale(head_dim: usize) -> f32 {
    1.0 / (head_dim as f32).sqrt()
}

/// The base of the rotary embedding of layers of this type. Newer files have an object with all.
fn theta(keys: &Keys<'_>, kind: &str, older: &str, default: f64) -> Result<f64, ModelError> {
    if let Some(ropes) = keys.object("rope_parameters")?
        && let Some(rope) = ropes.object(kind)?
    {
        return unscaled_theta(&rope, default);
    }
    Ok(keys.positive(older)?.unwrap_or(default))
}

/// The base of the rotary embedding that `rope` describes, which must not be scaled.
fn unscaled_theta(rope: &Keys<'_>, default: f64) -> Result<f64, ModelError> {
    if !matches!(rope.text("rope_type")?, None | Some("default")) {
        return Err(rope.unsupported("rope_type", "`default`"));
    }
    Ok(rope.positive("rope_theta")?.unwrap_or(default))
}

/// Refuses another function of the MLPs than `function`, which is the default.
fn check_function(keys: &Keys<'_>, name: &str, function: &str) -> Result<(), ModelError> {
    match keys.text(name)? {
        Some(other) if other != function => Err(keys.unsupported(name, &format!("`{function}`"))),
        _ => Ok(()),
    }
}

/// Refuses options that change the result and are not computed.
fn check_absent(keys: &Keys<'_>, names: &[&str]) -> Result<(), ModelError> {
    match names.iter().find(|name| keys.value(name).is_some()) {
        Some(name) => Err(keys.unsupported(name, "nothing")),
        None => Ok(()),
    }
}

/// Refuses flags that change the result and are not computed.
fn check_false(keys: &Keys<'_>, names: &[&str]) -> Result<(), ModelError> {
    for name in names {
        if keys.flag(name)? == Some(true) {
            return Err(keys.unsupported(name, "false"));
        }
    }
    Ok(())
}

/// Refuses numbers that change the result and are not computed.
fn check_zero(keys: &Keys<'_>, names: &[&str]) -> Result<(), ModelError> {
    for name in names {
        if keys.value(name).is_some_and(|value| *value != false)
            && keys.number(name)?.is_some_and(|number| number > 0.0)
        {
            return Err(keys.unsupported(name, "nothing"));
        }
    }
    Ok(())
}

/// `count` layers of two types, as `layer_types` says, or else `is_full` for the index of a layer.
fn alternating(
    keys: &Keys<'_>,
    count: usize,
    [full, sliding]: [EncoderLayer; 2],
    is_full: impl Fn(usize) -> bool,
) -> Result<Vec<EncoderLayer>, ModelError> {
    let mut layers = vec![full; count];
    let types = keys.texts("layer_types")?;
    if types.as_ref().is_some_and(|types| types.len() != layers.len()) {
        let expected = format!("a list of {} types (num_hidden_layers)", layers.len());
        return Err(keys.invalid("layer_types", &expected));
    }
    for (index, layer) in layers.iter_mut().enumerate() {
        let is_local = match types.as_ref().map(|types| types[index]) {
            None => !is_full(index),
            Some("sliding_attention") => true,
            Some("full_attention") => false,
            Some(_) => {
                let expected = "`full_attention` and `sliding_attention`";
                return Err(keys.unsupported("layer_types", expected));
            }
        };
        if is_local {
            *layer = sliding;
        }
    }
    Ok(layers)
}

/// Gemma 3 with attention in both directions. The window in the file has both sides.
fn gemma(keys: &Keys<'_>) -> Result<EncoderConfig, ModelError> {
    check_absent(keys, &["rope_scaling", "attn_logit_softcapping"])?;
    check_function(keys, "hidden_activation", "gelu_pytorch_tanh")?;
    let config = base(keys, EncoderFamily::Gemma, &SIZES)?;
    let global = theta(keys, "full_attention", "rope_theta", 1e6)?;
    let local = theta(keys, "sliding_attention", "rope_local_base_freq", 1e4)?;
    let window = Some(keys.size("sliding_window")?.unwrap_or(4096) / 2);
    let full = EncoderRope::unscaled(global).layer(None);
    let sliding = EncoderRope::unscaled(local).layer(window);
    let step = keys.name_of(["sliding_window_pattern", "_sliding_window_pattern"]);
    let step = keys.size(step)?.unwrap_or(6);
    let scalar = keys.positive_f32("query_pre_attn_scalar")?.unwrap_or(256.0);
    let count = config.layers.len();
    Ok(EncoderConfig {
        max_positions: keys.required("max_position_embeddings")?,
        embedding_scale: Some((config.hidden_size as f32).sqrt()),
        embedding_norm: false,
        norm: EncoderNorm::Rms { offset: 1.0 },
        norm_eps: keys.positive_f32("rms_norm_eps")?.unwrap_or(1e-6),
        norm_bias: false,
        order: NormOrder::Around,
        kv_heads: keys.size("num_key_value_heads")?.unwrap_or(config.heads),
        head_dim: keys.size("head_dim")?.unwrap_or(256),
        query_key_norms: QueryKeyNorms::Heads,
        score_scale: 1.0 / scalar.sqrt(),
        attention_bias: keys.flag("attention_bias")?.unwrap_or(false),
        activation: EncoderActivation::GeluTanhGate,
        inner_bias: false,
        down_bias: false,
        layers: alternating(keys, count, [full, sliding], |i| (i + 1).is_multiple_of(step))?,
        ..config
    })
}

/// EuroBERT: the layers of Llama without a causal mask.
fn eurobert(keys: &Keys<'_>) -> Result<EncoderConfig, ModelError> {
    check_function(keys, "hidden_act", "silu")?;
    check_absent(keys, &["rope_scaling"])?;
    let config = base(keys, EncoderFamily::EuroBert, &SIZES)?;
    // The default of the published code.
    const THETA: f64 = 10_000.0;
    let theta = match keys.object("rope_parameters")? {
        Some(rope) => unscaled_theta(&rope, THETA)?,
        None => keys.positive("rope_theta")?.unwrap_or(THETA),
    };
    let layer = EncoderRope::unscaled(theta).layer(None);
    let head_dim = keys.size("head_dim")?.unwrap_or(config.head_dim);
    let mlp_bias = keys.flag("mlp_bias")?.unwrap_or(false);
    Ok(EncoderConfig {
        max_positions: keys.size("max_position_embeddings")?.unwrap_or(8192),
        embedding_norm: false,
        norm: EncoderNorm::Rms { offset: 0.0 },
        norm_eps: keys.positive_f32("rms_norm_eps")?.unwrap_or(1e-5),
        norm_bias: false,
        order: NormOrder::Before,
        kv_heads: keys.size("num_key_value_heads")?.unwrap_or(config.heads),
        head_dim,
        score_scale: score_scale(head_dim),
        attention_bias: keys.flag("attention_bias")?.unwrap_or(false),
        activation: EncoderActivation::SiluGate,
        inner_bias: mlp_bias,
        down_bias: mlp_bias,
        layers: vec![layer; config.layers.len()],
        ..config
    })
}

fn modernbert(keys: &Keys<'_>) -> Result<EncoderConfig, ModelError> {
    check_function(keys, "hidden_activation", "gelu")?;
    check_absent(keys, &["rope_scaling"])?;
    let config = base(keys, EncoderFamily::ModernBert, &SIZES)?;
    let global = theta(keys, "full_attention", "global_rope_theta", 160_000.0)?;
    let local = theta(keys, "sliding_attention", "local_rope_theta", 10_000.0)?;
    let window = Some(keys.size("local_attention")?.unwrap_or(128) / 2);
    let full = EncoderRope::unscaled(global).layer(None);
    let sliding = EncoderRope::unscaled(local).layer(window);
    let step = keys.size("global_attn_every_n_layers")?.unwrap_or(3);
    let count = config.layers.len();
    let mlp_bias = keys.flag("mlp_bias")?.unwrap_or(false);
    Ok(EncoderConfig {
        max_positions: keys.size("max_position_embeddings")?.unwrap_or(8192),
        norm_eps: keys.positive_f32("norm_eps")?.unwrap_or(1e-5),
        norm_bias: keys.flag("norm_bias")?.unwrap_or(false),
        order: NormOrder::Before,
        attention_bias: keys.flag("attention_bias")?.unwrap_or(false),
        activation: EncoderActivation::GeluGate,
        inner_bias: mlp_bias,
        down_bias: mlp_bias,
        layers: alternating(keys, count, [full, sliding], |i| i.is_multiple_of(step))?,
        ..config
    })
}

/// Nomic BERT, whose published configurations have the names of GPT-2, and the newer ones of
/// transformers.
fn nomic_bert(keys: &Keys<'_>) -> Result<EncoderConfig, ModelError> {
    check_false(keys, &["qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"])?;
    let function = keys.name_of(["activation_function", "hidden_act"]);
    if !matches!(keys.text(function)?, None | Some("swiglu" | "silu")) {
        return Err(keys.unsupported(function, "`swiglu`"));
    }
    Ok(EncoderConfig {
        attention_bias: false,
        activation: EncoderActivation::SiluGate,
        inner_bias: false,
        down_bias: false,
        ..nomic_layers(keys, EncoderFamily::NomicBert)?
    })
}

/// Nomic BERT with a mixture of experts in the second of each `moe_every_n_layers` layers. The MLPs
/// of the others, and the experts, have no gate.
fn nomic_bert_moe(keys: &Keys<'_>) -> Result<EncoderConfig, ModelError> {
    check_function(keys, "activation_function", "gelu")?;
    check_zero(keys, &["num_shared_experts", "moe_normalize_expert_weights"])?;
    check_false(keys, &["expert_choice_router"])?;
    if keys.size("ffn_div")?.is_some_and(|divisor| divisor != 1) {
        return Err(keys.unsupported("ffn_div", "1"));
    }
    let has = |key| Ok::<_, ModelError>(keys.flag(key)?.unwrap_or(true));
    let mut config = nomic_layers(keys, EncoderFamily::NomicBertMoe)?;
    let [count, per_token, step] =
        ["num_experts", "moe_top_k", "moe_every_n_layers"].map(|key| keys.required(key));
    add_experts(&mut config.layers, step?, [count?, per_token?, config.inner_size]);
    Ok(EncoderConfig {
        attention_bias: has("qkv_proj_bias")?,
        inner_bias: has("mlp_fc1_bias")?,
        down_bias: has("mlp_fc2_bias")?,
        ..config
    })
}

/// What both kinds of Nomic BERT have.
fn nomic_layers(keys: &Keys<'_>, family: EncoderFamily) -> Result<EncoderConfig, ModelError> {
    let sizes = SizeKeys {
        hidden: keys.name_of(["n_embd", "hidden_size"]),
        heads: keys.name_of(["n_head", "num_attention_heads"]),
        inner: keys.name_of(["n_inner", "intermediate_size"]),
        layers: keys.name_of(["n_layer", "num_hidden_layers"]),
    };
    let config = base(keys, family, &sizes)?;
    check_false(
        keys,
        &["prenorm", "use_rms_norm", "rotary_emb_interleaved", "parallel_block", "causal"],
    )?;
    check_zero(keys, &["rotary_scaling_factor", "rotary_emb_scale_base"])?;
    if keys.number("rotary_emb_fraction")?.is_some_and(|fraction| fraction != 1.0) {
        return Err(keys.unsupported("rotary_emb_fraction", "1"));
    }
    let ropes = keys.object("rope_parameters")?;
    let newer = match &ropes {
        Some(ropes) => ropes.positive("rope_theta")?,
        None => None,
    };
    let theta = keys.positive("rotary_emb_base")?.or(newer).unwrap_or(1000.0);
    let layer = EncoderRope::unscaled(theta).layer(None);
    // Longer texts need the dynamic scaling of the angles, which is not implemented.
    let positions = keys.name_of(["max_trained_positions", "max_position_embeddings"]);
    let max_positions = match keys.size(positions)? {
        Some(positions) => positions,
        None => keys.size("n_positions")?.unwrap_or(2048).min(2048),
    };
    Ok(EncoderConfig {
        token_types: keys.count("type_vocab_size")?.unwrap_or(2),
        max_positions,
        norm_eps: match keys.positive_f32("layer_norm_epsilon")? {
            Some(eps) => eps,
            None => keys.positive_f32("layer_norm_eps")?.unwrap_or(1e-12),
        },
        layers: vec![layer; config.layers.len()],
        ..config
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(value: &Value) -> Result<EncoderConfig, String> {
        let family = family(value).expect("an encoder");
        parse("config.json", value, family).map_err(|error| error.to_string())
    }

    fn small(kind: &str) -> Value {
        if kind == "jina" {
            let mut config = small("xlm-roberta");
            config["auto_map"] = json!({"AutoConfig": "a--b.XLMRobertaFlashConfig"});
            config["position_embedding_type"] = json!("rotary");
            config["rotary_emb_base"] = json!(20000.0);
            config["lora_adaptations"] = json!(["a", "b"]);
            return config;
        }
        if kind == "nomic_bert_moe" {
            let mut config = small("nomic_bert");
            for (key, value) in [("num_experts", 8), ("moe_top_k", 2), ("moe_every_n_layers", 2)] {
                config[key] = json!(value);
            }
            return config;
        }
        json!({
            "model_type": kind, "vocab_size": 30, "hidden_size": 32, "num_attention_heads": 4,
            "num_hidden_layers": 3, "intermediate_size": 64, "max_position_embeddings": 20,
        })
    }

    /// Goal: positions of RoBERTa and MPNet begin after the padding token, and ModernBERT alternates
    /// between the thetas and windows of its published configuration, in both forms of the file.
    #[test]
    fn published_forms_are_read() {
        assert_eq!(read(&small("bert")).expect("valid").max_positions, 20);
        for kind in ["xlm-roberta", "mpnet"] {
            assert_eq!(read(&small(kind)).expect("valid").max_positions, 18, "{kind}");
        }
        let mut older = small("modernbert");
        older["global_rope_theta"] = json!(160000.0);
        older["local_rope_theta"] = json!(10000.0);
        older["local_attention"] = json!(128);
        let mut newer = small("modernbert");
        newer["layer_types"] = json!(["full_attention", "sliding_attention", "sliding_attention"]);
        newer["rope_parameters"] = json!({
            "full_attention": {"rope_type": "default", "rope_theta": 160000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        });
        let config = read(&older).expect("valid");
        assert_eq!(config, read(&newer).expect("valid"));
        let windows: Vec<_> = config.layers.iter().map(|layer| layer.window).collect();
        assert_eq!(windows, [None, Some(64), Some(64)]);
        assert_eq!(config.layers[0].rope, Some(EncoderRope::unscaled(160000.0)));
        let mut nomic = small("nomic_bert");
        for (newer, older) in [
            ("hidden_size", "n_embd"),
            ("num_attention_heads", "n_head"),
            ("num_hidden_layers", "n_layer"),
            ("intermediate_size", "n_inner"),
        ] {
            nomic[older] = nomic[newer].take();
        }
        nomic["rotary_emb_base"] = json!(1000);
        let config = read(&nomic).expect("valid");
        assert_eq!(
            (config.inner_size, config.layers[0].rope),
            (64, Some(EncoderRope::unscaled(1000.0)))
        );
        let config = read(&small("nomic_bert_moe")).expect("valid");
        let counts: Vec<_> =
            config.layers.iter().map(|layer| layer.experts.map(|own| own.count)).collect();
        assert_eq!(counts, [None, Some(8), None]);
        let config = read(&small("jina")).expect("valid");
        assert_eq!((config.max_positions, config.learned_positions), (20, None));
        let tasks = config.tasks.expect("tasks");
        assert_eq!(
            (&tasks.names[..], tasks.rank, tasks.scale),
            (&["a", "b"].map(str::to_owned)[..], 4, 0.25)
        );
    }

    /// Goal: values out of range, and options that would change the output, are refused by their key
    /// without a panic or a large allocation.
    #[test]
    fn other_values_are_refused_by_their_key() {
        for (kind, key, value) in [
            ("bert", "hidden_size", json!(0)),
            ("bert", "hidden_size", json!(1 << 29)),
            ("bert", "hidden_size", json!("32")),
            ("bert", "num_attention_heads", json!(5)),
            ("bert", "num_attention_heads", json!(64)),
            ("bert", "num_hidden_layers", json!(1 << 29)),
            ("bert", "vocab_size", json!(1 << 29)),
            ("bert", "max_position_embeddings", json!(1 << 29)),
            ("bert", "type_vocab_size", json!(17)),
            ("bert", "layer_norm_eps", json!(0)),
            ("bert", "hidden_act", json!("mish")),
            ("bert", "is_decoder", json!(true)),
            ("bert", "position_embedding_type", json!("alibi")),
            ("bert", "quantization_config", json!({})),
            ("xlm-roberta", "max_position_embeddings", json!(2)),
            ("xlm-roberta", "pad_token_id", json!(1 << 20)),
            ("mpnet", "relative_attention_num_buckets", json!(64)),
            ("modernbert", "layer_types", json!(["full_attention"])),
            ("modernbert", "layer_types", json!(["a", "b", "c"])),
            ("modernbert", "hidden_activation", json!("relu")),
            ("modernbert", "local_rope_theta", json!(-1)),
            ("nomic_bert", "prenorm", json!(true)),
            ("nomic_bert", "rotary_emb_fraction", json!(0.5)),
            ("nomic_bert_moe", "num_experts", json!(1 << 20)),
            ("nomic_bert_moe", "moe_top_k", json!(9)),
            ("nomic_bert_moe", "moe_every_n_layers", json!(0)),
            ("nomic_bert_moe", "moe_normalize_expert_weights", json!(1)),
            ("nomic_bert_moe", "moe_normalize_expert_weights", json!(true)),
            ("nomic_bert_moe", "num_shared_experts", json!(1)),
            ("nomic_bert_moe", "expert_choice_router", json!(true)),
            ("nomic_bert_moe", "activation_function", json!("swiglu")),
            ("nomic_bert_moe", "ffn_div", json!(2)),
            ("eurobert", "hidden_act", json!("gelu")),
            ("eurobert", "head_dim", json!(16)),
            ("eurobert", "num_key_value_heads", json!(3)),
            ("eurobert", "rope_scaling", json!({"factor": 2.0})),
            ("eurobert", "rope_parameters", json!({"rope_type": "yarn"})),
            ("new", "position_embedding_type", json!("absolute")),
            ("new", "layer_norm_type", json!("rms_norm")),
            ("new", "logn_attention_scale", json!(true)),
            ("new", "rope_scaling", json!({"type": "dynamic", "factor": 2.0})),
            ("gte", "rope_parameters", json!({"rope_type": "yarn"})),
            ("jina", "rotary_emb_base", Value::Null),
            ("jina", "position_embedding_type", json!("relative")),
            ("jina", "lora_adaptations", json!([])),
            ("jina", "lora_adaptations", json!(vec!["a"; 65])),
            ("jina", "lora_adaptations", json!("a")),
            ("jina", "lora_rank", json!(1 << 11)),
            ("jina", "lora_alpha", json!(0)),
        ] {
            let mut config = small(kind);
            config[key] = value.clone();
            let error = read(&config).expect_err(key);
            let related = [
                "num_attention_heads",
                "max_position_embeddings",
                "num_experts_per_tok",
                "rope_type",
                "rope_scaling.type",
            ];
            let named = error.contains(&format!("`{key}`"))
                || related.iter().any(|key| error.contains(key));
            assert!(named, "{key}: {value}: {error}");
        }
    }
}
