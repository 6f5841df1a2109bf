//! Goal: what was written is read back bit for bit, and nothing is returned if the bytes were
//! changed.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use stolon_kvcache::Namespace;
use stolon_tiers::{
    ExportedPrefix, FormatError, HEADER_BYTES, PrefixReader, RecordShape, StoredPrefix,
    write_atomically,
};

fn shape(block_size: usize) -> RecordShape {
    RecordShape { fingerprint: [7; 32], block_size, block_bytes: 3 * block_size + 5 }
}

/// A prefix of random tokens and blocks.
fn prefix(shape: &RecordShape, positions: usize, seed: u64) -> StoredPrefix {
    let mut random = SmallRng::seed_from_u64(seed);
    let tokens = (0..positions).map(|_| random.random()).collect();
    let block = |_| (0..shape.block_bytes).map(|_| random.random()).collect::<Vec<u8>>().into();
    let blocks = (0..positions / shape.block_size).map(block).collect();
    StoredPrefix { tokens, blocks }
}

fn write(shape: &RecordShape, namespace: Namespace, prefix: &StoredPrefix) -> Vec<Vec<u8>> {
    let bytes = prefix.blocks.concat();
    ExportedPrefix::new(*shape, namespace, prefix.tokens.clone(), bytes).collect()
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

/// Goal: ten thousand random mutations of a file are all refused, and so is every truncation.
#[test]
fn no_mutation_and_no_truncation_is_accepted() {
    let shape = shape(16);
    let stored = prefix(&shape, 9 * 16, 1);
    let bytes = write(&shape, Namespace::default(), &stored).concat();
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
    newer[8] = 2;
    let error = read(&shape, &newer, 100).expect_err("another version").to_string();
    assert_eq!(error, "stored KV: expected version 1 of the format, got 2");
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

/// Goal: a header with huge numbers is refused before memory is taken for what it announces.
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
