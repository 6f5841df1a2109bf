//! The decoder: one for all architectures, as the configuration says.
//!
//! The residual stream, norms, rotary embeddings and gates are f32. Operands of matrix products and
//! the KV store have the types of the options. Keys and values are written to the KV store first
//! and read from there, also those of the current step, so that attention reads the same bits for a
//! position in whichever step it was computed.

use candle_core::{DType, Device, Result, Tensor};
use stolon_backend::{StepBatch, StepOutput};
use stolon_model::DecoderConfig;

use crate::OpenError;
use crate::attention::{Attention, AttentionArgs, Prepared};
use crate::draw::{draw_tokens, to_host};
use crate::kv_store::KvStore;
use crate::kv_write;
use crate::layer::{Layer, Norm, Projected};
use crate::linear::Linear;
use crate::loader::Loader;
use crate::plan::{StepPlan, all_spans, indices, output_spans};
use crate::rope::{RopeTable, Rotation};

/// A model whose weights are on a device.
#[derive(Debug)]
pub(crate) struct Decoder {
    config: DecoderConfig,
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
        const EMBEDDING: &str = "model.embed_tokens.weight";
        let shape = [config.vocab_size, config.hidden_size];
        let embedding = loader.dense(EMBEDDING, &shape)?;
        let head = match config.tie_word_embeddings {
            true => loader.tied_linear(EMBEDDING, shape, &embedding)?,
            false => loader.linear("lm_head", shape, false)?,
        };
        loader.weights.remove(EMBEDDING);
        let layers = (0..config.layers.len())
            .map(|index| Layer::load(&config, index, &mut loader))
            .collect::<std::result::Result<_, _>>()?;
        let final_norm = Norm::load(&config, "model.norm", config.hidden_size, &mut loader)?;
        let ropes = config
            .ropes
            .iter()
            .map(|rope| RopeTable::new(rope, config.rotary_dim(), config.max_positions))
            .collect();
        Ok(Self { device: loader.device, config, embedding, head, layers, final_norm, ropes })
    }

    pub(crate) fn config(&self) -> &DecoderConfig {
        &self.config
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Computes a batch that the batch checker has accepted and that is not empty: writes keys and
    /// values to `kv` and returns the requested logits and hidden states.
    pub(crate) fn forward(
        &mut self,
        batch: &StepBatch,
        kv: &mut KvStore,
        attention: Attention,
    ) -> Result<StepOutput> {
        let shape = *kv.shape();
        let plan = StepPlan::new(batch, shape.block_size);
        let rows = Rows::new(self, &plan)?;
        let mut prepared = attention.prepare(&all_spans(batch), &shape, &self.device)?;
        let mut x = self.embed(&batch.tokens)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let config = &self.config;
            let layer_config = &config.layers[index];
            let rotation = layer_config.rope.map(|rope| &rows.rotations[rope]);
            let Projected { queries: mut q, keys, values } = layer.project(config, &x, rotation)?;
            let plane = kv.layer(index);
            rows.write(&plane.keys, keys, shape.dtype)?;
            rows.write(&plane.values, values, shape.dtype)?;
            if index + 1 == self.layers.len() {
                // In the last layer, other rows are needed for their keys and values only.
                let Some(outputs) = &rows.outputs else { return Ok(StepOutput::default()) };
                (q, x) = (q.index_select(outputs, 0)?, x.index_select(outputs, 0)?);
                prepared = attention.prepare(&output_spans(batch), &shape, &self.device)?;
            }
            let attended = self.attend(index, &q, kv, &prepared)?;
            x = layer.add_attention(config, &x, &attended)?;
            x = layer.add_mlp(config, &x)?;
        }
        self.output(&x, &plan)
    }

    /// The embeddings of `tokens`, `[tokens, hidden_size]` in f32.
    fn embed(&self, tokens: &[u32]) -> Result<Tensor> {
        let tokens = indices(tokens, &self.device)?;
        let x = self.embedding.index_select(&tokens, 0)?.to_dtype(DType::F32)?;
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
            heads: self.config.num_heads,
            scale: self.config.attention_scale,
            softcap: self.config.attention_softcap,
            window: self.config.layers[index].sliding_window,
            sinks: self.layers[index].sinks.as_ref(),
        };
        prepared.attend(q, &args)
    }

    /// What the step returns of the output rows `x`.
    fn output(&self, x: &Tensor, plan: &StepPlan) -> Result<StepOutput> {
        let normed = self.final_norm.apply(x)?;
        let select = |rows: &[u32]| normed.index_select(&indices(rows, &self.device)?, 0);
        let hidden = match plan.hidden_rows.as_slice() {
            [] => Vec::new(),
            rows => select(rows)?.flatten_all()?.to_vec1()?,
        };
        // One product for all rows that have logits.
        let rows = [plan.logit_rows.as_slice(), &plan.drawn_rows].concat();
        if rows.is_empty() {
            return Ok(StepOutput { hidden, ..StepOutput::default() });
        }
        let mut logits = self.head.forward(&select(&rows)?)?;
        if let Some(scale) = self.config.logit_scale {
            logits = logits.affine(f64::from(scale), 0.0)?;
        }
        if let Some(cap) = self.config.logit_softcap.map(f64::from) {
            logits = logits.affine(1.0 / cap, 0.0)?.tanh()?.affine(cap, 0.0)?;
        }
        let (whole, drawn) = (plan.logit_rows.len(), plan.drawn_rows.len());
        let drawn = draw_tokens(&logits.narrow(0, whole, drawn)?, &plan.draws)?;
        let logits = match whole {
            0 => Vec::new(),
            whole => to_host(&logits.narrow(0, 0, whole)?.flatten_all()?)?,
        };
        Ok(StepOutput { logits, hidden, drawn })
    }
}

/// The rows of a step on the device.
struct Rows {
    /// One entry per rotary embedding.
    rotations: Vec<Rotation>,
    /// The rows whose keys and values are written; `None` for all.
    written: Option<Tensor>,
    /// Where they are written; `None` if none is.
    slots: Option<Tensor>,
    /// The rows that are returned; `None` if none is.
    outputs: Option<Tensor>,
}

impl Rows {
    fn new(decoder: &mut Decoder, plan: &StepPlan) -> Result<Self> {
        let device = &decoder.device;
        let positions = indices(&plan.positions, device)?;
        let count = plan.position_count();
        let rotations = decoder.ropes.iter_mut().map(|rope| rope.rotation(&positions, count));
        let some = |values: &[u32]| match values {
            [] => Ok(None),
            values => indices(values, device).map(Some),
        };
        let all_written = plan.written_rows.len() == plan.positions.len();
        Ok(Self {
            rotations: rotations.collect::<Result<_>>()?,
            written: if all_written { None } else { some(&plan.written_rows)? },
            slots: some(&plan.slots)?,
            outputs: some(&plan.output_rows)?,
        })
    }

    /// Writes the rows of `values`, `[rows, width]`, to a plane of the KV store of the type
    /// `dtype`.
    fn write(&self, plane: &Tensor, values: Tensor, dtype: DType) -> Result<()> {
        let Some(slots) = &self.slots else { return Ok(()) };
        let values = values.to_dtype(dtype)?.contiguous()?;
        let values = match &self.written {
            Some(rows) => values.index_select(rows, 0)?,
            None => values,
        };
        kv_write::write(plane, &values, slots)
    }
}
