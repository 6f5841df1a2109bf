//! The families of encoders: their names in `config.json`, and the names of their modules in files.

/// A family of encoders, whose files have the same names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EncoderFamily {
    /// BERT: all-MiniLM, bge, e5, gte, snowflake-arctic-embed.
    Bert,
    /// RoBERTa and XLM-RoBERTa: multilingual-e5, bge-m3, bge-reranker-v2-m3.
    Roberta,
    /// MPNet: all-mpnet-base, multi-qa-mpnet-base.
    MpNet,
    /// DistilBERT.
    DistilBert,
    /// ModernBERT: gte-modernbert, granite-embedding r2, nomic-embed modernbert.
    ModernBert,
    /// Nomic BERT: nomic-embed-text-v1 and v1.5.
    NomicBert,
    /// Nomic BERT with a mixture of experts in each second layer: nomic-embed-text-v2-moe.
    NomicBertMoe,
    /// JinaBERT, with ALiBi: jina-embeddings-v2, jina-reranker-v1.
    JinaBert,
    /// JinaBERT with norms of queries and keys: jina-embeddings-v2-base-code.
    JinaCode,
    /// Gemma 3 with attention in both directions: EmbeddingGemma.
    Gemma,
    /// EuroBERT: the layers of Llama with attention in both directions.
    EuroBert,
    /// GTE, with a rotary embedding: gte-base-en-v1.5, gte-multilingual-base,
    /// snowflake-arctic-embed-m-v2.0.
    Gte,
    /// XLM-RoBERTa in the files of Jina AI: jina-reranker-v2.
    JinaRoberta,
}

/// The names of a family's modules. Names of layers begin after `layer`, in which `{}` is the
/// layer's index.
#[derive(Clone, Copy, Debug)]
pub(super) struct ModuleNames {
    pub(super) tokens: &'static str,
    pub(super) positions: &'static str,
    pub(super) token_types: &'static str,
    pub(super) embedding_norm: &'static str,
    pub(super) layer: &'static str,
    pub(super) qkv: [&'static str; 3],
    /// The matrix that has the rows of all three projections, if files have it.
    pub(super) fused_qkv: &'static str,
    pub(super) output: &'static str,
    /// The norms of queries and keys.
    pub(super) query_key_norms: [&'static str; 2],
    pub(super) attention_norm: &'static str,
    /// The norm of attention's output before it is added to the residual stream, or added once more.
    pub(super) attention_output_norm: &'static str,
    pub(super) gate: &'static str,
    pub(super) up: &'static str,
    /// The matrix that has the rows of the gate, then of the inner features, if files have it.
    pub(super) fused_gate_up: &'static str,
    /// The same with the rows of the inner features first.
    pub(super) fused_up_gate: &'static str,
    pub(super) down: &'static str,
    /// The projection to the scores of experts, if a layer has some.
    pub(super) router: &'static str,
    /// The tensors that have the projections of all experts: to the inner features, and back.
    pub(super) all_experts: [&'static str; 2],
    /// The tensor that is added to the output of all experts, if files have it.
    pub(super) experts_bias: &'static str,
    pub(super) mlp_norm: &'static str,
    /// The norm of the MLP's output before it is added to the residual stream.
    pub(super) mlp_output_norm: &'static str,
    pub(super) final_norm: &'static str,
    pub(super) score_bias: &'static str,
}

const BERT: ModuleNames = ModuleNames {
    tokens: "embeddings.word_embeddings",
    positions: "embeddings.position_embeddings",
    token_types: "embeddings.token_type_embeddings",
    embedding_norm: "embeddings.LayerNorm",
    layer: "encoder.layer.{}.",
    qkv: ["attention.self.query", "attention.self.key", "attention.self.value"],
    fused_qkv: "",
    output: "attention.output.dense",
    query_key_norms: ["", ""],
    attention_norm: "attention.output.LayerNorm",
    attention_output_norm: "",
    gate: "",
    up: "intermediate.dense",
    fused_gate_up: "",
    fused_up_gate: "",
    down: "output.dense",
    router: "",
    all_experts: ["", ""],
    experts_bias: "",
    mlp_norm: "output.LayerNorm",
    mlp_output_norm: "",
    final_norm: "",
    score_bias: "encoder.relative_attention_bias",
};

const MPNET: ModuleNames = ModuleNames {
    qkv: ["attention.attn.q", "attention.attn.k", "attention.attn.v"],
    output: "attention.attn.o",
    attention_norm: "attention.LayerNorm",
    ..BERT
};

const DISTILBERT: ModuleNames = ModuleNames {
    layer: "transformer.layer.{}.",
    qkv: ["attention.q_lin", "attention.k_lin", "attention.v_lin"],
    output: "attention.out_lin",
    attention_norm: "sa_layer_norm",
    up: "ffn.lin1",
    down: "ffn.lin2",
    mlp_norm: "output_layer_norm",
    ..BERT
};

const MODERNBERT: ModuleNames = ModuleNames {
    tokens: "embeddings.tok_embeddings",
    embedding_norm: "embeddings.norm",
    layer: "layers.{}.",
    qkv: ["attn.q", "attn.k", "attn.v"],
    fused_qkv: "attn.Wqkv",
    output: "attn.Wo",
    attention_norm: "attn_norm",
    gate: "mlp.gate",
    up: "mlp.up",
    fused_gate_up: "mlp.Wi",
    down: "mlp.Wo",
    mlp_norm: "mlp_norm",
    final_norm: "final_norm",
    ..BERT
};

const NOMIC: ModuleNames = ModuleNames {
    embedding_norm: "emb_ln",
    layer: "encoder.layers.{}.",
    qkv: ["attn.q", "attn.k", "attn.v"],
    fused_qkv: "attn.Wqkv",
    output: "attn.out_proj",
    attention_norm: "norm1",
    gate: "mlp.fc12",
    up: "mlp.fc11",
    down: "mlp.fc2",
    mlp_norm: "norm2",
    ..BERT
};

const NOMIC_MOE: ModuleNames = ModuleNames {
    up: "mlp.fc1",
    router: "mlp.router.layer",
    all_experts: ["mlp.experts.mlp.w1", "mlp.experts.mlp.w2"],
    experts_bias: "mlp.experts.bias",
    ..NOMIC
};

/// The names of llama.cpp for models with norms after attention and after the MLP. Its files of
/// RoBERTa and DistilBERT have them, too.
const GGUF: ModuleNames = ModuleNames {
    tokens: "token_embd",
    positions: "position_embd",
    token_types: "token_types",
    embedding_norm: "token_embd_norm",
    layer: "blk.{}.",
    qkv: ["attn_q", "attn_k", "attn_v"],
    fused_qkv: "attn_qkv",
    output: "attn_output",
    query_key_norms: ["attn_q_norm", "attn_k_norm"],
    attention_norm: "attn_output_norm",
    attention_output_norm: "post_attention_norm",
    gate: "ffn_gate",
    up: "ffn_up",
    fused_gate_up: "",
    fused_up_gate: "",
    down: "ffn_down",
    router: "ffn_gate_inp",
    all_experts: ["ffn_up_exps.weight", "ffn_down_exps.weight"],
    experts_bias: "",
    mlp_norm: "layer_output_norm",
    mlp_output_norm: "post_ffw_norm",
    final_norm: "",
    score_bias: "",
};

/// What the matrix of the inner features is called if `ffn_up` is the combined one. No file has this
/// name.
pub(super) const SPLIT_UP: &str = "ffn_inner";

/// The names of llama.cpp for ModernBERT. The combined matrix has the name that the second of its
/// parts has in other files.
const GGUF_MODERNBERT: ModuleNames = ModuleNames {
    attention_norm: "attn_norm",
    up: SPLIT_UP,
    fused_gate_up: "ffn_up",
    mlp_norm: "ffn_norm",
    final_norm: "output_norm",
    ..GGUF
};

/// The names of llama.cpp for JinaBERT. Older files have the parts of the combined matrix.
const GGUF_JINA: ModuleNames = ModuleNames { up: SPLIT_UP, fused_gate_up: "ffn_up", ..GGUF };

/// The names of llama.cpp for JinaBERT with norms of queries and keys.
const GGUF_JINA_CODE: ModuleNames = ModuleNames {
    attention_output_norm: "attn_output_norm",
    attention_norm: "attn_norm_2",
    up: SPLIT_UP,
    fused_up_gate: "ffn_up",
    ..GGUF
};

/// The names of llama.cpp for models with the layers of decoders.
const GGUF_DECODER: ModuleNames = ModuleNames {
    attention_norm: "attn_norm",
    mlp_norm: "ffn_norm",
    final_norm: "output_norm",
    ..GGUF
};

const GEMMA: ModuleNames = ModuleNames {
    tokens: "embed_tokens",
    layer: "layers.{}.",
    qkv: ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    output: "self_attn.o_proj",
    query_key_norms: ["self_attn.q_norm", "self_attn.k_norm"],
    attention_norm: "input_layernorm",
    attention_output_norm: "post_attention_layernorm",
    gate: "mlp.gate_proj",
    up: "mlp.up_proj",
    down: "mlp.down_proj",
    mlp_norm: "pre_feedforward_layernorm",
    mlp_output_norm: "post_feedforward_layernorm",
    final_norm: "norm",
    ..BERT
};

const EUROBERT: ModuleNames = ModuleNames { mlp_norm: "post_attention_layernorm", ..GEMMA };

const JINA: ModuleNames = ModuleNames {
    gate: "mlp.gate",
    up: "mlp.up",
    fused_gate_up: "mlp.gated_layers",
    down: "mlp.wo",
    mlp_norm: "mlp.layernorm",
    ..BERT
};

const JINA_CODE: ModuleNames = ModuleNames {
    query_key_norms: ["attention.self.layer_norm_q", "attention.self.layer_norm_k"],
    attention_output_norm: "attention.output.LayerNorm",
    attention_norm: "layer_norm_1",
    fused_gate_up: "",
    fused_up_gate: "mlp.up_gated_layer",
    down: "mlp.down_layer",
    mlp_norm: "layer_norm_2",
    ..JINA
};

const GTE: ModuleNames = ModuleNames {
    qkv: ["attention.q_proj", "attention.k_proj", "attention.v_proj"],
    fused_qkv: "attention.qkv_proj",
    output: "attention.o_proj",
    attention_norm: "attn_ln",
    gate: "mlp.gate_proj",
    up: "mlp.up_proj",
    fused_up_gate: "mlp.up_gate_proj",
    down: "mlp.down_proj",
    mlp_norm: "mlp_ln",
    ..BERT
};

const JINA_ROBERTA: ModuleNames = ModuleNames {
    qkv: ["mixer.q", "mixer.k", "mixer.v"],
    fused_qkv: "mixer.Wqkv",
    output: "mixer.out_proj",
    up: "mlp.fc1",
    ..NOMIC
};

/// Whose names the tensors of a model have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorNames {
    /// The names of the family in transformers.
    HuggingFace,
    /// Those of llama.cpp.
    Gguf,
}

impl EncoderFamily {
    /// The family with this `general.architecture` of a GGUF file; `None` if it is not an encoder.
    pub(crate) fn of_gguf(name: &str) -> Option<Self> {
        Some(match name {
            "bert" => Self::Bert,
            "nomic-bert" => Self::NomicBert,
            "nomic-bert-moe" => Self::NomicBertMoe,
            "jina-bert-v2" => Self::JinaBert,
            "modern-bert" => Self::ModernBert,
            "gemma-embedding" => Self::Gemma,
            "eurobert" => Self::EuroBert,
            _ => return None,
        })
    }

    /// The family of a `model_type` of `config.json`; `None` if it is not an encoder.
    pub(crate) fn of_model_type(name: &str) -> Option<Self> {
        Some(match name {
            "bert" => Self::Bert,
            "roberta" | "xlm-roberta" | "camembert" => Self::Roberta,
            "mpnet" => Self::MpNet,
            "distilbert" => Self::DistilBert,
            "modernbert" => Self::ModernBert,
            "nomic_bert" => Self::NomicBert,
            "gemma3_text" => Self::Gemma,
            "eurobert" => Self::EuroBert,
            "new" | "gte" => Self::Gte,
            _ => return None,
        })
    }

    /// The name of the family.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Bert => "BERT",
            Self::Roberta => "RoBERTa",
            Self::MpNet => "MPNet",
            Self::DistilBert => "DistilBERT",
            Self::ModernBert => "ModernBERT",
            Self::NomicBert => "Nomic BERT",
            Self::NomicBertMoe => "Nomic BERT with experts",
            Self::JinaBert => "JinaBERT",
            Self::JinaCode => "JinaBERT for code",
            Self::Gemma => "EmbeddingGemma",
            Self::EuroBert => "EuroBERT",
            Self::Gte => "GTE",
            Self::JinaRoberta => "XLM-RoBERTa of Jina AI",
        }
    }

    /// All families.
    pub fn all() -> impl Iterator<Item = Self> {
        [
            Self::Bert,
            Self::Roberta,
            Self::MpNet,
            Self::DistilBert,
            Self::ModernBert,
            Self::NomicBert,
            Self::NomicBertMoe,
            Self::JinaBert,
            Self::JinaCode,
            Self::Gemma,
            Self::EuroBert,
            Self::Gte,
            Self::JinaRoberta,
        ]
        .into_iter()
    }

    pub(super) fn names(self, kind: TensorNames) -> &'static ModuleNames {
        match self {
            Self::ModernBert if kind == TensorNames::Gguf => &GGUF_MODERNBERT,
            Self::Gemma | Self::EuroBert if kind == TensorNames::Gguf => &GGUF_DECODER,
            Self::JinaBert if kind == TensorNames::Gguf => &GGUF_JINA,
            Self::JinaCode if kind == TensorNames::Gguf => &GGUF_JINA_CODE,
            _ if kind == TensorNames::Gguf => &GGUF,
            Self::Bert | Self::Roberta => &BERT,
            Self::MpNet => &MPNET,
            Self::DistilBert => &DISTILBERT,
            Self::ModernBert => &MODERNBERT,
            Self::NomicBert => &NOMIC,
            Self::NomicBertMoe => &NOMIC_MOE,
            Self::JinaBert => &JINA,
            Self::JinaCode => &JINA_CODE,
            Self::Gemma => &GEMMA,
            Self::EuroBert => &EUROBERT,
            Self::Gte => &GTE,
            Self::JinaRoberta => &JINA_ROBERTA,
        }
    }
}
