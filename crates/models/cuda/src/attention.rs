//! Attention over the paged KV store.
//!
//! * `gather` works on every device and for every model: it gathers keys and values by the block
//!   tables and computes an online softmax over tiles of positions.
//! * `flash` (feature `cuda`) calls candle's flash attention, which reads the KV store through the
//!   block tables, for models that it supports.
//! * `split` computes each query by itself, with kernels of this crate. It is used on CUDA for
//!   models that flash attention does not support. If results may depend on the batch, it also
//!   computes the sequences with a single query in a step, which are decodes.

use std::sync::Arc;

use candle_core::{Device, Result, Tensor};
use stolon_checkpoint::{DecoderConfig, MixerConfig};

use crate::kv_store::{KvLayer, KvShape, StoreShape};
use crate::plan::{QuerySpan, indices, longest_table, single_queries};

#[cfg(feature = "cuda")]
mod flash;
mod gather;
mod split;

/// The arguments of attention in one layer: the KV that the queries read, and the operations in
/// addition to `softmax(q k^T) v`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionArgs<'a> {
    pub(crate) kv: &'a KvLayer,
    /// Number of query heads.
    pub(crate) heads: usize,
    /// Factor by which scores are multiplied.
    pub(crate) scale: f32,
    /// Soft cap: a score `s` becomes `softcap * tanh(s / softcap)`. `None` if scores are not
    /// capped.
    pub(crate) softcap: Option<f32>,
    /// Number of positions that a query reads, including its own.
    pub(crate) window: Option<usize>,
    /// Scores of the attention sinks, `[heads]`.
    pub(crate) sinks: Option<&'a Tensor>,
}

/// The sizes to which the tensors that attention uploads are padded. Steps with the same number of
/// sequences and the same padding upload tensors of the same shapes, if the padding is large enough
/// for both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Padding {
    /// Number of blocks in the block table of each sequence.
    blocks: usize,
    /// Number of parts of all sequences together in split-KV decoding; 0 without it.
    parts: usize,
}

impl Padding {
    /// Number of positions in the padded block table of a sequence.
    pub(crate) fn positions(&self, block_size: usize) -> usize {
        self.blocks * block_size
    }
}

/// How the attention of each layer of a model is computed.
#[derive(Clone, Debug)]
pub(crate) struct Attentions {
    /// The different kinds of attention. Most models have one.
    kinds: Vec<Attention>,
    /// The index in `kinds` of each layer that stores keys and values.
    layers: Arc<[usize]>,
    /// Maximum size in bytes of the buffers that attention allocates in every step.
    pub(crate) workspace_bytes: u64,
}

impl Attentions {
    /// Selects the fastest implementation for each layer of `config`.
    pub(crate) fn select(
        config: &DecoderConfig,
        device: &Device,
        shape: &StoreShape,
        batch_invariant: bool,
    ) -> Self {
        let query_heads = config.mixers().filter_map(|mixer| match mixer {
            MixerConfig::Attention(attention) if attention.has_own_kv() => {
                Some((attention.heads, attention.sinks))
            }
            MixerConfig::Latent(latent) => Some((latent.heads, false)),
            _ => None,
        });
        let (mut kinds, mut layers, mut workspace_bytes) = (Vec::new(), Vec::new(), 0);
        for ((heads, sinks), shape) in query_heads.zip(shape.heads()) {
            let attention = Attention::select(device, &shape, sinks, batch_invariant);
            let index = kinds.iter().position(|kind| *kind == attention);
            layers.push(index.unwrap_or(kinds.len()));
            if index.is_none() {
                kinds.push(attention);
            }
            workspace_bytes = workspace_bytes.max(attention.workspace_bytes(device, heads, &shape));
        }
        Self { kinds, layers: layers.into(), workspace_bytes }
    }

    /// The names of the implementations in logs, reports and fingerprints.
    pub(crate) fn name(&self) -> String {
        let names: Vec<_> = self.kinds.iter().map(|kind| kind.name()).collect();
        names.join("; ")
    }

    /// Whether the padding alone determines the shapes of all tensors if each span has one query.
    pub(crate) fn can_pad(&self) -> bool {
        self.kinds.iter().all(|kind| kind.can_pad())
    }

    /// The padding for `spans` of one query each, in powers of two; `None` if they need more than
    /// one launch.
    pub(crate) fn padding(&self, spans: &[QuerySpan<'_>]) -> Option<Padding> {
        let splits_decode = self.kinds.iter().any(|kind| kind.splits_decode());
        let parts = if splits_decode { split::padded_parts(spans)? } else { 0 };
        Some(Padding { blocks: longest_table(spans).next_power_of_two(), parts })
    }

    /// Prepares the attention of all layers for the queries of `spans`, with blocks of `block_size`
    /// positions.
    pub(crate) fn prepare(
        &self,
        spans: &[QuerySpan<'_>],
        block_size: usize,
        padding: Padding,
        device: &Device,
    ) -> Result<Plans> {
        let plans = self.kinds.iter().map(|kind| kind.prepare(spans, block_size, padding, device));
        Ok(Plans { plans: plans.collect::<Result<_>>()?, layers: self.layers.clone() })
    }
}

/// The attention of all layers for the queries of a step.
#[derive(Debug)]
pub(crate) struct Plans {
    /// One plan for each entry of [`Attentions::kinds`].
    plans: Vec<Prepared>,
    layers: Arc<[usize]>,
}

impl Plans {
    /// The plan of a layer that reads the keys and values `kept`.
    pub(crate) fn of(&self, kept: usize) -> &Prepared {
        &self.plans[self.layers[kept]]
    }

    /// The tensors whose contents change from step to step if all spans have one query and are
    /// padded.
    pub(crate) fn of_decode(&self) -> Vec<&Tensor> {
        self.plans.iter().flat_map(Prepared::of_decode).collect()
    }
}

/// How the attention of a layer is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Attention {
    kind: Kind,
    /// Whether `split` computes the sequences with a single query in a step, and `kind` only the
    /// others.
    split_decode: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Keys and values are gathered first: `gather`.
    Gather,
    /// Each query is computed by itself: `split`.
    Split,
    /// candle's flash attention: `flash`.
    #[cfg(feature = "cuda")]
    Flash,
}

impl Attention {
    /// Selects the fastest implementation that supports a layer. `has_sinks` tells whether the
    /// layer has attention sinks.
    fn select(device: &Device, shape: &KvShape, has_sinks: bool, batch_invariant: bool) -> Self {
        let kind = Kind::select(device, shape, has_sinks);
        // The same position may be computed as a single query when it is decoded, and together with
        // others when it is computed again. With batch invariance, both must use the same
        // implementation.
        let split_decode =
            !batch_invariant && kind != Kind::Split && split::supports(device, shape);
        Self { kind, split_decode }
    }

    /// Whether sequences with a single query in a step are computed by `split`.
    fn splits_decode(self) -> bool {
        self.split_decode || self.kind == Kind::Split
    }

    /// Its name in logs, reports and fingerprints.
    fn name(self) -> &'static str {
        match (self.kind, self.split_decode) {
            (Kind::Gather, false) => "gather",
            (Kind::Gather, true) => "gather, split-KV decode",
            (Kind::Split, _) => "split-KV",
            #[cfg(feature = "cuda")]
            (Kind::Flash, false) => "flash",
            #[cfg(feature = "cuda")]
            (Kind::Flash, true) => "flash, split-KV decode",
        }
    }

    /// Size in bytes of the buffers that attention allocates in every step.
    fn workspace_bytes(self, device: &Device, heads: usize, shape: &KvShape) -> u64 {
        if self.splits_decode() { split::workspace_bytes(device, heads, shape) } else { 0 }
    }

    /// Whether the padding alone determines the shapes of all tensors if each span has one query.
    fn can_pad(self) -> bool {
        self.splits_decode() || self.kind != Kind::Gather
    }

    /// Prepares attention for the queries of `spans`.
    fn prepare(
        self,
        spans: &[QuerySpan<'_>],
        block_size: usize,
        padding: Padding,
        device: &Device,
    ) -> Result<Prepared> {
        let is_single = |span: &QuerySpan<'_>| self.split_decode && span.count == 1;
        if spans.iter().all(is_single) {
            return Ok(Prepared::One(Plan::Split(split::Plan::new(spans, padding, device)?)));
        }
        if !spans.iter().any(is_single) {
            return Ok(Prepared::One(self.kind.plan(spans, block_size, padding, device)?));
        }
        let (mut single, mut several) = (Group::default(), Group::default());
        for span in spans {
            let rows = (single.rows.len() + several.rows.len()) as u32..;
            let group = if is_single(span) { &mut single } else { &mut several };
            group.spans.push(*span);
            group.rows.extend(rows.take(span.count));
        }
        let mut order = vec![0; single.rows.len() + several.rows.len()];
        for (index, row) in single.rows.iter().chain(&several.rows).enumerate() {
            order[*row as usize] = index as u32;
        }
        let single_plan = Plan::Split(split::Plan::new(&single.spans, padding, device)?);
        let several_plan = self.kind.plan(&several.spans, block_size, padding, device)?;
        Ok(Prepared::Both {
            parts: [
                (single_plan, indices(&single.rows, device)?),
                (several_plan, indices(&several.rows, device)?),
            ],
            order: indices(&order, device)?,
        })
    }
}

/// Spans that are computed in the same way.
#[derive(Debug, Default)]
struct Group<'a> {
    spans: Vec<QuerySpan<'a>>,
    /// Indices of the rows of their queries.
    rows: Vec<u32>,
}

impl Kind {
    fn select(device: &Device, shape: &KvShape, has_sinks: bool) -> Self {
        #[cfg(feature = "cuda")]
        match flash::obstacle(device, shape, has_sinks) {
            None => return Self::Flash,
            Some(reason) => tracing::info!(reason, "flash attention is not used"),
        }
        let _ = has_sinks;
        if device.is_cuda() && split::supports(device, shape) { Self::Split } else { Self::Gather }
    }

    fn plan(
        self,
        spans: &[QuerySpan<'_>],
        block_size: usize,
        padding: Padding,
        device: &Device,
    ) -> Result<Plan> {
        match self {
            Self::Gather => Ok(Plan::Gather(gather::Plan::new(spans, block_size, device)?)),
            Self::Split => {
                Ok(Plan::Split(split::Plan::new(&single_queries(spans), padding, device)?))
            }
            #[cfg(feature = "cuda")]
            Self::Flash => Ok(Plan::Flash(flash::Plan::new(spans, padding, device)?)),
        }
    }
}

/// How the attention of a step's queries is computed.
#[derive(Debug)]
pub(crate) enum Prepared {
    /// All queries are computed in the same way.
    One(Plan),
    /// Two plans, each with the rows of its queries. `order` has, for each row of the step, its
    /// index in the concatenated outputs of both plans.
    Both { parts: [(Plan, Tensor); 2], order: Tensor },
}

#[derive(Debug)]
pub(crate) enum Plan {
    Gather(gather::Plan),
    #[cfg(feature = "cuda")]
    Flash(flash::Plan),
    Split(split::Plan),
}

impl Prepared {
    /// The tensors whose contents change from step to step if all spans have one query and are
    /// padded.
    fn of_decode(&self) -> Vec<&Tensor> {
        match self {
            Self::One(Plan::Split(plan)) => plan.tensors(),
            #[cfg(feature = "cuda")]
            Self::One(Plan::Flash(plan)) => plan.of_decode(),
            Self::One(Plan::Gather(_)) | Self::Both { .. } => Vec::new(),
        }
    }

    /// Computes attention of the queries `q`, `[rows, heads, head_dim]` in f32. Returns `[rows,
    /// heads * head_dim]` in f32.
    pub(crate) fn attend(&self, q: &Tensor, args: &AttentionArgs<'_>) -> Result<Tensor> {
        match self {
            Self::One(plan) => plan.attend(q, args),
            Self::Both { parts, order } => {
                let attend =
                    |(plan, rows): &(Plan, Tensor)| plan.attend(&q.index_select(rows, 0)?, args);
                let [single, several] = parts;
                Tensor::cat(&[attend(single)?, attend(several)?], 0)?.index_select(order, 0)
            }
        }
    }
}

impl Plan {
    fn attend(&self, q: &Tensor, args: &AttentionArgs<'_>) -> Result<Tensor> {
        match self {
            Self::Gather(plan) => plan.attend(q, args),
            #[cfg(feature = "cuda")]
            Self::Flash(plan) => plan.attend(q, args),
            Self::Split(plan) => plan.attend(q, args),
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;
    use stolon_kvcache::BlockId;

    use super::*;
    use crate::kv_store::Plane;

    /// Goal: in a batch of chunks and single queries in any order, each row has the output of
    /// `gather` up to rounding, with windows, caps and sinks, both if `split` computes only the
    /// single queries and if it computes all queries.
    #[test]
    fn split_queries_get_their_attention() {
        let device = Device::Cpu;
        let random = |dims: &[usize]| Tensor::randn(0_f32, 1.0, dims, &device).expect("a tensor");
        for (dtype, block_size) in
            [(DType::F32, 16), (DType::F16, 4), (DType::BF16, 32), (DType::U8, 16)]
        {
            let block_count = 400 / block_size + 2;
            let shape = KvShape { block_count, block_size, kv_heads: 2, head_dim: 24, dtype };
            let slots = block_count * block_size;
            let plane = || {
                let values = random(&[slots, 48]);
                if dtype != DType::U8 {
                    return Plane {
                        elements: values.to_dtype(dtype).expect("a cast"),
                        scales: None,
                    };
                }
                let zeros = |width, dtype| Tensor::zeros((slots, width), dtype, &device);
                let elements = zeros(48, DType::U8).expect("codes");
                let plane = Plane { elements, scales: Some(zeros(2, DType::F32).expect("scales")) };
                let all: Vec<u32> = (0..slots as u32).collect();
                let all = indices(&all, &device).expect("all slots");
                plane.write(&values, &all).expect("a write");
                plane
            };
            let kv = KvLayer { shape, keys: plane(), values: plane() };
            let table: Vec<BlockId> = (0..block_count as u32).rev().map(BlockId).collect();
            let spans: Vec<QuerySpan<'_>> = [(390, 1), (0, 5), (7, 1), (0, 1), (100, 20), (256, 1)]
                .map(|(start, count)| QuerySpan { start, count, block_table: &table })
                .into();
            let q = random(&[29, 6, 24]);
            let sinks = random(&[6]);
            for (softcap, window, sinks) in
                [(None, None, None), (Some(2.0), Some(50), None), (None, Some(1), Some(&sinks))]
            {
                let args = AttentionArgs { kv: &kv, heads: 6, scale: 0.2, softcap, window, sinks };
                for spans in [&spans[..], &spans[2..4]] {
                    let rows = spans.iter().map(|span| span.count).sum();
                    let q = q.narrow(0, 0, rows).expect("some rows");
                    let attend = |kind, split_decode| {
                        let attention = Attention { kind, split_decode };
                        let prepared =
                            attention.prepare(spans, block_size, Padding::default(), &device)?;
                        prepared.attend(&q, &args)?.flatten_all()?.to_vec1::<f32>()
                    };
                    let expected = attend(Kind::Gather, false).expect("gathered");
                    for (kind, split_decode) in [(Kind::Gather, true), (Kind::Split, false)] {
                        let got = attend(kind, split_decode).expect("split");
                        assert_eq!(got.len(), expected.len());
                        for (got, expected) in got.iter().zip(&expected) {
                            assert!((got - expected).abs() < 1e-5, "{got} instead of {expected}");
                        }
                    }
                }
            }
        }
    }

    /// Goal: split-KV decoding is used only if results may depend on the batch, and for models that
    /// its kernels support.
    #[test]
    fn split_decoding_needs_batch_dependence() {
        let shape = |head_dim| KvShape {
            block_count: 1,
            block_size: 32,
            kv_heads: 1,
            head_dim,
            dtype: DType::F16,
        };
        for (head_dim, batch_invariant, expected) in [
            (64, false, true),
            (64, true, false),
            (256, false, true),
            (264, false, false),
            (4, false, false),
        ] {
            let attention =
                Attention::select(&Device::Cpu, &shape(head_dim), false, batch_invariant);
            assert_eq!(attention.name().contains("split-KV"), expected, "{head_dim}");
        }
    }
}
