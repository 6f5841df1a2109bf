//! The paged KV store on the device.
//!
//! Each layer that has its own keys and values has one [`Plane`] of keys and one of values. Their
//! memory layout is `[block_count, block_size, kv_heads, head_dim]`, and they are initially zero. The
//! keys of latent attention are also its values. A layer with a convolution has one plane with the
//! convolution's inputs, `[block_count, block_size, hidden_size]`. Steps write to all of them in
//! place (`kv_write`).

use candle_core::{DType, Device, Result, Tensor};
use stolon_checkpoint::DecoderConfig;
use stolon_checkpoint::kv::{self, KvElement, KvLayout, KvType};
use stolon_kvcache::BlockId;

use crate::plan::indices;
use crate::{bits, kv_write};

pub(crate) use plane::Plane;

mod plane;

/// The sizes of the keys and values of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KvShape {
    pub(crate) block_count: usize,
    /// Positions per block.
    pub(crate) block_size: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    /// Type of the tensors with the elements; u8 for [`KvElement::Int8`], which has scales, too.
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

    /// Type of keys and values.
    pub(crate) fn kv_type(&self) -> KvType {
        self.layers.kv_type
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
            // Keys and values have the same type.
            dtype: plane::dtype(self.kv_type().elements()[0]),
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
    convolutions: Vec<Plane>,
    device: Device,
}

/// Keys and values of one layer.
#[derive(Debug)]
pub(crate) struct KvLayer {
    pub(crate) shape: KvShape,
    pub(crate) keys: Plane,
    /// In latent attention, the same tensors as in `keys`.
    pub(crate) values: Plane,
}

impl KvStore {
    pub(crate) fn new(shape: StoreShape, device: &Device) -> Result<Self> {
        let positions = shape.block_count * shape.block_size();
        let plane = |element: KvElement, heads: usize, head_dim: usize| {
            Plane::new(element, (positions, heads, head_dim), device)
        };
        let [of_keys, of_values] = shape.kv_type().elements();
        let layer = |(layer, shape): (&kv::KvLayer, KvShape)| {
            let keys = plane(of_keys, shape.kv_heads, shape.head_dim)?;
            let values = match layer.shared {
                true => keys.clone(),
                false => plane(of_values, shape.kv_heads, shape.head_dim)?,
            };
            Ok(KvLayer { shape, keys, values })
        };
        let layers = shape.layers.attention_layers.iter().zip(shape.heads()).map(layer);
        let layers = layers.collect::<Result<_>>()?;
        let convolutions = 0..shape.layers.convolution_layers;
        let of_inputs = shape.kv_type().of_convolutions();
        let convolutions =
            convolutions.map(|_| plane(of_inputs, 1, shape.layers.convolution_width));
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
    pub(crate) fn convolution(&self, index: usize) -> &Plane {
        &self.convolutions[index]
    }

    /// Copies blocks to `to`. Each block consists of the keys and values of the first layer, then
    /// the keys and values of the next one, and so on, followed by the inputs of convolutions. Each
    /// of these parts has the elements of the block's positions, followed by their scales if there
    /// are any ([`KvElement`]). `to` has the size of all blocks.
    pub(crate) fn read_blocks(&self, blocks: &[BlockId], to: &mut [u8]) -> Result<()> {
        if blocks.is_empty() {
            return Ok(());
        }
        let ids = self.ids(blocks)?;
        let block_bytes = self.shape.block_bytes();
        let mut start = 0;
        for tensor in self.tensors() {
            let rows = self.by_block(tensor)?.index_select(&ids, 0)?;
            let bytes = bits::to_bytes(&rows)?.flatten_all()?.to_vec1::<u8>()?;
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
        let (mut bytes, mut start) = (Vec::new(), 0);
        for tensor in self.tensors() {
            let (tensor, dtype) = (self.by_block(tensor)?, tensor.dtype());
            let part_bytes = tensor.dim(1)? * dtype.size_in_bytes();
            bytes.clear();
            for block in from {
                bytes.extend_from_slice(&block[start..][..part_bytes]);
            }
            let shape = [blocks.len(), tensor.dim(1)?];
            let rows = Tensor::from_raw_buffer(&bytes, dtype, &shape, &self.device)?;
            kv_write::write(&tensor, &rows, &ids)?;
            start += part_bytes;
        }
        Ok(())
    }

    /// The bytes of the blocks `ids`, which are u32, in the order of
    /// [`read_blocks`](Self::read_blocks): `[ids, bytes of a block]` in u8.
    pub(crate) fn gather_blocks(&self, ids: &Tensor) -> Result<Tensor> {
        let part = |tensor| bits::to_bytes(&self.by_block(tensor)?.index_select(ids, 0)?);
        Tensor::cat(&self.tensors().map(part).collect::<Result<Vec<_>>>()?, 1)
    }

    /// Overwrites the blocks `ids` with `bytes`, in the format of
    /// [`gather_blocks`](Self::gather_blocks).
    pub(crate) fn scatter_blocks(&self, ids: &Tensor, bytes: &Tensor) -> Result<()> {
        let mut start = 0;
        for tensor in self.tensors() {
            let (tensor, dtype) = (self.by_block(tensor)?, tensor.dtype());
            let part_bytes = tensor.dim(1)? * dtype.size_in_bytes();
            let part = bits::from_bytes(&bytes.narrow(1, start, part_bytes)?, dtype)?;
            kv_write::write(&tensor, &part, ids)?;
            start += part_bytes;
        }
        Ok(())
    }

    /// The tensors of the store, in the order in which the bytes of a block are copied.
    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let kept = self.shape.layers.attention_layers.iter().map(kv::KvLayer::planes);
        let layers = self.layers.iter().zip(kept);
        let layers =
            layers.flat_map(|(layer, count)| [&layer.keys, &layer.values].into_iter().take(count));
        layers.chain(&self.convolutions).flat_map(Plane::tensors)
    }

    /// The tensor with one row per block.
    fn by_block(&self, tensor: &Tensor) -> Result<Tensor> {
        tensor.reshape((self.shape.block_count, self.shape.block_size() * tensor.dim(1)?))
    }

    fn ids(&self, blocks: &[BlockId]) -> Result<Tensor> {
        let ids: Vec<u32> = blocks.iter().map(|block| block.0).collect();
        indices(&ids, &self.device)
    }
}
