//! The admission policies: which waiting requests to try to admit, and in which order.
//!
//! Every policy keeps the bound on overtaking, at any queue depth. A request is eligible only if
//! its cost is at most the remaining overtaking budget (`slack`) of every earlier request. The
//! earliest request is always eligible, so once its budget is used up, no later request is admitted
//! before it. The policy `cost` also ages requests: the more a request has been overtaken, the
//! cheaper it counts.
//!
//! Between tenants, the shares of the running slots decide (`tenant.rs`): requests of tenants below
//! their share come first, and do not count as overtaking those of tenants that have theirs.

use std::collections::HashMap;

use crate::config::AdmissionPolicy;
use crate::quota::QuotaId;
use crate::tenant::TenantId;

/// The place of a request among those that wait and run. A preempted request keeps it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// Order of arrival; unique.
    pub(crate) arrival: u64,
    /// Total cost, in tokens, of later requests that were admitted before it.
    pub(crate) overtaken: usize,
    /// Maximum value of `overtaken`.
    pub(crate) bound: usize,
}

impl Place {
    /// The place of a new request. Its bound on overtaking is `max_overtake` tokens plus the number
    /// of tokens that wait when it arrives, or 0 if `max_overtake` is 0.
    pub(crate) fn new(arrival: u64, waiting_tokens: usize, max_overtake: usize) -> Place {
        let bound = match max_overtake {
            0 => 0,
            more => waiting_tokens.saturating_add(more),
        };
        Place { arrival, overtaken: 0, bound }
    }

    /// The remaining overtaking budget: the total cost, in tokens, of later requests that may still
    /// be admitted before this one.
    pub(crate) fn slack(&self) -> usize {
        self.bound.saturating_sub(self.overtaken)
    }

    /// A later request with this cost is admitted before this one.
    pub(crate) fn overtake(&mut self, cost: usize) {
        self.overtaken = self.overtaken.saturating_add(cost);
    }
}

/// What a policy needs to know about a waiting request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Candidate {
    /// Order of arrival; unique.
    pub(crate) arrival: u64,
    /// The request's priority. Larger values come first under every policy.
    pub(crate) class: i32,
    /// The tenant that it belongs to.
    pub(crate) tenant: TenantId,
    /// Its tenant has its share of the running slots.
    pub(crate) has_share: bool,
    /// Number of tokens of the prompt, of the part of the answer that was generated before a
    /// preemption, and the cost of encoding its images as a number of tokens to compute.
    pub(crate) tokens: usize,
    /// Number of these tokens that do not have to be computed, because they were cached at the last
    /// query or can be loaded.
    pub(crate) matched: usize,
    /// Number of waiting and running requests, including this one, whose tokens begin with the same
    /// block.
    pub(crate) prefix_sharers: usize,
    /// Remaining overtaking budget: the total cost, in tokens, of later requests that may still be
    /// admitted before this one.
    pub(crate) slack: usize,
    /// The initial value of `slack`, on arrival.
    pub(crate) bound: usize,
    /// The quota that it is charged to.
    pub(crate) quota: Option<QuotaId>,
    /// The running requests of its quota leave no room for it. Such a request limits only the
    /// others of its quota by its bound on overtaking.
    pub(crate) held: bool,
    /// False while it waits for the blocks of a leader or for stored KV, is held, or is stalled by a
    /// slow consumer.
    pub(crate) ready: bool,
    /// It is stalled by a slow consumer. Such a request does not count toward the bound on
    /// overtaking.
    pub(crate) stalled: bool,
}

impl Candidate {
    /// Number of tokens to compute before the next one can be sampled, at least 1.
    pub(crate) fn cost(&self) -> usize {
        self.tokens.saturating_sub(self.matched).max(1)
    }

    /// Whether its bound on overtaking counts for a later candidate, as in [`slacks`].
    pub(crate) fn binds(&self, later: &Candidate) -> bool {
        let is_held = self.held && self.quota != later.quota;
        let yields = self.has_share && !later.has_share;
        !self.stalled && !is_held && !yields
    }

    /// The cost for the policy `cost`: the cost times the square of the share of the overtaking
    /// budget that is left. The request ages slowly while much of the budget is left, and comes
    /// before nearly all others when little is left.
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

/// The smallest slack of the candidates noted so far.
#[derive(Clone, Copy)]
struct SmallestSlack {
    /// The smallest slack of the candidates whose tenants are below their share.
    below_share: usize,
    all: usize,
}

impl SmallestSlack {
    const NONE: SmallestSlack = SmallestSlack { below_share: usize::MAX, all: usize::MAX };

    fn note(&mut self, candidate: &Candidate) {
        self.all = self.all.min(candidate.slack);
        if !candidate.has_share {
            self.below_share = self.below_share.min(candidate.slack);
        }
    }

    fn limits(&self, candidate: &Candidate) -> usize {
        if candidate.has_share { self.all } else { self.below_share }
    }
}

/// The maximum cost at which each candidate may be admitted now: the smallest slack of all earlier
/// candidates that are neither stalled nor held by another quota than its own. For a candidate
/// whose tenant is below its share, only those of tenants below their share count. The iterator
/// ends where the maximum is 0 for all later candidates.
pub(crate) fn slacks(candidates: &[Candidate]) -> impl Iterator<Item = usize> + '_ {
    let mut open = SmallestSlack::NONE;
    let mut held: HashMap<QuotaId, SmallestSlack> = HashMap::new();
    candidates.iter().map_while(move |candidate| {
        // `open.all` is at most as large.
        if open.below_share == 0 {
            return None;
        }
        let of_quota = candidate.quota.and_then(|quota| held.get(&quota));
        let of_quota = of_quota.map_or(usize::MAX, |slack| slack.limits(candidate));
        let before = open.limits(candidate).min(of_quota);
        match candidate.quota {
            _ if candidate.stalled => {}
            Some(quota) if candidate.held => {
                held.entry(quota).or_insert(SmallestSlack::NONE).note(candidate);
            }
            _ => open.note(candidate),
        }
        Some(before)
    })
}

/// The order of candidates under a policy. The smallest key comes first.
pub(crate) type SortKey = (bool, i64, i64, i64, i64, u64);

/// The key of a candidate. Under every policy, requests of tenants below their share come first,
/// then those of the largest class, then the policy's own rule applies. Under the policies that do
/// not promise a strict order, candidates of similar cost are ordered by `prefix_sharers`, so that
/// requests which share a prefix run at the same time and hold its blocks once. Arrival breaks
/// ties.
pub(crate) fn sort_key(policy: AdmissionPolicy, candidate: &Candidate) -> SortKey {
    let prefix_sharers = -(candidate.prefix_sharers as i64);
    let (first, second, third) = match policy {
        AdmissionPolicy::Fcfs => (0, 0, 0),
        AdmissionPolicy::LongestPrefix => (-(candidate.matched as i64), prefix_sharers, 0),
        // Costs with the same integer logarithm to base 2 count as similar.
        AdmissionPolicy::Cost => {
            let cost = candidate.aged_cost();
            (i64::from(cost.ilog2()), prefix_sharers, cost as i64)
        }
    };
    (candidate.has_share, -i64::from(candidate.class), first, second, third, candidate.arrival)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn candidate(arrival: u64, tokens: usize, matched: usize) -> Candidate {
        Candidate {
            arrival,
            class: 0,
            tenant: TenantId::default(),
            has_share: false,
            tokens,
            matched,
            prefix_sharers: 1,
            slack: 1000,
            bound: 1000,
            quota: None,
            held: false,
            ready: true,
            stalled: false,
        }
    }

    fn check(policy: AdmissionPolicy, candidates: &[Candidate], expected: &[usize]) {
        assert_eq!(order(policy, candidates, 16), expected, "{policy}");
    }

    #[test]
    fn each_policy_orders_by_its_own_rule() {
        let candidates = [candidate(0, 100, 0), candidate(1, 300, 280), candidate(2, 50, 10)];
        check(AdmissionPolicy::Fcfs, &candidates, &[0, 1, 2]);
        check(AdmissionPolicy::LongestPrefix, &candidates, &[1, 2, 0]);
        check(AdmissionPolicy::Cost, &candidates, &[1, 2, 0]);
    }

    /// Goal: under every policy a larger class comes first and the policy orders within a class,
    /// but a request without slack is not overtaken by a larger class either.
    #[test]
    fn classes_come_before_the_rule_of_the_policy() {
        let mut candidates = [candidate(0, 10, 0), candidate(1, 300, 0), candidate(2, 200, 0)];
        (candidates[1].class, candidates[2].class) = (5, 5);
        for (policy, expected) in [
            (AdmissionPolicy::Fcfs, [1, 2, 0]),
            (AdmissionPolicy::LongestPrefix, [1, 2, 0]),
            (AdmissionPolicy::Cost, [2, 1, 0]),
        ] {
            check(policy, &candidates, &expected);
            candidates[0].slack = 0;
            check(policy, &candidates, &[0]);
            candidates[0].slack = 1000;
        }
    }

    #[test]
    fn of_similar_cost_the_request_with_more_prefix_sharers_comes_first() {
        let mut candidates = [candidate(0, 70, 0), candidate(1, 100, 0), candidate(2, 40, 0)];
        candidates[1].prefix_sharers = 3;
        check(AdmissionPolicy::Cost, &candidates, &[2, 1, 0]);
        check(AdmissionPolicy::LongestPrefix, &candidates, &[1, 0, 2]);
        check(AdmissionPolicy::Fcfs, &candidates, &[0, 1, 2]);
    }

    #[test]
    fn a_request_without_slack_is_not_overtaken() {
        let mut candidates = [candidate(0, 900, 0), candidate(1, 10, 0), candidate(2, 1, 0)];
        candidates[0].slack = 5;
        check(AdmissionPolicy::LongestPrefix, &candidates, &[0, 2]);
        candidates[0].slack = 0;
        check(AdmissionPolicy::LongestPrefix, &candidates, &[0]);
        check(AdmissionPolicy::Cost, &candidates, &[0]);
    }

    #[test]
    fn a_request_ages_as_it_is_overtaken() {
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
        // It may not be overtaken at all, so its cost makes no difference.
        (candidates[0].slack, candidates[0].bound) = (0, 0);
        check(AdmissionPolicy::Cost, &candidates, &[0]);
    }

    #[test]
    fn a_request_that_is_not_ready_is_skipped_but_keeps_its_bound() {
        let mut candidates = [candidate(0, 900, 0), candidate(1, 10, 0)];
        candidates[0].ready = false;
        check(AdmissionPolicy::Fcfs, &candidates, &[1]);
        candidates[0].slack = 0;
        check(AdmissionPolicy::Fcfs, &candidates, &[]);
    }

    #[test]
    fn a_stalled_request_does_not_limit_others() {
        let mut candidates = [candidate(0, 10, 0), candidate(1, 5000, 0)];
        check(AdmissionPolicy::Cost, &candidates, &[0]);
        (candidates[0].ready, candidates[0].stalled) = (false, true);
        check(AdmissionPolicy::Cost, &candidates, &[1]);
    }

    #[test]
    fn look_ahead_keeps_the_best_candidates() {
        let candidates: Vec<Candidate> =
            (0..100).map(|n| candidate(n, 101 - n as usize, 0)).collect();
        assert_eq!(order(AdmissionPolicy::Cost, &candidates, 3), [99, 98, 97]);
    }

    proptest! {
        /// Goal: under random arrivals no request is overtaken by more than its bound, and every
        /// request is admitted in the end.
        #[test]
        fn the_bound_holds_over_random_arrivals(
            costs in prop::collection::vec(1usize..200, 1..60),
            arrivals_per_round in 1usize..4,
            policy in prop::sample::select(vec![
                AdmissionPolicy::Fcfs, AdmissionPolicy::LongestPrefix, AdmissionPolicy::Cost,
            ]),
        ) {
            const BOUND: usize = 300;
            let mut waiting: Vec<Candidate> = Vec::new();
            let mut arriving = costs.iter().enumerate().map(|(n, &cost)| {
                let candidate = candidate(n as u64, cost, cost / 3);
                Candidate { class: cost as i32 % 7, slack: BOUND, bound: BOUND, ..candidate }
            });
            let mut admitted = 0;
            loop {
                waiting.extend(arriving.by_ref().take(arrivals_per_round));
                if waiting.is_empty() {
                    break;
                }
                let order = order(policy, &waiting, 16);
                prop_assert!(!order.is_empty(), "the earliest request is always eligible");
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
