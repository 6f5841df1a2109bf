//! Simulations of the scheduler, and what they need: workloads, a cost model that was measured on
//! the real engine, and plots. The binaries `calibrate`, `simulate` and `check` put them together.

pub mod cost;
pub mod drive;
pub mod plot;
pub mod random;
pub mod real;
pub mod report;
pub mod workload;
