//! The load generator behind `stolon bench` and the benchmarks in `benches/`. `stolon verify` uses
//! its client.
//!
//! [`workload`] describes the requests and when they are sent, [`drive`] sends it to an engine or
//! with [`http`] to a server and records when tokens arrive, [`metrics`] turns the records into
//! percentiles and rates, and [`rng`] draws random workloads from a seed. Nothing here prints.

#![forbid(unsafe_code)]

pub mod drive;
pub mod http;
mod in_process;
pub mod metrics;
pub mod rng;
pub mod workload;
