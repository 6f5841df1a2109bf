//! The list of tensors of a decoder. Loading checks that each is present, and random models fill
//! them.

use super::{DecoderConfig, ExpertsConfig, QkNorm};

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

/// A matrix whose rows are those of several matrices, one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FusedTensor {
    /// The Hugging Face name.
    pub(crate) name: String,
    pub(crate) columns: usize,
    /// Name and number of rows of each part, in order.
    pub(crate) parts: Vec<(String, usize)>,
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
        let norms = self.norms.names();
        let norm = |list: &mut List, name: Option<&str>| {
            if let Some(name) = name {
                list.norm(&at(name), hidden);
            }
        };
        norm(list, norms.attention_input);
        list.matrix(&at("self_attn.q_proj"), queries, hidden, self.qkv_bias);
        list.matrix(&at("self_attn.k_proj"), keys, hidden, self.qkv_bias);
        list.matrix(&at("self_attn.v_proj"), keys, hidden, self.qkv_bias);
        if let Some([q_norm, k_norm]) = self.qk_norm_sizes() {
            list.norm(&at("self_attn.q_norm"), q_norm);
            list.norm(&at("self_attn.k_norm"), k_norm);
        }
        if self.attention_sinks {
            let name = at("self_attn.sinks");
            list.push(name, vec![self.num_heads], TensorRole::Bias);
        }
        list.matrix(&at("self_attn.o_proj"), hidden, queries, self.output_bias);
        norm(list, norms.attention_output);
        norm(list, norms.mlp_input);
        match self.experts.filter(|_| self.layers[layer].experts) {
            Some(experts) => self.expert_tensors(&experts, &at("mlp"), list),
            None => self.mlp_tensors(&at("mlp"), self.intermediate_size, list),
        }
        norm(list, norms.mlp_output);
    }

    /// The number of elements of the weights of `q_norm` and `k_norm`, if the model has these
    /// norms.
    #[must_use]
    pub fn qk_norm_sizes(&self) -> Option<[usize; 2]> {
        let dim = self.head_dim;
        self.qk_norm.map(|norm| match norm {
            QkNorm::Head => [dim, dim],
            QkNorm::Position => [self.num_heads * dim, self.num_kv_heads * dim],
        })
    }

    /// The tensors that files may contain in place of several of [`Self::tensors`] (Phi-3).
    pub(crate) fn fused_tensors(&self) -> Vec<FusedTensor> {
        let (queries, keys) = (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim);
        let inner = self.intermediate_size;
        let attention = [("q_proj", queries), ("k_proj", keys), ("v_proj", keys)];
        let mlp = [("gate_proj", inner), ("up_proj", inner)];
        let modules =
            [("self_attn", "qkv_proj", &attention[..]), ("mlp", "gate_up_proj", &mlp[..])];
        let fused = |layer: usize| {
            modules.map(|(module, fused, parts)| {
                let name = |part: &str| format!("model.layers.{layer}.{module}.{part}.weight");
                FusedTensor {
                    name: name(fused),
                    columns: self.hidden_size,
                    parts: parts.iter().map(|(part, rows)| (name(part), *rows)).collect(),
                }
            })
        };
        (0..self.layers.len()).flat_map(fused).collect()
    }

    fn mlp_tensors(&self, module: &str, width: usize, list: &mut List) {
        let (hidden, bias) = (self.hidden_size, self.mlp_bias);
        list.matrix(&format!("{module}.gate_proj"), width, hidden, bias);
        list.matrix(&format!("{module}.up_proj"), width, hidden, bias);
        list.matrix(&format!("{module}.down_proj"), hidden, width, bias);
    }

    fn expert_tensors(&self, experts: &ExpertsConfig, module: &str, list: &mut List) {
        list.matrix(
            &format!("{module}.gate"),
            experts.count,
            self.hidden_size,
            experts.router_bias,
        );
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
