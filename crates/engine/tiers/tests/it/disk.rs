//! Goal: even if its files are changed or lost, a disk tier returns only what it has written for
//! these tokens, and everything else is a miss.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use stolon_kvcache::{EvictionOrder, EvictionPolicy, Namespace};
use stolon_tiers::{DiskError, DiskTier, DiskWriter, NamedTokens, Place, RecordShape, Tier};

use support::files;

use crate::support::records as support;

const SHAPE: RecordShape = RecordShape { fingerprint: [3; 32], block_size: 16, block_bytes: 100 };
/// Positions and bytes of a record.
const RECORD: usize = 64;
const RECORD_BYTES: u64 = 176 + 4 * 64 + 4 * 100 + 32;

fn lru() -> Box<dyn EvictionOrder> {
    EvictionPolicy::Lru.order()
}

fn open(directory: &Path) -> DiskTier {
    DiskTier::open(directory, 1 << 20, SHAPE, lru()).expect("the directory is free")
}

/// The tokens of prompt `seed`. All prompts begin with the same record.
fn tokens(seed: u32, records: usize) -> Vec<u32> {
    (0..(records * RECORD) as u32).map(|n| if n < 64 { n } else { n * 7 + seed * 1000 }).collect()
}

/// The bytes of the blocks of a prompt, which depend on all tokens up to their end.
fn blocks(tokens: &[u32]) -> Vec<u8> {
    let block = |end: usize| {
        let sum = tokens[..end].iter().fold(17_u64, |sum, &t| sum.wrapping_mul(31) + u64::from(t));
        let mut random = SmallRng::seed_from_u64(sum);
        (0..SHAPE.block_bytes).map(|_| random.random()).collect::<Vec<u8>>()
    };
    (1..=tokens.len() / 16).flat_map(|block_end| block(block_end * 16)).collect()
}

/// Number of positions from the start of a prompt that are stored.
fn match_len(tier: &DiskTier, namespace: &Namespace, tokens: &[u32]) -> usize {
    let tokens = NamedTokens::from(tokens.to_vec());
    let places = tier.shape().places(namespace, &tokens);
    places.take_while(|place| tier.contains(&place.key)).count() * RECORD
}

fn write(tier: &DiskTier, tokens: &[u32]) {
    tier.write(&Namespace::default(), &tokens.to_vec().into(), 0, &blocks(tokens), 0);
}

/// Reads a prompt and checks the bytes. Returns the number of positions.
fn read(tier: &DiskTier, tokens: &[u32]) -> usize {
    let got = read_from(tier, tokens, 0);
    assert!(blocks(tokens).starts_with(&got), "wrong bytes");
    got.len() / SHAPE.block_bytes * 16
}

/// The stored bytes of a prompt from position `from` on.
fn read_from(tier: &DiskTier, tokens: &[u32], from: usize) -> Vec<u8> {
    let named = NamedTokens::from(tokens.to_vec());
    let mut places: Vec<Place> = SHAPE.places(&Namespace::default(), &named).collect();
    places.truncate(match_len(tier, &Namespace::default(), tokens) / RECORD);
    let wanted = &places[(from / RECORD).min(places.len())..];
    let blocks = tier.read(&Namespace::default(), &named, wanted);
    tier.touch(&places, 0);
    blocks.concat()
}

/// Goal: records that were written are found and read, also after the directory was opened again,
/// and a second user of the directory is refused.
#[test]
fn records_survive_a_restart() {
    let directory = tempfile::tempdir().expect("a directory");
    let tier = open(directory.path());
    write(&tier, &tokens(1, 3));
    write(&tier, &tokens(2, 2)[..100]);
    let refused =
        DiskTier::open(directory.path(), 1 << 20, SHAPE, lru()).expect_err("it is in use");
    assert!(matches!(refused, DiskError::Locked { .. }), "{refused}");
    drop(tier);
    let tier = open(directory.path());
    assert_eq!(tier.stats().records, 3);
    for (prompt, stored) in
        [(tokens(1, 3), 192), (tokens(1, 3)[..191].to_vec(), 128), (tokens(2, 2), 64)]
    {
        assert_eq!(match_len(&tier, &Namespace::default(), &prompt), stored);
        assert_eq!(read(&tier, &prompt), stored);
    }
    assert_eq!(read_from(&tier, &tokens(1, 3), 64), blocks(&tokens(1, 3))[400..]);
    let salted = Namespace::builder().salt("tenant").build();
    assert_eq!(match_len(&tier, &salted, &tokens(1, 3)), 0);
    tier.close();
    assert_eq!(match_len(&tier, &Namespace::default(), &tokens(1, 3)), 0);
    let other = RecordShape { fingerprint: [4; 32], ..SHAPE };
    let other = DiskTier::open(directory.path(), 1 << 20, other, lru()).expect("it was closed");
    assert_eq!(match_len(&other, &Namespace::default(), &tokens(1, 3)), 0, "another model");
}

/// Goal: hundreds of random changes of the files never yield a wrong byte. A refused record is
/// removed and can be written again.
#[test]
fn damaged_files_are_misses() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut random = SmallRng::seed_from_u64(1);
    let mut tier = open(directory.path());
    let mut refused = 0;
    for round in 0..600 {
        for seed in 0..3 {
            write(&tier, &tokens(seed, 4));
        }
        let paths = files(directory.path());
        assert_eq!(paths.len(), 1 + 3 * 3);
        let path = &paths[random.random_range(0..paths.len())];
        let mut bytes = std::fs::read(path).expect("readable");
        match round % 5 {
            0 => std::fs::remove_file(path).expect("removed"),
            1 => bytes.truncate(random.random_range(0..bytes.len())),
            2 => std::fs::copy(&paths[0], path).map(drop).expect("copied"),
            3 => bytes.push(random.random()),
            _ => {
                let at = random.random_range(0..bytes.len());
                bytes[at] ^= 1 << random.random_range(0..8);
            }
        }
        if matches!(round % 5, 1 | 3 | 4) {
            std::fs::write(path, bytes).expect("written");
        }
        if round % 100 == 0 {
            refused += tier.stats().records_refused;
            drop(tier);
            tier = open(directory.path());
        }
        for seed in 0..3 {
            read(&tier, &tokens(seed, 4));
        }
    }
    assert!(refused + tier.stats().records_refused > 400, "{refused} were refused");
}

/// Goal: pipes and links in place of the tier's files are neither waited for nor followed: links of
/// records are misses, and a directory with such a lock or key is refused.
#[cfg(unix)]
#[test]
fn special_files_are_not_opened() {
    use std::os::unix::fs::symlink;

    let pipe = |path: &Path| {
        let made = Command::new("mkfifo").arg(path).status().expect("a command");
        assert!(made.success());
    };
    let directory = tempfile::tempdir().expect("a directory");
    let tier = open(directory.path());
    (0..2).for_each(|seed| write(&tier, &tokens(seed, 2)));
    let outside = tempfile::NamedTempFile::new().expect("a file");
    let used = outside.as_file().metadata().and_then(|file| file.modified()).expect("a time");
    let key = directory.path().join("v1/namespace-key");
    for (number, record) in files(directory.path()).into_iter().enumerate() {
        std::fs::remove_file(&record).expect("removed");
        match number % 2 {
            0 => pipe(&record),
            _ => symlink(outside.path(), &record).expect("a link"),
        }
    }
    for seed in 0..2 {
        assert_eq!(read(&tier, &tokens(seed, 2)), 0);
    }
    let after = outside.as_file().metadata().and_then(|file| file.modified()).expect("a time");
    assert_eq!(used, after);
    drop(tier);
    assert_eq!(open(directory.path()).stats().records, 0);
    for file in [key, directory.path().join("lock")] {
        std::fs::remove_file(&file).expect("removed");
        pipe(&file);
        let refused = DiskTier::open(directory.path(), 1 << 20, SHAPE, lru());
        assert!(refused.is_err_and(|error| error.to_string().contains("regular file")));
    }
}

/// Goal: the budget holds, the least recently used records go first, and the end of a prefix goes
/// before its beginning, also after a restart.
#[test]
fn the_least_recently_used_records_are_removed() {
    let directory = tempfile::tempdir().expect("a directory");
    let tier = DiskTier::open(directory.path(), 6 * RECORD_BYTES, SHAPE, lru()).expect("free");
    write(&tier, &tokens(1, 4));
    write(&tier, &tokens(2, 3));
    assert_eq!((tier.stats().records, tier.stats().bytes), (6, 6 * RECORD_BYTES));
    assert_eq!(read(&tier, &tokens(1, 4)), 256);
    write(&tier, &tokens(3, 2));
    assert_eq!(match_len(&tier, &Namespace::default(), &tokens(1, 4)), 256, "it was used");
    assert_eq!(match_len(&tier, &Namespace::default(), &tokens(2, 3)), 128, "its end is gone");
    drop(tier);
    let tier = DiskTier::open(directory.path(), 3 * RECORD_BYTES, SHAPE, lru()).expect("free");
    assert_eq!((tier.stats().records, files(directory.path()).len()), (3, 3));
    assert!(match_len(&tier, &Namespace::default(), &tokens(1, 4)) >= 64, "beginnings stay");
}

/// Goal: without the right to write, or if the directory is gone, nothing but the writes fails.
#[test]
fn failing_writes_are_counted_and_nothing_else_happens() {
    let directory = tempfile::tempdir().expect("a directory");
    let tier = open(directory.path());
    write(&tier, &tokens(1, 2));
    std::fs::remove_dir_all(directory.path().join("v1")).expect("removed");
    assert_eq!(read(&tier, &tokens(1, 2)), 0);
    let refused = tier.stats().records_refused;
    assert!((1..=2).contains(&refused), "a read ends at the first of them: {refused}");
    write(&tier, &tokens(1, 2));
    assert_eq!(read(&tier, &tokens(1, 2)), 128, "the folder was made again");
    std::fs::remove_dir_all(directory.path().join("v1")).expect("removed");
    std::fs::write(directory.path().join("v1"), "a file in its place").expect("written");
    write(&tier, &tokens(5, 3));
    let stats = tier.stats();
    assert_eq!((stats.writes_failed, stats.writes_skipped > 0), (1, true), "{stats:?}");
    assert_eq!(read(&tier, &tokens(5, 3)), 0);
    drop(tier);
    let refused = DiskTier::open(directory.path(), 1, SHAPE, lru()).expect_err("a file");
    assert!(refused.to_string().contains("v1"), "{refused}");
}

/// Goal: the writer writes all that was added before a flush, and nothing twice: a claimed record
/// cannot be claimed again before the claim ends, and a stored one cannot be claimed at all.
#[test]
fn the_writer_stores_every_record_once() {
    let directory = tempfile::tempdir().expect("a directory");
    let tier = Arc::new(open(directory.path()));
    let writer = DiskWriter::start(Arc::clone(&tier), |_| {}).expect("a thread");
    let claim = |seed, records| {
        let tokens = NamedTokens::from(tokens(seed, records));
        writer.claim(Namespace::default(), &tokens, 0..tokens.tokens().len())
    };
    let first = claim(0, 1).expect("nothing is stored");
    assert_eq!(first.positions(), 0..64);
    let others: Vec<_> = (0..20).map(|seed| claim(seed, 3).expect("two records")).collect();
    assert!(others.iter().all(|claim| claim.positions() == (64..192)), "the first is claimed");
    assert!(claim(0, 3).is_none());
    drop(first);
    let first = claim(0, 3).expect("the first one was dropped");
    assert_eq!(first.positions(), 0..64);
    for (seed, claim) in (0..).zip(others).chain([(0, first)]) {
        let range = claim.positions();
        let bytes = |position: usize| position / 16 * SHAPE.block_bytes;
        claim.write(blocks(&tokens(seed, 3))[bytes(range.start)..bytes(range.end)].to_vec());
    }
    writer.flush();
    let stats = tier.stats();
    assert_eq!((stats.records, stats.records_written), (1 + 20 * 2, 1 + 20 * 2));
    assert!((0..20).all(|seed| read(&tier, &tokens(seed, 3)) == 192));
    assert!(claim(0, 3).is_none(), "all of it is stored");
}

/// Goal: no more is claimed than may wait, from the beginning of the prefix on, and the rest can be
/// claimed later.
#[test]
fn claims_are_bounded() {
    let directory = tempfile::tempdir().expect("a directory");
    let shape = RecordShape { block_bytes: 15 << 20, ..SHAPE };
    let tier = Arc::new(DiskTier::open(directory.path(), 1 << 40, shape, lru()).expect("free"));
    let writer = DiskWriter::start(Arc::clone(&tier), |_| {}).expect("a thread");
    let prompt = NamedTokens::from(tokens(1, 6));
    let claim = || writer.claim(Namespace::default(), &prompt, 0..prompt.tokens().len());
    let first = claim().expect("it is free");
    assert_eq!(first.positions(), 0..256, "records have 60 MiB, and 256 MiB may wait");
    assert!(claim().is_none());
    assert_eq!(tier.stats().writes_skipped, 4);
    drop(first);
    assert_eq!(claim().map(|claim| claim.positions()), Some(0..256));
}

/// The name of the variable by which the test below tells its other process where to write.
const CHILD: &str = "STOLON_TIERS_TEST_DIRECTORY";

/// Goal: a process that is killed at any moment leaves no wrong records behind, and the records
/// that it had written are there.
#[test]
fn a_killed_process_leaves_nothing_wrong() {
    if let Some(directory) = std::env::var_os(CHILD) {
        let tier = open(Path::new(&directory));
        for seed in 0.. {
            write(&tier, &tokens(seed % 200, 3));
        }
    }
    let directory = tempfile::tempdir().expect("a directory");
    let mut random = SmallRng::seed_from_u64(4);
    for _ in 0..30 {
        let mut child = Command::new(std::env::current_exe().expect("a path"))
            .args(["disk::a_killed_process_leaves_nothing_wrong", "--exact", "--nocapture"])
            .env(CHILD, directory.path())
            .stdout(std::process::Stdio::null())
            .spawn()
            .expect("it starts");
        std::thread::sleep(std::time::Duration::from_millis(random.random_range(20..90)));
        child.kill().expect("it runs");
        child.wait().expect("it ends");
        let tier = open(directory.path());
        for seed in 0..200 {
            let prompt = tokens(seed, 3);
            assert_eq!(read(&tier, &prompt), match_len(&tier, &Namespace::default(), &prompt));
        }
        assert_eq!(tier.stats().records_refused, 0, "only complete files are found");
        let is_left = |path: &PathBuf| path.extension().is_some_and(|e| e == "tmp");
        assert!(!files(directory.path()).iter().any(is_left));
    }
    assert!(!files(directory.path()).is_empty(), "something was written");
}
