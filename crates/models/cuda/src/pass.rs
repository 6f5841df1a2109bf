//! What the layers of a step have in common: the rows that they compute, and the memory that they
//! read and write.

use candle_core::{DType, Result, Tensor, bail};
use stolon_checkpoint::QueryScaling;
use stolon_checkpoint::adapter::Site;

use crate::adapters::{AdapterRows, At, Updates};
use crate::attention::Plans;
use crate::inputs::StepInputs;
use crate::kv_store::{KvStore, Plane};
use crate::rope::Rotations;
use crate::state_inputs::StateInputs;
use crate::state_store::{StateStore, Stores};

/// The pass of a step through the layers.
#[derive(Debug)]
pub(crate) struct Pass<'a> {
    pub(crate) inputs: &'a StepInputs,
    stores: &'a Stores,
    /// The rows with an adapter.
    pub(crate) adapters: &'a AdapterRows,
    /// Index of the layer that is computed.
    pub(crate) layer: usize,
    /// The attention of the rows.
    pub(crate) plans: &'a Plans,
    /// Positions of the rows, `[rows]` in u32.
    pub(crate) positions: Tensor,
    /// The rotations of the rows by each rotary embedding.
    rotations: Vec<Rotations>,
    /// The factors of the rows' queries, `[rows, 1, 1]`.
    query_factors: Vec<(QueryScaling, Tensor)>,
    /// The states of each recurrent layer so far at all checkpoints of the step, `[checkpoints,
    /// layer_len]`.
    pub(crate) checkpoints: Vec<Tensor>,
}

impl<'a> Pass<'a> {
    /// The pass of all rows of `inputs`. `scalings` are the different factors of queries that the
    /// layers have.
    pub(crate) fn new(
        inputs: &'a StepInputs,
        stores: &'a Stores,
        scalings: &[QueryScaling],
    ) -> Result<Self> {
        let positions = inputs.positions.clone();
        let rotations = inputs.rotations.iter().map(|table| table.at(&positions));
        let factors = scalings.iter().map(|scaling| Ok((*scaling, factors(*scaling, &positions)?)));
        Ok(Self {
            inputs,
            stores,
            adapters: &inputs.adapters,
            layer: 0,
            plans: &inputs.attention,
            rotations: rotations.collect::<Result<_>>()?,
            query_factors: factors.collect::<Result<_>>()?,
            positions,
            checkpoints: Vec::new(),
        })
    }

    /// Keeps only the rows `rows`, whose attention is `plans` and whose adapters are `adapters`.
    pub(crate) fn select(
        &mut self,
        rows: &Tensor,
        plans: &'a Plans,
        adapters: &'a AdapterRows,
    ) -> Result<()> {
        (self.plans, self.adapters) = (plans, adapters);
        self.positions = self.positions.index_select(rows, 0)?;
        for rotations in &mut self.rotations {
            *rotations = rotations.at(rows)?;
        }
        for (_, factors) in &mut self.query_factors {
            *factors = factors.index_select(rows, 0)?;
        }
        Ok(())
    }

    /// The keys and values of all layers.
    pub(crate) fn kv(&self) -> &'a KvStore {
        &self.stores.kv
    }

    /// The states of all recurrent layers.
    pub(crate) fn states(&self) -> &'a StateStore {
        &self.stores.states
    }

    /// The inputs of recurrent layers.
    pub(crate) fn state_inputs(&self) -> Result<&'a StateInputs> {
        match &self.inputs.states {
            Some(inputs) => Ok(inputs),
            None => bail!("expected slices with states"),
        }
    }

    /// The updates by adapters of the layer's projections at `site`, which have the input `x`.
    pub(crate) fn updates(&self, site: Site, x: &Tensor) -> Result<Updates<'a>> {
        self.adapters.updates(At::Layer(self.layer, site), x)
    }

    /// The rotations of the rows by the rotary embedding `rope`; `None` if there is none.
    pub(crate) fn rotation(&self, rope: Option<usize>) -> Option<&Rotations> {
        rope.map(|rope| &self.rotations[rope])
    }

    /// Multiplies the queries of the rows, `[rows, heads, head_dim]`, by their factors.
    pub(crate) fn scale_queries(
        &self,
        queries: Tensor,
        scaling: Option<QueryScaling>,
    ) -> Result<Tensor> {
        let factors = self.query_factors.iter().find(|(own, _)| Some(*own) == scaling);
        match factors {
            Some((_, factors)) => queries.broadcast_mul(factors),
            None => Ok(queries),
        }
    }

    /// Writes a value of each row, `[rows, width]`, to a plane of the KV store, for the rows that
    /// are written. The pass has all rows of the step.
    pub(crate) fn write(&self, plane: &Plane, values: &Tensor) -> Result<()> {
        let Some((rows, slots)) = &self.inputs.written else { return Ok(()) };
        plane.write(&rows.of(&values.to_dtype(plane.row_dtype())?.contiguous()?)?, slots)
    }
}

/// The factors of the queries at `positions`, `[rows, 1, 1]`.
fn factors(scaling: QueryScaling, positions: &Tensor) -> Result<Tensor> {
    let QueryScaling { beta, step } = scaling;
    let positions = positions.to_dtype(DType::F32)?;
    // This divides, because a product with the reciprocal may be slightly below a whole number.
    let step = Tensor::full(step as f32, positions.shape(), positions.device())?;
    let steps = positions.div(&step)?.floor()?;
    let factors = steps.affine(1.0, 1.0)?.log()?.affine(f64::from(beta), 1.0)?;
    factors.reshape(((), 1, 1))
}
