//! Attention over the paged KV store.
//!
//! * `gather` works on every device and for every model: it gathers keys and values by the block
//!   tables and computes an online softmax over tiles of positions.
//! * `flash` (feature `cuda`) calls candle's flash attention, which reads the KV store through the
//!   block tables, for models that it supports.
//! * `split` computes each query by itself, with kernels of this crate: on CUDA where flash
//!   attention cannot be used. If results may depend on the batch, it computes the sequences that
//!   have a single query in a step, which is what decoding is.

use candle_core::{Device, Result, Tensor};

use crate::kv_store::{KvLayer, KvShape};
use crate::plan::{QuerySpan, indices, longest_table, single_queries};

#[cfg(feature = "cuda")]
mod flash;
mod gather;
mod split;

/// What the queries of a layer read, and what is computed besides `softmax(q k^T) v`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionArgs<'a> {
    pub(crate) kv: &'a KvLayer,
    /// The shape of the KV store.
    pub(crate) shape: &'a KvShape,
    pub(crate) heads: usize,
    /// Factor of the scores.
    pub(crate) scale: f32,
    /// Cap of the scores.
    pub(crate) softcap: Option<f32>,
    /// Number of positions that a query reads, including its own.
    pub(crate) window: Option<usize>,
    /// Scores of the attention sinks, `[heads]`.
    pub(crate) sinks: Option<&'a Tensor>,
}

/// The sizes to which what is uploaded for attention is padded. Steps with the same number of
/// sequences and the same padding, which is large enough for them, upload tensors of the same
/// shapes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Padding {
    /// Number of blocks of a sequence.
    blocks: usize,
    /// Number of parts of all sequences, with split-KV decoding.
    parts: usize,
}

impl Padding {
    /// Number of positions of a sequence.
    pub(crate) fn positions(&self, shape: &KvShape) -> usize {
        self.blocks * shape.block_size
    }
}

/// How the attention of a model is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Attention {
    kind: Kind,
    /// Whether sequences with a single query in a step are computed by `split`, and others are not.
    split_decode: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// From gathered keys and values.
    Gather,
    /// Each query by itself.
    Split,
    /// By candle's flash attention.
    #[cfg(feature = "cuda")]
    Flash,
}

impl Attention {
    /// The fastest way that supports the model. `has_sinks` tells whether it has attention sinks.
    pub(crate) fn select(
        device: &Device,
        shape: &KvShape,
        has_sinks: bool,
        batch_invariant: bool,
    ) -> Self {
        let kind = Kind::select(device, shape, has_sinks);
        // A position may be computed as a single query when it is decoded, and as one of many when
        // it is computed again, so both have to be computed in the same way.
        let split_decode =
            !batch_invariant && kind != Kind::Split && split::supports(device, shape);
        Self { kind, split_decode }
    }

    /// Whether sequences with a single query in a step are computed by `split`.
    fn splits_decode(self) -> bool {
        self.split_decode || self.kind == Kind::Split
    }

    /// Its name in logs, reports and fingerprints.
    pub(crate) fn name(self) -> &'static str {
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

    /// The memory in bytes that it needs in every step.
    pub(crate) fn workspace_bytes(self, device: &Device, heads: usize, shape: &KvShape) -> u64 {
        if self.splits_decode() { split::workspace_bytes(device, heads, shape) } else { 0 }
    }

    /// Whether padding decides the shapes of all tensors for spans of one query each.
    pub(crate) fn can_pad(self) -> bool {
        self.splits_decode() || self.kind != Kind::Gather
    }

    /// The padding for `spans` of one query each, in powers of two; `None` if they need more than
    /// one launch.
    pub(crate) fn padding(self, spans: &[QuerySpan<'_>]) -> Option<Padding> {
        let parts = if self.splits_decode() { split::padded_parts(spans)? } else { 0 };
        Some(Padding { blocks: longest_table(spans).next_power_of_two(), parts })
    }

    /// Prepares the attention of the queries of `spans`, which all layers share.
    pub(crate) fn prepare(
        self,
        spans: &[QuerySpan<'_>],
        shape: &KvShape,
        padding: Padding,
        device: &Device,
    ) -> Result<Prepared> {
        let is_single = |span: &QuerySpan<'_>| self.split_decode && span.count == 1;
        if spans.iter().all(is_single) {
            return Ok(Prepared::One(Plan::Split(split::Plan::new(spans, padding, device)?)));
        }
        if !spans.iter().any(is_single) {
            return Ok(Prepared::One(self.kind.plan(spans, shape, padding, device)?));
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
        let several_plan = self.kind.plan(&several.spans, shape, padding, device)?;
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
    /// Their rows.
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
        shape: &KvShape,
        padding: Padding,
        device: &Device,
    ) -> Result<Plan> {
        match self {
            Self::Gather => Ok(Plan::Gather(gather::Plan::new(spans, shape, device)?)),
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
    /// Two plans with the rows of their queries, and the index of each row among the rows of both.
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
    /// The tensors that differ from step to step if all spans have one query and are padded.
    pub(crate) fn of_decode(&self) -> Vec<&Tensor> {
        match self {
            Self::One(Plan::Split(plan)) => plan.tensors(),
            #[cfg(feature = "cuda")]
            Self::One(Plan::Flash(plan)) => plan.of_decode(),
            Self::One(Plan::Gather(_)) | Self::Both { .. } => Vec::new(),
        }
    }

    /// Attention of the queries `q`, `[rows, heads, head_dim]` in f32. Returns
    /// `[rows, heads * head_dim]` in f32.
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

    /// Goal: in a batch of chunks and single queries in any order, each row gets the attention that
    /// it gets from gathered keys and values, up to rounding, with windows, caps and sinks: if only
    /// single queries are computed by themselves, and if all are.
    #[test]
    fn split_queries_get_their_attention() {
        let device = Device::Cpu;
        let random = |dims: &[usize]| Tensor::randn(0_f32, 1.0, dims, &device).expect("a tensor");
        for (dtype, block_size) in [(DType::F32, 16), (DType::F16, 4), (DType::BF16, 32)] {
            let block_count = 400 / block_size + 2;
            let shape = KvShape {
                layer_count: 1,
                block_count,
                block_size,
                kv_heads: 2,
                head_dim: 24,
                dtype,
            };
            let plane = || random(&[block_count * block_size, 48]).to_dtype(dtype).expect("a cast");
            let kv = KvLayer { keys: plane(), values: plane() };
            let table: Vec<BlockId> = (0..block_count as u32).rev().map(BlockId).collect();
            let spans: Vec<QuerySpan<'_>> = [(390, 1), (0, 5), (7, 1), (0, 1), (100, 20), (256, 1)]
                .map(|(start, count)| QuerySpan { start, count, block_table: &table })
                .into();
            let q = random(&[29, 6, 24]);
            let sinks = random(&[6]);
            for (softcap, window, sinks) in
                [(None, None, None), (Some(2.0), Some(50), None), (None, Some(1), Some(&sinks))]
            {
                let args = AttentionArgs {
                    kv: &kv,
                    shape: &shape,
                    heads: 6,
                    scale: 0.2,
                    softcap,
                    window,
                    sinks,
                };
                for spans in [&spans[..], &spans[2..4]] {
                    let rows = spans.iter().map(|span| span.count).sum();
                    let q = q.narrow(0, 0, rows).expect("some rows");
                    let attend = |kind, split_decode| {
                        let attention = Attention { kind, split_decode };
                        let prepared =
                            attention.prepare(spans, &shape, Padding::default(), &device)?;
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
            layer_count: 1,
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
