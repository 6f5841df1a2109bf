//! How the rows of a batch are divided into groups, which the microkernels compute together.
#![allow(unsafe_code, reason = "reads a constant of the path's instruction set")]

use crate::lanes::{Lanes, dispatch};
use crate::path::Path;

/// Number of rows of the next group if `left` rows are left: the smallest group size that holds
/// them all, but at most `group_max`.
///
/// The group may have more rows than are left. The surplus rows are computed and dropped.
#[inline]
pub(crate) fn group_rows(left: usize, group_max: usize) -> usize {
    [1, 2, 4, 6, 8].into_iter().find(|&rows| rows >= left).map_or(group_max, |r| r.min(group_max))
}

/// Number of rows of the largest group on `path`.
pub(crate) fn group_max(path: Path) -> usize {
    #[inline(always)]
    unsafe fn of<L: Lanes>() -> usize {
        L::GROUP_MAX
    }
    dispatch! {
        /// # Safety
        /// Every call is sound: `path` proves that its instruction set is available.
        unsafe fn on() -> usize = of
    }
    // SAFETY: reads a constant.
    unsafe { on(path) }
}
