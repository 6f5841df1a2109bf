//! Common code of the tests of KV events: a subscriber that decodes them, and its sockets.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use omq_tokio::{Endpoint, Message, Options, Socket, SocketType};
use serde::Deserialize;
use stolon::{CacheEvent, Engine};
use stolon_fleet::{KvEventPublisher, KvEventsConfig};

/// An event as a router would decode it: every field of the format is required.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", deny_unknown_fields)]
pub(crate) enum KvEvent {
    BlockStored {
        block_hashes: Vec<u64>,
        parent_block_hash: Option<u64>,
        token_ids: Vec<u32>,
        block_size: usize,
        lora_id: Option<u32>,
        medium: String,
        lora_name: Option<String>,
        extra_keys: Option<Vec<Option<(String,)>>>,
    },
    BlockRemoved {
        block_hashes: Vec<u64>,
        medium: String,
    },
    AllBlocksCleared {},
}

pub(crate) type Batch = (f64, Vec<KvEvent>, Option<u32>);

/// A router's copy of the index.
#[derive(Debug, Default)]
pub(crate) struct Copy {
    /// The parent of each block in the cache.
    pub(crate) parents: HashMap<u64, Option<u64>>,
    /// The blocks on the disk.
    pub(crate) disk: HashSet<u64>,
    /// The number of the next batch; 0 before the first one.
    pub(crate) next: u64,
    /// Number of blocks that were removed from the cache.
    pub(crate) removed: usize,
}

impl Copy {
    pub(crate) fn apply(&mut self, batch: &[u8]) {
        let (time, events, rank): Batch = rmp_serde::from_slice(batch).expect("a batch");
        assert!(time > 1.7e9 && rank.is_none());
        events.into_iter().for_each(|event| self.apply_one(event));
    }

    fn apply_one(&mut self, event: KvEvent) {
        match event {
            KvEvent::BlockStored {
                block_hashes,
                parent_block_hash,
                token_ids,
                block_size,
                lora_id,
                medium,
                lora_name,
                extra_keys,
            } => {
                assert_eq!((block_size, token_ids.len()), (16, 16 * block_hashes.len()));
                assert_eq!((lora_id, lora_name), (None, None));
                let blocks = extra_keys.map_or(block_hashes.len(), |keys| keys.len());
                assert_eq!(blocks, block_hashes.len());
                match &medium[..] {
                    "GPU" => self.store(block_hashes, parent_block_hash),
                    "STORAGE" => self.disk.extend(block_hashes),
                    other => panic!("{other} is no medium"),
                }
            }
            KvEvent::BlockRemoved { block_hashes, medium } => {
                for hash in block_hashes {
                    match &medium[..] {
                        "GPU" => {
                            self.removed += 1;
                            self.parents.remove(&hash).expect("a block that was stored");
                        }
                        "STORAGE" => assert!(self.disk.remove(&hash), "it was never stored"),
                        other => panic!("{other} is no medium"),
                    }
                }
            }
            // As routers do, for all media.
            KvEvent::AllBlocksCleared {} => {
                self.parents.clear();
                self.disk.clear();
            }
        }
    }

    fn store(&mut self, hashes: Vec<u64>, mut parent: Option<u64>) {
        for hash in hashes {
            let known = parent.is_none_or(|parent| self.parents.contains_key(&parent));
            assert!(known, "an orphan");
            self.parents.insert(hash, parent);
            parent = Some(hash);
        }
    }

    /// The blocks in the cache.
    pub(crate) fn cached(&self) -> HashSet<u64> {
        self.parents.keys().copied().collect()
    }

    /// Receives batches until something holds for the copy.
    pub(crate) async fn receive_until(
        &mut self,
        subscriber: &Socket,
        topic: &str,
        holds: impl Fn(&Copy) -> bool,
    ) {
        while !holds(self) {
            let message = receive(subscriber).await;
            assert_eq!(message.len(), 3);
            assert_eq!(&message[0], topic.as_bytes());
            let number = number(&message[1]);
            // A subscriber always comes after the first batch.
            assert!(number == self.next || self.next == 0 && number > 0, "a gap");
            self.next = number + 1;
            self.apply(&message[2]);
        }
    }
}

pub(crate) fn number(frame: &[u8]) -> u64 {
    u64::from_be_bytes(frame.try_into().expect("8 bytes"))
}

pub(crate) async fn receive(socket: &Socket) -> Message {
    let message = tokio::time::timeout(Duration::from_secs(20), socket.recv()).await;
    message.expect("a message in time").expect("an open socket")
}

pub(crate) fn config(more: &str) -> KvEventsConfig {
    let text = format!(
        r#"{{"enable_kv_cache_events": true, "endpoint": "tcp://*:0",
             "replay_endpoint": "tcp://*:0"{more}}}"#
    );
    text.parse().expect("a configuration")
}

/// The bound address, on this machine.
pub(crate) fn local(endpoint: &str) -> Endpoint {
    let (_, port) = endpoint.rsplit_once(':').expect("a port");
    format!("tcp://127.0.0.1:{port}").parse().expect("an address")
}

pub(crate) async fn connect(kind: SocketType, endpoint: &str, options: Options) -> Socket {
    let socket = Socket::new(kind, options);
    socket.connect(local(endpoint)).await.expect("an address");
    socket
}

/// A subscriber that receives everything from now on.
pub(crate) async fn subscribe(publisher: &KvEventPublisher, topic: &str) -> Socket {
    let subscriber = connect(SocketType::Sub, publisher.endpoint(), Options::new()).await;
    subscriber.subscribe(topic.to_owned()).await.expect("a topic");
    tokio::time::sleep(Duration::from_millis(300)).await;
    subscriber
}

/// The batches that are replayed from a number on, with their numbers.
pub(crate) async fn replay(publisher: &KvEventPublisher, from: u64) -> Vec<(u64, Vec<u8>)> {
    let endpoint = publisher.replay_endpoint().expect("a second address");
    let client = connect(SocketType::Dealer, endpoint, Options::new()).await;
    let request = [Vec::new(), from.to_be_bytes().to_vec()];
    client.send(Message::multipart(request)).await.expect("sent");
    let mut batches = Vec::new();
    loop {
        let message = receive(&client).await;
        assert_eq!((message.len(), message[0].len()), (4, 0));
        match number(&message[2]) {
            u64::MAX => return batches,
            number => batches.push((number, message[3].to_vec())),
        }
    }
}

/// The tokens of a prompt of `blocks` blocks, different for each seed.
pub(crate) fn tokens(seed: u32, blocks: u32) -> Vec<u32> {
    let token = |i| if i == 0 { 10 + seed % 200 } else { 10 + (i * 7 + seed) % 90 };
    (0..16 * blocks).map(token).collect()
}

/// The hashes of all cached blocks, by the engine.
pub(crate) async fn cached(engine: &Engine) -> HashSet<u64> {
    let events = engine.cache().events(1).await.expect("a snapshot");
    let stored = events.snapshot().events.iter().filter_map(|event| match event {
        CacheEvent::Stored { hashes, .. } => Some(hashes.clone()),
        _ => None,
    });
    stored.flatten().collect()
}
