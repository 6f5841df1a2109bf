//! Split-KV attention: each query by itself.
//!
//! The positions that a query attends to are divided into parts of [`PART`] positions, which are
//! computed in parallel and merged. A few decodes with long contexts therefore keep the whole
//! device busy. The CUDA kernels are in `kernels/split_attention.cu`. On the CPU, a plain loop is
//! used instead.
//!
//! The first part begins at position 0 in every batch, so the result of a query depends on its
//! sequence only. It differs by rounding from the result of attention that computes several queries
//! together.

use candle_core::{
    CpuStorage, CustomOp3, DType, Device, Layout, Result, Shape, Tensor, WithDType, bail,
};

use super::{AttentionArgs, Padding};
use crate::kv_store::{KvLayer, KvShape, Plane};
use crate::plan::{QuerySpan, block_tables, indices};
use crate::storage::elements;

#[cfg(feature = "cuda-core")]
mod cuda;

/// Number of positions of a part. The kernels have the same constant.
const PART: usize = 256;
/// Maximum number of parts of a launch, unless a single query has more. It bounds the memory for
/// the results of the parts.
const PARTS_MAX: usize = 4096;
/// The kernels support head sizes that are multiples of this number of elements.
const HEAD_DIM_STEP: usize = 8;
/// Maximum number of elements of a head.
const HEAD_DIM_MAX: usize = 256;

/// Whether the kernels support the device and the model.
pub(super) fn supports(device: &Device, shape: &KvShape) -> bool {
    matches!(device, Device::Cpu | Device::Cuda(_))
        && shape.head_dim.is_multiple_of(HEAD_DIM_STEP)
        && shape.head_dim <= HEAD_DIM_MAX
}

/// Size in bytes of the results of all parts of a launch; 0 on the CPU, which has no parts.
pub(super) fn workspace_bytes(device: &Device, heads: usize, shape: &KvShape) -> u64 {
    if device.is_cpu() { 0 } else { 4 * (PARTS_MAX * heads * (shape.head_dim + 2)) as u64 }
}

/// The number of parts to which the parts of `spans` are padded, a power of two; `None` if they
/// need more than one launch.
pub(super) fn padded_parts(spans: &[QuerySpan<'_>]) -> Option<usize> {
    let parts: usize = spans.iter().map(parts).sum();
    Some(parts.next_power_of_two()).filter(|parts| *parts <= PARTS_MAX)
}

/// Number of parts of a query.
fn parts(span: &QuerySpan<'_>) -> usize {
    span.context().div_ceil(PART)
}

/// The queries of a step, divided into launches.
#[derive(Debug)]
pub(crate) struct Plan(Vec<Launch>);

/// Queries that are computed together.
#[derive(Debug)]
struct Launch {
    /// Number of queries.
    count: usize,
    /// Number of positions that each query attends to if there is no window, `[count]` in u32.
    contexts: Tensor,
    /// See [`block_tables`].
    tables: Tensor,
    /// For each part, the index of its query, `[parts]` in u32. The padding consists of parts of
    /// the last query that begin beyond its context.
    #[cfg_attr(not(feature = "cuda-core"), allow(dead_code, reason = "the CPU has no parts"))]
    part_rows: Tensor,
    /// For each query, the index of its first part, followed by the number of all parts: `[count +
    /// 1]` in u32.
    #[cfg_attr(not(feature = "cuda-core"), allow(dead_code, reason = "the CPU has no parts"))]
    part_starts: Tensor,
}

impl Plan {
    /// Plans attention for `spans`, which have one query each.
    pub(super) fn new(spans: &[QuerySpan<'_>], padding: Padding, device: &Device) -> Result<Self> {
        let mut launches = Vec::new();
        let mut rest = spans;
        while !rest.is_empty() {
            let mut sum = 0;
            let fits = |span: &&QuerySpan<'_>| {
                sum += parts(span);
                sum <= PARTS_MAX
            };
            let count = rest.iter().take_while(fits).count().max(1);
            let (these, others) = rest.split_at(count);
            launches.push(Launch::new(these, padding, device)?);
            rest = others;
        }
        Ok(Self(launches))
    }

    /// See [`Prepared::of_decode`](super::Prepared::of_decode).
    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        let launches = self.0.iter();
        let tensors = launches.map(|l| [&l.contexts, &l.tables, &l.part_rows, &l.part_starts]);
        tensors.flatten().collect()
    }

    /// See [`Prepared::attend`](super::Prepared::attend).
    pub(super) fn attend(&self, q: &Tensor, args: &AttentionArgs<'_>) -> Result<Tensor> {
        let q = q.contiguous()?;
        let mut start = 0;
        let mut outputs = Vec::with_capacity(self.0.len());
        for launch in &self.0 {
            let q = q.narrow(0, start, launch.count)?;
            let op = SplitAttention { launch, args };
            let KvLayer { keys, values, .. } = args.kv;
            outputs.push(q.apply_op3_no_bwd(&keys.elements, &values.elements, &op)?);
            start += launch.count;
        }
        Tensor::cat(&outputs, 0)
    }
}

impl Launch {
    fn new(spans: &[QuerySpan<'_>], padding: Padding, device: &Device) -> Result<Self> {
        let (mut part_rows, mut part_starts) = (Vec::new(), vec![0]);
        for (row, span) in spans.iter().enumerate() {
            part_rows.resize(part_rows.len() + parts(span), row as u32);
            part_starts.push(part_rows.len() as u32);
        }
        let last = spans.len().saturating_sub(1) as u32;
        part_rows.resize(part_rows.len().max(padding.parts), last);
        let contexts: Vec<u32> = spans.iter().map(|span| span.context() as u32).collect();
        Ok(Self {
            count: spans.len(),
            contexts: indices(&contexts, device)?,
            tables: block_tables(spans, padding.blocks, device)?,
            part_rows: indices(&part_rows, device)?,
            part_starts: indices(&part_starts, device)?,
        })
    }
}

/// The operation on queries `[count, heads, head_dim]` in f32, and the elements of keys and values.
/// It returns `[count, heads * head_dim]` in f32.
struct SplitAttention<'a> {
    launch: &'a Launch,
    args: &'a AttentionArgs<'a>,
}

impl SplitAttention<'_> {
    /// Checks that the operands are contiguous and have the shapes of the plan and the KV store.
    fn check(&self, q: &Layout, keys: &Layout, values: &Layout) -> Result<()> {
        let (Launch { count, .. }, AttentionArgs { kv, heads, .. }) = (self.launch, *self.args);
        let shape = &kv.shape;
        let slots = shape.block_count * shape.block_size;
        let plane = [slots, shape.width()];
        let contiguous = [q, keys, values].iter().all(|layout| layout.is_contiguous());
        let has_its_scales = |plane: &Plane| match (shape.dtype, &plane.scales) {
            (DType::U8, Some(scales)) => {
                scales.is_contiguous() && scales.dims() == [slots, shape.kv_heads]
            }
            (dtype, scales) => dtype != DType::U8 && scales.is_none(),
        };
        if !contiguous
            || ![&kv.keys, &kv.values].into_iter().all(has_its_scales)
            || q.dims() != [*count, heads, shape.head_dim]
            || keys.dims() != plane
            || values.dims() != plane
            || !heads.is_multiple_of(shape.kv_heads)
        {
            bail!("split-KV attention: expected contiguous operands of matching shapes");
        }
        Ok(())
    }

    fn output_shape(&self) -> Shape {
        Shape::from((self.launch.count, self.args.heads * self.args.kv.shape.head_dim))
    }

    /// A direct implementation, query by query. `number` converts an element.
    fn on_cpu<T: WithDType>(
        &self,
        q: &[f32],
        (keys, keys_layout): (&CpuStorage, &Layout),
        (values, values_layout): (&CpuStorage, &Layout),
        number: fn(T) -> f32,
    ) -> Result<Vec<f32>> {
        let (keys, values) = (elements::<T>(keys, keys_layout)?, elements(values, values_layout)?);
        let AttentionArgs { kv, heads, scale, softcap, window, sinks } = *self.args;
        let shape = &kv.shape;
        let dim = shape.head_dim;
        let contexts = self.launch.contexts.to_vec1::<u32>()?;
        let tables = self.launch.tables.to_vec2::<u32>()?;
        let sinks = sinks.map(Tensor::to_vec1::<f32>).transpose()?;
        let scales = |plane: &Plane| {
            let scales = plane.scales.as_ref().map(|scales| scales.flatten_all()?.to_vec1::<f32>());
            scales.transpose()
        };
        let (key_scales, value_scales) = (scales(&kv.keys)?, scales(&kv.values)?);
        let scale_at = |scales: &Option<Vec<f32>>, stored: usize| {
            scales.as_ref().map_or(1.0, |scales| scales[stored])
        };
        let mut output = vec![0.0; q.len()];
        let rows = q.chunks_exact(dim).zip(output.chunks_exact_mut(dim)).enumerate();
        for (index, (query, output)) in rows {
            let (row, head) = (index / heads, index % heads);
            let context = contexts[row] as usize;
            let oldest = window.map_or(0, |window| context.saturating_sub(window));
            // The index of a position's head among all heads of the store.
            let stored = |position: usize| {
                let block = tables[row][position / shape.block_size] as usize;
                let slot = block * shape.block_size + position % shape.block_size;
                slot * shape.kv_heads + head / (heads / shape.kv_heads)
            };
            let score = |position: usize| {
                let stored = stored(position);
                let key = &keys[stored * dim..][..dim];
                let score = query.iter().zip(key).map(|(q, k)| q * number(*k)).sum::<f32>();
                let score = score * scale * scale_at(&key_scales, stored);
                softcap.map_or(score, |cap| cap * (score / cap).tanh())
            };
            let scores: Vec<f32> = (oldest..context).map(score).collect();
            let sink = sinks.as_ref().map_or(f32::NEG_INFINITY, |sinks| sinks[head]);
            let largest = scores.iter().copied().fold(sink, f32::max);
            let mut sum = (sink - largest).exp();
            for (position, score) in (oldest..).zip(scores) {
                let weight = (score - largest).exp();
                sum += weight;
                let stored = stored(position);
                let weight = weight * scale_at(&value_scales, stored);
                let value: &[T] = &values[stored * dim..][..dim];
                output.iter_mut().zip(value).for_each(|(to, v)| *to += weight * number(*v));
            }
            output.iter_mut().for_each(|value| *value /= sum);
        }
        Ok(output)
    }
}

impl CustomOp3 for SplitAttention<'_> {
    fn name(&self) -> &'static str {
        "split-kv-attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        keys: &CpuStorage,
        keys_layout: &Layout,
        values: &CpuStorage,
        values_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.check(q_layout, keys_layout, values_layout)?;
        let q = elements(q, q_layout)?;
        let (keys, values) = ((keys, keys_layout), (values, values_layout));
        let output = match self.args.kv.shape.dtype {
            DType::U8 => self.on_cpu::<u8>(q, keys, values, |code| f32::from(code.cast_signed())),
            DType::F16 => self.on_cpu(q, keys, values, half::f16::to_f32),
            DType::BF16 => self.on_cpu(q, keys, values, half::bf16::to_f32),
            _ => self.on_cpu::<f32>(q, keys, values, |element| element),
        };
        Ok((CpuStorage::F32(output?), self.output_shape()))
    }

    #[cfg(feature = "cuda-core")]
    fn cuda_fwd(
        &self,
        q: &candle_core::CudaStorage,
        q_layout: &Layout,
        keys: &candle_core::CudaStorage,
        keys_layout: &Layout,
        values: &candle_core::CudaStorage,
        values_layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        self.check(q_layout, keys_layout, values_layout)?;
        let output = cuda::attend(self, [q, keys, values], [q_layout, keys_layout, values_layout])?;
        Ok((output, self.output_shape()))
    }
}

#[cfg(test)]
mod tests {
    use stolon_kvcache::BlockId;

    use super::*;

    /// Goal: each query has one part for every `PART` positions, and a launch has at most
    /// `PARTS_MAX` parts unless it has only one query.
    #[test]
    fn queries_are_divided_into_launches() {
        let block_size = PART;
        let table: Vec<BlockId> = (0..2 * PARTS_MAX as u32).map(BlockId).collect();
        let span = |context: usize| QuerySpan {
            start: context - 1,
            count: 1,
            block_table: &table[..context.div_ceil(block_size)],
        };
        let whole = PARTS_MAX * PART;
        let contexts = [1, PART, PART + 1, whole - 4 * PART, 1, whole + 1, 10, 600];
        let Plan(launches) =
            Plan::new(&contexts.map(span), Padding::default(), &Device::Cpu).expect("a plan");
        let parts = |launch: &Launch| launch.part_rows.to_vec1::<u32>().expect("parts");
        let starts = |launch: &Launch| launch.part_starts.to_vec1::<u32>().expect("starts");
        let counts: Vec<usize> = launches.iter().map(|launch| launch.count).collect();
        assert_eq!(counts, [4, 1, 1, 2]);
        let max = PARTS_MAX as u32;
        assert_eq!(starts(&launches[0]), [0, 1, 2, 4, max]);
        assert_eq!(parts(&launches[0])[..5], [0, 1, 2, 2, 3]);
        assert_eq!(starts(&launches[1]), [0, 1]);
        assert_eq!(starts(&launches[2]), [0, max + 1]);
        assert_eq!((starts(&launches[3]), parts(&launches[3])), (vec![0, 1, 4], vec![0, 1, 1, 1]));
        assert_eq!(launches[3].contexts.to_vec1::<u32>().expect("contexts"), [10, 600]);
        assert_eq!(launches[3].tables.dims(), [2, 3]);
    }
}
