//! Thousands of random requests on a KV pool that is too small for them.

#[path = "it/support/fake.rs"]
mod fake;
#[cfg(all(feature = "tiers", target_os = "linux"))]
#[allow(dead_code, reason = "the tests of the tiers use all of it")]
#[path = "it/support/tiers.rs"]
mod tiers;

use std::sync::Arc;
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use stolon::{Engine, EngineError, Error, Request};
use stolon_backend::fake::expected_next;

const REQUESTS: usize = 2000;
const CLIENTS: usize = 40;

/// A random prompt from one of six families. Prompts of a family share prefixes of various lengths,
/// up to `shared_max` tokens.
fn prompt(rng: &mut SmallRng, shared_max: u32) -> Vec<u32> {
    let family = rng.random_range(0..6u32);
    let shared = rng.random_range(0..shared_max);
    let own = rng.random_range(1..60);
    let mut tokens: Vec<u32> = (0..shared).map(|n| (n * n + family * 37) % 256).collect();
    tokens.extend((0..own).map(|_| rng.random_range(0..256u32)));
    tokens
}

/// Sends one request and either reads it to its end or drops it early. Returns the number of events
/// or tokens that were read.
async fn one_request(engine: &Engine, rng: &mut SmallRng, shared_max: u32) -> usize {
    let prompt = prompt(rng, shared_max);
    let max_tokens = rng.random_range(1..40);
    let request = Request::tokens(prompt.clone()).max_tokens(max_tokens);
    let mut stream = loop {
        match engine.generate(request.clone()).await {
            Ok(stream) => break stream,
            Err(Error::Engine(EngineError::Overloaded { .. })) => {
                tokio::time::sleep(Duration::from_millis(2)).await
            }
            Err(other) => panic!("{other}"),
        }
    };
    if rng.random_range(0..3) > 0 {
        let completion = stream.collect_text().await.expect("it ends");
        assert_eq!(completion.token_ids.len(), max_tokens);
        let mut tokens = prompt;
        for id in completion.token_ids {
            assert_eq!(id, expected_next(&tokens, 256));
            tokens.push(id);
        }
        return max_tokens;
    }
    let enough = rng.random_range(0..12);
    for read in 0..enough {
        match stream.next().await {
            Some(event) => drop(event.expect("no error")),
            None => return read,
        }
    }
    enough
}

/// Goal: of 2,000 random requests, many of them canceled, on a pool that is too small for all,
/// each completed one gets the right tokens. Afterward the accounting is consistent and no block
/// is reserved.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_requests_on_a_small_pool_leave_no_block_reserved() {
    let (builder, _) = fake::builder(48);
    let engine = builder
        .max_batched_tokens(96)
        .max_running(12)
        .max_queued_requests(20)
        .event_capacity(16)
        .build()
        .await
        .expect("valid settings");
    let engine = Arc::new(engine);
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let engine = Arc::clone(&engine);
            tokio::spawn(async move {
                let mut rng = SmallRng::seed_from_u64(client as u64);
                for _ in 0..REQUESTS / CLIENTS {
                    one_request(&engine, &mut rng, 120).await;
                }
            })
        })
        .collect();
    for client in clients {
        client.await.expect("no panic");
    }
    while engine.stats().running + engine.stats().waiting > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let audit = engine.audit().await.expect("consistent accounting");
    assert_eq!(audit.blocks_reserved, 0);
    assert_eq!(audit.blocks_free + audit.blocks_evictable, audit.blocks_total);
    let stats = engine.stats();
    assert_eq!(stats.requests as usize, REQUESTS);
    assert_eq!(stats.failed, 0);
    assert_eq!((stats.finished + stats.canceled) as usize, REQUESTS);
    assert!(stats.evictions > 0 && stats.cached_tokens > 0, "{stats:?}");
    engine.cache().flush().await.expect("it runs");
    assert_eq!(engine.audit().await.expect("consistent accounting").blocks_free, 48);
}

/// Damages the files below a directory in one of many ways.
#[cfg(all(feature = "tiers", target_os = "linux"))]
fn damage(directory: &std::path::Path, rng: &mut SmallRng) {
    let (files, folder) = (tiers::records(directory), directory.join("v1"));
    if rng.random_range(0..4000) == 0 {
        // A file in place of the folder stops all writes.
        let _ = std::fs::remove_dir_all(&folder);
        let _ = std::fs::write(&folder, "a file in its place");
        std::thread::sleep(Duration::from_millis(200));
        let _ = std::fs::remove_file(&folder);
    }
    let Some(path) = files.get(rng.random_range(0..files.len().max(1))) else { return };
    // The tier may remove the file at any moment, so every step may fail.
    let Ok(mut bytes) = std::fs::read(path) else { return };
    let at = rng.random_range(0..bytes.len().max(1));
    match rng.random_range(0..4) {
        0 => bytes.truncate(at),
        1 => bytes.push(0),
        2 => bytes.clear(),
        _ => bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 1),
    }
    let _ = if bytes.is_empty() { std::fs::remove_file(path) } else { std::fs::write(path, bytes) };
}

/// Open files of this process, and its resident memory in MiB.
#[cfg(all(feature = "tiers", target_os = "linux"))]
fn files_and_memory() -> (usize, usize) {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("readable");
    let pages: usize = statm.split(' ').nth(1).expect("a number").parse().expect("a number");
    let files = std::fs::read_dir("/proc/self/fd").expect("readable").count();
    (files, (pages * 4096) >> 20)
}

/// Goal: 50,000 random requests through a small pool and a small disk (and an object store, if the
/// build has one), many of them canceled, while the files are damaged, removed and replaced all
/// the time: each completed one gets the right tokens, all end, the accounting is consistent, and
/// neither open files nor memory grow.
#[cfg(all(feature = "tiers", target_os = "linux"))]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes"]
async fn random_requests_through_damaged_tiers() {
    let selective =
        stolon::WritePolicy::WriteThroughSelective { hits: std::num::NonZero::<u32>::MIN };
    let (through, back) = (stolon::WritePolicy::WriteThrough, stolon::WritePolicy::WriteBack);
    let mut loaded_tokens = 0;
    for (policy, requests) in [(through, 24_000), (selective, 12_000), (back, 14_000)] {
        let (report, loaded) = soak_tiers(policy, requests).await;
        println!("{policy}: {report}");
        loaded_tokens += loaded;
    }
    // The engine loads a prefix only if loading is faster than computing. This depends on the load
    // of the machine, so a run with a single policy may load nothing.
    assert!(loaded_tokens > 0);
}

/// Runs the requests. Returns a report, and how many tokens were loaded.
#[cfg(all(feature = "tiers", target_os = "linux"))]
async fn soak_tiers(policy: stolon::WritePolicy, requests: usize) -> (String, u64) {
    const DISK_BYTES: u64 = 60_000;
    let directory = tiers::Directory::new("soak");
    let (disk, store) = (directory.0.join("disk"), directory.0.join("store"));
    std::fs::create_dir_all(&store).expect("a directory");
    let engine = tiers::slow_fake(96, Duration::from_micros(20))
        .max_batched_tokens(512)
        .max_running(12)
        .max_queued_requests(20)
        .kv_cache_dir(&disk, DISK_BYTES)
        .write_policy(policy);
    #[cfg(feature = "object-store")]
    let engine = engine.kv_object_store(format!("file://{}", store.display()));
    let engine = Arc::new(engine.build().await.expect("valid settings"));
    let done = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let damaging = std::thread::spawn({
        let (done, disk, store) = (Arc::clone(&done), disk.clone(), store.clone());
        move || {
            let mut rng = SmallRng::seed_from_u64(99);
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                let place = if rng.random_range(0..4) == 0 { &store } else { &disk };
                damage(place, &mut rng);
                std::thread::sleep(Duration::from_millis(3));
            }
        }
    });
    let mut before = None;
    for part in 0..10 {
        let clients = (0..CLIENTS).map(|client| {
            let engine = Arc::clone(&engine);
            tokio::spawn(async move {
                let mut rng = SmallRng::seed_from_u64((part * CLIENTS + client) as u64);
                for _ in 0..requests / CLIENTS / 10 {
                    one_request(&engine, &mut rng, 700).await;
                }
            })
        });
        for client in clients.collect::<Vec<_>>() {
            client.await.expect("no panic");
        }
        while engine.stats().running + engine.stats().waiting > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        engine.tiers().flush().await.expect("it runs");
        let audit = engine.audit().await.expect("consistent accounting");
        assert_eq!(audit.blocks_reserved, 0);
        let disk = engine.tiers().disk_stats().expect("a disk tier");
        assert!(disk.bytes <= DISK_BYTES, "{disk:?}");
        // The first part warms up: later figures are compared with those after it.
        if part == 1 {
            before = Some(files_and_memory());
        }
    }
    done.store(true, std::sync::atomic::Ordering::Relaxed);
    damaging.join().expect("no panic");
    let (files, memory) = files_and_memory();
    let (files_before, memory_before) = before.expect("there are several parts");
    assert!(files <= files_before + 8, "{files_before} open files, then {files}");
    assert!(memory <= memory_before + 32, "{memory_before} MiB, then {memory} MiB");
    let (stats, disk) = (engine.stats(), engine.tiers().disk_stats().expect("a disk tier"));
    let requests = requests / CLIENTS / 10 * CLIENTS * 10;
    assert_eq!((stats.requests as usize, stats.failed), (requests, 0));
    assert_eq!((stats.finished + stats.canceled) as usize, requests);
    assert!(stats.evictions > 0, "{stats:?}");
    assert!(disk.records_refused > 0 && disk.writes_failed > 0, "{disk:?}");
    (format!("{stats:?}\n{disk:?}"), stats.loaded_tokens)
}
