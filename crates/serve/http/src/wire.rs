//! From bytes to a request and from an answer to bytes: connections, bodies, errors, replies, traces.

pub(crate) mod activity;
pub(crate) mod advice;
pub(crate) mod asked;
pub(crate) mod body;
#[cfg(feature = "tls")]
pub mod certificates;
#[cfg(feature = "listen")]
pub(crate) mod connection;
pub(crate) mod error;
pub(crate) mod flight;
#[cfg(feature = "listen")]
pub(crate) mod gate;
#[cfg(feature = "gzip")]
pub(crate) mod gzip;
pub(crate) mod history;
#[cfg(feature = "listen")]
pub(crate) mod listener;
pub(crate) mod parts;
pub(crate) mod peer;
pub(crate) mod receive;
pub(crate) mod reply;
pub(crate) mod request_id;
pub(crate) mod root_path;
pub(crate) mod scan;
pub(crate) mod segments;
#[cfg(all(unix, feature = "listen"))]
pub(crate) mod socket;
#[cfg(feature = "listen")]
pub(crate) mod tls;
pub mod traces;

use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds since 1970-01-01 UTC.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
