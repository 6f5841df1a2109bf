//! The arguments of attention and their validation.

use stolon_kvcache::BlockId;

use crate::attention::sizes::POSITIONS_PER_TILE;
use crate::kv_layout::KvLayout;
use crate::lanes::LANES;
use crate::path::Path;

/// Keys or values of one layer. Their order is that of the [`KvLayout`] which the slice is used
/// with.
#[derive(Clone, Copy, Debug)]
pub enum KvSlice<'a> {
    /// f32 values.
    F32(&'a [f32]),
    /// The bits of bf16 values.
    Bf16(&'a [u16]),
    /// The bits of f16 values.
    F16(&'a [u16]),
    /// Signed bytes with one scale per position and head.
    Int8 {
        /// The quantized values. The value itself is `values[i] * scale`.
        values: &'a [i8],
        /// `[block_count, block_size, kv_heads]`, in either layout.
        scales: &'a [f32],
    },
    /// Codes of 4 bits of rotated heads, with one scale per position and head. Heads have an even
    /// length.
    Int4 {
        /// The codes of two successive values of a head in each byte, the first in the low bits.
        packed: &'a [u8],
        /// `[block_count, block_size, kv_heads]`, in either layout.
        scales: &'a [f32],
    },
}

impl KvSlice<'_> {
    pub(crate) fn len(&self) -> usize {
        match self {
            KvSlice::F32(values) => values.len(),
            KvSlice::Bf16(values) | KvSlice::F16(values) => values.len(),
            KvSlice::Int8 { values, .. } => values.len(),
            KvSlice::Int4 { packed, .. } => 2 * packed.len(),
        }
    }

    /// The scales of positions and heads, if the stored numbers have any.
    pub(super) fn scales(&self) -> Option<&[f32]> {
        match self {
            KvSlice::F32(_) | KvSlice::Bf16(_) | KvSlice::F16(_) => None,
            KvSlice::Int8 { scales, .. } | KvSlice::Int4 { scales, .. } => Some(scales),
        }
    }

    /// Whether heads are stored rotated.
    pub(super) fn is_rotated(&self) -> bool {
        matches!(self, KvSlice::Int4 { .. })
    }

    fn check_heads(&self, head_dim: usize) {
        if let Some(scales) = self.scales() {
            assert_eq!(
                scales.len() * head_dim,
                self.len(),
                "attention: expected one scale per position and head"
            );
        }
        assert!(
            !self.is_rotated() || head_dim.is_multiple_of(2),
            "attention: expected heads of an even length for 4 bits, got {head_dim}"
        );
    }
}

/// The queries of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct AttentionSequence<'a> {
    /// Position of the first query in the sequence. The keys and values of positions
    /// `0..start + count` are in the cache.
    pub start: usize,
    /// Number of queries, at successive positions: 1 in decoding, the length of the chunk in
    /// prefill.
    pub count: usize,
    /// Whether each query sees all positions up to the last query's, as the positions of an image
    /// see each other. If not, it sees those up to its own.
    pub full: bool,
    /// The block table: the blocks that hold the sequence, in order of position. It covers at least
    /// `start + count` positions.
    pub block_table: &'a [BlockId],
}

/// Numbers that are added to the scores and that depend on the head and on the distance of a
/// position from the query (T5, MPNet, ALiBi).
#[derive(Clone, Copy, Debug)]
pub struct RelativeBias<'a> {
    values: &'a [f32],
    reach: usize,
}

impl<'a> RelativeBias<'a> {
    /// Number of values of a head for sequences of at most `reach` positions: one for each distance
    /// from `-reach` to `reach`, and a tile on both sides, so that whole tiles can be read.
    #[must_use]
    pub const fn head_len(reach: usize) -> usize {
        2 * (reach + POSITIONS_PER_TILE) + 1
    }

    /// The values of all heads, `[heads, head_len(reach)]`, in the units of scores times log2(e).
    /// The value of distance 0 is in the middle of each row; larger positions come later.
    ///
    /// # Panics
    /// If the number of values is not a multiple of [`RelativeBias::head_len`].
    #[must_use]
    pub fn new(values: &'a [f32], reach: usize) -> Self {
        let len = Self::head_len(reach);
        assert!(values.len().is_multiple_of(len), "expected rows of {len} values for a bias");
        Self { values, reach }
    }

    /// The value of `head` for the position `begin`, as seen by a query at `position`, and the
    /// values of the 63 positions after it. The query and at least one of the positions are in a
    /// sequence of at most `reach` positions.
    #[inline]
    pub(super) fn of_tile(&self, head: usize, position: usize, begin: usize) -> &'a [f32] {
        let zero = head * Self::head_len(self.reach) + self.reach + POSITIONS_PER_TILE;
        &self.values[zero + begin - position..][..POSITIONS_PER_TILE]
    }
}

/// The arguments of one call of [`attention`](crate::attention()).
#[derive(Clone, Copy, Debug)]
pub struct AttentionArgs<'a> {
    /// Instruction set.
    pub path: Path,
    /// Queries, `[rows, heads, head_dim]`: those of all sequences, concatenated. `rows` is the sum
    /// of [`AttentionSequence::count`].
    pub q: &'a [f32],
    /// The sequences, in the order of their rows in `q`.
    pub sequences: &'a [AttentionSequence<'a>],
    /// Keys of the layer, in all blocks.
    pub keys: KvSlice<'a>,
    /// The layout of `keys`.
    pub key_layout: KvLayout,
    /// Values of the layer, in all blocks. They have the length of the keys, and the same type or,
    /// if these are bytes, 4 bits. Their layout is [`KvLayout::Rows`].
    pub values: KvSlice<'a>,
    /// Positions per block; at least 1.
    pub block_size: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads, a divisor of `heads`. With fewer than `heads`, each is shared by
    /// `heads / kv_heads` successive query heads (grouped-query attention).
    pub kv_heads: usize,
    /// Length of a head; at least 1.
    pub head_dim: usize,
    /// Factor of the scores, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Soft-capping (Gemma 2): a score `s`, which includes the factor `scale`, is replaced by
    /// `softcap * tanh(s / softcap)`. Finite and above 0; `None` leaves scores as they are.
    pub softcap: Option<f32>,
    /// Number of positions that a query sees up to its own, at least 1; `None` if it sees all of
    /// them.
    pub sliding_window: Option<usize>,
    /// Number of positions after its own that a query of a [`full`](AttentionSequence::full)
    /// sequence sees; `None` if it sees all of them up to the last query's.
    pub window_after: Option<usize>,
    /// Numbers that are added to the scores; `None` if there are none.
    pub bias: Option<RelativeBias<'a>>,
    /// `[heads]`: the score of each head's attention sink. A sink takes part in the softmax as one
    /// more position whose value is zero. `None` if there are no sinks.
    pub sinks: Option<&'a [f32]>,
}

impl AttentionArgs<'_> {
    /// Values of one position's keys: `kv_heads * head_dim`.
    fn position_len(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// [`Self::softcap`] in the units of the kernels' scores, ln 2.
    pub(super) fn softcap_base_2(&self) -> Option<f32> {
        self.softcap.map(|cap| cap * std::f32::consts::LOG2_E)
    }

    /// First position that a query at `position` sees.
    pub(super) fn first_seen(&self, position: usize) -> usize {
        self.sliding_window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// The last position that a query at `position` of a full sequence with `end` positions sees,
    /// plus one.
    pub(super) fn full_end(&self, position: usize, end: usize) -> usize {
        self.window_after.map_or(end, |after| end.min((position + 1).saturating_add(after)))
    }

    /// The block that holds a position of a sequence.
    #[inline]
    pub(super) fn block(&self, sequence: usize, position: usize) -> usize {
        self.sequences[sequence].block_table[position / self.block_size].0 as usize
    }

    /// Number of a head in a store with the layout [`KvLayout::Rows`]: it begins at `head_dim`
    /// times this number. Scales have the same order in both layouts.
    #[inline]
    pub(super) fn stored_head(&self, sequence: usize, kv_head: usize, position: usize) -> usize {
        let first = self.block(sequence, position) * self.block_size;
        (first + position % self.block_size) * self.kv_heads + kv_head
    }

    /// Checks that all sizes fit together and that the block tables name existing blocks. The
    /// unsafe code of attention relies on it: for each position below `start + count` of a
    /// sequence, the whole block that holds the position lies within `keys` and `values`, and each
    /// of its heads has a scale if they are bytes or codes of 4 bits.
    ///
    /// # Panics
    /// If a condition does not hold.
    pub(super) fn validate(&self, out: &[f32]) {
        assert!(
            self.kv_heads > 0 && self.heads > 0 && self.heads.is_multiple_of(self.kv_heads),
            "attention: expected heads to be a multiple of kv_heads, got {} and {}",
            self.heads,
            self.kv_heads
        );
        assert!(
            self.block_size > 0 && self.head_dim > 0,
            "attention: expected a positive block_size and head_dim, got {} and {}",
            self.block_size,
            self.head_dim
        );
        assert!(
            self.sliding_window != Some(0),
            "attention: expected a sliding window of at least 1 position, got 0"
        );
        assert!(
            self.softcap.is_none_or(|cap| cap.is_finite() && cap > 0.0),
            "attention: expected a finite softcap above 0, got {:?}",
            self.softcap
        );
        assert!(
            self.sinks.is_none_or(|sinks| sinks.len() == self.heads),
            "attention: expected {} sinks, got {:?}",
            self.heads,
            self.sinks.map(<[f32]>::len)
        );
        let rows: usize = self.sequences.iter().map(|sequence| sequence.count).sum();
        assert_eq!(
            self.q.len(),
            rows * self.heads * self.head_dim,
            "attention: q must be [{rows}, {}, {}]",
            self.heads,
            self.head_dim
        );
        assert_eq!(out.len(), self.q.len(), "attention: out must have the length of q");
        assert_eq!(
            self.keys.len(),
            self.values.len(),
            "attention: keys and values must have the same length"
        );
        let [keys, values] = [&self.keys, &self.values].map(std::mem::discriminant);
        let narrower =
            matches!((&self.keys, &self.values), (KvSlice::Int8 { .. }, KvSlice::Int4 { .. }));
        assert!(keys == values || narrower, "attention: keys and values must have the same type");
        if let KvLayout::Transposed { block_size } = self.key_layout {
            let odd_pairs = matches!(self.keys, KvSlice::Bf16(_)) && self.head_dim % 2 == 1;
            assert!(
                block_size == self.block_size && block_size.is_multiple_of(LANES) && !odd_pairs,
                "attention: blocks of {} positions with heads of {} values cannot be stored \
                 transposed in blocks of {block_size}",
                self.block_size,
                self.head_dim
            );
        }
        if let Some(RelativeBias { values, reach }) = self.bias {
            assert!(
                self.keys.scales().is_none(),
                "attention: expected keys without scales with a bias"
            );
            assert_eq!(
                values.len(),
                self.heads * RelativeBias::head_len(reach),
                "attention: expected a bias of {} heads",
                self.heads
            );
            let longest = self.sequences.iter().map(|sequence| sequence.start + sequence.count);
            let longest = longest.max().unwrap_or(0);
            assert!(
                longest <= reach,
                "attention: expected at most {reach} positions with this bias, got {longest}"
            );
        }
        self.keys.check_heads(self.head_dim);
        self.values.check_heads(self.head_dim);
        self.validate_block_tables();
    }

    /// Checks that each sequence has blocks for all of its positions, and that they exist.
    fn validate_block_tables(&self) {
        let block_count = self.keys.len() / (self.block_size * self.position_len());
        for sequence in self.sequences {
            let blocks = (sequence.start + sequence.count).div_ceil(self.block_size);
            assert!(
                blocks <= sequence.block_table.len(),
                "attention: expected at least {blocks} blocks in a block table, got {}",
                sequence.block_table.len()
            );
            for block in &sequence.block_table[..blocks] {
                assert!(
                    (block.0 as usize) < block_count,
                    "attention: block {} of {block_count} does not exist",
                    block.0
                );
            }
        }
    }
}
