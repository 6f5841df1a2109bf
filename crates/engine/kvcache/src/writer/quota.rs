//! Quotas of namespaces. A namespace that has a quota has a record with the number of its cached
//! blocks and its evictable leaves. Trees without quotas have no such record, and pay for one look
//! into an empty table per change of the order of eviction.

use super::order::OrderKey;
use super::{TreeWriter, bytes_of};
use crate::core::Core;
use crate::node::NodeId;
use crate::{ConfigError, Namespace};
use std::collections::{BTreeSet, HashMap};

/// Maximum number of namespaces with a quota of their own. Such a quota is kept while nothing is
/// cached in its namespace, so they need a limit.
const OWN_QUOTAS_MAX: usize = 1 << 16;

/// The quotas of a tree, and the use of each namespace that has one.
#[derive(Debug, Default)]
pub(crate) struct Quotas {
    /// The quota, in blocks, of all namespaces but the base namespace that have none of their own.
    default: Option<usize>,
    /// The quotas that [`TreeWriter::set_namespace_quota`] has set, in blocks. At most
    /// [`OWN_QUOTAS_MAX`] entries.
    own: HashMap<Namespace, usize>,
    /// The use of each namespace with a quota, by its root. The base namespace has an entry while
    /// it has a quota, the others while they have a root as well.
    usage: HashMap<NodeId, Usage>,
    /// The roots of namespaces in which something was unlocked or added since the quotas were
    /// enforced last.
    changed: Vec<NodeId>,
}

/// The cached blocks of a namespace with a quota.
#[derive(Debug, Default)]
pub(super) struct Usage {
    /// The quota, in blocks.
    quota: usize,
    /// Number of cached blocks, including locked ones.
    pub(super) cached: usize,
    /// The evictable leaves, as in the order of eviction of the whole tree.
    pub(super) leaves: BTreeSet<OrderKey>,
}

impl Usage {
    /// The number of blocks by which the namespace exceeds its quota.
    fn excess(&self) -> usize {
        self.cached.saturating_sub(self.quota)
    }

    /// The number of blocks by which the namespace exceeds its quota, and the leaf that is evicted
    /// for it; `None` if it does not, or if everything in it is locked or pinned.
    pub(super) fn victim(&self) -> Option<(usize, NodeId)> {
        let leaf = self.leaves.first().filter(|leaf| !leaf.is_pinned && self.excess() > 0)?;
        Some((self.excess(), leaf.leaf))
    }
}

impl Quotas {
    pub(crate) fn new(default: Option<usize>) -> Quotas {
        Quotas { default: default.filter(|&quota| quota < usize::MAX), ..Quotas::default() }
    }

    /// The quota of a namespace, in blocks. `None` if it has no limit.
    pub(super) fn quota(&self, namespace: &Namespace) -> Option<usize> {
        let default = self.default.filter(|_| !namespace.is_base());
        self.own.get(namespace).copied().or(default).filter(|&quota| quota < usize::MAX)
    }

    /// The use of the namespace with this root, if it has a quota.
    pub(super) fn usage(&self, root: NodeId) -> Option<&Usage> {
        self.usage.get(&root)
    }

    /// Number of namespaces whose use is recorded.
    pub(super) fn usage_count(&self) -> usize {
        self.usage.len()
    }

    /// Adds the record of a namespace that has just got the root `root`, if it has a quota.
    pub(super) fn add_root(&mut self, namespace: &Namespace, root: NodeId) {
        if let Some(quota) = self.quota(namespace) {
            self.usage.insert(root, Usage { quota, ..Usage::default() });
        }
    }

    /// Removes the record of a namespace whose root is removed.
    pub(super) fn remove_root(&mut self, root: NodeId) {
        debug_assert!(root != Core::BASE, "the base namespace keeps its root");
        self.usage.remove(&root);
    }

    /// Counts blocks that are added to a namespace.
    pub(super) fn add_blocks(&mut self, root: NodeId, block_count: usize) {
        if let Some(usage) = self.usage.get_mut(&root) {
            usage.cached += block_count;
            self.changed.push(root);
        }
    }

    /// Counts blocks that are removed from a namespace.
    pub(super) fn remove_blocks(&mut self, root: NodeId, block_count: usize) {
        if let Some(usage) = self.usage.get_mut(&root) {
            usage.cached -= block_count;
        }
    }

    /// Adds a leaf of a namespace that has become evictable.
    pub(super) fn add_leaf(&mut self, root: NodeId, leaf: OrderKey) {
        if let Some(usage) = self.usage.get_mut(&root) {
            usage.leaves.insert(leaf);
            if usage.excess() > 0 {
                self.changed.push(root);
            }
        }
    }

    /// Removes a leaf of a namespace that is no longer evictable.
    pub(super) fn remove_leaf(&mut self, root: NodeId, leaf: &OrderKey) {
        if let Some(usage) = self.usage.get_mut(&root) {
            usage.leaves.remove(leaf);
        }
    }

    /// Estimates the heap memory in bytes.
    pub(super) fn heap_bytes(&self, entry_bytes: usize) -> usize {
        let leaves: usize = self.usage.values().map(|usage| usage.leaves.len()).sum();
        leaves * entry_bytes
            + bytes_of::<(NodeId, Usage)>(self.usage.capacity())
            + bytes_of::<(Namespace, usize)>(self.own.capacity())
    }
}

impl TreeWriter {
    /// Sets the quota of one namespace to `block_count` blocks, in place of the default quota
    /// ([`TreeBuilder::namespace_quota`](crate::TreeBuilder::namespace_quota), which says what
    /// counts). `usize::MAX` means no limit. `None` removes the namespace's own quota, so that the
    /// default applies again; for the base namespace, that is no limit.
    ///
    /// The quota is kept while nothing is cached in the namespace, until it is removed. What
    /// exceeds it now is evicted at once. Takes time in proportion to the number of nodes of the
    /// tree.
    ///
    /// # Errors
    ///
    /// [`ConfigError::NamespaceQuotas`] if 65,536 other namespaces have a quota of their own. In
    /// this case nothing is changed.
    pub fn set_namespace_quota(
        &mut self,
        namespace: &Namespace,
        block_count: Option<usize>,
    ) -> Result<(), ConfigError> {
        self.begin_operation();
        let quotas = &mut self.quotas;
        match block_count {
            Some(quota) => {
                if quotas.own.len() >= OWN_QUOTAS_MAX && !quotas.own.contains_key(namespace) {
                    return Err(ConfigError::NamespaceQuotas { max: OWN_QUOTAS_MAX });
                }
                quotas.own.insert(*namespace, quota);
            }
            None => {
                quotas.own.remove(namespace);
            }
        }
        if let Some(root) = self.arena.root(namespace) {
            self.quotas.usage.remove(&root);
            self.quotas.add_root(namespace, root);
            self.recount_usage(root);
            self.quotas.changed.push(root);
            self.enforce_quotas();
        }
        Ok(())
    }

    /// The quota of a namespace in blocks, its own or the default. `None` if it has no limit.
    pub fn namespace_quota(&self, namespace: &Namespace) -> Option<usize> {
        self.quotas.quota(namespace)
    }

    /// Fills the new record of a namespace in which something may be cached already.
    fn recount_usage(&mut self, root: NodeId) {
        let Some(usage) = self.quotas.usage.get_mut(&root) else { return };
        let mut pending = self.arena.children(root);
        while let Some(id) = pending.pop() {
            pending.extend(self.arena.children(id));
            usage.cached += self.arena.edge(id).block_count();
            let record = &self.records[id.index()];
            if record.ranked {
                usage.leaves.insert(record.order_key(id));
            }
        }
    }

    /// Evicts unlocked leaves of the namespaces that exceed their quotas, until they no longer
    /// exceed them, or everything in them is locked or pinned. The next eviction returns the
    /// blocks.
    ///
    /// These evictions are not reported to the eviction order, because an order that ages its
    /// entries would age those of other namespaces too.
    pub(super) fn enforce_quotas(&mut self) {
        while let Some(root) = self.quotas.changed.pop() {
            while let Some((excess, leaf)) = self.quotas.usage(root).and_then(Usage::victim) {
                let taken = self.victims(leaf, excess);
                self.stats.evicted_for_quota += taken as u64;
                let mut out = std::mem::take(&mut self.freed);
                self.trim_leaf(leaf, taken, &mut out);
                self.freed = out;
            }
        }
    }
}
