//! Makes room for a model in the memory of a set.

use std::sync::Arc;

use super::Shared;
use super::slot::{Loaded, Phase, Slot};
use crate::ModelSetError;

impl Shared {
    /// Waits until `needed` of the `budget` bytes are free for a model that is being loaded, and
    /// takes them. Models that are not pinned leave, one at a time.
    ///
    /// # Errors
    /// [`ModelSetError::TooLarge`] if that cannot be.
    pub(super) async fn make_room(
        self: &Arc<Self>,
        index: usize,
        needed: u64,
        budget: u64,
    ) -> Result<(), ModelSetError> {
        let _turn = self.making_room.lock().await;
        let mut changes = self.changes.subscribe();
        loop {
            {
                let mut slots = self.slots();
                let taken = |pinned: bool| -> u64 {
                    let models = self.recipes.iter().zip(slots.iter());
                    models.filter(|(it, _)| it.is_pinned || !pinned).map(|(_, it)| it.bytes).sum()
                };
                let available = budget.saturating_sub(taken(true));
                if needed > available {
                    let name = self.recipes[index].name.clone();
                    return Err(ModelSetError::TooLarge { name, needed, available, budget });
                }
                if needed <= budget.saturating_sub(taken(false)) {
                    slots[index].bytes = needed;
                    return Ok(());
                }
                self.let_one_leave(&mut slots);
            }
            // The sender is in `self`.
            let _ = changes.changed().await;
        }
    }

    /// Lets the model leave that was used least recently, an idle one if there is one. Does nothing
    /// while one leaves.
    fn let_one_leave(self: &Arc<Self>, slots: &mut [Slot]) {
        let leaves = |slot: &Slot| match &slot.phase {
            Phase::Unloading => true,
            Phase::Loaded(Loaded { is_leaving, .. }) => *is_leaving,
            Phase::Sleeping | Phase::Loading { .. } => false,
        };
        if slots.iter().any(leaves) {
            return;
        }
        let may_leave = |(index, slot): &(usize, &mut Slot)| {
            matches!(slot.phase, Phase::Loaded(_)) && !self.recipes[*index].is_pinned
        };
        let models = slots.iter_mut().enumerate().filter(may_leave);
        if let Some((index, slot)) = models.min_by_key(|(_, slot)| (slot.leases > 0, slot.last_use))
        {
            self.leave(index, slot);
        }
    }
}
