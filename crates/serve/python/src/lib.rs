//! The native part of the Python package `stolon`: the module `stolon._native`.
//!
//! The package's own code in `python/stolon` has the names, types and documentation that programs
//! see; it hands requests over as JSON and wraps what it gets back. This crate runs them:
//!
//! - `process` owns the tokio runtime. It waits for futures without the interpreter's lock (GIL)
//!   and looks for signals meanwhile, and refuses calls in a forked process;
//! - `options` and `request` read settings and requests, `answer` makes the results;
//! - `engine`, `stream`, `cache` and `sessions` are the classes of a running engine;
//! - `prefix_cache` is the prefix tree with its block pool alone, for other engines.

#![forbid(unsafe_code)]

mod answer;
mod cache;
mod engine;
mod error;
mod options;
mod prefix_cache;
mod process;
mod request;
mod sessions;
mod stream;

use std::ffi::OsString;
use std::process::ExitCode;

use pyo3::prelude::*;

/// Runs the command `stolon` with these arguments, the first of which is its name. Returns its exit
/// status.
#[pyfunction]
fn run_command(py: Python<'_>, arguments: Vec<OsString>) -> u8 {
    let status = py.detach(|| stolon_cli::program::run(&arguments));
    // The type does not tell its number.
    (0..u8::MAX).find(|&number| ExitCode::from(number) == status).unwrap_or(u8::MAX)
}

#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::cache::Cache;
    #[pymodule_export]
    use crate::engine::Engine;
    #[pymodule_export]
    use crate::prefix_cache::{CacheEvents, Lease, PrefixCache};
    #[pymodule_export]
    use crate::run_command;
    #[pymodule_export]
    use crate::sessions::Sessions;
    #[pymodule_export]
    use crate::stream::Stream;
}
