//! The index of a disk tier: which records are there, how large they are, and when they were last
//! used. It is made from the names, sizes and times of the files.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::path::Path;
use std::time::SystemTime;

use crate::key::ChainKey;

/// The extension of the files.
pub(crate) const EXTENSION: &str = "kv";

/// What is on the disk.
#[derive(Debug, Default)]
pub(crate) struct Index {
    entries: HashMap<ChainKey, Entry>,
    /// The keys by their last use, oldest first.
    order: BTreeMap<u64, ChainKey>,
    bytes: u64,
    clock: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    bytes: u64,
    /// Key in [`Index::order`].
    last_use: u64,
}

impl Index {
    /// Finds the records in a folder, and removes what writes that did not end have left.
    pub(crate) fn scan(folder: &Path) -> io::Result<Index> {
        let mut found = Vec::new();
        for part in fs::read_dir(folder)? {
            let part = part?.path();
            if !part.is_dir() {
                continue;
            }
            for file in fs::read_dir(&part)? {
                let path = file?.path();
                if path.extension().is_some_and(|extension| extension == "tmp") {
                    // If it cannot be removed, it takes room and nothing else.
                    let _ = fs::remove_file(&path);
                    continue;
                }
                let stem = path.file_stem().and_then(|stem| stem.to_str());
                let key = stem.and_then(ChainKey::from_hex);
                let is_record = path.extension().is_some_and(|extension| extension == EXTENSION);
                if let (Some(key), true, Ok(metadata)) = (key, is_record, fs::metadata(&path)) {
                    let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                    found.push((used, key, metadata.len()));
                }
            }
        }
        found.sort_unstable();
        let mut index = Index::default();
        found.into_iter().for_each(|(_, key, bytes)| index.insert(key, bytes));
        Ok(index)
    }

    pub(crate) fn contains(&self, key: &ChainKey) -> bool {
        self.entries.contains_key(key)
    }

    /// Number of records.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Size of all records in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Adds a record as the one that was used last.
    pub(crate) fn insert(&mut self, key: ChainKey, bytes: u64) {
        self.remove(&key);
        self.clock += 1;
        self.entries.insert(key, Entry { bytes, last_use: self.clock });
        self.order.insert(self.clock, key);
        self.bytes += bytes;
    }

    pub(crate) fn remove(&mut self, key: &ChainKey) {
        if let Some(entry) = self.entries.remove(key) {
            self.order.remove(&entry.last_use);
            self.bytes -= entry.bytes;
        }
    }

    /// Removes the least recently used record.
    pub(crate) fn remove_oldest(&mut self) -> Option<ChainKey> {
        let (_, &oldest) = self.order.first_key_value()?;
        self.remove(&oldest);
        Some(oldest)
    }

    /// The keys of all records, those that were used last first.
    pub(crate) fn keys(&self) -> impl Iterator<Item = ChainKey> {
        self.order.values().rev().copied()
    }

    /// Removes all records and returns their keys.
    pub(crate) fn clear(&mut self) -> Vec<ChainKey> {
        std::mem::take(self).order.into_values().collect()
    }

    /// Marks a record as used.
    pub(crate) fn touch(&mut self, key: &ChainKey) {
        if let Some(entry) = self.entries.get(key).copied() {
            self.insert(*key, entry.bytes);
        }
    }
}
