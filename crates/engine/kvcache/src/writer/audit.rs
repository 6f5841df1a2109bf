//! Recounts everything that the writer counts, and checks the invariants of the tree.

use super::TreeWriter;
use crate::AuditError;
use crate::core::Core;
use crate::node::NodeId;
use std::collections::{HashMap, HashSet};

fn same(counter: &'static str, expected: usize, got: usize) -> Result<(), AuditError> {
    if expected == got { Ok(()) } else { Err(AuditError::Counter { counter, expected, got }) }
}

impl TreeWriter {
    /// Checks all invariants of the tree and recounts its counters, for tests and debugging. Takes
    /// time in proportion to the size of the tree.
    ///
    /// # Errors
    ///
    /// The first contradiction found.
    pub fn audit(&mut self) -> Result<(), AuditError> {
        self.drain();
        let mut pins: HashMap<NodeId, u32> = HashMap::new();
        self.pins.ends().for_each(|end| *pins.entry(end).or_default() += 1);
        let mut owned = HashSet::new();
        let (mut cached, mut locked, mut detached, mut leaves) = (0, 0, 0, 0);
        for id in self.arena.ids() {
            self.audit_node(id, pins.get(&id).copied().unwrap_or_default())?;
            if self.arena.is_root(id) {
                continue;
            }
            let record = &self.records[id.index()];
            for block in self.arena.edge(id).blocks() {
                if !owned.insert(block) {
                    return Err(AuditError::SharedBlock { block });
                }
            }
            let length = self.arena.edge(id).block_count();
            cached += length;
            locked += if record.locks > 0 { length } else { 0 };
            leaves += usize::from(record.ranked);
        }
        for blocks in self.detached.values() {
            detached += blocks.len();
        }
        for block in self.detached.values().flatten().chain(&self.freed) {
            if !owned.insert(block.id) {
                return Err(AuditError::SharedBlock { block: block.id });
            }
        }
        if let Some(recorded) = self.owned.count() {
            same("owned blocks", owned.len(), recorded)?;
        }
        same("nodes", self.arena.ids().count(), self.arena.node_count())?;
        same("cached blocks", cached, self.cached)?;
        same("locked blocks", locked, self.locked)?;
        same("detached blocks", detached, self.detached_blocks)?;
        same("evictable leaves", leaves, self.order.len())?;
        self.audit_quotas()
    }

    /// Recounts the use of each namespace with a quota.
    fn audit_quotas(&self) -> Result<(), AuditError> {
        let directory = self.arena.children(Core::DIRECTORY);
        let mut usage_count = 0;
        for root in directory.into_iter().chain([Core::BASE]) {
            let limited = self.quotas.quota(&self.arena.namespace_of(root)).is_some();
            let usage = self.quotas.usage(root);
            let check = |holds: bool, expected| match holds {
                true => Ok(()),
                false => Err(AuditError::Node { node: root.0, expected }),
            };
            check(limited == usage.is_some(), "a record of its use exactly if it has a quota")?;
            let Some(usage) = usage else { continue };
            usage_count += 1;
            let (mut cached, mut leaves) = (0, 0);
            let mut pending = self.arena.children(root);
            while let Some(id) = pending.pop() {
                pending.extend(self.arena.children(id));
                cached += self.arena.edge(id).block_count();
                let record = &self.records[id.index()];
                leaves += usize::from(record.ranked);
                let listed = usage.leaves.contains(&record.order_key(id));
                check(listed == record.ranked, "its evictable leaves in the record of its use")?;
            }
            same("cached blocks of a namespace", cached, usage.cached)?;
            same("evictable leaves of a namespace", leaves, usage.leaves.len())?;
            check(usage.victim().is_none(), "to exceed its quota only by what is held")?;
        }
        same("namespaces with a quota", usage_count, self.quotas.usage_count())
    }

    /// Checks a node, in which `pins` demotable pins end.
    fn audit_node(&self, id: NodeId, pins: u32) -> Result<(), AuditError> {
        let check = |holds: bool, expected| match holds {
            true => Ok(()),
            false => Err(AuditError::Node { node: id.0, expected }),
        };
        let arena = &self.arena;
        let record = &self.records[id.index()];
        let children = arena.children(id);
        check(children.len() == arena.child_count(id), "as many children as its table has")?;
        check(
            children.iter().all(|&child| arena.parent(child) == id),
            "to be the parent of its children",
        )?;
        let parent = arena.parent(id);
        check(arena.is_live(parent), "a live parent")?;
        check(arena.children(parent).contains(&id), "a slot in the table of its parent")?;
        if arena.is_root(id) {
            check(!children.is_empty(), "the root of an empty namespace to be removed")?;
            return check(
                parent == Core::DIRECTORY,
                "the root of a namespace to be in the directory",
            );
        }
        let edge = arena.edge(id);
        let block_size = self.block_size();
        check(edge.block_count() > 0, "at least one block")?;
        check(edge.positions().len() == edge.block_count() * block_size, "whole blocks")?;
        let below: u32 = children.iter().map(|child| self.records[child.index()].locks).sum();
        check(record.locks >= below, "at least the locks of its children")?;
        let below: u32 = children.iter().map(|child| self.records[child.index()].pins).sum();
        check(record.pins == below + pins, "the pins of its children and its own")?;
        let root = if arena.is_root(parent) { parent } else { self.records[parent.index()].root };
        check(record.root == root, "the root of its parent")?;
        let start = match arena.is_root(parent) {
            true => 0,
            false => {
                self.records[parent.index()].start_block as usize + arena.edge(parent).block_count()
            }
        };
        check(record.start_block as usize == start, "to start where its parent ends")?;
        let evictable = children.is_empty() && record.locks == 0;
        check(
            record.ranked == evictable,
            "an entry in the order of eviction exactly if evictable",
        )?;
        if record.ranked {
            check(
                self.order.contains(&record.order_key(id)),
                "its entry in the order of eviction",
            )?;
            check(record.ranked_as_pinned == (record.pins > 0), "to be ranked as pinned if it is")?;
        }
        let mut firsts: Vec<&[u32]> =
            children.iter().map(|&child| &arena.edge(child).positions()[..block_size]).collect();
        firsts.sort_unstable();
        check(
            firsts.windows(2).all(|pair| pair[0] != pair[1]),
            "children with different first blocks",
        )?;
        let parent_hash = match (arena.is_root(parent), parent == Core::BASE) {
            (true, true) => arena.core.seed,
            _ => arena.edge(parent).last_hash(),
        };
        let hashes = crate::hash::block_hashes(parent_hash, edge.positions(), block_size);
        check(hashes == edge.hashes(), "the hashes of its positions")?;
        let ends = edge.kv_hashes().len() == edge.block_count();
        check(ends || children.is_empty(), "nothing after a checkpoint")
    }
}
