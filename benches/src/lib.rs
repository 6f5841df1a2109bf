//! Tools for the development of the scheduler: the standard workloads, a simulation of the
//! scheduler in virtual time, a cost model of the CPU engine's steps that makes the simulation
//! realistic, and plots.
//!
//! The binaries put them together: `calibrate` measures the cost model, `simulate` runs every
//! admission policy on every workload, and `check` runs the same workloads on the real engine.
//! Requests, records and percentiles come from `stolon bench` (`stolon_loadgen`), so that
//! simulated and measured figures are computed by the same code.

#![forbid(unsafe_code)]

pub mod checkpoints;
pub mod cost;
pub mod plot;
pub mod report;
pub mod simulation;
pub mod sub_agents;
pub mod workload;
