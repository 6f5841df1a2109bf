//! The weights of the mixers of layers.

use super::delta_net::DeltaNetWeights;
use super::{LinearWeights, StackedWeights, TensorRole, TensorSpec, linear, matrix, norm};
use crate::config::{
    AttentionConfig, ConvolutionConfig, DecoderConfig, KeysAndValues, LatentConfig, LatentSizes,
    Mamba2Config, MixerConfig,
};

/// The weights of attention.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionWeights {
    /// The configuration of the layer.
    pub config: AttentionConfig,
    /// The projections to queries, keys and values.
    pub qkv: QkvWeights,
    /// The norm of queries: `[head_dim]`, or `[num_heads * head_dim]`, depending on
    /// [`AttentionConfig::qk_norm`].
    pub q_norm: Option<TensorSpec>,
    /// The norm of keys: `[head_dim]`, or `[num_kv_heads * head_dim]`. `None` also if the layer
    /// reads the keys of another layer.
    pub k_norm: Option<TensorSpec>,
    /// The score of the attention sink of each head, `[num_heads]`.
    pub sinks: Option<TensorSpec>,
    /// The weights of the factors of queries and values, if attention is selective
    /// ([`AttentionConfig::selective`]).
    pub selective: Option<SelectiveWeights>,
    /// The projection to the gates of attention's output. Files may combine it with the projection
    /// to queries in one matrix.
    pub gate: Option<LinearWeights>,
    /// The output projection.
    pub output: LinearWeights,
}

/// The weights of the factors of queries and values in selective attention.
#[derive(Clone, Debug, PartialEq)]
pub struct SelectiveWeights {
    /// The projection of a token's queries, keys and values to the part of the queries' factors
    /// that depends on the token, `[num_heads, 3 * num_heads * head_dim]`.
    pub queries: TensorSpec,
    /// The same projection for the factors of values.
    pub values: TensorSpec,
    /// The coefficient of the part of each head's factors that depends on the position,
    /// `[num_heads]`.
    pub alpha: TensorSpec,
}

/// The projections to queries, keys and values. A file may store one matrix instead, which has the
/// rows of all of them, one after the other (Phi-3), and a backend may keep them so.
#[derive(Clone, Debug, PartialEq)]
pub struct QkvWeights {
    /// The name of the matrix that a file may have instead of the parts' matrices.
    pub name: String,
    /// The projection to queries.
    pub query: LinearWeights,
    /// The projection to keys; `None` if the layer reads the keys and values of another one.
    pub key: Option<LinearWeights>,
    /// The projection to values; `None` also if values are projected with the matrix of keys.
    pub value: Option<LinearWeights>,
}

impl QkvWeights {
    /// The name of a matrix with the rows of all projections, and the projections; `None` if the
    /// layer does not have all of them.
    pub(super) fn matrices(self) -> Option<(String, Vec<TensorSpec>)> {
        let parts = [self.query, self.key?, self.value?].map(|part| part.weight);
        Some((self.name, parts.into()))
    }

    /// The projections, in the order of their rows.
    pub fn parts(self) -> impl Iterator<Item = LinearWeights> {
        [Some(self.query), self.key, self.value].into_iter().flatten()
    }
}

/// The weights of a short convolution (LFM2): `output(gate * taps(factor * x))`, where `taps` is
/// the weighted sum over the last positions of each channel.
#[derive(Clone, Debug, PartialEq)]
pub struct ConvolutionWeights {
    /// The projections to the factor of the inputs, the gate of the outputs, and the inputs, each
    /// `[hidden_size, hidden_size]`.
    pub inputs: StackedWeights<3>,
    /// The taps of the convolution, `[hidden_size, taps]`, with the oldest position first.
    pub taps: TensorSpec,
    /// The output projection.
    pub output: LinearWeights,
}

/// The weights of Mamba-2.
#[derive(Clone, Debug, PartialEq)]
pub struct Mamba2Weights {
    /// The configuration of the layer.
    pub config: Mamba2Config,
    /// The projections to the gates of the outputs, `[heads * head_dim, hidden_size]`, to values,
    /// keys and queries, `[channels, hidden_size]`, and to the time steps before their softplus,
    /// `[heads, hidden_size]`.
    pub inputs: StackedWeights<3>,
    /// Biases that are added to the time steps before their softplus, `[heads]`.
    pub step_bias: TensorSpec,
    /// The decay rates, `[heads]`, in the form that [`Mamba2Config::log_rates`] states.
    pub rates: TensorSpec,
    /// The factor by which each head's value is multiplied before it is added to the head's output,
    /// `[heads]`.
    pub skip: TensorSpec,
    /// The taps of the convolution, `[channels, taps]`, with the oldest position first.
    pub taps: TensorSpec,
    /// The bias of the convolution, `[channels]`.
    pub convolution_bias: Option<TensorSpec>,
    /// The norm of the gated outputs, `[heads * head_dim]`, if [`Mamba2Config::norm`] is true. Each
    /// group of heads is normalized separately.
    pub norm: Option<TensorSpec>,
    /// The output projection, `[hidden_size, heads * head_dim]`.
    pub output: LinearWeights,
}

/// The weights of latent attention. The rows of queries and of the key head have the order in
/// memory, with rotated elements first.
#[derive(Clone, Debug, PartialEq)]
pub struct LatentWeights {
    /// The configuration of the layer.
    pub config: LatentConfig,
    /// The projection to the low-rank vector of queries, `[query_rank, hidden_size]`, and the
    /// weights of its norm, `[query_rank]`; `None` if queries are projected directly.
    pub query_down: Option<(LinearWeights, TensorSpec)>,
    /// The projection to queries, `[num_heads * query_dim, query_rank or hidden_size]`.
    pub query: LinearWeights,
    /// The projection to the key head that is kept of a position, `[kept_dim, hidden_size]`.
    pub latent: LinearWeights,
    /// The norm of the latent vector, `[width]`.
    pub latent_norm: TensorSpec,
    /// For each head, the transposed projection of latent vectors to keys, `[width, key_dim]`.
    pub keys: Vec<TensorSpec>,
    /// For each head, the projection of latent vectors to values, `[value_dim, width]`.
    pub values: Vec<TensorSpec>,
    /// The name of the matrix that files may have instead of `keys` and `values`. It has the
    /// projections to each head's keys and values, `[num_heads * (key_dim + value_dim), width]`.
    pub name: String,
    /// The output projection, `[hidden_size, num_heads * value_dim]`.
    pub output: LinearWeights,
}

/// The weights of a mixer.
#[allow(clippy::large_enum_variant, reason = "there is one per layer, while a model is loaded")]
#[derive(Clone, Debug, PartialEq)]
pub enum MixerWeights {
    /// Attention.
    Attention(AttentionWeights),
    /// A short convolution.
    Convolution(ConvolutionWeights),
    /// Gated DeltaNet or Kimi Delta Attention.
    DeltaNet(DeltaNetWeights),
    /// Mamba-2.
    Mamba2(Mamba2Weights),
    /// Latent attention.
    Latent(LatentWeights),
}

impl DecoderConfig {
    /// The weights of a mixer. `at` returns the full name of a module of the layer.
    pub(super) fn mixer_weights(
        &self,
        mixer: &MixerConfig,
        at: &dyn Fn(&str) -> String,
    ) -> MixerWeights {
        match mixer {
            MixerConfig::Attention(config) => {
                MixerWeights::Attention(self.attention_weights(config, at))
            }
            MixerConfig::Latent(config) => MixerWeights::Latent(self.latent_weights(config, at)),
            MixerConfig::Convolution(ConvolutionConfig { taps }) => {
                MixerWeights::Convolution(self.convolution_weights(*taps, at))
            }
            MixerConfig::DeltaNet(config) => {
                MixerWeights::DeltaNet(self.delta_net_weights(config, at))
            }
            MixerConfig::Mamba2(config) => MixerWeights::Mamba2(self.mamba2_weights(config, at)),
        }
    }

    /// The weights of attention. `at` returns the full name of a module of the layer.
    fn attention_weights(
        &self,
        config: &AttentionConfig,
        at: &dyn Fn(&str) -> String,
    ) -> AttentionWeights {
        let AttentionConfig { heads, kv_heads, head_dim: dim, keys_and_values, .. } = *config;
        let (has_keys, has_values) = (config.has_own_kv(), keys_and_values == KeysAndValues::Own);
        let (hidden, queries, keys) = (self.hidden_size, heads * dim, kv_heads * dim);
        let qkv = |part: &str, rows| linear(&at(part), [rows, hidden], config.qkv_bias);
        let of_heads =
            |part: &str| TensorSpec { name: at(part), shape: vec![heads], role: TensorRole::Bias };
        let of_qkv = |part: &str| TensorSpec {
            shape: vec![heads, queries + 2 * keys],
            role: TensorRole::Router,
            ..of_heads(part)
        };
        AttentionWeights {
            config: *config,
            qkv: QkvWeights {
                name: at("self_attn.qkv_proj.weight"),
                query: qkv("self_attn.q_proj", queries),
                key: has_keys.then(|| qkv("self_attn.k_proj", keys)),
                value: has_values.then(|| qkv("self_attn.v_proj", keys)),
            },
            q_norm: config.head_norm(&at("self_attn.q_norm"), heads),
            k_norm: config.head_norm(&at("self_attn.k_norm"), kv_heads).filter(|_| has_keys),
            sinks: config.sinks.then(|| of_heads("self_attn.sinks")),
            selective: config.selective.then(|| SelectiveWeights {
                queries: of_qkv("self_attn.tau.wq"),
                values: of_qkv("self_attn.tau.wv"),
                alpha: of_heads("self_attn.tau.alpha"),
            }),
            gate: config.output_gate.then(|| qkv("self_attn.gate_proj", queries)),
            output: linear(&at("self_attn.o_proj"), [hidden, queries], config.output_bias),
        }
    }

    /// The weights of latent attention. `at` returns the full name of a module of the layer.
    fn latent_weights(&self, config: &LatentConfig, at: &dyn Fn(&str) -> String) -> LatentWeights {
        let LatentConfig { heads, sizes, .. } = *config;
        let LatentSizes { width, key_dim, value_dim, query_rank, .. } = sizes;
        let hidden = self.hidden_size;
        let at = |part: &str| at(&format!("self_attn.{part}"));
        // These matrices are small, and every query passes through both, so they are not rounded.
        let of_heads = |part: &str, shape: [usize; 2]| {
            let of_head = |head| matrix(&at(&format!("{part}.{head}")), shape, TensorRole::Router);
            (0..heads).map(of_head).collect()
        };
        let queries = heads * sizes.query_dim();
        let down = |rank| {
            let down = linear(&at("q_a_proj"), [rank, hidden], false);
            (down, norm(&at("q_a_layernorm"), rank))
        };
        let query = match query_rank {
            Some(rank) => linear(&at("q_b_proj"), [queries, rank], false),
            None => linear(&at("q_proj"), [queries, hidden], false),
        };
        LatentWeights {
            config: *config,
            query_down: query_rank.map(down),
            query,
            latent: linear(&at("kv_a_proj_with_mqa"), [sizes.kept_dim(), hidden], false),
            latent_norm: norm(&at("kv_a_layernorm"), width),
            keys: of_heads("k_b_proj", [width, key_dim]),
            values: of_heads("v_b_proj", [value_dim, width]),
            name: at("kv_b_proj.weight"),
            output: linear(&at("o_proj"), [hidden, heads * value_dim], false),
        }
    }

    /// The weights of a convolution. `at` returns the full name of a module of the layer.
    fn convolution_weights(&self, taps: usize, at: &dyn Fn(&str) -> String) -> ConvolutionWeights {
        let hidden = self.hidden_size;
        // Files have the three projections in one matrix.
        let input = |part: &str| linear(&at(&format!("conv.in_proj.{part}")), [hidden; 2], false);
        ConvolutionWeights {
            inputs: StackedWeights {
                name: at("conv.in_proj.weight"),
                parts: [input("factor"), input("gate"), input("x")],
            },
            taps: TensorSpec {
                name: at("conv.conv.weight"),
                shape: vec![hidden, taps],
                role: TensorRole::Taps,
            },
            output: linear(&at("conv.out_proj"), [hidden; 2], false),
        }
    }

    /// The weights of Mamba-2. `at` returns the full name of a module of the layer.
    fn mamba2_weights(&self, config: &Mamba2Config, at: &dyn Fn(&str) -> String) -> Mamba2Weights {
        let (hidden, shape) = (self.hidden_size, config.shape());
        let at = |part: &str| at(&format!("mamba.{part}"));
        // Files have the three projections in one matrix.
        let input =
            |part: &str, rows| linear(&at(&format!("in_proj.{part}")), [rows, hidden], false);
        let vector = |part: &str, len| TensorSpec {
            name: at(part),
            shape: vec![len],
            role: TensorRole::Bias,
        };
        Mamba2Weights {
            config: *config,
            inputs: StackedWeights {
                name: at("in_proj.weight"),
                parts: [
                    input("gate", shape.value_width()),
                    input("xbc", shape.channels),
                    input("step", config.heads),
                ],
            },
            step_bias: vector("dt_bias", config.heads),
            rates: vector("A_log", config.heads),
            skip: vector("D", config.heads),
            taps: TensorSpec {
                name: at("conv1d.weight"),
                shape: vec![shape.channels, config.taps],
                role: TensorRole::Taps,
            },
            convolution_bias: config
                .convolution_bias
                .then(|| vector("conv1d.bias", shape.channels)),
            norm: config.norm.then(|| TensorSpec {
                role: TensorRole::PlainNorm,
                ..norm(&at("norm"), shape.value_width())
            }),
            output: linear(&at("out_proj"), [hidden, shape.value_width()], false),
        }
    }
}
