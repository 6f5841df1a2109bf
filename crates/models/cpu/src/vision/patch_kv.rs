//! [`PatchKv`] has the keys and values of an image's patches in the form that the attention kernel
//! reads.

use stolon_checkpoint::config::TowerConfig;
use stolon_checkpoint::error::KvStoreError;
use stolon_checkpoint::kv::{KvLayer, KvShape, KvType};
use stolon_kernels::{
    self as kernels, AttentionArgs, AttentionSequence, KvLayout, KvRows, Path, SlotMapping,
};
use stolon_kvcache::BlockId;

use crate::kv_store::KvStore;
use crate::workers::Workers;

/// Number of patches per block. It is the number of positions of the kernel's tiles on every
/// instruction set.
const BLOCK_SIZE: usize = 128;

/// The keys and values of one layer. Each layer overwrites those of the previous one.
#[derive(Debug)]
pub(super) struct PatchKv {
    store: KvStore,
    /// The slot of each patch.
    slots: SlotMapping,
    /// All blocks, in order.
    blocks: Vec<BlockId>,
}

impl PatchKv {
    /// Reserves memory for the keys and values of `patches` patches, at least 1, in the type
    /// `kv_type`.
    ///
    /// # Errors
    /// [`KvStoreError::OutOfMemory`].
    pub(super) fn new(
        config: &TowerConfig,
        kv_type: KvType,
        path: Path,
        patches: usize,
    ) -> Result<Self, KvStoreError> {
        let (head_dim, bf16) = (config.head_dim(), kv_type == KvType::Bf16);
        let layer = KvLayer {
            kv_heads: config.heads,
            head_dim,
            key_layout: KvLayout::of_keys(path, bf16, BLOCK_SIZE, head_dim),
            shared: false,
            windowed: false,
        };
        let shape = KvShape {
            attention_layers: vec![layer],
            convolution_layers: 0,
            convolution_width: 0,
            window: 0,
            block_size: BLOCK_SIZE,
            kv_type,
        };
        let blocks = patches.div_ceil(BLOCK_SIZE);
        let store = KvStore::new(shape, blocks)?;
        let mut slots = SlotMapping::default();
        slots.fill((0..patches).map(Some));
        Ok(Self { store, slots, blocks: (0..blocks as u32).map(BlockId).collect() })
    }

    /// The destinations of the keys and the values of all patches.
    pub(super) fn rows_mut(&mut self, path: Path) -> [KvRows<'_>; 2] {
        self.store.rows_mut(0, path, &self.slots)
    }

    /// Computes attention in both directions between all patches. `q` and `out` are
    /// `[patches, heads, head_dim]`.
    pub(super) fn attend(&self, q: &[f32], out: &mut [f32], path: Path, workers: &Workers) {
        let KvShape { attention_layers, block_size, .. } = self.store.shape();
        let KvLayer { kv_heads: heads, head_dim, key_layout, .. } = attention_layers[0];
        let count = self.slots.as_slice().len();
        let all = AttentionSequence { start: 0, count, full: true, block_table: &self.blocks };
        let args = AttentionArgs {
            path,
            q,
            sequences: &[all],
            keys: self.store.keys(0),
            key_layout,
            values: self.store.values(0),
            block_size: *block_size,
            heads,
            kv_heads: heads,
            head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            softcap: None,
            sliding_window: None,
            sinks: None,
        };
        kernels::attention(workers.for_work(2 * count * q.len()), &args, out);
    }
}
