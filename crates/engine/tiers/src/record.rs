//! [`Record`]: the tokens, the names of images and the KV of some consecutive blocks of a prefix,
//! as bytes.
//!
//! The README of this crate has the layout. A record is read in two steps, so that no memory is
//! allocated for a size that was not verified: [`RecordHeader::parse`] compares every field of the
//! header with what the reader expects and yields the exact size of the record, and
//! [`Record::parse`] verifies the rest.

use bytes::Bytes;
use stolon_kvcache::{ImageSpan, Namespace};

use crate::error::FormatError;
use crate::key::ChainKey;
use crate::tokens::RecordTokens;

/// Size of a record's header in bytes.
pub const HEADER_BYTES: usize = 176;
/// Size of the checksum at the end of a record in bytes.
const CHECKSUM_BYTES: usize = 32;
const MAGIC: &[u8; 8] = b"stolonKV";
/// The versions of records without images and of records with images. Programs that store no images
/// write and read the former.
const VERSION: u32 = 1;
const VERSION_WITH_IMAGES: u32 = 2;
/// Size of an image in a record in bytes: its content hash, its number of positions and its number
/// of columns.
const IMAGE_BYTES: usize = 16 + 4 + 4;
/// Positions of a full record, unless a block has more. Small enough that little is computed again
/// where a prompt ends within a record, large enough that few files and keys are needed.
const RECORD_POSITIONS: usize = 64;
/// Maximum number of positions of a prefix.
const POSITIONS_MAX: u64 = 1 << 32;

/// The KV format of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordShape {
    /// The fingerprint of the backend's `KvFormat`.
    pub fingerprint: [u8; 32],
    /// Positions per block, from 1 to 256.
    pub block_size: usize,
    /// Bytes per block: keys and values of all layers.
    pub block_bytes: usize,
}

impl RecordShape {
    /// Number of positions of every record of a prefix, except for the last one, which may have
    /// fewer. Records hold whole blocks.
    #[must_use]
    pub fn record_positions(&self) -> usize {
        self.block_size.max(RECORD_POSITIONS / self.block_size.max(1) * self.block_size)
    }

    /// Size in bytes of a record of `positions` positions, a multiple of the block size, with
    /// `images` different images; `None` if it overflows.
    #[must_use]
    pub fn record_bytes(&self, positions: usize, images: usize) -> Option<usize> {
        let blocks = (positions / self.block_size).checked_mul(self.block_bytes)?;
        let tokens = positions.checked_mul(size_of::<u32>())?;
        let images = images.checked_mul(IMAGE_BYTES)?;
        let content = blocks.checked_add(tokens)?.checked_add(images)?;
        content.checked_add(HEADER_BYTES + CHECKSUM_BYTES)
    }

    /// The largest size in bytes of a record: the size of a full one in which each position belongs
    /// to another image; the largest number if it overflows.
    pub(crate) fn record_bytes_max(&self) -> usize {
        self.record_bytes(self.record_positions(), self.record_positions()).unwrap_or(usize::MAX)
    }

    /// Size in bytes of the header and the tokens of a full record.
    pub(crate) fn head_bytes(&self) -> usize {
        HEADER_BYTES + self.record_positions() * size_of::<u32>()
    }

    /// Size in bytes of a full record without images; the largest number if it overflows.
    pub(crate) fn full_record_bytes(&self) -> usize {
        self.record_bytes(self.record_positions(), 0).unwrap_or(usize::MAX)
    }
}

/// The header of a record, which agrees with the reader's format and namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordHeader {
    /// First position of the record: a multiple of the positions of a full record.
    pub first: usize,
    /// Number of positions: whole blocks.
    pub positions: usize,
    /// Number of different images that have some of these positions.
    pub images: usize,
    /// Number of positions of the whole prefix that the record was written with.
    pub prefix_positions: usize,
    /// Key of the prefix before the record.
    pub parent: ChainKey,
    /// Key of the prefix up to the end of the record. Not verified yet.
    pub key: ChainKey,
    /// Size of the record in bytes, with its header.
    pub record_bytes: usize,
}

/// Whether bytes are as many as a record with KV of this format has. Its namespace, key and content
/// are not verified.
pub(crate) fn is_of(record: &[u8], shape: &RecordShape) -> bool {
    let header = RecordHeader::parse_any(record, shape);
    matches!(header, Ok((_, header)) if header.record_bytes == record.len())
}

impl RecordHeader {
    /// Parses the first [`HEADER_BYTES`] bytes of a record, which must be of this format and
    /// namespace.
    ///
    /// # Errors
    /// [`FormatError`] for the first field that is not as expected.
    pub fn parse(
        bytes: &[u8],
        shape: &RecordShape,
        namespace: &Namespace,
    ) -> Result<RecordHeader, FormatError> {
        let Some(bytes) = bytes.first_chunk::<HEADER_BYTES>() else {
            return Err(FormatError::Truncated { expected: HEADER_BYTES, got: bytes.len() });
        };
        if &field::<8>(bytes, 0) != MAGIC {
            return Err(FormatError::NotStoredKv);
        }
        let version = number_at(bytes, 8);
        if version != VERSION && version != VERSION_WITH_IMAGES {
            return Err(FormatError::Version { expected: VERSION_WITH_IMAGES, got: version });
        }
        if field::<32>(bytes, 48) != shape.fingerprint {
            return Err(FormatError::Fingerprint);
        }
        if field::<32>(bytes, 80) != namespace.to_bytes() {
            return Err(FormatError::Namespace);
        }
        RecordHeader::sizes(bytes, shape, version)
    }

    /// Parses the beginning of a record of any namespace, which is returned as well.
    fn parse_any(
        bytes: &[u8],
        shape: &RecordShape,
    ) -> Result<(Namespace, RecordHeader), FormatError> {
        let header = bytes.first_chunk::<HEADER_BYTES>();
        let namespace = header.map(|header| Namespace::from_bytes(field(header, 80)));
        let namespace = namespace.unwrap_or_default();
        Ok((namespace, RecordHeader::parse(bytes, shape, &namespace)?))
    }

    /// Parses the sizes in a header of this version.
    fn sizes(
        bytes: &[u8; HEADER_BYTES],
        shape: &RecordShape,
        version: u32,
    ) -> Result<RecordHeader, FormatError> {
        let number = |at| u64::from_le_bytes(field(bytes, at));
        let block_size = u64::from(number_at(bytes, 12));
        check(block_size == shape.block_size as u64, "positions per block", block_size, || {
            shape.block_size.to_string()
        })?;
        let block_bytes = number(16);
        check(block_bytes == shape.block_bytes as u64, "bytes per block", block_bytes, || {
            shape.block_bytes.to_string()
        })?;
        let full = shape.record_positions() as u64;
        let (first, prefix_positions) = (number(24), number(40));
        let [positions, images] = [32, 36].map(|at| u64::from(number_at(bytes, at)));
        let whole = positions > 0 && positions <= full && positions.is_multiple_of(block_size);
        check(whole, "positions of a record", positions, || {
            format!("a multiple of {block_size}, at most {full}")
        })?;
        let images_max = if version == VERSION { 0 } else { positions };
        let images_min = u64::from(version != VERSION);
        check((images_min..=images_max).contains(&images), "images of a record", images, || {
            format!("from {images_min} to {images_max}")
        })?;
        check(
            first.is_multiple_of(full) && first < POSITIONS_MAX,
            "first position",
            first,
            || format!("a multiple of {full} below 2^32"),
        )?;
        let end = first + positions;
        let fits = prefix_positions >= end && prefix_positions <= POSITIONS_MAX;
        check(fits, "positions of the prefix", prefix_positions, || format!("from {end} to 2^32"))?;
        check(
            positions == full || end == prefix_positions,
            "positions of a record",
            positions,
            || format!("{full}, because it is not the last one"),
        )?;
        let (positions, images) = (positions as usize, images as usize);
        let record_bytes = shape.record_bytes(positions, images).ok_or(FormatError::Number {
            what: "bytes per block",
            expected: "a record that fits in memory".to_owned(),
            got: block_bytes,
        })?;
        Ok(RecordHeader {
            first: first as usize,
            positions,
            images,
            prefix_positions: prefix_positions as usize,
            parent: ChainKey::from_bytes(field(bytes, 112)),
            key: ChainKey::from_bytes(field(bytes, 144)),
            record_bytes,
        })
    }
}

/// The beginning of a record without images: its header and its tokens, which agree with its key.
/// Its blocks are not verified.
#[derive(Clone, Debug)]
pub(crate) struct RecordHead {
    pub(crate) namespace: Namespace,
    pub(crate) header: RecordHeader,
    pub(crate) content: RecordTokens,
}

impl RecordHead {
    /// Parses the first [`RecordShape::head_bytes`] bytes of a record.
    ///
    /// # Errors
    /// [`FormatError`] for the first thing that is not as expected, such as an image.
    pub(crate) fn parse(bytes: &[u8], shape: &RecordShape) -> Result<RecordHead, FormatError> {
        let (namespace, header) = RecordHeader::parse_any(bytes, shape)?;
        let expected = HEADER_BYTES + header.positions * size_of::<u32>();
        let Some(tokens) = bytes.get(HEADER_BYTES..expected) else {
            return Err(FormatError::Truncated { expected, got: bytes.len() });
        };
        let content = RecordTokens { tokens: numbers(tokens), images: Vec::new() };
        if !content.is_canonical() {
            return Err(FormatError::Images);
        }
        if header.parent.then_record(&content) != header.key {
            return Err(FormatError::BrokenChain);
        }
        Ok(RecordHead { namespace, header, content })
    }
}

/// A verified record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its header.
    pub header: RecordHeader,
    /// The token ids of its positions, and its images.
    pub content: RecordTokens,
    /// The bytes of its blocks, one item per block: parts of the record's own memory.
    pub blocks: Vec<Bytes>,
}

impl Record {
    /// Parses a whole record and verifies its key and its checksum.
    ///
    /// # Errors
    /// [`FormatError`] for the first thing that is not as expected.
    pub fn parse(
        bytes: &Bytes,
        shape: &RecordShape,
        namespace: &Namespace,
    ) -> Result<Record, FormatError> {
        let header = RecordHeader::parse(bytes, shape, namespace)?;
        let RecordHeader { positions, images, record_bytes, .. } = header;
        if bytes.len() < record_bytes {
            return Err(FormatError::Truncated { expected: record_bytes, got: bytes.len() });
        }
        if bytes.len() > record_bytes {
            return Err(FormatError::TrailingBytes);
        }
        let (content, checksum) = bytes.split_at(record_bytes - CHECKSUM_BYTES);
        if *blake3::hash(content).as_bytes() != *checksum {
            return Err(FormatError::Checksum);
        }
        let (tokens, rest) = content[HEADER_BYTES..].split_at(positions * size_of::<u32>());
        let (images, blocks) = rest.split_at(images * IMAGE_BYTES);
        let images = images.as_chunks::<IMAGE_BYTES>().0.iter().map(image);
        let content = RecordTokens { tokens: numbers(tokens), images: images.collect() };
        if !content.is_canonical() {
            return Err(FormatError::Images);
        }
        if header.parent.then_record(&content) != header.key {
            return Err(FormatError::BrokenChain);
        }
        let blocks = blocks.chunks_exact(shape.block_bytes).map(|block| bytes.slice_ref(block));
        let blocks = blocks.collect();
        Ok(Record { header, content, blocks })
    }

    /// The bytes of a record with this content, which begins at position `first` of a prefix of
    /// `prefix_positions` positions, and whose key is returned as well. `blocks` are the bytes of
    /// its blocks, one after another.
    ///
    /// # Panics
    /// If `content` and `blocks` do not have the same number of whole blocks, from one block to a
    /// full record.
    #[must_use]
    pub(crate) fn encode(
        shape: &RecordShape,
        namespace: &Namespace,
        parent: &ChainKey,
        first: usize,
        prefix_positions: usize,
        content: &RecordTokens,
        blocks: &[u8],
    ) -> (ChainKey, Vec<u8>) {
        let RecordTokens { tokens, images } = content;
        let count = tokens.len() / shape.block_size;
        assert!(tokens.len().is_multiple_of(shape.block_size), "only whole blocks are stored");
        assert!((1..=shape.record_positions()).contains(&tokens.len()), "{count} blocks");
        assert_eq!(blocks.len(), count * shape.block_bytes, "{count} blocks");
        let key = parent.then_record(content);
        let size = shape.record_bytes(tokens.len(), images.len()).unwrap_or(0);
        let mut bytes = Vec::with_capacity(size);
        let version = if images.is_empty() { VERSION } else { VERSION_WITH_IMAGES };
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&version.to_le_bytes());
        bytes.extend_from_slice(&(shape.block_size as u32).to_le_bytes());
        for number in [shape.block_bytes, first] {
            bytes.extend_from_slice(&(number as u64).to_le_bytes());
        }
        for number in [tokens.len(), images.len()] {
            bytes.extend_from_slice(&(number as u32).to_le_bytes());
        }
        bytes.extend_from_slice(&(prefix_positions as u64).to_le_bytes());
        bytes.extend_from_slice(&shape.fingerprint);
        bytes.extend_from_slice(&namespace.to_bytes());
        bytes.extend_from_slice(parent.as_bytes());
        bytes.extend_from_slice(key.as_bytes());
        debug_assert_eq!(bytes.len(), HEADER_BYTES);
        tokens.iter().for_each(|token| bytes.extend_from_slice(&token.to_le_bytes()));
        for ImageSpan { content_hash, kv_len, columns } in images {
            bytes.extend_from_slice(&content_hash.to_le_bytes());
            bytes.extend_from_slice(&kv_len.to_le_bytes());
            bytes.extend_from_slice(&columns.to_le_bytes());
        }
        bytes.extend_from_slice(blocks);
        let checksum = blake3::hash(&bytes);
        bytes.extend_from_slice(checksum.as_bytes());
        debug_assert_eq!(bytes.len(), size);
        (key, bytes)
    }
}

/// The image in these bytes.
fn image(bytes: &[u8; IMAGE_BYTES]) -> ImageSpan {
    let (mut content_hash, mut kv_len, mut columns) = ([0; 16], [0; 4], [0; 4]);
    content_hash.copy_from_slice(&bytes[..16]);
    kv_len.copy_from_slice(&bytes[16..20]);
    columns.copy_from_slice(&bytes[20..]);
    ImageSpan {
        content_hash: u128::from_le_bytes(content_hash),
        kv_len: u32::from_le_bytes(kv_len),
        columns: u32::from_le_bytes(columns),
    }
}

/// The 32-bit numbers in these bytes.
fn numbers(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|number| u32::from_le_bytes(*number)).collect()
}

/// The 32-bit number at offset `at` of a header.
fn number_at(header: &[u8; HEADER_BYTES], at: usize) -> u32 {
    u32::from_le_bytes(field(header, at))
}

/// The `N` bytes of a header from offset `at`.
fn field<const N: usize>(header: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&header[at..at + N]);
    bytes
}

fn check(
    holds: bool,
    what: &'static str,
    got: u64,
    expected: impl FnOnce() -> String,
) -> Result<(), FormatError> {
    if holds { Ok(()) } else { Err(FormatError::Number { what, expected: expected(), got }) }
}
