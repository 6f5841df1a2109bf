//! The priority of the threads that load a model. The tests run one at a time in a process of their
//! own, so that all threads are those of the test.
#![cfg(target_os = "linux")]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use stolon::{Engine, Event, ModelRecipe, ModelSet, ModelSetBuilder, Request, Speculation};
use tokio::sync::Mutex;

/// Held by the test that runs.
static ALONE: Mutex<()> = Mutex::const_new(());

/// The niceness of the threads of this process whose names begin like this, by their ids.
fn niceness(name: &str) -> BTreeMap<String, i32> {
    let threads = std::fs::read_dir("/proc/self/task").expect("Linux lists the threads");
    let niceness = |stat: String| {
        let (start, rest) = (stat.find('(')? + 1, stat.rfind(')')?);
        // The first field after the name has number 3, the niceness number 19.
        let nice = stat[rest + 2..].split(' ').nth(16)?.parse().ok()?;
        stat[start..rest].starts_with(name).then_some(nice)
    };
    let threads = threads.filter_map(|thread| {
        let path = thread.ok()?.path();
        // A thread may end meanwhile.
        let nice = niceness(std::fs::read_to_string(path.join("stat")).ok()?)?;
        Some((path.file_name()?.to_str()?.to_owned(), nice))
    });
    threads.collect()
}

/// Goal: a model that is loaded while another one is loaded leaves the processors to it: the threads
/// that pack its weights have a low priority. Those that compute its answers have the usual one, as
/// do all threads of a model that is loaded alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_yields_to_other_models() {
    const COMPUTES: &str = "stolon-compute";
    let _alone = ALONE.lock().await;
    let recipe = |name, preset| {
        let engine = move || Engine::builder().model(preset).num_blocks(64).threads(5);
        ModelRecipe::new(name, move || Ok(engine()))
    };
    // Loading the second one takes long enough to be seen.
    let models = [recipe("a", "random:20m"), recipe("b", "random:100m")];
    let set = models.into_iter().fold(ModelSet::builder(), ModelSetBuilder::model);
    let models = set.build().expect("a set");
    let mut held = Vec::new();
    for (name, yields) in [("a", false), ("b", true)] {
        let before = niceness(COMPUTES);
        let (mut loading, done) = (BTreeMap::new(), AtomicBool::new(false));
        let (lease, ()) = tokio::join!(
            async {
                let lease = models.get(name).await.expect("a model");
                done.store(true, SeqCst);
                lease
            },
            async {
                while !done.load(SeqCst) {
                    loading.extend(niceness(COMPUTES));
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
        );
        loading.retain(|id, _| !before.contains_key(id));
        let mut computing = niceness(COMPUTES);
        computing.retain(|id, _| !before.contains_key(id));
        assert_eq!(computing.len(), 4, "{computing:?}");
        let usual = computing.values().all(|nice| *nice == 0);
        assert!(usual, "the threads that compute: {computing:?}");
        let low = loading.values().filter(|nice| **nice > 0).count();
        assert_eq!(low, if yields { 4 } else { 0 }, "the threads that load {name}: {loading:?}");
        held.push(lease);
    }
}

/// The time between two tokens of an answer of `engine`, as long as `load` takes.
async fn token_times(engine: &Engine, load: impl Future<Output = ()>) -> Vec<Duration> {
    let request = Request::tokens([1, 2, 3]).max_tokens(1_000).ignore_eos(true);
    let mut stream = engine.generate(request.clone()).await.expect("accepted");
    let mut load = std::pin::pin!(load);
    let (mut times, mut last) = (Vec::new(), None::<Instant>);
    loop {
        tokio::select! {
            () = &mut load => break,
            event = stream.next() => {
                match event.transpose().expect("no error") {
                    Some(Event::Token(_)) => {
                        let now = Instant::now();
                        times.extend(last.replace(now).map(|last| now - last));
                    }
                    Some(_) => {}
                    None => {
                        stream = engine.generate(request.clone()).await.expect("accepted");
                        last = None;
                    }
                }
            }
        }
    }
    times.sort_unstable();
    times
}

/// Goal: what a load costs another model, with the low priority that a set gives it and without.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement, which needs a quiet machine"]
#[allow(clippy::print_stdout, reason = "it is a measurement")]
async fn steps_during_a_load_are_measured() {
    let _alone = ALONE.lock().await;
    let engine = |preset: &'static str| {
        let builder = Engine::builder().model(preset).num_blocks(256);
        builder.speculation(Speculation::off())
    };
    println!("time of a token, ms: median, 99th percentile, longest | load, s");
    let print = |name: &str, times: &[Duration], load: Duration| {
        let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize].as_secs_f64() * 1e3;
        let (median, high, longest) = (at(0.5), at(0.99), at(1.0));
        println!("{name}: {median:.1}, {high:.1}, {longest:.1} | {:.1}", load.as_secs_f64());
    };
    let chat = ModelRecipe::new("chat", move || Ok(engine("random:100m")));
    let other = ModelRecipe::new("other", move || Ok(engine("random:474m")));
    let models = ModelSet::builder().model(chat).model(other).build().expect("a set");
    let chat = models.get("chat").await.expect("a model");
    let seconds = tokio::time::sleep(Duration::from_secs(2));
    print("no load", &token_times(&chat, seconds).await, Duration::ZERO);
    for round in 0..2 {
        let began = Instant::now();
        let times = token_times(&chat, async {
            drop(models.get("other").await.expect("a model"));
        });
        print(&format!("low priority {round}"), &times.await, began.elapsed());
        models.unload("other").await.expect("a model");
        let began = Instant::now();
        let times = token_times(&chat, async {
            drop(engine("random:474m").build().await.expect("an engine"));
        });
        print(&format!("usual priority {round}"), &times.await, began.elapsed());
    }
}
