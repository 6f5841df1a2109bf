//! Linear recurrences over the tokens of sequences: each head has a state `S`, a matrix `[key_dim,
//! value_dim]`, to which every token adds the product of its key and a correction of its value.
//!
//! The tokens are taken one after the other, in f32, and each element of an output is one sum over
//! the elements of the key in ascending order. The state after a token therefore depends on the
//! tokens before it only, bit for bit. The CUDA kernel is in `kernels/recurrence.cu`, and the CPU
//! computes the same operations in the same order. Other devices copy the operands to the CPU.

use candle_core::{CpuStorage, CustomOp3, Device, Layout, Result, Shape, Tensor, bail};
use stolon_checkpoint::config::{RecurrentShape, Rule};

use crate::storage::elements;

#[cfg(feature = "cuda-core")]
mod cuda;

/// The channels of the inputs of heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeadLayout {
    /// The first channel of all queries.
    pub(crate) query: usize,
    /// The first channel of all keys.
    pub(crate) key: usize,
    /// The first channel of the values of all heads.
    pub(crate) value: usize,
    /// Number of keys, and of queries. Each is used by several heads.
    pub(crate) key_heads: usize,
    /// Whether consecutive heads use the same key. Otherwise head `h` uses key `h % key_heads`.
    pub(crate) grouped: bool,
}

impl HeadLayout {
    /// The key that head `head` of `heads` uses.
    fn key_head(&self, head: usize, heads: usize) -> usize {
        match self.grouped {
            true => head / (heads / self.key_heads),
            false => head % self.key_heads,
        }
    }
}

/// Computes the tokens of all slices of a step.
///
/// A row of `rows`, `[rows, channels + factor_width]` in f32, has the queries, keys and values of a
/// token in the layout `layout`, the decays of all heads, and their strengths. `states`, `[slices,
/// heads * key_dim * value_dim]`, are the states before the slices. The rows of a slice are divided
/// into segments: `segments` in u32 has, for each slice, the index of its first segment, followed by
/// the number of all segments, and then the first row of each segment, followed by the number of
/// all rows.
///
/// Returns the outputs, `[rows, heads * value_dim]`, and the states after all segments, `[segments,
/// heads * key_dim * value_dim]`.
pub(crate) fn recur(
    (shape, layout): (&RecurrentShape, HeadLayout),
    states: &Tensor,
    rows: &Tensor,
    segments: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let device = rows.device();
    let (count, slices) = (rows.dim(0)?, states.dim(0)?);
    let op = Recur { shape: *shape, layout, rows: count, slices };
    let (states, rows) = (states.contiguous()?, rows.contiguous()?);
    let results = match device {
        Device::Cpu | Device::Cuda(_) => states.apply_op3_no_bwd(&rows, segments, &op)?,
        Device::Metal(_) => {
            let [states, rows, segments] =
                [&states, &rows, segments].map(|tensor| tensor.to_device(&Device::Cpu));
            states?.apply_op3_no_bwd(&rows?, &segments?, &op)?.to_device(device)?
        }
    };
    let outputs = count * shape.value_width();
    let after = results.narrow(0, outputs, results.dim(0)? - outputs)?;
    Ok((
        results.narrow(0, 0, outputs)?.reshape((count, shape.value_width()))?,
        after.reshape(((), states.dim(1)?))?,
    ))
}

/// The operation of [`recur`]. It returns the outputs, followed by the states.
struct Recur {
    shape: RecurrentShape,
    layout: HeadLayout,
    rows: usize,
    slices: usize,
}

impl Recur {
    /// Number of elements of the state of a head.
    fn head_len(&self) -> usize {
        self.shape.key_dim * self.shape.value_dim
    }

    /// Number of elements of a row.
    fn width(&self) -> usize {
        self.shape.channels + self.shape.factor_width()
    }

    /// Checks that the operands are contiguous and their shapes match. Returns the number of
    /// segments.
    fn check(&self, states: &Layout, rows: &Layout, segments: &Layout) -> Result<usize> {
        let Self { shape, slices, .. } = self;
        let contiguous = [states, rows, segments].iter().all(|layout| layout.is_contiguous());
        let numbers = segments.shape().elem_count();
        if !contiguous
            || states.dims() != [*slices, shape.heads * self.head_len()]
            || rows.dims() != [self.rows, self.width()]
            || numbers < slices + 2
        {
            bail!("recurrence: expected contiguous operands of matching shapes");
        }
        Ok(numbers - slices - 2)
    }

    fn output_shape(&self, segments: usize) -> Shape {
        let states = segments * self.shape.heads * self.head_len();
        Shape::from(self.rows * self.shape.value_width() + states)
    }

    /// Computes all slices. `results` has the outputs, followed by the states.
    fn on_cpu(&self, states: &[f32], rows: &[f32], segments: &[u32], results: &mut [f32]) {
        let RecurrentShape { heads, .. } = self.shape;
        let len = self.head_len();
        let (outputs, after) = results.split_at_mut(self.rows * self.shape.value_width());
        let (starts, first_rows) = segments.split_at(self.slices + 1);
        for (slice, range) in starts.windows(2).enumerate() {
            for head in 0..heads {
                let mut state = states[(slice * heads + head) * len..][..len].to_vec();
                for segment in range[0] as usize..range[1] as usize {
                    for row in first_rows[segment] as usize..first_rows[segment + 1] as usize {
                        let output = (row * heads + head) * self.shape.value_dim;
                        let output = &mut outputs[output..][..self.shape.value_dim];
                        self.advance(
                            head,
                            &rows[row * self.width()..][..self.width()],
                            &mut state,
                            output,
                        );
                    }
                    after[(segment * heads + head) * len..][..len].copy_from_slice(&state);
                }
            }
        }
    }

    /// Changes the state of a head by one token, and computes its output.
    fn advance(&self, head: usize, row: &[f32], state: &mut [f32], output: &mut [f32]) {
        let RecurrentShape { heads, key_dim, value_dim, rule, channels, .. } = self.shape;
        let HeadLayout { query, key, value, .. } = self.layout;
        let key_head = self.layout.key_head(head, heads);
        let query = &row[query + key_head * key_dim..][..key_dim];
        let key = &row[key + key_head * key_dim..][..key_dim];
        let value = &row[value + head * value_dim..][..value_dim];
        let decays = self.shape.decays();
        let factors = &row[channels..];
        let strength = factors[heads * decays + head];
        let decay = |i: usize| factors[head * decays + if decays == 1 { 0 } else { i }];
        for (column, (output, value)) in output.iter_mut().zip(value).enumerate() {
            let mut memory = 0.0;
            if rule != Rule::Additive {
                for (i, key) in key.iter().enumerate() {
                    memory += key * (decay(i) * state[i * value_dim + column]);
                }
            }
            let update = strength * (value - memory);
            let mut sum = 0.0;
            for (i, (key, query)) in key.iter().zip(query).enumerate() {
                let element = &mut state[i * value_dim + column];
                *element = decay(i) * *element + key * update;
                sum += query * *element;
            }
            *output = sum;
        }
    }
}

impl CustomOp3 for Recur {
    fn name(&self) -> &'static str {
        "recurrence"
    }

    fn cpu_fwd(
        &self,
        states: &CpuStorage,
        states_layout: &Layout,
        rows: &CpuStorage,
        rows_layout: &Layout,
        segments: &CpuStorage,
        segments_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let shape = self.output_shape(self.check(states_layout, rows_layout, segments_layout)?);
        let mut results = vec![0.0; shape.elem_count()];
        let segments = elements(segments, segments_layout)?;
        let (states, rows) = (elements(states, states_layout)?, elements(rows, rows_layout)?);
        self.on_cpu(states, rows, segments, &mut results);
        Ok((CpuStorage::F32(results), shape))
    }

    #[cfg(feature = "cuda-core")]
    fn cuda_fwd(
        &self,
        states: &candle_core::CudaStorage,
        states_layout: &Layout,
        rows: &candle_core::CudaStorage,
        rows_layout: &Layout,
        segments: &candle_core::CudaStorage,
        segments_layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        let shape = self.output_shape(self.check(states_layout, rows_layout, segments_layout)?);
        let layouts = [states_layout, rows_layout, segments_layout];
        Ok((cuda::recur(self, [states, rows, segments], layouts, shape.elem_count())?, shape))
    }
}
