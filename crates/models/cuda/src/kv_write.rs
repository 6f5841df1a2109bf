//! Writes rows to a tensor in place. Steps write new keys and values to the KV store without
//! copying the store.
//!
//! On the CPU and on CUDA this is an operation of its own, because candle's `scatter_set` needs an
//! index for each element. Keys and values in int8 are rounded by the operations that write them
//! (`int8`). The CUDA kernels are in `kernels/kv_write.cu`.

use candle_core::{CpuStorage, Device, InplaceOp3, Layout, Result, Tensor, WithDType, bail};

use crate::storage::elements;

pub(crate) use int8::write_int8;

#[cfg(feature = "cuda-core")]
mod cuda;
mod int8;

/// Copies row `i` of `rows`, `[count, width]`, to row `indices[i]` of `store`, `[len, width]`, for
/// all `i`. Both have the same element type. The indices, `[count]` in u32, are below `len`. An
/// index may occur several times only if the rows that it belongs to are equal.
pub(crate) fn write(store: &Tensor, rows: &Tensor, indices: &Tensor) -> Result<()> {
    let rows = rows.contiguous()?;
    match store.device() {
        Device::Cpu | Device::Cuda(_) => store.inplace_op3(&rows, indices, &WriteRows),
        Device::Metal(_) => {
            let indices = indices.unsqueeze(1)?.broadcast_as(rows.shape())?.contiguous()?;
            store.scatter_set(&indices, &rows, 0)
        }
    }
}

/// The operation of [`write`].
struct WriteRows;

/// The sizes of the operands of [`WriteRows`].
struct Sizes {
    /// Number of elements of a row.
    width: usize,
    /// Number of rows of the store.
    len: usize,
}

impl Sizes {
    /// Checks that the operands are contiguous and that their shapes match.
    fn of(store: &Layout, rows: &Layout, indices: &Layout) -> Result<Self> {
        let ([len, width], [count, row_width], [index_count]) =
            (store.dims(), rows.dims(), indices.dims())
        else {
            bail!("write rows: expected 2, 2 and 1 dimensions");
        };
        let contiguous = [store, rows, indices].iter().all(|layout| layout.is_contiguous());
        if !contiguous || width != row_width || count != index_count {
            bail!("write rows: expected contiguous operands of matching shapes");
        }
        Ok(Self { width: *width, len: *len })
    }
}

impl InplaceOp3 for WriteRows {
    fn name(&self) -> &'static str {
        "write-rows"
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
        let sizes = Sizes::of(store_layout, rows_layout, indices_layout)?;
        let indices = elements(indices, indices_layout)?;
        let start = store_layout.start_offset();
        match store {
            CpuStorage::U8(store) => {
                copy(&mut store[start..], elements(rows, rows_layout)?, indices, &sizes)
            }
            CpuStorage::F32(store) => {
                copy(&mut store[start..], elements(rows, rows_layout)?, indices, &sizes)
            }
            CpuStorage::F16(store) => {
                copy(&mut store[start..], elements(rows, rows_layout)?, indices, &sizes)
            }
            CpuStorage::BF16(store) => {
                copy(&mut store[start..], elements(rows, rows_layout)?, indices, &sizes)
            }
            _ => bail!("write rows: expected u8, f32, f16 or bf16"),
        }
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
        let sizes = Sizes::of(store_layout, rows_layout, indices_layout)?;
        let layouts = [store_layout, rows_layout, indices_layout];
        cuda::write_rows(store, rows, indices, layouts, &sizes)
    }
}

fn copy<T: WithDType>(store: &mut [T], rows: &[T], indices: &[u32], sizes: &Sizes) -> Result<()> {
    let store = &mut store[..sizes.len * sizes.width];
    for (row, &index) in rows.chunks_exact(sizes.width).zip(indices) {
        let start = index as usize * sizes.width;
        let Some(to) = store.get_mut(start..start + sizes.width) else {
            bail!("write rows: expected an index below {}, got {index}", sizes.len);
        };
        to.copy_from_slice(row);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;

    /// Goal: exactly the rows with the given indices change, for each element type, and for a store
    /// and rows that start inside a larger tensor.
    #[test]
    fn rows_are_written_in_place() {
        let device = Device::Cpu;
        for dtype in [DType::U8, DType::F32, DType::F16, DType::BF16] {
            let whole = Tensor::zeros((7, 3), dtype, &device).expect("a tensor");
            let store = whole.narrow(0, 1, 5).expect("a view");
            let rows = Tensor::arange(0_f32, 12.0, &device)
                .and_then(|rows| rows.reshape((4, 3))?.to_dtype(dtype)?.narrow(0, 1, 2));
            let indices = Tensor::new(&[4_u32, 0], &device).expect("indices");
            write(&store, &rows.expect("rows"), &indices).expect("a write");
            let got = whole.to_dtype(DType::F32).and_then(|t| t.to_vec2::<f32>()).expect("values");
            let zeros = vec![0.0; 3];
            let expected = [
                zeros.clone(),
                vec![6.0, 7.0, 8.0],
                zeros.clone(),
                zeros.clone(),
                zeros.clone(),
                vec![3.0, 4.0, 5.0],
                zeros,
            ];
            assert_eq!(got, expected);
        }
    }

    /// Goal: operands that do not match are errors and change nothing.
    #[test]
    fn mismatched_operands_are_refused() {
        let device = Device::Cpu;
        let zeros = |rows: usize, width: usize, dtype| {
            Tensor::zeros((rows, width), dtype, &device).expect("a tensor")
        };
        let indices = |values: &[u32]| Tensor::new(values, &device).expect("indices");
        let store = zeros(4, 3, DType::F32);
        for (rows, indices) in [
            (zeros(2, 2, DType::F32), indices(&[0, 1])),
            (zeros(2, 3, DType::F32), indices(&[0])),
            (zeros(2, 3, DType::F16), indices(&[0, 1])),
            (zeros(1, 3, DType::F32), indices(&[4])),
            (zeros(1, 3, DType::F32), indices(&[u32::MAX])),
        ] {
            write(&store, &rows, &indices).expect_err("operands that do not match");
        }
    }
}
