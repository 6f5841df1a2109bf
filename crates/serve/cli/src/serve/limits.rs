//! Limits of connections and requests, as flags of `stolon serve`.

use std::time::Duration;

use clap::Args;
use stolon_http::ConnectionLimits;

use super::from_one;
use crate::memory::{parse_bytes, parse_bytes_or_zero};

/// Default maximum number of open connections.
const MAX_CONNECTIONS: usize = 1024;
/// File descriptors that are kept for the engine: files, pipes and standard streams.
const RESERVED_DESCRIPTORS: u64 = 32;

/// Limits of connections and requests.
#[derive(Debug, Args)]
#[command(next_help_heading = "Limits")]
pub(super) struct LimitArgs {
    /// Maximum number of open connections
    ///
    /// When there are as many, connections that wait for a request are closed to make room.
    /// Default: 1024, or fewer if the limit of open files is lower.
    #[arg(long, value_name = "CONNECTIONS", value_parser = from_one())]
    max_connections: Option<u64>,
    /// Seconds within which a request's headers have to arrive, after the connection was opened or
    /// the previous reply ended
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = from_one())]
    header_timeout: u64,
    /// Seconds within which a request's body has to arrive
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = from_one())]
    pub(super) body_timeout: u64,
    /// Seconds after which a client that accepts nothing of its reply is disconnected
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = from_one())]
    write_timeout: u64,
    /// Seconds after which a request is ended, with status 504 if its reply has not begun
    #[arg(long, value_name = "SECONDS", default_value_t = 3600, value_parser = from_one())]
    pub(super) request_timeout: u64,
    /// Maximum size of a request body, in bytes or with a unit K, M or G (powers of 1024)
    ///
    /// Larger requests are refused with status 413. Default: 256 bytes per token of the model's
    /// context, from 1M to 16M, and 16M for models that take images.
    #[arg(long, value_parser = parse_bytes, value_name = "BYTES")]
    pub(super) body_limit: Option<u64>,
    /// Maximum memory of all request bodies that are being received or prepared
    ///
    /// A body counts until its prompts have been tokenized and its images decoded. A request that
    /// would exceed it is refused with status 503. The first 64K of each body do not count, nor do
    /// the second copies of the few bodies that are being parsed at a time.
    #[arg(long, default_value = "256M", value_parser = parse_bytes, value_name = "BYTES")]
    pub(super) body_memory: u64,
    /// Memory for the responses of `/v1/responses`, so that a request can continue one by its id
    /// (`previous_response_id`); 0 keeps none
    ///
    /// The oldest are forgotten first, and a restart forgets all.
    #[arg(long, default_value = "64M", value_parser = parse_bytes_or_zero, value_name = "BYTES")]
    pub(super) response_memory: u64,
}

impl LimitArgs {
    pub(super) fn of_connections(&self) -> ConnectionLimits {
        // Each connection needs a file descriptor. Without a free one, the listener cannot accept
        // any.
        let possible = open_files().saturating_sub(RESERVED_DESCRIPTORS).max(1);
        let count = self.max_connections.unwrap_or(MAX_CONNECTIONS as u64).min(possible);
        ConnectionLimits {
            count: usize::try_from(count).unwrap_or(MAX_CONNECTIONS),
            header_timeout: Duration::from_secs(self.header_timeout),
            write_timeout: Duration::from_secs(self.write_timeout),
        }
    }
}

/// Maximum number of file descriptors of the process.
#[cfg(unix)]
fn open_files() -> u64 {
    rlimit::Resource::NOFILE.get_soft().unwrap_or(u64::MAX)
}

/// Sockets are not among the files that Windows limits.
#[cfg(not(unix))]
fn open_files() -> u64 {
    u64::MAX
}
