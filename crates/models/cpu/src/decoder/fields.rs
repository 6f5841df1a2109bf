//! Where the forward pass uses each field of a configuration.

use stolon_checkpoint::config::{
    DecoderConfig, DeltaNetConfig, ExpertGroups, ExpertsConfig, LatentConfig, LayerConfig,
    Mamba2Config, Multipliers,
};

/// Names each field of a model's configuration and where the forward pass uses it. A field that is
/// added does not compile until it is named here: it must be used, or refused with an error.
pub(super) fn use_every_field(config: &DecoderConfig) {
    let DecoderConfig {
        // In messages only.
        architecture: _,
        // Sizes of the weights, see `DecoderConfig::weights`, and of activations.
        vocab_size: _,
        hidden_size: _,
        intermediate_size: _,
        num_heads: _,
        num_kv_heads: _,
        head_dim: _,
        // Which weights there are.
        tie_word_embeddings: _,
        qkv_bias: _,
        output_bias: _,
        output_gate: _,
        mlp_bias: _,
        head_bias: _,
        norms: _,
        norm_kind: _,
        mlp_gate: _,
        // `Decoder::embed`
        embedding_scale: _,
        // `passes::Norm`, `passes::Heads`, `passes::Residual` and `ExpertsPass`
        query_scaling: _,
        rms_norm_eps: _,
        norm_offset: _,
        qk_norm: _,
        value_norm: _,
        residual_scale: _,
        multipliers,
        // `RopeTable`
        rotary_dim: _,
        max_positions: _,
        ropes: _,
        // `Decoder::embed_per_layer` and `Decoder::finish_layer`
        per_layer_input: _,
        layer_scales: _,
        // `DecoderConfig::weights` and `Decoder::selective_heads`
        selective_attention: _,
        // `Decoder::convolve`
        convolution_taps: _,
        // `passes::attend`
        attention_scale: _,
        attention_softcap: _,
        attention_sinks: _,
        // `passes::activate`
        activation: _,
        // `passes::finish_logits`
        logit_scale: _,
        logit_softcap: _,
        // The default type of the KV store.
        dtype: _,
        experts,
        latent,
        delta_net,
        mamba2,
        layers,
    } = config;
    for layer in layers {
        // `Decoder::project`, `Decoder::heads`, `passes::attend`, `kept_indices` and
        // `DecoderConfig::weights`
        let LayerConfig {
            mixers: _,
            rope: _,
            sliding_window: _,
            heads: _,
            kv_source: _,
            values_from_keys: _,
            mlp: _,
            intermediate_size: _,
        } = layer;
    }
    experts.iter().for_each(use_every_field_of_experts);
    latent.iter().for_each(use_every_field_of_latent);
    delta_net.iter().for_each(use_every_field_of_delta_net);
    mamba2.iter().for_each(use_every_field_of_mamba2);
    multipliers.iter().for_each(use_every_multiplier);
}

fn use_every_multiplier(multipliers: &Multipliers) {
    // `Decoder::mix`, `Mamba2::load`, `passes::activate` and `Decoder::dense`
    let Multipliers {
        attention_output: _,
        mamba_output: _,
        mamba_inputs: _,
        mlp_gate: _,
        mlp_output: _,
    } = multipliers;
}

fn use_every_field_of_experts(config: &ExpertsConfig) {
    // `DecoderConfig::weights`, `Routing` and `ExpertsConfig::choose`
    let ExpertsConfig {
        count: _,
        per_token: _,
        width: _,
        scores: _,
        normalized: _,
        router_bias: _,
        groups,
        scale: _,
        shared_width: _,
        shared_gate: _,
        scaled_router: _,
        shifted: _,
    } = config;
    // `ExpertGroups::add_experts`
    let Some(ExpertGroups { count: _, used: _, best: _ }) = groups else { return };
}

fn use_every_field_of_latent(config: &LatentConfig) {
    // `DecoderConfig::weights`, `Latent` and `LatentBuffers`
    let LatentConfig { width: _, rotary_dim: _, key_dim: _, value_dim: _, query_rank: _ } = config;
}

fn use_every_field_of_delta_net(config: &DeltaNetConfig) {
    // `DecoderConfig::weights`, `StateStore` and `DeltaNet`
    let DeltaNetConfig {
        kind: _,
        key_heads: _,
        value_heads: _,
        key_dim: _,
        value_dim: _,
        taps: _,
        grouped: _,
        log_rates: _,
    } = config;
}

fn use_every_field_of_mamba2(config: &Mamba2Config) {
    // `DecoderConfig::weights`, `StateStore` and `Mamba2`
    let Mamba2Config {
        heads: _,
        head_dim: _,
        groups: _,
        state_dim: _,
        taps: _,
        convolution_bias: _,
        norm: _,
        log_rates: _,
    } = config;
}
