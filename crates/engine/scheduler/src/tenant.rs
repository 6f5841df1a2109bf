//! Tenants: whose requests share the running slots and the tokens of a step fairly.
//!
//! While every slot for a running request is taken, each tenant that has requests is entitled to an
//! equal share of them. Requests of tenants below their share are admitted first, and if need be
//! the youngest request of the tenant with the most slots is preempted for one of them.
//!
//! A step that has begun cannot be shortened for a tenant that sends a request during it. So while
//! several tenants send requests, even a step for one of them alone is short ([`RecentTenants`]).

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, Instant};

/// The tenant of a request: a hash of its name. Two names with the same hash are treated as one
/// tenant, which affects nothing but their shares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct TenantId(u64);

impl TenantId {
    /// The tenant of this name; requests without a name are of one tenant.
    pub(crate) fn new(name: Option<&str>) -> TenantId {
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        TenantId(hasher.finish())
    }
}

/// The share of the running slots of each tenant at one moment.
#[derive(Clone, Debug)]
pub(crate) struct SlotShares {
    /// Number of running requests of each tenant that has running or waiting requests, in the order
    /// of the tenants.
    running: Vec<(TenantId, usize)>,
    /// Number of slots that each of them is entitled to, at least 1.
    share: usize,
}

impl SlotShares {
    /// The shares of `slots` slots. `running` and `waiting` yield the tenant of each request.
    pub(crate) fn new(
        slots: usize,
        running: impl Iterator<Item = TenantId>,
        waiting: impl Iterator<Item = TenantId>,
    ) -> SlotShares {
        let running = running.map(|tenant| (tenant, 1));
        let waiting = waiting.map(|tenant| (tenant, 0));
        let mut counts: Vec<(TenantId, usize)> = running.chain(waiting).collect();
        counts.sort_unstable();
        counts.dedup_by(|next, kept| {
            let is_same = next.0 == kept.0;
            kept.1 += if is_same { next.1 } else { 0 };
            is_same
        });
        let share = (slots / counts.len().max(1)).max(1);
        SlotShares { running: counts, share }
    }

    /// Number of running requests of a tenant.
    pub(crate) fn running(&self, tenant: TenantId) -> usize {
        let found = self.running.binary_search_by_key(&tenant, |&(tenant, _)| tenant);
        found.map_or(0, |index| self.running[index].1)
    }

    /// Whether one more running request would exceed the tenant's share.
    pub(crate) fn is_reached(&self, tenant: TenantId) -> bool {
        self.running(tenant) >= self.share
    }

    /// Whether the tenant has more running requests than its share.
    pub(crate) fn is_exceeded(&self, tenant: TenantId) -> bool {
        self.running(tenant) > self.share
    }
}

/// The two tenants that had requests last.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RecentTenants {
    /// The last one, and when it had a request.
    last: Option<(TenantId, Instant)>,
    /// Another one, and when it had a request.
    other: Option<(TenantId, Instant)>,
}

impl RecentTenants {
    /// How long a tenant without requests is expected to send another one. Long enough for somebody
    /// who reads an answer and asks again.
    pub(crate) const REMEMBERED: Duration = Duration::from_secs(30);

    /// A tenant has a request now.
    pub(crate) fn note(&mut self, tenant: TenantId, now: Instant) {
        if self.last.is_some_and(|(last, _)| last != tenant) {
            self.other = self.last;
        }
        self.last = Some((tenant, now));
    }

    /// Whether several tenants had requests recently.
    pub(crate) fn are_several(&self, now: Instant) -> bool {
        let is_recent = |&(_, seen): &(TenantId, Instant)| {
            now.saturating_duration_since(seen) < RecentTenants::REMEMBERED
        };
        self.other.as_ref().is_some_and(is_recent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_shared_equally_among_tenants_with_requests() {
        let [a, b] = ["a", "b"].map(|name| TenantId::new(Some(name)));
        let none = TenantId::new(None);
        let alone = SlotShares::new(4, [a; 4].into_iter(), [a].into_iter());
        assert!(alone.is_reached(a) && !alone.is_exceeded(a));
        let shared = SlotShares::new(4, [a; 4].into_iter(), [b].into_iter());
        assert!(shared.is_exceeded(a) && !shared.is_reached(b));
        // More tenants than slots: each is entitled to one.
        let crowded = SlotShares::new(2, [a, a].into_iter(), [b, none].into_iter());
        assert!(crowded.is_exceeded(a) && !crowded.is_reached(b) && !crowded.is_reached(none));
        assert!(SlotShares::new(2, [a, b].into_iter(), [none].into_iter()).is_reached(a));
    }

    /// Goal: two tenants count as several as long as both have had requests recently, in any order.
    #[test]
    fn a_tenant_is_remembered_for_some_time() {
        let [a, b] = ["a", "b"].map(|name| TenantId::new(Some(name)));
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let mut recent = RecentTenants::default();
        assert!(!recent.are_several(begun));
        recent.note(a, begun);
        recent.note(a, at(1));
        assert!(!recent.are_several(at(1)));
        recent.note(b, at(2));
        recent.note(a, at(3));
        assert!(recent.are_several(at(3)));
        recent.note(a, at(31));
        assert!(recent.are_several(at(31)) && !recent.are_several(at(32)));
        recent.note(b, at(40));
        assert!(recent.are_several(at(40)) && !recent.are_several(at(61)));
    }
}
