//! Keys and values in int8: each head is rounded to codes with a scale when it is written. The codes
//! and the scales are those of the CPU backend ([`int8_head`]).

use candle_core::{CpuStorage, InplaceOp3, Layout, Result, Tensor, bail};
use stolon_kernels::int8_head;

use crate::storage::elements;

/// Rounds row `i` of `rows`, `[count, heads * head_dim]` in f32, and writes it to row `indices[i]`
/// of `codes`, `[len, heads * head_dim]` in u8, which has the bits of i8, and of `scales`, `[len,
/// heads]` in f32. The indices, `[count]` in u32, are below `len`. An index may occur several times
/// only if the rows that it belongs to are equal. Not for Metal.
pub(crate) fn write_int8(
    codes: &Tensor,
    scales: &Tensor,
    rows: &Tensor,
    indices: &Tensor,
) -> Result<()> {
    let (rows, heads) = (rows.contiguous()?, scales.dim(1)?);
    codes.inplace_op3(&rows, indices, &WriteInt8 { part: Part::Codes, heads })?;
    scales.inplace_op3(&rows, indices, &WriteInt8 { part: Part::Scales, heads })
}

/// A tensor that [`write_int8`] writes. An operation of candle can change only one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Codes,
    Scales,
}

/// The operation that writes one part.
struct WriteInt8 {
    part: Part,
    heads: usize,
}

/// The sizes of the operands of [`WriteInt8`].
pub(super) struct HeadSizes {
    pub(super) part: Part,
    /// Number of heads of a row, at least 1.
    pub(super) heads: usize,
    /// Number of elements of a head, at least 1.
    pub(super) dim: usize,
    /// Number of elements of a row of the store.
    pub(super) width: usize,
    /// Number of rows of the store.
    pub(super) len: usize,
}

impl WriteInt8 {
    /// Checks that the operands are contiguous and that their shapes match.
    fn sizes(&self, store: &Layout, rows: &Layout, indices: &Layout) -> Result<HeadSizes> {
        let Self { part, heads } = *self;
        let (&[len, width], &[count, row_width], &[index_count]) =
            (store.dims(), rows.dims(), indices.dims())
        else {
            bail!("write int8: expected 2, 2 and 1 dimensions");
        };
        let expected = match part {
            Part::Codes => row_width,
            Part::Scales => heads,
        };
        let contiguous = [store, rows, indices].iter().all(|layout| layout.is_contiguous());
        let has_heads = heads > 0 && row_width > 0 && row_width.is_multiple_of(heads);
        if !contiguous || !has_heads || width != expected || count != index_count {
            bail!("write int8: expected contiguous operands of matching shapes");
        }
        Ok(HeadSizes { part, heads, dim: row_width / heads, width, len })
    }
}

impl InplaceOp3 for WriteInt8 {
    fn name(&self) -> &'static str {
        "write-int8"
    }

    fn cpu_fwd(
        &self,
        store: &mut CpuStorage,
        store_layout: &Layout,
        rows: &CpuStorage,
        rows_layout: &Layout,
        indices: &CpuStorage,
        indices_layout: &Layout,
    ) -> Result<()> {
        let HeadSizes { part, heads, dim, width, len } =
            self.sizes(store_layout, rows_layout, indices_layout)?;
        let rows: &[f32] = elements(rows, rows_layout)?;
        let indices: &[u32] = elements(indices, indices_layout)?;
        let start = store_layout.start_offset();
        let mut codes = vec![0; dim];
        for (row, &index) in rows.chunks_exact(heads * dim).zip(indices) {
            let index = index as usize;
            if index >= len {
                bail!("write int8: expected an index below {len}, got {index}");
            }
            for (head, values) in row.chunks_exact(dim).enumerate() {
                let scale = int8_head(values, &mut codes);
                let at = start + index * width;
                match (part, &mut *store) {
                    (Part::Codes, CpuStorage::U8(store)) => {
                        let to = &mut store[at + head * dim..][..dim];
                        to.iter_mut().zip(&codes).for_each(|(to, code)| *to = *code as u8);
                    }
                    (Part::Scales, CpuStorage::F32(store)) => store[at + head] = scale,
                    _ => bail!("write int8: expected codes in u8 and scales in f32"),
                }
            }
        }
        Ok(())
    }

    #[cfg(feature = "cuda-core")]
    fn cuda_fwd(
        &self,
        store: &mut candle_core::CudaStorage,
        store_layout: &Layout,
        rows: &candle_core::CudaStorage,
        rows_layout: &Layout,
        indices: &candle_core::CudaStorage,
        indices_layout: &Layout,
    ) -> Result<()> {
        let sizes = self.sizes(store_layout, rows_layout, indices_layout)?;
        let layouts = [store_layout, rows_layout, indices_layout];
        super::cuda::write_int8(store, rows, indices, layouts, &sizes)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    fn zeros(rows: usize, width: usize, dtype: DType) -> Tensor {
        Tensor::zeros((rows, width), dtype, &Device::Cpu).expect("a tensor")
    }

    /// Goal: exactly the rows with the given indices change, in stores that start inside of larger
    /// tensors, and each head has its own scale.
    #[test]
    fn heads_have_their_own_scales() {
        let (all_codes, all_scales) = (zeros(5, 4, DType::U8), zeros(5, 2, DType::F32));
        let inside = |tensor: &Tensor| tensor.narrow(0, 1, 3).expect("a view");
        let rows = [[1.0_f32, -2.0, 0.0, 0.5], [254.0, 127.0, -1e-3, 1e-3]];
        let rows = Tensor::new(&rows, &Device::Cpu).expect("rows");
        let indices = Tensor::new(&[2_u32, 0], &Device::Cpu).expect("indices");
        write_int8(&inside(&all_codes), &inside(&all_scales), &rows, &indices).expect("a write");
        let codes = all_codes.to_vec2::<u8>().expect("codes");
        // 1 of 2 is 63.5 of 127, which is rounded to an even number.
        let expected = [[0; 4], [127, 64, -127, 127], [0; 4], [64, -127, 0, 127], [0; 4]];
        assert_eq!(codes, expected.map(|row: [i8; 4]| row.map(i8::cast_unsigned)));
        let scales = all_scales.to_vec2::<f32>().expect("scales");
        assert_eq!(scales[1], [254.0 / 127.0, 1e-3 / 127.0]);
        assert_eq!(scales[3], [2.0 / 127.0, 0.5 / 127.0]);
        assert_eq!([&scales[0], &scales[2], &scales[4]], [&[0.0, 0.0]; 3]);
    }

    /// Goal: operands that do not match are errors.
    #[test]
    fn mismatched_operands_are_refused() {
        let (u8, f32) = (DType::U8, DType::F32);
        let indices = |values: &[u32]| Tensor::new(values, &Device::Cpu).expect("indices");
        for (codes, scales, rows, indices) in [
            (zeros(4, 6, u8), zeros(4, 4, f32), zeros(1, 6, f32), indices(&[0])),
            (zeros(4, 6, u8), zeros(4, 2, f32), zeros(1, 8, f32), indices(&[0])),
            (zeros(4, 6, u8), zeros(4, 2, f32), zeros(2, 6, f32), indices(&[0])),
            (zeros(4, 6, u8), zeros(4, 2, f32), zeros(1, 6, f32), indices(&[4])),
            (zeros(4, 6, f32), zeros(4, 2, f32), zeros(1, 6, f32), indices(&[0])),
            (zeros(4, 6, u8), zeros(4, 2, u8), zeros(1, 6, f32), indices(&[0])),
            (zeros(4, 6, u8), zeros(3, 2, f32), zeros(1, 6, f32), indices(&[3])),
            (zeros(4, 6, u8), zeros(4, 0, f32), zeros(1, 6, f32), indices(&[0])),
        ] {
            write_int8(&codes, &scales, &rows, &indices).expect_err("operands that do not match");
        }
    }
}
