use super::*;

fn shape(kv_type: KvType) -> KvShape {
    KvShape { layer_count: 3, block_size: 4, kv_heads: 2, head_dim: 5, kv_type }
}

/// Goal: what is written stands at `[block, offset, head, element]`, and nothing else changes.
#[test]
fn rows_stand_where_the_layout_says() {
    let mut store = KvStore::new(shape(KvType::F32), 6).expect("a small store");
    let keys: Vec<f32> = (1..=20).map(|i| i as f32).collect();
    let values: Vec<f32> = keys.iter().map(|k| -k).collect();
    store.write(1, 5, 2, KvRows::F32(&keys), KvRows::F32(&values));
    let KvSlice::F32(plane) = store.keys(1) else { panic!("expected f32") };
    assert_eq!(plane.len(), 6 * 4 * 10);
    let at = (5 * 4 + 2) * 10;
    assert_eq!(plane[at..], keys);
    assert!(plane[..at].iter().all(|&value| value == 0.0));
    let KvSlice::F32(plane) = store.values(1) else { panic!("expected f32") };
    assert_eq!(plane[at..], values);
    for other in [store.keys(0), store.values(0), store.keys(2), store.values(2)] {
        let KvSlice::F32(plane) = other else { panic!("expected f32") };
        assert!(plane.iter().all(|&value| value == 0.0));
    }
}

/// Goal: bf16 rounds to nearest even and keeps its bits.
#[test]
fn bf16_rounds_to_nearest_even() {
    let from = [1.0, 1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, -0.0, f32::INFINITY];
    let mut to = [0; 5];
    round_to_bf16(&from, &mut to);
    assert_eq!(to, [0x3f80, 0x3f80, 0x3f82, 0x8000, 0x7f80]);
    let mut store = KvStore::new(shape(KvType::Bf16), 1).expect("a small store");
    store.write(0, 0, 3, KvRows::Bf16(&[7; 10]), KvRows::Bf16(&[8; 10]));
    let KvSlice::Bf16(plane) = store.values(0) else { panic!("expected bf16") };
    assert_eq!(plane[30..], [8; 10]);
}

/// Goal: rounding is that of the `half` crate, for every kind of value.
#[test]
fn bf16_rounds_as_half_does() {
    let from: Vec<f32> = (0..=u32::MAX).step_by(4099).map(f32::from_bits).collect();
    let mut to = vec![0; from.len()];
    round_to_bf16(&from, &mut to);
    for (value, bits) in from.iter().zip(to) {
        assert_eq!(bits, half::bf16::from_f32(*value).to_bits(), "{value}");
    }
}

/// Goal: a store's memory becomes resident when it is written, not before.
#[cfg(target_os = "linux")]
#[test]
fn unused_blocks_cost_no_memory() {
    fn resident_pages() -> usize {
        let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux has it");
        statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("a number")
    }
    let shape = shape(KvType::Bf16);
    let block_count = (1 << 30) / shape.block_bytes();
    let before = resident_pages();
    let mut store = KvStore::new(shape, block_count).expect("1 GiB of address space");
    store.write(2, block_count - 1, 0, KvRows::Bf16(&[1; 10]), KvRows::Bf16(&[2; 10]));
    // Pages are of 4 KiB at least; other tests may take some meanwhile.
    let taken = resident_pages().saturating_sub(before) * 4096;
    assert!(taken < 1 << 29, "expected a few pages, got {taken} bytes");
}

/// Goal: rows that would run over a block's end never reach the next block.
#[test]
#[should_panic(expected = "out of range")]
fn rows_stay_in_their_block() {
    let mut store = KvStore::new(shape(KvType::F32), 6).expect("a small store");
    store.write(0, 0, 3, KvRows::F32(&[0.0; 20]), KvRows::F32(&[0.0; 20]));
}

/// Goal: a block's bytes are all layers' keys and values; budgets become block counts.
#[test]
fn budgets_become_blocks() {
    assert_eq!(shape(KvType::F32).block_bytes(), 2 * 3 * 4 * 2 * 5 * 4);
    assert_eq!(shape(KvType::Bf16).block_bytes(), 2 * 3 * 4 * 2 * 5 * 2);
    assert_eq!(kv_capacity(1000, 100), Ok(10));
    assert_eq!(kv_capacity(1099, 100), Ok(10));
    assert_eq!(
        kv_capacity(99, 100),
        Err(KvStoreError::BudgetTooSmall { block_bytes: 100, budget: 99 })
    );
    assert_eq!(kv_capacity(u64::MAX, 1), Ok(u32::MAX as usize));
    assert_eq!(default_kv_budget(1 << 30), 1 << 29);
    assert_eq!(default_kv_budget(1 << 40), DEFAULT_BUDGET_MAX);
    assert_eq!(KvBudget::Bytes(250).block_count(100), Ok(2));
    assert_eq!(KvBudget::Blocks(7).block_count(100), Ok(7));
    assert_eq!(KvBudget::Blocks(0).block_count(100), Err(KvStoreError::BlockCount { got: 0 }));
    assert!(free_memory() > 0);
}

/// Goal: what cannot be had is refused with numbers, not with an abort.
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
    let huge = KvShape { head_dim: 1 << 24, ..shape(KvType::F32) };
    let error = KvStore::new(huge, u32::MAX as usize).expect_err("more than any machine has");
    assert!(matches!(error, KvStoreError::OutOfMemory { .. }), "{error}");
}
