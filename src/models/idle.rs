//! Unloads models that have been idle for too long.

use std::future::pending;
use std::sync::Weak;
use std::time::Instant;

use super::Shared;

/// Unloads idle models of a set until it is dropped.
pub(super) async fn unload_idle(set: Weak<Shared>) {
    let Some(mut changes) = set.upgrade().map(|shared| shared.changes.subscribe()) else { return };
    loop {
        // Must not keep the set alive while it waits.
        let next = match set.upgrade() {
            Some(shared) => {
                let (mut slots, now) = (shared.slots(), Instant::now());
                for (index, slot) in slots.iter_mut().enumerate() {
                    if slot.unloads_at().is_some_and(|at| at <= now) {
                        shared.leave(index, slot);
                    }
                }
                slots.iter().filter_map(super::Slot::unloads_at).min()
            }
            None => return,
        };
        let due = async {
            match next {
                Some(at) => tokio::time::sleep_until(at.into()).await,
                None => pending().await,
            }
        };
        tokio::select! {
            () = due => {}
            changed = changes.changed() => if changed.is_err() { return },
        }
    }
}
