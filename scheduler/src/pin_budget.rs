//! Lets long prompts use the blocks of the pin budget while nothing is pinned.
//!
//! A request whose prompt fits only with these blocks holds a [`BudgetLoan`] from its validation to
//! its end. While one exists nothing can be pinned, and while something is pinned none is given, so
//! that every request that was accepted can complete. Other requests do not touch the lock.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Whether requests or pins use the blocks of the pin budget.
#[derive(Debug, Default)]
pub struct PinBudget(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Number of loans.
    loans: usize,
    /// Whether something is pinned, or is about to be.
    pinned: bool,
}

/// The right of a request to use the blocks of the pin budget. Dropping it returns the right.
#[derive(Debug)]
pub(crate) struct BudgetLoan(Arc<PinBudget>);

impl PinBudget {
    /// The right to use the blocks; `None` while something is pinned.
    pub(crate) fn borrow(self: &Arc<PinBudget>) -> Option<BudgetLoan> {
        let mut state = self.lock();
        if state.pinned {
            return None;
        }
        state.loans += 1;
        Some(BudgetLoan(Arc::clone(self)))
    }

    /// Whether something may be pinned now. If so, no request borrows the blocks from now on, until
    /// [`PinBudget::set_pinned`] says that nothing is pinned.
    pub fn begin_pin(&self) -> bool {
        let mut state = self.lock();
        state.pinned |= state.loans == 0;
        state.pinned
    }

    /// Whether something is pinned. Called by the owner of the pins after each change.
    pub fn set_pinned(&self, pinned: bool) {
        self.lock().pinned = pinned;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is valid between any two statements, so a poisoned lock is taken too.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Goal: loans and pins exclude each other, and each can begin when the other has ended.
    #[test]
    fn loans_and_pins_exclude_each_other() {
        let budget = Arc::new(PinBudget::default());
        let loans = [budget.borrow(), budget.borrow()].map(|loan| loan.expect("nothing is pinned"));
        assert!(!budget.begin_pin());
        drop(loans);
        assert!(budget.begin_pin() && budget.begin_pin());
        assert!(budget.borrow().is_none());
        budget.set_pinned(false);
        assert!(budget.borrow().is_some());
    }
}
