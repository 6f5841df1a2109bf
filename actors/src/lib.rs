//! The core of the Stolon engine: four actors, a supervisor, and the decisions they make.

mod config;

pub use config::{AdmissionPolicy, UnknownPolicy};
