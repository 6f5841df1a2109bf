//! Marks: prefixes that a client expects to use again, and which marks give way to others.
//!
//! A mark protects the cached prefix of a prompt from eviction, as a pin does, but only as long as
//! anything else can be evicted. So it takes no block from a running request and is never refused: the
//! part of it that exceeds the budget is not protected. Clients share the budget fairly,
//! because a mark gives way only to marks of a client that would still have fewer blocks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use stolon_kvcache::PinId;

/// A part of a request's prompt that is expected to be used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixMark {
    /// Number of leading tokens of the prompt.
    pub len: usize,
    /// How long the prefix is protected after its last use, at most [`PrefixMark::MAX_TTL`].
    pub ttl: Duration,
}

impl PrefixMark {
    /// The longest time to live. Longer ones are cut.
    pub const MAX_TTL: Duration = Duration::from_secs(24 * 3600);
    /// Maximum number of marks of one request. Further ones have no effect.
    pub const MAX_OF_REQUEST: usize = 4;
}

/// A mark that exists.
#[derive(Clone, Debug)]
pub struct HeldMark {
    /// Its pin.
    pub id: PinId,
    /// The tenant that has made it.
    pub tenant: Option<Arc<str>>,
    /// Number of blocks that it protects.
    pub blocks: usize,
    /// When it ends, unless it is used.
    pub end: Instant,
}

/// What a new mark may have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MarkRoom {
    /// The marks that end for it.
    pub ended: Vec<PinId>,
    /// Maximum number of blocks that it may protect.
    pub blocks: usize,
}

impl MarkRoom {
    /// Maximum number of marks of all tenants.
    pub const MARKS: usize = 128;

    /// Makes room for a mark of `tenant` that wants `blocks` blocks, next to marks that together may
    /// protect `budget` blocks. While there is no room, a mark of the tenant ends that has most
    /// blocks (or marks, if there are too many of them), with the new one counted: the one that
    /// would end first. If that is `tenant` itself and it has no other mark, the new one gets what
    /// is left.
    pub fn make(
        mut held: Vec<HeldMark>,
        tenant: &Option<Arc<str>>,
        blocks: usize,
        budget: usize,
    ) -> MarkRoom {
        let blocks = blocks.min(budget);
        let mut ended = Vec::new();
        loop {
            let used: usize = held.iter().map(|mark| mark.blocks).sum();
            let is_too_many = held.len() >= Self::MARKS;
            if !is_too_many && used + blocks <= budget {
                return MarkRoom { ended, blocks };
            }
            // How much a tenant has, with the new mark.
            let has = |other: &Option<Arc<str>>| {
                let own = held.iter().filter(|mark| mark.tenant == *other);
                let own: usize = own.map(|mark| if is_too_many { 1 } else { mark.blocks }).sum();
                match (other == tenant, is_too_many) {
                    (false, _) => own,
                    (true, true) => own + 1,
                    (true, false) => own + blocks,
                }
            };
            let richest = held.iter().map(|mark| &mark.tenant).max_by_key(|other| has(other));
            // Among equals, the new mark gives way.
            let gives = match richest {
                Some(richest) if has(richest) > has(tenant) => richest.clone(),
                _ => tenant.clone(),
            };
            let own = held.iter().enumerate().filter(|(_, mark)| mark.tenant == gives);
            let Some((index, _)) = own.min_by_key(|(_, mark)| mark.end) else {
                let left = if is_too_many { 0 } else { budget - used.min(budget) };
                return MarkRoom { ended, blocks: left.min(blocks) };
            };
            ended.push(held.swap_remove(index).id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Marks of these tenants with these numbers of blocks, which end one after another.
    fn held(of: &[(&str, usize)]) -> Vec<HeldMark> {
        let now = Instant::now();
        let mark = |(index, &(tenant, blocks)): (usize, &(&str, usize))| HeldMark {
            id: PinId(index as u64),
            tenant: Some(tenant.into()),
            blocks,
            end: now + Duration::from_secs(index as u64),
        };
        of.iter().enumerate().map(mark).collect()
    }

    fn room(of: &[(&str, usize)], tenant: &str, blocks: usize) -> (Vec<u64>, usize) {
        let room = MarkRoom::make(held(of), &Some(tenant.into()), blocks, 10);
        (room.ended.iter().map(|id| id.0).collect(), room.blocks)
    }

    /// Goal: a tenant may have the whole budget as long as no other wants a part of it, and its
    /// oldest marks give way to its new ones.
    #[test]
    fn a_tenant_may_have_everything() {
        assert_eq!(room(&[], "a", 7), (vec![], 7));
        assert_eq!(room(&[], "a", 70), (vec![], 10));
        assert_eq!(room(&[("a", 4), ("a", 5)], "a", 1), (vec![], 1));
        assert_eq!(room(&[("a", 4), ("a", 5)], "a", 3), (vec![0], 3));
        assert_eq!(room(&[("a", 4), ("a", 5)], "a", 9), (vec![0, 1], 9));
    }

    /// Goal: a tenant takes blocks only from one that has more than itself.
    #[test]
    fn tenants_share_the_budget() {
        assert_eq!(room(&[("a", 4), ("a", 6)], "b", 3), (vec![0], 3));
        assert_eq!(room(&[("a", 5), ("b", 5)], "b", 1), (vec![1], 1));
        assert_eq!(room(&[("a", 5), ("b", 3), ("b", 2)], "c", 5), (vec![], 0));
        assert_eq!(room(&[("a", 6), ("b", 3)], "c", 4), (vec![0], 4));
        assert_eq!(room(&[("a", 8)], "c", 9), (vec![], 2), "it would have more");
    }

    /// Goal: however many marks a tenant makes, and however small they are, others get theirs.
    #[test]
    fn the_number_of_marks_is_bounded() {
        let many = vec![("a", 0); MarkRoom::MARKS];
        assert_eq!(room(&many, "a", 1), (vec![0], 1));
        assert_eq!(room(&many, "b", 9), (vec![0], 9));
        let tenants: Vec<String> = (0..MarkRoom::MARKS).map(|index| index.to_string()).collect();
        let of: Vec<_> = tenants.iter().map(|tenant| (tenant.as_str(), 0)).collect();
        assert_eq!(room(&of, "new", 1), (vec![], 0), "all have as many");
    }
}
