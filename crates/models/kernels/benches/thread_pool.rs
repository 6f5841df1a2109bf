//! The cost of parallel calls on the engine's thread pool and on rayon's.
//!
//! `cargo bench -p stolon-kernels --bench thread_pool`. The first table has calls whose tasks do
//! nothing: the median over many calls of the time from the start of a call to its return, in
//! nanoseconds. Calls follow each other at once, as within a decoding step, or after a pause, as
//! between steps.
//!
//! The second table has the products of a decoding step of one token, with the tasks that the
//! engine would divide them into. Both pools run the same steps by turns. Rayon is entered once per
//! step, so that all calls of the step come from inside its pool.
#![allow(clippy::print_stdout, reason = "prints its results")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use rayon::prelude::*;
use stolon_kernels::{Matrix, Path, TensorType, Threads};

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

/// A linear layer, divided into matrices of the rows that one task multiplies.
struct Layer {
    tasks: Vec<Matrix>,
}

impl Layer {
    /// Output features of a task of the engine in small products: four panels of 16.
    const TASK_FEATURES: usize = 64;

    fn new(path: Path, inner: usize, features: usize) -> Layer {
        let task = |first: usize| {
            let features = Self::TASK_FEATURES.min(features - first);
            let bytes = vec![0x22; TensorType::Q8_0.bytes_of(features * inner).expect("blocks")];
            Matrix::pack(TensorType::Q8_0, features, inner, &bytes, path).expect("the shape fits")
        };
        Layer { tasks: (0..features).step_by(Self::TASK_FEATURES).map(task).collect() }
    }

    /// Multiplies one row, where `for_each` calls a task with all indices in parallel.
    fn multiply(&self, x: &[f32], for_each: &impl Fn(usize, &(dyn Fn(usize) + Sync))) {
        for_each(self.tasks.len(), &|index| {
            // A pool of one thread runs everything on the calling thread.
            thread_local!(static ALONE: Threads = Threads::new(1));
            let matrix = &self.tasks[index];
            let mut out = [0.0; Self::TASK_FEATURES];
            let out = &mut out[..matrix.out_features()];
            ALONE.with(|alone| matrix.matmul(alone, &x[..matrix.in_features()], 1, out));
            black_box(out);
        });
    }
}

/// Prints the medians of decoding steps of `layers` layers on both pools, and of the ratios of the
/// two times of each turn.
fn steps(name: &str, layers: usize, shapes: &[(usize, usize)], pause: Option<Duration>) {
    const TURNS: usize = 400;
    let path = Path::detect().expect("STOLON_CPU_PATH names a path of this machine");
    let model: Vec<Layer> = (0..layers)
        .flat_map(|_| shapes.iter().map(|&(inner, features)| Layer::new(path, inner, features)))
        .collect();
    let x = vec![0.5; shapes.iter().map(|shape| shape.0).max().unwrap_or(0)];
    let threads = Threads::new(THREADS);
    let rayon = rayon_pool();
    let own = || {
        for layer in &model {
            layer.multiply(&x, &|count, task| threads.for_each(count, task));
        }
    };
    let inside = || {
        rayon.install(|| {
            for layer in &model {
                layer.multiply(&x, &|count, task| {
                    (0..count).into_par_iter().with_max_len(1).for_each(task);
                });
            }
        });
    };
    let timed = |step: &dyn Fn()| {
        if let Some(pause) = pause {
            std::thread::sleep(pause);
        }
        let start = Instant::now();
        step();
        start.elapsed().as_secs_f64() * 1e6
    };
    let mut turns: Vec<[f64; 3]> = (0..TURNS)
        .map(|turn| {
            let (own, rayon) = if turn % 2 == 0 {
                (timed(&own), timed(&inside))
            } else {
                let rayon = timed(&inside);
                (timed(&own), rayon)
            };
            [own, rayon, rayon / own]
        })
        .collect();
    let [own, rayon, ratio] = [0, 1, 2].map(|column| {
        turns.sort_by(|a, b| a[column].total_cmp(&b[column]));
        turns[TURNS / 2][column]
    });
    let pause = pause.map_or("none".to_owned(), |pause| format!("{pause:?}"));
    println!("{name:>6} {pause:>6} {own:>10.0} {rayon:>10.0} {ratio:>10.2}");
}

fn rayon_pool() -> rayon::ThreadPool {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(THREADS).build();
    pool.expect("the system starts two threads")
}

fn main() {
    let threads = Threads::new(THREADS);
    let rayon = rayon_pool();
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
    println!();
    println!("median microseconds of a decoding step, and median of rayon's time divided by ours");
    println!("{:>6} {:>6} {:>10} {:>10} {:>10}", "model", "pause", "stolon", "rayon", "ratio");
    for pause in [None, Some(Duration::from_millis(1))] {
        // Query, key and value together; the projection of attention; gate and up together; down.
        steps("demo", 3, &[(256, 512), (256, 256), (256, 768), (384, 256)], pause);
        steps("135M", 30, &[(576, 960), (576, 576), (576, 3072), (1536, 576)], pause);
    }
}
