//! Parses the `config.json` of Moondream 2 and 3. The object `config` has the keys of the model's
//! parts: `text`, `vision`, `region` and `tokenizer`. In the published models it is empty, because
//! the published code has the defaults.

use super::super::architecture::Description;
use super::super::{
    Activation, Architecture, AttentionConfig, DecoderConfig, ExpertScores, ExpertsConfig,
    FeedForwardConfig, GateFunction, Keys, KeysAndValues, LAYERS_MAX, LayerConfig, MlpConfig,
    NormsConfig, PlainFunction, Rope, RopeScaling,
};
use super::{ParsedConfig, other_keys};
use crate::error::ModelError;

/// Parses the configuration of the text model and the special tokens.
pub(super) fn parse(row: &Description, root: &Keys<'_>) -> Result<ParsedConfig, ModelError> {
    let parts = root.object("config")?;
    let part = |name: &str| match &parts {
        Some(parts) => parts.object(name),
        None => Ok(None),
    };
    let (text, tokenizer) = (part("text")?, part("tokenizer")?);
    let decoder = decoder(row, text.as_ref(), root)?;
    decoder.check(root.file)?;
    let ids = |key: &str, default: &[u32]| match &tokenizer {
        Some(tokenizer) => Ok(tokenizer.token_ids(key)?.unwrap_or_else(|| default.to_vec())),
        None => Ok::<_, ModelError>(default.to_vec()),
    };
    let bos = ids("bos_id", row.defaults.bos_token_id.as_slice())?;
    Ok(ParsedConfig {
        decoder,
        eos_token_ids: ids("eos_id", row.defaults.eos_token_ids)?,
        default_eos: false,
        bos_token_id: bos.first().copied(),
        quantization: None,
        may_lack_head: false,
        notes: other_keys::notes(root),
    })
}

fn decoder(
    row: &Description,
    text: Option<&Keys<'_>>,
    root: &Keys<'_>,
) -> Result<DecoderConfig, ModelError> {
    text.map_or(Ok(()), refuse_options)?;
    let defaults = &row.defaults;
    let size = |key: &str, default: usize| match text {
        Some(text) => text.size(key).map(|given| given.unwrap_or(default)),
        None => Ok(default),
    };
    let hidden_size = size("dim", defaults.hidden_size)?;
    let num_heads = size("n_heads", defaults.num_heads)?;
    let head_dim = hidden_size / num_heads;
    let theta = text.map_or(Ok(None), |text| text.positive("rope_theta"))?;
    let theta = theta.unwrap_or(row.rotation.theta);
    let is_selective = text.map_or(Ok(None), |text| text.flag("tau_attn"))?;
    let attention = AttentionConfig {
        heads: num_heads,
        kv_heads: size("n_kv_heads", num_heads)?,
        head_dim,
        rotary_dim: head_dim / 2,
        rope: Some(0),
        sliding_window: None,
        keys_and_values: KeysAndValues::Own,
        qkv_bias: true,
        output_bias: true,
        output_gate: false,
        qk_norm: None,
        value_norm: false,
        selective: is_selective.unwrap_or(has_experts(row)),
        sinks: false,
        scale: (head_dim as f64).powf(-0.5) as f32,
        softcap: None,
        query_scaling: None,
        output_factor: 1.0,
    };
    let mlp = MlpConfig {
        width: size("ff_dim", defaults.intermediate_size)?,
        activation: Activation::Plain(PlainFunction::GeluTanh),
        bias: true,
        output_factor: 1.0,
    };
    let layer = LayerConfig::new(attention, mlp);
    let mut layers = vec![layer; size("n_layers", defaults.num_layers)?];
    experts(row, text, &mut layers)?;
    Ok(DecoderConfig {
        architecture: row.architecture,
        vocab_size: size("vocab_size", defaults.vocab_size)?,
        hidden_size,
        norms: NormsConfig::of(row, defaults.rms_norm_eps as f32),
        max_positions: size("max_context", defaults.max_positions)?,
        tie_word_embeddings: false,
        head_bias: true,
        per_layer_input: None,
        layer_scales: false,
        embedding_scale: None,
        residual_scale: None,
        logit_scale: None,
        logit_softcap: None,
        ropes: vec![Rope { theta, scaling: RopeScaling::None, sections: None }],
        layers,
        dtype: super::dtype(root, root)?,
    })
}

/// Whether the published model has experts and selective attention.
fn has_experts(row: &Description) -> bool {
    row.architecture == Architecture::Moondream3
}

/// Replaces the MLP of all layers from `start_layer` on with a mixture of experts, if the model has
/// one.
fn experts(
    row: &Description,
    text: Option<&Keys<'_>>,
    layers: &mut [LayerConfig],
) -> Result<(), ModelError> {
    let given = match text {
        Some(text) => text.object("moe")?,
        None => None,
    };
    let is_null = given.is_none() && text.is_some_and(|text| text.given("moe"));
    if is_null || given.is_none() && !has_experts(row) {
        return Ok(());
    }
    let size = |key: &str, default: usize| match &given {
        Some(given) => given.count(key).map(|given| given.unwrap_or(default)),
        None => Ok(default),
    };
    let first = size("start_layer", 4)?;
    let experts = ExpertsConfig {
        count: size("num_experts", 64)?,
        per_token: size("experts_per_token", 8)?,
        width: size("expert_inner_dim", 1024)?,
        activation: GateFunction::GeluTanh.into(),
        bias: false,
        scores: ExpertScores::Softmax,
        normalized: true,
        router_bias: true,
        groups: None,
        scale: 1.0,
        shared_width: None,
        shared_gate: false,
        scaled_router: false,
        shifted: true,
    };
    let with_experts = layers.iter_mut().skip(first);
    with_experts.for_each(|layer| layer.mlp = Some(FeedForwardConfig::Experts(experts)));
    Ok(())
}

/// Refuses options that are not implemented, and sizes that are not compatible.
fn refuse_options(text: &Keys<'_>) -> Result<(), ModelError> {
    let layers = text.size("n_layers")?;
    if layers.is_some_and(|layers| layers > LAYERS_MAX) {
        return Err(text.invalid("n_layers", &format!("at most {LAYERS_MAX}")));
    }
    let (width, heads) = (text.size("dim")?, text.size("n_heads")?);
    if let (Some(width), Some(heads)) = (width, heads)
        && !width.is_multiple_of(4 * heads)
    {
        // Half of each head is rotated, in pairs.
        return Err(text.invalid("dim", &format!("a multiple of {}, 4 * n_heads", 4 * heads)));
    }
    if text.value("group_size").is_some() {
        return Err(text.unsupported("group_size", "null (weights that are not quantized)"));
    }
    Ok(())
}
