use stolon_checkpoint::kv::KvType;
use stolon_kernels::{KvRows, Path, SlotMapping};

use super::*;

pub(super) fn shape(kv_type: KvType) -> KvShape {
    let layer = KvLayer {
        kv_heads: 2,
        head_dim: 6,
        key_layout: KvLayout::Rows,
        shared: false,
        windowed: false,
    };
    KvShape {
        attention_layers: vec![layer; 3],
        window: 0,
        convolution_layers: 2,
        convolution_width: 3,
        block_size: 4,
        kv_type,
    }
}

/// The test shape with other heads in all layers.
fn with_heads(kv_type: KvType, block_size: usize, layer: KvLayer) -> KvShape {
    KvShape { attention_layers: vec![layer; 3], block_size, ..shape(kv_type) }
}

impl KvStore {
    /// Writes rows to consecutive positions, the first one at `offset` in `block`.
    fn write(&mut self, layer: usize, block: usize, offset: usize, keys: &[f32], values: &[f32]) {
        let block_size = self.shape().block_size;
        let KvLayer { kv_heads, head_dim, .. } = self.shape().attention_layers[layer];
        let first = block * block_size + offset;
        let mut places = SlotMapping::default();
        places.fill((0..keys.len() / (kv_heads * head_dim)).map(|row| Some(first + row)));
        let stores = match self.shape().attention_layers[layer].shared {
            true => vec![self.keys_mut(layer, Path::PORTABLE, &places)],
            false => self.rows_mut(layer, Path::PORTABLE, &places).into(),
        };
        for (mut to, rows) in stores.into_iter().zip([keys, values]) {
            for (index, row) in rows.chunks_exact(kv_heads * head_dim).enumerate() {
                to.write_row(index, row);
            }
        }
    }

    /// Writes inputs of a convolution to all positions of a block.
    fn write_inputs(&mut self, layer: usize, block: usize, rows: &[f32]) {
        let &KvShape { block_size, convolution_width: width, .. } = self.shape();
        let mut places = SlotMapping::default();
        places.fill((0..block_size).map(|row| Some(block * block_size + row)));
        let store = self.inputs_mut(layer).slice_mut();
        let mut to = KvRows::new(Path::PORTABLE, store, KvLayout::Rows, &places, width, 1);
        for (index, row) in rows.chunks_exact(width).enumerate() {
            to.write_row(index, row);
        }
    }
}

/// The elements of a plane, converted to f32.
fn to_f32(slice: KvSlice<'_>, head_dim: usize) -> Vec<f32> {
    match slice {
        KvSlice::F32(values) => values.to_vec(),
        KvSlice::Bf16(bits) => bits.iter().map(|&b| half::bf16::from_bits(b).to_f32()).collect(),
        KvSlice::F16(bits) => bits.iter().map(|&b| half::f16::from_bits(b).to_f32()).collect(),
        KvSlice::Int8 { values, scales } => {
            let heads = values.chunks_exact(head_dim).zip(scales);
            heads
                .flat_map(|(head, scale)| head.iter().map(move |&v| f32::from(v) * scale))
                .collect()
        }
        KvSlice::Int4 { packed, scales } => {
            let heads = packed.chunks_exact(head_dim / 2).zip(scales);
            let of_head = |(head, scale): (&[u8], &f32)| -> Vec<f32> {
                codes(head).map(|code| LEVELS[usize::from(code)] * scale).collect()
            };
            heads.map(of_head).map(|head| rotated_back(&head)).collect::<Vec<_>>().concat()
        }
    }
}

/// The levels of the codes of 4 bits.
const LEVELS: [f32; 16] = [
    -127.0, -96.0, -75.0, -58.0, -44.0, -31.0, -18.0, -6.0, 6.0, 18.0, 31.0, 44.0, 58.0, 75.0,
    96.0, 127.0,
];

/// The codes in these bytes.
fn codes(packed: &[u8]) -> impl Iterator<Item = u8> + '_ {
    packed.iter().flat_map(|byte| [byte & 15, byte >> 4])
}

/// A head that was stored rotated.
fn rotated_back(head: &[f32]) -> Vec<f32> {
    let len = 1 << head.len().trailing_zeros().min(8);
    let of_row = |row: usize| {
        let group = &head[row / len * len..][..len];
        let signed = group.iter().zip(0..len).map(|(value, column)| {
            if ((row % len) & column).count_ones().is_multiple_of(2) { *value } else { -value }
        });
        signed.sum::<f32>() / (len as f32).sqrt()
    };
    (0..head.len()).map(of_row).collect()
}

/// Goal: rows are stored at `[block, offset, head, element]` within the error of the type, and
/// nothing else changes.
#[test]
fn rows_are_stored_in_the_documented_layout() {
    for (kv_type, error) in [
        (KvType::F32, 0.0),
        (KvType::Bf16, 0.0625),
        (KvType::F16, 0.008),
        (KvType::Int8, 0.08),
        (KvType::K8V4, 3.0),
        (KvType::Int4, 3.0),
    ] {
        let mut store = KvStore::new(shape(kv_type), 6).expect("a small store");
        let keys: Vec<f32> = (0..24).map(|i| 10.0 + i as f32 * 0.513).collect();
        let values: Vec<f32> = keys.iter().map(|k| -k).collect();
        store.write(1, 5, 2, &keys, &values);
        for (plane, rows) in [(store.keys(1), keys), (store.values(1), values)] {
            let plane = to_f32(plane, 6);
            assert_eq!(plane.len(), 6 * 4 * 12);
            let at = (5 * 4 + 2) * 12;
            for (got, want) in plane[at..].iter().zip(&rows) {
                assert!((got - want).abs() <= error, "{kv_type}: expected {want}, got {got}");
            }
            assert!(plane[..at].iter().all(|&value| value == 0.0));
        }
        for other in [store.keys(0), store.values(0), store.keys(2), store.values(2)] {
            assert!(to_f32(other, 6).iter().all(|&value| value == 0.0));
        }
    }
}

/// Goal: transposed keys are stored at `[block, head, panel, element, lane]` (with bf16 and 4
/// bits, two adjacent elements of each lane together) and have the same bits as in rows.
#[test]
fn transposed_keys_are_stored_in_the_documented_layout() {
    for kv_type in KvType::ALL {
        let (block_size, kv_heads, head_dim) = (32, 2, 300);
        let [mut rows, mut transposed] =
            [KvLayout::Rows, KvLayout::Transposed { block_size }].map(|key_layout| {
                let layer =
                    KvLayer { kv_heads, head_dim, key_layout, shared: false, windowed: false };
                KvStore::new(with_heads(kv_type, block_size, layer), 3).expect("small")
            });
        let keys: Vec<f32> = (0..20 * kv_heads * head_dim).map(|i| (i as f32).sin()).collect();
        for store in [&mut rows, &mut transposed] {
            store.write(1, 2, 7, &keys, &keys);
        }
        // Scales have the layout `[position, head]` in both layouts of keys.
        let scale_of = |store: &KvStore, head: usize| match store.keys(1) {
            KvSlice::Int8 { scales, .. } | KvSlice::Int4 { scales, .. } => scales[head],
            _ => 1.0,
        };
        let elements = |store: &KvStore| match store.keys(1) {
            KvSlice::Int8 { values, .. } => values.iter().map(|&v| f32::from(v)).collect(),
            KvSlice::Int4 { packed, .. } => codes(packed).map(f32::from).collect(),
            others => to_f32(others, head_dim),
        };
        let (in_rows, in_lanes) = (elements(&rows), elements(&transposed));
        let together = if matches!(kv_type, KvType::Bf16 | KvType::Int4) { 2 } else { 1 };
        for (index, value) in in_rows.iter().enumerate() {
            let (d, stored_head) = (index % head_dim, index / head_dim);
            let (head, place) = (stored_head % kv_heads, stored_head / kv_heads);
            let (block, offset) = (place / block_size, place % block_size);
            let panel = (block * kv_heads + head) * (block_size / 16) + offset / 16;
            let step = panel * head_dim / together + d / together;
            let at = (step * 16 + offset % 16) * together + d % together;
            assert!(in_lanes[at].to_bits() == value.to_bits(), "{kv_type}: {index}");
            assert!(
                scale_of(&transposed, stored_head) == scale_of(&rows, stored_head),
                "{kv_type}"
            );
        }
        assert!(in_rows.iter().any(|&value| value != 0.0), "{kv_type}: nothing was written");
        assert!(to_f32(transposed.values(1), head_dim) == to_f32(rows.values(1), head_dim));
    }
}

/// Goal: for every type and both layouts of keys, a block that is copied to another block of
/// another store has the same bits there, and no other block changes.
#[test]
fn blocks_survive_a_copy_out_and_in_bit_for_bit() {
    let workers = Workers::new(2);
    for kv_type in KvType::ALL {
        for key_layout in [KvLayout::Rows, KvLayout::Transposed { block_size: 16 }] {
            let layer =
                KvLayer { kv_heads: 2, head_dim: 6, key_layout, shared: false, windowed: false };
            let mut shape = with_heads(kv_type, 16, layer);
            // This layer has one head instead of two, so it has fewer scales.
            shape.attention_layers[1] = KvLayer { kv_heads: 1, head_dim: 12, ..layer };
            shape.attention_layers[2].shared = key_layout == KvLayout::Rows;
            let filled = |scale: f32, block_count: usize| {
                let mut store = KvStore::new(shape.clone(), block_count).expect("a small store");
                let rows = |offset: usize| -> Vec<f32> {
                    (0..16 * 12).map(|i| ((i + offset) as f32 * scale).sin() * 70.0).collect()
                };
                for layer in 0..3 {
                    for block in 0..block_count {
                        let seed = 1000 * layer + 100 * block;
                        store.write(layer, block, 0, &rows(seed), &rows(seed + 50));
                        if layer < shape.convolution_layers {
                            store.write_inputs(layer, block, &rows(seed + 30)[..16 * 3]);
                        }
                    }
                }
                store
            };
            let read = |store: &KvStore, block: usize| {
                let mut bytes = vec![0; shape.block_bytes()];
                store.read_blocks(&[BlockId(block as u32)], &mut bytes, &workers);
                bytes
            };
            let (from, mut to) = (filled(0.7, 4), filled(1.3, 6));
            let before: Vec<_> = (0..6).map(|block| read(&to, block)).collect();
            let bytes = read(&from, 3);
            assert!(!before.contains(&bytes));
            to.write_blocks(&[BlockId(5)], &[&bytes], &workers);
            assert_eq!(read(&to, 5), bytes, "{kv_type} {key_layout:?}");
            assert!((0..5).all(|block| read(&to, block) == before[block]), "{kv_type}");
            // Compare the slices that the kernels read, not only the bytes of the copy.
            for layer in 0..shape.convolution_layers {
                let [from, to] = [(&from, 3), (&to, 5)].map(|(store, block)| {
                    to_f32(store.inputs(layer), 1)[block * 48..][..48].to_vec()
                });
                assert!(from == to && from.iter().any(|&value| value != 0.0), "{kv_type}");
            }
            for layer in 0..3 {
                for (from, to) in
                    [(from.keys(layer), to.keys(layer)), (from.values(layer), to.values(layer))]
                {
                    let head_dim = shape.attention_layers[layer].head_dim;
                    let (from, to) = (to_f32(from, head_dim), to_f32(to, head_dim));
                    // The scales of transposed int8 keys are ordered by position, so `to_f32` uses
                    // the wrong factors, but they are the same on both sides.
                    let (from, to) = (&from[3 * 192..4 * 192], &to[5 * 192..6 * 192]);
                    assert!(from == to, "{kv_type} {key_layout:?}");
                }
            }
        }
    }
}

/// Goal: several threads copy the same bytes as one thread, whatever the order of the blocks.
#[test]
fn several_threads_copy_what_one_copies() {
    for kv_type in [KvType::F32, KvType::Int8, KvType::K8V4] {
        let layer = KvLayer {
            kv_heads: 2,
            head_dim: 4096,
            key_layout: KvLayout::Rows,
            shared: false,
            windowed: false,
        };
        let shape = with_heads(kv_type, 4, layer);
        let [one, three] = [1, 3].map(Workers::new);
        let blocks = [4, 0, 7, 2].map(BlockId);
        let bytes = blocks.len() * shape.block_bytes();
        assert!(bytes > 2 * COPY_MIN);
        let noise: Vec<u8> = (0..bytes).map(|i| ((i * 2_654_435_761) >> 13) as u8).collect();
        let from: Vec<&[u8]> = noise.chunks(shape.block_bytes()).collect();
        let mut stores = [(); 2].map(|()| KvStore::new(shape.clone(), 8).expect("a small store"));
        for (store, workers) in stores.iter_mut().zip([&one, &three]) {
            store.write_blocks(&blocks, &from, workers);
        }
        for (store, workers) in stores.iter().zip([&three, &one]) {
            let mut read = vec![0; bytes];
            store.read_blocks(&blocks, &mut read, workers);
            assert!(read == noise, "{kv_type}");
        }
    }
}

/// Goal: a copy with a buffer of the wrong size panics instead of copying part of a block.
#[test]
fn copies_of_part_of_a_block_panic() {
    let mut store = KvStore::new(shape(KvType::Int8), 2).expect("a small store");
    let bytes = shape(KvType::Int8).block_bytes();
    for len in [bytes - 1, bytes + 1] {
        let write = std::panic::AssertUnwindSafe(|| {
            store.write_blocks(&[BlockId(0)], &[&vec![0; len]], &Workers::new(1));
        });
        assert!(std::panic::catch_unwind(write).is_err());
    }
}

/// Goal: memory of the store becomes resident only when it is written.
#[cfg(target_os = "linux")]
#[test]
fn unused_blocks_need_no_memory() {
    fn resident_pages() -> usize {
        let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux has this file");
        statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("a number")
    }
    let shape = shape(KvType::Bf16);
    let block_count = (1 << 30) / shape.block_bytes();
    let before = resident_pages();
    let mut store = KvStore::new(shape, block_count).expect("1 GiB of address space");
    store.write(2, block_count - 1, 0, &[1.0; 12], &[2.0; 12]);
    // Pages have 4 KiB to 2 MiB. Other tests may allocate memory at the same time.
    let taken = resident_pages().saturating_sub(before) * 4096;
    assert!(taken < 1 << 29, "expected a few pages, got {taken} bytes");
}

/// Goal: writing rows beyond the end of the store panics.
#[test]
#[should_panic(expected = "out of range")]
fn writing_beyond_the_store_panics() {
    let mut store = KvStore::new(shape(KvType::F32), 6).expect("a small store");
    store.write(0, 5, 3, &[0.0; 24], &[0.0; 24]);
}

/// Goal: writing two rows to the same slot panics.
#[test]
#[should_panic(expected = "the same slot")]
fn writing_two_rows_to_the_same_slot_panics() {
    SlotMapping::default().fill([Some(3), None, Some(4), Some(3)].into_iter());
}

/// Goal: an invalid block size, no blocks, and too much memory are errors, not aborts.
#[test]
fn impossible_stores_are_refused() {
    for block_size in [0, 3, 512] {
        let shape = KvShape { block_size, ..shape(KvType::F32) };
        assert_eq!(KvStore::new(shape, 1).err(), Some(KvStoreError::BlockSize { got: block_size }));
    }
    assert_eq!(
        KvStore::new(shape(KvType::F32), 0).err(),
        Some(KvStoreError::BlockCount { got: 0 })
    );
    let layer = KvLayer {
        kv_heads: 2,
        head_dim: 1 << 24,
        key_layout: KvLayout::Rows,
        shared: false,
        windowed: false,
    };
    let huge = with_heads(KvType::F32, 4, layer);
    let error = KvStore::new(huge, u32::MAX as usize).expect_err("more than any machine has");
    assert!(matches!(error, KvStoreError::OutOfMemory { .. }), "{error}");
}
