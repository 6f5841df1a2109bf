//! Attention by candle's flash attention (FlashAttention 2), which reads keys and values in place
//! through the block tables.

use candle_core::{DType, Device, Result, Tensor};

use super::{AttentionArgs, Padding};
use crate::kv_store::KvShape;
use crate::plan::{QuerySpan, block_tables, indices};

/// The kernels support block sizes that are multiples of this number of positions.
const BLOCK_STEP: usize = 32;
/// The kernels support head sizes that are multiples of this number of elements.
const HEAD_DIM_STEP: usize = 8;
/// Maximum number of elements of a head. candle has kernels for up to 512, but above 256 they
/// ignore windows and soft caps.
const HEAD_DIM_MAX: usize = 256;

/// The reason why flash attention cannot be used for a model; `None` if it can.
pub(super) fn obstacle(device: &Device, shape: &KvShape, has_sinks: bool) -> Option<&'static str> {
    if !device.is_cuda() {
        return Some("the device is not a CUDA device");
    }
    if has_sinks {
        return Some("the model has attention sinks");
    }
    if !matches!(shape.dtype, DType::F16 | DType::BF16) {
        return Some("the KV store is neither f16 nor bf16");
    }
    if !shape.block_size.is_multiple_of(BLOCK_STEP) {
        return Some("the block size is not a multiple of 32");
    }
    if !shape.head_dim.is_multiple_of(HEAD_DIM_STEP) || shape.head_dim > HEAD_DIM_MAX {
        return Some("the head size is not a multiple of 8 of at most 256");
    }
    None
}

/// The queries of a step and their block tables on the device.
#[derive(Debug)]
pub(crate) struct Plan {
    /// Cumulative numbers of queries, `[sequences + 1]` in u32.
    queries: Tensor,
    /// Cumulative context lengths, `[sequences + 1]` in u32. A context length is the number of
    /// positions that the last query of a sequence attends to.
    contexts: Tensor,
    /// See [`block_tables`].
    block_tables: Tensor,
    queries_max: usize,
}

impl Plan {
    pub(crate) fn new(spans: &[QuerySpan<'_>], padding: Padding, device: &Device) -> Result<Self> {
        let cumulative = |length: fn(&QuerySpan<'_>) -> usize| {
            let mut sums = vec![0];
            let mut sum = 0;
            for span in spans {
                sum += length(span) as u32;
                sums.push(sum);
            }
            indices(&sums, device)
        };
        Ok(Self {
            queries: cumulative(|span| span.count)?,
            contexts: cumulative(|span| span.context())?,
            block_tables: block_tables(spans, padding.blocks, device)?,
            queries_max: spans.iter().map(|span| span.count).max().unwrap_or(0),
        })
    }

    /// See [`Prepared::of_decode`](super::Prepared::of_decode).
    pub(crate) fn of_decode(&self) -> Vec<&Tensor> {
        vec![&self.contexts, &self.block_tables]
    }

    /// See [`Prepared::attend`](super::Prepared::attend).
    pub(crate) fn attend(&self, q: &Tensor, args: &AttentionArgs<'_>) -> Result<Tensor> {
        let AttentionArgs { kv, .. } = *args;
        let shape = &kv.shape;
        let blocks = |plane: &Tensor| {
            let dims = (shape.block_count, shape.block_size, shape.kv_heads, shape.head_dim);
            plane.reshape(dims)
        };
        // The kernel does not count the query's own position.
        let window = args.window.map(|window| window - 1);
        // candle chooses a kernel by comparing the window with the longest context, and a CUDA
        // graph captures this number. It is therefore a bound that does not depend on the batch. It
        // is below 2^31 because the kernels compute with it.
        let context_max = (shape.block_count * shape.block_size).min(1 << 30);
        candle_flash_attn::flash_attn_varlen_paged_windowed(
            &q.to_dtype(shape.dtype)?.contiguous()?,
            &blocks(&kv.keys.elements)?,
            &blocks(&kv.values.elements)?,
            &self.queries,
            &self.contexts,
            &self.block_tables,
            None,
            self.queries_max,
            context_max,
            args.scale,
            window,
            Some(0),
            shape.block_size,
            args.softcap,
        )?
        .to_dtype(DType::F32)?
        .flatten_from(1)
    }
}
