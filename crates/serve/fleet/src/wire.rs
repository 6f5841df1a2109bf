//! Batches of KV events in MessagePack, as vLLM encodes them.

use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use serde::Serialize;
use stolon::CacheEvent;

use crate::extra_keys::{ExtraKey, ExtraKeys, Names};
use crate::feed::CacheBatch;

/// vLLM's name for the memory that the model computes from.
const MEDIUM_CACHE: &str = "GPU";
/// vLLM's name for files.
const MEDIUM_DISK: &str = "STORAGE";

/// An event. Its variants and fields have the names of the wire format, in its order.
#[derive(Serialize)]
#[serde(tag = "type")]
enum KvEvent<'a> {
    BlockStored {
        block_hashes: &'a [u64],
        parent_block_hash: Option<u64>,
        token_ids: Vec<u32>,
        block_size: usize,
        lora_id: Option<u32>,
        medium: &'static str,
        lora_name: Option<&'a str>,
        /// The extra keys of each block, on which its hash depends in addition to token ids; left
        /// out if no block has any.
        #[serde(skip_serializing_if = "Option::is_none")]
        extra_keys: Option<Vec<Option<Vec<ExtraKey>>>>,
    },
    BlockRemoved {
        block_hashes: &'a [u64],
        medium: &'static str,
    },
    AllBlocksCleared {},
}

/// A batch of events, with the current time.
pub(crate) fn encode(batch: &CacheBatch, names: &dyn Names) -> Bytes {
    let of_cache = batch.events.iter().map(|event| (event, MEDIUM_CACHE));
    let of_disk = batch.disk.iter().map(|event| (event, MEDIUM_DISK));
    let events: Vec<(&CacheEvent, &'static str)> = of_cache.chain(of_disk).collect();
    let adapters: Vec<_> = events
        .iter()
        .map(|(event, _)| match event {
            CacheEvent::Stored { namespace, .. } if !namespace.is_base() => {
                names.adapter(namespace)
            }
            _ => None,
        })
        .collect();
    let mut extra_keys = ExtraKeys::default();
    let named = events.into_iter().zip(&adapters);
    let events: Vec<KvEvent<'_>> = named
        .filter_map(|((event, medium), adapter)| {
            KvEvent::new(event, medium, adapter.as_deref(), &mut extra_keys, names)
        })
        .collect();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    let mut bytes = Vec::new();
    let mut serializer = rmp_serde::Serializer::new(&mut bytes).with_struct_map();
    let batch = (now, events, None::<u32>);
    batch.serialize(&mut serializer).expect("numbers and strings are written to memory");
    bytes.into()
}

impl<'a> KvEvent<'a> {
    /// The event as it is sent; none for a reset, after which everything is published anew.
    fn new(
        event: &'a CacheEvent,
        medium: &'static str,
        lora_name: Option<&'a str>,
        extra_keys: &mut ExtraKeys,
        names: &dyn Names,
    ) -> Option<Self> {
        match event {
            CacheEvent::Stored { parent, hashes, positions, .. } => {
                let (token_ids, extra_keys) = extra_keys.of(event, names);
                Some(KvEvent::BlockStored {
                    block_hashes: hashes,
                    parent_block_hash: *parent,
                    token_ids,
                    block_size: positions.len() / hashes.len().max(1),
                    lora_id: None,
                    medium,
                    lora_name,
                    extra_keys,
                })
            }
            CacheEvent::Removed { hashes } => {
                Some(KvEvent::BlockRemoved { block_hashes: hashes, medium })
            }
            CacheEvent::Cleared => Some(KvEvent::AllBlocksCleared {}),
            CacheEvent::Reset { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use stolon::{Namespace, TokenSpan};

    use super::*;
    use crate::extra_keys::tests::TestNames;

    fn of_cache(events: impl Into<Vec<CacheEvent>>) -> CacheBatch {
        CacheBatch { events: events.into(), ..CacheBatch::default() }
    }

    /// Goal: the bytes are those of vLLM's encoder (msgspec), except for the time: the expected
    /// ones were written by hand from the specification of MessagePack.
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
        let adapter = Some((Namespace::default(), "not for the base namespace"));
        let disk = vec![CacheEvent::Removed { hashes: vec![8] }];
        let batch = CacheBatch { disk, ..of_cache(events) };
        let bytes = encode(&batch, &TestNames { adapter, ..TestNames::new() });
        let mut expected = vec![0x93, 0xcb]; // An array of 3, and a 64-bit float.
        expected.extend(&bytes[2..10]);
        let text = |text: &str| {
            let mut bytes = vec![0xa0 | text.len() as u8];
            bytes.extend(text.bytes());
            bytes
        };
        expected.push(0x94); // Four events.
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
        expected.push(0x83);
        expected.extend([text("type"), text("BlockRemoved"), text("block_hashes")].concat());
        expected.extend([0x91, 8]);
        expected.extend([text("medium"), text("STORAGE")].concat());
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
            let bytes = encode(&of_cache([event]), &TestNames::new());
            bytes.windows(digest.len()).filter(|part| *part == digest.as_bytes()).count()
        };
        assert_eq!((has_digest(stored(None)), has_digest(stored(Some(3)))), (1, 0));
        // The name of an adapter is in each event of its namespaces.
        for parent in [None, Some(3)] {
            let adapter = Some((namespace, "sql"));
            let bytes =
                encode(&of_cache([stored(parent)]), &TestNames { adapter, ..TestNames::new() });
            assert!(bytes.windows(14).any(|part| part == b"\xa9lora_name\xa3sql"));
        }
    }

    /// Goal: the keys of an image are a pair of its hash and its offset, as in vLLM.
    #[test]
    fn an_image_is_a_pair_of_hash_and_offset() {
        let names = TestNames::new();
        let mut positions = vec![5];
        let image = TokenSpan::Image { content_hash: 0xab << 120, kv_len: 3, columns: 0 };
        names.images.append(image, &mut positions).expect("in range");
        let namespace = Namespace::default();
        let event = CacheEvent::Stored { namespace, parent: None, hashes: vec![1, 2], positions };
        let bytes = encode(&of_cache([event]), &names);
        let mut expected = b"\xaaextra_keys\x92\x91\x92\xd9\x20ab".to_vec();
        expected.extend([b'0'; 30]);
        expected.extend(b"\x01\x91\x92\xd9\x20ab");
        expected.extend([b'0'; 30]);
        expected.push(0xff);
        assert!(bytes.windows(expected.len()).any(|part| part == expected));
        assert!(bytes.windows(5).any(|part| part == [0x94, 5, 99, 99, 99]), "the model's token");
    }
}
