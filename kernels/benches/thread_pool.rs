//! The cost of one parallel call on the engine's thread pool and on rayon's, with tasks that do
//! nothing.
//!
//! `cargo bench -p stolon-kernels --bench thread_pool`. Each number is the median over many calls
//! of the time from the start of a call to its return, in nanoseconds. Calls follow each other at
//! once, as within a decoding step, or after a pause, as between steps.
#![allow(clippy::print_stdout, reason = "prints its results")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use rayon::prelude::*;
use stolon_kernels::Threads;

/// Threads of either pool, including the calling thread where it takes part.
const THREADS: usize = 2;
const CALLS: usize = 20_000;
const CALLS_AFTER_PAUSE: usize = 500;

/// Median time of a call in nanoseconds.
fn median(calls: usize, pause: Option<Duration>, mut call: impl FnMut()) -> u128 {
    let mut times: Vec<u128> = (0..calls + calls / 10)
        .map(|_| {
            if let Some(pause) = pause {
                std::thread::sleep(pause);
            }
            let start = Instant::now();
            call();
            start.elapsed().as_nanos()
        })
        .skip(calls / 10)
        .collect();
    times.sort_unstable();
    times[times.len() / 2]
}

fn main() {
    let threads = Threads::new(THREADS);
    let rayon = rayon::ThreadPoolBuilder::new()
        .num_threads(THREADS)
        .build()
        .expect("the system starts two threads");
    let own = |tasks: usize| {
        threads.for_each(tasks, |index| {
            black_box(index);
        });
    };
    // Without `install`, this must be called on a thread of the pool.
    let inside = |tasks: usize| {
        (0..tasks).into_par_iter().with_max_len(1).for_each(|index| {
            black_box(index);
        });
    };
    let parallel_iterator = |tasks: usize| rayon.install(|| inside(tasks));
    let scope = |tasks: usize| {
        rayon.scope(|scope| {
            for index in 0..tasks {
                scope.spawn(move |_| {
                    black_box(index);
                });
            }
        });
    };
    println!("{THREADS} threads; median nanoseconds per call");
    println!("rayon is called from outside its pool, or (inside) from one of its threads");
    println!(
        "{:>5} {:>6} {:>10} {:>10} {:>10} {:>10}",
        "tasks", "pause", "stolon", "par_iter", "scope", "inside"
    );
    for pause in [None, Some(Duration::from_millis(1))] {
        for tasks in [2, 16, 64] {
            let calls = if pause.is_some() { CALLS_AFTER_PAUSE } else { CALLS };
            let times = [
                median(calls, pause, || own(tasks)),
                median(calls, pause, || parallel_iterator(tasks)),
                median(calls, pause, || scope(tasks)),
                rayon.install(|| median(calls, pause, || inside(tasks))),
            ];
            let pause = pause.map_or("none".to_owned(), |pause| format!("{pause:?}"));
            let [own, par_iter, scope, inside] = times;
            println!("{tasks:>5} {pause:>6} {own:>10} {par_iter:>10} {scope:>10} {inside:>10}");
        }
    }
}
