//! The microkernel: a tile of sums in registers.
#![allow(unsafe_code, reason = "the microkernel reads and writes by pointer")]

use std::marker::PhantomData;

use super::weights::{Form, SingleForm};
use crate::lanes::{Kernel, LANES, Lanes};

/// Where the panels of a product are in memory.
pub(crate) trait Panels<Raw> {
    /// The first value of panel `p`.
    fn at(&self, p: usize) -> *const Raw;
    /// Number of values from one inner index to the next. The default is a constant, so that the
    /// microkernel does not need a register for it.
    #[inline(always)]
    fn inner_step(&self) -> usize {
        LANES
    }
    /// Prefetches weights that will be read some time after step `k` of panel `p`, whose values are
    /// at `now`, by a tile of P panels.
    fn prefetch<const P: usize>(&self, p: usize, k: usize, now: *const Raw);
    /// Loads the 16 values of a step.
    ///
    /// # Safety
    /// `now` is the start of a step of one of the panels, which are readable, and the instruction
    /// set of `L` is available.
    #[inline(always)]
    unsafe fn load<L: Lanes, F: SingleForm<Raw = Raw>>(&self, now: *const Raw) -> L {
        // SAFETY: the 16 values of a step are contiguous, and the conditions are the same.
        unsafe { F::load(now) }
    }
}

/// Evenly spaced panels that are in the L1 or L2 cache already, so that nothing is prefetched.
pub(crate) struct CachedPanels<Raw> {
    /// The first value of the first panel.
    pub(crate) first: *const Raw,
    /// Number of values from the start of a panel to the start of the next one.
    pub(crate) step: usize,
    /// Number of values from one inner index to the next: 16 for packed panels, or the length of a
    /// row if the panels are columns of a row-major matrix.
    pub(crate) inner_step: usize,
}

impl<Raw> Panels<Raw> for CachedPanels<Raw> {
    #[inline(always)]
    fn at(&self, p: usize) -> *const Raw {
        self.first.wrapping_add(p * self.step)
    }
    #[inline(always)]
    fn inner_step(&self) -> usize {
        self.inner_step
    }
    #[inline(always)]
    fn prefetch<const P: usize>(&self, _: usize, _: usize, _: *const Raw) {}
}

/// The operands of a register tile. All strides are numbers of values.
pub(crate) struct RegisterTile<B> {
    /// Length of the sums. Even for weights stored as pairs.
    pub(crate) inner: usize,
    /// Activations. The one of row `r` at inner index `k` is at `a + k * a_inner + r * a_row`.
    pub(crate) a: *const f32,
    /// Stride of the inner index of `a`.
    pub(crate) a_inner: usize,
    /// Stride of the rows of `a`.
    pub(crate) a_row: usize,
    /// Panels of weights. The 16 weights of panel `p` at inner index `k` are at
    /// `b.at(p) + k * b.inner_step()`.
    pub(crate) b: B,
    /// Results. The 16 sums of row `r` and panel `p` are at `c + r * c_row + 16 * p`.
    pub(crate) c: *mut f32,
    /// Stride of the rows of `c`.
    pub(crate) c_row: usize,
    /// Number of rows to write. The tile computes the rows of its group and drops the others.
    pub(crate) rows: usize,
    /// Whether sums start with the values in `c` instead of zero.
    pub(crate) accumulate: bool,
}

/// Computes the tile of a group of rows and `panels` panels, as many panels at a time as fit in the
/// registers. `group` is a group size that [`group_rows`](super::group_rows) returned for the
/// [`GROUP_MAX`](Lanes::GROUP_MAX) of `L`.
///
/// # Safety
/// The instruction set of `L` and what [`Form::call`] needs are available. `a` is readable for
/// `group` rows and `b` for `panels` panels, each over `inner` steps. `c` is writable for `rows`
/// rows of `16 * panels` sums, and also readable if `accumulate` is set. `rows` is at most `group`.
#[inline(always)]
pub(crate) unsafe fn tile_group<L: Lanes, F: Form, B: Panels<F::Raw>>(
    args: &RegisterTile<B>,
    group: usize,
    panels: usize,
) {
    // SAFETY: the requirements of the kernel are those of this function.
    unsafe { F::call::<L, _>(TileGroup::<F, B> { args, group, panels, form: PhantomData }) }
}

/// [`tile_group`] as a kernel.
struct TileGroup<'a, F, B> {
    args: &'a RegisterTile<B>,
    group: usize,
    panels: usize,
    form: PhantomData<F>,
}

impl<F: Form, B: Panels<F::Raw>> Kernel for TileGroup<'_, F, B> {
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let TileGroup { args, group, panels, .. } = self;
        // SAFETY: R is `group` in each arm, so the requirements of `tile_row` are those of
        // `tile_group`. The conditions are constant so that unused sizes are not instantiated.
        unsafe {
            match group {
                1 => tile_row::<L, F, B, 1>(args, panels),
                2 => tile_row::<L, F, B, 2>(args, panels),
                4 => tile_row::<L, F, B, 4>(args, panels),
                6 if const { L::GROUP_MAX >= 6 } => tile_row::<L, F, B, 6>(args, panels),
                8 if const { L::GROUP_MAX >= 8 } => tile_row::<L, F, B, 8>(args, panels),
                12 if const { L::GROUP_MAX >= 12 } => tile_row::<L, F, B, 12>(args, panels),
                _ => unreachable!("no group has {group} rows"),
            }
        }
    }
}

/// Computes the tiles of R rows and `panels` panels. A tile of P panels needs registers for `R * P`
/// sums and P vectors of weights.
///
/// # Safety
/// As for [`tile_group`] with `group` = R.
#[inline(always)]
unsafe fn tile_row<L: Lanes, F: Form, B: Panels<F::Raw>, const R: usize>(
    args: &RegisterTile<B>,
    panels: usize,
) {
    let mut first = 0;
    while first < panels {
        let left = panels - first;
        // SAFETY: a tile has at most the `left` panels after the first `first` ones.
        unsafe {
            first += if const { R * 4 + 4 < L::REGISTERS } && left >= 4 {
                tile::<L, F, B, R, 4>(args, first);
                4
            } else if const { R * 2 + 2 < L::REGISTERS } && left >= 2 {
                tile::<L, F, B, R, 2>(args, first);
                2
            } else {
                tile::<L, F, B, R, 1>(args, first);
                1
            };
        }
    }
}

/// Computes one register tile of R rows and P panels.
///
/// It is written with counted loops because every iterator would be instantiated again for each
/// shape, which multiplies the build time.
///
/// # Safety
/// As for [`tile_group`] with `group` = R and the P panels from `first` on.
#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "see the documentation")]
unsafe fn tile<L: Lanes, F: Form, B: Panels<F::Raw>, const R: usize, const P: usize>(
    args: &RegisterTile<B>,
    first: usize,
) {
    // SAFETY: `a` moves `inner` steps of `a_inner` values, with R rows readable at each; `b[p]`
    // moves `inner` steps through panel `first + p`; sums are only read and written for rows below
    // `args.rows` and the P panels from `first` on.
    unsafe {
        let c = args.c.add(first * LANES);
        let mut sums = [[L::splat(0.0); P]; R];
        if args.accumulate {
            for r in 0..R {
                if r < args.rows {
                    for p in 0..P {
                        sums[r][p] = L::load(c.add(r * args.c_row + p * LANES));
                    }
                }
            }
        }
        let mut a = args.a;
        let mut b = [std::ptr::null::<F::Raw>(); P];
        for p in 0..P {
            b[p] = args.b.at(first + p);
        }
        let mut k = 0;
        while k < args.inner {
            for p in 0..P {
                args.b.prefetch::<P>(first + p, k, b[p]);
            }
            for step in 0..F::STEPS {
                let mut weights = [L::splat(0.0); P];
                for p in 0..P {
                    weights[p] = F::load_step(&args.b, b[p], step);
                }
                for r in 0..R {
                    let x = L::splat(*a.add(r * args.a_row));
                    for p in 0..P {
                        sums[r][p] = F::accumulate(weights[p], x, sums[r][p]);
                    }
                }
                a = a.add(args.a_inner);
            }
            for p in 0..P {
                b[p] = b[p].add(F::STEPS * args.b.inner_step());
            }
            k += F::STEPS;
        }
        for r in 0..R {
            if r < args.rows {
                for p in 0..P {
                    sums[r][p].store(c.add(r * args.c_row + p * LANES));
                }
            }
        }
    }
}
