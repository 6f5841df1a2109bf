//! Batches of KV events in MessagePack, as vLLM encodes them.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use serde::Serialize;
use stolon::{CacheEvent, Namespace};

/// vLLM's name for the memory that the model computes from.
const MEDIUM: &str = "GPU";

/// By this prefix Dynamo knows the key of a namespace from others, and keeps its blocks apart. To
/// other routers the whole key is opaque.
const NAMESPACE_PREFIX: &str = "dynamo-cache-salt:";

/// An event. Its variants and fields have the names of the wire format, in its order.
#[derive(Serialize)]
#[serde(tag = "type")]
enum KvEvent<'a> {
    BlockStored {
        block_hashes: &'a [u64],
        parent_block_hash: Option<u64>,
        token_ids: &'a [u32],
        block_size: usize,
        lora_id: Option<u32>,
        medium: &'static str,
        lora_name: Option<&'a str>,
        /// For each block what its hash depends on besides positions; left out if that is nothing.
        #[serde(skip_serializing_if = "Option::is_none")]
        extra_keys: Option<Vec<Option<[String; 1]>>>,
    },
    BlockRemoved {
        block_hashes: &'a [u64],
        medium: &'static str,
    },
    AllBlocksCleared {},
}

/// A batch of events, with the time of now. `adapter` is the name of the adapter that computes what
/// is in a namespace, if it is one of an adapter.
pub(crate) fn encode(
    events: &[CacheEvent],
    adapter: impl Fn(&Namespace) -> Option<Arc<str>>,
) -> Bytes {
    let names: Vec<Option<Arc<str>>> = events
        .iter()
        .map(|event| match event {
            CacheEvent::Stored { namespace, .. } if !namespace.is_base() => adapter(namespace),
            _ => None,
        })
        .collect();
    let named = events.iter().zip(&names);
    let events: Vec<KvEvent<'_>> =
        named.filter_map(|(event, name)| KvEvent::new(event, name.as_deref())).collect();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    let mut bytes = Vec::new();
    let mut serializer = rmp_serde::Serializer::new(&mut bytes).with_struct_map();
    let batch = (now, events, None::<u32>);
    batch.serialize(&mut serializer).expect("numbers and strings are written to memory");
    bytes.into()
}

impl<'a> KvEvent<'a> {
    /// The event as it is sent; none for a reset, after which the cache is published anew.
    fn new(event: &'a CacheEvent, lora_name: Option<&'a str>) -> Option<Self> {
        match event {
            CacheEvent::Stored { namespace, parent, hashes, positions } => {
                let first = parent.is_none() && !namespace.is_base();
                Some(KvEvent::BlockStored {
                    block_hashes: hashes,
                    parent_block_hash: *parent,
                    token_ids: positions,
                    block_size: positions.len() / hashes.len().max(1),
                    lora_id: None,
                    medium: MEDIUM,
                    lora_name,
                    extra_keys: first.then(|| extra_keys(*namespace, hashes.len())),
                })
            }
            CacheEvent::Removed { hashes } => {
                Some(KvEvent::BlockRemoved { block_hashes: hashes, medium: MEDIUM })
            }
            CacheEvent::Cleared => Some(KvEvent::AllBlocksCleared {}),
            CacheEvent::Reset { .. } => None,
        }
    }
}

/// The namespace, as the key of the first of these blocks. The other hashes follow from it.
fn extra_keys(namespace: Namespace, blocks: usize) -> Vec<Option<[String; 1]>> {
    let mut key = NAMESPACE_PREFIX.to_owned();
    key.extend(namespace.to_bytes().iter().map(|byte| format!("{byte:02x}")));
    let mut keys = vec![None; blocks];
    if let Some(first) = keys.first_mut() {
        *first = Some([key]);
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the bytes are those of vLLM's encoder (msgspec), but for the time: the expected ones
    /// were written by hand from the specification of MessagePack.
    #[test]
    fn events_have_the_wire_format() {
        let events = [
            CacheEvent::Cleared,
            CacheEvent::Stored {
                namespace: Namespace::default(),
                parent: None,
                hashes: vec![u64::MAX, 7],
                positions: vec![1, 2, 300, 70_000],
            },
            CacheEvent::Removed { hashes: vec![7] },
            CacheEvent::Reset { missed: 3 },
        ];
        let bytes = encode(&events, |_| Some("not for the base namespace".into()));
        let mut expected = vec![0x93, 0xcb]; // An array of 3, and a 64-bit float.
        expected.extend(&bytes[2..10]);
        let text = |text: &str| {
            let mut bytes = vec![0xa0 | text.len() as u8];
            bytes.extend(text.bytes());
            bytes
        };
        expected.push(0x93); // Three events.
        expected.push(0x81);
        expected.extend([text("type"), text("AllBlocksCleared")].concat());
        expected.push(0x88);
        expected.extend([text("type"), text("BlockStored"), text("block_hashes")].concat());
        expected.push(0x92);
        expected.push(0xcf);
        expected.extend([0xff; 8]);
        expected.push(7);
        expected.extend(text("parent_block_hash"));
        expected.push(0xc0);
        expected.extend(text("token_ids"));
        expected.extend([0x94, 1, 2, 0xcd, 0x01, 0x2c, 0xce, 0x00, 0x01, 0x11, 0x70]);
        expected.extend(text("block_size"));
        expected.push(2);
        expected.extend(text("lora_id"));
        expected.push(0xc0);
        expected.extend([text("medium"), text("GPU"), text("lora_name")].concat());
        expected.push(0xc0);
        expected.push(0x83);
        expected.extend([text("type"), text("BlockRemoved"), text("block_hashes")].concat());
        expected.extend([0x91, 7]);
        expected.extend([text("medium"), text("GPU")].concat());
        expected.push(0xc0); // No rank.
        assert_eq!(bytes, expected);
    }

    /// Goal: the first block of a namespace names it.
    #[test]
    fn a_namespace_is_an_extra_key() {
        let namespace = Namespace::from_bytes([0xab; 32]);
        let stored = |parent| CacheEvent::Stored {
            namespace,
            parent,
            hashes: vec![1, 2],
            positions: vec![5; 4],
        };
        let digest = format!("dynamo-cache-salt:{}", "ab".repeat(32));
        let has_digest = |event| {
            let bytes = encode(&[event], |_| None);
            bytes.windows(digest.len()).filter(|part| *part == digest.as_bytes()).count()
        };
        assert_eq!((has_digest(stored(None)), has_digest(stored(Some(3)))), (1, 0));
        // The name of an adapter is in each event of its namespaces.
        for parent in [None, Some(3)] {
            let adapter = |of: &Namespace| (*of == namespace).then(|| "sql".into());
            let bytes = encode(&[stored(parent)], adapter);
            assert!(bytes.windows(14).any(|part| part == b"\xa9lora_name\xa3sql"));
        }
    }
}
