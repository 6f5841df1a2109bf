//! Timing. The indexes alternate in short batches, so that other activity of the machine affects
//! all of them equally. A result is the median of an index's batches.

use crate::workload::{BLOCK, Workload};
use std::hint::black_box;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

/// An index to be measured. `lookup(kind, i)` looks up prompt `i` of a kind: 0 is a full hit, 1 a
/// partial hit, 2 a miss.
pub struct Entry<'a> {
    pub name: &'static str,
    pub lookup: Box<dyn Fn(usize, usize) + Sync + 'a>,
}

/// Runs `call(0)` to `call(count - 1)` and returns the average time of a call in nanoseconds.
fn batch(count: usize, call: impl Fn(usize)) -> f64 {
    let start = Instant::now();
    for index in 0..count {
        call(index);
    }
    start.elapsed().as_nanos() as f64 / count as f64
}

/// The quantile `share` (0 to 1) of `times`.
pub fn quantile(times: &mut [f64], share: f64) -> f64 {
    times.sort_by(f64::total_cmp);
    times[((times.len() - 1) as f64 * share) as usize]
}

/// Times batches of all entries alternately, for one kind of lookup: of `count` prompts one after
/// the other, or always of the same prompt if `hot`. Returns nanoseconds per lookup, by entry and
/// batch.
fn time_batches(
    entries: &[Entry<'_>],
    kind: usize,
    hot: bool,
    count: usize,
    barrier: &Barrier,
) -> Vec<Vec<f64>> {
    const ROUNDS: usize = 101;
    const LOOKUPS: usize = 200;
    let mut times = vec![Vec::with_capacity(ROUNDS); entries.len()];
    for round in 0..ROUNDS {
        for (index, (entry, times)) in entries.iter().zip(&mut times).enumerate() {
            barrier.wait();
            // If there are many prompts, each entry looks up different prompts than the entry
            // before it.
            let first = (round * entries.len() + index) * LOOKUPS;
            let lookup = |i: usize| (entry.lookup)(kind, if hot { 7 } else { (first + i) % count });
            // Short lookups need longer batches.
            let repeats = if kind == 0 { 1 } else { 10 };
            batch(20, lookup);
            let time = batch(repeats * LOOKUPS, |i| lookup(i % LOOKUPS));
            if round > 0 {
                times.push(time);
            }
        }
    }
    times
}

/// Measures all entries with one thread and with two threads, and prints the tables.
pub fn compare(workload: &Workload, entries: &[Entry<'_>]) {
    let [full, partial, miss] = workload.names;
    let kinds =
        [(full, 0, false), (partial, 1, false), (miss, 2, false), ("one hot prompt", 0, true)];
    let count = workload.prompts.len();
    let mut cells = vec![vec![[[0.0; 2]; 2]; kinds.len()]; entries.len()];
    for (column, &(_, kind, hot)) in kinds.iter().enumerate() {
        for threads in [1, 2] {
            let barrier = Barrier::new(threads);
            let all: Vec<Vec<Vec<f64>>> = thread::scope(|scope| {
                let take = || time_batches(entries, kind, hot, count, &barrier);
                let running: Vec<_> = (0..threads).map(|_| scope.spawn(take)).collect();
                running.into_iter().map(|thread| thread.join().expect("measured")).collect()
            });
            for (index, row) in cells.iter_mut().enumerate() {
                let times = all.iter().flat_map(|one| &one[index]).copied();
                let mut times: Vec<f64> = times.collect();
                for (which, share) in [0.5, 0.1].into_iter().enumerate() {
                    row[column][which][threads - 1] = quantile(&mut times, share);
                }
            }
        }
    }
    for (which, title) in ["Medians", "10th percentile of the batches"].iter().enumerate() {
        let names = kinds.map(|(name, ..)| name).join(" | ");
        println!("{title}, ns a lookup, 1 thread -> 2 threads:\n");
        println!("| | {names} |\n|---|---|---|---|---|");
        for (entry, row) in entries.iter().zip(&cells) {
            let cell =
                |kind: &[[f64; 2]; 2]| format!("{:.0} -> {:.0}", kind[which][0], kind[which][1]);
            let row: Vec<String> = row.iter().map(cell).collect();
            println!("| {} | {} |", entry.name, row.join(" | "));
        }
        println!();
    }
}

/// Full hits per second of `readers` threads together, in millions.
pub fn throughput(entry: &Entry<'_>, readers: usize, count: usize) -> f64 {
    const TIME: Duration = Duration::from_millis(250);
    let barrier = Barrier::new(readers);
    let read = |reader: usize| {
        barrier.wait();
        let (start, mut lookups) = (Instant::now(), 0);
        while start.elapsed() < TIME {
            (0..64).for_each(|i| (entry.lookup)(0, (reader * 37 + lookups + i) % count));
            lookups += 64;
        }
        lookups as f64 / start.elapsed().as_secs_f64() / 1e6
    };
    let read = &read;
    let rates: Vec<f64> = thread::scope(|scope| {
        let running: Vec<_> = (0..readers).map(|r| scope.spawn(move || read(r))).collect();
        running.into_iter().map(|thread| thread.join().expect("measured")).collect()
    });
    rates.iter().sum()
}

/// The lower bound: a comparison of each prompt with a copy of it, which every index that verifies
/// tokens must do.
pub fn memcmp_floor<'a>(workload: &'a Workload) -> Entry<'a> {
    let copies = workload.prompts.clone();
    let lookup = move |kind: usize, i: usize| {
        let length = [copies[i].len(), workload.shared, BLOCK][kind];
        black_box(black_box(&workload.prompts[i][..length]) == &copies[i][..length]);
    };
    Entry { name: "floor: memcmp with a copy", lookup: Box::new(lookup) }
}
