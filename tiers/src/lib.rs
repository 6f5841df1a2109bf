//! Storage of KV blocks outside of the KV pool.
//!
//! * [`ChainKey`]: 256-bit keys of prefixes. A key identifies the KV format, the namespace and all
//!   tokens of a prefix.
//! * [`Record`]: the file format. A record holds some consecutive blocks of a prefix.
//! * [`PrefixWriter`] and [`PrefixReader`]: a whole prefix as a sequence of records, as it is
//!   exported and imported.
//!
//! Nothing here knows an engine, an async runtime or a clock. Everything that is read is verified
//! before it is returned: see [`Record::parse`].
#![forbid(unsafe_code)]

mod error;
mod key;
mod prefix;
mod record;

pub use error::FormatError;
pub use key::ChainKey;
pub use prefix::{PrefixReader, PrefixWriter, StoredPrefix, write_atomically};
pub use record::{HEADER_BYTES, KvShape, Record, RecordHeader};
