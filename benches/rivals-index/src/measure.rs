//! Timing: medians of batches, so that short calls are not drowned in the clock.

use crate::workload::Workload;
use std::hint::black_box;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

/// Nanoseconds a lookup, with one thread and with two at once.
pub struct Row {
    pub name: &'static str,
    pub full: [f64; 2],
    pub partial: [f64; 2],
    pub miss: [f64; 2],
    pub hot: [f64; 2],
}

/// Median over batches of the nanoseconds a call, `call(i)` for i below `count`.
pub fn median(count: usize, call: impl Fn(usize)) -> f64 {
    const BATCHES: usize = 41;
    let batch = count.max(1000);
    for index in 0..batch {
        call(index % count);
    }
    let mut times: Vec<f64> = (0..BATCHES)
        .map(|_| {
            let start = Instant::now();
            for index in 0..batch {
                call(index % count);
            }
            start.elapsed().as_nanos() as f64 / batch as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[BATCHES / 2]
}

/// As [`median`], with one thread, and the mean of two that run at once.
pub fn one_and_two(count: usize, call: impl Fn(usize) + Sync) -> [f64; 2] {
    let one = median(count, &call);
    let barrier = Barrier::new(2);
    let two = thread::scope(|scope| {
        let threads = [0, 1].map(|_| {
            scope.spawn(|| {
                barrier.wait();
                median(count, &call)
            })
        });
        threads.map(|thread| thread.join().expect("measured")).iter().sum::<f64>() / 2.0
    });
    [one, two]
}

/// The row of an index: `lookup(kind, i)` looks the prompt `i` of a kind up (0 full, 1 partial,
/// 2 miss).
pub fn row(name: &'static str, workload: &Workload, lookup: impl Fn(usize, usize) + Sync) -> Row {
    let count = workload.prompts.len();
    Row {
        name,
        full: one_and_two(count, |i| lookup(0, i)),
        partial: one_and_two(count, |i| lookup(1, i)),
        miss: one_and_two(count, |i| lookup(2, i)),
        hot: one_and_two(count, |_| lookup(0, 7)),
    }
}

/// Comparing each prompt with a copy of it: what any index that verifies tokens has to do.
pub fn memcmp_floor(workload: &Workload) -> Row {
    let copies = workload.prompts.clone();
    row("floor: memcmp with a copy", workload, |kind, i| {
        let length = [copies[i].len(), workload.shared, 16][kind];
        black_box(black_box(&workload.prompts[i][..length]) == &copies[i][..length]);
    })
}

pub fn print_table(rows: &[Row]) {
    println!(
        "| ns a lookup, 1 thread -> 2 threads | full 512 of 512 | partial 128 of 512 | miss | one hot prompt |"
    );
    println!("|---|---|---|---|---|");
    for row in rows {
        let cell = |[one, two]: [f64; 2]| format!("{one:.0} -> {two:.0}");
        let cells = [row.full, row.partial, row.miss, row.hot].map(cell);
        println!("| {} | {} |", row.name, cells.join(" | "));
    }
    println!();
}
