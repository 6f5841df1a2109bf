//! Which waiting requests to try, in which order: a pure function of what is known of them.
//!
//! The bound on overtaking is strict and holds at any queue depth: a request is eligible only
//! if admitting it pushes no earlier one past the bound. The earliest is always eligible, so
//! once it has been overtaken to the bound, nothing passes it.

use crate::config::AdmissionPolicy;

/// What a decision needs to know of a waiting request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Candidate {
    /// Order of arrival; unique.
    pub(crate) arrival: u64,
    /// Larger is more urgent.
    pub(crate) priority: i32,
    /// Tokens to have before the next one is sampled.
    pub(crate) tokens: usize,
    /// How many of them are cached, as far as known.
    pub(crate) matched: usize,
    /// Cost of later requests that were admitted before this one.
    pub(crate) overtaken: usize,
    /// False while it waits for something else: a leader's blocks, its own slow reader.
    pub(crate) ready: bool,
}

impl Candidate {
    /// Tokens that must be computed; at least 1.
    pub(crate) fn cost(&self) -> usize {
        self.tokens.saturating_sub(self.matched).max(1)
    }
}

/// Indices of at most `look_ahead` candidates to try, best first. `candidates` are in order of
/// arrival.
pub(crate) fn order(
    policy: AdmissionPolicy,
    candidates: &[Candidate],
    max_overtake: usize,
    look_ahead: usize,
) -> Vec<usize> {
    debug_assert!(candidates.is_sorted_by_key(|candidate| candidate.arrival));
    let mut eligible = Vec::with_capacity(candidates.len());
    // The least that any earlier candidate may still be overtaken by.
    let mut slack = usize::MAX;
    for (index, candidate) in candidates.iter().enumerate() {
        if candidate.ready && candidate.cost() <= slack {
            eligible.push(index);
        }
        slack = slack.min(max_overtake.saturating_sub(candidate.overtaken));
        if slack == 0 {
            break;
        }
    }
    let key = |&index: &usize| sort_key(policy, &candidates[index]);
    if eligible.len() > look_ahead {
        eligible.select_nth_unstable_by_key(look_ahead, key);
        eligible.truncate(look_ahead);
    }
    eligible.sort_unstable_by_key(key);
    eligible
}

/// Smaller goes first; arrival breaks ties.
fn sort_key(policy: AdmissionPolicy, candidate: &Candidate) -> (i64, u64) {
    let rank = match policy {
        AdmissionPolicy::Fcfs => 0,
        AdmissionPolicy::LongestPrefix => -(candidate.matched as i64),
        AdmissionPolicy::Cost => candidate.cost() as i64,
        AdmissionPolicy::Priority => -i64::from(candidate.priority),
    };
    (rank, candidate.arrival)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn candidate(arrival: u64, tokens: usize, matched: usize) -> Candidate {
        Candidate { arrival, priority: 0, tokens, matched, overtaken: 0, ready: true }
    }

    fn check(policy: AdmissionPolicy, candidates: &[Candidate], expected: &[usize]) {
        assert_eq!(order(policy, candidates, 1000, 16), expected, "{policy}");
    }

    #[test]
    fn each_policy_orders_by_its_own_rule() {
        let mut candidates = [candidate(0, 100, 0), candidate(1, 300, 280), candidate(2, 50, 10)];
        check(AdmissionPolicy::Fcfs, &candidates, &[0, 1, 2]);
        check(AdmissionPolicy::LongestPrefix, &candidates, &[1, 2, 0]);
        check(AdmissionPolicy::Cost, &candidates, &[1, 2, 0]);
        candidates[2].priority = 5;
        check(AdmissionPolicy::Priority, &candidates, &[2, 0, 1]);
    }

    #[test]
    fn nothing_passes_a_request_at_its_bound() {
        let mut candidates = [candidate(0, 900, 0), candidate(1, 10, 0), candidate(2, 1, 0)];
        candidates[0].overtaken = 995;
        check(AdmissionPolicy::Cost, &candidates, &[2, 0]);
        candidates[0].overtaken = 1000;
        check(AdmissionPolicy::Cost, &candidates, &[0]);
    }

    #[test]
    fn one_that_is_not_ready_is_passed_over_but_keeps_its_bound() {
        let mut candidates = [candidate(0, 900, 0), candidate(1, 10, 0)];
        candidates[0].ready = false;
        check(AdmissionPolicy::Fcfs, &candidates, &[1]);
        candidates[0].overtaken = 1000;
        check(AdmissionPolicy::Fcfs, &candidates, &[]);
    }

    #[test]
    fn look_ahead_keeps_the_best() {
        let candidates: Vec<Candidate> =
            (0..100).map(|n| candidate(n, 101 - n as usize, 0)).collect();
        assert_eq!(order(AdmissionPolicy::Cost, &candidates, 100_000, 3), [99, 98, 97]);
    }

    proptest! {
        /// Goal: whatever arrives and whatever fits, nobody is overtaken by more than the bound,
        /// and everybody is admitted in the end.
        #[test]
        fn the_bound_holds_over_random_arrivals(
            costs in prop::collection::vec(1usize..200, 1..60),
            arrivals_a_round in 1usize..4,
            policy in prop::sample::select(vec![
                AdmissionPolicy::Fcfs, AdmissionPolicy::LongestPrefix,
                AdmissionPolicy::Cost, AdmissionPolicy::Priority,
            ]),
        ) {
            const BOUND: usize = 300;
            let mut waiting: Vec<Candidate> = Vec::new();
            let mut coming = costs.iter().enumerate().map(|(n, &cost)| {
                Candidate { priority: cost as i32 % 7, ..candidate(n as u64, cost, cost / 3) }
            });
            let mut admitted = 0;
            loop {
                waiting.extend(coming.by_ref().take(arrivals_a_round));
                if waiting.is_empty() {
                    break;
                }
                let order = order(policy, &waiting, BOUND, 16);
                prop_assert!(!order.is_empty(), "the earliest is always eligible");
                let chosen = waiting.remove(order[0]);
                for earlier in waiting.iter_mut().filter(|c| c.arrival < chosen.arrival) {
                    earlier.overtaken += chosen.cost();
                    prop_assert!(earlier.overtaken <= BOUND);
                }
                admitted += 1;
            }
            prop_assert_eq!(admitted, costs.len());
        }
    }
}
