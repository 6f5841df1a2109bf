//! The priority of the threads that load a model. It is the only test of its process, whose threads
//! are all its own.
#![cfg(target_os = "linux")]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use stolon::{Engine, ModelRecipe, ModelSet, ModelSetBuilder};

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
