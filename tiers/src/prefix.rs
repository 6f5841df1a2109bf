//! A whole prefix as a sequence of records: what is exported and imported.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use bytes::Bytes;
use stolon_kvcache::{Namespace, len_before_checkpoint};

use crate::error::{FormatError, TierError};
use crate::files::{self, Links, write_atomically};
use crate::key::ChainKey;
use crate::record::{HEADER_BYTES, Record, RecordHeader, RecordShape};

/// Bytes of a file that are read at a time.
const PIECE_BYTES: usize = 1 << 20;

/// A verified prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredPrefix {
    /// All token ids: whole blocks.
    pub tokens: Vec<u32>,
    /// The bytes of all blocks, one item per block.
    pub blocks: Vec<Bytes>,
}

/// A copy of a prefix, as an iterator over its records.
#[derive(Debug)]
pub struct ExportedPrefix {
    shape: RecordShape,
    namespace: Namespace,
    tokens: Vec<u32>,
    /// The bytes of all blocks.
    blocks: Vec<u8>,
    /// Number of positions that were written.
    written: usize,
    key: ChainKey,
}

impl ExportedPrefix {
    /// The prefix `tokens`: whole blocks, at least one. `blocks` are the bytes of these blocks, one
    /// after another.
    ///
    /// # Panics
    /// If they are not.
    #[must_use]
    pub fn new(
        shape: RecordShape,
        namespace: Namespace,
        tokens: Vec<u32>,
        blocks: Vec<u8>,
    ) -> ExportedPrefix {
        let count = tokens.len() / shape.block_size;
        assert!(
            count > 0
                && tokens.len().is_multiple_of(shape.block_size)
                && blocks.len() == count * shape.block_bytes,
            "only whole blocks are stored"
        );
        let key = ChainKey::root(&shape.fingerprint, &namespace);
        ExportedPrefix { shape, namespace, tokens, blocks, written: 0, key }
    }

    /// Number of tokens of the prefix, without a checkpoint after it.
    #[must_use]
    pub fn token_count(&self) -> usize {
        len_before_checkpoint(&self.tokens)
    }

    /// Size of all records in bytes.
    #[must_use]
    pub fn file_bytes(&self) -> usize {
        let full = self.shape.record_positions();
        let (records, rest) = (self.tokens.len() / full, self.tokens.len() % full);
        let size = |positions| self.shape.record_bytes(positions).unwrap_or(usize::MAX);
        let rest = if rest > 0 { size(rest) } else { 0 };
        records.saturating_mul(size(full)).saturating_add(rest)
    }

    /// Writes the records to a file, atomically. Blocks.
    ///
    /// # Errors
    /// [`TierError::File`].
    pub fn write(self, path: &Path) -> Result<(), TierError> {
        let write =
            |file: &mut File| self.into_iter().try_for_each(|record| file.write_all(&record));
        write_atomically(path, write).map_err(|error| TierError::file(path, error))
    }
}

impl Iterator for ExportedPrefix {
    type Item = Vec<u8>;

    /// The next record.
    fn next(&mut self) -> Option<Vec<u8>> {
        let (start, shape) = (self.written, &self.shape);
        let end = self.tokens.len().min(start + shape.record_positions());
        if start == end {
            return None;
        }
        let byte = |position: usize| position / shape.block_size * shape.block_bytes;
        let (key, record) = Record::encode(
            shape,
            &self.namespace,
            &self.key,
            (start, self.tokens.len()),
            &self.tokens[start..end],
            &self.blocks[byte(start)..byte(end)],
        );
        (self.written, self.key) = (end, key);
        Some(record)
    }
}

/// Reads a prefix from pieces of any length, as they arrive. It holds what it has verified and at
/// most one record more.
#[derive(Debug)]
pub struct PrefixReader {
    shape: RecordShape,
    namespace: Namespace,
    /// Maximum number of positions of the prefix.
    positions_max: usize,
    /// The beginning of the next record.
    pending: Vec<u8>,
    /// Number of positions of the whole prefix, once the first record has arrived.
    prefix_positions: Option<usize>,
    key: ChainKey,
    prefix: StoredPrefix,
}

impl PrefixReader {
    /// A reader of prefixes of at most `positions_max` positions, of this format and namespace.
    #[must_use]
    pub fn new(shape: RecordShape, namespace: Namespace, positions_max: usize) -> PrefixReader {
        PrefixReader {
            shape,
            namespace,
            positions_max,
            pending: Vec::new(),
            prefix_positions: None,
            key: ChainKey::root(&shape.fingerprint, &namespace),
            prefix: StoredPrefix { tokens: Vec::new(), blocks: Vec::new() },
        }
    }

    /// Takes the next bytes and verifies the records that they complete.
    ///
    /// # Errors
    /// [`FormatError`] for the first thing that is not as expected. The reader must not be used any
    /// more then.
    pub fn push(&mut self, mut bytes: &[u8]) -> Result<(), FormatError> {
        while !bytes.is_empty() {
            if self.prefix_positions == Some(self.prefix.tokens.len()) {
                return Err(FormatError::TrailingBytes);
            }
            let wanted = match self.header()? {
                None => HEADER_BYTES,
                Some(header) => header.record_bytes,
            };
            let (taken, rest) = bytes.split_at(bytes.len().min(wanted - self.pending.len()));
            self.pending.extend_from_slice(taken);
            bytes = rest;
            if let Some(header) = self.header()?
                && self.pending.len() == header.record_bytes
            {
                self.accept()?;
            }
        }
        Ok(())
    }

    /// Pushes the bytes of a file. Blocks.
    ///
    /// # Errors
    /// [`TierError::File`], and as [`PrefixReader::push`].
    pub fn read(&mut self, path: &Path) -> Result<(), TierError> {
        let failed = |error| TierError::file(path, error);
        let mut file = files::open(path, Links::Follow).map_err(failed)?;
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            match file.read(&mut piece).map_err(failed)? {
                0 => return Ok(()),
                count => self.push(&piece[..count])?,
            }
        }
    }

    /// The prefix, after all bytes were pushed.
    ///
    /// # Errors
    /// [`FormatError::Truncated`] if it is not complete.
    pub fn finish(self) -> Result<StoredPrefix, FormatError> {
        if self.prefix_positions == Some(self.prefix.tokens.len()) {
            return Ok(self.prefix);
        }
        let expected = match self.header()? {
            None => HEADER_BYTES,
            Some(header) => header.record_bytes,
        };
        Err(FormatError::Truncated { expected, got: self.pending.len() })
    }

    /// The header of the pending record; `None` if it has not arrived yet.
    fn header(&self) -> Result<Option<RecordHeader>, FormatError> {
        if self.pending.len() < HEADER_BYTES {
            return Ok(None);
        }
        let header = RecordHeader::parse(&self.pending, &self.shape, &self.namespace)?;
        if header.prefix_positions > self.positions_max {
            return Err(FormatError::Number {
                what: "positions of the prefix",
                expected: format!("at most {}", self.positions_max),
                got: header.prefix_positions as u64,
            });
        }
        let continues = header.parent == self.key
            && header.first == self.prefix.tokens.len()
            && self.prefix_positions.is_none_or(|total| total == header.prefix_positions);
        if continues { Ok(Some(header)) } else { Err(FormatError::BrokenChain) }
    }

    /// Verifies the pending record and adds it to the prefix.
    fn accept(&mut self) -> Result<(), FormatError> {
        let bytes = Bytes::from(std::mem::take(&mut self.pending));
        let record = Record::parse(&bytes, &self.shape, &self.namespace)?;
        self.prefix_positions = Some(record.header.prefix_positions);
        self.key = record.header.key;
        self.prefix.tokens.extend(record.tokens);
        self.prefix.blocks.extend(record.blocks);
        Ok(())
    }
}
