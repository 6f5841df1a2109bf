//! A subscriber that takes nothing is disconnected and counted.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use stolon::{Engine, Request};
use stolon_backend::fake::{FakeBackend, FakeOptions};
use stolon_fleet::{KvEventPublisher, KvEventsConfig};

/// A connection that subscribes to everything by ZMTP 3.0, ZeroMQ's protocol, and reads nothing
/// from then on.
fn subscribe(endpoint: &str) -> TcpStream {
    let (_, port) = endpoint.rsplit_once(':').expect("a port");
    let mut connection = TcpStream::connect(format!("127.0.0.1:{port}")).expect("a listener");
    // The signature, version 3.0, the mechanism NULL, no server, and padding.
    let mut greeting = [0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    connection.write_all(&greeting).expect("a peer");
    connection.read_exact(&mut greeting).expect("a greeting");
    let ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB";
    assert_eq!(usize::from(ready[1]), ready.len() - 2);
    connection.write_all(ready).expect("a peer");
    let mut header = [0; 2];
    connection.read_exact(&mut header).expect("a command");
    connection.read_exact(&mut vec![0; header[1].into()]).expect("its body");
    // A message of one byte: subscribe to the empty prefix.
    connection.write_all(&[0, 1, 1]).expect("a peer");
    connection
}

/// Goal: what a subscriber does not read is bounded, the engine goes on, and the subscriber is
/// disconnected in the end.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes 40 seconds, because the limit is 30"]
async fn a_stalled_subscriber_is_disconnected() {
    let options = FakeOptions { block_count: 256, max_positions: 8192, ..FakeOptions::default() };
    let backend = Box::new(FakeBackend::new(options));
    let engine = Engine::builder().backend("fake", backend).build().await.expect("an engine");
    let config: KvEventsConfig =
        r#"{"enable_kv_cache_events": true, "endpoint": "tcp://*:0", "hwm": 50}"#
            .parse()
            .expect("a configuration");
    let publisher = KvEventPublisher::start(&engine, &config).await.expect("a free port");
    let _connection = subscribe(publisher.endpoint());
    let mut seed = 0_u32;
    while publisher.counts().lost_subscribers == 0 {
        seed += 1;
        assert!(seed < 200_000, "it is still connected");
        let tokens: Vec<u32> = (0..1600).map(|i| 10 + (i * 7 + seed * (1 + i % 3)) % 200).collect();
        engine.cache().warm(Request::tokens(tokens).max_tokens(1)).await.expect("it fits");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert_eq!(publisher.counts().lost_subscribers, 1);
    engine.shutdown().await;
}
