use super::*;
use crate::memory::free_memory;

fn shape(kv_type: KvType) -> KvShape {
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

/// Goal: each type is parsed from its name, and the error for an unknown name lists all names.
#[test]
fn types_are_parsed_from_their_names() {
    for kv_type in KvType::ALL {
        assert_eq!(kv_type.name().parse::<KvType>().ok(), Some(kv_type));
    }
    let message = "fp4".parse::<KvType>().expect_err("no such type").to_string();
    let names = "f32, bf16, f16, int8, k8v4, int4";
    assert_eq!(message, format!("KV type: expected one of {names}, got `fp4`"));
}

/// Goal: the size of a block includes keys and values of all layers, and budgets are converted to
/// numbers of blocks.
#[test]
fn budgets_are_converted_to_block_counts() {
    let (heads, inputs) = (2 * 3 * 4 * 2, 2 * 4 * 3);
    assert_eq!(shape(KvType::F32).block_bytes(), heads * 6 * 4 + inputs * 4);
    assert_eq!(shape(KvType::Bf16).block_bytes(), heads * 6 * 2 + inputs * 2);
    assert_eq!(shape(KvType::F16).block_bytes(), heads * 6 * 2 + inputs * 2);
    assert_eq!(shape(KvType::Int8).block_bytes(), heads * (6 + 4) + inputs * 2);
    assert_eq!(shape(KvType::Int4).block_bytes(), heads * (3 + 4) + inputs * 2);
    assert_eq!(shape(KvType::K8V4).block_bytes(), heads / 2 * (10 + 7) + inputs * 2);
    let shared = |kv_type| {
        let mut shape = shape(kv_type);
        shape.attention_layers.iter_mut().for_each(|layer| layer.shared = true);
        shape.block_bytes()
    };
    assert_eq!(shared(KvType::K8V4), heads / 2 * 10 + inputs * 2);
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

/// Goal: heads of an odd number of elements are refused in 4 bits, and in no other type.
#[test]
fn odd_heads_are_refused_in_4_bits() {
    for kv_type in KvType::ALL {
        let mut shape = shape(kv_type);
        assert_eq!(shape.check().err().map(|error| error.to_string()), None);
        shape.attention_layers[1].head_dim = 5;
        let got = shape.check().err().map(|error| error.to_string());
        let expected = format!(
            "KV type: expected a type of at least 8 bits for a model with heads of 5 elements, got \
             `{kv_type}`"
        );
        let is_refused = matches!(kv_type, KvType::K8V4 | KvType::Int4);
        assert_eq!(got, is_refused.then_some(expected));
        shape.attention_layers[1].shared = true;
        assert_eq!(shape.check().is_err(), kv_type == KvType::Int4);
    }
}
