//! The norms of a decoder's layers: their kinds, places and names.

use super::architecture::Description;
use super::attention::check_positive;
use super::tensors::{bias, norm};
use super::{DecoderConfig, Keys, LayerConfig, NormWeights, TensorRole, TensorSpec};
use crate::error::ModelError;

/// The norms of the residual stream, which are the same in all layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormsConfig {
    /// The places where layers normalize the residual stream.
    pub placement: NormPlacement,
    /// The kind of these norms, and of the norm before the output matrix.
    pub kind: NormKind,
    /// Epsilon that is added to the mean square in RMS norms, and to the variance in layer norms.
    /// Other RMS norms of the model, such as those of queries and keys, have the same one.
    pub eps: f32,
    /// The same for the norms of the outputs of attention and MLP. It is different in Muse Glimmer
    /// only.
    pub output_eps: f32,
    /// Offset of the weights of RMS norms, which multiply by `offset + weight`. 1 for Gemma's
    /// safetensors, else 0.
    pub offset: f32,
    /// Whether the offset is not added to the weights of the norm before the output matrix (Muse
    /// Glimmer).
    pub plain_final: bool,
    /// Whether embeddings are normalized, by an RMS norm without weights (Muse Glimmer).
    pub embedding: bool,
}

impl NormsConfig {
    /// The norms of a `config.json`.
    pub(super) fn parse(row: &Description, keys: &Keys<'_>) -> Result<Self, ModelError> {
        let eps = keys.positive(row.norm_eps)?.unwrap_or(row.defaults.rms_norm_eps);
        let own = Self::of(row, eps as f32);
        let Some((key, _)) = row.output_norm_eps else { return Ok(own) };
        let output_eps = keys.positive_f32(key)?.unwrap_or(own.output_eps);
        Ok(Self { output_eps, ..own })
    }

    /// The norms of an architecture in safetensors files, with the epsilon `eps`.
    pub(super) fn of(row: &Description, eps: f32) -> Self {
        Self {
            placement: row.norms,
            kind: row.norm_kind,
            eps,
            output_eps: row.output_norm_eps.map_or(eps, |(_, default)| default as f32),
            offset: row.norm_offset,
            plain_final: row.plain_final_norm,
            embedding: row.embedding_norm,
        }
    }

    /// The same norms in GGUF files. Converters add the offset to the weights.
    pub(super) fn in_gguf(self) -> Self {
        Self { offset: 0.0, ..self }
    }
}

/// The kind of the norms of the residual stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// RMS norms, which scale rows.
    Rms,
    /// Layer norms, which shift rows to the mean 0, scale them, and add a bias (Moondream 2,
    /// StarCoder 2). They are supported only on inputs.
    Layer,
    /// Layer norms without a bias (Cohere 2).
    LayerWithoutBias,
}

/// The places where a layer normalizes the residual stream. They determine the names of the
/// weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormPlacement {
    /// The inputs of attention and MLP are normalized: `input_layernorm` and
    /// `post_attention_layernorm`.
    Input,
    /// The outputs are normalized before the residual is added (OLMo 2):
    /// `post_attention_layernorm` and `post_feedforward_layernorm`.
    Output,
    /// Both (Gemma): `input_layernorm`, `post_attention_layernorm`, `pre_feedforward_layernorm` and
    /// `post_feedforward_layernorm`, in the order of the forward pass.
    InputAndOutput,
    /// The same as [`InputAndOutput`](Self::InputAndOutput) with other names (GLM-4):
    /// `input_layernorm`, `post_self_attn_layernorm`, `post_attention_layernorm` and
    /// `post_mlp_layernorm`.
    InputAndOutputOfGlm,
    /// The input of the layer is normalized, `input_layernorm`, and both attention and MLP read it
    /// (Moondream 2, Cohere 2). Their outputs are added to the residual stream.
    Parallel,
}

/// The names of a layer's norms, without the prefix of the layer and the suffix `.weight`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NormNames {
    pub(crate) attention_input: Option<&'static str>,
    pub(crate) attention_output: Option<&'static str>,
    pub(crate) mlp_input: Option<&'static str>,
    pub(crate) mlp_output: Option<&'static str>,
}

impl NormPlacement {
    /// Whether outputs are normalized before the residual is added.
    pub fn outputs(self) -> bool {
        match self {
            Self::Input | Self::Parallel => false,
            Self::Output | Self::InputAndOutput | Self::InputAndOutputOfGlm => true,
        }
    }

    /// The names of the norms of a layer.
    pub(crate) fn names(self) -> NormNames {
        let [attention_input, attention_output, mlp_input, mlp_output] = match self {
            Self::Input => [Some("input_layernorm"), None, Some("post_attention_layernorm"), None],
            Self::Output => {
                [None, Some("post_attention_layernorm"), None, Some("post_feedforward_layernorm")]
            }
            Self::InputAndOutput => [
                Some("input_layernorm"),
                Some("post_attention_layernorm"),
                Some("pre_feedforward_layernorm"),
                Some("post_feedforward_layernorm"),
            ],
            Self::InputAndOutputOfGlm => [
                Some("input_layernorm"),
                Some("post_self_attn_layernorm"),
                Some("post_attention_layernorm"),
                Some("post_mlp_layernorm"),
            ],
            Self::Parallel => [Some("input_layernorm"), None, None, None],
        };
        NormNames { attention_input, attention_output, mlp_input, mlp_output }
    }
}

impl NormNames {
    /// The names of the norms that `layer` has. If the layer has only an MLP, the norm of its input
    /// has the name of the layer's first norm.
    pub(crate) fn of_layer(self, layer: &LayerConfig) -> Self {
        match (&layer.mixers[..], layer.mlp) {
            ([], _) => Self {
                attention_input: None,
                attention_output: None,
                mlp_input: self.attention_input,
                ..self
            },
            (_, None) => Self { mlp_input: None, mlp_output: None, ..self },
            (_, Some(_)) => self,
        }
    }
}

/// The norms of a layer. Each is `None` if the layer does not have it.
pub(super) struct LayerNorms {
    pub(super) attention_input: Option<NormWeights>,
    pub(super) attention_output: Option<NormWeights>,
    pub(super) mlp_input: Option<NormWeights>,
    pub(super) mlp_output: Option<NormWeights>,
}

impl DecoderConfig {
    /// The norms of `layer`. `at` returns the full name of a module of the layer.
    pub(super) fn layer_norms(
        &self,
        layer: &LayerConfig,
        at: &dyn Fn(&str) -> String,
    ) -> LayerNorms {
        let NormNames { attention_input, attention_output, mlp_input, mlp_output } =
            self.norms.placement.names().of_layer(layer);
        let norm = |name: Option<&str>| name.map(|name| self.residual_norm(&at(name)));
        let eps = self.norms.output_eps;
        let output = |name| norm(name).map(|norm| NormWeights { eps, ..norm });
        LayerNorms {
            attention_input: norm(attention_input),
            attention_output: output(attention_output),
            mlp_input: norm(mlp_input),
            mlp_output: output(mlp_output),
        }
    }

    /// The norm before the output matrix.
    pub(super) fn final_norm(&self) -> NormWeights {
        let own = self.residual_norm("model.norm");
        if !self.norms.plain_final {
            return own;
        }
        let weight = TensorSpec { role: TensorRole::PlainNorm, ..own.weight };
        NormWeights { weight, offset: 0.0, ..own }
    }

    /// The weights of the norm `module` of the residual stream.
    pub(super) fn residual_norm(&self, module: &str) -> NormWeights {
        let NormsConfig { kind, eps, offset, .. } = self.norms;
        NormWeights {
            kind,
            eps,
            offset,
            weight: norm(module, self.hidden_size),
            bias: (kind == NormKind::Layer).then(|| bias(module, self.hidden_size)),
        }
    }

    /// Checks that the forward pass supports the combination of norms and MLP. `file` is the file's
    /// name in error messages.
    pub(super) fn check_blocks(&self, file: &str) -> Result<(), ModelError> {
        let refused =
            |key: &str, expected: &str| Err(ModelError::unsupported(file, key, expected, "others"));
        let NormsConfig { placement, kind, output_eps, .. } = self.norms;
        check_positive(file, "post_norm_eps", output_eps)?;
        if kind != NormKind::Rms && placement.outputs() {
            return refused("norms", "layer norms of inputs only");
        }
        let layers = || self.layers.iter();
        if placement == NormPlacement::Parallel && layers().any(|layer| !layer.has_attention()) {
            return refused("norms", "attention and an MLP or experts side by side");
        }
        let is_whole = |layer: &LayerConfig| !layer.mixers.is_empty() && layer.mlp.is_some();
        if placement != NormPlacement::Input && !layers().all(is_whole) {
            return refused("norms", "norms of inputs where layers have no MLP, or only that");
        }
        if self.head_bias && self.tie_word_embeddings {
            return refused("tie_word_embeddings", "false with a bias of the output matrix");
        }
        Ok(())
    }
}
