//! Server.
mod error;
mod fields;
