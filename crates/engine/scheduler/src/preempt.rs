//! Preemption: which running sequence loses its blocks if another needs one and none is available.
//!
//! Sequences that are stalled by a slow consumer are preempted first, then the others; within both
//! groups, the youngest first. The oldest sequence that can run is therefore never preempted for
//! another, so it finishes. By induction, every sequence finishes.

/// What the choice needs to know about a running sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Holder {
    /// The sequence's id.
    pub(crate) id: u64,
    /// Order of arrival; unique.
    pub(crate) arrival: u64,
    /// It is stalled by a slow consumer.
    pub(crate) stalled: bool,
    /// A token of it is being sampled outside of a step. It cannot be preempted before that ends.
    pub(crate) is_sampling: bool,
}

/// The id of the sequence to preempt; `None` if none can be.
pub(crate) fn victim(holders: impl Iterator<Item = Holder>) -> Option<u64> {
    let candidates = holders.filter(|holder| !holder.is_sampling);
    candidates.max_by_key(|holder| (holder.stalled, holder.arrival)).map(|holder| holder.id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(holders: &[(u64, bool)], expected: Option<u64>) {
        for is_sampling in [false, true] {
            let holder = |(id, &(arrival, stalled)): (usize, &(u64, bool))| Holder {
                id: id as u64,
                arrival,
                stalled,
                is_sampling,
            };
            let expected = expected.filter(|_| !is_sampling);
            assert_eq!(victim(holders.iter().enumerate().map(holder)), expected);
        }
    }

    #[test]
    fn the_youngest_is_preempted_and_stalled_sequences_before_others() {
        check(&[], None);
        check(&[(3, false)], Some(0));
        check(&[(3, false), (7, false), (5, false)], Some(1));
        check(&[(3, true), (7, false), (5, true)], Some(2));
    }
}
