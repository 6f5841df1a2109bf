//! The paged KV store on the device.
//!
//! Each layer has one tensor of keys and one of values. Their memory layout is `[block_count,
//! block_size, kv_heads, head_dim]`, and they are initially zero. Steps write to them in place
//! (`kv_write`).

use candle_core::{DType, Device, Result, Tensor};
use stolon_kvcache::BlockId;

use crate::kv_write;
use crate::plan::indices;

/// The sizes of a KV store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KvShape {
    pub(crate) layer_count: usize,
    pub(crate) block_count: usize,
    /// Positions per block.
    pub(crate) block_size: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) dtype: DType,
}

impl KvShape {
    /// Number of elements of the keys of one position in one layer.
    pub(crate) fn width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Size in bytes of the keys, or of the values, of a block in one layer.
    fn part_bytes(&self) -> usize {
        self.block_size * self.width() * self.dtype.size_in_bytes()
    }

    /// Size in bytes of the keys and values of a block in all layers.
    pub(crate) fn block_bytes(&self) -> usize {
        2 * self.layer_count * self.part_bytes()
    }
}

/// Keys and values of all layers.
#[derive(Debug)]
pub(crate) struct KvStore {
    shape: KvShape,
    layers: Vec<KvLayer>,
    device: Device,
}

/// Keys and values of one layer, `[block_count * block_size, width]` each.
#[derive(Debug)]
pub(crate) struct KvLayer {
    pub(crate) keys: Tensor,
    pub(crate) values: Tensor,
}

impl KvStore {
    pub(crate) fn new(shape: KvShape, device: &Device) -> Result<Self> {
        let plane = || {
            let positions = shape.block_count * shape.block_size;
            Tensor::zeros((positions, shape.width()), shape.dtype, device)
        };
        let layers = (0..shape.layer_count)
            .map(|_| Ok(KvLayer { keys: plane()?, values: plane()? }))
            .collect::<Result<_>>()?;
        Ok(Self { shape, layers, device: device.clone() })
    }

    pub(crate) fn shape(&self) -> &KvShape {
        &self.shape
    }

    pub(crate) fn layer(&self, index: usize) -> &KvLayer {
        &self.layers[index]
    }

    /// Copies blocks to `to`. Each block consists of the keys and values of the first layer, then
    /// the keys and values of the next one, and so on. `to` has the size of all blocks.
    pub(crate) fn read_blocks(&self, blocks: &[BlockId], to: &mut [u8]) -> Result<()> {
        if blocks.is_empty() {
            return Ok(());
        }
        let ids = self.ids(blocks)?;
        let (block_bytes, part_bytes) = (self.shape.block_bytes(), self.shape.part_bytes());
        for (index, plane) in self.planes().enumerate() {
            let rows = self.by_block(plane)?.index_select(&ids, 0)?;
            let bytes = to_bytes(&rows)?;
            let parts = bytes.chunks_exact(part_bytes);
            for (block, part) in to.chunks_exact_mut(block_bytes).zip(parts) {
                block[index * part_bytes..][..part_bytes].copy_from_slice(part);
            }
        }
        Ok(())
    }

    /// Copies blocks from `from`, in the format of [`read_blocks`](Self::read_blocks).
    pub(crate) fn write_blocks(&mut self, blocks: &[BlockId], from: &[&[u8]]) -> Result<()> {
        if blocks.is_empty() {
            return Ok(());
        }
        let ids = self.ids(blocks)?;
        let part_bytes = self.shape.part_bytes();
        let mut bytes = Vec::with_capacity(blocks.len() * part_bytes);
        for (index, plane) in self.planes().enumerate() {
            bytes.clear();
            for block in from {
                bytes.extend_from_slice(&block[index * part_bytes..][..part_bytes]);
            }
            let shape = [blocks.len(), self.shape.block_size * self.shape.width()];
            let rows = Tensor::from_raw_buffer(&bytes, self.shape.dtype, &shape, &self.device)?;
            kv_write::write(&self.by_block(plane)?, &rows, &ids)?;
        }
        Ok(())
    }

    /// The tensors of the store, in the order in which the bytes of a block are copied.
    fn planes(&self) -> impl Iterator<Item = &Tensor> {
        self.layers.iter().flat_map(|layer| [&layer.keys, &layer.values])
    }

    /// The plane with one row per block.
    fn by_block(&self, plane: &Tensor) -> Result<Tensor> {
        plane.reshape((self.shape.block_count, self.shape.block_size * self.shape.width()))
    }

    fn ids(&self, blocks: &[BlockId]) -> Result<Tensor> {
        let ids: Vec<u32> = blocks.iter().map(|block| block.0).collect();
        indices(&ids, &self.device)
    }
}

/// The elements of a tensor as little-endian bytes.
fn to_bytes(tensor: &Tensor) -> Result<Vec<u8>> {
    let flat = tensor.flatten_all()?;
    Ok(match flat.dtype() {
        DType::F16 => {
            flat.to_vec1::<half::f16>()?.into_iter().flat_map(half::f16::to_le_bytes).collect()
        }
        DType::BF16 => {
            flat.to_vec1::<half::bf16>()?.into_iter().flat_map(half::bf16::to_le_bytes).collect()
        }
        _ => flat.to_vec1::<f32>()?.into_iter().flat_map(f32::to_le_bytes).collect(),
    })
}
