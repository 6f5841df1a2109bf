//! Keys and values that are multiplied as bf16 pairs, by the type in which they are stored.
#![allow(unsafe_code, reason = "loads keys and values by pointer")]

use crate::attention::args::KvSlice;
use crate::attention::tile_loading::transpose_panel;
use crate::attention::tile_view::StoredValues;
use crate::gemm::{F32, I4, I8, PairWord, Panels, SingleForm, Stored, pair_bytes};
use crate::lanes::{Avx512, LANES, Lanes};

/// A stored type whose values are bf16 numbers: bf16 itself, and bytes and the levels of codes of 4
/// bits without their scales.
pub(super) trait Paired: Stored {
    /// Two stored values of a head.
    type Word: PairWord;
    /// Maximum number of query vectors for which keys are read as they are stored.
    const STORED_KEY_QUERIES_MAX: usize;

    /// The keys or values, which are stored in this type.
    fn of<'a>(slice: &KvSlice<'a>) -> &'a [Self];

    /// Words of two values: the 16 from `first` on, each with the one at the same place of
    /// `second`.
    ///
    /// # Safety
    /// Both are readable for 16 values, and L is the type for AVX-512, which is available.
    unsafe fn pair<L: Lanes>(first: *const Self, second: *const Self) -> L;

    /// Transposes 16 rows of `2 * words` values to pairs, `[words][16]`. Prefetches the rows
    /// `next`.
    ///
    /// # Safety
    /// Each of `rows` is readable for `2 * words` values. `to` is writable for `32 * words` words,
    /// which no other thread accesses. AVX-512 is available.
    unsafe fn transpose(
        rows: &[*const Self; LANES],
        next: &[*const Self; LANES],
        words: usize,
        to: *mut f32,
    );
}

impl Paired for u16 {
    type Word = f32;
    const STORED_KEY_QUERIES_MAX: usize = usize::MAX;

    fn of<'a>(slice: &KvSlice<'a>) -> &'a [u16] {
        match slice {
            KvSlice::Bf16(bits) => bits,
            _ => unreachable!("the arithmetic was chosen for bf16 keys and values"),
        }
    }

    #[inline(always)]
    unsafe fn pair<L: Lanes>(first: *const u16, second: *const u16) -> L {
        // SAFETY: the conditions are those of this function.
        unsafe { L::load_interleaved(first, second) }
    }

    #[inline(always)]
    unsafe fn transpose(
        rows: &[*const u16; LANES],
        next: &[*const u16; LANES],
        words: usize,
        to: *mut f32,
    ) {
        let [rows, next] = [rows, next].map(|rows| rows.map(<*const u16>::cast::<f32>));
        // SAFETY: a word is two values; the conditions are those of this function.
        unsafe { transpose_panel::<Avx512, F32>(&rows, &next, words, to) }
    }
}

impl Paired for i8 {
    type Word = [i8; 2];
    const STORED_KEY_QUERIES_MAX: usize = 12;

    fn of<'a>(slice: &KvSlice<'a>) -> &'a [i8] {
        match slice {
            KvSlice::Int8 { values, .. } => values,
            _ => unreachable!("the arithmetic was chosen for keys and values of bytes"),
        }
    }

    #[inline(always)]
    unsafe fn pair<L: Lanes>(first: *const i8, second: *const i8) -> L {
        // SAFETY: the conditions are those of this function.
        unsafe { pair_bytes(first, second) }
    }

    #[inline(always)]
    unsafe fn transpose(
        rows: &[*const i8; LANES],
        next: &[*const i8; LANES],
        words: usize,
        to: *mut f32,
    ) {
        // SAFETY: the conditions are those of this function.
        unsafe { transpose_widened::<I8>(rows, next, words, to) }
    }
}

/// Two codes of 4 bits.
impl Paired for u8 {
    type Word = [u8; 1];
    const STORED_KEY_QUERIES_MAX: usize = 12;

    fn of<'a>(slice: &KvSlice<'a>) -> &'a [u8] {
        match slice {
            KvSlice::Int4 { packed, .. } => packed,
            _ => unreachable!("the arithmetic was chosen for keys and values of 4 bits"),
        }
    }

    #[inline(always)]
    unsafe fn pair<L: Lanes>(first: *const u8, second: *const u8) -> L {
        // SAFETY: the conditions are those of this function.
        unsafe { L::load_i4_interleaved(first, second) }
    }

    #[inline(always)]
    unsafe fn transpose(
        rows: &[*const u8; LANES],
        next: &[*const u8; LANES],
        words: usize,
        to: *mut f32,
    ) {
        // SAFETY: the conditions are those of this function.
        unsafe { transpose_widened::<I4>(rows, next, words, to) }
    }
}

/// [`Paired::transpose`] of values that are widened to f32 first.
///
/// # Safety
/// As for [`Paired::transpose`].
#[inline(always)]
unsafe fn transpose_widened<F: SingleForm>(
    rows: &[*const F::Raw; LANES],
    next: &[*const F::Raw; LANES],
    words: usize,
    to: *mut f32,
) {
    // SAFETY: `to` has room for the widened values, two for each word. The word `k` is stored where
    // value `k` was, after the values `2 * k` and `2 * k + 1` were read.
    unsafe {
        transpose_panel::<Avx512, F>(rows, next, 2 * words, to);
        for word in 0..words {
            let from = to.add(2 * word * LANES);
            let second = Avx512::load(from.add(LANES));
            Avx512::load(from).pair_bf16(second).store(to.add(word * LANES));
        }
    }
}

/// Values of pairs of successive positions, which are interleaved as they are read.
pub(super) struct StoredPairs<T>(StoredValues<T>);

impl<T> From<StoredValues<T>> for StoredPairs<T> {
    #[inline(always)]
    fn from(values: StoredValues<T>) -> StoredPairs<T> {
        StoredPairs(values)
    }
}

impl<T: Paired> Panels<T::Word> for StoredPairs<T> {
    #[inline(always)]
    fn at(&self, p: usize) -> *const T::Word {
        self.0.now.wrapping_add(p * (LANES / T::VALUES)).cast()
    }
    /// Two positions.
    #[inline(always)]
    fn inner_step(&self) -> usize {
        2 * self.0.row * size_of::<T>() / size_of::<T::Word>()
    }
    #[inline(always)]
    fn prefetch<const P: usize>(&self, p: usize, k: usize, now: *const T::Word) {
        self.0.prefetch::<P>(p, 2 * k, now.cast());
        self.0.prefetch::<P>(p, 2 * k + 1, now.cast());
    }
    #[inline(always)]
    unsafe fn load<L: Lanes, F: SingleForm<Raw = T::Word>>(&self, now: *const T::Word) -> L {
        let first = now.cast::<T>();
        // SAFETY: a step of a panel is 16 values of a position and as many of the position after
        // it, `row` values further on. The instruction set of `L` is available.
        unsafe { T::pair(first, first.add(self.0.row)) }
    }
}
