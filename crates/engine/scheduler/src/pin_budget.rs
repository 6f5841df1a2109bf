//! Divides the KV pool between pins and long requests.
//!
//! Pins occupy at most the pin budget, and a request that fits next to the whole budget never
//! touches the lock. A longer one may use the part of the budget in which nothing is pinned: it
//! holds a [`BudgetLoan`] from its validation to its end, and nothing can be pinned while a loan
//! exists. So every request that was accepted can complete.
//!
//! Pins that can be demoted, because their prefixes are stored outside of the pool, take no blocks
//! from requests. They have a budget nonetheless, but no part of it is reserved. So do marks, which
//! are demoted in any case.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use stolon_backend::BackendSpec;

use crate::blocks_for;

/// The size of all pins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pinned {
    /// Number of blocks. A block that several pins share counts for each of them.
    pub blocks: usize,
    /// Number of pins.
    pub pins: usize,
}

/// Who uses the blocks of the pin budget.
#[derive(Debug)]
pub struct PinBudget {
    /// Maximum number of blocks that pins may occupy.
    blocks: usize,
    /// Maximum number of blocks that marks may protect, next to those of pins.
    mark_blocks: usize,
    /// Whether requests that hold no loan leave these blocks to pins.
    is_reserved: bool,
    /// The part of the budget that is in use.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Number of loans.
    loans: usize,
    /// Whether a pin is about to be made, which may take all of the budget.
    pinning: bool,
    /// The size of all pins.
    pinned: Pinned,
}

/// The right of a request to use the blocks of the budget in which nothing is pinned. Dropping it
/// returns the right.
#[derive(Debug)]
pub(crate) struct BudgetLoan(Arc<PinBudget>);

impl PinBudget {
    /// A budget of `blocks` blocks, in which nothing is pinned. `None` means a quarter of the pool,
    /// or less where a request of the maximum length would not fit next to it, so that it never
    /// makes a request fail.
    pub(crate) fn new(blocks: Option<usize>, demotable: bool, spec: &BackendSpec) -> PinBudget {
        let longest = if demotable { 0 } else { blocks_for(spec.block_size, spec.max_positions) };
        let default = (spec.block_count / 4).min(spec.block_count.saturating_sub(longest));
        let mark_blocks = blocks.unwrap_or(spec.block_count / 4);
        let (blocks, is_reserved) = (blocks.unwrap_or(default), !demotable);
        PinBudget { blocks, mark_blocks, is_reserved, state: Mutex::default() }
    }

    /// Maximum number of blocks that pins may occupy.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Maximum number of blocks that marks may protect: as many as pins may occupy or, by default,
    /// a quarter of the pool.
    pub fn mark_blocks(&self) -> usize {
        self.mark_blocks
    }

    /// Number of blocks that a request cannot use without a loan.
    pub(crate) fn reserved(&self) -> usize {
        if self.is_reserved { self.blocks } else { 0 }
    }

    /// The right to use the blocks in which nothing is pinned, if a request that may hold `needed`
    /// of the `total` blocks of the pool can have them. Otherwise the size of all pins.
    pub(crate) fn borrow(
        self: &Arc<PinBudget>,
        needed: usize,
        total: usize,
    ) -> Result<(BudgetLoan, Pinned), Pinned> {
        let mut state = self.lock();
        let pinned = match state.pinning {
            true => Pinned { blocks: self.blocks, pins: state.pinned.pins + 1 },
            false => state.pinned,
        };
        if needed + pinned.blocks > total {
            return Err(pinned);
        }
        state.loans += 1;
        Ok((BudgetLoan(Arc::clone(self)), pinned))
    }

    /// Whether something may be pinned now. If so, no request borrows the blocks from now on, until
    /// [`PinBudget::set_pinned`] is called.
    pub fn begin_pin(&self) -> bool {
        let mut state = self.lock();
        state.pinning |= state.loans == 0;
        state.pinning
    }

    /// Sets the size of all pins. Called by the owner of the pins after each change.
    pub fn set_pinned(&self, pinned: Pinned) {
        let mut state = self.lock();
        (state.pinned, state.pinning) = (pinned, false);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is valid between any two statements, so a poisoned lock is taken too.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for BudgetLoan {
    fn drop(&mut self) {
        self.0.lock().loans -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(block_count: usize) -> BackendSpec {
        BackendSpec {
            vocab_size: 256,
            max_positions: 100,
            block_size: 16,
            block_count,
            block_bytes: 1,
            ..BackendSpec::default()
        }
    }

    /// Goal: a loan needs only that its request fits next to what is pinned, and while one exists
    /// nothing more is pinned.
    #[test]
    fn a_loan_fits_next_to_the_pins_and_keeps_others_out() {
        let budget = Arc::new(PinBudget::new(Some(4), false, &spec(8)));
        let loans = [budget.borrow(8, 8), budget.borrow(8, 8)].map(|loan| loan.expect("no pin"));
        assert!(!budget.begin_pin());
        drop(loans);
        assert!(budget.begin_pin() && budget.begin_pin());
        assert!(budget.borrow(5, 8).is_err(), "the pin may take the whole budget");
        let pinned = Pinned { blocks: 2, pins: 1 };
        budget.set_pinned(pinned);
        assert_eq!(budget.borrow(7, 8).expect_err("two blocks are pinned"), pinned);
        let (loan, others) = budget.borrow(6, 8).expect("it fits next to the pin");
        assert_eq!(others, pinned);
        assert!(!budget.begin_pin());
        drop(loan);
        budget.set_pinned(Pinned::default());
        assert!(budget.borrow(8, 8).is_ok());
    }

    /// Goal: the default budget leaves room for a request of the maximum length, unless pins can be
    /// demoted. Then, nothing is reserved for them.
    #[test]
    fn the_default_budget_never_refuses_a_request() {
        for (blocks, reserved, demotable) in
            [(1, 0, 0), (7, 0, 1), (8, 1, 2), (9, 2, 2), (100, 25, 25)]
        {
            let budget = PinBudget::new(None, false, &spec(blocks));
            assert_eq!((budget.blocks(), budget.reserved()), (reserved, reserved), "{blocks}");
            let budget = PinBudget::new(None, true, &spec(blocks));
            assert_eq!((budget.blocks(), budget.reserved()), (demotable, 0), "{blocks}");
        }
    }
}
