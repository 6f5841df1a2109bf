//! The definition of a quantized type: the bytes of a block, and how they are unpacked in
//! registers.
//!
//! This is the only definition of a type. Products, conversion to f32, packing and unpacking follow
//! from it. To add a type, implement [`Format`] and list it in `tensor_type.rs`.
#![allow(unsafe_code, reason = "reads packed blocks by pointer")]

use std::ops::Range;

use super::SUB_BLOCK;
use crate::lanes::{Bytes, LANES, Lanes, WORD_VECTOR_BYTES};

/// Number of words of the weights of a sub-block, after they are unpacked to bytes.
pub(crate) const WORDS: usize = SUB_BLOCK / 4;

/// When products unpack a panel of weights to signed bytes before they multiply it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expanded {
    /// Never, because the weights are signed bytes.
    Never,
    /// If there are enough groups of rows for it.
    ForManyRows,
    /// Always, because unpacking takes longer than the multiplication with a group of rows.
    Always,
}

/// A block format of ggml.
///
/// A block consists of sub-blocks of 32 weights. Each weight is `scale * byte - minimum`, where
/// `byte` is a small signed integer. The weights of a sub-block have one scale, or the first 16 and
/// the last 16 have one each. If the format has minima, there are as many as scales.
///
/// # Safety of the methods
/// The instruction set of the type parameter is available. The block is a whole packed block of
/// the implementing format. Indices are below the number of sub-blocks or scales of the block.
pub(crate) trait Format {
    /// Number of sub-blocks of a block.
    const SUB_BLOCKS: usize;
    /// Number of bytes of a block in a file.
    const BLOCK_BYTES: usize;
    /// The range of the words in the bytes of a block. The other bytes are mostly scales.
    const WORDS: Range<usize>;
    /// Number of scales of a sub-block: 1 or 2.
    const SCALES: usize = 1;
    /// Whether there is a minimum with every scale.
    const MINS: bool = false;
    /// Number of scales and minima of a sub-block.
    const NUMBERS: usize = if Self::MINS { 2 * Self::SCALES } else { Self::SCALES };
    /// When products unpack a panel to signed bytes first, instead of with each group of rows.
    const EXPANDED: Expanded = Expanded::ForManyRows;
    /// Number of weights of a block.
    const BLOCK_LEN: usize = Self::SUB_BLOCKS * SUB_BLOCK;

    /// Whether [`arrange`](Format::arrange) changes anything.
    const ARRANGED: bool = false;

    /// Changes the order of bits of a block in a file to the one in which
    /// [`word`](Format::word) reads them.
    #[inline(always)]
    fn arrange(_block: &mut [u8]) {}
    /// Reverses [`arrange`](Format::arrange).
    #[inline(always)]
    fn restore(_block: &mut [u8]) {}

    /// Word `index`, below [`WORDS`], of a sub-block, for 16 features, as signed bytes.
    unsafe fn word<B: Bytes>(block: Block, sub_block: usize, index: usize) -> B;
    /// Scale `index` of the block, for 16 features.
    unsafe fn scale<L: Lanes>(block: Block, index: usize) -> L;
    /// Minimum `index` of the block, for 16 features. Only for formats with [`Format::MINS`].
    #[inline(always)]
    unsafe fn min<L: Lanes>(_block: Block, _index: usize) -> L {
        unreachable!("this format has no minima")
    }
}

/// The packed blocks of 16 features at one place in a panel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    /// The words, `[word][16]` of 4 bytes.
    pub(crate) words: *const u8,
    /// The other bytes, `[byte][16]`.
    pub(crate) scales: *const u8,
}

/// The methods are unsafe: the bytes that they read must be some of a whole packed block, and the
/// instruction set of their type parameter must be available.
impl Block {
    /// Byte `byte` of those that do not belong to words, for 16 features.
    #[inline(always)]
    pub(super) unsafe fn bytes(self, byte: usize) -> [u8; LANES] {
        // SAFETY: the 16 bytes from `16 * byte` on are readable.
        unsafe { self.scales.add(byte * LANES).cast::<[u8; LANES]>().read() }
    }

    /// The f16 value in the bytes `byte` and `byte + 1` of those that do not belong to words, for
    /// 16 features.
    #[inline(always)]
    pub(super) unsafe fn halves<L: Lanes>(self, byte: usize) -> L {
        // SAFETY: 16 bytes are readable from `16 * byte` and from `16 * (byte + 1)` on.
        unsafe {
            L::load_f16_bytes(self.scales.add(byte * LANES), self.scales.add((byte + 1) * LANES))
        }
    }

    /// Word `index`, for 16 features.
    #[inline(always)]
    pub(super) unsafe fn word<B: Bytes>(self, index: usize) -> B {
        // SAFETY: the 64 bytes from `64 * index` on are readable.
        unsafe { B::load(self.words.add(index * WORD_VECTOR_BYTES)) }
    }
}
