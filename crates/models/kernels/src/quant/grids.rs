//! The grids of the IQ1, IQ2 and IQ3 formats: the combinations of four or eight successive weights
//! that a format has.
//!
//! `grids.bin` is written by `fixtures/make_grids.py`, which describes it. The compiler expands it
//! to tables of words, each of four weights: an entry of eight weights is two words.

/// All grids, one after the other.
const GRIDS: &[u8; 9216] = include_bytes!("grids.bin");

const IQ2_VALUES: &[i8] = &[8, 25, 43];

/// 256 entries of eight weights.
pub(super) static IQ2_XXS_GRID: [u32; 512] = words(0, 2, IQ2_VALUES);
/// 512 entries of eight weights.
pub(super) static IQ2_XS_GRID: [u32; 1024] = words(512, 2, IQ2_VALUES);
/// 1024 entries of eight weights.
pub(super) static IQ2_S_GRID: [u32; 2048] = words(1536, 2, IQ2_VALUES);
/// 2048 entries of eight weights, each eight times the entry plus one, and then the same entries,
/// minus one. (In ggml, an eighth is added to the entry or subtracted from it instead.)
pub(super) static IQ1_GRID: [u32; 8192] = {
    let plus: [u32; 4096] = words(3584, 2, &[-7, 1, 9]);
    let minus: [u32; 4096] = words(3584, 2, &[-9, -1, 7]);
    let mut both = [0; 8192];
    let mut word = 0;
    while word < plus.len() {
        (both[word], both[plus.len() + word]) = (plus[word], minus[word]);
        word += 1;
    }
    both
};
/// 256 entries of four weights.
pub(super) static IQ3_XXS_GRID: [u32; 256] = words(7680, 4, &[4, 12, 20, 28, 36, 44, 52, 62]);
/// 512 entries of four weights.
pub(super) static IQ3_S_GRID: [u32; 512] = words(8192, 4, &[1, 3, 5, 7, 9, 11, 13, 15]);

/// Expands the grid that begins with byte `first` of [`GRIDS`]. A weight is `bits` bits, an index
/// into `values`. The lowest byte of a word is its first weight.
const fn words<const N: usize>(first: usize, bits: usize, values: &[i8]) -> [u32; N] {
    let mut words = [0; N];
    let mut word = 0;
    while word < N {
        let mut weight = 0;
        while weight < 4 {
            let bit = (4 * word + weight) * bits;
            let index = GRIDS[first + bit / 8] >> (bit % 8) & ((1 << bits) - 1);
            words[word] |= (values[index as usize].cast_unsigned() as u32) << (8 * weight);
            weight += 1;
        }
        word += 1;
    }
    words
}
