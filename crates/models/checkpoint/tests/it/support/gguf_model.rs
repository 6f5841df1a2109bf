//! Converts a model to GGUF in the same way as llama.cpp's converter.

use candle_core::quantized::QTensor;
use candle_core::{Device, Tensor as CandleTensor};
use stolon_checkpoint::config::{NormKind, NormPlacement, QkNorm, TensorRole, TensorSpec};
use stolon_checkpoint::{
    Activation, Architecture, AttentionConfig, DecoderConfig, FeedForwardConfig, LatentConfig,
    LayerConfig, MixerConfig, RopeScaling, TensorType, Weights,
};

#[path = "gguf_delta_net.rs"]
mod gguf_delta_net;
#[path = "gguf_latent.rs"]
mod gguf_latent;

use super::candle_types::candle_type;
use super::gguf_writer::{GgufWriter, Meta};

/// The bytes of `values` in the type `dtype`, or arbitrary bytes of the same length that
/// differ between rows if candle cannot quantize to it.
pub(crate) fn quantized(values: &[f32], shape: &[usize], dtype: TensorType) -> Vec<u8> {
    let Some(candle_type) = candle_type(dtype) else {
        let columns = shape[shape.len() - 1];
        let row_bytes = dtype.bytes_of(columns).unwrap();
        let bytes = |row: &[f32]| row.iter().flat_map(|value| value.to_le_bytes()).collect();
        let rows = values.chunks(columns).map(bytes);
        return rows.flat_map(|row: Vec<u8>| row.into_iter().take(row_bytes)).collect();
    };
    let tensor = CandleTensor::from_slice(values, shape, &Device::Cpu).unwrap();
    let quantized = QTensor::quantize(&tensor, candle_type).unwrap();
    quantized.data().unwrap().into_owned()
}

pub(crate) fn floats(weights: &Weights, name: &str, shape: &[usize]) -> Vec<f32> {
    let tensor = weights.tensor(name, shape).unwrap();
    assert_eq!(tensor.dtype, TensorType::F32);
    tensor.bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// The converter's order of the rows of Llama's q and k: within each head, row `i` of the first
/// half is followed by row `i` of the second half. Of GLM-4, this applies to the rows that are
/// rotated.
fn interleaved(values: &[f32], heads: usize, head_rows: usize, rotary_dim: usize) -> Vec<f32> {
    let half = rotary_dim / 2;
    let width = values.len() / (heads * head_rows);
    let mut out = Vec::new();
    for head in 0..heads {
        for i in 0..half {
            for second in [0, half] {
                let row = head * head_rows + second + i;
                out.extend_from_slice(&values[row * width..(row + 1) * width]);
            }
        }
        let rest = (head * head_rows + 2 * half) * width..(head + 1) * head_rows * width;
        out.extend_from_slice(&values[rest]);
    }
    out
}

/// The GGUF name of a tensor.
fn gguf_name(name: &str, post_norms: bool) -> String {
    let top = [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.embed_tokens_per_layer.weight", "per_layer_token_embd.weight"),
        ("model.per_layer_model_projection.weight", "per_layer_model_proj.weight"),
        ("model.per_layer_projection_norm.weight", "per_layer_proj_norm.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("model.norm.bias", "output_norm.bias"),
        ("lm_head.weight", "output.weight"),
    ];
    if let Some((_, gguf)) = top.iter().find(|(hf, _)| *hf == name) {
        return (*gguf).to_owned();
    }
    let (layer, rest) = name.strip_prefix("model.layers.").unwrap().split_once('.').unwrap();
    if rest == "layer_scalar" {
        return format!("blk.{layer}.layer_output_scale.weight");
    }
    let (module, kind) = rest.rsplit_once('.').unwrap();
    let gguf = match module {
        "per_layer_input_gate" => "inp_gate",
        "per_layer_projection" => "proj",
        "post_per_layer_input_norm" => "post_norm",
        "post_feedforward_layernorm_1" => "post_ffw_norm_1",
        "pre_feedforward_layernorm_2" => "pre_ffw_norm_2",
        "post_feedforward_layernorm_2" => "post_ffw_norm_2",
        "router" if kind == "scale" => return format!("blk.{layer}.ffn_gate_inp.scale"),
        "router" => return format!("blk.{layer}.ffn_down_exps.scale"),
        "router.proj" => "ffn_gate_inp",
        "input_layernorm" => "attn_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.o_proj" => "attn_output",
        "self_attn.gate_proj" => "attn_gate",
        "self_attn.q_a_proj" => "attn_q_a",
        "self_attn.q_a_layernorm" => "attn_q_a_norm",
        "self_attn.q_b_proj" => "attn_q_b",
        "self_attn.kv_a_proj_with_mqa" => "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm" => "attn_kv_a_norm",
        head if head.starts_with("self_attn.k_b_proj.") => "attn_k_b",
        head if head.starts_with("self_attn.v_b_proj.") => "attn_v_b",
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "self_attn" if kind == "sinks" => return format!("blk.{layer}.attn_sinks.weight"),
        "conv.conv" => "shortconv.conv",
        "conv.out_proj" => "shortconv.out_proj",
        "linear_attn" | "self_attn" | "mamba" if kind == "A_log" => {
            return format!("blk.{layer}.ssm_a");
        }
        "mamba" if kind == "D" => return format!("blk.{layer}.ssm_d"),
        "linear_attn" | "self_attn" | "mamba" => return format!("blk.{layer}.ssm_dt.bias"),
        "mamba.conv1d" => "ssm_conv1d",
        "mamba.norm" => "ssm_norm",
        "mamba.out_proj" => "ssm_out",
        "linear_attn.in_proj_qkv" => "attn_qkv",
        "linear_attn.in_proj_z" => "attn_gate",
        "linear_attn.in_proj_b" => "ssm_beta",
        "linear_attn.in_proj_a" => "ssm_alpha",
        "linear_attn.conv1d" => "ssm_conv1d",
        "linear_attn.norm" => "ssm_norm",
        "linear_attn.out_proj" => "ssm_out",
        "self_attn.q_conv1d" => "ssm_conv1d_q",
        "self_attn.k_conv1d" => "ssm_conv1d_k",
        "self_attn.v_conv1d" => "ssm_conv1d_v",
        "self_attn.f_a_proj" => "ssm_f_a",
        "self_attn.f_b_proj" => "ssm_f_b",
        "self_attn.g_a_proj" => "ssm_g_a",
        "self_attn.g_b_proj" => "ssm_g_b",
        "self_attn.b_proj" => "ssm_beta",
        "self_attn.o_norm" => "ssm_norm",
        "post_attention_layernorm" if post_norms => "post_attention_norm",
        "post_attention_layernorm" | "pre_feedforward_layernorm" => "ffn_norm",
        "post_self_attn_layernorm" => "post_attention_norm",
        "post_feedforward_layernorm" | "post_mlp_layernorm" => "post_ffw_norm",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        "mlp" if kind == "expert_bias" => return format!("blk.{layer}.exp_probs_b.bias"),
        "mlp.gate" => "ffn_gate_inp",
        "mlp.shared_expert_gate" => "ffn_gate_inp_shexp",
        "mlp.shared_expert.gate_proj" => "ffn_gate_shexp",
        "mlp.shared_expert.up_proj" => "ffn_up_shexp",
        "mlp.shared_expert.down_proj" => "ffn_down_shexp",
        expert if expert.contains("experts.") => match expert.rsplit('.').next() {
            Some("gate_proj") => "ffn_gate_exps",
            Some("up_proj") => "ffn_up_exps",
            _ => "ffn_down_exps",
        },
        other => panic!("{other}"),
    };
    format!("blk.{layer}.{gguf}.{kind}")
}

/// The number of query heads and of KV heads, and of the elements of each and those of them that
/// are rotated, in the first layer with attention.
fn heads(config: &DecoderConfig) -> [usize; 4] {
    let sizes = |mixer: &MixerConfig| match mixer {
        MixerConfig::Attention(AttentionConfig {
            heads, kv_heads, head_dim, rotary_dim, ..
        }) => Some([*heads, *kv_heads, *head_dim, *rotary_dim]),
        MixerConfig::Latent(LatentConfig { heads, sizes, .. }) => {
            Some([*heads, 1, sizes.kept_dim(), sizes.rotary_dim])
        }
        _ => None,
    };
    config.mixers().find_map(sizes).expect("attention")
}

/// The width of the first MLP for all tokens, or of the experts if there is none.
fn width(config: &DecoderConfig) -> usize {
    let mut mlps = config.layers.iter().filter_map(|layer| layer.mlp.as_ref()?.dense());
    let dense = mlps.next().map(|mlp| mlp.width);
    dense.or(config.experts().map(|experts| experts.width)).expect("an MLP")
}

/// Adds the metadata of the configuration.
fn metadata(config: &DecoderConfig, file: &mut GgufWriter) {
    let prefix = match config.architecture {
        Architecture::Gemma3 => "gemma3",
        Architecture::Gemma4 => "gemma4",
        Architecture::MuseGlimmer => "muse-glimmer",
        Architecture::Mistral | Architecture::Mixtral => "llama",
        Architecture::Qwen2Moe => "qwen2moe",
        Architecture::Qwen3Moe => "qwen3moe",
        Architecture::GptOss => "gpt-oss",
        Architecture::Olmo3 => "olmo2",
        Architecture::GraniteHybrid if config.mamba2().is_some() => "granitehybrid",
        Architecture::GraniteHybrid => "granite",
        Architecture::Glm4Moe => "glm4moe",
        Architecture::Mistral4 => "mistral4",
        Architecture::KimiLinear => "kimi-linear",
        _ if config.latent().is_some() => "deepseek2",
        Architecture::Ministral3 => "mistral3",
        Architecture::Lfm2Moe => "lfm2moe",
        Architecture::NemotronH if config.experts().is_some() => "nemotron_h_moe",
        Architecture::FalconH1 => "falcon-h1",
        Architecture::Qwen35 => "qwen35",
        Architecture::Qwen35Moe => "qwen35moe",
        Architecture::Qwen3Next => "qwen3next",
        Architecture::Qwen3Vl => "qwen3vl",
        Architecture::Qwen3VlMoe => "qwen3vlmoe",
        other => other.name(),
    };
    file.set("general.architecture", Meta::Text(prefix.into()));
    if let Some(sections) = config.ropes[0].sections {
        let sections = sections.iter().chain(&[0]).map(|pairs| *pairs as i32).collect();
        file.set(&format!("{prefix}.rope.dimension_sections"), Meta::I32s(sections));
    }
    let [heads, kv_heads, head_dim, rotary_dim] = heads(config);
    let numbers = [
        ("context_length", config.max_positions),
        ("embedding_length", config.hidden_size),
        ("block_count", config.layers.len()),
        ("feed_forward_length", width(config)),
        ("attention.head_count", heads),
        ("attention.head_count_kv", kv_heads),
        ("attention.key_length", head_dim),
        ("attention.value_length", head_dim),
        ("rope.dimension_count", rotary_dim),
    ];
    let nemotron = config.architecture == Architecture::NemotronH;
    for (key, number) in numbers {
        let is_hybrid = config.convolution().is_some()
            || config.mamba2().is_some()
            || config.architecture == Architecture::KimiLinear;
        let by_layer = is_hybrid && config.architecture != Architecture::FalconH1;
        let list = |has: fn(&LayerConfig) -> bool| {
            let entry = |layer: &LayerConfig| if has(layer) { number as i32 } else { 0 };
            Meta::I32s(config.layers.iter().map(entry).collect())
        };
        let value = match key {
            "attention.head_count_kv" if by_layer => list(LayerConfig::has_attention),
            "feed_forward_length" if nemotron => list(|layer| layer.mlp.is_some()),
            // It is computed without the key `head_dim`.
            "rope.dimension_count" if nemotron => Meta::U32((config.hidden_size / heads) as u32),
            _ if config.architecture == Architecture::Gemma4 => of_gemma4(config, key, number),
            _ => Meta::U32(number as u32),
        };
        file.set(&format!("{prefix}.{key}"), value);
    }
    if config.architecture == Architecture::Gemma4 {
        let attentions = config.layers.iter().filter_map(LayerConfig::attention);
        let shared = attentions.filter(|attention| !attention.has_own_kv()).count();
        let per_layer = config.per_layer_input.map_or(0, |input| input.width);
        for (key, number) in [
            ("attention.key_length_swa", head_dim),
            ("attention.value_length_swa", head_dim),
            ("rope.dimension_count_swa", head_dim),
            ("attention.shared_kv_layers", shared),
            ("embedding_length_per_layer_input", per_layer),
        ] {
            file.set(&format!("{prefix}.{key}"), Meta::U32(number as u32));
        }
    }
    if let Architecture::Lfm2Moe | Architecture::Glm4Moe = config.architecture {
        file.set(&format!("{prefix}.expert_gating_func"), Meta::U32(2));
        file.set(&format!("{prefix}.leading_dense_block_count"), Meta::U32(1));
    }
    if let Some(convolution) = config.convolution() {
        file.set(&format!("{prefix}.shortconv.l_cache"), Meta::U32(convolution.taps as u32));
    }
    if let Some(delta_net) = config.delta_net() {
        gguf_delta_net::metadata(delta_net, prefix, file);
    }
    if let Some(mamba2) = config.mamba2() {
        for (key, number) in [
            ("ssm.conv_kernel", mamba2.taps),
            ("ssm.state_size", mamba2.state_dim),
            ("ssm.group_count", mamba2.groups),
            ("ssm.inner_size", mamba2.heads * mamba2.head_dim),
            ("ssm.time_step_rank", mamba2.heads),
        ] {
            file.set(&format!("{prefix}.{key}"), Meta::U32(number as u32));
        }
    }
    if let Some(experts) = config.experts() {
        let shared = experts.shared_width;
        let glm = config.architecture == Architecture::Glm4Moe || config.latent().is_some();
        let numbers = [
            ("expert_count", Some(experts.count)),
            ("expert_used_count", Some(experts.per_token)),
            ("expert_feed_forward_length", Some(experts.width)),
            ("expert_shared_feed_forward_length", shared.filter(|_| !glm)),
            ("expert_shared_count", shared.filter(|_| glm).map(|width| width / experts.width)),
        ];
        if experts.scale != 1.0 {
            file.set(&format!("{prefix}.expert_weights_scale"), Meta::F32(experts.scale));
        }
        for (key, number) in numbers {
            if let Some(number) = number {
                file.set(&format!("{prefix}.{key}"), Meta::U32(number as u32));
            }
        }
    }
    gguf_latent::metadata(config, prefix, file);
    file.set(&format!("{prefix}.rope.freq_base"), Meta::F32(config.ropes[0].theta as f32));
    let kind = if config.norms.kind == NormKind::Rms { "layer_norm_rms" } else { "layer_norm" };
    let epsilon = format!("{prefix}.attention.{kind}_epsilon");
    file.set(&epsilon, Meta::F32(config.norms.eps));
    let granite = matches!(
        config.architecture,
        Architecture::Granite | Architecture::GraniteHybrid | Architecture::GraniteMoe
    );
    let logit_scale = match config.architecture {
        Architecture::Cohere2 | Architecture::MuseGlimmer => config.logit_scale,
        Architecture::FalconH1 => None,
        _ => config.logit_scale.map(|factor| 1.0 / factor),
    };
    for (key, number) in [
        (
            "attention.scale",
            config.attention().filter(|_| granite).map(|attention| attention.scale),
        ),
        ("embedding_scale", config.embedding_scale.filter(|_| granite)),
        ("residual_scale", config.residual_scale),
        ("logit_scale", logit_scale),
        ("attn_logit_softcapping", config.attention().and_then(|attention| attention.softcap)),
        ("final_logit_softcapping", config.logit_softcap),
    ] {
        if let Some(number) = number {
            file.set(&format!("{prefix}.{key}"), Meta::F32(number));
        }
    }
    let scaling = config.attention().and_then(|attention| attention.query_scaling);
    let of_latent = config.latent().and_then(|latent| latent.query_scaling);
    if let Some(scaling) = scaling.or(of_latent) {
        file.set(&format!("{prefix}.attention.temperature_scale"), Meta::F32(scaling.beta));
        if config.latent().is_none() {
            file.set(&format!("{prefix}.rope.scaling.yarn_log_multiplier"), Meta::F32(1.0));
        }
    }
    if let Some(window) = config.layers[0].sliding_window() {
        file.set(&format!("{prefix}.attention.sliding_window"), Meta::U32(window as u32));
        let pattern = config.layers.iter().map(|l| l.sliding_window().is_some()).collect();
        file.set(&format!("{prefix}.attention.sliding_window_pattern"), Meta::Bools(pattern));
    }
    match &config.ropes[0].scaling {
        RopeScaling::Divisors { divisors, attention_factor, short } => {
            if let Some(short) = short {
                let key = format!("{prefix}.rope.scaling.original_context_length");
                file.set(&key, Meta::U32(short.length as u32));
            }
            file.set(&format!("{prefix}.rope.scaling.attn_factor"), Meta::F32(*attention_factor));
            let bytes: Vec<u8> = divisors.iter().flat_map(|d| d.to_le_bytes()).collect();
            for name in ["rope_factors_short.weight", "rope_factors_long.weight"] {
                file.tensors.push((name.into(), vec![divisors.len()], 0, bytes.clone()));
            }
        }
        RopeScaling::Linear { factor } => {
            file.set(&format!("{prefix}.rope.scaling.type"), Meta::Text("linear".into()));
            file.set(&format!("{prefix}.rope.scaling.factor"), Meta::F32(*factor as f32));
        }
        RopeScaling::Yarn { factor, original_max_position_embeddings: original, .. } => {
            file.set(&format!("{prefix}.rope.scaling.type"), Meta::Text("yarn".into()));
            file.set(&format!("{prefix}.rope.scaling.factor"), Meta::F32(*factor as f32));
            let key = format!("{prefix}.rope.scaling.original_context_length");
            file.set(&key, Meta::U32(*original as u32));
        }
        RopeScaling::FirstPairs { pairs, .. } => {
            let count = config.rope_dim(0).expect("attention") / 2;
            let divisor = |pair: usize| if pair < *pairs { 1.0_f32 } else { 1e30 };
            let bytes = (0..count).flat_map(|pair| divisor(pair).to_le_bytes()).collect();
            file.tensors.push(("rope_freqs.weight".into(), vec![count], 0, bytes));
        }
        RopeScaling::Llama3 { .. } => {
            let plain =
                stolon_checkpoint::Rope { scaling: RopeScaling::None, ..config.ropes[0].clone() };
            let plain = plain.inverse_frequencies(head_dim);
            let scaled = config.ropes[0].inverse_frequencies(head_dim);
            let divisors = plain.iter().zip(&scaled).flat_map(|(p, s)| (p / s).to_le_bytes());
            let shape = vec![head_dim / 2];
            file.tensors.push(("rope_freqs.weight".into(), shape, 0, divisors.collect()));
        }
        _ => {}
    }
}

/// A number of the metadata of Gemma 4, whose layers may differ.
fn of_gemma4(config: &DecoderConfig, key: &str, number: usize) -> Meta {
    let layers = || 0..config.layers.len();
    let attention = |layer: usize| config.layers[layer].attention().expect("attention");
    let list =
        |of: &dyn Fn(usize) -> usize| Meta::I32s(layers().map(|layer| of(layer) as i32).collect());
    match key {
        "attention.head_count_kv" => list(&|layer| attention(layer).kv_heads),
        "feed_forward_length" => {
            let width = |layer: &LayerConfig| layer.mlp.as_ref()?.dense().map(|mlp| mlp.width);
            list(&|layer| width(&config.layers[layer]).expect("an MLP"))
        }
        "attention.key_length" | "attention.value_length" | "rope.dimension_count" => {
            Meta::U32(attention(config.layers.len() - 1).head_dim as u32)
        }
        _ => Meta::U32(number as u32),
    }
}

/// The type in which the converter stores a tensor in a file with matrices in `dtype`.
pub(crate) fn stored_type(spec: &TensorSpec, dtype: TensorType) -> TensorType {
    match spec.role {
        TensorRole::Embedding | TensorRole::Table | TensorRole::Matrix => dtype,
        TensorRole::Router
        | TensorRole::Norm
        | TensorRole::PlainNorm
        | TensorRole::Bias
        | TensorRole::Taps => TensorType::F32,
    }
}

/// The GGUF name of a tensor with the rows of several matrices, of which `name` is one, as Phi-3 and
/// LFM2 have them, and whether `name` is the first of them.
fn fused_name(name: &str) -> Option<(String, bool)> {
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let (fused, first) = match rest {
        "self_attn.q_proj.weight" => ("attn_qkv", true),
        "self_attn.k_proj.weight" | "self_attn.v_proj.weight" => ("attn_qkv", false),
        "conv.in_proj.factor.weight" => ("shortconv.in_proj", true),
        "conv.in_proj.gate.weight" | "conv.in_proj.x.weight" => ("shortconv.in_proj", false),
        "mamba.in_proj.gate.weight" => ("ssm_in", true),
        "mamba.in_proj.xbc.weight" | "mamba.in_proj.step.weight" => ("ssm_in", false),
        "mlp.gate_proj.weight" => ("ffn_up", true),
        "mlp.up_proj.weight" => ("ffn_up", false),
        _ => return None,
    };
    Some((format!("blk.{layer}.{fused}.weight"), first))
}

/// Whether a tensor belongs to a shared expert without a gate.
fn is_shared(config: &DecoderConfig, name: &str) -> bool {
    let layer = name.split('.').nth(2).and_then(|layer| layer.parse::<usize>().ok());
    let has_experts = layer.is_some_and(|layer| config.layers[layer].has_experts());
    let matrices = [".mlp.gate_proj.", ".mlp.up_proj.", ".mlp.down_proj."];
    let is_next_to = config.architecture == Architecture::Gemma4;
    has_experts && !is_next_to && matrices.iter().any(|matrix| name.contains(matrix))
}

/// The factor by which the converter multiplies a tensor of Falcon-H1.
fn multiplier(config: &DecoderConfig, name: &str) -> f32 {
    if config.architecture != Architecture::FalconH1 {
        return 1.0;
    }
    let attention = config.attention().expect("attention");
    let mamba2 = config.mamba2().expect("Mamba-2");
    let Some(FeedForwardConfig::Dense(mlp)) = config.layers[0].mlp else { panic!("an MLP") };
    let Activation::Gated(gate) = mlp.activation else { panic!("a gate") };
    let [gates, values, keys, queries, steps] = mamba2.input_factors;
    // The writer takes values, keys and queries as one matrix.
    assert!(values == keys && keys == queries);
    let scores = attention.scale * (attention.head_dim as f32).sqrt();
    let factors = [
        ("embed_tokens", config.embedding_scale.unwrap_or(1.0)),
        ("lm_head", config.logit_scale.unwrap_or(1.0)),
        ("k_proj", scores),
        ("o_proj", attention.output_factor),
        ("mamba.out_proj", mamba2.output_factor),
        ("in_proj.gate", gates),
        ("in_proj.xbc", values),
        ("in_proj.step", steps),
        ("mlp.gate_proj", gate.factor),
        ("mlp.down_proj", mlp.output_factor),
    ];
    factors.into_iter().find(|(part, _)| name.contains(part)).map_or(1.0, |(_, factor)| factor)
}

/// Adds the norms of queries and keys of Muse Glimmer, which the converter writes: the factor of the
/// queries, and 1.
fn add_constant_norms(config: &DecoderConfig, file: &mut GgufWriter) {
    let attentions = config.layers.iter().map(LayerConfig::attention).enumerate();
    for (layer, attention) in attentions {
        let Some(attention) = attention else { continue };
        if attention.qk_norm != Some(QkNorm::HeadWithoutWeights) {
            continue;
        }
        let dim = attention.head_dim;
        let factor = attention.scale * (dim as f32).sqrt();
        for (name, number) in [("attn_q_norm", factor), ("attn_k_norm", 1.0_f32)] {
            let bytes = number.to_le_bytes().repeat(dim);
            file.tensors.push((format!("blk.{layer}.{name}.weight"), vec![dim], 0, bytes));
        }
    }
}

/// The model as a GGUF file with matrices in `dtype`.
pub(crate) fn gguf_of(config: &DecoderConfig, weights: &Weights, dtype: TensorType) -> GgufWriter {
    let mut file = GgufWriter::default();
    metadata(config, &mut file);
    let llama = matches!(
        config.architecture,
        Architecture::Llama
            | Architecture::Mistral
            | Architecture::Ministral3
            | Architecture::Mixtral
            | Architecture::Granite
            | Architecture::GraniteHybrid
            | Architecture::GraniteMoe
            | Architecture::Cohere2
            | Architecture::SmolLm3
            | Architecture::MuseGlimmer
            | Architecture::Glm4
            | Architecture::Ernie45
    );
    let [heads, kv_heads, head_dim, rotary_dim] = heads(config);
    add_constant_norms(config, &mut file);
    for spec in config.tensors() {
        let Some((mut values, mut shape)) = gguf_delta_net::converted(config, weights, &spec)
        else {
            continue;
        };
        let factor = multiplier(config, &spec.name);
        values.iter_mut().for_each(|value| *value *= factor);
        if llama && spec.name.contains("q_proj") {
            values = interleaved(&values, heads, head_dim, rotary_dim);
        }
        if llama && spec.name.contains("k_proj") {
            values = interleaved(&values, kv_heads, head_dim, rotary_dim);
        }
        values = gguf_latent::rows(config, &spec, values);
        if spec.role == TensorRole::Norm {
            values.iter_mut().for_each(|value| *value += config.norms.offset);
        }
        if spec.name.ends_with("mamba.A_log") {
            values.iter_mut().for_each(|value| *value = -value.exp());
            shape.push(1);
        }
        if let (Some(mamba2), true) = (config.mamba2(), spec.name.ends_with("mamba.norm.weight")) {
            shape = vec![mamba2.groups, values.len() / mamba2.groups];
        }
        let dtype = stored_type(&spec, dtype);
        let bytes = quantized(&values, &shape, dtype);
        let fused = fused_name(&spec.name).filter(|(name, _)| match config.architecture {
            Architecture::Phi3 => true,
            Architecture::Glm4 => name.contains("ffn_up"),
            Architecture::Lfm2 | Architecture::Lfm2Moe => name.contains("shortconv"),
            Architecture::GraniteHybrid | Architecture::NemotronH | Architecture::FalconH1 => {
                name.contains("ssm_in")
            }
            _ => false,
        });
        if let Some((name, first)) = fused {
            if first {
                let id = dtype.gguf_id().unwrap();
                file.tensors.push((name, vec![0, spec.shape[1]], id, vec![]));
            }
            let (_, shape, _, all) = file.tensors.last_mut().unwrap();
            shape[0] += spec.shape[0];
            all.extend(bytes);
            continue;
        }
        let post_norms = match config.norms.placement {
            NormPlacement::Input => {
                matches!(config.architecture, Architecture::GptOss | Architecture::Glm4Moe)
                    || (config.delta_net().is_some() && config.latent().is_none())
            }
            NormPlacement::Output | NormPlacement::InputAndOutput => true,
            NormPlacement::InputAndOutputOfGlm | NormPlacement::Parallel => false,
        };
        let name = match gguf_name(&spec.name, post_norms) {
            name if config.convolution().is_some() && name == "output_norm.weight" => {
                "token_embd_norm.weight".to_owned()
            }
            name if config.architecture == Architecture::FalconH1 => {
                name.replace("ffn_norm.weight", "ffn_norm")
            }
            name if config.architecture == Architecture::Qwen3Next => {
                name.replace("ssm_beta", "ssm_ba")
            }
            name if is_shared(config, &spec.name) => name.replace(".weight", "_shexp.weight"),
            name => name,
        };
        let is_stacked = [".experts.", ".k_b_proj.", ".v_b_proj."];
        if is_stacked.iter().any(|part| spec.name.contains(part)) {
            // Experts and heads are stacked along a new first dimension, in ascending order.
            let Some(stacked) = file.tensors.iter_mut().find(|tensor| tensor.0 == name) else {
                let shape = [&[1], spec.shape.as_slice()].concat();
                file.tensors.push((name, shape, dtype.gguf_id().unwrap(), bytes));
                continue;
            };
            stacked.1[0] += 1;
            stacked.3.extend(bytes);
            continue;
        }
        if spec.name.contains("shared_expert_gate") {
            shape.remove(0);
        }
        file.tensors.push((name, shape, dtype.gguf_id().unwrap(), bytes));
    }
    file
}

/// The model as a GGUF file with matrices in `dtype`, and with its head for multi-token prediction,
/// which has this configuration and these weights. The head is the layer after those of the model.
#[allow(dead_code, reason = "for the tests of the CPU backend")]
pub(crate) fn gguf_with_head(
    (config, weights): (&DecoderConfig, &Weights),
    (head, head_weights): (&DecoderConfig, &Weights),
    dtype: TensorType,
) -> GgufWriter {
    let mut file = gguf_of(config, weights, dtype);
    let layer = config.layers.len();
    let has_post_norm = file.tensors.iter().any(|t| t.0.ends_with(".post_attention_norm.weight"));
    for (name, shape, id, bytes) in gguf_of(head, head_weights, dtype).tensors {
        let name = match name.strip_prefix("blk.0.") {
            Some("ffn_norm.weight") if has_post_norm => "post_attention_norm.weight",
            Some(rest) => rest,
            None if name == "output_norm.weight" => "nextn.shared_head_norm.weight",
            None => continue,
        };
        file.tensors.push((format!("blk.{layer}.{name}"), shape, id, bytes));
    }
    for (spec, name) in head.mtp_weights().tensors().into_iter().zip(["enorm", "hnorm", "eh_proj"])
    {
        let mut values = floats(head_weights, &spec.name, &spec.shape);
        if spec.role == TensorRole::Norm {
            values.iter_mut().for_each(|value| *value += head.norms.offset);
        }
        let dtype = stored_type(&spec, dtype);
        let bytes = quantized(&values, &spec.shape, dtype);
        let name = format!("blk.{layer}.nextn.{name}.weight");
        file.tensors.push((name, spec.shape, dtype.gguf_id().unwrap(), bytes));
    }
    let is_count = |key: &str| key.ends_with(".block_count");
    let (key, _) = file.metadata.iter().find(|(key, _)| is_count(key)).expect("a number of layers");
    let prefix = key.trim_end_matches("block_count").to_owned();
    file.set(&format!("{prefix}block_count"), Meta::U32(layer as u32 + 1));
    file.set(&format!("{prefix}nextn_predict_layers"), Meta::U32(1));
    if config.delta_net().is_some() {
        // As llama.cpp's converter writes it, with an entry for the head.
        let recurrent = config.layers.iter().map(|layer| !layer.has_attention());
        let key = format!("{prefix}attention.recurrent_layers");
        file.set(&key, Meta::Bools(recurrent.chain([false]).collect()));
    }
    file
}
