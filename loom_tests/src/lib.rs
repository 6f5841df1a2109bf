//! Loom models of stolon-kvcache: the races of its readers, its writer, its leases and its step
//! fence, over every interleaving within a bound on preemptions.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p stolon-loom-tests --release`; with
//! `--cfg crossbeam_loom` beside it, the models of `tests/real_epoch.rs` run through
//! crossbeam-epoch itself. The other models put `Checked` in its place: it frees at the earliest
//! moment that the contract of a reclaimer allows, and reports any later look.
#![cfg(loom)]
#![allow(unsafe_code, reason = "implements the contract of a reclaimer")]
#![allow(clippy::missing_panics_doc, reason = "models panic to report")]

use loom::sync::{Arc, Mutex};
use stolon_kvcache::reclaim::{Reclaimer, Retired};
use stolon_kvcache::{BlockId, TreeBuilder, TreeReader, TreeWriter};

/// A reclaimer that marks an item as freed as soon as no guard is alive that was alive when the
/// item was retired. The memory itself is kept to the end of the model, so that a look at a freed
/// item is reported and not undefined.
#[derive(Clone, Debug)]
pub struct Checked {
    state: Arc<Mutex<State>>,
    /// Frees without waiting for anyone: a planted defect.
    eager: bool,
}

#[derive(Default)]
struct State {
    next_guard: usize,
    guards: Vec<usize>,
    limbo: Vec<(Vec<usize>, Box<dyn Retired>)>,
    /// Marked as freed; dropped with the model.
    graveyard: Vec<Box<dyn Retired>>,
    /// The most items that ever waited at once.
    limbo_max: usize,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (guards, limbo) = (self.guards.len(), self.limbo.len());
        f.debug_struct("State").field("guards", &guards).field("limbo", &limbo).finish()
    }
}

impl Default for Checked {
    fn default() -> Self {
        Checked { state: Arc::new(Mutex::new(State::default())), eager: false }
    }
}

impl Checked {
    /// A reclaimer with the defect that it frees at once.
    pub fn eager() -> Checked {
        Checked { eager: true, ..Checked::default() }
    }

    /// Items that wait for a guard now, and the most that ever did.
    pub fn limbo(&self) -> (usize, usize) {
        let state = self.state.lock().expect("no panic under the lock");
        (state.limbo.len(), state.limbo_max)
    }
}

/// A guard of [`Checked`].
#[derive(Debug)]
pub struct CheckedGuard {
    id: usize,
    state: Arc<Mutex<State>>,
}

// SAFETY: an item is marked as freed only when the guards alive at its retirement are gone, but
// for the planted defect, in which it is marked and still not freed.
unsafe impl Reclaimer for Checked {
    type Guard = CheckedGuard;

    fn pin(&self) -> CheckedGuard {
        let mut state = self.state.lock().expect("no panic under the lock");
        let id = state.next_guard;
        state.next_guard += 1;
        state.guards.push(id);
        CheckedGuard { id, state: self.state.clone() }
    }

    unsafe fn retire<T: Retired>(&self, guard: &CheckedGuard, item: *mut T) {
        // SAFETY: by the contract of `retire`, `item` came from a box and is ours now.
        let item: Box<dyn Retired> = unsafe { Box::from_raw(item) };
        let mut state = self.state.lock().expect("no panic under the lock");
        // The writer's own guard looks at nothing.
        let waits: Vec<usize> = state.guards.iter().copied().filter(|&g| g != guard.id).collect();
        if self.eager || waits.is_empty() {
            item.mark_freed();
            state.graveyard.push(item);
        } else {
            state.limbo.push((waits, item));
            state.limbo_max = state.limbo_max.max(state.limbo.len());
        }
    }
}

impl Drop for CheckedGuard {
    fn drop(&mut self) {
        let mut state = self.state.lock().expect("no panic under the lock");
        let id = self.id;
        state.guards.retain(|&guard| guard != id);
        let mut still = Vec::new();
        for (mut waits, item) in std::mem::take(&mut state.limbo) {
            waits.retain(|&guard| guard != id);
            if waits.is_empty() {
                item.mark_freed();
                state.graveyard.push(item);
            } else {
                still.push((waits, item));
            }
        }
        state.limbo = still;
    }
}

/// A tree with blocks of one position over `reclaimer`.
pub fn tree<R: Reclaimer>(reclaimer: R) -> (TreeWriter<R>, TreeReader<R>) {
    TreeBuilder::new(1).build_with(reclaimer).expect("1 is a block size")
}

/// Commits `positions` with the blocks `first..`, leaving nothing locked.
pub fn put<R: Reclaimer>(writer: &mut TreeWriter<R>, positions: &[u32], first: u32) {
    let mut lease = writer.acquire(&Default::default(), positions);
    let blocks: Vec<BlockId> = (first..).take(positions.len() - lease.len()).map(BlockId).collect();
    writer.commit(&mut lease, positions, &blocks);
}

/// Runs `model` over all interleavings with at most `preemptions` preemptions, or as many as
/// `LOOM_MAX_PREEMPTIONS` says if that is more.
pub fn explore(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    let asked = builder.preemption_bound.unwrap_or(0);
    builder.preemption_bound = Some(preemptions.max(asked));
    builder.check(model);
}

/// Runs a model with a planted defect: it must fail, and say `complaint`.
///
/// A failing model ends its process (it unwinds through destructors that need the model), so the
/// test `name` is run again in a process of its own, in which it gets past this function's start.
pub fn must_fail(
    name: &str,
    complaint: &str,
    preemptions: usize,
    model: impl Fn() + Send + Sync + 'static,
) {
    const CHILD: &str = "STOLON_PLANTED_DEFECT";
    if std::env::var_os(CHILD).is_some() {
        return explore(preemptions, model);
    }
    let exe = std::env::current_exe().expect("the path of this test");
    let output = std::process::Command::new(exe)
        .args(["--exact", name, "--nocapture"])
        .env(CHILD, "1")
        .env("RUST_BACKTRACE", "0")
        .output()
        .expect("this test runs again");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "loom did not find the planted defect");
    assert!(said.contains(complaint), "expected \"{complaint}\", got:\n{said}");
}
