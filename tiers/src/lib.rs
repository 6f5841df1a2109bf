//! Storage of KV blocks outside of the KV pool.
//!
//! * [`ChainKey`]: 256-bit keys of prefixes. A key identifies the KV format, the namespace and all
//!   tokens of a prefix.
//! * [`Record`]: the file format. A record holds some consecutive blocks of a prefix.
//! * [`PrefixWriter`] and [`PrefixReader`]: a whole prefix as a sequence of records, as it is
//!   exported and imported.
//! * [`DiskTier`]: records in a directory, up to a budget, and [`DiskWriter`], which writes to it on
//!   a thread of its own.
//!
//! Nothing here knows an engine or an async runtime. Everything that is read is verified
//! before it is returned: see [`Record::parse`].
#![forbid(unsafe_code)]

mod disk;
mod disk_index;
mod disk_stats;
mod error;
mod key;
mod prefix;
mod record;
mod writer;

pub use disk::{DiskError, DiskTier};
pub use disk_stats::DiskStats;
pub use error::FormatError;
pub use key::ChainKey;
pub use prefix::{PrefixReader, PrefixWriter, StoredPrefix, write_atomically};
pub use record::{HEADER_BYTES, KvShape, Record, RecordHeader};
pub use writer::{DiskWrite, DiskWriter};
