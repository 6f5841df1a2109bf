//! Benchmarks.
pub mod metrics;
pub mod workload;
