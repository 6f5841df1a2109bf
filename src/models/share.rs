//! The size of the KV caches of a set with a budget, for models that do not set it.
//!
//! All of these models have the same size. It is as large as the budget permits while as many of
//! them as possible are loaded at the same time, in addition to the models whose size is known. A
//! model that leaves is expensive, so this comes before the size, as long as each KV cache has room
//! for an ordinary request.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::{ModelRecipe, Shared};
use crate::Error;
use crate::builder::{KvPart, MemoryParts};

/// Maximum size of a KV cache that is not set, in bytes: that of an engine without a set.
const SHARE_MAX: u64 = 8 << 30;

/// A model that takes memory of the budget.
#[derive(Clone, Copy, Debug)]
struct Claim {
    memory: MemoryParts,
    is_pinned: bool,
}

impl Shared {
    /// The size in bytes of the KV cache of each model that does not set it. Reads the headers of all
    /// models, and blocks meanwhile. Models that cannot be described do not count, because they
    /// cannot be loaded; all are looked at again for the next load.
    pub(super) fn kv_share(&self, budget: u64) -> u64 {
        if let Some(share) = self.kv_share.get() {
            return *share;
        }
        let claims: Vec<Option<Claim>> = self.recipes.iter().map(ModelRecipe::claim).collect();
        let is_complete = claims.iter().all(Option::is_some);
        let share = share(budget, &claims.into_iter().flatten().collect::<Vec<_>>());
        tracing::info!(bytes = share, "the KV cache of each model that does not set its size");
        match is_complete {
            true => *self.kv_share.get_or_init(|| share),
            false => share,
        }
    }
}

impl ModelRecipe {
    /// `None` if the model cannot be described.
    fn claim(&self) -> Option<Claim> {
        let described = || -> Result<MemoryParts, Error> { (*self.builder)()?.memory_parts() };
        let memory = match self.memory {
            Some(weights) => MemoryParts { weights, kv: KvPart::Known(0) },
            // The load of a model whose recipe panics fails, and no other one.
            None => catch_unwind(AssertUnwindSafe(described)).ok()?.ok()?,
        };
        Some(Claim { memory, is_pinned: self.is_pinned })
    }
}

/// The size in bytes of each KV cache that is not set.
fn share(budget: u64, claims: &[Claim]) -> u64 {
    let known = |claim: &Claim| match claim.memory.kv {
        KvPart::Known(kv) => Some(claim.memory.weights.saturating_add(kv)),
        KvPart::Open { .. } => None,
    };
    let sum = |pinned_only: bool| {
        let counted = claims.iter().filter(|claim| claim.is_pinned || !pinned_only);
        counted.filter_map(known).fold(0, u64::saturating_add)
    };
    let mut open: Vec<&Claim> = claims.iter().filter(|claim| known(claim).is_none()).collect();
    // Any models of the same number fit if the largest do. Pinned ones never leave.
    open.sort_by_key(|claim| std::cmp::Reverse((claim.is_pinned, claim.memory.weights)));
    let useful = open.iter().map(|claim| match claim.memory.kv {
        KvPart::Open { useful } => useful,
        KvPart::Known(_) => 0,
    });
    let useful = useful.max().unwrap_or(0);
    let pinned = open.iter().filter(|claim| claim.is_pinned).count();
    let of_count = |count: usize, taken: u64| {
        let weights = open.iter().take(count).map(|claim| claim.memory.weights);
        let left = budget.saturating_sub(weights.fold(taken, u64::saturating_add));
        (left / count as u64).min(SHARE_MAX)
    };
    // A pinned model and one other have to fit.
    let least = (pinned + 1).clamp(1, open.len().max(1));
    let counts = (least..=open.len()).rev();
    let tries = [sum(false), sum(true)]
        .into_iter()
        .flat_map(|taken| counts.clone().map(move |count| (count, taken)));
    let found = tries.map(|(count, taken)| of_count(count, taken)).find(|share| *share >= useful);
    let any = || [least, pinned.max(1)].map(|count| of_count(count, sum(true)));
    found.or_else(|| any().into_iter().find(|share| *share > 0)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(weights: u64, is_pinned: bool) -> Claim {
        Claim { memory: MemoryParts { weights, kv: KvPart::Open { useful: 10 } }, is_pinned }
    }

    fn known(weights: u64, kv: u64, is_pinned: bool) -> Claim {
        Claim { memory: MemoryParts { weights, kv: KvPart::Known(kv) }, is_pinned }
    }

    /// Goal: models whose KV caches have no size get equal ones, which leave room for as many models
    /// as fit with caches of a useful size, and for those whose size is known.
    #[test]
    fn shares_are_as_large_as_the_budget_permits() {
        for (name, budget, claims, expected) in [
            ("a chat model and an encoder", 100, vec![open(40, false), known(5, 0, false)], 55),
            ("both fit", 100, vec![open(30, false), open(20, false)], 25),
            ("both would fit, with too little", 100, vec![open(50, false), open(40, false)], 50),
            ("one at a time", 100, vec![open(60, false), open(50, false)], 40),
            (
                "two of three, the largest",
                100,
                vec![open(30, false), open(35, false), open(1, false), open(30, false)],
                17,
            ),
            ("next to a size that is set", 100, vec![open(40, false), known(20, 20, false)], 20),
            ("in place of one", 100, vec![open(60, false), known(20, 15, false)], 40),
            ("a pinned one stays", 100, vec![open(30, true), open(60, false), open(50, false)], 5),
            ("a pinned one of known size stays", 100, vec![open(60, false), known(35, 0, true)], 5),
            ("more is not needed", 100 << 30, vec![open(1 << 30, false)], SHARE_MAX),
            (
                "a pinned one without room for another",
                100,
                vec![open(60, true), open(50, false)],
                40,
            ),
            ("nothing fits", 10, vec![open(40, false), open(50, true)], 0),
        ] {
            assert_eq!(share(budget, &claims), expected, "{name}");
        }
    }
}
