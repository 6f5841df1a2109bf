//! [`FullKv`] has the keys and values of one layer for sequences whose positions all attend to each
//! other, in the form that the attention kernel reads: the patches of an image, or the texts of a
//! batch. They exist only until the next layer overwrites them.

use stolon_checkpoint::error::KvStoreError;
use stolon_checkpoint::kv::{KvLayer, KvShape, KvType};
use stolon_kernels::{
    self as kernels, AttentionArgs, AttentionSequence, HeadNorm, KvLayout, LayerNorm, Operands,
    Path, Product, RelativeBias, RowSums, Sink, SlotMapping,
};
use stolon_kvcache::BlockId;

use crate::decoder::linear::Linear;
use crate::kv_store::KvStore;
use crate::workers::Workers;

/// Number of positions per block. It is the number of positions of the kernel's tiles on every
/// instruction set.
const BLOCK_SIZE: usize = 128;

/// The sizes of a layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FullShape {
    /// Number of heads of queries.
    pub(crate) heads: usize,
    /// Number of heads of keys and values.
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    /// The factor of scores.
    pub(crate) scale: f32,
    pub(crate) kv_type: KvType,
    pub(crate) path: Path,
}

/// Which positions see each other, and what is added to their scores.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FullMask<'a> {
    /// Number of positions that each one sees on both sides; `None` if it sees all.
    pub(crate) window: Option<usize>,
    /// Numbers that are added to the scores.
    pub(crate) bias: Option<RelativeBias<'a>>,
}

/// The norms of queries, and those of keys.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ProjectionNorms<'a> {
    /// None.
    None,
    /// Of each head.
    Heads([HeadNorm<'a>; 2]),
    /// Of all heads of a row together. Rows are not rotated.
    Rows([LayerNorm<'a>; 2]),
}

/// The keys and values of one layer. See the [module documentation](self).
#[derive(Debug)]
pub(crate) struct FullKv {
    shape: FullShape,
    store: KvStore,
    /// Number of blocks of the store.
    block_count: usize,
    /// The slot of each row of the batch.
    slots: SlotMapping,
    /// The number of positions of each sequence, and its blocks.
    sequences: Vec<(usize, Vec<BlockId>)>,
}

impl FullKv {
    /// Reserves memory for sequences of these numbers of positions, of which there is at least one.
    ///
    /// # Errors
    /// [`KvStoreError::OutOfMemory`].
    pub(crate) fn new(
        shape: FullShape,
        lens: impl Iterator<Item = usize> + Clone,
    ) -> Result<Self, KvStoreError> {
        let block_count = blocks(lens.clone());
        let store = shape.store(block_count)?;
        let slots = SlotMapping::default();
        let mut kv = Self { shape, store, block_count, slots, sequences: Vec::new() };
        kv.arrange(lens);
        Ok(kv)
    }

    /// The same for other sequences. Memory is reserved only if there is not enough.
    ///
    /// # Errors
    /// [`KvStoreError::OutOfMemory`].
    pub(crate) fn reset(
        &mut self,
        lens: impl Iterator<Item = usize> + Clone,
    ) -> Result<(), KvStoreError> {
        let needed = blocks(lens.clone());
        if needed > self.block_count {
            self.store = self.shape.store(needed)?;
            self.block_count = needed;
        }
        self.arrange(lens);
        Ok(())
    }

    fn arrange(&mut self, lens: impl Iterator<Item = usize> + Clone) {
        self.sequences.clear();
        let mut first = 0;
        for len in lens.clone() {
            let end = first + len.div_ceil(BLOCK_SIZE);
            self.sequences.push((len, (first as u32..end as u32).map(BlockId).collect()));
            first = end;
        }
        let mut first = 0;
        self.slots.fill(lens.flat_map(|len| {
            let start = first * BLOCK_SIZE;
            first += len.div_ceil(BLOCK_SIZE);
            (start..start + len).map(Some)
        }));
    }

    /// Computes the queries of all rows into `q`, `[rows, heads, head_dim]`, and their keys and
    /// values into this store, in one call. `update` changes the results of a projection before the
    /// norms. `rotation` returns the cosines and sines of a row, by which its queries and keys are
    /// rotated; `None` if they are not.
    pub(crate) fn project<'a>(
        &mut self,
        (qkv, norms): (&[Linear; 3], ProjectionNorms<'_>),
        rows: &Operands,
        q: &mut [f32],
        update: impl Fn(usize, &mut RowSums<'_>) + Sync,
        rotation: impl Fn(usize) -> Option<(&'a [f32], &'a [f32])> + Sync,
        workers: &Workers,
    ) {
        let FullShape { head_dim, path, .. } = self.shape;
        let matrices = [0, 1, 2].map(|part| &qkv[part].matrix);
        let (update, rotation) = (&update, &rotation);
        let epilogues = [0, 1, 2].map(|part| {
            move |mut sums: RowSums<'_>| {
                update(part, &mut sums);
                qkv[part].add_bias(path, sums.feature, sums.first);
                if part == 2 {
                    return;
                }
                let norm = match norms {
                    ProjectionNorms::None => None,
                    ProjectionNorms::Heads(norms) => Some(norms[part]),
                    ProjectionNorms::Rows(norms) => {
                        let row = sums.first.to_vec();
                        return kernels::layer_norm(path, &row, &norms[part], sums.first);
                    }
                };
                match (rotation(sums.row), norm) {
                    (Some(rotation), norm) => {
                        kernels::norm_and_rope(path, sums.first, head_dim, norm, rotation);
                    }
                    (None, Some(HeadNorm { weight, eps, offset })) => {
                        kernels::rms_norm_in_place(path, sums.first, weight, eps, offset);
                    }
                    (None, None) => {}
                }
            }
        });
        let [keys, values] = self.store.rows_mut(0, path, &self.slots);
        let sinks = [Sink::Rows(q), Sink::Cache(keys), Sink::Cache(values)];
        let parts = matrices.chunks(1).zip(&epilogues).zip(sinks);
        let mut products: Vec<Product<'_>> = parts
            .map(|((matrices, epilogue), sink)| Product {
                group: 0,
                matrices,
                step: match norms {
                    ProjectionNorms::Rows(_) => matrices[0].out_features(),
                    _ => head_dim,
                },
                epilogue: Some(epilogue),
                sink,
            })
            .collect();
        kernels::multiply(path, workers.for_products(&matrices, rows.rows()), rows, &mut products);
    }

    /// Computes attention in both directions. `q` and `out` are `[rows, heads, head_dim]`.
    pub(crate) fn attend(
        &self,
        q: &[f32],
        out: &mut [f32],
        mask: &FullMask<'_>,
        path: Path,
        workers: &Workers,
    ) {
        let KvShape { attention_layers, block_size, .. } = self.store.shape();
        let KvLayer { kv_heads, head_dim, key_layout, .. } = attention_layers[0];
        let FullShape { heads, scale, .. } = self.shape;
        let FullMask { window, bias } = *mask;
        let sequences: Vec<AttentionSequence<'_>> = self
            .sequences
            .iter()
            .map(|&(count, ref blocks)| AttentionSequence {
                start: 0,
                count,
                full: true,
                block_table: blocks,
            })
            .collect();
        let seen = |&(count, _): &(usize, Vec<BlockId>)| {
            count * window.map_or(count, |window| count.min(2 * window + 1))
        };
        let pairs: usize = self.sequences.iter().map(seen).sum();
        let args = AttentionArgs {
            path,
            q,
            sequences: &sequences,
            keys: self.store.keys(0),
            key_layout,
            values: self.store.values(0),
            block_size: *block_size,
            heads,
            kv_heads,
            head_dim,
            scale,
            softcap: None,
            sliding_window: window.map(|window| window + 1),
            window_after: window,
            bias,
            sinks: None,
        };
        kernels::attention(workers.for_work(2 * pairs * heads * head_dim), &args, out);
    }
}

/// Number of blocks of sequences of these numbers of positions, at least 1.
fn blocks(lens: impl Iterator<Item = usize>) -> usize {
    lens.map(|len| len.div_ceil(BLOCK_SIZE)).sum::<usize>().max(1)
}

impl FullShape {
    fn store(&self, block_count: usize) -> Result<KvStore, KvStoreError> {
        let Self { heads: _, kv_heads, head_dim, scale: _, kv_type, path } = *self;
        let bf16 = kv_type == KvType::Bf16;
        let layer = KvLayer {
            kv_heads,
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
        KvStore::new(shape, block_count)
    }
}
