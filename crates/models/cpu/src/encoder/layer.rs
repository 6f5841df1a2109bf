//! One layer: attention over whole texts, and an MLP or a mixture of experts.

use stolon_checkpoint::encoder::{
    EncoderActivation, EncoderConfig, EncoderLayerWeights, EncoderMlpWeights, EncoderNormWeights,
    NormOrder, QueryKeyNorms,
};
use stolon_checkpoint::error::ModelError;
use stolon_kernels::{
    self as kernels, HeadNorm, LayerNorm, Matrix, Operands, Path, Product, RowSums, Sink,
};

use super::tasks::{LayerTasks, Updates};
use super::{Activations, Norm};
use crate::decoder::experts::Experts;
use crate::decoder::linear::{Linear, Loader, multiply};
use crate::decoder::rope::{RopeTable, Rotation};
use crate::full_kv::{FullKv, FullMask, ProjectionNorms};
use crate::workers::Workers;

/// A layer with packed weights.
#[derive(Debug)]
pub(super) struct Layer {
    qkv: [Linear; 3],
    /// The norms of queries and keys.
    query_key_norms: Option<[Norm; 2]>,
    output: Linear,
    /// `None` if the input of attention is not normalized.
    attention_norm: Option<Norm>,
    /// `None` if attention's output is added as it is. It is applied to the output alone, or, with
    /// [`NormOrder::AfterTwice`], to its sum with the residual stream.
    attention_output_norm: Option<Norm>,
    mlp: Mlp,
    mlp_norm: Norm,
    /// `None` if the MLP's output is added as it is.
    mlp_output_norm: Option<Norm>,
    /// The matrices of tasks, if the model has some.
    tasks: Option<LayerTasks>,
}

/// The second half of a layer, after attention.
#[derive(Debug)]
enum Mlp {
    /// An MLP, with a gate or without.
    Dense(Dense),
    /// A mixture of experts, and what is added to their output.
    Experts(Experts, Option<Vec<f32>>),
}

/// The projections of an MLP.
#[derive(Debug)]
struct Dense {
    gate: Option<Linear>,
    up: Linear,
    down: Linear,
}

/// The keys and values of the layer, the mask of its attention, and the rotations of its queries and
/// keys, if they are rotated.
type Attention<'a> = (&'a mut FullKv, &'a FullMask<'a>, Option<&'a RopeTable>);

impl Layer {
    pub(super) fn load(
        weights: &EncoderLayerWeights,
        config: &EncoderConfig,
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        let EncoderLayerWeights {
            qkv: [q, k, v],
            query_key_norms,
            output,
            attention_norm,
            attention_output_norm,
            mlp,
            mlp_norm,
            mlp_output_norm,
            tasks,
        } = weights;
        let mut optional = |norm: &Option<EncoderNormWeights>| {
            norm.as_ref().map(|norm| Norm::load(norm, config, loader)).transpose()
        };
        let attention_norm = optional(attention_norm)?;
        let attention_output_norm = optional(attention_output_norm)?;
        let mlp_output_norm = optional(mlp_output_norm)?;
        Ok(Self {
            qkv: [loader.linear(q)?, loader.linear(k)?, loader.linear(v)?],
            query_key_norms: match query_key_norms {
                Some([q, k]) => {
                    Some([Norm::load(q, config, loader)?, Norm::load(k, config, loader)?])
                }
                None => None,
            },
            output: loader.linear(output)?,
            attention_norm,
            attention_output_norm,
            mlp: match mlp {
                EncoderMlpWeights::Dense { gate, up, down } => Mlp::Dense(Dense {
                    gate: loader.optional(gate.as_ref())?,
                    up: loader.linear(up)?,
                    down: loader.linear(down)?,
                }),
                EncoderMlpWeights::Experts { experts, bias } => Mlp::Experts(
                    Experts::load(experts, loader)?,
                    loader.optional_vector(bias.as_ref())?,
                ),
            },
            mlp_norm: Norm::load(mlp_norm, config, loader)?,
            mlp_output_norm,
            tasks: match tasks {
                Some(weights) => Some(LayerTasks::load(weights, config, loader)?),
                None => None,
            },
        })
    }

    /// Computes the layer for all rows of the residual stream.
    pub(super) fn forward(
        &self,
        config: &EncoderConfig,
        activations: &mut Activations,
        (kv, mask, rotations): Attention<'_>,
        (path, workers): (Path, &Workers),
    ) {
        let Activations { x, spare, normed, q, attended, mixed, inner, routing, .. } = activations;
        let (positions, row_tasks) = (&activations.positions, &mut activations.tasks);
        let tasks = row_tasks.used(self.tasks.as_ref());
        let (rows, width) = (positions.len(), config.hidden_size);
        let is_before = !config.order.is_after();
        let readers = self.qkv.iter().map(|linear| &linear.matrix);
        let readers: Vec<_> = readers.chain(tasks.map(|own| &own.qkv.first)).collect();
        let norm = self.attention_norm.as_ref().filter(|_| is_before);
        pack(x, norm, normed, &readers, (path, workers));
        let rotation = |row: usize| Some(rotations?.at(Rotation::Position(positions[row])));
        let norms = match (&self.query_key_norms, config.query_key_norms) {
            (None, _) | (_, QueryKeyNorms::None) => ProjectionNorms::None,
            (Some(norms), QueryKeyNorms::Heads) => {
                let offset = config.norm.offset();
                let [q, k] = norms.each_ref();
                ProjectionNorms::Heads([q, k].map(|Norm { weight, eps, .. }| HeadNorm {
                    weight,
                    eps: *eps,
                    offset,
                }))
            }
            (Some(norms), QueryKeyNorms::Rows) => {
                let [q, k] = norms.each_ref();
                ProjectionNorms::Rows([q, k].map(|Norm { weight, bias, eps, .. }| LayerNorm {
                    weight,
                    bias,
                    eps: *eps,
                }))
            }
        };
        let updates = row_tasks.lower(tasks.map(|own| &own.qkv), normed, (path, workers));
        let update = |part, sums: &mut RowSums<'_>| updates.add(part, sums);
        kv.project((&self.qkv, norms), normed, q, update, rotation, workers);
        kv.attend(q, attended, mask, path, workers);
        let readers = [&self.output.matrix].into_iter();
        mixed.reset(rows, &readers.chain(tasks.map(|own| &own.output.first)).collect::<Vec<_>>());
        mixed.pack(workers.for_pass(rows, width), attended);
        let updates = row_tasks.lower(tasks.map(|own| &own.output), mixed, (path, workers));
        let norm = self.attention_output_norm.as_ref().map(|norm| {
            (norm, if config.order == NormOrder::AfterTwice { Of::Sum } else { Of::Output })
        });
        add(&self.output, (mixed, updates), norm, (x, spare), (path, workers));
        if let Some(norm) = self.attention_norm.as_ref().filter(|_| !is_before) {
            norm.replace(x, spare, path, workers);
        }

        match &self.mlp {
            Mlp::Dense(mlp) => {
                let inputs = mlp.inputs();
                let readers = inputs.iter().copied().chain(tasks.map(|own| &own.up.first));
                let norm = Some(&self.mlp_norm).filter(|_| is_before);
                pack(x, norm, normed, &readers.collect::<Vec<_>>(), (path, workers));
                let updates = row_tasks.lower(tasks.map(|own| &own.up), normed, (path, workers));
                let readers = [&mlp.down.matrix].into_iter();
                let readers = readers.chain(tasks.map(|own| &own.down.first));
                inner.reset(rows, &readers.collect::<Vec<_>>());
                let activate = |mut sums: RowSums<'_>| {
                    updates.add(0, &mut sums);
                    mlp.activate(config.activation, path, sums);
                };
                let product = Product {
                    group: 0,
                    matrices: &inputs,
                    step: 1,
                    epilogue: Some(&activate),
                    sink: Sink::Operands(inner.only()),
                };
                let threads = workers.for_products(&inputs, rows);
                kernels::multiply(path, threads, normed, &mut [product]);
                let updates = row_tasks.lower(tasks.map(|own| &own.down), inner, (path, workers));
                let norm = self.mlp_output_norm.as_ref().map(|norm| (norm, Of::Output));
                add(&mlp.down, (inner, updates), norm, (x, spare), (path, workers));
            }
            Mlp::Experts(experts, bias) => {
                experts.add_to(x, [normed, inner], routing, (path, workers));
                if let Some(bias) = bias {
                    x.chunks_exact_mut(width).for_each(|row| kernels::add(path, row, bias));
                }
            }
        }
        if !is_before {
            self.mlp_norm.replace(x, spare, path, workers);
        }
    }
}

impl Dense {
    /// The matrices that the input is multiplied with.
    fn inputs(&self) -> Vec<&Matrix> {
        self.gate.iter().chain([&self.up]).map(|linear| &linear.matrix).collect()
    }

    /// The epilogue of the projections to the inner features: adds the biases and applies the
    /// function.
    fn activate(&self, function: EncoderActivation, path: Path, sums: RowSums<'_>) {
        let RowSums { feature, first, second, .. } = sums;
        match &self.gate {
            Some(gate) => {
                gate.add_bias(path, feature, first);
                self.up.add_bias(path, feature, second);
            }
            None => self.up.add_bias(path, feature, first),
        }
        match function {
            EncoderActivation::Gelu => kernels::gelu_in_place(path, first),
            EncoderActivation::GeluTanh => kernels::gelu_tanh_in_place(path, first),
            EncoderActivation::Relu => first.iter_mut().for_each(|x| *x = x.max(0.0)),
            EncoderActivation::GeluGate => kernels::gelu_mul(path, first, second),
            EncoderActivation::GeluTanhGate => kernels::gelu_tanh_mul(path, first, second),
            EncoderActivation::SiluGate => kernels::silu_mul(path, first, second),
        }
    }
}

/// What is normalized before it is added to the residual stream.
#[derive(Clone, Copy)]
enum Of {
    /// The output of attention or the MLP.
    Output,
    /// Its sum with the residual stream.
    Sum,
}

/// Adds the product of `rows` with a projection, and its updates, to the residual stream `x`, after a
/// norm if there is one. `spare` has the size of `x`.
fn add(
    linear: &Linear,
    (rows, updates): (&Operands, Updates<'_>),
    norm: Option<(&Norm, Of)>,
    (x, spare): (&mut [f32], &mut [f32]),
    (path, workers): (Path, &Workers),
) {
    let finish = |mut sums: RowSums<'_>| {
        updates.add(0, &mut sums);
        linear.add_bias(path, sums.feature, sums.first);
    };
    match norm {
        None => multiply(linear, rows, &finish, Sink::Add(x), (path, workers)),
        Some((norm, of)) => {
            let sink = match of {
                Of::Output => Sink::Rows(spare),
                Of::Sum => {
                    spare.copy_from_slice(x);
                    Sink::Add(spare)
                }
            };
            multiply(linear, rows, &finish, sink, (path, workers));
            norm.add(x, spare, path, workers);
        }
    }
}

/// Packs the rows of `x`, normalized if there is a norm, for `readers`.
fn pack(
    x: &[f32],
    norm: Option<&Norm>,
    out: &mut Operands,
    readers: &[&Matrix],
    (path, workers): (Path, &Workers),
) {
    let width = readers[0].in_features();
    let rows = x.len() / width;
    out.reset(rows, readers);
    let threads = workers.for_pass(rows, width);
    match norm {
        None => out.pack(threads, x),
        Some(norm) => out.fill(threads, |_, first, block| {
            norm.apply(&x[first * width..][..block.len()], block, path);
        }),
    }
}
