//! The children of a node. Small tables are replaced whole when a child is added or removed; wide
//! ones are open-addressed hash tables that are changed in place. In both, a child that is split,
//! merged or trimmed is swapped in its slot.
//!
//! A slot's key is written before its node for the first time; clearing a slot leaves the key
//! behind as a tombstone, which a later insertion may take over. A reader that probes meanwhile
//! can miss only a child that was absent at some instant of its probing: no child ever moves
//! within a table.

use super::Node;
use crate::reclaim::Retired;
use crate::sync::{AtomicPtr, AtomicU64, Ordering, Witness, publish_order};
use std::ptr::{self, NonNull};

/// The largest number of children kept in a table that is replaced whole.
#[cfg(not(loom))]
pub(crate) const SMALL_MAX: usize = 8;
/// As small as can be, so that the models reach wide tables within few steps.
#[cfg(loom)]
pub(crate) const SMALL_MAX: usize = 1;

/// A table of children, keyed by the hash of the first block of their edges.
#[derive(Debug)]
pub(crate) struct ChildTable {
    slots: Box<[Slot]>,
    /// Slots of a wide table that were ever used. Only the writer looks at it.
    used: std::sync::atomic::AtomicU32,
    pub(super) witness: Witness,
}

impl Retired for ChildTable {
    #[cfg(all(loom, not(crossbeam_loom)))]
    fn mark_freed(&self) {
        self.witness.free();
    }
}

#[derive(Debug)]
struct Slot {
    /// 0: never used, ends a probe. Stored before `node`, with Release.
    key: AtomicU64,
    /// Null: a tombstone. Stored with Release, loaded with Acquire: who sees a child sees it whole.
    node: AtomicPtr<Node>,
}

impl Slot {
    fn new(key: u64, node: *mut Node) -> Slot {
        Slot { key: AtomicU64::new(key), node: AtomicPtr::new(node) }
    }
}

impl ChildTable {
    /// A table of `children` with room to grow in place if they are many.
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

    /// Whether the table is wide and has an unused slot to spare: a quarter of the slots is never
    /// used, so that probes end soon. Writer only.
    pub(crate) fn has_room(&self) -> bool {
        let used = self.used.load(std::sync::atomic::Ordering::Relaxed) as usize;
        self.is_wide() && (used + 1) * 4 <= self.slots.len() * 3
    }

    /// Whether the table is changed in place.
    #[inline(always)]
    pub(crate) fn is_wide(&self) -> bool {
        self.slots.len() > SMALL_MAX
    }

    pub(crate) fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Calls `accept` with each child under `key` until it says yes.
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

    /// Adds a child to a wide table that has room, in place. Writer only.
    pub(crate) fn insert(&self, key: u64, node: *mut Node) {
        debug_assert!(self.is_wide(), "small tables are replaced whole");
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

    /// Puts `new` (null: nothing) where `old` is. Writer only; `old` is in the table.
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

    /// The key in the slot at which a look-up of `key` starts. Writer only.
    pub(crate) fn key_near(&self, key: u64) -> u64 {
        let start = if self.is_wide() { key as usize & (self.slots.len() - 1) } else { 0 };
        self.slots.get(start).map_or(0, |slot| slot.key.load(Ordering::Relaxed))
    }

    /// All children with their keys, in no order.
    pub(crate) fn children(&self) -> impl Iterator<Item = (u64, NonNull<Node>)> + '_ {
        self.slots.iter().filter_map(|slot| {
            let node = NonNull::new(slot.node.load(Ordering::Acquire))?;
            Some((slot.key.load(Ordering::Acquire), node))
        })
    }

    /// Bytes on the heap, as asked of the allocator.
    pub(crate) fn heap_bytes(&self) -> usize {
        size_of_val(&*self.slots)
    }
}
