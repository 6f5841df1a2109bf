//! Goal: written records are read back bit for bit, and nothing is returned if the bytes were
//! changed.

use rand::rngs::SmallRng;
use std::sync::Arc;

use rand::{Rng, SeedableRng};
use stolon_kvcache::{Namespace, TokenSpan, TokenSpanInterner};
use stolon_tiers::{
    ExportedPrefix, FormatError, HEADER_BYTES, NamedTokens, PrefixReader, RecordShape,
    StoredPrefix, write_atomically,
};

fn shape(block_size: usize) -> RecordShape {
    RecordShape { fingerprint: [7; 32], block_size, block_bytes: 3 * block_size + 5 }
}

/// A prefix of random tokens and blocks.
fn prefix(shape: &RecordShape, positions: usize, seed: u64) -> StoredPrefix {
    let mut random = SmallRng::seed_from_u64(seed);
    let tokens = (0..positions).map(|_| random.random::<u32>() >> 1).collect();
    let block = |_| (0..shape.block_bytes).map(|_| random.random()).collect::<Vec<u8>>().into();
    let blocks = (0..positions / shape.block_size).map(block).collect();
    StoredPrefix { tokens, images: Vec::new(), blocks }
}

/// A prefix that begins with a token and images of these contents and lengths, up to `positions`
/// positions. As in a file, each different image has the number of its first occurrence.
fn with_images(
    shape: &RecordShape,
    positions: usize,
    images: &[(u128, u32)],
) -> (StoredPrefix, TokenSpanInterner) {
    let StoredPrefix { tokens: text, blocks, .. } = prefix(shape, positions, 3);
    let (interner, mut tokens) = (TokenSpanInterner::new(99), vec![text[0]]);
    let mut known = Vec::new();
    for &(content_hash, kv_len) in images {
        let columns = if kv_len.is_multiple_of(2) { kv_len / 2 } else { 0 };
        let span = TokenSpan::Image { content_hash, kv_len, columns };
        interner.append(span, &mut tokens).expect("in range");
        let last = tokens.last().and_then(|&position| interner.image_at(position));
        known.extend(last.filter(|image| !known.contains(image)));
    }
    tokens.extend(&text[tokens.len().min(positions)..]);
    tokens.truncate(positions);
    (StoredPrefix { tokens, images: known, blocks }, interner)
}

fn write(shape: &RecordShape, namespace: Namespace, prefix: &StoredPrefix) -> Vec<Vec<u8>> {
    let bytes = prefix.blocks.concat();
    ExportedPrefix::new(*shape, namespace, prefix.tokens.clone().into(), bytes).collect()
}

/// The same for a prefix whose images are known to an interner.
fn write_named(
    shape: &RecordShape,
    (prefix, interner): &(StoredPrefix, TokenSpanInterner),
) -> Vec<Vec<u8>> {
    let tokens = NamedTokens::new(Arc::new(prefix.tokens.clone()), interner);
    let exported =
        ExportedPrefix::new(*shape, Namespace::default(), tokens, prefix.blocks.concat());
    let announced = exported.file_bytes();
    let records: Vec<Vec<u8>> = exported.collect();
    assert_eq!(records.iter().map(Vec::len).sum::<usize>(), announced);
    records
}

fn read(shape: &RecordShape, bytes: &[u8], piece: usize) -> Result<StoredPrefix, FormatError> {
    let mut reader = PrefixReader::new(*shape, Namespace::default(), 1000);
    bytes.chunks(piece).try_for_each(|piece| reader.push(piece))?;
    reader.finish()
}

/// Goal: a prefix of any length, with any block size and cut into any pieces, is read back as it
/// was written.
#[test]
fn prefixes_are_read_back_as_they_were_written() {
    for block_size in [1, 16, 64, 128, 256] {
        let shape = shape(block_size);
        for blocks in [1, 2, 4, 5, 9] {
            let stored = prefix(&shape, blocks * block_size, blocks as u64);
            let bytes = write(&shape, Namespace::default(), &stored).concat();
            for piece in [1, 175, 176, 177, 4096, bytes.len()] {
                let mut reader = PrefixReader::new(shape, Namespace::default(), 1 << 20);
                for piece in bytes.chunks(piece) {
                    reader.push(piece).expect("valid bytes");
                }
                assert!(reader.finish().expect("complete") == stored, "{block_size} {blocks}");
            }
        }
    }
}

/// Goal: a prefix with images is read back as it was written: images that are cut by records,
/// follow each other and occur again, and more than fit a record.
#[test]
fn images_are_read_back_as_they_were_written() {
    let shape = shape(1);
    let many: Vec<(u128, u32)> = (0..150).map(|n| (n % 70, 1 + n as u32 % 2)).collect();
    for images in [&[(1 << 100, 200)][..], &[(7, 3), (8, 3), (7, 3), (7, 4)], &many] {
        for extra in [0, 1, 70] {
            let positions = 1 + images.iter().map(|image| image.1 as usize).sum::<usize>() + extra;
            let stored = with_images(&shape, positions, images);
            let records = write_named(&shape, &stored);
            let versions = records.iter().map(|record| record[8]);
            let has_image = |part: &[u32]| part.iter().any(|&token| TokenSpan::is_image(token));
            let expected = stored.0.tokens.chunks(64).map(|part| 1 + u8::from(has_image(part)));
            assert!(versions.eq(expected), "records without images are those of version 1");
            assert_eq!(read(&shape, &records.concat(), 999), Ok(stored.0));
        }
    }
}

/// The same record with another part from offset `at` on, whose key and checksum are right.
fn forged(record: &[u8], at: usize, part: &[u8]) -> Vec<u8> {
    let mut record = record.to_vec();
    record[at..at + part.len()].copy_from_slice(part);
    let end = record.len() - 32;
    let checksum = blake3::hash(&record[..end]);
    record[end..].copy_from_slice(checksum.as_bytes());
    record
}

/// Goal: wrong names of images are refused with the reason, although the checksum is right.
#[test]
fn wrong_names_of_images_are_refused() {
    let shape = shape(1);
    let stored = with_images(&shape, 20, &[(1, 3), (2, 3)]);
    let records = write_named(&shape, &stored);
    let [record] = &records[..] else { panic!("one record") };
    let (tokens, names) = (HEADER_BYTES, HEADER_BYTES + 4 * 20);
    let refused =
        |at, part: &[u8]| read(&shape, &forged(record, at, part), 999).expect_err("it was changed");
    assert_eq!(refused(names, &[9]), FormatError::BrokenChain, "another content");
    assert_eq!(refused(names + 16, &[4]), FormatError::BrokenChain, "another length");
    assert_eq!(refused(names + 20, &[1]), FormatError::BrokenChain, "other columns");
    let first = stored.0.tokens[1];
    for number in [1, 2, 1 << 20] {
        let position = TokenSpan::with_image_number(first, number).to_le_bytes();
        assert_eq!(refused(tokens + 4, &position), FormatError::Images, "number {number}");
    }
    assert_eq!(refused(names + 24, &record[names..names + 24]), FormatError::Images, "twice");
    let message = refused(36, &21_u32.to_le_bytes()).to_string();
    assert_eq!(message, "stored KV: images of a record: expected from 1 to 20, got 21");
    let message = refused(8, &[1]).to_string();
    assert_eq!(message, "stored KV: images of a record: expected from 0 to 0, got 2");
    let message = refused(36, &[0]).to_string();
    assert_eq!(message, "stored KV: images of a record: expected from 1 to 20, got 0");
    // A record of version 1 has no positions of images, which would have no name.
    let text = write(&shape, Namespace::default(), &prefix(&shape, 20, 1)).concat();
    let nameless = forged(&text, tokens, &first.to_le_bytes());
    assert_eq!(read(&shape, &nameless, 999), Err(FormatError::Images));
}

/// Goal: a prefix that ends inside an image is refused, as is one that begins inside of one.
#[test]
fn incomplete_images_are_refused() {
    let shape = shape(1);
    let error = |stored: &(StoredPrefix, TokenSpanInterner)| {
        read(&shape, &write_named(&shape, stored).concat(), 999).map(|_| ())
    };
    let mut stored = with_images(&shape, 100, &[(1, 120)]);
    let length = |got| Err(FormatError::ImageLength { expected: 120, got });
    assert_eq!(error(&stored), length(99));
    stored = with_images(&shape, 140, &[(1, 120)]);
    assert_eq!(error(&stored), Ok(()));
    stored.0.tokens.drain(..2);
    stored.0.tokens.extend([1, 2]);
    assert_eq!(error(&stored), length(119));
    // 30 positions have no rows of 7 columns.
    let image = TokenSpan::Image { content_hash: 1, kv_len: 30, columns: 7 };
    let (interner, mut tokens) = (TokenSpanInterner::new(9), Vec::new());
    interner.append(image, &mut tokens).expect("in range");
    let StoredPrefix { blocks, .. } = prefix(&shape, 30, 3);
    let stored = StoredPrefix { tokens, images: Vec::new(), blocks };
    let grid = Err(FormatError::ImageGrid { columns: 7, got: 30 });
    assert_eq!(error(&(stored, interner)), grid);
}

/// Goal: ten thousand random mutations of a file are all refused, and so is every truncation.
#[test]
fn no_mutation_and_no_truncation_is_accepted() {
    let shape = shape(16);
    let stored = with_images(&shape, 9 * 16, &[(1, 70), (2, 5)]);
    let bytes = write_named(&shape, &stored).concat();
    let stored = stored.0;
    let mut random = SmallRng::seed_from_u64(2);
    for round in 0..10_000 {
        let mut changed = bytes.clone();
        match round % 4 {
            0 => {
                let at = random.random_range(0..changed.len());
                changed[at] ^= 1 << random.random_range(0..8);
            }
            1 => {
                for _ in 0..random.random_range(1..20) {
                    let at = random.random_range(0..changed.len());
                    changed[at] = random.random();
                }
            }
            2 => {
                let at = random.random_range(0..changed.len());
                let len = random.random_range(1..200.min(changed.len() - at + 1).max(2));
                changed.drain(at..(at + len).min(bytes.len()));
            }
            _ => {
                let at = random.random_range(0..=changed.len());
                let from = random.random_range(0..bytes.len());
                let to = (from + random.random_range(1..400)).min(bytes.len());
                changed.splice(at..at, bytes[from..to].iter().copied());
            }
        }
        if changed == bytes {
            continue;
        }
        let piece = random.random_range(1..2000);
        assert!(read(&shape, &changed, piece).is_err(), "round {round} was accepted");
    }
    for len in 0..bytes.len() {
        let refused = read(&shape, &bytes[..len], 1000).expect_err("it is cut off");
        assert!(matches!(refused, FormatError::Truncated { .. }), "{len}: {refused}");
    }
    assert_eq!(read(&shape, &bytes, 1000), Ok(stored));
}

/// Goal: records of another model, namespace, block size or version, in another order, or of
/// another prefix are refused by the right name.
#[test]
fn what_belongs_elsewhere_is_refused_by_its_name() {
    let shape = shape(16);
    let stored = prefix(&shape, 9 * 16, 1);
    let records = write(&shape, Namespace::default(), &stored);
    let with = |shape| read(&shape, &records.concat(), 100).expect_err("another format");
    assert_eq!(with(RecordShape { fingerprint: [8; 32], ..shape }), FormatError::Fingerprint);
    let message = with(RecordShape { block_size: 32, ..shape }).to_string();
    assert_eq!(message, "stored KV: positions per block: expected 32, got 16");
    let message = with(RecordShape { block_bytes: 54, ..shape }).to_string();
    assert_eq!(message, "stored KV: bytes per block: expected 54, got 53");
    let salted = Namespace::builder().salt("tenant").build();
    let bytes = write(&shape, salted, &stored).concat();
    assert_eq!(read(&shape, &bytes, 100), Err(FormatError::Namespace));
    let mut newer = records.concat();
    newer[8] = 3;
    let error = read(&shape, &newer, 100).expect_err("another version").to_string();
    assert_eq!(error, "stored KV: expected version 2 of the format or an earlier one, got 3");
    let picture = [b"GIF89a".as_slice(), &[0; 400]].concat();
    assert_eq!(read(&shape, &picture, 100), Err(FormatError::NotStoredKv));

    let other = write(&shape, Namespace::default(), &prefix(&shape, 9 * 16, 2));
    let order = |order: &[&Vec<u8>]| {
        read(&shape, &order.iter().copied().flatten().copied().collect::<Vec<u8>>(), 999)
    };
    assert_eq!(order(&[&records[0], &records[2], &records[1]]), Err(FormatError::BrokenChain));
    assert_eq!(order(&[&records[1], &records[2]]), Err(FormatError::BrokenChain));
    assert_eq!(order(&[&records[0], &other[1], &records[2]]), Err(FormatError::BrokenChain));
    let whole: Vec<&Vec<u8>> = records.iter().collect();
    assert_eq!(order(&[&whole[..], &[&records[2]]].concat()), Err(FormatError::TrailingBytes));
}

/// Goal: a header with huge numbers is refused before memory is allocated for them.
#[test]
fn huge_numbers_are_refused_by_the_header() {
    let shape = shape(16);
    let bytes = write(&shape, Namespace::default(), &prefix(&shape, 64, 1)).concat();
    for at in [16, 24, 32, 40] {
        for value in [u64::MAX, u64::MAX - 63, 1 << 63, 1 << 32, 0x1_0000_0010] {
            let mut changed = bytes[..HEADER_BYTES].to_vec();
            changed[at..at + 8].copy_from_slice(&value.to_le_bytes());
            let refused = read(&shape, &changed, 100).expect_err("a huge number");
            assert!(
                matches!(refused, FormatError::Number { .. } | FormatError::BrokenChain),
                "{at} {value}: {refused}"
            );
        }
    }
    let mut reader = PrefixReader::new(shape, Namespace::default(), 32);
    let refused = reader.push(&bytes).expect_err("longer than the pool");
    assert_eq!(
        refused.to_string(),
        "stored KV: positions of the prefix: expected at most 32, got 64"
    );
}

/// Goal: a failed write leaves the old file and nothing else.
#[test]
fn a_failed_write_leaves_the_old_file() {
    use std::io::Write;

    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("prefix.kv");
    write_atomically(&path, |file| file.write_all(b"old")).expect("written");
    let failed = write_atomically(&path, |file| {
        file.write_all(b"half of the n")?;
        Err(std::io::Error::other("disk full"))
    });
    assert_eq!(failed.expect_err("it failed").to_string(), "disk full");
    assert_eq!(std::fs::read(&path).expect("it is there"), b"old");
    assert_eq!(std::fs::read_dir(directory.path()).expect("readable").count(), 1);
    write_atomically(&path, |file| file.write_all(b"new")).expect("written");
    assert_eq!(std::fs::read(&path).expect("it is there"), b"new");
}
