//! One layer: its mixers, its MLP, and the norms between them.

use candle_core::{Result, Tensor};
use stolon_checkpoint::DecoderConfig;
use stolon_checkpoint::config::{LayerWeights, NormPlacement};

use crate::OpenError;
use crate::feed_forward::FeedForward;
use crate::loader::Loader;
use crate::mixer::{Mixer, Projected};
use crate::norm::Norm;
use crate::pass::Pass;
use crate::per_layer::PerLayer;

/// The weights of one layer: the fields of [`LayerWeights`], which describes them, and `parallel`.
#[derive(Debug)]
pub(crate) struct Layer {
    attention_input_norm: Option<Norm>,
    mixers: Vec<Mixer>,
    attention_output_norm: Option<Norm>,
    mlp_input_norm: Option<Norm>,
    mlp: Option<FeedForward>,
    mlp_output_norm: Option<Norm>,
    per_layer: Option<PerLayer>,
    /// Factor by which the layer's output is multiplied; `None` for 1.
    scale: Option<f32>,
    /// Whether attention and the MLP have the same input.
    parallel: bool,
}

/// A layer's computation after its mixers have kept what later positions need.
#[derive(Debug)]
pub(crate) struct Begun {
    /// The residual stream before the layer, `[rows, hidden_size]`.
    x: Tensor,
    /// The normalized input of the layer, if the MLP reads it, too.
    normed: Option<Tensor>,
    projected: Vec<Projected>,
}

impl Begun {
    /// The same for the rows `rows` only.
    pub(crate) fn select(self, rows: &Tensor) -> Result<Self> {
        let projected = self.projected.into_iter().map(|projected| projected.select(rows));
        Ok(Self {
            x: self.x.index_select(rows, 0)?,
            normed: self.normed.map(|normed| normed.index_select(rows, 0)).transpose()?,
            projected: projected.collect::<Result<_>>()?,
        })
    }
}

impl Layer {
    /// Loads the tensors that `spec` describes. For each mixer of the layer, `kept` has its index
    /// among the mixers of its kind in the KV store or in the states.
    pub(crate) fn load(
        config: &DecoderConfig,
        spec: &LayerWeights,
        kept: &[usize],
        loader: &mut Loader,
    ) -> std::result::Result<Self, OpenError> {
        let LayerWeights {
            attention_input_norm,
            mixers,
            attention_output_norm,
            mlp_input_norm,
            mlp,
            mlp_output_norm,
            per_layer,
            scale,
        } = spec;
        let scale = scale.as_ref().map(|scale| loader.weights.floats(scale)).transpose()?;
        let mixers = mixers.iter().zip(kept);
        Ok(Self {
            attention_input_norm: Norm::optional(attention_input_norm.as_ref(), loader)?,
            mixers: mixers
                .map(|(mixer, kept)| Mixer::load(config, mixer, *kept, loader))
                .collect::<std::result::Result<_, _>>()?,
            attention_output_norm: Norm::optional(attention_output_norm.as_ref(), loader)?,
            mlp_input_norm: Norm::optional(mlp_input_norm.as_ref(), loader)?,
            mlp: mlp.as_ref().map(|mlp| FeedForward::load(config, mlp, loader)).transpose()?,
            mlp_output_norm: Norm::optional(mlp_output_norm.as_ref(), loader)?,
            per_layer: per_layer.as_ref().map(|own| PerLayer::load(own, loader)).transpose()?,
            scale: scale.map(|factor| factor[0]),
            parallel: config.norms.placement == NormPlacement::Parallel,
        })
    }

    /// Computes the projections of the residual stream `x`, `[rows, hidden_size]`. The results that
    /// later positions need are written to the KV store or the states.
    pub(crate) fn begin(&self, x: Tensor, pass: &mut Pass<'_>) -> Result<Begun> {
        let normed = match &self.attention_input_norm {
            Some(norm) => norm.apply(&x)?,
            None => x.clone(),
        };
        let projected = self.mixers.iter().map(|mixer| mixer.project(&normed, pass));
        let projected = projected.collect::<Result<_>>()?;
        Ok(Begun { x, normed: self.parallel.then_some(normed), projected })
    }

    /// Computes the rest of the layer. `per_layer` are the layer's per-layer embeddings, `[rows,
    /// width]`, if the model has them. Returns the residual stream after the layer.
    pub(crate) fn finish(
        &self,
        config: &DecoderConfig,
        begun: Begun,
        per_layer: Option<&Tensor>,
        pass: &Pass<'_>,
    ) -> Result<Tensor> {
        let Begun { mut x, normed, projected } = begun;
        for (mixer, projected) in self.mixers.iter().zip(projected) {
            let output = mixer.finish(projected, pass)?;
            let norm = self.attention_output_norm.as_ref();
            x = add(config, &x, output, (norm, mixer.output_factor()))?;
        }
        if let Some(mlp) = &self.mlp {
            let normed = match (&self.mlp_input_norm, normed) {
                (Some(norm), _) => norm.apply(&x)?,
                (None, Some(normed)) => normed,
                (None, None) => x.clone(),
            };
            x = mlp.add(config, &x, &normed, self.mlp_output_norm.as_ref(), pass)?;
        }
        if let (Some(own), Some(values)) = (&self.per_layer, per_layer) {
            x = own.add(&x, values)?;
        }
        match self.scale {
            Some(factor) => x.affine(f64::from(factor), 0.0),
            None => Ok(x),
        }
    }
}

/// Adds the output of a mixer or an MLP to the residual stream `x`: normalized, if there is a norm,
/// and multiplied by the output's own factor and the configuration's.
pub(crate) fn add(
    config: &DecoderConfig,
    x: &Tensor,
    output: Tensor,
    (norm, factor): (Option<&Norm>, f32),
) -> Result<Tensor> {
    let output = norm.map_or(Ok(output.clone()), |norm| norm.apply(&output))?;
    match config.residual_scale.unwrap_or(1.0) * factor {
        1.0 => x + output,
        scale => x + output.affine(f64::from(scale), 0.0)?,
    }
}
