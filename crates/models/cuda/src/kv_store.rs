//! The paged KV store on the device.
//!
//! Each layer with keys and values of its own has one tensor of keys and one of values. Their memory
//! layout is `[block_count, block_size, kv_heads, head_dim]`, and they are initially zero. The keys
//! of latent attention are also its values. A layer with a convolution has one tensor with the
//! convolution's inputs, `[block_count, block_size, hidden_size]`. Steps write to all of them in
//! place (`kv_write`).

use candle_core::{DType, Device, Result, Tensor};
use stolon_checkpoint::DecoderConfig;
use stolon_checkpoint::kv::{self, KvLayout, KvType};
use stolon_kvcache::BlockId;

use crate::kv_write;
use crate::plan::indices;

/// The sizes of the keys and values of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KvShape {
    pub(crate) block_count: usize,
    /// Positions per block.
    pub(crate) block_size: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) dtype: DType,
}

impl KvShape {
    /// Number of elements of the keys of one position.
    pub(crate) fn width(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

/// The sizes of a KV store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoreShape {
    /// What the layers keep of a position.
    layers: kv::KvShape,
    pub(crate) block_count: usize,
}

impl StoreShape {
    /// The sizes for the layers of `config`, with no blocks.
    pub(crate) fn new(config: &DecoderConfig, block_size: usize, kv_type: KvType) -> Self {
        let layers = kv::KvShape::of(config, block_size, kv_type, |_| KvLayout::Rows);
        Self { layers, block_count: 0 }
    }

    /// The same sizes with `block_count` blocks.
    pub(crate) fn with_blocks(&self, block_count: usize) -> Self {
        Self { block_count, ..self.clone() }
    }

    /// Positions per block.
    pub(crate) fn block_size(&self) -> usize {
        self.layers.block_size
    }

    /// Element type of all tensors.
    pub(crate) fn dtype(&self) -> DType {
        // Options with integers are refused.
        match self.layers.kv_type.without_scales() {
            KvType::F16 => DType::F16,
            KvType::Bf16 => DType::BF16,
            _ => DType::F32,
        }
    }

    /// Size in bytes of a block in all layers.
    pub(crate) fn block_bytes(&self) -> usize {
        self.layers.block_bytes()
    }

    /// The sizes of the keys and values of each layer that has its own.
    pub(crate) fn heads(&self) -> impl Iterator<Item = KvShape> + '_ {
        self.layers.attention_layers.iter().map(|layer| KvShape {
            block_count: self.block_count,
            block_size: self.block_size(),
            kv_heads: layer.kv_heads,
            head_dim: layer.head_dim,
            dtype: self.dtype(),
        })
    }
}

/// Keys and values of all layers, and the inputs of convolutions.
#[derive(Debug)]
pub(crate) struct KvStore {
    shape: StoreShape,
    /// One entry for each layer that has keys and values of its own.
    layers: Vec<KvLayer>,
    /// One plane for each layer with a convolution.
    convolutions: Vec<Tensor>,
    device: Device,
}

/// Keys and values of one layer, `[block_count * block_size, width]` each.
#[derive(Debug)]
pub(crate) struct KvLayer {
    pub(crate) shape: KvShape,
    pub(crate) keys: Tensor,
    /// In latent attention, the same tensor as `keys`.
    pub(crate) values: Tensor,
}

impl KvStore {
    pub(crate) fn new(shape: StoreShape, device: &Device) -> Result<Self> {
        let positions = shape.block_count * shape.block_size();
        let plane = |width: usize| Tensor::zeros((positions, width), shape.dtype(), device);
        let layer = |(layer, shape): (&kv::KvLayer, KvShape)| {
            let keys = plane(shape.width())?;
            let values = if layer.shared { keys.clone() } else { plane(shape.width())? };
            Ok(KvLayer { shape, keys, values })
        };
        let layers = shape.layers.attention_layers.iter().zip(shape.heads()).map(layer);
        let layers = layers.collect::<Result<_>>()?;
        let convolutions = 0..shape.layers.convolution_layers;
        let convolutions = convolutions.map(|_| plane(shape.layers.convolution_width));
        let convolutions = convolutions.collect::<Result<_>>()?;
        Ok(Self { layers, convolutions, shape, device: device.clone() })
    }

    pub(crate) fn shape(&self) -> &StoreShape {
        &self.shape
    }

    /// The keys and values of a layer. `index` counts the layers that have their own.
    pub(crate) fn layer(&self, index: usize) -> &KvLayer {
        &self.layers[index]
    }

    /// The inputs of a layer's convolution, `[block_count * block_size, hidden_size]`. `index`
    /// counts the layers with a convolution.
    pub(crate) fn convolution(&self, index: usize) -> &Tensor {
        &self.convolutions[index]
    }

    /// Copies blocks to `to`. Each block consists of the keys and values of the first layer, then
    /// the keys and values of the next one, and so on, followed by the inputs of convolutions. `to`
    /// has the size of all blocks.
    pub(crate) fn read_blocks(&self, blocks: &[BlockId], to: &mut [u8]) -> Result<()> {
        if blocks.is_empty() {
            return Ok(());
        }
        let ids = self.ids(blocks)?;
        let block_bytes = self.shape.block_bytes();
        let mut start = 0;
        for plane in self.planes() {
            let rows = self.by_block(plane)?.index_select(&ids, 0)?;
            let bytes = to_bytes(&rows)?;
            let part_bytes = bytes.len() / blocks.len();
            let parts = bytes.chunks_exact(part_bytes);
            for (block, part) in to.chunks_exact_mut(block_bytes).zip(parts) {
                block[start..][..part_bytes].copy_from_slice(part);
            }
            start += part_bytes;
        }
        Ok(())
    }

    /// Copies blocks from `from`, in the format of [`read_blocks`](Self::read_blocks).
    pub(crate) fn write_blocks(&mut self, blocks: &[BlockId], from: &[&[u8]]) -> Result<()> {
        if blocks.is_empty() {
            return Ok(());
        }
        let ids = self.ids(blocks)?;
        let dtype = self.shape.dtype();
        let (mut bytes, mut start) = (Vec::new(), 0);
        for plane in self.planes() {
            let plane = self.by_block(plane)?;
            let part_bytes = plane.dim(1)? * dtype.size_in_bytes();
            bytes.clear();
            for block in from {
                bytes.extend_from_slice(&block[start..][..part_bytes]);
            }
            let shape = [blocks.len(), plane.dim(1)?];
            let rows = Tensor::from_raw_buffer(&bytes, dtype, &shape, &self.device)?;
            kv_write::write(&plane, &rows, &ids)?;
            start += part_bytes;
        }
        Ok(())
    }

    /// The blocks `ids` in u32, as the elements of their parts one after the other: `[ids, elements
    /// of a block]`.
    pub(crate) fn gather_blocks(&self, ids: &Tensor) -> Result<Tensor> {
        let parts = self.planes().map(|plane| self.by_block(plane)?.index_select(ids, 0));
        Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 1)
    }

    /// Overwrites the blocks `ids` with `values`, in the format of
    /// [`gather_blocks`](Self::gather_blocks).
    pub(crate) fn scatter_blocks(&self, ids: &Tensor, values: &Tensor) -> Result<()> {
        let mut first = 0;
        for plane in self.planes() {
            let plane = self.by_block(plane)?;
            let width = plane.dim(1)?;
            kv_write::write(&plane, &values.narrow(1, first, width)?, ids)?;
            first += width;
        }
        Ok(())
    }

    /// The tensors of the store, in the order in which the bytes of a block are copied.
    fn planes(&self) -> impl Iterator<Item = &Tensor> {
        let kept = self.shape.layers.attention_layers.iter().map(kv::KvLayer::planes);
        let layers = self.layers.iter().zip(kept);
        let layers =
            layers.flat_map(|(layer, count)| [&layer.keys, &layer.values].into_iter().take(count));
        layers.chain(&self.convolutions)
    }

    /// The plane with one row per block.
    fn by_block(&self, plane: &Tensor) -> Result<Tensor> {
        plane.reshape((self.shape.block_count, self.shape.block_size() * plane.dim(1)?))
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
