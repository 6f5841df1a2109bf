//! Our own tree, lock-free and behind a lock.

use crate::measure::{Entry, median, quantile};
use crate::workload::{BLOCK, Workload, random};
use std::hint::black_box;
use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use stolon_kvcache::{BlockId, Namespace, TreeReader, TreeWriter, prefix_tree};

fn insert(writer: &mut TreeWriter, prompt: &[u32], first: u32) {
    let mut lease = writer.acquire(&Namespace::default(), prompt);
    let missing = (prompt.len() - lease.len()) / BLOCK;
    let blocks: Vec<BlockId> = (first..).take(missing).map(BlockId).collect();
    writer.commit(&mut lease, prompt, &blocks);
}

fn filled(workload: &Workload) -> (TreeWriter, TreeReader) {
    let (mut writer, reader) = prefix_tree(BLOCK).expect("a block size");
    for (index, prompt) in workload.prompts.iter().enumerate() {
        insert(&mut writer, prompt, index as u32 * 512);
    }
    let base = Namespace::default();
    for index in 0..workload.prompts.len() {
        let prompt = &workload.prompts[index];
        assert_eq!(reader.query_match_len(&base, prompt), prompt.len());
        assert_eq!(reader.query_match_len(&base, &workload.partial[index]), workload.shared);
        assert_eq!(reader.query_match_len(&base, &workload.miss[index]), 0);
    }
    (writer, reader)
}

pub fn entries(workload: &Workload) -> Vec<Entry<'_>> {
    // The tree stays as it is when its writer is gone.
    let (_, reader) = filled(workload);
    let queries = [&workload.prompts, &workload.partial, &workload.miss];
    let base = Namespace::default();
    let hashed = queries
        .map(|all| all.iter().map(|prompt| reader.block_hashes(&base, prompt)).collect::<Vec<_>>());
    let tokens = {
        let (reader, base) = (reader.clone(), base.clone());
        move |kind: usize, i: usize| {
            black_box(reader.query_match_len(&base, &queries[kind][i]));
        }
    };
    let hashes = {
        let (reader, base) = (reader.clone(), base.clone());
        move |kind: usize, i: usize| {
            black_box(reader.query_match_hashes(&base, &hashed[kind][i]));
        }
    };
    let lock = RwLock::new(());
    let locked = move |kind: usize, i: usize| {
        let _held = lock.read().expect("no panic under the lock");
        black_box(reader.query_match_len(&base, &queries[kind][i]));
    };
    vec![
        Entry { name: "stolon: tokens in", lookup: Box::new(tokens) },
        Entry { name: "stolon: hashes given", lookup: Box::new(hashes) },
        Entry { name: "stolon behind RwLock: tokens in", lookup: Box::new(locked) },
    ]
}

/// Percentiles of single lookups of full hits, while `beside` runs on another thread.
fn percentiles(lookup: impl Fn(usize)) -> [u128; 2] {
    let mut times: Vec<u128> = (0..100_000)
        .map(|i| {
            let start = Instant::now();
            lookup(i % 200);
            start.elapsed().as_nanos()
        })
        .collect();
    times.sort_unstable();
    [times[times.len() / 2], times[times.len() * 99 / 100]]
}

/// One round of a writer that inserts and evicts without pause.
fn churn(writer: &mut TreeWriter, prompts: &[Vec<u32>], round: usize) {
    insert(writer, &prompts[round % prompts.len()], 200_000);
    let gone = writer.evict(384);
    black_box(gone);
}

pub fn beside_a_writer(workload: &Workload) {
    println!("### One reader beside a writer that inserts and evicts without pause\n");
    println!("| full hits, ns: p50, p99 | alone | beside the writer |");
    println!("|---|---|---|");
    let base = Namespace::default();
    let (mut writer, reader) = filled(workload);
    // The cached prompts stay: only what the writer adds is evicted.
    for prompt in &workload.prompts {
        writer.pin(&base, prompt, None).expect("cached");
    }
    let lookup = |i: usize| {
        black_box(reader.query_match_len(&base, &workload.prompts[i]));
    };
    let alone = percentiles(lookup);
    let stop = AtomicBool::new(false);
    let beside = thread::scope(|scope| {
        scope.spawn(|| {
            let mut round = 0;
            while !stop.load(Ordering::Relaxed) {
                churn(&mut writer, &workload.partial, round);
                round += 1;
            }
        });
        thread::sleep(Duration::from_millis(20));
        let beside = percentiles(lookup);
        stop.store(true, Ordering::Relaxed);
        beside
    });
    println!("| stolon | {alone:?} | {beside:?} |");

    let lock = RwLock::new(());
    let lookup = |i: usize| {
        let _held = lock.read().expect("no panic under the lock");
        black_box(reader.query_match_len(&base, &workload.prompts[i]));
    };
    let alone = percentiles(lookup);
    let stop = AtomicBool::new(false);
    let beside = thread::scope(|scope| {
        scope.spawn(|| {
            let mut round = 0;
            while !stop.load(Ordering::Relaxed) {
                let _held = lock.write().expect("no panic under the lock");
                churn(&mut writer, &workload.partial, round);
                round += 1;
            }
        });
        thread::sleep(Duration::from_millis(20));
        let beside = percentiles(lookup);
        stop.store(true, Ordering::Relaxed);
        beside
    });
    println!("| stolon behind RwLock | {alone:?} | {beside:?} |\n");
}

/// A tree of `leaves` leaves of one block.
fn bushy(leaves: usize) -> TreeWriter {
    let (mut writer, _) = prefix_tree(BLOCK).expect("a block size");
    let mut random = random();
    let mut prompt = [0; BLOCK];
    for leaf in 0..leaves {
        prompt.fill_with(|| random.token());
        insert(&mut writer, &prompt, leaf as u32);
    }
    writer
}

fn evict_ten(leaves: usize) -> f64 {
    let mut writer = bushy(leaves);
    let rounds = leaves / 20;
    let mut times: Vec<f64> = (0..rounds.min(2000))
        .map(|_| {
            let start = Instant::now();
            assert_eq!(writer.evict(10).len(), 10);
            start.elapsed().as_nanos() as f64
        })
        .collect();
    quantile(&mut times, 0.5)
}

pub fn writer_costs() {
    println!("### The writer\n");
    let workload = Workload::shared_prefix();
    let mut times: Vec<f64> = (0..9)
        .map(|_| {
            let (mut writer, _reader) = prefix_tree(BLOCK).expect("a block size");
            let start = Instant::now();
            for (index, prompt) in workload.prompts.iter().enumerate() {
                insert(&mut writer, prompt, index as u32 * 512);
            }
            start.elapsed().as_nanos() as f64 / (128.0 + 200.0 * 384.0)
        })
        .collect();
    println!(
        "- insert: {:.1} ns a block (acquire, commit and release included)",
        quantile(&mut times, 0.5)
    );
    println!("- evicting 10 nodes: {:.0} ns at 1,000 leaves", evict_ten(1000));
    println!("- evicting 10 nodes: {:.0} ns at 1,000,000 leaves", evict_ten(1_000_000));
    println!("- 1,000 nodes of one block: {} bytes", bushy(1000).index_bytes());
    let (mut writer, _) = filled(&workload);
    let blocks = writer.counts().cached;
    println!("- index memory: {:.1} bytes a block\n", writer.index_bytes() as f64 / blocks as f64);
}

pub fn wide(workload: &Workload) {
    println!("### A million cached blocks, 10,000 children at the root\n");
    let (writer, reader) = filled_wide(workload);
    let base = Namespace::default();
    let queries = [&workload.prompts, &workload.partial, &workload.miss];
    for (name, prompts) in ["full 100 of 100", "partial 25 of 100", "miss"].iter().zip(queries) {
        let time = median(prompts.len(), |i| {
            black_box(reader.query_match_len(&base, &prompts[i]));
        });
        println!("- {name}: {time:.0} ns");
    }
    let copies = workload.prompts.clone();
    let floor = median(copies.len(), |i| {
        black_box(black_box(&workload.prompts[i]) == &copies[i]);
    });
    println!("- floor (memcmp of a full hit): {floor:.0} ns");
    println!("- index memory: {:.1} bytes a block", writer.index_bytes() as f64 / 1e6);
}

fn filled_wide(workload: &Workload) -> (TreeWriter, TreeReader) {
    let (mut writer, reader) = prefix_tree(BLOCK).expect("a block size");
    for (index, prompt) in workload.prompts.iter().enumerate() {
        insert(&mut writer, prompt, index as u32 * 100);
    }
    (writer, reader)
}
