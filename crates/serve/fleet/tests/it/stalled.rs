//! A subscriber that takes nothing is disconnected and counted.

use std::time::Duration;

use stolon::{Engine, Request};
use stolon_backend::fake::{FakeBackend, FakeOptions};
use stolon_fleet::{KvEventPublisher, KvEventsConfig};

use crate::support::connection;

/// Goal: the memory for batches that a subscriber does not read is bounded, the engine continues,
/// and the subscriber is disconnected in the end.
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
    let _connection = connection::subscribe(publisher.endpoint());
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
