//! Loom models of the code that threads share: the prefix tree with its leases and its step fence,
//! the event channel, the block allocator and the sessions of the scheduler, and the thread pool of
//! the kernels. They check every interleaving up to a bound on the number of preemptions.
//!
//! Run them with `RUSTFLAGS="--cfg loom" cargo test -p stolon-loom-tests --release`. In these
//! builds a double of crossbeam-epoch ends each grace period at the earliest permitted moment, and
//! an access to memory that the writer has freed is reported. With `--cfg crossbeam_loom` in
//! addition, the tree uses crossbeam-epoch as it does in real builds; of the models of the tree,
//! only `tests/real_epoch.rs` and `tests/reclaim.rs` are compiled in this case.
#![cfg(loom)]
#![allow(clippy::missing_panics_doc, reason = "models panic to report a failure")]

use stolon_kvcache::{BlockId, Namespace, TreeReader, TreeWriter, prefix_tree};

/// An empty tree whose blocks have one position each.
pub fn tree() -> (TreeWriter, TreeReader) {
    prefix_tree(1).expect("1 is a valid block size")
}

/// Commits `positions` in `namespace` with block ids that count up from `first`, and leaves nothing
/// locked.
pub fn put_in(writer: &mut TreeWriter, namespace: &Namespace, positions: &[u32], first: u32) {
    let mut lease = writer.acquire(namespace, positions);
    let blocks: Vec<BlockId> = (first..).take(positions.len() - lease.len()).map(BlockId).collect();
    let _ = writer.commit(&mut lease, positions, &blocks).expect("a valid commit");
}

/// Like [`put_in`], in the base namespace.
pub fn put(writer: &mut TreeWriter, positions: &[u32], first: u32) {
    put_in(writer, &Namespace::default(), positions, first);
}

/// Runs `model` in all interleavings with at most `preemptions` preemptions. A larger value in the
/// environment variable `LOOM_MAX_PREEMPTIONS` takes precedence.
pub fn explore(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    let requested = builder.preemption_bound.unwrap_or(0);
    builder.preemption_bound = Some(preemptions.max(requested));
    builder.check(model);
}

/// Runs a model with a planted defect. The model must fail with `message`.
///
/// A failing model aborts its process, because it unwinds through destructors that need the model.
/// So the test named `test` is run once more in a child process, and the model runs only there.
pub fn must_fail(
    test: &str,
    message: &str,
    preemptions: usize,
    model: impl Fn() + Send + Sync + 'static,
) {
    const CHILD: &str = "STOLON_PLANTED_DEFECT";
    if std::env::var_os(CHILD).is_some() {
        return explore(preemptions, model);
    }
    let exe = std::env::current_exe().expect("the path of this test binary");
    let output = std::process::Command::new(exe)
        .args(["--exact", test, "--nocapture"])
        .env(CHILD, "1")
        .env("RUST_BACKTRACE", "0")
        .output()
        .expect("the test binary starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "loom did not find the planted defect");
    assert!(stderr.contains(message), "expected \"{message}\", got:\n{stderr}");
}
