//! Describes text encoders: transformers in which every token of a text attends to all others.
//!
//! [`EncoderConfig`] is one description for all families (BERT, RoBERTa, MPNet, ModernBERT and so
//! on). The forward pass reads it and never branches on the family. A family is a row of
//! `families.rs`: the names of its classes, and the names of the modules in its files. `hf.rs` reads
//! `config.json`, `gguf.rs` the metadata of a GGUF file, and `weights.rs` lists the tensors.
//!
//! An encoder has no output matrix and no KV cache. What becomes of its hidden states is described
//! by [`EmbeddingConfig`](crate::EmbeddingConfig) and [`HeadConfig`].

mod families;
mod gguf;
mod head;
mod hf;
mod weights;

pub use families::{EncoderFamily, TensorNames};
pub(crate) use gguf::{family as gguf_family, parse as parse_gguf, prefix as gguf_prefix};
pub(crate) use head::is_classifier;
pub use head::{HeadActivation, HeadConfig, HeadLayer, ScoreActivation, ScoreConfig};
pub(crate) use hf::{family, has_task_adapters, parse};
pub use weights::{
    EncoderLayerWeights, EncoderMlpWeights, EncoderNormWeights, EncoderWeights, LayerTaskWeights,
    TaskWeights,
};

use crate::adapter::RANK_MAX;
use crate::config::{
    Activation, ExpertScores, ExpertsConfig, HEAD_DIM_MAX, LAYERS_MAX, PlainFunction,
};
use crate::error::ModelError;

/// Maximum number of positions of a text. It bounds the table of biases by distance.
const POSITIONS_MAX: usize = 1 << 17;
/// Maximum number of tasks with matrices of their own.
pub(crate) const TASKS_MAX: usize = 64;

/// The description of the forward pass of an encoder, without the weights. All sizes are at least
/// 1.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderConfig {
    /// The family. It is used only for names; the forward pass does not branch on it.
    pub family: EncoderFamily,
    /// Whose names the tensors have.
    pub names: TensorNames,
    /// What the names of all tensors begin with: the name of the encoder within a larger model, or
    /// nothing.
    pub prefix: String,
    /// Number of rows of the embedding.
    pub vocab_size: usize,
    /// Number of token types (segments), each with an embedding; 0 if there are none.
    pub token_types: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Maximum number of tokens of a text.
    pub max_positions: usize,
    /// The learned positions, whose embeddings are added to those of tokens; `None` if there are
    /// none.
    pub learned_positions: Option<LearnedPositions>,
    /// The numbers that are added to the scores of attention; `None` if there are none.
    pub score_bias: Option<ScoreBias>,
    /// The factor of the embeddings of tokens, above 0; `None` for 1.
    pub embedding_scale: Option<f32>,
    /// Whether the sum of the embeddings is normalized.
    pub embedding_norm: bool,
    /// The kind of all norms.
    pub norm: EncoderNorm,
    /// The epsilon of all norms, above 0.
    pub norm_eps: f32,
    /// Whether layer norms have biases.
    pub norm_bias: bool,
    /// Where the norms are.
    pub order: NormOrder,
    /// Number of attention heads.
    pub heads: usize,
    /// Number of heads of keys and values, a divisor of `heads`.
    pub kv_heads: usize,
    /// Length of a head.
    pub head_dim: usize,
    /// The norms of queries and keys.
    pub query_key_norms: QueryKeyNorms,
    /// The factor of the scores of attention.
    pub score_scale: f32,
    /// Whether the projections of attention have biases.
    pub attention_bias: bool,
    /// Number of inner features of the MLPs.
    pub inner_size: usize,
    /// The function of the inner features of MLPs without experts.
    pub activation: EncoderActivation,
    /// Whether the projections to the inner features, and to their gates, have biases.
    pub inner_bias: bool,
    /// Whether the projections of the inner features have biases.
    pub down_bias: bool,
    /// The layers.
    pub layers: Vec<EncoderLayer>,
    /// The tasks for which the model has matrices of their own; `None` if there are none.
    pub tasks: Option<TasksConfig>,
}

/// Tasks for which a model has matrices of their own, which are LoRA adapters (Hu et al., 2021): for
/// each task, `scale * B (A x)` is added to the results of all projections.
#[derive(Clone, Debug, PartialEq)]
pub struct TasksConfig {
    /// The name of each task.
    pub names: Vec<String>,
    /// Number of rows of each matrix `A`.
    pub rank: usize,
    /// The factor of the updates.
    pub scale: f32,
    /// Whether the same is added to the embeddings of tokens and token types.
    pub tables: bool,
    /// Whether a text must have a task.
    pub required: bool,
}

/// Learned positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LearnedPositions {
    /// Number of rows of the table.
    pub rows: usize,
    /// The id of the padding token if positions are numbered as in fairseq: those of other tokens
    /// from `padding_id + 1` on, and those of padding tokens `padding_id`. `None` if they are
    /// numbered from 0 on.
    pub padding_id: Option<u32>,
}

/// Numbers that are added to the scores of attention and that depend on the head and the distance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScoreBias {
    /// A learned number for each head and each bucket of distances, as in T5 (MPNet).
    Buckets {
        /// Number of buckets, an even number.
        count: usize,
        /// Distances from this on share the last bucket.
        distance_max: usize,
    },
    /// The distance times a slope for each head (Press et al., 2021).
    Alibi,
}

/// Where the norms of the residual stream are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormOrder {
    /// After attention and after the MLP, as in the first transformers (BERT).
    After,
    /// The same, and once more after attention: `norm(x + norm(x + attention(x)))`
    /// (jina-embeddings-v2-base-code).
    AfterTwice,
    /// Before attention, before the MLP, and after the last layer (EuroBERT). The first layer has no
    /// norm before attention if the embeddings are normalized (ModernBERT).
    Before,
    /// Before and after attention and the MLP, and after the last layer (Gemma).
    Around,
}

impl NormOrder {
    /// Whether attention and the MLP take inputs that are normalized already.
    #[must_use]
    pub fn is_after(self) -> bool {
        matches!(self, Self::After | Self::AfterTwice)
    }
}

/// The norms of queries and keys, before a rotary embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryKeyNorms {
    /// None.
    None,
    /// An RMS norm of each head (Gemma 3).
    Heads,
    /// A layer norm of all heads together (jina-embeddings-v2-base-code). Such models have no rotary
    /// embedding.
    Rows,
}

/// The kind of the norms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum EncoderNorm {
    /// A layer norm: the mean is subtracted.
    Layer,
    /// An RMS norm.
    Rms {
        /// A number that is added to the weights: 1 if files have the weights minus one.
        offset: f32,
    },
}

impl EncoderNorm {
    /// The number that is added to the weights.
    #[must_use]
    pub fn offset(self) -> f32 {
        match self {
            Self::Layer => 0.0,
            Self::Rms { offset } => offset,
        }
    }
}

/// The function of the inner features of an MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncoderActivation {
    /// GELU with the error function.
    Gelu,
    /// GELU with the tanh approximation.
    GeluTanh,
    /// `max(x, 0)`.
    Relu,
    /// The inner features are multiplied by the GELU of a gate.
    GeluGate,
    /// The same with the tanh approximation.
    GeluTanhGate,
    /// The inner features are multiplied by the SiLU of a gate.
    SiluGate,
}

impl EncoderActivation {
    /// Whether there is a gate.
    #[must_use]
    pub fn is_gated(self) -> bool {
        matches!(self, Self::GeluGate | Self::GeluTanhGate | Self::SiluGate)
    }
}

/// The properties of a layer that differ between layers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EncoderLayer {
    /// The rotary embedding of queries and keys; `None` if they are not rotated.
    pub rope: Option<EncoderRope>,
    /// Number of positions that a token sees on each side; `None` if it sees all.
    pub window: Option<usize>,
    /// The experts that are in the place of the MLP, if the norms are after it; `None` for an MLP.
    pub experts: Option<ExpertsConfig>,
}

/// A rotary embedding: the angle of pair `i` of a head is the position times
/// `theta^(-2i / head_dim) / divisor`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EncoderRope {
    /// The base of the frequencies, above 0.
    pub theta: f64,
    /// The number by which all frequencies are divided, above 0.
    pub divisor: f64,
}

impl EncoderRope {
    /// A rotary embedding whose frequencies are not scaled.
    #[must_use]
    pub fn unscaled(theta: f64) -> Self {
        Self { theta, divisor: 1.0 }
    }

    /// A layer that rotates queries and keys in this way, and that sees `window` positions on each
    /// side, or all.
    fn layer(self, window: Option<usize>) -> EncoderLayer {
        EncoderLayer { rope: Some(self), window, experts: None }
    }
}

/// Gives the second of each `step` layers experts without a gate, with `sizes`: their number, how many
/// a token uses, and their width. The weights are a softmax over the scores of all. `step` is at least
/// 1.
fn add_experts(layers: &mut [EncoderLayer], step: usize, sizes: [usize; 3]) {
    let [count, per_token, width] = sizes;
    let experts = ExpertsConfig {
        count,
        per_token,
        width,
        activation: Activation::Plain(PlainFunction::Gelu),
        bias: false,
        scores: ExpertScores::Softmax,
        normalized: false,
        router_bias: false,
        groups: None,
        scale: 1.0,
        shared_width: None,
        shared_gate: false,
        scaled_router: false,
        shifted: false,
    };
    for (_, layer) in layers.iter_mut().enumerate().filter(|(index, _)| index % step == 1) {
        layer.experts = Some(experts);
    }
}

impl EncoderConfig {
    /// Checks that all sizes are in range and fit together. `name` is the configuration's name in
    /// errors.
    ///
    /// # Errors
    /// [`ModelError::InvalidKey`].
    pub fn check(&self, name: &str) -> Result<(), ModelError> {
        let range = |key: &str, value: usize, most: usize| match (1..=most).contains(&value) {
            true => Ok(()),
            false => Err(ModelError::key(name, key, format!("an integer from 1 to {most}"), value)),
        };
        range("vocab_size", self.vocab_size, 1 << 24)?;
        range("hidden_size", self.hidden_size, 1 << 20)?;
        range("num_attention_heads", self.heads, self.hidden_size)?;
        range("head_dim", self.head_dim, HEAD_DIM_MAX)?;
        range("intermediate_size", self.inner_size, 1 << 24)?;
        range("num_hidden_layers", self.layers.len(), LAYERS_MAX)?;
        range("max_position_embeddings", self.max_positions, POSITIONS_MAX)?;
        for experts in self.layers.iter().filter_map(|layer| layer.experts.as_ref()) {
            experts.check(name, self.layers.len())?;
            if !self.order.is_after() {
                let expected = "no experts without norms after attention and the MLP";
                return Err(ModelError::key(name, "num_experts", expected, experts.count));
            }
        }
        if let Some(tasks) = &self.tasks {
            range("lora_adaptations", tasks.names.len(), TASKS_MAX)?;
            range("lora_rank", tasks.rank, RANK_MAX)?;
            let has_experts = self.layers.iter().any(|layer| layer.experts.is_some());
            if has_experts {
                let expected = "no tasks with experts";
                let got = tasks.names.len();
                return Err(ModelError::key(name, "lora_adaptations", expected, got));
            }
        }
        if self.token_types > 16 {
            let got = self.token_types;
            return Err(ModelError::key(name, "type_vocab_size", "at most 16", got));
        }
        range("num_key_value_heads", self.kv_heads, self.heads)?;
        if !self.heads.is_multiple_of(self.kv_heads) {
            let expected = format!("a divisor of num_attention_heads, {}", self.heads);
            return Err(ModelError::key(name, "num_key_value_heads", expected, self.kv_heads));
        }
        // In all other families, the length of a head follows from the number of heads.
        let is_divided = self.family != EncoderFamily::Gemma;
        if is_divided && self.heads * self.head_dim != self.hidden_size {
            let expected = format!("a divisor of hidden_size, {}", self.hidden_size);
            return Err(ModelError::key(name, "num_attention_heads", expected, self.heads));
        }
        let is_rotated = |layer: &EncoderLayer| layer.rope.is_some();
        if self.layers.iter().any(is_rotated) && !self.head_dim.is_multiple_of(2) {
            let expected = "heads of an even length for a rotary embedding";
            return Err(ModelError::key(name, "num_attention_heads", expected, self.heads));
        }
        if let Some(LearnedPositions { rows, padding_id }) = self.learned_positions {
            let first = padding_id.map_or(0, |id| id as usize + 1);
            if rows < first.saturating_add(self.max_positions) {
                let expected = format!("at least {} (positions)", first + self.max_positions);
                return Err(ModelError::key(name, "max_position_embeddings", expected, rows));
            }
        }
        if let Some(ScoreBias::Buckets { count, distance_max }) = self.score_bias
            && (!(4..=1 << 16).contains(&count)
                || !count.is_multiple_of(4)
                || distance_max <= count / 4)
        {
            let expected = "a multiple of 4 from 4 to 65536, below 4 times the maximum distance";
            return Err(ModelError::key(name, "relative_attention_num_buckets", expected, count));
        }
        Ok(())
    }
}
