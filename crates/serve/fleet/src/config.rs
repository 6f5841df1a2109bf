//! [`KvEventsConfig`]: where KV events are published, in the form of vLLM's `--kv-events-config`.

use std::str::FromStr;

use serde::Deserialize;

/// Maximum of `hwm`, `buffer_steps` and `max_queue_size`.
const COUNT_MAX: usize = 1_000_000;
/// Maximum length of the topic, in bytes.
const TOPIC_MAX: usize = 1024;

/// The transport that publishes KV events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum PublisherKind {
    /// Nothing.
    Null,
    /// A ZeroMQ PUB socket.
    Zmq,
}

/// Where KV events are published. Parsed from the JSON object of vLLM's `--kv-events-config`, with
/// the same names. Every setting has a default.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct KvEventsConfig {
    /// Whether events are published. Default: no.
    pub enable_kv_cache_events: bool,
    /// The transport that publishes the events. Default: [`PublisherKind::Zmq`] if they are
    /// enabled.
    pub publisher: Option<PublisherKind>,
    /// Address of the PUB socket, `tcp://` or `ipc://`. It is bound if it contains `*` or `::` or
    /// is `ipc`, and otherwise connected to. Default: `tcp://*:5557`.
    pub endpoint: String,
    /// Address at which the ROUTER socket for replays is bound. Default: there is none.
    pub replay_endpoint: Option<String>,
    /// Maximum number of batches that are kept for replays. At most 64 MiB of them are kept.
    /// Default: 10,000.
    pub buffer_steps: usize,
    /// Maximum number of batches that wait for one subscriber; a slower one loses batches. Default:
    /// 10,000, a tenth of vLLM's, so that a subscriber that hangs costs tens of megabytes.
    pub hwm: usize,
    /// Maximum number of events of the engine that wait to be published. If there are more, the
    /// cache is published anew. Default: 100,000.
    pub max_queue_size: usize,
    /// The first frame of each batch, such as `kv@10.0.0.7@model` for llm-d. Default: empty.
    pub topic: String,
}

impl Default for KvEventsConfig {
    fn default() -> Self {
        Self {
            enable_kv_cache_events: false,
            publisher: None,
            endpoint: "tcp://*:5557".to_owned(),
            replay_endpoint: None,
            buffer_steps: 10_000,
            hwm: 10_000,
            max_queue_size: 100_000,
            topic: String::new(),
        }
    }
}

/// Why a [`KvEventsConfig`] is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// It is not the JSON object that is expected.
    #[error("KV events: {0}")]
    Json(String),
    /// A value is out of its range.
    #[error("KV events: `{name}`: expected {expected}, got {got}")]
    Value {
        /// The setting.
        name: &'static str,
        /// What is accepted.
        expected: &'static str,
        /// What was given.
        got: String,
    },
}

impl FromStr for KvEventsConfig {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let config: Self =
            serde_json::from_str(text).map_err(|error| ConfigError::Json(error.to_string()))?;
        config.check()?;
        Ok(config)
    }
}

impl KvEventsConfig {
    /// Whether there is something to publish.
    #[must_use]
    pub fn publishes(&self) -> bool {
        self.enable_kv_cache_events && self.publisher != Some(PublisherKind::Null)
    }

    /// Whether the PUB socket is bound; otherwise it connects.
    pub(crate) fn binds(&self) -> bool {
        let endpoint = &self.endpoint;
        endpoint.contains('*') || endpoint.contains("::") || endpoint.starts_with("ipc://")
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let wrong = |name, expected, got: &dyn ToString| {
            Err(ConfigError::Value { name, expected, got: got.to_string() })
        };
        if self.publisher == Some(PublisherKind::Zmq) && !self.enable_kv_cache_events {
            let expected = "\"null\", or `enable_kv_cache_events`: true";
            return wrong("publisher", expected, &"\"zmq\"");
        }
        let replay = self.replay_endpoint.as_ref().map(|replay| ("replay_endpoint", replay));
        for (name, endpoint) in [("endpoint", &self.endpoint)].into_iter().chain(replay) {
            if !endpoint.starts_with("tcp://") && !endpoint.starts_with("ipc://") {
                return wrong(
                    name,
                    "an address such as tcp://*:5557 or ipc:///run/events",
                    endpoint,
                );
            }
        }
        for (name, count) in [("hwm", self.hwm), ("max_queue_size", self.max_queue_size)] {
            if !(1..=COUNT_MAX).contains(&count) {
                return wrong(name, "1 to 1000000", &count);
            }
        }
        if self.buffer_steps > COUNT_MAX {
            return wrong("buffer_steps", "0 to 1000000", &self.buffer_steps);
        }
        if self.topic.len() > TOPIC_MAX {
            return wrong("topic", "at most 1024 bytes", &self.topic.len());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: vLLM's examples are accepted, with its defaults.
    #[test]
    fn vllm_s_configurations_are_accepted() {
        let config: KvEventsConfig = r#"{"publisher": "zmq", "enable_kv_cache_events": true,
            "topic": "kv@10.0.0.7@model"}"#
            .parse()
            .expect("a configuration");
        assert!(config.publishes() && config.binds());
        assert_eq!((config.endpoint.as_str(), config.buffer_steps), ("tcp://*:5557", 10_000));
        for (text, publishes, binds) in [
            ("{}", false, true),
            (r#"{"enable_kv_cache_events": true, "publisher": "null"}"#, false, true),
            (r#"{"enable_kv_cache_events": true, "endpoint": "tcp://router:1"}"#, true, false),
            (r#"{"enable_kv_cache_events": true, "endpoint": "tcp://[::]:1"}"#, true, true),
            (r#"{"enable_kv_cache_events": true, "endpoint": "ipc:///run/x"}"#, true, true),
        ] {
            let config: KvEventsConfig = text.parse().expect("a configuration");
            assert_eq!((config.publishes(), config.binds()), (publishes, binds), "{text}");
        }
    }

    /// Goal: wrong settings are refused by name, with the expected value.
    #[test]
    fn mistakes_are_named() {
        for (text, words) in [
            (r#"{"publisher": "zmq"}"#, "`publisher`: expected \"null\", or `enable"),
            (r#"{"publisher": "kafka"}"#, "unknown variant `kafka`, expected `null` or `zmq`"),
            (r#"{"endpoints": "tcp://*:1"}"#, "unknown field `endpoints`, expected one of"),
            (r#"{"endpoint": "udp://*:1"}"#, "`endpoint`: expected an address such as tcp://"),
            (r#"{"replay_endpoint": "5558"}"#, "`replay_endpoint`: expected an address"),
            (r#"{"hwm": 0}"#, "`hwm`: expected 1 to 1000000, got 0"),
            (r#"{"max_queue_size": 0}"#, "`max_queue_size`: expected 1 to 1000000, got 0"),
            (r#"{"buffer_steps": 2000000}"#, "`buffer_steps`: expected 0 to 1000000"),
            ("tcp://*:5557", "expected"),
        ] {
            let error = text.parse::<KvEventsConfig>().expect_err(text).to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
