//! Makes a Stolon engine a worker behind a router that routes by cached prefixes.
//!
//! [`KvEventPublisher`] publishes every change of the prefix cache and of the disk tier in the wire
//! format of vLLM's KV events: a ZeroMQ PUB socket, and a ROUTER socket that replays batches which
//! a subscriber has missed. NVIDIA Dynamo, llm-d and the vLLM production stack read it.
//!
//! ```no_run
//! use stolon::Engine;
//! use stolon_fleet::{KvEventPublisher, KvEventsConfig};
//!
//! # async fn publish() -> Result<(), Box<dyn std::error::Error>> {
//! let engine = Engine::builder().model("Qwen/Qwen3-0.6B").build().await?;
//! let config: KvEventsConfig = r#"{"enable_kv_cache_events": true,
//!     "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}"#.parse()?;
//! let publisher = KvEventPublisher::start(&engine, &config).await?;
//! println!("events at {}", publisher.endpoint());
//! # Ok(())
//! # }
//! ```
//!
//! [`CacheFeed`] has the same content for programs that need no socket. It is all that the crate
//! has without its feature `zmq`, which is on by default.
//!
//! # The wire format
//!
//! Each message on the PUB socket has three frames: the topic, a sequence number (8 bytes,
//! big-endian, counted from 0), and a batch in MessagePack. A batch is an array of the time in
//! seconds since 1970, the events, and nil (the rank, which Stolon does not have). Each event is a
//! map whose `type` is one of
//!
//! * `BlockStored`: `block_hashes`, `parent_block_hash` (nil at the start of a prompt), `token_ids`
//!   (`block_size` for each hash), `block_size`, `lora_id` (nil), `lora_name` (the name of the LoRA
//!   adapter, or nil), `medium`, and `extra_keys`, if there are any: for each block nil or an array
//!   of keys;
//! * `BlockRemoved`: `block_hashes`, `medium`;
//! * `AllBlocksCleared`: the first event of a process, and after an engine's restart. It holds for
//!   all media.
//!
//! At the positions of images, `token_ids` has the model's image token. The keys of such a block
//! are pairs of a hash of the image (32 hexadecimal digits, from its pixels and how they are
//! prepared) and the position where the image begins, counted from the start of the block and
//! negative if that is in an earlier block. A picture that the model reads as several tiles is an
//! image for each. An image that the engine has forgotten, because thousands of others came after
//! it, has the name `forgotten`; no request matches its blocks any longer. The first block of a
//! namespace other than the base one has the key `dynamo-cache-salt:` and the namespace's digest,
//! from which a cache salt cannot be computed.
//!
//! `medium` is `GPU`, vLLM's name for the memory that the model computes from, also on a CPU, or
//! `STORAGE`, vLLM's name for files, for the disk tier of the engine. A block that is in both is
//! stored twice and removed from each by itself. [`Tiers::disk_events`](stolon::Tiers::disk_events)
//! describes what the disk tier reports, and what it does not report; blocks that are in an object
//! store only are not published.
//!
//! Hashes are 64-bit integers. They are chained: the hash of a block depends on its namespace and
//! on all positions up to its end, and is the same in every process; those in a namespace with a
//! salt only if the processes share its key. From the first position of an image on, they are those
//! of one process: compare `token_ids` and `extra_keys` instead.
//!
//! When somebody subscribes, a batch without events is published. A subscriber that comes late
//! learns from its number that it has missed something, also while nothing changes in the cache.
//!
//! A request to the ROUTER socket is an empty frame and the first sequence number that is wanted.
//! The reply is one message for each batch since then that is still kept (an empty frame, topic,
//! number, batch), and one with the number 2^64 - 1 at the end. If that number is too old, the
//! first reply has the number of the last batch before those that follow, and its events are
//! `AllBlocksCleared` and a `BlockStored` for everything that is cached or on the disk, so that a
//! router which restarts knows all of it.
//!
//! # Slow subscribers
//!
//! The engine never waits. A subscriber that is more than `hwm` batches behind loses the next ones,
//! sees a gap in the sequence numbers, and requests a replay. One that takes nothing at all for
//! half a minute is disconnected. [`KvEventCounts`] has the number of batches that were sent again,
//! and of subscribers that were disconnected; if a subscriber has lost batches and requests no
//! replay, ZeroMQ does not report how many. Token ids are published as they are: use a private
//! network.

#![forbid(unsafe_code)]

#[cfg(feature = "zmq")]
mod config;
#[cfg(feature = "zmq")]
mod extra_keys;
mod feed;
#[cfg(feature = "zmq")]
mod publisher;
#[cfg(feature = "zmq")]
mod replay;
#[cfg(feature = "zmq")]
mod wire;

#[cfg(feature = "zmq")]
pub use config::{ConfigError, KvEventsConfig, PublisherKind};
pub use feed::{CacheBatch, CacheFeed};
#[cfg(feature = "zmq")]
pub use publisher::{KvEventCounters, KvEventCounts, KvEventPublisher, PublishError};
