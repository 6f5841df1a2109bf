//! Goal: a copy of a disk tier's content that is made of its events has the blocks that are on the
//! disk, whatever happens to the files, and no others.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use stolon_kvcache::{
    BlockHasher, CacheEvent, EventReceiver, EvictionPolicy, Namespace, TokenSpan,
    TokenSpanInterner, TreeBuilder, checkpoint_positions,
};
use stolon_tiers::{DiskTier, NamedTokens, Place, RecordShape, Tier};

use support::files;

use crate::support::records as support;

/// Positions of a block.
const BLOCK: usize = 4;
const SHAPE: RecordShape =
    RecordShape { fingerprint: [3; 32], block_size: BLOCK, block_bytes: 100 };
/// Positions, blocks and bytes of a record.
const RECORD: usize = 64;
const BLOCKS: usize = RECORD / BLOCK;
const RECORD_BYTES: u64 = 176 + 4 * 64 + 100 * BLOCKS as u64 + 32;

fn open(directory: &Path, budget: u64) -> Arc<DiskTier> {
    let order = EvictionPolicy::Lru.order();
    Arc::new(DiskTier::open(directory, budget, SHAPE, order).expect("the directory is free"))
}

fn hasher() -> BlockHasher {
    TreeBuilder::new(SHAPE.block_size).block_hasher().expect("a power of two")
}

/// The tokens of prompt `seed`, from 1 to 5. All prompts begin alike, and most diverge within a
/// record.
fn tokens(seed: u32, records: usize) -> NamedTokens {
    let shared = [0, 64, 90, 40, 40, 150][seed as usize];
    let token = |n: u32| if n < shared { n } else { n * 7 + seed * 1000 };
    (0..(records * RECORD) as u32).map(token).collect::<Vec<_>>().into()
}

fn write(tier: &DiskTier, namespace: Namespace, tokens: &NamedTokens) {
    let blocks = vec![7; tokens.tokens().len() / BLOCK * SHAPE.block_bytes];
    tier.write(&namespace, tokens, 0, &blocks, 0);
}

/// The records of a prompt that are on the disk, in their order.
fn stored(tier: &DiskTier, namespace: Namespace, tokens: &NamedTokens) -> Vec<Place> {
    let places = SHAPE.places(&namespace, tokens);
    places.filter(|place| tier.contains(&place.key)).collect()
}

/// The hashes of a prompt's blocks on the disk.
fn hashes(tier: &DiskTier, namespace: Namespace, tokens: &NamedTokens) -> HashSet<u64> {
    let all = hasher().block_hashes(&namespace, tokens.tokens());
    let of_place = |place: Place| all[place.first / BLOCK..place.end() / BLOCK].to_vec();
    stored(tier, namespace, tokens).into_iter().flat_map(of_place).collect()
}

/// A router's copy of the content.
struct Copy {
    /// The blocks, with the namespace, the parent and the positions that the events gave for each.
    blocks: HashMap<u64, (Namespace, Option<u64>, Vec<u32>)>,
    live: EventReceiver,
    resets: usize,
}

impl Copy {
    fn of(tier: &Arc<DiskTier>, capacity: usize) -> Copy {
        let (snapshot, live) = tier.events(hasher(), capacity);
        let mut copy = Copy { blocks: HashMap::new(), live, resets: 0 };
        snapshot.events.into_iter().for_each(|event| copy.apply(event));
        copy
    }

    fn apply(&mut self, event: CacheEvent) {
        match event {
            CacheEvent::Stored { namespace, mut parent, hashes, positions } => {
                assert_eq!(positions.len(), BLOCK * hashes.len());
                let expected = hasher().block_hashes_after(&namespace, parent, &positions);
                assert_eq!(hashes, expected);
                for (hash, positions) in hashes.into_iter().zip(positions.chunks(BLOCK)) {
                    let block = (namespace, parent, positions.to_vec());
                    assert!(self.blocks.insert(hash, block).is_none(), "it is there already");
                    parent = Some(hash);
                }
            }
            CacheEvent::Removed { hashes } => {
                for hash in hashes {
                    self.blocks.remove(&hash).expect("a block that was stored");
                }
            }
            CacheEvent::Cleared => self.blocks.clear(),
            CacheEvent::Reset { .. } => self.resets += 1,
        }
    }

    /// Applies the queued events, and returns the hashes that are known afterward.
    fn known(&mut self) -> HashSet<u64> {
        for numbered in self.live.drain() {
            self.apply(numbered.event);
        }
        self.blocks.keys().copied().collect()
    }

    /// Waits until these are known. The test would hang if they never were.
    fn wait_for(&mut self, expected: &HashSet<u64>) {
        while self.known() != *expected {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Goal: after any writes, reads, removals for the budget, damages, losses and clearings, a copy
/// has exactly the content of the disk.
#[test]
fn a_copy_follows_the_disk() {
    let directory = tempfile::tempdir().expect("a directory");
    let tier = open(directory.path(), 12 * RECORD_BYTES);
    let mut copy = Copy::of(&tier, 1000);
    let mut random = SmallRng::seed_from_u64(5);
    let prompts: Vec<NamedTokens> = (1..6).map(|seed| tokens(seed, 5)).collect();
    let namespaces = [Namespace::default(), Namespace::builder().salt("tenant").build()];
    for round in 0..300 {
        let namespace = namespaces[random.random_range(0..2)];
        let seed = random.random_range(0..prompts.len());
        match random.random_range(0..8) {
            0 => {
                let places = stored(&tier, namespace, &prompts[seed]);
                tier.read(&namespace, &prompts[seed], &places);
            }
            1 => {
                let paths = files(directory.path());
                if !paths.is_empty() {
                    let path = &paths[random.random_range(0..paths.len())];
                    std::fs::write(path, "damaged").expect("writable");
                }
            }
            2 => {
                for path in files(directory.path()).iter().take(2) {
                    std::fs::remove_file(path).expect("removable");
                }
            }
            3 if round % 10 == 0 => tier.clear(),
            _ => write(&tier, namespace, &tokens(1 + seed as u32, random.random_range(1..6))),
        }
        let mut on_disk = HashSet::new();
        for namespace in namespaces {
            prompts.iter().for_each(|prompt| on_disk.extend(hashes(&tier, namespace, prompt)));
        }
        assert_eq!(copy.known(), on_disk, "round {round}");
    }
    assert!(tier.stats().records_evicted > 0 && tier.stats().records_refused > 0);
    assert_eq!(Copy::of(&tier, 1).known(), copy.known(), "a second copy begins with everything");
    tier.close();
    assert!(copy.live.recv().is_none(), "the events end with the tier");
}

/// Goal: a block that two records have is announced once, and removed with the second of them.
#[test]
fn a_block_of_two_records_is_announced_once() {
    let directory = tempfile::tempdir().expect("a directory");
    let tier = open(directory.path(), 2 * RECORD_BYTES);
    let copy = Copy::of(&tier, 1000);
    let (first, second) = (tokens(3, 1), tokens(4, 1));
    let all = |prompt: &NamedTokens| hasher().block_hashes(&Namespace::default(), prompt.tokens());
    let shared = 40 / BLOCK;
    write(&tier, Namespace::default(), &first);
    write(&tier, Namespace::default(), &second);
    let events: Vec<CacheEvent> = copy.live.drain().into_iter().map(|event| event.event).collect();
    let CacheEvent::Stored { parent, hashes, positions, .. } = &events[1] else {
        panic!("{events:?}");
    };
    assert_eq!(*parent, Some(all(&first)[shared - 1]));
    assert_eq!((&hashes[..], &positions[..]), (&all(&second)[shared..], &second.tokens()[40..]));
    // A third record, whose blocks are others, removes the first one.
    write(&tier, Namespace::builder().salt("other").build(), &tokens(1, 1));
    let removed = copy.live.drain().into_iter().map(|event| event.event);
    let removed: Vec<_> = removed.filter(|e| matches!(e, CacheEvent::Removed { .. })).collect();
    let own = all(&first)[shared..].iter().rev().copied().collect();
    assert_eq!(removed, [CacheEvent::Removed { hashes: own }]);
}

/// Goal: the same after restarts. The records on the disk become known again, as far as it can be
/// read from the start of a prompt, and the rest when it is read.
#[test]
fn a_copy_follows_the_disk_through_restarts() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut random = SmallRng::seed_from_u64(8);
    let prompts: Vec<NamedTokens> = (1..6).map(|seed| tokens(seed, 5)).collect();
    let namespaces = [Namespace::default(), Namespace::builder().key([2; 32]).salt("a").build()];
    let all = || namespaces.into_iter().flat_map(|ns| prompts.iter().map(move |p| (ns, p)));
    let mut tier = open(directory.path(), 12 * RECORD_BYTES);
    let mut copy = Copy::of(&tier, 1000);
    let mut partly_readable = 0;
    for round in 0..200 {
        match random.random_range(0..10) {
            0 => {
                tier.close();
                tier = open(directory.path(), 12 * RECORD_BYTES);
                copy = Copy::of(&tier, 1000);
                let mut readable = HashSet::new();
                for (namespace, prompt) in all() {
                    let places = SHAPE.places(&namespace, prompt);
                    let count = places.take_while(|place| tier.contains(&place.key)).count();
                    let hashes = hasher().block_hashes(&namespace, prompt.tokens());
                    readable.extend(&hashes[..count * BLOCKS]);
                }
                copy.wait_for(&readable);
                for (namespace, prompt) in all() {
                    let places = stored(&tier, namespace, prompt);
                    partly_readable += usize::from(places.first().is_some_and(|p| p.first > 0));
                    assert_eq!(tier.read(&namespace, prompt, &places).len(), places.len() * BLOCKS);
                }
            }
            1 if round % 20 == 0 => tier.clear(),
            _ => {
                let namespace = namespaces[random.random_range(0..2)];
                write(
                    &tier,
                    namespace,
                    &tokens(random.random_range(1..6), random.random_range(1..6)),
                );
            }
        }
        let on_disk: HashSet<u64> =
            all().flat_map(|(ns, prompt)| hashes(&tier, ns, prompt)).collect();
        assert_eq!(copy.known(), on_disk, "round {round}");
    }
    assert!(partly_readable > 0, "some records remain without those before them");
    assert_eq!(Copy::of(&tier, 1).known(), copy.known(), "a second copy begins with everything");
}

/// Goal: after a restart, what earlier processes have written becomes known, the beginnings first,
/// but nothing of another model, nothing that is damaged, and nothing that follows it.
#[test]
fn what_was_stored_earlier_becomes_known() {
    let directory = tempfile::tempdir().expect("a directory");
    let tenant = Namespace::builder().key([1; 32]).salt("tenant").build();
    let (first, second) = (tokens(1, 6), tokens(2, 3));
    let tier = open(directory.path(), 1 << 20);
    write(&tier, Namespace::default(), &first);
    write(&tier, tenant, &second);
    let places = stored(&tier, Namespace::default(), &first);
    drop(tier);
    let other = RecordShape { fingerprint: [4; 32], ..SHAPE };
    let lru = EvictionPolicy::Lru.order();
    let other = DiskTier::open(directory.path(), 1 << 20, other, lru).expect("it is free");
    write(&other, Namespace::default(), &tokens(3, 2));
    drop(other);
    // Another token in the fourth record: the file has the right size, but not the tokens of its
    // name.
    let name = places[3].key.to_hex();
    let path = directory.path().join("v1").join(&name[..2]).join(format!("{name}.kv"));
    let mut bytes = std::fs::read(&path).expect("readable");
    bytes[180] ^= 1;
    std::fs::write(&path, bytes).expect("writable");
    let tier = open(directory.path(), 1 << 20);
    let mut copy = Copy::of(&tier, 1000);
    let mut expected = hashes(&tier, tenant, &second);
    let all = hasher().block_hashes(&Namespace::default(), first.tokens());
    expected.extend(&all[..3 * BLOCKS]);
    copy.wait_for(&expected);
    // The damaged record is dropped when it is read, and not announced as removed. Those after it
    // become known when they are written or read again.
    assert_eq!(tier.read(&Namespace::default(), &first, &places).len(), 3 * BLOCKS);
    assert_eq!(copy.known(), expected);
    assert_eq!(tier.read(&Namespace::default(), &first, &places[4..]).len(), 2 * BLOCKS);
    expected.extend(&all[4 * BLOCKS..]);
    assert_eq!(copy.known(), expected);
    write(&tier, Namespace::default(), &first);
    expected.extend(&all);
    assert_eq!(copy.known(), expected);
}

/// Goal: prompts are announced up to their first image, and without checkpoints, by the process
/// that has written them and by the next one.
#[test]
fn images_and_checkpoints_are_not_announced() {
    let directory = tempfile::tempdir().expect("a directory");
    let interner = TokenSpanInterner::new(10);
    let mut with_image = tokens(1, 2).tokens().to_vec();
    let image = TokenSpan::Image { content_hash: 5, kv_len: 80, columns: 0 };
    interner.append(image, &mut with_image).expect("in range");
    with_image.extend(0..112);
    let with_image = NamedTokens::new(Arc::new(with_image), &interner);
    let mut with_checkpoint = tokens(2, 2).tokens().to_vec();
    with_checkpoint.extend(checkpoint_positions(RECORD));
    let with_checkpoint = NamedTokens::from(with_checkpoint);
    let expected: HashSet<u64> = [tokens(1, 2), tokens(2, 2)]
        .iter()
        .flat_map(|prompt| hasher().block_hashes(&Namespace::default(), prompt.tokens()))
        .collect();
    for process in 0..2 {
        let tier = open(directory.path(), 1 << 20);
        let mut copy = Copy::of(&tier, 1000);
        if process == 0 {
            write(&tier, Namespace::default(), &with_image);
            write(&tier, Namespace::default(), &with_checkpoint);
            // The records of the prompts, without the one that both begin with, and a tail.
            assert_eq!(tier.stats().records, 5 + 2 + 1);
        }
        copy.wait_for(&expected);
        let places = stored(&tier, Namespace::default(), &with_image);
        assert_eq!(tier.read(&Namespace::default(), &with_image, &places).len(), 5 * BLOCKS);
        assert_eq!(copy.known(), expected, "process {process}");
    }
}

/// Goal: a reader that is too slow learns that it has missed something, and a new subscription has
/// everything.
#[test]
fn an_overflow_is_a_reset() {
    let directory = tempfile::tempdir().expect("a directory");
    let tier = open(directory.path(), 1 << 20);
    let mut copy = Copy::of(&tier, 2);
    write(&tier, Namespace::default(), &tokens(1, 4));
    copy.known();
    assert_eq!(copy.resets, 1);
    let mut again = Copy::of(&tier, 2);
    assert_eq!(again.known(), hashes(&tier, Namespace::default(), &tokens(1, 4)));
}
