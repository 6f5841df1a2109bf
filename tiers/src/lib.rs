//! Storage of KV blocks outside of the KV pool.
//!
//! * [`ChainKey`]: 256-bit keys of prefixes. A key identifies the KV format, the namespace and all
//!   tokens of a prefix.
//! * [`Record`]: the file format. A record holds some consecutive blocks of a prefix.
//! * [`PrefixWriter`] and [`PrefixReader`]: a whole prefix as a sequence of records, as it is
//!   exported and imported.
//! * [`DiskTier`]: records in a directory, up to a budget, and [`DiskWriter`], which writes to it
//!   on a thread of its own.
//! * `ObjectTier` (feature `object-store`): records in an object store.
//!
//! Nothing here knows an engine, and only the object tier an async runtime. Everything that is read
//! is verified before it is returned: see [`Record::parse`].
#![forbid(unsafe_code)]

mod disk;
mod disk_index;
mod disk_stats;
mod error;
mod key;
#[cfg(feature = "object-store")]
mod object;
mod object_stats;
mod prefix;
mod record;
mod shared;
mod writer;

pub use disk::{DiskError, DiskTier, Place};
pub use disk_stats::DiskStats;
pub use error::FormatError;
pub use key::ChainKey;
#[cfg(feature = "object-store")]
pub use object::{ObjectError, ObjectTier};
pub use object_stats::ObjectStats;
pub use prefix::{PrefixReader, PrefixWriter, StoredPrefix, write_atomically};
pub use record::{HEADER_BYTES, KvShape, Record, RecordHeader};
pub use writer::{Claim, DiskWriter};
