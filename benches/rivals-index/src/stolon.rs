//! The entries of stolon-kvcache: without a lock, and behind one.

use crate::measure::{Entry, quantile, throughput};
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
    let _ = writer.commit(&mut lease, prompt, &blocks).expect("a valid commit");
}

fn filled(workload: &Workload) -> (TreeWriter, TreeReader) {
    let (mut writer, reader) = prefix_tree(BLOCK).expect("a block size");
    let mut first = 0;
    for prompt in &workload.prompts {
        insert(&mut writer, prompt, first);
        first += (prompt.len() / BLOCK) as u32;
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
    // Readers keep working after the writer was dropped.
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

/// The median and the 99th percentile of 100,000 single lookups, in nanoseconds.
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

/// One round of a writer that inserts and evicts continuously.
fn churn(writer: &mut TreeWriter, prompts: &[Vec<u32>], round: usize) {
    insert(writer, &prompts[round % prompts.len()], 200_000);
    let gone = writer.evict(384);
    black_box(gone);
}

/// Runs `read` while a writer inserts and evicts continuously, behind `lock` if one is given. Also
/// returns the writer's rate in thousand rounds per second.
fn with_a_writer<T>(
    writer: &mut TreeWriter,
    workload: &Workload,
    lock: Option<&RwLock<()>>,
    read: impl FnOnce() -> T,
) -> (T, f64) {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let start = Instant::now();
            let mut round = 0;
            while !stop.load(Ordering::Relaxed) {
                let _held = lock.map(|lock| lock.write().expect("no panic under the lock"));
                churn(writer, &workload.partial, round);
                round += 1;
            }
            round as f64 / start.elapsed().as_secs_f64() / 1e3
        });
        thread::sleep(Duration::from_millis(20));
        let result = read();
        stop.store(true, Ordering::Relaxed);
        (result, writer.join().expect("no panic"))
    })
}

/// A tree in which the prompts are pinned, so that only prompts that the writer adds are evicted.
fn pinned(workload: &Workload) -> (TreeWriter, TreeReader) {
    let (mut writer, reader) = filled(workload);
    for prompt in &workload.prompts {
        writer.pin(&Namespace::default(), prompt).expect("cached");
    }
    (writer, reader)
}

pub fn latency_with_a_writer(workload: &Workload) {
    const RUNS: usize = 7;
    println!("### One reader, with a writer that inserts and evicts continuously\n");
    println!("Medians of {RUNS} runs:\n");
    println!(
        "| full hits, ns | p50 alone | p99 alone | p50 with writer | p99 with writer | p99 ratio | \
         writer, thousand rounds per second |\n|---|---|---|---|---|---|---|"
    );
    let base = Namespace::default();
    let (mut writer, reader) = pinned(workload);
    let lock = RwLock::new(());
    let free = |i: usize| {
        black_box(reader.query_match_len(&base, &workload.prompts[i]));
    };
    let locked = |i: usize| {
        let _held = lock.read().expect("no panic under the lock");
        black_box(reader.query_match_len(&base, &workload.prompts[i]));
    };
    let mut times = vec![[const { Vec::new() }; 6]; 2];
    for _ in 0..RUNS {
        for (behind, times) in times.iter_mut().enumerate() {
            let read = || if behind == 0 { percentiles(free) } else { percentiles(locked) };
            let alone = read();
            let held = (behind == 1).then_some(&lock);
            let (busy, rounds) = with_a_writer(&mut writer, workload, held, read);
            let ratio = busy[1] as f64 / alone[1] as f64;
            let [alone, busy] = [alone, busy].map(|times| times.map(|time| time as f64));
            let row = [alone[0], alone[1], busy[0], busy[1], ratio, rounds];
            times.iter_mut().zip(row).for_each(|(column, time)| column.push(time));
        }
    }
    for (name, mut times) in ["stolon", "stolon behind RwLock"].into_iter().zip(times) {
        let [p50, p99, p50_busy, p99_busy, ratio, rounds] =
            times.each_mut().map(|column| quantile(column, 0.5));
        println!(
            "| {name} | {p50:.0} | {p99:.0} | {p50_busy:.0} | {p99_busy:.0} | {ratio:.2} | \
             {rounds:.1} |"
        );
    }
    println!();
}

/// Full hits per second (in millions) for each number of readers, with a concurrent writer,
/// lock-free and behind a lock.
pub fn throughput_with_a_writer(
    workload: &Workload,
    readers: &[usize],
    runs: usize,
) -> Vec<(&'static str, Vec<f64>)> {
    let (mut writer, _) = pinned(workload);
    let reader = writer.reader();
    let lock = RwLock::new(());
    let base = Namespace::default();
    let free = |_: usize, i: usize| {
        black_box(reader.query_match_len(&base, &workload.prompts[i]));
    };
    let locked = |_: usize, i: usize| {
        let _held = lock.read().expect("no panic under the lock");
        black_box(reader.query_match_len(&base, &workload.prompts[i]));
    };
    let entries = [
        (Entry { name: "stolon: tokens in", lookup: Box::new(free) }, None),
        (Entry { name: "stolon behind RwLock: tokens in", lookup: Box::new(locked) }, Some(&lock)),
    ];
    let count = workload.prompts.len();
    let mut rate = |entry: &Entry<'_>, lock, readers| {
        let mut rates: Vec<f64> = (0..runs)
            .map(|_| {
                with_a_writer(&mut writer, workload, lock, || throughput(entry, readers, count)).0
            })
            .collect();
        quantile(&mut rates, 0.5)
    };
    entries
        .iter()
        .map(|(entry, lock)| {
            (entry.name, readers.iter().map(|&readers| rate(entry, *lock, readers)).collect())
        })
        .collect()
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
        "- insert: {:.1} ns per block (acquire, commit and release included)",
        quantile(&mut times, 0.5)
    );
    println!("- evicting 10 nodes: {:.0} ns at 1,000 leaves", evict_ten(1000));
    println!("- evicting 10 nodes: {:.0} ns at 1,000,000 leaves", evict_ten(1_000_000));
    println!("- 1,000 nodes of one block: {} bytes", bushy(1000).index_bytes());
    let (mut writer, _) = filled(&workload);
    let blocks = writer.counts().cached;
    println!(
        "- index memory: {:.1} bytes per block\n",
        writer.index_bytes() as f64 / blocks as f64
    );
}

/// Prints the memory of the index of a workload, per block.
pub fn index_memory(workload: &Workload) {
    let (mut writer, _) = filled(workload);
    let blocks = writer.counts().cached;
    let bytes = writer.index_bytes() as f64 / blocks as f64;
    println!("Index memory: {bytes:.1} bytes per block, {blocks} blocks.\n");
}
