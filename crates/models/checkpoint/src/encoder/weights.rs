//! The weights of an encoder: the names, shapes and kinds of all tensors.

use super::families::{ModuleNames, SPLIT_UP};
use super::{
    EncoderConfig, EncoderFamily, EncoderNorm, NormOrder, QueryKeyNorms, ScoreBias, TasksConfig,
    TensorNames,
};
use crate::config::{
    ExpertsConfig, ExpertsWeights, LinearWeights, MlpInputs, MlpWeights, PlainFunction, TensorRole,
    TensorSpec,
};
use crate::error::ModelError;
use crate::weights::Weights;

/// What PyTorch calls a weight that is computed from several tensors.
const PARAMETRIZED: &str = "parametrizations.weight";

/// A layer norm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncoderNormWeights {
    /// The weight, `[hidden_size]`.
    pub weight: TensorSpec,
    /// The bias, `[hidden_size]`, if the norm has one.
    pub bias: Option<TensorSpec>,
}

/// The weights of an MLP, or of the experts in its place.
#[allow(clippy::large_enum_variant, reason = "there is one per layer, while a model is loaded")]
#[derive(Clone, Debug, PartialEq)]
pub enum EncoderMlpWeights {
    /// The projections of an MLP.
    Dense {
        /// The projection to the gate, `[inner_size, hidden_size]`, if there is one.
        gate: Option<LinearWeights>,
        /// The projection to the inner features, `[inner_size, hidden_size]`.
        up: LinearWeights,
        /// The projection of the inner features, `[hidden_size, inner_size]`.
        down: LinearWeights,
    },
    /// A mixture of experts.
    Experts {
        /// The router and the experts.
        experts: ExpertsWeights,
        /// A bias of the sum of their outputs, `[hidden_size]`, if there is one.
        bias: Option<TensorSpec>,
    },
}

/// The matrices `A` and `B` of all tasks for projections with the same input, or for a table.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskWeights {
    /// The matrices `A`, `[tasks, rank, in]`, or `[tasks, projections * rank, in]` if each projection
    /// has its own; those of a table are transposed, `[tasks, rows, rank]`.
    pub first: TensorSpec,
    /// The matrices `B` of all projections, `[tasks, out, rank]`; those of a table are transposed,
    /// `[tasks, rank, hidden_size]`.
    pub second: TensorSpec,
    /// The factor of the updates.
    pub scale: f32,
}

/// The matrices of all tasks for the projections of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerTaskWeights {
    /// Those of the projections to queries, keys and values.
    pub qkv: TaskWeights,
    /// Those of the output projection of attention.
    pub output: TaskWeights,
    /// Those of the projections to the gates, if there are some, and to the inner features.
    pub up: TaskWeights,
    /// Those of the projection of the inner features.
    pub down: TaskWeights,
}

/// The weights of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderLayerWeights {
    /// The projections to queries, `[heads * head_dim, hidden_size]`, and to keys and values,
    /// `[kv_heads * head_dim, hidden_size]` each.
    pub qkv: [LinearWeights; 3],
    /// The norms of queries and keys, of `head_dim` values or of all heads together, if there are
    /// some.
    pub query_key_norms: Option<[EncoderNormWeights; 2]>,
    /// The output projection of attention, `[hidden_size, heads * head_dim]`.
    pub output: LinearWeights,
    /// The norm after or before attention; `None` if there is none, as in the first layer of
    /// ModernBERT.
    pub attention_norm: Option<EncoderNormWeights>,
    /// The norm of attention's output before it is added to the residual stream, or added once more,
    /// if there is one.
    pub attention_output_norm: Option<EncoderNormWeights>,
    /// The MLP.
    pub mlp: EncoderMlpWeights,
    /// The norm after or before the MLP.
    pub mlp_norm: EncoderNormWeights,
    /// The norm of the MLP's output before it is added to the residual stream, if there is one.
    pub mlp_output_norm: Option<EncoderNormWeights>,
    /// The matrices of all tasks, if there are tasks.
    pub tasks: Option<LayerTaskWeights>,
}

/// All weights of an encoder.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderWeights {
    /// The embedding of tokens, `[vocab_size, hidden_size]`.
    pub tokens: TensorSpec,
    /// The learned positions, `[rows, hidden_size]`.
    pub positions: Option<TensorSpec>,
    /// The embedding of token types, `[token_types, hidden_size]`.
    pub token_types: Option<TensorSpec>,
    /// The matrices of all tasks for these two tables, as far as there are tables and tasks.
    pub table_tasks: [Option<TaskWeights>; 2],
    /// The norm of the embeddings, if there is one.
    pub embedding_norm: Option<EncoderNormWeights>,
    /// The learned biases of scores, `[buckets, heads]`.
    pub score_bias: Option<TensorSpec>,
    /// The layers.
    pub layers: Vec<EncoderLayerWeights>,
    /// The norm after the last layer, if there is one.
    pub final_norm: Option<EncoderNormWeights>,
}

impl EncoderConfig {
    /// All weights that the encoder has.
    #[must_use]
    pub fn weights(&self) -> EncoderWeights {
        let names = self.family.names(self.names);
        let hidden = self.hidden_size;
        let table = |name: &str, rows: usize| TensorSpec {
            name: format!("{}{name}.weight", self.prefix),
            shape: vec![rows, hidden],
            role: TensorRole::Bias,
        };
        let norm = |name: &str| self.norm(&format!("{}{name}", self.prefix));
        EncoderWeights {
            tokens: TensorSpec { role: TensorRole::Table, ..table(names.tokens, self.vocab_size) },
            positions: self.learned_positions.map(|table_of| table(names.positions, table_of.rows)),
            token_types: (self.token_types > 0).then(|| table(names.token_types, self.token_types)),
            table_tasks: [(names.tokens, self.vocab_size), (names.token_types, self.token_types)]
                .map(|(name, rows)| {
                    let tasks = self.tasks.as_ref().filter(|tasks| tasks.tables)?;
                    let TasksConfig { names, rank, scale, .. } = tasks;
                    let name = format!("{}{name}", self.prefix);
                    let shape = |a, b| vec![names.len(), a, b];
                    let shapes = [shape(rows, *rank), shape(*rank, hidden)];
                    (rows > 0).then(|| task(&name, shapes, *scale))
                }),
            embedding_norm: self.embedding_norm.then(|| norm(names.embedding_norm)),
            score_bias: match self.score_bias {
                Some(ScoreBias::Buckets { count, .. }) => Some(TensorSpec {
                    shape: vec![count, self.heads],
                    ..table(names.score_bias, count)
                }),
                Some(ScoreBias::Alibi) | None => None,
            },
            layers: (0..self.layers.len()).map(|index| self.layer(index)).collect(),
            final_norm: (!names.final_norm.is_empty()).then(|| norm(names.final_norm)),
        }
    }

    fn layer(&self, index: usize) -> EncoderLayerWeights {
        let names = self.family.names(self.names);
        let at = |name: &str| format!("{}{name}", self.layer_prefix(index));
        let (hidden, inner) = (self.hidden_size, self.inner_size);
        let (queries, keys) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let attention = |name: &str, shape| linear(&at(name), shape, self.attention_bias);
        let [q, k, v] = names.qkv;
        let norms_of = |sizes: [usize; 2]| {
            let [q, k] = names.query_key_norms;
            Some([self.norm_of(&at(q), sizes[0]), self.norm_of(&at(k), sizes[1])])
        };
        let is_around = self.order == NormOrder::Around;
        let has_output_norm = is_around || self.order == NormOrder::AfterTwice;
        let mlp = |name: &str, shape, bias| linear(&at(name), shape, bias);
        // The embeddings are normalized already.
        let is_first = index == 0 && self.order == NormOrder::Before && self.embedding_norm;
        EncoderLayerWeights {
            qkv: [
                attention(q, [queries, hidden]),
                attention(k, [keys, hidden]),
                attention(v, [keys, hidden]),
            ],
            query_key_norms: match self.query_key_norms {
                QueryKeyNorms::None => None,
                QueryKeyNorms::Heads => norms_of([self.head_dim; 2]),
                QueryKeyNorms::Rows => norms_of([queries, keys]),
            },
            output: attention(names.output, [hidden, queries]),
            attention_norm: (!is_first).then(|| self.norm(&at(names.attention_norm))),
            attention_output_norm: has_output_norm
                .then(|| self.norm(&at(names.attention_output_norm))),
            mlp: match &self.layers[index].experts {
                Some(config) => self.experts(config, names, &self.layer_prefix(index)),
                None => EncoderMlpWeights::Dense {
                    gate: self
                        .activation
                        .is_gated()
                        .then(|| mlp(names.gate, [inner, hidden], self.inner_bias)),
                    up: mlp(names.up, [inner, hidden], self.inner_bias),
                    down: mlp(names.down, [hidden, inner], self.down_bias),
                },
            },
            mlp_norm: self.norm(&at(names.mlp_norm)),
            mlp_output_norm: is_around.then(|| self.norm(&at(names.mlp_output_norm))),
            tasks: self.tasks.as_ref().map(|TasksConfig { names: tasks, rank, scale, .. }| {
                // `first` is the number of matrices `A` of a task.
                let task = |name: &str, first: usize, [rows, columns]: [usize; 2]| {
                    let [first, second] = [[first * rank, columns], [rows, *rank]];
                    let shapes = [first, second].map(|[a, b]| vec![tasks.len(), a, b]);
                    task(&at(name), shapes, *scale)
                };
                let (qkv, parts) = match names.fused_qkv {
                    "" => (q, 3),
                    fused => (fused, 1),
                };
                let inputs = if self.activation.is_gated() { 2 } else { 1 };
                LayerTaskWeights {
                    qkv: task(qkv, parts, [queries + 2 * keys, hidden]),
                    output: task(names.output, 1, [hidden, queries]),
                    up: task(names.up, inputs, [inputs * inner, hidden]),
                    down: task(names.down, 1, [hidden, inner]),
                }
            }),
        }
    }

    /// The experts of the layer whose tensors have the prefix `at`. Those of one expert have names
    /// that no file has: [`Self::prepare`] gives them.
    fn experts(&self, config: &ExpertsConfig, names: &ModuleNames, at: &str) -> EncoderMlpWeights {
        let (hidden, inner) = (self.hidden_size, config.width);
        let expert = |index: usize| {
            let part =
                |name: &str, shape| linear(&format!("{at}experts.{index}.{name}"), shape, false);
            let up = part("up", [inner, hidden]);
            let inputs = MlpInputs::Plain(up, PlainFunction::Gelu);
            MlpWeights { inputs, down: part("down", [hidden, inner]), output_factor: 1.0 }
        };
        let bias = (!names.experts_bias.is_empty()).then(|| TensorSpec {
            name: format!("{at}{}", names.experts_bias),
            shape: vec![hidden],
            role: TensorRole::Bias,
        });
        let experts = ExpertsWeights {
            config: *config,
            router_norm: None,
            router: linear(&format!("{at}{}", names.router), [config.count, hidden], false),
            bias: None,
            factors: None,
            experts: (0..config.count).map(expert).collect(),
            shared: None,
        };
        EncoderMlpWeights::Experts { experts, bias }
    }

    /// Whether a tensor with this name belongs to a layer or to the norm of the embeddings. Some files
    /// have the frequencies of rotary embeddings, which are computed.
    pub(crate) fn is_of_layers(&self, name: &str) -> bool {
        let names = self.family.names(self.names);
        let own = name.strip_prefix(&self.prefix);
        let start = names.layer.split("{}").next().unwrap_or_default();
        let is_norm =
            |name: &str| !names.embedding_norm.is_empty() && name.starts_with(names.embedding_norm);
        let is_part = |name: &str| name.starts_with(start) || is_norm(name);
        own.is_some_and(|name| is_part(name) && !name.ends_with(".inv_freq"))
    }

    fn layer_prefix(&self, index: usize) -> String {
        format!(
            "{}{}",
            self.prefix,
            self.family.names(self.names).layer.replace("{}", &index.to_string())
        )
    }

    pub(super) fn norm(&self, module: &str) -> EncoderNormWeights {
        self.norm_of(module, self.hidden_size)
    }

    fn norm_of(&self, module: &str, size: usize) -> EncoderNormWeights {
        let size = vec![size];
        let bias = TensorSpec {
            name: format!("{module}.bias"),
            shape: size.clone(),
            role: TensorRole::Bias,
        };
        EncoderNormWeights {
            weight: TensorSpec {
                name: format!("{module}.weight"),
                shape: size,
                role: self.norm_role(),
            },
            bias: self.norm_bias.then_some(bias),
        }
    }

    fn norm_role(&self) -> TensorRole {
        match self.norm {
            EncoderNorm::Rms { offset } if offset != 0.0 => TensorRole::Norm,
            _ => TensorRole::PlainNorm,
        }
    }

    /// All tensors, in the order of the forward pass.
    #[must_use]
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let mut list = Vec::new();
        let EncoderWeights {
            tokens,
            positions,
            token_types,
            table_tasks,
            embedding_norm,
            score_bias,
            layers,
            final_norm,
        } = self.weights();
        list.extend([tokens].into_iter().chain(positions).chain(token_types).chain(score_bias));
        list.extend(table_tasks.into_iter().flatten().flat_map(TaskWeights::list));
        embedding_norm.into_iter().for_each(|norm| norm.list(&mut list));
        for layer in layers {
            let EncoderLayerWeights {
                qkv,
                query_key_norms,
                output,
                attention_norm,
                attention_output_norm,
                mlp,
                mlp_norm,
                mlp_output_norm,
                tasks,
            } = layer;
            let mut linears = [qkv.into(), vec![output]].concat();
            match mlp {
                EncoderMlpWeights::Dense { gate, up, down } => {
                    linears.extend(gate.into_iter().chain([up, down]));
                }
                EncoderMlpWeights::Experts { experts, bias } => {
                    linears.push(experts.router);
                    linears.extend(experts.experts.into_iter().flat_map(MlpWeights::linears));
                    list.extend(bias);
                }
            }
            list.extend(
                linears
                    .into_iter()
                    .flat_map(|LinearWeights { weight, bias }| [weight].into_iter().chain(bias)),
            );
            query_key_norms.into_iter().flatten().for_each(|norm| norm.list(&mut list));
            let optional = [attention_norm, attention_output_norm, mlp_output_norm];
            optional.into_iter().flatten().for_each(|norm| norm.list(&mut list));
            mlp_norm.list(&mut list);
            if let Some(LayerTaskWeights { qkv, output, up, down }) = tasks {
                list.extend([qkv, output, up, down].into_iter().flat_map(TaskWeights::list));
            }
        }
        final_norm.into_iter().for_each(|norm| norm.list(&mut list));
        list
    }

    /// Gives the tensors of a directory the names that the configuration requires, finds the prefix
    /// of the encoder within a larger model, and divides matrices that combine several.
    ///
    /// # Errors
    /// [`ModelError::WrongShape`] for a combined matrix of another number of rows.
    pub(crate) fn prepare(&mut self, weights: &mut Weights) -> Result<(), ModelError> {
        let names = self.family.names(self.names);
        if self.tasks.is_some() {
            let known: Vec<String> = weights.names().map(str::to_owned).collect();
            for name in known {
                if let Some(module) = name.strip_suffix(&format!(".{PARAMETRIZED}.original")) {
                    weights.rename(&name, &format!("{module}.weight"));
                }
            }
        }
        let end = format!("{}.weight", names.tokens);
        let prefixes = [
            "",
            "bert.",
            "roberta.",
            "mpnet.",
            "distilbert.",
            "model.",
            "nomic_bert.",
            "gte.",
            "new.",
        ];
        let found = prefixes.iter().find(|prefix| weights.contains(&format!("{prefix}{end}")));
        // `check` reports the missing embedding.
        (*found.unwrap_or(&"")).clone_into(&mut self.prefix);
        if self.family == EncoderFamily::JinaBert {
            self.prepare_jina(weights);
        }
        let names = self.family.names(self.names);
        // Files that were converted from TensorFlow have older names of the tensors of norms.
        let older: Vec<String> = weights.names().map(str::to_owned).collect();
        for name in older {
            for (old, new) in [("LayerNorm.gamma", "weight"), ("LayerNorm.beta", "bias")] {
                if let Some(start) = name.strip_suffix(old) {
                    let new = format!("{start}LayerNorm.{new}");
                    if !weights.contains(&new) {
                        weights.rename(&name, &new);
                    }
                }
            }
        }
        let mut stacked = Vec::new();
        for (index, layer) in self.weights().layers.into_iter().enumerate() {
            let prefix = self.layer_prefix(index);
            let mut add = |fused: &str, parts: Vec<LinearWeights>| {
                if fused.is_empty() {
                    return;
                }
                let biases: Vec<_> = parts.iter().filter_map(|part| part.bias.clone()).collect();
                let matrices = parts.into_iter().map(|part| part.weight).collect();
                stacked.push((format!("{prefix}{fused}.weight"), matrices));
                if !biases.is_empty() {
                    stacked.push((format!("{prefix}{fused}.bias"), biases));
                }
            };
            add(names.fused_qkv, layer.qkv.into());
            match layer.mlp {
                EncoderMlpWeights::Dense { gate, up, down: _ } => {
                    let up = [up];
                    add(names.fused_up_gate, up.iter().chain(&gate).cloned().collect());
                    add(names.fused_gate_up, gate.into_iter().chain(up).collect());
                }
                EncoderMlpWeights::Experts { experts, bias: _ } => {
                    let is_transposed = self.names == TensorNames::HuggingFace;
                    let linears = experts.experts.into_iter().map(MlpWeights::linears);
                    let [ups, downs] = [0, 1].map(|part| {
                        linears.clone().map(|linears| linears[part].weight.clone()).collect()
                    });
                    let [up, down] = names.all_experts.map(|name| format!("{prefix}{name}"));
                    weights.divide_experts(&up, ups, false)?;
                    weights.divide_experts(&down, downs, is_transposed)?;
                }
            }
        }
        weights.split_stacked(stacked)
    }

    /// Finds out by the tensors whether JinaBERT has norms of queries and keys, and gives a matrix of
    /// inner features the name that it has beside a combined matrix in newer files.
    fn prepare_jina(&mut self, weights: &mut Weights) {
        let code = EncoderFamily::JinaCode.names(self.names);
        let [norm, _] = code.query_key_norms;
        if weights.contains(&format!("{}{norm}.weight", self.layer_prefix(0))) {
            self.family = EncoderFamily::JinaCode;
            self.query_key_norms = QueryKeyNorms::Rows;
            self.order = NormOrder::AfterTwice;
        }
        if self.names == TensorNames::HuggingFace {
            return;
        }
        for index in 0..self.layers.len() {
            let at = self.layer_prefix(index);
            if weights.contains(&format!("{at}ffn_gate.weight")) {
                weights.rename(&format!("{at}ffn_up.weight"), &format!("{at}{SPLIT_UP}.weight"));
            }
        }
    }
}

impl TaskWeights {
    fn list(self) -> [TensorSpec; 2] {
        let Self { first, second, scale: _ } = self;
        [first, second]
    }
}

impl EncoderNormWeights {
    fn list(self, list: &mut Vec<TensorSpec>) {
        let Self { weight, bias } = self;
        list.push(weight);
        list.extend(bias);
    }
}

/// The matrices of all tasks for the projection or the table `module`, with the names that PyTorch
/// gives to parametrized weights.
fn task(module: &str, shapes: [Vec<usize>; 2], scale: f32) -> TaskWeights {
    let [first, second] = shapes;
    let spec = |name: &str, shape| TensorSpec {
        name: format!("{module}.{PARAMETRIZED}.0.lora_{name}"),
        shape,
        role: TensorRole::Bias,
    };
    TaskWeights { first: spec("A", first), second: spec("B", second), scale }
}

/// The projection `module` to `shape[0]` features.
pub(super) fn linear(module: &str, shape: [usize; 2], with_bias: bool) -> LinearWeights {
    LinearWeights {
        weight: TensorSpec {
            name: format!("{module}.weight"),
            shape: shape.into(),
            role: TensorRole::Matrix,
        },
        bias: with_bias.then(|| TensorSpec {
            name: format!("{module}.bias"),
            shape: vec![shape[0]],
            role: TensorRole::Bias,
        }),
    }
}
