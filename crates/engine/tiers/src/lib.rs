//! Storage of KV blocks outside of the KV pool.
//!
//! * [`ChainKey`]: 256-bit keys of prefixes. A key identifies the KV format, the namespace and all
//!   tokens of a prefix.
//! * [`Record`]: the file format. A record holds some consecutive blocks of a prefix.
//! * [`ExportedPrefix`] and [`PrefixReader`]: a whole prefix as a sequence of records, as it is
//!   exported and imported.
//! * [`DiskTier`]: records in a directory, up to a budget, and [`DiskWriter`], which writes to it
//!   on a thread of its own.
//! * `ObjectTier` (feature `object-store`): records in an object store.
//! * [`plan()`]: a plain function that decides which records of a prompt are read.
//! * [`Tiers`]: combines all of this for an engine: it stores computed KV and reads it back. It is
//!   a `KvSink` and a `KvSource` of `stolon-scheduler`.
//!
//! Only the object tier needs an async runtime. Everything that is read is verified before it is
//! returned: see [`Record::parse`].
#![forbid(unsafe_code)]

mod announced;
mod disk;
mod disk_index;
mod disk_stats;
mod error;
mod files;
mod key;
mod load;
#[cfg(feature = "object-store")]
mod object;
mod object_error;
mod object_stats;
mod place;
mod plan;
mod policy;
mod prefix;
mod record;
#[cfg(feature = "object-store")]
mod remote;
mod shared;
mod tier;
mod tiers;
mod tokens;
mod uses;
mod writer;

pub use disk::{DiskError, DiskTier, ProtectedRecords};
pub use disk_stats::DiskStats;
pub use error::{FormatError, TierError};
pub use files::write_atomically;
pub use key::ChainKey;
#[cfg(feature = "object-store")]
pub use object::ObjectTier;
pub use object_error::ObjectError;
pub use object_stats::ObjectStats;
pub use place::Place;
pub use plan::{Lookup, ReadPlan, Speeds, plan};
pub use policy::{PrefetchPolicy, WritePolicy};
pub use prefix::{ExportedPrefix, PrefixReader, StoredPrefix};
pub use record::{HEADER_BYTES, Record, RecordHeader, RecordShape};
pub use tier::{RemoteTier, Tier};
pub use tiers::{TierMatch, TierSettings, Tiers};
pub use tokens::{NamedTokens, RecordTokens};
pub use writer::{Claim, DiskWriter};
