//! The decoder. There is one for all architectures; the configuration says which parts a layer has.
//!
//! The residual stream, norms, rotary embeddings and gates are f32. Operands of matrix products and
//! the KV store have the types of the options. Keys and values are first written to the KV store
//! and then read from there, including those of the current step. Therefore attention reads the
//! same bits for a position, whether it was computed in this step or in an earlier one.

use candle_core::{DType, Device, Result, Tensor};
use stolon_backend::{StepBatch, StepOutput};
use stolon_checkpoint::config::DecoderWeights;
use stolon_checkpoint::{DecoderConfig, QueryScaling};

use crate::OpenError;
use crate::attention::{Attention, AttentionArgs, Padding, Prepared};
use crate::draw::{self, draw_tokens, drawn_tokens};
use crate::inputs::{OutputInputs, StepInputs};
use crate::kv_store::{KvShape, KvStore};
use crate::kv_write;
use crate::layer::{Layer, Norm, Projected};
use crate::linear::Linear;
use crate::loader::Loader;
use crate::plan::BatchRows;
use crate::rope::RopeTable;
use crate::supported::Supported;

/// A model whose weights are on a device.
#[derive(Debug)]
pub(crate) struct Decoder {
    config: DecoderConfig,
    /// The sizes and options of attention, which are the same in all layers.
    supported: Supported,
    device: Device,
    /// `[vocab_size, hidden_size]` in the compute type.
    embedding: Tensor,
    /// The output matrix `[vocab_size, hidden_size]`.
    head: Linear,
    layers: Vec<Layer>,
    final_norm: Norm,
    /// One table per entry of `config.ropes`, in the same order.
    ropes: Vec<RopeTable>,
}

impl Decoder {
    /// Copies all weights to the loader's device.
    pub(crate) fn load(
        config: DecoderConfig,
        mut loader: Loader,
    ) -> std::result::Result<Self, OpenError> {
        let supported = Supported::of(&config)?;
        // Configurations with per-layer embeddings or a bias of the output matrix are not
        // supported.
        let DecoderWeights {
            embedding: spec,
            per_layer: _,
            layers,
            final_norm,
            head,
            head_bias: _,
        } = config.weights();
        let embedding = loader.dense(&spec)?;
        let head = match head {
            Some(head) => loader.head(&head)?,
            None => loader.tied_head(&spec, &embedding)?,
        };
        loader.weights.remove(&spec.name);
        let layers = layers
            .iter()
            .map(|layer| Layer::load(&config, layer, &mut loader))
            .collect::<std::result::Result<_, _>>()?;
        let final_norm = Norm::load(&final_norm, &mut loader)?;
        let ropes = config
            .ropes
            .iter()
            .map(|rope| RopeTable::new(rope, supported.rotary_dim, config.max_positions))
            .collect();
        let device = loader.device;
        Ok(Self { device, config, supported, embedding, head, layers, final_norm, ropes })
    }

    pub(crate) fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// The sizes and options of attention, which are the same in all layers.
    pub(crate) fn supported(&self) -> &Supported {
        &self.supported
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Computes a batch that the batch checker has accepted and that is not empty: writes keys and
    /// values to `kv` and returns what the batch requests.
    pub(crate) fn forward(
        &mut self,
        batch: &StepBatch,
        kv: &mut KvStore,
        attention: Attention,
    ) -> Result<StepOutput> {
        let plan = BatchRows::new(batch, kv.shape().block_size);
        let inputs = self.upload(batch, &plan, kv.shape(), attention, Padding::default())?;
        self.compute(&inputs, kv)?.to_host(&plan)
    }

    /// Uploads the inputs of a step.
    pub(crate) fn upload(
        &mut self,
        batch: &StepBatch,
        plan: &BatchRows,
        shape: &KvShape,
        attention: Attention,
        padding: Padding,
    ) -> Result<StepInputs> {
        let device = &self.device;
        let positions = plan.position_count().max(padding.positions(shape));
        let rotations = self.ropes.iter_mut().map(|rope| rope.rotations(positions, device));
        let rotations = rotations.collect::<Result<_>>()?;
        StepInputs::new(batch, plan, rotations, (attention, shape, padding), device)
    }

    /// Computes a step on the device, and writes its keys and values to `kv`.
    pub(crate) fn compute(&self, inputs: &StepInputs, kv: &mut KvStore) -> Result<Computed> {
        let rotations = inputs.rotations.iter().map(|table| table.at(&inputs.positions));
        let rotations = rotations.collect::<Result<Vec<_>>>()?;
        let query_factors = self.query_factors(&inputs.positions)?;
        let mut attention = &inputs.attention;
        let mut x = self.embed(&inputs.tokens)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let config = &self.config;
            let rotation = config.layers[index].rope().map(|rope| &rotations[rope]);
            let projected = layer.project(&self.supported, &x, rotation)?;
            let Projected { queries: mut q, keys, values } = projected;
            if let Some(factors) = &query_factors {
                q = q.broadcast_mul(factors)?;
            }
            let dtype = kv.shape().dtype;
            let plane = kv.layer(index);
            write(inputs, &plane.keys, keys, dtype)?;
            write(inputs, &plane.values, values, dtype)?;
            if index + 1 == self.layers.len() {
                // In the last layer, rows without an output are needed only for their keys and
                // values.
                let Some(outputs) = &inputs.outputs else { return Ok(Computed::default()) };
                if let Some((rows, prepared)) = &outputs.rows {
                    (q, x) = (q.index_select(rows, 0)?, x.index_select(rows, 0)?);
                    attention = prepared;
                }
            }
            let attended = self.attend(index, &q, kv, attention)?;
            x = layer.add_attention(config, &x, &attended)?;
            x = layer.add_mlp(config, &x)?;
        }
        match &inputs.outputs {
            Some(outputs) => self.output(&x, outputs),
            None => Ok(Computed::default()),
        }
    }

    /// The factors by which the queries at `positions` are multiplied, `[rows, 1, 1]`; `None` if
    /// the model has none.
    fn query_factors(&self, positions: &Tensor) -> Result<Option<Tensor>> {
        let Some(QueryScaling { beta, step }) = self.supported.query_scaling else {
            return Ok(None);
        };
        let positions = positions.to_dtype(DType::F32)?;
        // This divides, because a product with the reciprocal may be slightly below a whole number.
        let step = Tensor::full(step as f32, positions.shape(), positions.device())?;
        let steps = positions.div(&step)?.floor()?;
        let factors = steps.affine(1.0, 1.0)?.log()?.affine(f64::from(beta), 1.0)?;
        Ok(Some(factors.reshape(((), 1, 1))?))
    }

    /// The embeddings of `tokens`, `[tokens, hidden_size]` in f32.
    fn embed(&self, tokens: &Tensor) -> Result<Tensor> {
        let x = self.embedding.index_select(tokens, 0)?.to_dtype(DType::F32)?;
        match self.config.embedding_scale {
            Some(scale) => x.affine(f64::from(scale), 0.0),
            None => Ok(x),
        }
    }

    fn attend(
        &self,
        index: usize,
        q: &Tensor,
        kv: &KvStore,
        prepared: &Prepared,
    ) -> Result<Tensor> {
        let args = AttentionArgs {
            kv: kv.layer(index),
            shape: kv.shape(),
            heads: self.supported.heads,
            scale: self.supported.scale,
            softcap: self.supported.softcap,
            window: self.config.layers[index].sliding_window(),
            sinks: self.layers[index].sinks.as_ref(),
        };
        prepared.attend(q, &args)
    }

    /// Computes the hidden states, logits and tokens that the step returns, from the rows `x`.
    fn output(&self, x: &Tensor, outputs: &OutputInputs) -> Result<Computed> {
        let normed = self.final_norm.apply(x)?;
        let hidden = outputs.hidden.as_ref().map(|rows| rows.of(&normed)).transpose()?;
        // One product for all rows that have logits.
        let Some(rows) = &outputs.logits else {
            return Ok(Computed { hidden, ..Computed::default() });
        };
        let mut logits = self.head.forward(&rows.of(&normed)?)?;
        if let Some(scale) = self.config.logit_scale {
            logits = logits.affine(f64::from(scale), 0.0)?;
        }
        if let Some(cap) = self.config.logit_softcap.map(f64::from) {
            logits = logits.affine(1.0 / cap, 0.0)?.tanh()?.affine(cap, 0.0)?;
        }
        let drawn = match &outputs.draws {
            None => None,
            Some(draws) => {
                let count = draws.dim(0)?;
                let rows = logits.narrow(0, logits.dim(0)? - count, count)?;
                Some((draw_tokens(&rows, draws)?, rows))
            }
        };
        Ok(Computed { hidden, logits: Some(logits), drawn })
    }
}

/// Writes the keys or values of the rows of a step to a plane of the KV store of the type `dtype`.
fn write(inputs: &StepInputs, plane: &Tensor, values: Tensor, dtype: DType) -> Result<()> {
    let Some((rows, slots)) = &inputs.written else { return Ok(()) };
    let values = rows.of(&values.to_dtype(dtype)?.contiguous()?)?;
    kv_write::write(plane, &values, slots)
}

/// The results of a step, on the device.
#[derive(Debug, Default)]
pub(crate) struct Computed {
    /// The hidden states that are returned.
    hidden: Option<Tensor>,
    /// Logits of the rows that are returned, followed by the rows from which tokens were drawn.
    logits: Option<Tensor>,
    /// The tokens, and the rows of logits that they were drawn from.
    drawn: Option<(Tensor, Tensor)>,
}

impl Computed {
    /// The tokens that were drawn, and the rows of logits. See [`draw_tokens`].
    pub(crate) fn drawn(&self) -> Option<&(Tensor, Tensor)> {
        self.drawn.as_ref()
    }

    /// Copies the results that `plan` requests from the device.
    fn to_host(&self, plan: &BatchRows) -> Result<StepOutput> {
        let hidden = match &self.hidden {
            Some(hidden) => hidden.flatten_all()?.to_vec1()?,
            None => Vec::new(),
        };
        let logits = match (&self.logits, plan.logit_rows.len()) {
            (Some(logits), whole) if whole > 0 => {
                draw::to_host(&logits.narrow(0, 0, whole)?.flatten_all()?)?
            }
            _ => Vec::new(),
        };
        let drawn = match &self.drawn {
            Some((tokens, rows)) => drawn_tokens(tokens, &plan.draws, rows)?,
            None => Vec::new(),
        };
        Ok(StepOutput { logits, hidden, drawn })
    }
}
