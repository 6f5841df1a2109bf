//! The decoder. There is one for all architectures; the configuration says which parts a layer has.
//!
//! The residual stream, norms, rotary embeddings and gates are f32. Operands of matrix products and
//! the KV store have the types of the options. Keys and values are first written to the KV store
//! and then read from there, including those of the current step. Therefore attention reads the
//! same bits for a position, whether it was computed in this step or in an earlier one.

use candle_core::{DType, Device, Result, Tensor};
use stolon_backend::{StepBatch, StepOutput};
use stolon_checkpoint::adapter::Site;
use stolon_checkpoint::config::{DecoderWeights, MixerConfig, NormsConfig};
use stolon_checkpoint::{DecoderConfig, QueryScaling};

use crate::OpenError;
use crate::adapters::{AdapterRows, At};
use crate::attention::{Attentions, Padding};
use crate::draw::{self, draw_tokens, drawn_tokens};
use crate::inputs::{OutputInputs, StepInputs};
use crate::layer::Layer;
use crate::linear::Linear;
use crate::loader::Loader;
use crate::norm::Norm;
use crate::pass::Pass;
use crate::per_layer::PerLayerEmbedding;
use crate::plan::BatchRows;
use crate::rope::RopeTable;
use crate::state_store::Stores;

/// A model whose weights are on a device.
#[derive(Debug)]
pub(crate) struct Decoder {
    config: DecoderConfig,
    device: Device,
    /// `[vocab_size, hidden_size]` in the compute type.
    embedding: Tensor,
    /// The norm of embeddings, if the model has one.
    embedding_norm: Option<Norm>,
    /// The per-layer embeddings, if the model has any.
    per_layer: Option<PerLayerEmbedding>,
    /// The output matrix `[vocab_size, hidden_size]`.
    head: Linear,
    layers: Vec<Layer>,
    /// Index of the last layer that keeps something of its positions. See
    /// [`DecoderConfig::last_keeping_layer`].
    last_keeping: usize,
    final_norm: Norm,
    /// One table per entry of `config.ropes`, in the same order.
    ropes: Vec<RopeTable>,
    /// The different factors of queries that the layers have.
    query_scalings: Vec<QueryScaling>,
}

impl Decoder {
    /// Copies all weights to the loader's device.
    pub(crate) fn load(
        config: DecoderConfig,
        mut loader: Loader,
    ) -> std::result::Result<Self, OpenError> {
        // Every field is named, so that a new one is a compile error until it is computed.
        let DecoderConfig {
            // Used only in messages.
            architecture: _,
            // Determine the weights. See `DecoderConfig::weights`.
            vocab_size: _,
            tie_word_embeddings: _,
            head_bias: _,
            per_layer_input: _,
            layer_scales: _,
            layers: _,
            hidden_size,
            norms,
            // Used by `RopeTable`.
            ropes,
            max_positions,
            // Used by `Decoder::embed`.
            embedding_scale: _,
            // Used by `layer::add` and `Experts`.
            residual_scale: _,
            // Used by `Decoder::output`.
            logit_scale: _,
            logit_softcap: _,
            // Determines the default compute type.
            dtype: _,
        } = &config;
        let NormsConfig {
            // Used by `Layer::load`.
            placement: _,
            // Determine the weights of norms. See `NormWeights`.
            kind: _,
            output_eps: _,
            plain_final: _,
            // Used by `Norm::of_parts`.
            offset: _,
            eps,
            embedding: has_embedding_norm,
        } = norms;
        let DecoderWeights { embedding: spec, per_layer, layers, final_norm, head, head_bias } =
            config.weights();
        let embedding = loader.dense(&spec)?;
        let head = match head {
            Some(head) => loader.head(&head, head_bias.as_ref())?,
            None => loader.tied_head(&spec, &embedding)?,
        };
        loader.weights.remove(&spec.name);
        let per_layer = per_layer.map(|spec| PerLayerEmbedding::load(&config, &spec, &mut loader));
        let per_layer = per_layer.transpose()?;
        let layers = layers
            .iter()
            .zip(config.kept_indices())
            .map(|(layer, kept)| Layer::load(&config, layer, &kept, &mut loader))
            .collect::<std::result::Result<_, _>>()?;
        let final_norm = Norm::load(&final_norm, &mut loader)?;
        let device = loader.device;
        let embedding_norm = match has_embedding_norm {
            true => Some(Norm::uniform(*hidden_size, 1.0, *eps, &device)?),
            false => None,
        };
        let ropes = ropes.iter().enumerate().filter_map(|(index, rope)| {
            Some(RopeTable::new(rope, config.rope_dim(index)?, *max_positions))
        });
        let ropes = ropes.collect();
        let mut query_scalings = Vec::new();
        for scaling in config.mixers().filter_map(query_scaling) {
            if !query_scalings.contains(&scaling) {
                query_scalings.push(scaling);
            }
        }
        Ok(Self {
            embedding,
            embedding_norm,
            per_layer,
            head,
            layers,
            last_keeping: config.last_keeping_layer(),
            final_norm,
            ropes,
            query_scalings,
            device,
            config,
        })
    }

    pub(crate) fn config(&self) -> &DecoderConfig {
        &self.config
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Computes a batch that the batch checker has accepted and that is not empty: writes keys and
    /// values, states and checkpoints to `stores` and returns what the batch requests.
    pub(crate) fn forward(
        &mut self,
        batch: &StepBatch,
        stores: &mut Stores,
        attentions: &Attentions,
    ) -> Result<StepOutput> {
        let block_size = stores.kv.shape().block_size();
        let plan = BatchRows::new(batch, block_size);
        let inputs = self.upload(batch, &plan, block_size, attentions, Padding::default())?;
        self.compute(&inputs, stores)?.to_host(&plan)
    }

    /// Uploads the inputs of a step.
    pub(crate) fn upload(
        &mut self,
        batch: &StepBatch,
        plan: &BatchRows,
        block_size: usize,
        attentions: &Attentions,
        padding: Padding,
    ) -> Result<StepInputs> {
        let device = &self.device;
        let positions = plan.position_count().max(padding.positions(block_size));
        let rotations = self.ropes.iter_mut().map(|rope| rope.rotations(positions, device));
        let rotations = rotations.collect::<Result<_>>()?;
        let attention = (attentions, block_size, padding);
        StepInputs::new(&self.config, (batch, plan), rotations, attention, device)
    }

    /// Computes a step on the device, and writes its keys and values, states and checkpoints to
    /// `stores`.
    pub(crate) fn compute(&self, inputs: &StepInputs, stores: &mut Stores) -> Result<Computed> {
        if let Some(states) = &inputs.states {
            stores.states.begin(states, &stores.kv)?;
        }
        let mut pass = Pass::new(inputs, stores, &self.query_scalings)?;
        let rows = self.compute_layers(&mut pass)?;
        if let Some(checkpoints) = inputs.states.as_ref().and_then(|own| own.checkpoints.as_ref()) {
            stores.states.write_checkpoints(&pass.checkpoints, checkpoints, &stores.kv)?;
        }
        match (rows, &inputs.outputs) {
            (Some(rows), Some(outputs)) => self.output(&rows, outputs),
            (None, _) | (_, None) => Ok(Computed::default()),
        }
    }

    /// Computes all layers. Returns the rows of the residual stream that have an output; `None` if
    /// there are none.
    fn compute_layers(&self, pass: &mut Pass<'_>) -> Result<Option<Tensor>> {
        let inputs = pass.inputs;
        let mut x = self.embed(&inputs.tokens, pass.adapters)?;
        let per_layer = self.per_layer.as_ref().map(|embedding| embedding.of(&inputs.tokens, &x));
        let mut per_layer = per_layer.transpose()?;
        for (index, layer) in self.layers.iter().enumerate() {
            pass.layer = index;
            let mut begun = layer.begin(x, pass)?;
            if index == self.last_keeping {
                // From here on, only rows with an output are needed.
                let Some(outputs) = &inputs.outputs else { return Ok(None) };
                if let Some((rows, plans)) = &outputs.rows {
                    begun = begun.select(rows)?;
                    pass.select(rows, plans, &outputs.adapters)?;
                    per_layer = per_layer.map(|all| all.index_select(rows, 0)).transpose()?;
                }
            }
            let own = per_layer.as_ref().map(|all| all.narrow(1, index, 1)?.squeeze(1));
            x = layer.finish(&self.config, begun, own.transpose()?.as_ref(), pass)?;
        }
        Ok(Some(x))
    }

    /// The embeddings of `tokens`, `[tokens, hidden_size]` in f32.
    fn embed(&self, tokens: &Tensor, adapters: &AdapterRows) -> Result<Tensor> {
        let mut x = self.embedding.index_select(tokens, 0)?.to_dtype(DType::F32)?;
        if let Some(norm) = &self.embedding_norm {
            x = norm.apply(&x)?;
        }
        // PEFT adds to the result of the module, which includes the norm.
        x = adapters.embed(tokens, x)?;
        match self.config.embedding_scale {
            Some(scale) => x.affine(f64::from(scale), 0.0),
            None => Ok(x),
        }
    }

    /// Computes the hidden states, logits and tokens that the step returns, from the rows `x`.
    fn output(&self, x: &Tensor, outputs: &OutputInputs) -> Result<Computed> {
        let normed = self.final_norm.apply(x)?;
        let hidden = outputs.hidden.as_ref().map(|rows| rows.of(&normed)).transpose()?;
        // One product for all rows that have logits.
        let Some(rows) = &outputs.logits else {
            return Ok(Computed { hidden, ..Computed::default() });
        };
        let normed = rows.of(&normed)?;
        let of_head = At::Layer(self.layers.len(), Site::Inputs);
        let updates = outputs.logit_adapters.updates(of_head, &normed)?;
        let mut logits = updates.add(0, self.head.forward(&normed)?)?;
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

/// The factor of a mixer's queries that depends on their position, if it has one.
fn query_scaling(mixer: &MixerConfig) -> Option<QueryScaling> {
    match mixer {
        MixerConfig::Attention(attention) => attention.query_scaling,
        MixerConfig::Latent(latent) => latent.query_scaling,
        MixerConfig::Convolution(_) | MixerConfig::DeltaNet(_) | MixerConfig::Mamba2(_) => None,
    }
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
