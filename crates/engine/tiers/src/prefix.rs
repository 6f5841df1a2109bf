//! A whole prefix as a sequence of records: the format of exports and imports.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use bytes::Bytes;
use stolon_kvcache::{ImageSpan, Namespace, TokenSpan, len_before_checkpoint};

use crate::error::{FormatError, TierError};
use crate::files::{self, Links, write_atomically};
use crate::key::ChainKey;
use crate::record::{HEADER_BYTES, Record, RecordHeader, RecordShape};
use crate::tokens::NamedTokens;

/// Bytes of a file that are read at a time.
const PIECE_BYTES: usize = 1 << 20;

/// A verified prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredPrefix {
    /// All token ids: whole blocks. The numbers of images are indices of `images`.
    pub tokens: Vec<u32>,
    /// The images. Each one has as many positions as it should.
    pub images: Vec<ImageSpan>,
    /// The bytes of all blocks, one item per block.
    pub blocks: Vec<Bytes>,
}

/// A copy of a prefix, as an iterator over its records.
#[derive(Debug)]
pub struct ExportedPrefix {
    shape: RecordShape,
    namespace: Namespace,
    tokens: NamedTokens,
    /// The bytes of all blocks.
    blocks: Vec<u8>,
    /// Number of positions that were written.
    written: usize,
    key: ChainKey,
}

impl ExportedPrefix {
    /// The prefix `tokens`: whole blocks, at least one, and whole images, which all have a name.
    /// `blocks` are the bytes of these blocks, one after another.
    ///
    /// # Panics
    /// If they are not.
    #[must_use]
    pub fn new(
        shape: RecordShape,
        namespace: Namespace,
        tokens: NamedTokens,
        blocks: Vec<u8>,
    ) -> ExportedPrefix {
        let positions = tokens.tokens();
        let count = positions.len() / shape.block_size;
        assert!(tokens.are_all_named(), "only images with a name are stored");
        assert!(
            count > 0
                && positions.len().is_multiple_of(shape.block_size)
                && blocks.len() == count * shape.block_bytes,
            "only whole blocks are stored"
        );
        let key = ChainKey::root(&shape.fingerprint, &namespace);
        ExportedPrefix { shape, namespace, tokens, blocks, written: 0, key }
    }

    /// Number of tokens of the prefix, without a checkpoint after it.
    #[must_use]
    pub fn token_count(&self) -> usize {
        len_before_checkpoint(self.tokens.tokens())
    }

    /// Size of all records in bytes.
    #[must_use]
    pub fn file_bytes(&self) -> usize {
        let (full, len) = (self.shape.record_positions(), self.tokens.tokens().len());
        let records = (0..len).step_by(full).filter_map(|start| {
            let record = self.tokens.record(start..len.min(start + full))?;
            self.shape.record_bytes(record.tokens.len(), record.images.len())
        });
        records.fold(0, usize::saturating_add)
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
        let (start, shape, len) = (self.written, &self.shape, self.tokens.tokens().len());
        let end = len.min(start + shape.record_positions());
        if start == end {
            return None;
        }
        let content = self.tokens.record(start..end)?;
        let byte = |position: usize| position / shape.block_size * shape.block_bytes;
        let (key, record) = Record::encode(
            shape,
            &self.namespace,
            &self.key,
            start,
            len,
            &content,
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
    /// The indices of the images.
    numbers: HashMap<ImageSpan, u32>,
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
            prefix: StoredPrefix { tokens: Vec::new(), images: Vec::new(), blocks: Vec::new() },
            numbers: HashMap::new(),
        }
    }

    /// Takes the next bytes and verifies the records that they complete.
    ///
    /// # Errors
    /// [`FormatError`] for the first thing that is not as expected. After an error the reader must
    /// not be used any longer.
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
    /// [`FormatError::Truncated`] if it is not complete, [`FormatError::ImageLength`] if an image
    /// is not.
    pub fn finish(self) -> Result<StoredPrefix, FormatError> {
        if self.prefix_positions == Some(self.prefix.tokens.len()) {
            check_images(&self.prefix)?;
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
        let StoredPrefix { tokens, images, .. } = &mut self.prefix;
        for (position, image) in record.content.named() {
            let number = image.map_or(0, |image| {
                *self.numbers.entry(image).or_insert_with(|| {
                    images.push(image);
                    images.len() as u32 - 1
                })
            });
            tokens.push(TokenSpan::with_image_number(position, number));
        }
        self.prefix.blocks.extend(record.blocks);
        Ok(())
    }
}

/// Checks that each image has all of its positions, and no more, and that they fill the rows of its
/// grid.
fn check_images(prefix: &StoredPrefix) -> Result<(), FormatError> {
    let StoredPrefix { tokens, images, .. } = prefix;
    let mut at = 0;
    while let Some(&position) = tokens.get(at) {
        let number = TokenSpan::image_number(position);
        let Some(image) = number.and_then(|number| images.get(number as usize)) else {
            at += 1;
            continue;
        };
        let is_next = |next: &&u32| TokenSpan::image_number(**next) == number;
        let own = tokens[at..].iter().take_while(is_next);
        let inner = own.take_while(|next| !TokenSpan::may_end_after(**next)).count();
        let ends = tokens.get(at + inner).filter(is_next).is_some();
        let got = inner + usize::from(ends);
        if !ends || got != image.kv_len as usize {
            return Err(FormatError::ImageLength { expected: image.kv_len, got });
        }
        if image.columns > 0 && !image.kv_len.is_multiple_of(image.columns) {
            return Err(FormatError::ImageGrid { columns: image.columns, got });
        }
        at += got;
    }
    Ok(())
}
