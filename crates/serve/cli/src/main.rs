//! The command `stolon`, with its allocator.

#![forbid(unsafe_code)]

use std::process::ExitCode;

/// mimalloc returns the memory of large requests to the operating system. glibc's allocator keeps
/// most of it.
#[cfg(feature = "mimalloc")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    stolon_cli::program::run(&std::env::args_os().collect::<Vec<_>>())
}
