//! Pins that can be demoted: what they protect, when they are demoted, and when they are renewed.

use std::collections::HashSet;

use proptest::prelude::*;
use stolon_kvcache::{
    BlockId, EvictionPolicy, Namespace, PinId, PrefixLease, TreeBuilder, TreeReader, TreeWriter,
};

/// A tree with blocks of two positions and demotable pins, and the next block id.
struct Tree {
    writer: TreeWriter,
    reader: TreeReader,
    next: u32,
}

impl Tree {
    fn new(policy: EvictionPolicy) -> Tree {
        let builder = TreeBuilder::new(2).demotable_pins(true).pin_budget(30);
        let (writer, reader) = builder.eviction_policy(policy).build().expect("a block size");
        Tree { writer, reader, next: 0 }
    }

    /// Commits the missing part of a prompt.
    fn commit(&mut self, prompt: &[u32]) -> PrefixLease {
        let mut lease = self.writer.acquire(&base(), prompt);
        let missing = prompt.len() / 2 - lease.len() / 2;
        let blocks: Vec<_> = (self.next..).take(missing).map(BlockId).collect();
        self.next += missing as u32;
        let _ = self.writer.commit(&mut lease, prompt, &blocks).expect("blocks of this prompt");
        lease
    }

    fn pin(&mut self, prompt: &[u32]) -> PinId {
        self.writer.pin(&base(), prompt).expect("cached, and within the budget")
    }

    fn is_demoted(&mut self, pin: PinId) -> bool {
        let pins = self.writer.pins();
        pins.iter().find(|info| info.id == pin).expect("a pin").demoted
    }

    fn matched(&self, prompt: &[u32]) -> usize {
        self.reader.query_match_len(&base(), prompt)
    }
}

fn base() -> Namespace {
    Namespace::default()
}

/// Goal: a pinned prefix is evicted after everything that is not pinned, however old it is, and
/// then its pin is demoted. When the prefix is committed again, the pin protects it again.
#[test]
fn a_pinned_prefix_is_evicted_last_and_protected_again() {
    let mut tree = Tree::new(EvictionPolicy::Lru);
    drop(tree.commit(&[1, 2, 3, 4, 5, 6]));
    let pin = tree.pin(&[1, 2, 3, 4]);
    drop(tree.commit(&[7, 8, 9, 10]));
    let counts = tree.writer.counts();
    assert_eq!((counts.evictable, counts.locked, counts.pinned), (5, 0, 2));
    assert_eq!(tree.writer.evict(3).len(), 3);
    assert_eq!((tree.matched(&[7, 8, 9, 10]), tree.matched(&[1, 2, 3, 4, 5, 6])), (0, 4));
    assert!(!tree.is_demoted(pin));
    assert_eq!(tree.writer.evict(1).len(), 1, "nothing else is left");
    assert!(tree.is_demoted(pin));
    assert_eq!(tree.writer.stats().pins_demoted, 1);
    assert_eq!(tree.writer.counts().pinned, 2, "it counts towards the budget");

    drop(tree.commit(&[1, 2, 3, 4, 5, 6]));
    assert!(!tree.is_demoted(pin));
    drop(tree.commit(&[7, 8]));
    let _ = tree.writer.evict(2);
    assert_eq!((tree.matched(&[7, 8]), tree.matched(&[1, 2, 3, 4])), (0, 4));
    assert!(tree.writer.unpin(pin));
    assert!(!tree.writer.unpin(pin));
    tree.writer.audit().expect("consistent");
    assert_eq!(tree.writer.evict(9).len(), 2, "no longer pinned");
}

/// Goal: a demoted pin can be ended, by its id and by a flush, and is not renewed afterward; its
/// last use is the one before it was demoted.
#[test]
fn a_demoted_pin_can_be_ended() {
    let mut tree = Tree::new(EvictionPolicy::Lru);
    drop(tree.commit(&[1, 2]));
    let pins = [tree.pin(&[1, 2]), tree.pin(&[1, 2])];
    let last_use = tree.writer.pin_last_use(pins[0]);
    let _ = tree.writer.evict(1);
    assert_eq!(tree.writer.stats().pins_demoted, 2);
    assert!(last_use.is_some() && tree.writer.pin_last_use(pins[1]) == last_use);
    assert!(tree.writer.unpin(pins[0]));
    drop(tree.commit(&[1, 2]));
    assert!(!tree.is_demoted(pins[1]) && tree.writer.pin_count() == 1);
    let _ = tree.writer.evict(1);
    let _ = tree.writer.flush();
    assert_eq!((tree.writer.pin_count(), tree.writer.counts().pinned), (0, 0));
    drop(tree.commit(&[1, 2]));
    tree.writer.audit().expect("consistent");
}

/// Goal: an eviction by prefix keeps the same blocks for pins that lock and for pins that do not.
#[test]
fn an_eviction_by_prefix_keeps_what_is_pinned() {
    let mut tree = Tree::new(EvictionPolicy::Lru);
    drop(tree.commit(&[1, 2, 3, 4, 5, 6]));
    let pin = tree.pin(&[1, 2, 3, 4]);
    assert_eq!(tree.writer.evict_prefix(&base(), &[1, 2]).len(), 1);
    assert!(tree.matched(&[1, 2, 3, 4, 5, 6]) == 4 && !tree.is_demoted(pin));
}

/// Goal: a quota evicts no pinned blocks, and evicts them as soon as their pin has ended.
#[test]
fn a_quota_evicts_nothing_that_is_pinned() {
    let mut tree = Tree::new(EvictionPolicy::Lru);
    tree.writer.set_namespace_quota(&base(), Some(1)).expect("a few quotas");
    let lease = tree.commit(&[1, 2, 3, 4]);
    let pin = tree.pin(&[1, 2, 3, 4]);
    drop(lease);
    drop(tree.commit(&[5, 6]));
    tree.writer.audit().expect("consistent");
    assert_eq!((tree.matched(&[1, 2, 3, 4]), tree.matched(&[5, 6])), (4, 0));
    assert!(!tree.is_demoted(pin) && tree.writer.unpin(pin));
    tree.writer.audit().expect("consistent");
    assert_eq!(tree.matched(&[1, 2, 3, 4]), 2, "one block is the quota");
}

#[derive(Clone, Debug)]
enum Op {
    Commit(Vec<u32>, bool),
    Pin(Vec<u32>),
    Unpin(usize),
    Evict(usize),
    EvictPrefix(Vec<u32>),
    Release,
    Flush,
}

fn op() -> impl Strategy<Value = Op> {
    let prompt = || proptest::collection::vec(0..2_u32, 0..14);
    prop_oneof![
        8 => (prompt(), any::<bool>()).prop_map(|(prompt, held)| Op::Commit(prompt, held)),
        4 => prompt().prop_map(Op::Pin),
        1 => (0..9_usize).prop_map(Op::Unpin),
        4 => (1..5_usize).prop_map(Op::Evict),
        1 => prompt().prop_map(Op::EvictPrefix),
        1 => Just(Op::Release),
        1 => Just(Op::Flush),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, ..ProptestConfig::default() })]

    /// Goal: after any operations, a pin is demoted exactly if its prefix is not cached completely,
    /// and an eviction takes pinned blocks only if no others are left.
    #[test]
    fn pins_are_demoted_exactly_if_their_prefix_is_not_cached(
        policy in proptest::sample::select(&EvictionPolicy::ALL[..]),
        ops in proptest::collection::vec(op(), 1..60),
    ) {
        let mut tree = Tree::new(policy);
        let (mut pins, mut leases) = (Vec::<(PinId, Vec<u32>)>::new(), Vec::new());
        for op in ops {
            match op {
                Op::Commit(prompt, held) => {
                    let lease = tree.commit(&prompt);
                    leases.extend(Some(lease).filter(|_| held));
                }
                Op::Pin(prompt) => {
                    let Ok(id) = tree.writer.pin(&base(), &prompt) else { continue };
                    let len = tree.writer.pins().last().expect("a pin").position_count;
                    pins.push((id, prompt[..len].to_vec()));
                }
                Op::Unpin(index) if index < pins.len() => {
                    prop_assert!(tree.writer.unpin(pins.remove(index).0));
                }
                Op::Unpin(_) => {}
                Op::Evict(count) => {
                    let before = tree.writer.stats().pins_demoted;
                    let evicted = tree.writer.evict(count).len();
                    let counts = tree.writer.counts();
                    prop_assert!(evicted == count || counts.evictable == 0);
                    if tree.writer.stats().pins_demoted > before {
                        let cached = pins.iter().flat_map(|(_, prompt)| {
                            let len = tree.matched(prompt);
                            (2..=len).step_by(2).map(|len| &prompt[..len])
                        });
                        let of_pins = cached.collect::<HashSet<_>>().len();
                        prop_assert!(counts.evictable <= of_pins, "nothing else is left");
                    }
                }
                Op::EvictPrefix(prompt) => drop(tree.writer.evict_prefix(&base(), &prompt)),
                Op::Release => leases.clear(),
                Op::Flush => {
                    let _ = tree.writer.flush();
                    pins.clear();
                }
            }
            tree.writer.audit().expect("consistent");
            for (id, prompt) in &pins {
                prop_assert_eq!(tree.is_demoted(*id), tree.matched(prompt) < prompt.len());
            }
        }
    }
}
