//! Copies of KV blocks out of and into the KV store.

use stolon_backend::{Backend, BackendError};
use stolon_checkpoint::KvType;
use stolon_cuda::{CandleBackend, CandleOptions};
use stolon_kvcache::BlockId;

use super::fixture;
use crate::suite::run;

fn backend(kv_type: KvType) -> CandleBackend {
    let options = CandleOptions { kv_type: Some(kv_type), kv_copies: true, ..fixture::options(16) };
    fixture::backend(fixture::model("gemma3"), options)
}

/// Goal: blocks that were copied to another backend, at other places and in another order, give the
/// same logits, bit for bit, and the bytes come back as they were written.
#[test]
fn copied_blocks_continue_in_another_backend() {
    for kv_type in [KvType::F32, KvType::F16, KvType::Bf16, KvType::Int8] {
        let (mut first, mut second) = (backend(kv_type), backend(kv_type));
        let fingerprint =
            |of: &CandleBackend| of.kv_format().expect("a format").fingerprint().expect("a hash");
        assert_eq!(fingerprint(&first), fingerprint(&second));
        let tokens: Vec<u32> = (0..60).map(|i| i * 7 % 90).collect();
        let table = run::table(3, tokens.len(), 16);
        let expected = run::rows(&mut first, &tokens, 0, 60, &table);
        let (from, to) = (&table[..3], [BlockId(20), BlockId(7), BlockId(1)]);
        let mut bytes = vec![0; 3 * first.spec().block_bytes];
        first.read_blocks(from, &mut bytes).expect("written blocks");
        second
            .write_blocks(&to, &bytes.chunks(bytes.len() / 3).collect::<Vec<_>>())
            .expect("free blocks");
        let mut again = vec![1; bytes.len()];
        second.read_blocks(&to, &mut again).expect("written blocks");
        assert!(again == bytes && bytes.iter().any(|byte| *byte != 0));
        let table = [&to[..], &[BlockId(40)]].concat();
        let rows = run::rows(&mut second, &tokens, 48, 12, &table);
        assert_eq!(rows, expected[48..]);
    }
}

/// Goal: the format differs with everything that the bytes depend on, and there is none unless
/// copies are wanted.
#[test]
fn the_format_tells_backends_apart() {
    let format = |kv_type| backend(kv_type).kv_format().expect("copies are on");
    assert_ne!(format(KvType::F32).fingerprint(), format(KvType::Bf16).fingerprint());
    let other = CandleOptions { kv_copies: true, ..fixture::options(16) };
    let other = fixture::backend(fixture::model("gemma2"), other).kv_format().expect("a format");
    assert_ne!(format(KvType::F32).fingerprint(), other.fingerprint());
    let without = fixture::backend(fixture::model("llama"), fixture::options(16));
    assert!(without.kv_format().is_none());
}

/// Goal: blocks that do not exist and buffers of other sizes are refused.
#[test]
fn malformed_copies_are_refused() {
    let mut backend = backend(KvType::F32);
    let bytes = backend.spec().block_bytes;
    let count = backend.spec().block_count as u32;
    for (blocks, len) in [(vec![BlockId(count)], bytes), (vec![BlockId(0)], bytes - 1)] {
        let mut buffer = vec![0; len];
        let read = backend.read_blocks(&blocks, &mut buffer);
        let write = backend.write_blocks(&blocks, &[&buffer]);
        for result in [read, write] {
            assert!(matches!(result, Err(BackendError::MalformedBatch(_))));
        }
    }
    backend.read_blocks(&[], &mut []).expect("nothing to do");
    backend.write_blocks(&[], &[]).expect("nothing to do");
}
