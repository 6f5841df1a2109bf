//! `--kv-events-config` of `stolon serve`: KV events for routers.

#[cfg(feature = "fleet")]
use anyhow::Context;
use clap::Args;
use stolon::Engine;
#[cfg(feature = "fleet")]
use stolon_fleet::{KvEventPublisher, KvEventsConfig};
use stolon_http::CounterSource;
#[cfg(feature = "fleet")]
use stolon_http::CounterValue;

/// The flag that configures the publishing of KV events.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Routers")]
pub(super) struct KvEventsArgs {
    /// Publish the changes of the prefix cache for a router: the JSON object of vLLM, such as
    /// {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}
    ///
    /// NVIDIA Dynamo, llm-d and the vLLM production stack read these events. Others of its names
    /// are topic, hwm, buffer_steps, max_queue_size and publisher ("zmq" or "null"). The events
    /// contain the token ids of prompts and answers: use a private network.
    #[arg(long, value_name = "JSON")]
    kv_events_config: Option<String>,
}

#[cfg(feature = "fleet")]
impl KvEventsArgs {
    /// Checks the flag, before the model is loaded.
    ///
    /// # Errors
    /// If its value is not a configuration.
    pub(super) fn read(&self) -> anyhow::Result<Option<KvEventsConfig>> {
        let config = self.kv_events_config.as_deref().map(str::parse::<KvEventsConfig>);
        let config = config.transpose().context("--kv-events-config")?;
        Ok(config.filter(KvEventsConfig::publishes))
    }
}

/// The counters of a publisher, for `/metrics`.
#[cfg(feature = "fleet")]
pub(super) fn counters(publisher: &KvEventPublisher) -> CounterSource {
    let counters = publisher.counters();
    let counter = |name, help, value| CounterValue { name, help, value };
    CounterSource::new(move || {
        let counts = counters.read();
        vec![
            counter(
                "kv_event_batches",
                "Batches of KV events that were published.",
                counts.batches,
            ),
            counter("kv_events", "KV events in these batches.", counts.events),
            counter(
                "kv_event_snapshots",
                "Times that the whole cache was published: at the start, when the engine \
                 restarted, and when its events came faster than they could be published.",
                counts.snapshots,
            ),
            counter("kv_event_replays", "Requests for a replay of KV events.", counts.replays),
            counter(
                "kv_event_replayed_batches",
                "Batches that were sent again because a subscriber had missed them.",
                counts.replayed,
            ),
            counter(
                "kv_event_lost_subscribers",
                "Subscribers that were disconnected because they took nothing for 30 seconds, or \
                 failed.",
                counts.lost_subscribers,
            ),
        ]
    })
}

/// Begins to publish, if there is a configuration.
///
/// # Errors
/// If an address cannot be used.
#[cfg(feature = "fleet")]
pub(super) async fn start(
    config: Option<&KvEventsConfig>,
    engine: &Engine,
) -> anyhow::Result<Option<KvEventPublisher>> {
    let Some(config) = config else { return Ok(None) };
    let publisher = KvEventPublisher::start(engine, config).await;
    publisher.map(Some).context("--kv-events-config")
}

#[cfg(not(feature = "fleet"))]
impl KvEventsArgs {
    /// Refuses the flag.
    ///
    /// # Errors
    /// If it is given.
    pub(super) fn read(&self) -> anyhow::Result<Option<()>> {
        anyhow::ensure!(
            self.kv_events_config.is_none(),
            "--kv-events-config: this program was built without the feature `fleet`"
        );
        Ok(None)
    }
}

/// Nothing is counted.
#[cfg(not(feature = "fleet"))]
pub(super) fn counters(_: &()) -> CounterSource {
    CounterSource::new(Vec::new)
}

/// There is nothing to publish.
#[cfg(not(feature = "fleet"))]
pub(super) async fn start(_: Option<&()>, _: &Engine) -> anyhow::Result<Option<()>> {
    Ok(None)
}
