//! Who gives up its blocks when somebody needs one and none is left: a pure function.
//!
//! A sequence whose reader is slow goes first, the youngest of them; then the youngest of all.
//! The oldest that can run is therefore never the victim of another, so it finishes, and with
//! it everybody in turn.

/// What the choice needs to know of a running sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Holder {
    /// Order of arrival; unique.
    pub(crate) arrival: u64,
    /// Its reader is slow.
    pub(crate) paused: bool,
}

/// Index of the sequence that gives up its blocks; `None` when nobody runs.
pub(crate) fn victim(holders: &[Holder]) -> Option<usize> {
    (0..holders.len()).max_by_key(|&index| (holders[index].paused, holders[index].arrival))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(holders: &[(u64, bool)], expected: Option<usize>) {
        let holders: Vec<Holder> =
            holders.iter().map(|&(arrival, paused)| Holder { arrival, paused }).collect();
        assert_eq!(victim(&holders), expected);
    }

    #[test]
    fn the_youngest_goes_and_the_paused_go_before_all() {
        check(&[], None);
        check(&[(3, false)], Some(0));
        check(&[(3, false), (7, false), (5, false)], Some(1));
        check(&[(3, true), (7, false), (5, true)], Some(2));
    }
}
