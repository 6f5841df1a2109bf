//! The list of tensors of a decoder. Loading checks that each is present, and random models fill
//! them.

use super::{DecoderConfig, ExpertsConfig};

/// The kind of a tensor, by which random models choose its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorRole {
    /// A matrix or an embedding.
    Matrix,
    /// The weight of an RMS norm.
    Norm,
    /// The bias of a projection.
    Bias,
}

/// Name and shape of a tensor that a configuration requires.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// The Hugging Face name.
    pub name: String,
    /// The sizes of the dimensions, outermost first.
    pub shape: Vec<usize>,
    /// The kind of tensor.
    pub role: TensorRole,
}

impl DecoderConfig {
    /// All tensors that the decoder reads, in the order of the forward pass.
    #[must_use]
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let mut list = List(Vec::new());
        let (hidden, vocab) = (self.hidden_size, self.vocab_size);
        list.matrix("model.embed_tokens", vocab, hidden, false);
        for layer in 0..self.layers.len() {
            self.layer_tensors(layer, &mut list);
        }
        list.norm("model.norm", hidden);
        if !self.tie_word_embeddings {
            list.matrix("lm_head", vocab, hidden, false);
        }
        list.0
    }

    fn layer_tensors(&self, layer: usize, list: &mut List) {
        let hidden = self.hidden_size;
        let (queries, keys) = (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim);
        let at = |part: &str| format!("model.layers.{layer}.{part}");
        list.norm(&at("input_layernorm"), hidden);
        list.matrix(&at("self_attn.q_proj"), queries, hidden, self.qkv_bias);
        list.matrix(&at("self_attn.k_proj"), keys, hidden, self.qkv_bias);
        list.matrix(&at("self_attn.v_proj"), keys, hidden, self.qkv_bias);
        if self.qk_norm {
            list.norm(&at("self_attn.q_norm"), self.head_dim);
            list.norm(&at("self_attn.k_norm"), self.head_dim);
        }
        list.matrix(&at("self_attn.o_proj"), hidden, queries, self.output_bias);
        list.norm(&at("post_attention_layernorm"), hidden);
        if self.sandwich_norms {
            list.norm(&at("pre_feedforward_layernorm"), hidden);
        }
        match self.experts.filter(|_| self.layers[layer].experts) {
            Some(experts) => self.expert_tensors(&experts, &at("mlp"), list),
            None => self.mlp_tensors(&at("mlp"), self.intermediate_size, list),
        }
        if self.sandwich_norms {
            list.norm(&at("post_feedforward_layernorm"), hidden);
        }
    }

    fn mlp_tensors(&self, module: &str, width: usize, list: &mut List) {
        let (hidden, bias) = (self.hidden_size, self.mlp_bias);
        list.matrix(&format!("{module}.gate_proj"), width, hidden, bias);
        list.matrix(&format!("{module}.up_proj"), width, hidden, bias);
        list.matrix(&format!("{module}.down_proj"), hidden, width, bias);
    }

    fn expert_tensors(&self, experts: &ExpertsConfig, module: &str, list: &mut List) {
        list.matrix(&format!("{module}.gate"), experts.count, self.hidden_size, false);
        for index in 0..experts.count {
            self.mlp_tensors(&format!("{module}.experts.{index}"), experts.width, list);
        }
        if let Some(width) = experts.shared_width {
            self.mlp_tensors(&format!("{module}.shared_expert"), width, list);
            list.matrix(&format!("{module}.shared_expert_gate"), 1, self.hidden_size, false);
        }
    }

    /// Total number of elements of all tensors, saturating at `u64::MAX`.
    #[must_use]
    pub fn parameter_count(&self) -> u64 {
        let elements =
            |spec: &TensorSpec| spec.shape.iter().fold(1_u64, |n, d| n.saturating_mul(*d as u64));
        self.tensors().iter().map(elements).fold(0, u64::saturating_add)
    }
}

struct List(Vec<TensorSpec>);

impl List {
    fn matrix(&mut self, module: &str, rows: usize, columns: usize, bias: bool) {
        self.push(format!("{module}.weight"), vec![rows, columns], TensorRole::Matrix);
        if bias {
            self.push(format!("{module}.bias"), vec![rows], TensorRole::Bias);
        }
    }

    fn norm(&mut self, module: &str, size: usize) {
        self.push(format!("{module}.weight"), vec![size], TensorRole::Norm);
    }

    fn push(&mut self, name: String, shape: Vec<usize>, role: TensorRole) {
        self.0.push(TensorSpec { name, shape, role });
    }
}
