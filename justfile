# Usual commands. `just` without arguments lists them.

_default:
    @{{ just_executable() }} --list --unsorted

# Build all crates.
build:
    cargo build --workspace --all-targets

# Run all tests; arguments filter them.
test *filter:
    cargo test --workspace {{ filter }}

# Check formatting, lints, documentation, and (if installed) spelling and dependencies.
lint:
    cargo fmt --all -- --check
    cargo clippy --workspace --all-targets -- -D warnings
    RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps
    if command -v typos >/dev/null; then typos; fi
    if command -v cargo-deny >/dev/null; then cargo deny check licenses bans sources; fi

# Build the documentation and open it.
doc:
    cargo doc --workspace --no-deps --open

# Run the loom models; arguments filter them.
loom *filter:
    RUSTFLAGS='--cfg loom' CARGO_TARGET_DIR=target/loom \
        cargo test -p stolon-loom-tests --release {{ filter }}

# Run everything that a change has to pass.
ci:
    .ci/run

# Run the checks that take hours: sanitizers, fuzzing, emulated aarch64, soak tests.
deep:
    .ci/deep

# Run the microbenchmarks: kernels, decoder steps, prefix index.
bench:
    cargo bench -p stolon-kernels --bench kernels
    cargo bench -p stolon-cpu --bench roofline
    cargo bench -p stolon-benches --bench prefix_index

# Run the demo: a small model answers questions about a long handbook.
demo:
    cargo run --release -- demo
