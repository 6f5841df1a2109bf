use super::*;
use crate::memory::free_memory;

fn shape(kv_type: KvType) -> KvShape {
    let layer = KvLayer {
        kv_heads: 2,
        head_dim: 5,
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

/// Goal: each type is parsed from its name, and the error for an unknown name lists all names.
#[test]
fn types_are_parsed_from_their_names() {
    for kv_type in KvType::ALL {
        assert_eq!(kv_type.name().parse::<KvType>().ok(), Some(kv_type));
    }
    let message = "fp4".parse::<KvType>().expect_err("no such type").to_string();
    assert_eq!(message, "KV type: expected one of f32, bf16, f16, int8, got `fp4`");
}

/// Goal: the size of a block includes keys and values of all layers, and budgets are converted to
/// numbers of blocks.
#[test]
fn budgets_are_converted_to_block_counts() {
    let (heads, inputs) = (2 * 3 * 4 * 2, 2 * 4 * 3);
    assert_eq!(shape(KvType::F32).block_bytes(), heads * 5 * 4 + inputs * 4);
    assert_eq!(shape(KvType::Bf16).block_bytes(), heads * 5 * 2 + inputs * 2);
    assert_eq!(shape(KvType::F16).block_bytes(), heads * 5 * 2 + inputs * 2);
    assert_eq!(shape(KvType::Int8).block_bytes(), heads * (5 + 4) + inputs * 2);
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
