//! Matrix products on the AMX (Advanced Matrix Extensions) tile registers of x86-64.
//!
//! The weights of a bf16 matrix are packed in panels of 16 features as `[inner / 2][16][2]`, so
//! that 16 such pairs of a panel are one tile of 1 KiB: 32 weights of each of 16 features.
//! Activations are rounded to bf16 and packed as `[row tile][inner / 32][16 rows][32]`. One
//! `tdpbf16ps` instruction adds 32 products to each of 16 x 16 f32 sums.
//!
//! **Order of sums.** Each sum adds its products 32 at a time, in ascending order of the inner
//! dimension. The order in which the processor adds those 32 is the same for all rows and columns.
//! Sums that are stored between two blocks of the inner dimension are f32 and lose no bits.
//! Therefore neither the shape of a block (2 x 2 tiles, 1 x 4, ...) nor the number of rows that a
//! tile is configured for changes a bit of the result.
//!
//! The tile registers are configured at the start of a task and released at its end. In between,
//! the thread runs only the code that uses these tiles; compilers do not use tile registers
//! themselves.

pub(crate) mod block;
pub(crate) mod chunk;
pub(crate) mod probe;
pub(crate) mod tile;
