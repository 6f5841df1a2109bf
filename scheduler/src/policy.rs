//! Which waiting requests to try, in which order: a pure function of what is known of them.
//!
//! The bound on overtaking is strict and holds at any queue depth: a request is eligible only
//! if admitting it pushes no earlier one past the bound. The earliest is always eligible, so
//! once it has been overtaken to the bound, nothing passes it. Under order by cost each also ages on
//! its way there: what has passed it makes it cheaper than it is.

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
    /// Requests, waiting or running, that begin with the same block, itself included.
    pub(crate) sharers: usize,
    /// What later requests may still cost that are admitted before this one.
    pub(crate) slack: usize,
    /// What `slack` was when it came.
    pub(crate) bound: usize,
    /// False while it waits for something else: a leader's blocks, its own slow reader.
    pub(crate) ready: bool,
    /// Its own slow reader keeps it waiting: it has no claim on the others' turns.
    pub(crate) stalled: bool,
}

impl Candidate {
    /// Tokens that must be computed; at least 1.
    pub(crate) fn cost(&self) -> usize {
        self.tokens.saturating_sub(self.matched).max(1)
    }

    /// The cost that decides its turn: less by the square of the share of its bound that is left,
    /// so that it ages slowly while it can wait, and goes before nearly all when it cannot.
    fn aged_cost(&self) -> usize {
        let left = |cost: u128| cost * self.slack as u128 / (self.bound as u128).max(1);
        (left(left(self.cost() as u128)) as usize).max(1)
    }
}

/// Indices of at most `look_ahead` candidates to try, best first. `candidates` are in order of
/// arrival.
pub(crate) fn order(
    policy: AdmissionPolicy,
    candidates: &[Candidate],
    look_ahead: usize,
) -> Vec<usize> {
    debug_assert!(candidates.is_sorted_by_key(|candidate| candidate.arrival));
    let mut eligible = Vec::with_capacity(candidates.len());
    for (index, slack) in slacks(candidates).enumerate() {
        let candidate = &candidates[index];
        if candidate.ready && candidate.cost() <= slack {
            eligible.push(index);
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

/// What each candidate may cost without pushing an earlier one past the bound: the least that
/// any of those may still be overtaken by. Ends where it is 0.
pub(crate) fn slacks(candidates: &[Candidate]) -> impl Iterator<Item = usize> + '_ {
    let mut slack = usize::MAX;
    let before_each = candidates.iter().map(move |candidate| {
        let before = slack;
        if !candidate.stalled {
            slack = slack.min(candidate.slack);
        }
        before
    });
    before_each.take_while(|&slack| slack > 0)
}

/// What decides between two candidates: smaller goes first.
pub(crate) type SortKey = (i64, i64, i64, u64);

/// The key of a candidate. Where it costs no fairness, those of about equal cost go by sharers,
/// so that requests which share a prefix run at the same time and hold its blocks once. Arrival
/// breaks ties.
pub(crate) fn sort_key(policy: AdmissionPolicy, candidate: &Candidate) -> SortKey {
    let sharers = -(candidate.sharers as i64);
    let (first, second, third) = match policy {
        AdmissionPolicy::Fcfs => (0, 0, 0),
        AdmissionPolicy::LongestPrefix => (-(candidate.matched as i64), sharers, 0),
        // Costs within the same power of two are about equal.
        AdmissionPolicy::Cost => {
            let cost = candidate.aged_cost();
            (i64::from(cost.ilog2()), sharers, cost as i64)
        }
        AdmissionPolicy::Priority => (-i64::from(candidate.priority), 0, 0),
    };
    (first, second, third, candidate.arrival)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn candidate(arrival: u64, tokens: usize, matched: usize) -> Candidate {
        Candidate {
            arrival,
            priority: 0,
            tokens,
            matched,
            sharers: 1,
            slack: 1000,
            bound: 1000,
            ready: true,
            stalled: false,
        }
    }

    fn check(policy: AdmissionPolicy, candidates: &[Candidate], expected: &[usize]) {
        assert_eq!(order(policy, candidates, 16), expected, "{policy}");
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
    fn of_about_equal_cost_those_with_more_sharers_go_first() {
        let mut candidates = [candidate(0, 70, 0), candidate(1, 100, 0), candidate(2, 40, 0)];
        candidates[1].sharers = 3;
        check(AdmissionPolicy::Cost, &candidates, &[2, 1, 0]);
        check(AdmissionPolicy::LongestPrefix, &candidates, &[1, 0, 2]);
        check(AdmissionPolicy::Fcfs, &candidates, &[0, 1, 2]);
        check(AdmissionPolicy::Priority, &candidates, &[0, 1, 2]);
    }

    #[test]
    fn nothing_passes_a_request_at_its_bound() {
        let mut candidates = [candidate(0, 900, 0), candidate(1, 10, 0), candidate(2, 1, 0)];
        candidates[0].slack = 5;
        check(AdmissionPolicy::LongestPrefix, &candidates, &[0, 2]);
        candidates[0].slack = 0;
        check(AdmissionPolicy::LongestPrefix, &candidates, &[0]);
        check(AdmissionPolicy::Cost, &candidates, &[0]);
    }

    #[test]
    fn a_request_ages_by_what_passes_it() {
        let mut candidates = [candidate(0, 800, 0), candidate(1, 240, 0), candidate(2, 30, 0)];
        check(AdmissionPolicy::Cost, &candidates, &[2, 1, 0]);
        for (slack, expected) in [(700, [2, 1, 0]), (500, [2, 0, 1]), (180, [0, 2, 1])] {
            candidates[0].slack = slack;
            let aged = candidates[0].aged_cost();
            assert_eq!(aged, 800 * slack / 1000 * slack / 1000, "slack {slack}");
            if slack >= 240 {
                check(AdmissionPolicy::Cost, &candidates, &expected);
            } else {
                check(AdmissionPolicy::Cost, &candidates, &expected[..2]);
            }
        }
        // Nothing may pass it: its cost is of no account.
        (candidates[0].slack, candidates[0].bound) = (0, 0);
        check(AdmissionPolicy::Cost, &candidates, &[0]);
    }

    #[test]
    fn one_that_is_not_ready_is_passed_over_but_keeps_its_bound() {
        let mut candidates = [candidate(0, 900, 0), candidate(1, 10, 0)];
        candidates[0].ready = false;
        check(AdmissionPolicy::Fcfs, &candidates, &[1]);
        candidates[0].slack = 0;
        check(AdmissionPolicy::Fcfs, &candidates, &[]);
    }

    #[test]
    fn one_that_its_reader_holds_back_holds_nobody_back() {
        let mut candidates = [candidate(0, 10, 0), candidate(1, 5000, 0)];
        check(AdmissionPolicy::Cost, &candidates, &[0]);
        (candidates[0].ready, candidates[0].stalled) = (false, true);
        check(AdmissionPolicy::Cost, &candidates, &[1]);
    }

    #[test]
    fn look_ahead_keeps_the_best() {
        let candidates: Vec<Candidate> =
            (0..100).map(|n| candidate(n, 101 - n as usize, 0)).collect();
        assert_eq!(order(AdmissionPolicy::Cost, &candidates, 3), [99, 98, 97]);
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
                let candidate = candidate(n as u64, cost, cost / 3);
                Candidate { priority: cost as i32 % 7, slack: BOUND, bound: BOUND, ..candidate }
            });
            let mut admitted = 0;
            loop {
                waiting.extend(coming.by_ref().take(arrivals_a_round));
                if waiting.is_empty() {
                    break;
                }
                let order = order(policy, &waiting, 16);
                prop_assert!(!order.is_empty(), "the earliest is always eligible");
                let chosen = waiting.remove(order[0]);
                for earlier in waiting.iter_mut().filter(|c| c.arrival < chosen.arrival) {
                    prop_assert!(chosen.cost() <= earlier.slack);
                    earlier.slack -= chosen.cost();
                }
                admitted += 1;
            }
            prop_assert_eq!(admitted, costs.len());
        }
    }
}
