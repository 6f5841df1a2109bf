//! The values that transformers assumes for keys that a `config.json` lacks.

use super::super::Architecture;

/// The defaults of transformers for keys that `config.json` lacks.
pub(super) struct Defaults {
    pub(super) vocab_size: usize,
    pub(super) hidden_size: usize,
    pub(super) intermediate_size: usize,
    pub(super) num_layers: usize,
    pub(super) num_heads: usize,
    /// `None`: equal to `num_heads`.
    pub(super) num_kv_heads: Option<usize>,
    /// `None`: `hidden_size / num_heads`.
    pub(super) head_dim: Option<usize>,
    pub(super) max_positions: usize,
    pub(super) rms_norm_eps: f64,
    pub(super) tie_word_embeddings: bool,
    pub(super) sliding_window: Option<usize>,
    pub(super) attention_softcap: Option<f32>,
    pub(super) logit_softcap: Option<f32>,
    pub(super) eos_token_id: Option<u32>,
    pub(super) bos_token_id: Option<u32>,
}

impl Defaults {
    pub(super) fn of(architecture: Architecture) -> Self {
        let llama = Defaults {
            vocab_size: 32_000,
            hidden_size: 4096,
            intermediate_size: 11_008,
            num_layers: 32,
            num_heads: 32,
            num_kv_heads: None,
            head_dim: None,
            max_positions: 2048,
            rms_norm_eps: 1e-6,
            tie_word_embeddings: false,
            sliding_window: None,
            attention_softcap: None,
            logit_softcap: None,
            eos_token_id: Some(2),
            bos_token_id: Some(1),
        };
        let qwen2 = Defaults {
            vocab_size: 151_936,
            intermediate_size: 22_016,
            num_kv_heads: Some(32),
            max_positions: 32_768,
            sliding_window: Some(4096),
            eos_token_id: None,
            bos_token_id: None,
            ..llama
        };
        let gemma3 = Defaults {
            vocab_size: 262_208,
            hidden_size: 2304,
            intermediate_size: 9216,
            num_layers: 26,
            num_heads: 8,
            num_kv_heads: Some(4),
            head_dim: Some(256),
            max_positions: 131_072,
            tie_word_embeddings: true,
            sliding_window: Some(4096),
            eos_token_id: Some(1),
            bos_token_id: Some(2),
            ..llama
        };
        match architecture {
            Architecture::Llama | Architecture::Granite => llama,
            Architecture::Mistral => Defaults {
                intermediate_size: 14_336,
                num_kv_heads: Some(8),
                max_positions: 131_072,
                sliding_window: Some(4096),
                ..llama
            },
            Architecture::Qwen2 => qwen2,
            Architecture::Qwen3 => Defaults { head_dim: Some(128), ..qwen2 },
            Architecture::Mixtral => Defaults {
                intermediate_size: 14_336,
                num_kv_heads: Some(8),
                max_positions: 131_072,
                rms_norm_eps: 1e-5,
                ..llama
            },
            Architecture::Qwen2Moe => Defaults {
                hidden_size: 2048,
                intermediate_size: 5632,
                num_layers: 24,
                num_heads: 16,
                num_kv_heads: Some(16),
                ..qwen2
            },
            Architecture::Qwen3Moe => Defaults {
                hidden_size: 2048,
                intermediate_size: 6144,
                num_layers: 24,
                num_kv_heads: Some(4),
                ..qwen2
            },
            Architecture::GptOss => Defaults {
                vocab_size: 201_088,
                hidden_size: 2880,
                intermediate_size: 2880,
                num_layers: 36,
                num_heads: 64,
                num_kv_heads: Some(8),
                head_dim: Some(64),
                max_positions: 131_072,
                sliding_window: Some(128),
                rms_norm_eps: 1e-5,
                eos_token_id: None,
                bos_token_id: None,
                ..llama
            },
            Architecture::Olmo2 => Defaults {
                vocab_size: 50_304,
                rms_norm_eps: 1e-5,
                eos_token_id: Some(50_279),
                bos_token_id: None,
                ..llama
            },
            Architecture::SmolLm3 => Defaults {
                vocab_size: 128_256,
                hidden_size: 2048,
                num_layers: 36,
                num_heads: 16,
                num_kv_heads: Some(4),
                max_positions: 32_768,
                tie_word_embeddings: true,
                eos_token_id: Some(128_001),
                bos_token_id: Some(128_000),
                ..llama
            },
            Architecture::Phi3 => Defaults {
                vocab_size: 32_064,
                hidden_size: 3072,
                intermediate_size: 8192,
                max_positions: 4096,
                rms_norm_eps: 1e-5,
                eos_token_id: Some(32_000),
                ..llama
            },
            Architecture::Gemma2 => Defaults {
                vocab_size: 256_000,
                max_positions: 8192,
                attention_softcap: Some(50.0),
                logit_softcap: Some(30.0),
                ..gemma3
            },
            Architecture::Gemma3 => gemma3,
        }
    }
}
