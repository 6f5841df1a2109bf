//! Attention that gathers keys and values through the block tables.
//!
//! The queries are divided into tiles of [`QUERY_TILE`] positions of one sequence, and keys and
//! values into tiles of [`KEY_TILE`] positions. Each tile of keys updates the running maximum and
//! sum of an online softmax (Milakov and Gimelshein, 2018), as in flash attention.
//!
//! **Invariant: batch invariance.** All products have the shape of whole tiles, and tiles of keys
//! start at multiples of [`KEY_TILE`] positions. A tile of keys that a query does not attend to
//! changes nothing, so the result of a query does not depend on the other queries.

use candle_core::{DType, Device, Result, Tensor};

use super::AttentionArgs;
use crate::kv_store::Plane;
use crate::plan::{QuerySpan, indices, slot};

/// Number of queries of a tile.
const QUERY_TILE: usize = 8;
/// Number of positions of a tile of keys.
const KEY_TILE: usize = 64;
/// Maximum number of query tiles that are computed together. It bounds the memory of the gathered
/// keys and values.
const GROUP_MAX: usize = 64;
/// Initial value of the running maximum. It is finite, so that differences from it are not NaN.
const LOWEST: f32 = -1e30;

/// The queries of a step in tiles.
#[derive(Debug)]
pub(crate) struct Plan {
    groups: Vec<Group>,
    /// For each row, its index among the rows of the padded tiles of all groups.
    row_order: Tensor,
}

/// Tiles that are computed together.
#[derive(Debug)]
struct Group {
    /// Number of tiles.
    count: usize,
    /// The rows of the queries, `[count * QUERY_TILE]`. A tile with fewer queries repeats its last
    /// row.
    rows: Tensor,
    /// The positions of the queries, `[count, 1, QUERY_TILE, 1]` in f32, which represents whole
    /// numbers below 2^24 exactly.
    positions: Tensor,
    /// One tensor per tile of keys, up to the last tile that a query attends to: the slots of its
    /// positions for each tile of queries, `[count * KEY_TILE]`.
    slots: Vec<Tensor>,
    /// Smallest position of the queries.
    first: usize,
}

/// A tile of queries on the host.
#[derive(Clone, Copy, Debug)]
struct Tile<'a> {
    span: QuerySpan<'a>,
    /// Row of the span's first query.
    span_row: usize,
    /// Index within the span of the tile's first query.
    first: usize,
    /// Number of its queries. The remaining rows of the tile repeat the last one.
    len: usize,
}

impl Tile<'_> {
    /// Number of positions that its last query attends to if there is no window.
    fn context(&self) -> usize {
        self.span.start + self.first + self.len
    }

    /// Indices of its [`QUERY_TILE`] queries within the span, with the last one repeated.
    fn queries(&self) -> impl Iterator<Item = usize> {
        let (first, last) = (self.first, self.first + self.len - 1);
        (first..first + QUERY_TILE).map(move |query| query.min(last))
    }

    /// Slots of the [`KEY_TILE`] positions from `start` on. Positions beyond the context, which are
    /// masked, get the slot of the sequence's first position.
    fn slots(&self, start: usize, block_size: usize) -> impl Iterator<Item = u32> {
        let (table, context) = (self.span.block_table, self.context());
        let position = move |position| if position < context { position } else { 0 };
        (start..start + KEY_TILE).map(move |key| slot(table, position(key), block_size))
    }
}

impl Plan {
    pub(crate) fn new(spans: &[QuerySpan<'_>], block_size: usize, device: &Device) -> Result<Self> {
        let mut tiles = Vec::new();
        let mut span_row = 0;
        for &span in spans {
            for first in (0..span.count).step_by(QUERY_TILE) {
                let len = QUERY_TILE.min(span.count - first);
                tiles.push(Tile { span, span_row, first, len });
            }
            span_row += span.count;
        }
        // Sorting puts tiles with similar context lengths into the same group.
        tiles.sort_by_key(Tile::context);
        let mut row_order = vec![0; span_row];
        for (index, tile) in tiles.iter().enumerate() {
            for query in 0..tile.len {
                let row = tile.span_row + tile.first + query;
                row_order[row] = (index * QUERY_TILE + query) as u32;
            }
        }
        let groups = tiles.chunks(GROUP_MAX).map(|tiles| Group::new(tiles, block_size, device));
        Ok(Self { groups: groups.collect::<Result<_>>()?, row_order: indices(&row_order, device)? })
    }

    /// See [`Prepared::attend`](super::Prepared::attend).
    pub(crate) fn attend(&self, q: &Tensor, args: &AttentionArgs<'_>) -> Result<Tensor> {
        let parts = self.groups.iter().map(|group| group.attend(q, args));
        let parts = parts.collect::<Result<Vec<_>>>()?;
        Tensor::cat(&parts, 0)?.index_select(&self.row_order, 0)
    }
}

impl Group {
    fn new(tiles: &[Tile<'_>], block_size: usize, device: &Device) -> Result<Self> {
        let rows: Vec<u32> = tiles
            .iter()
            .flat_map(|tile| tile.queries().map(|query| (tile.span_row + query) as u32))
            .collect();
        let positions: Vec<f32> = tiles
            .iter()
            .flat_map(|tile| tile.queries().map(|query| (tile.span.start + query) as f32))
            .collect();
        let context = tiles.iter().map(Tile::context).max().unwrap_or(0);
        let slots = (0..context).step_by(KEY_TILE).map(|start| {
            let slots: Vec<u32> =
                tiles.iter().flat_map(|tile| tile.slots(start, block_size)).collect();
            indices(&slots, device)
        });
        let first = tiles.iter().map(|tile| tile.span.start + tile.first).min().unwrap_or(0);
        Ok(Self {
            count: tiles.len(),
            rows: indices(&rows, device)?,
            positions: Tensor::from_vec(positions, (tiles.len(), 1, QUERY_TILE, 1), device)?,
            slots: slots.collect::<Result<_>>()?,
            first,
        })
    }

    /// Returns `[count * QUERY_TILE, heads * head_dim]`.
    fn attend(&self, q: &Tensor, args: &AttentionArgs<'_>) -> Result<Tensor> {
        let AttentionArgs { kv, .. } = *args;
        let shape = &kv.shape;
        let (count, heads, dim) = (self.count, args.heads, shape.head_dim);
        let (kv_heads, per_kv_head) = (shape.kv_heads, heads / shape.kv_heads);
        let device = q.device();
        // Query heads that share a key head become rows of one product.
        let q = q
            .index_select(&self.rows, 0)?
            .reshape((count, QUERY_TILE, heads, dim))?
            .transpose(1, 2)?
            .contiguous()?
            .reshape((count * kv_heads, per_kv_head * QUERY_TILE, dim))?;
        let per_head = (count, heads, QUERY_TILE, 1);
        let (mut largest, mut sum) = match args.sinks {
            // A sink acts as a position that has a score but no value.
            Some(sinks) => {
                let sinks = sinks.reshape((1, heads, 1, 1))?.broadcast_as(per_head)?;
                (sinks.contiguous()?, Tensor::ones(per_head, DType::F32, device)?)
            }
            None => (
                Tensor::full(LOWEST, per_head, device)?,
                Tensor::zeros(per_head, DType::F32, device)?,
            ),
        };
        let mut output = Tensor::zeros((count, heads, QUERY_TILE, dim), DType::F32, device)?;
        let oldest = args.window.map_or(0, |window| (self.first + 1).saturating_sub(window));
        for (index, slots) in self.slots.iter().enumerate().skip(oldest / KEY_TILE) {
            let gather = |plane: &Plane| {
                let rows = plane.gather(slots)?;
                let rows = rows.reshape((count, KEY_TILE, kv_heads, dim))?.transpose(1, 2)?;
                rows.contiguous()?.reshape((count * kv_heads, KEY_TILE, dim))
            };
            let (keys, values) = (gather(&kv.keys)?, gather(&kv.values)?);
            let scores = q.matmul(&keys.t()?)?.affine(f64::from(args.scale), 0.0)?;
            let scores = match args.softcap {
                Some(cap) => {
                    scores.affine(1.0 / f64::from(cap), 0.0)?.tanh()?.affine(f64::from(cap), 0.0)?
                }
                None => scores,
            };
            let scores = scores.reshape((count, heads, QUERY_TILE, KEY_TILE))?;
            let scores = self.mask(&scores, index * KEY_TILE, args.window)?;
            let new_largest = largest.maximum(&scores.max_keepdim(3)?)?;
            let weights = scores.broadcast_sub(&new_largest)?.exp()?;
            let decay = (largest - &new_largest)?.exp()?;
            sum = ((sum * &decay)? + weights.sum_keepdim(3)?)?;
            let rows = (count * kv_heads, per_kv_head * QUERY_TILE, KEY_TILE);
            let weighted = weights.reshape(rows)?.matmul(&values)?;
            let weighted = weighted.reshape((count, heads, QUERY_TILE, dim))?;
            output = (output.broadcast_mul(&decay)? + weighted)?;
            largest = new_largest;
        }
        let output = output.broadcast_div(&sum)?.transpose(1, 2)?.contiguous()?;
        output.reshape((count * QUERY_TILE, heads * dim))
    }

    /// Masks the scores, `[count, heads, QUERY_TILE, KEY_TILE]`: keys that a query does not attend
    /// to get minus infinity. `start` is the position of the first key.
    fn mask(&self, scores: &Tensor, start: usize, window: Option<usize>) -> Result<Tensor> {
        let device = scores.device();
        let keys = Tensor::arange(start as f32, (start + KEY_TILE) as f32, device)?;
        // The number of positions from a key to its query. Positions and distances are whole
        // numbers in f32.
        let distance = self.positions.broadcast_sub(&keys.reshape((1, 1, 1, KEY_TILE))?)?;
        let mut read = distance.ge(0_f32)?;
        if let Some(window) = window {
            read = (read * distance.lt(window as f32)?)?;
        }
        let hidden = Tensor::full(f32::NEG_INFINITY, (), device)?.broadcast_as(scores.shape())?;
        read.broadcast_as(scores.shape())?.where_cond(scores, &hidden)
    }
}
