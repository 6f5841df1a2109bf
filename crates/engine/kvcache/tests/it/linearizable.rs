//! Readers on real threads, concurrent with a writer: each answer must have been exact at some
//! version of the tree between the start and the end of the query.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use stolon_kvcache::{BlockId, Namespace, TreeReader, TreeWriter, prefix_tree};

/// A small deterministic random number generator (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % limit
    }
}

/// What was cached after an operation, and the versions of the tree at which this can have been
/// observed.
struct Epoch {
    /// The version before the operation that created this state. No reader saw the state earlier.
    from: u64,
    /// The version after that operation. From then on no reader sees the previous state.
    complete: u64,
    match_lens: Vec<usize>,
}

struct Answer {
    prompt: usize,
    before: u64,
    after: u64,
    got: usize,
}

/// Prompts with few different positions, so that they share prefixes and diverge everywhere.
fn prompts() -> Vec<Vec<u32>> {
    let mut random = Random(7);
    (0..40).map(|_| (0..1 + random.below(12)).map(|_| random.below(2) as u32).collect()).collect()
}

fn ask(reader: &TreeReader, prompts: &[Vec<u32>], stop: &AtomicBool, seed: u64) -> Vec<Answer> {
    let mut random = Random(seed);
    let mut answers = Vec::new();
    while !stop.load(Ordering::Relaxed) && answers.len() < 400_000 {
        let prompt = random.below(prompts.len());
        let before = reader.tree_version();
        let got = reader.query_match_len(&Namespace::default(), &prompts[prompt]);
        answers.push(Answer { prompt, before, after: reader.tree_version(), got });
    }
    answers
}

/// The reference: a set of all cached prefixes.
struct Reference {
    cached: HashSet<Vec<u32>>,
    owner: Vec<Vec<u32>>,
    free: Vec<BlockId>,
}

impl Reference {
    fn match_len(&self, prompt: &[u32]) -> usize {
        (1..=prompt.len()).take_while(|&end| self.cached.contains(&prompt[..end])).count()
    }

    /// Runs one random operation on both. Evicts one block at a time, so that each operation
    /// changes what is cached with one store.
    fn step(&mut self, writer: &mut TreeWriter, prompts: &[Vec<u32>], random: &mut Random) {
        if random.below(3) > 0 {
            for block in writer.evict(1).iter() {
                self.cached.remove(&self.owner[block.id.index()]);
                self.free.push(block.id);
            }
            return;
        }
        let prompt = &prompts[random.below(prompts.len())];
        let mut lease = writer.acquire(&Namespace::default(), prompt);
        let fresh: Vec<usize> = (lease.len() + 1..=prompt.len()).collect();
        if fresh.len() > self.free.len() {
            return;
        }
        let blocks = self.free.split_off(self.free.len() - fresh.len());
        for (&end, block) in fresh.iter().zip(&blocks) {
            self.owner[block.index()] = prompt[..end].to_vec();
            self.cached.insert(prompt[..end].to_vec());
        }
        let commit = writer.commit(&mut lease, prompt, &blocks).expect("a valid commit");
        assert!(commit.duplicates.is_empty());
    }
}

/// Goal: `query_match_len` is linearizable, and has no side effect: queries change no version and
/// no counter.
#[test]
fn every_answer_was_exact_during_its_query() {
    const BLOCKS: usize = 60;
    let prompts = Arc::new(prompts());
    let (mut writer, reader) = prefix_tree(1).expect("a block size");
    let stop = Arc::new(AtomicBool::new(false));
    let start = Arc::new(Barrier::new(3));
    let readers: Vec<_> = [1, 2]
        .map(|seed| {
            let (reader, prompts) = (reader.clone(), prompts.clone());
            let (stop, start) = (stop.clone(), start.clone());
            thread::spawn(move || {
                start.wait();
                ask(&reader, &prompts, &stop, seed)
            })
        })
        .into();

    let mut reference = Reference {
        cached: HashSet::new(),
        owner: vec![Vec::new(); BLOCKS],
        free: (0..BLOCKS as u32).map(BlockId).collect(),
    };
    let all = |reference: &Reference| prompts.iter().map(|p| reference.match_len(p)).collect();
    let mut history = vec![Epoch { from: 0, complete: 0, match_lens: all(&reference) }];
    let mut random = Random(99);
    start.wait();
    for _ in 0..30_000 {
        let from = reader.tree_version();
        reference.step(&mut writer, &prompts, &mut random);
        let complete = reader.tree_version();
        if complete != from {
            history.push(Epoch { from, complete, match_lens: all(&reference) });
        }
    }
    stop.store(true, Ordering::Relaxed);
    writer.audit().expect("consistent");

    let mut answers = 0;
    for reader in readers {
        for answer in reader.join().expect("reads") {
            answers += 1;
            // A change is visible shortly before its version is, hence `<=` in `take_while`.
            let first = history.partition_point(|epoch| epoch.complete <= answer.before) - 1;
            let allowed = history[first..]
                .iter()
                .take_while(|epoch| epoch.from <= answer.after)
                .map(|epoch| epoch.match_lens[answer.prompt]);
            let allowed: HashSet<usize> = allowed.collect();
            assert!(
                allowed.contains(&answer.got),
                "{} between {} and {}: expected one of {allowed:?}",
                answer.got,
                answer.before,
                answer.after,
            );
        }
    }
    assert!(answers > 0, "the readers ran at the same time as the writer");
    let version = reader.tree_version();
    let dropped = AtomicBool::new(false);
    let (counts, stats) = (writer.counts(), writer.stats().clone());
    assert!(!ask(&reader, &prompts, &dropped, 3).is_empty());
    assert_eq!(reader.tree_version(), version, "queries change nothing");
    assert_eq!((writer.counts(), writer.stats()), (counts, &stats), "and count nothing");
}
