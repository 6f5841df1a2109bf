//! The grids of the IQ1, IQ2 and IQ3 formats: the combinations of four or eight successive weights
//! that a format has.
//!
//! `grids.bin` is written by `fixtures/make_grids.py`, which describes it.

/// A grid.
pub(super) struct Grid {
    /// The entries in [`GRIDS`].
    bytes: std::ops::Range<usize>,
    /// The values that weights have.
    values: &'static [i8],
}

/// All grids, one after the other.
static GRIDS: &[u8; 9216] = include_bytes!("grids.bin");

const IQ2_VALUES: &[i8] = &[8, 25, 43];

/// 256 entries of eight weights.
pub(super) const IQ2_XXS_GRID: Grid = Grid { bytes: 0..512, values: IQ2_VALUES };
/// 512 entries of eight weights.
pub(super) const IQ2_XS_GRID: Grid = Grid { bytes: 512..1536, values: IQ2_VALUES };
/// 1024 entries of eight weights.
pub(super) const IQ2_S_GRID: Grid = Grid { bytes: 1536..3584, values: IQ2_VALUES };
/// 2048 entries of eight weights.
pub(super) const IQ1_GRID: Grid = Grid { bytes: 3584..7680, values: &[-1, 0, 1] };
/// 256 entries of four weights.
pub(super) const IQ3_XXS_GRID: Grid =
    Grid { bytes: 7680..8192, values: &[4, 12, 20, 28, 36, 44, 52, 62] };
/// 512 entries of four weights.
pub(super) const IQ3_S_GRID: Grid =
    Grid { bytes: 8192..9216, values: &[1, 3, 5, 7, 9, 11, 13, 15] };

impl Grid {
    /// The `N` weights of an entry: eight of two bits or four of four bits.
    pub(super) fn entry<const N: usize>(&self, index: usize) -> [i8; N] {
        let entries = GRIDS[self.bytes.clone()].as_chunks::<2>().0;
        let bits = usize::from(u16::from_le_bytes(entries[index]));
        let width = 16 / N;
        std::array::from_fn(|i| self.values[bits >> (width * i) & ((1 << width) - 1)])
    }
}
