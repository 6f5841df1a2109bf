//! KV events over real sockets: the index of a subscriber equals the cache of the engine.

use std::collections::HashSet;
use std::io::Read;
use std::thread::JoinHandle;
use std::time::Duration;

use omq_tokio::{Message, Options, Socket, SocketType};
use stolon::{Engine, Request};
use stolon_backend::fake::{FakeBackend, FakeOptions};
use stolon_fleet::{KvEventPublisher, KvEventsConfig, PublishError};
use support::{Batch, Copy, cached, config, connect, number, receive, replay, subscribe, tokens};

use crate::support::{connection, subscriber as support};

async fn engine(blocks: usize) -> Engine {
    let options =
        FakeOptions { block_count: blocks, max_positions: 8192, ..FakeOptions::default() };
    let backend = Box::new(FakeBackend::new(options));
    Engine::builder().backend("fake", backend).build().await.expect("an engine")
}

/// A prompt of `blocks` blocks, different for each seed.
fn prompt(seed: u32, blocks: u32) -> Request {
    Request::tokens(tokens(seed, blocks)).max_tokens(1)
}

/// Receives batches until a copy has these blocks.
async fn follow(copy: &mut Copy, subscriber: &Socket, topic: &str, expected: &HashSet<u64>) {
    copy.receive_until(subscriber, topic, |copy| copy.cached() == *expected).await;
}

/// Goal: a subscriber's copy of the index follows the engine through storing, salts, eviction and
/// flushes, without a gap, an orphan, or another event than the format has.
#[tokio::test(flavor = "multi_thread")]
async fn subscribers_follow_the_cache() {
    let engine = engine(64).await;
    let topic = "kv@10.0.0.7@model";
    let config = config(&format!(r#", "topic": "{topic}""#));
    let publisher = KvEventPublisher::start(&engine, &config).await.expect("free ports");
    let subscriber = subscribe(&publisher, topic).await;
    let other = subscribe(&publisher, "another topic").await;
    let mut copy = Copy::default();
    for seed in 0..30 {
        engine.cache().warm(prompt(seed, 1 + seed % 7)).await.expect("it fits");
        follow(&mut copy, &subscriber, topic, &cached(&engine).await).await;
    }
    assert!(copy.removed > 0, "some were evicted");
    let salted = prompt(3, 2).cache_salt("a secret");
    engine.cache().warm(salted).await.expect("it fits");
    follow(&mut copy, &subscriber, topic, &cached(&engine).await).await;
    engine.cache().flush().await.expect("a running engine");
    follow(&mut copy, &subscriber, topic, &HashSet::new()).await;
    assert!(other.try_recv().is_err(), "it has subscribed to another topic");
    let counts = publisher.counts();
    assert_eq!((counts.batches, counts.snapshots), (copy.next, 1));
    engine.shutdown().await;
}

/// Goal: a late subscriber gets the whole cache: from the batches that are kept or, if they are too
/// few, from a snapshot and the later batches.
#[tokio::test(flavor = "multi_thread")]
async fn missed_batches_are_replayed() {
    for (steps, kept) in [(10_000, true), (2, false)] {
        let engine = engine(64).await;
        let config = config(&format!(r#", "buffer_steps": {steps}"#));
        let publisher = KvEventPublisher::start(&engine, &config).await.expect("free ports");
        let subscriber = subscribe(&publisher, "").await;
        let mut copy = Copy::default();
        for seed in 0..20 {
            engine.cache().warm(prompt(seed, 5)).await.expect("it fits");
            follow(&mut copy, &subscriber, "", &cached(&engine).await).await;
        }
        let all = replay(&publisher, 0).await;
        assert_eq!(all.len() as u64 == copy.next, kept);
        let numbers: Vec<u64> = all.iter().map(|(number, _)| *number).collect();
        assert!(numbers.is_sorted() && numbers.last() == Some(&(copy.next - 1)), "{numbers:?}");
        let mut late = Copy::default();
        all.iter().for_each(|(_, batch)| late.apply(batch));
        assert_eq!(late.parents, copy.parents);
        assert_eq!(replay(&publisher, copy.next - 1).await.len(), 1);
        assert_eq!(replay(&publisher, copy.next).await, []);
        assert_eq!(replay(&publisher, u64::MAX).await, []);
        assert_eq!(publisher.counts().replays, 4);
        engine.shutdown().await;
    }
}

/// Goal: a subscriber that comes late learns at once, while nothing changes in the cache, that it
/// has missed something, and gets it with a replay, whose batches are counted.
#[tokio::test(flavor = "multi_thread")]
async fn late_subscribers_learn_that_they_are_late() {
    let engine = engine(64).await;
    engine.cache().warm(prompt(1, 5)).await.expect("it fits");
    let publisher = KvEventPublisher::start(&engine, &config("")).await.expect("free ports");
    let options = Options::new();
    let late = connect(SocketType::Sub, publisher.endpoint(), options).await;
    late.subscribe("").await.expect("a topic");
    let message = receive(&late).await;
    assert_eq!(number(&message[1]), 1);
    let (_, events, _): Batch = rmp_serde::from_slice(&message[2]).expect("a batch");
    assert!(events.is_empty(), "{events:?}");
    let mut copy = Copy::default();
    let missed = replay(&publisher, 0).await;
    missed.iter().for_each(|(_, batch)| copy.apply(batch));
    assert_eq!(copy.cached(), cached(&engine).await);
    let counts = publisher.counters().read();
    assert_eq!((counts.replays, counts.replayed), (1, missed.len() as u64));
    assert_eq!((counts.batches, counts.lost_subscribers), (2, 0));
}

/// Goal: a message that is not a request for a replay is ignored, and the next client is answered.
#[tokio::test(flavor = "multi_thread")]
async fn other_messages_are_ignored() {
    let engine = engine(16).await;
    let publisher = KvEventPublisher::start(&engine, &config("")).await.expect("free ports");
    let endpoint = publisher.replay_endpoint().expect("a second address");
    let client = connect(SocketType::Dealer, endpoint, Options::new()).await;
    for frames in [vec![vec![]], vec![vec![], vec![1]], vec![vec![0; 8]], vec![vec![0; 60_000]; 9]]
    {
        client.send(Message::multipart(frames)).await.expect("sent");
    }
    assert_eq!(replay(&publisher, 0).await.len(), 1);
    assert_eq!(publisher.counts().replays, 1);
}

/// Goal: a subscriber that reads nothing blocks neither the engine nor another subscriber, whose
/// batches have no gap.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_subscriber_is_left_behind() {
    let engine = engine(256).await;
    let publisher = KvEventPublisher::start(&engine, &config(r#", "hwm": 8"#)).await;
    let publisher = publisher.expect("free ports");
    let endpoint = publisher.endpoint();
    let slow = connect(SocketType::Sub, endpoint, Options::new().recv_hwm(1)).await;
    slow.subscribe("").await.expect("a topic");
    let subscriber = subscribe(&publisher, "").await;
    let mut copy = Copy::default();
    for seed in 0..300 {
        engine.cache().warm(prompt(seed, 100)).await.expect("it fits");
        follow(&mut copy, &subscriber, "", &cached(&engine).await).await;
    }
    assert!(copy.next > 300);
    engine.shutdown().await;
}

/// Goal: clients that request a replay and read nothing of it block no other client.
#[tokio::test(flavor = "multi_thread")]
async fn silent_clients_hold_up_no_replay() {
    const SILENT: usize = 8;
    let engine = engine(1024).await;
    let publisher = KvEventPublisher::start(&engine, &config(r#", "hwm": 8"#)).await;
    let publisher = publisher.expect("free ports");
    // More bytes than the buffers of a connection hold.
    for seed in 0..400 {
        engine.cache().warm(prompt(seed, 500)).await.expect("it fits");
    }
    let endpoint = publisher.replay_endpoint().expect("a second address");
    let _silent = [(); SILENT].map(|()| connection::request_replay(endpoint));
    while publisher.counts().replays == 0 {
        tokio::task::yield_now().await;
    }
    // The last batches may still be on their way to the first replay.
    let batches = replay(&publisher, 0).await.len();
    let again = replay(&publisher, 0).await.len();
    assert!(again >= batches && batches > 0);
    let replayed = publisher.counts().replayed;
    let all = ((SILENT + 1) * batches + again) as u64;
    assert!(replayed < all, "the others have read nothing, {replayed} of {all}");
}

/// Goal: a batch that describes a large cache arrives whole.
#[tokio::test(flavor = "multi_thread")]
async fn large_batches_arrive() {
    let engine = engine(4096).await;
    for seed in 0..40 {
        engine.cache().warm(prompt(seed, 100)).await.expect("it fits");
    }
    let publisher = KvEventPublisher::start(&engine, &config("")).await.expect("free ports");
    let all = replay(&publisher, 0).await;
    let mut copy = Copy::default();
    all.iter().for_each(|(_, batch)| copy.apply(batch));
    assert!(all[0].1.len() > 64 << 10, "{} bytes", all[0].1.len());
    assert_eq!(copy.cached(), cached(&engine).await);
}

/// Goal: addresses that cannot be used, and a configuration that publishes nothing, are errors.
#[tokio::test(flavor = "multi_thread")]
async fn wrong_addresses_are_errors() {
    let engine = engine(16).await;
    let nothing = KvEventPublisher::start(&engine, &KvEventsConfig::default()).await;
    assert!(matches!(nothing, Err(PublishError::Disabled)));
    let publisher = KvEventPublisher::start(&engine, &config("")).await.expect("free ports");
    let port = publisher.endpoint().rsplit_once(':').expect("a port").1;
    for endpoint in [format!("tcp://*:{port}"), "tcp://*:99999".into(), "ipc:///no/dir/x".into()] {
        let (mut of_events, mut of_replays) = (config(""), config(""));
        of_events.endpoint = endpoint.clone();
        of_replays.replay_endpoint = Some(endpoint.clone());
        for config in [of_events, of_replays] {
            let error = KvEventPublisher::start(&engine, &config).await.expect_err("not usable");
            assert!(error.to_string().contains(&endpoint), "{error}");
        }
    }
}

/// Goal: the publisher ends with the engine, and an engine can be published again.
#[tokio::test(flavor = "multi_thread")]
async fn a_publisher_can_be_replaced() {
    let engine = engine(64).await;
    engine.cache().warm(prompt(1, 3)).await.expect("it fits");
    for _ in 0..2 {
        let publisher = KvEventPublisher::start(&engine, &config("")).await.expect("free ports");
        let mut copy = Copy::default();
        replay(&publisher, 0).await.iter().for_each(|(_, batch)| copy.apply(batch));
        assert_eq!(copy.parents.len(), 3);
    }
}

/// Goal: a million events arrive without a gap and take a bounded amount of memory, although
/// another subscriber reads nothing.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes a minute when optimized"]
#[allow(clippy::print_stdout, reason = "it is a measurement")]
async fn a_million_events_arrive() {
    let engine = engine(256).await;
    let config = config(r#", "hwm": 1000, "buffer_steps": 1000"#);
    let publisher = KvEventPublisher::start(&engine, &config).await.expect("free ports");
    let endpoint = publisher.endpoint();
    let slow = connect(SocketType::Sub, endpoint, Options::new().recv_hwm(1)).await;
    slow.subscribe("").await.expect("a topic");
    let subscriber = subscribe(&publisher, "").await;
    let mut copy = Copy::default();
    let mut resident = 0;
    let mut seed = 0;
    while publisher.counts().events < 1_000_000 {
        for _ in 0..100 {
            seed += 1;
            let tokens: Vec<u32> = (0..16).map(|i| seed >> (2 * i) & 3).collect();
            engine.cache().warm(Request::tokens(tokens).max_tokens(1)).await.expect("it fits");
        }
        follow(&mut copy, &subscriber, "", &cached(&engine).await).await;
        // By then, the queues of both subscribers and the batches for replays have their full length.
        if resident == 0 && publisher.counts().events > 300_000 {
            resident = resident_bytes();
        }
    }
    let grown = resident_bytes().saturating_sub(resident);
    let counts = publisher.counts();
    println!("{counts:?}, {} kB more memory for the last 700,000 events", grown >> 10);
    assert!(grown < 16 << 20, "{grown} bytes");
    assert_eq!((counts.snapshots, counts.batches), (1, copy.next));
    engine.shutdown().await;
}

/// Goal: the processor time that publishing takes for each block that is stored and removed again,
/// in comparison with an engine that computes nothing and publishes nothing. The time of the
/// subscriber's thread is not included.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes half a minute when optimized"]
#[allow(clippy::print_stdout, reason = "it is a measurement")]
async fn publishing_takes_little_time() {
    const PROMPTS: u32 = 2000;
    const BLOCKS: u32 = 100;
    let kinds = ["off", "nobody", "read"];
    let mut seconds = [const { Vec::new() }; 3];
    for turn in 0..9 {
        for number in 0..3 {
            let kind = (turn + number) % 3;
            let engine = engine(256).await;
            let publisher = match kinds[kind] {
                "off" => None,
                _ => Some(KvEventPublisher::start(&engine, &config("")).await.expect("free ports")),
            };
            let reading = match &publisher {
                Some(publisher) if kinds[kind] == "read" => Some(read_all(publisher.endpoint())),
                _ => None,
            };
            let before = processor_seconds("self");
            for seed in 0..PROMPTS {
                let token = |i: u32| 10 + (i * 7 + seed * (1 + i % 3)) % 200;
                let tokens: Vec<u32> = (0..16 * BLOCKS).map(token).collect();
                engine.cache().warm(Request::tokens(tokens).max_tokens(1)).await.expect("it fits");
            }
            let all = processor_seconds("self") - before;
            engine.shutdown().await;
            drop(publisher);
            let of_subscriber = reading.map_or(0.0, |thread| thread.join().expect("it ends"));
            seconds[kind].push(all - of_subscriber);
        }
    }
    let medians = seconds.map(|mut seconds| {
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    });
    for (kind, median) in kinds.iter().zip(medians) {
        let micros = (median - medians[0]) * 1e6 / f64::from(PROMPTS * BLOCKS);
        println!("{kind}: {median:.2} s, {micros:.2} us for each block");
    }
}

/// Starts a subscriber in a thread that returns its processor time.
fn read_all(endpoint: &str) -> JoinHandle<f64> {
    let mut connection = connection::subscribe(endpoint);
    connection.set_read_timeout(Some(Duration::from_secs(5))).expect("a timeout");
    std::thread::spawn(move || {
        let mut buffer = vec![0; 1 << 16];
        while connection.read(&mut buffer).is_ok_and(|count| count > 0) {}
        processor_seconds("thread-self")
    })
}

/// Processor time of this process (`self`) or thread (`thread-self`).
fn processor_seconds(of: &str) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{of}/stat")).expect("Linux describes it");
    let fields = stat.rsplit_once(')').expect("a name").1.split_whitespace();
    // Ticks of 10 ms, in user mode and in the kernel.
    let ticks = fields.skip(11).take(2).map(|field| field.parse::<f64>().expect("a number"));
    ticks.sum::<f64>() / 100.0
}

/// Resident memory of this process.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux describes the process");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}
