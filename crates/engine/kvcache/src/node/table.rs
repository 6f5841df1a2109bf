//! The table of a node's children. A small table is replaced as a whole when a child is added or
//! removed. A wide table is an open-addressed hash table that is changed in place. In both, a child
//! that is split, merged or trimmed is replaced in its slot.
//!
//! A slot's key is written before its child pointer. Clearing a slot leaves the key as a tombstone,
//! which a later insertion may reuse. No child moves within a table, so a reader that probes
//! concurrently can miss a child only if the child was absent at some instant of the probe.

use super::Node;
use crate::reclaim::Retired;
use crate::sync::{AtomicPtr, AtomicU64, Ordering, Witness, publish_order};
use std::ptr::{self, NonNull};

/// The largest number of children in a small table.
#[cfg(not(loom))]
pub(crate) const SMALL_MAX: usize = 8;
/// The smallest possible value, so that the models reach wide tables within few steps.
#[cfg(loom)]
pub(crate) const SMALL_MAX: usize = 1;

/// A table of children. The key of a child is the hash of the first block of its edge.
#[derive(Debug)]
pub(crate) struct ChildTable {
    slots: Box<[Slot]>,
    /// Number of slots of a wide table that were ever used. Accessed by the writer only.
    used: std::sync::atomic::AtomicU32,
    pub(super) witness: Witness,
}

impl Retired for ChildTable {
    #[cfg(loom)]
    fn mark_freed(&self) {
        self.witness.free();
    }
}

#[derive(Debug)]
struct Slot {
    /// 0 if the slot was never used, which ends a probe. Stored with Release, before `node`.
    key: AtomicU64,
    /// Null if the slot is a tombstone. Stored with Release and loaded with Acquire, so that a
    /// reader that sees a child sees all of it.
    node: AtomicPtr<Node>,
}

impl Slot {
    fn new(key: u64, node: *mut Node) -> Slot {
        Slot { key: AtomicU64::new(key), node: AtomicPtr::new(node) }
    }
}

impl ChildTable {
    /// Creates a table of `children`. A wide table has room for as many again.
    pub(crate) fn new(children: &[(u64, *mut Node)]) -> ChildTable {
        if children.len() <= SMALL_MAX {
            return ChildTable::of(children.iter().map(|&(key, node)| Slot::new(key, node)));
        }
        let capacity = (children.len() * 2).next_power_of_two();
        let table = ChildTable::of((0..capacity).map(|_| Slot::new(0, ptr::null_mut())));
        for &(key, node) in children {
            table.insert(key, node);
        }
        table
    }

    fn of(slots: impl Iterator<Item = Slot>) -> ChildTable {
        let used = std::sync::atomic::AtomicU32::new(0);
        ChildTable { slots: slots.collect(), used, witness: Witness::new() }
    }

    /// Whether a child can be inserted in place: the table is wide, and afterward at least a
    /// quarter of the slots was never used, so that probes end soon. Called by the writer only.
    pub(crate) fn has_room(&self) -> bool {
        let used = self.used.load(std::sync::atomic::Ordering::Relaxed) as usize;
        self.is_wide() && (used + 1) * 4 <= self.slots.len() * 3
    }

    /// Whether this is a wide table, which is changed in place.
    #[inline(always)]
    pub(crate) fn is_wide(&self) -> bool {
        self.slots.len() > SMALL_MAX
    }

    pub(crate) fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Calls `accept` with each child under `key` until it returns true.
    #[inline(always)]
    pub(crate) fn candidates(&self, key: u64, mut accept: impl FnMut(NonNull<Node>) -> bool) {
        let mask = if self.is_wide() { self.slots.len() - 1 } else { usize::MAX };
        let start = if self.is_wide() { key as usize & mask } else { 0 };
        for step in 0..self.slots.len() {
            let slot = &self.slots[(start + step) & mask];
            let found = slot.key.load(Ordering::Acquire);
            if found == 0 {
                return;
            }
            if found == key
                && let Some(node) = NonNull::new(slot.node.load(Ordering::Acquire))
                && accept(node)
            {
                return;
            }
        }
    }

    /// Adds a child in place. The table has room; called by the writer only.
    pub(crate) fn insert(&self, key: u64, node: *mut Node) {
        debug_assert!(self.is_wide(), "small tables are replaced as a whole");
        let mask = self.slots.len() - 1;
        let mut at = key as usize & mask;
        loop {
            let slot = &self.slots[at];
            if slot.node.load(Ordering::Relaxed).is_null() {
                let fresh = u32::from(slot.key.load(Ordering::Relaxed) == 0);
                self.used.fetch_add(fresh, std::sync::atomic::Ordering::Relaxed);
                slot.key.store(key, Ordering::Release);
                slot.node.store(node, publish_order());
                return;
            }
            at = (at + 1) & mask;
        }
    }

    /// Replaces `old`, which is in the table, by `new`, or clears its slot if `new` is null. Called
    /// by the writer only.
    pub(crate) fn swap(&self, key: u64, old: *mut Node, new: *mut Node) {
        let start = if self.is_wide() { key as usize } else { 0 };
        for step in 0..self.slots.len() {
            let slot = &self.slots[(start + step) % self.slots.len()];
            if slot.node.load(Ordering::Relaxed) == old {
                slot.node.store(new, publish_order());
                return;
            }
        }
        debug_assert!(false, "the child to swap is in its parent's table");
    }

    /// The key in the slot at which a look-up of `key` starts. Called by the writer only.
    pub(crate) fn key_near(&self, key: u64) -> u64 {
        let start = if self.is_wide() { key as usize & (self.slots.len() - 1) } else { 0 };
        self.slots.get(start).map_or(0, |slot| slot.key.load(Ordering::Relaxed))
    }

    /// All children with their keys, in no particular order.
    pub(crate) fn children(&self) -> impl Iterator<Item = (u64, NonNull<Node>)> + '_ {
        self.children_in(self.slots.len())
    }

    /// The children in the first `slots` slots, with their keys.
    pub(crate) fn children_in(
        &self,
        slots: usize,
    ) -> impl Iterator<Item = (u64, NonNull<Node>)> + '_ {
        self.slots.iter().take(slots).filter_map(|slot| {
            let node = NonNull::new(slot.node.load(Ordering::Acquire))?;
            Some((slot.key.load(Ordering::Acquire), node))
        })
    }

    /// Number of bytes requested from the allocator.
    pub(crate) fn heap_bytes(&self) -> usize {
        size_of_val(&*self.slots)
    }
}
