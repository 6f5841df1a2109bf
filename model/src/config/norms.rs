//! Where the layers of a decoder have norms, and the names of these.

/// Where a layer normalizes the residual stream. The names of the weights depend on it.
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
    /// As [`InputAndOutput`](Self::InputAndOutput), with other names (GLM-4): `input_layernorm`,
    /// `post_self_attn_layernorm`, `post_attention_layernorm` and `post_mlp_layernorm`.
    InputAndOutputOfGlm,
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
    pub(crate) fn outputs(self) -> bool {
        self != Self::Input
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
        };
        NormNames { attention_input, attention_output, mlp_input, mlp_output }
    }
}
