//! Tests which options, models and batches a backend refuses.

use stolon_backend::Backend;
use stolon_checkpoint::{KvBudget, KvType};
use stolon_cuda::{CandleBackend, CandleOptions, ComputeType, DeviceChoice, OpenError};

use super::fixture;
use crate::suite::refusals;

fn refused(options: CandleOptions, part: &str) -> OpenError {
    let model = fixture::model("llama");
    let error = CandleBackend::open(model.config, model.weights, options)
        .expect_err("an option that is not valid");
    assert!(error.to_string().contains(part), "expected {part:?} in {error}");
    error
}

/// Goal: invalid options are refused with the accepted and the given value.
#[test]
fn invalid_options_are_refused() {
    let valid = fixture::options(16);
    let cases = [
        (CandleOptions { block_size: 24, ..valid }, "power of two from 1 to 256, got 24"),
        (CandleOptions { memory_utilization: 0.0, ..valid }, "above 0 and up to 1, got 0"),
        (CandleOptions { memory_utilization: f64::NAN, ..valid }, "up to 1, got NaN"),
        (CandleOptions { kv_type: Some(KvType::Int4), ..valid }, "got `int4`"),
        (CandleOptions { kv_type: Some(KvType::K8V4), ..valid }, "got `k8v4`"),
        (
            CandleOptions { kv_type: Some(KvType::Int8), device: DeviceChoice::Metal(0), ..valid },
            "`f32`, `bf16` or `f16` on Apple GPUs, got `int8`",
        ),
        (CandleOptions { compute_type: Some(ComputeType::Bf16), ..valid }, "got `bf16`"),
        (CandleOptions { kv_budget: KvBudget::Blocks(0), ..valid }, "got 0"),
        (CandleOptions { kv_copies: true, batch_invariant: false, ..valid }, "batch invariance"),
    ];
    for (options, part) in cases {
        refused(options, part);
    }
    // 2 layers, 2 kv heads of 8, keys and values, 16 positions, f32.
    let block_bytes = 2 * 2 * 2 * 8 * 16 * 4;
    let budget = KvBudget::Bytes(block_bytes - 1);
    refused(CandleOptions { kv_budget: budget, ..valid }, &format!("{block_bytes} bytes"));
}

/// What the backend refuses, except for invalid values of options. The README has the same list.
const REFUSED: [&str; 6] = [
    "KV in int4",
    "KV in k8v4",
    "products in bf16 on the CPU",
    "images",
    "coordinates and sizes",
    "tokens that are guessed ahead",
];

/// Goal: the test prints what the backend refuses, and this is exactly the list above. Adapters,
/// hidden states and states of recurrent layers are not in it.
#[test]
fn what_is_refused_is_listed() {
    let open = |name, options| {
        let model = fixture::model(name);
        CandleBackend::open(model.config, model.weights, options)
    };
    let options = fixture::options(16);
    let mut refused = Vec::new();
    for kv_type in KvType::ALL {
        let options = CandleOptions { kv_type: Some(kv_type), ..options };
        if open("llama", options).is_err() {
            refused.push(format!("KV in {kv_type}"));
        }
    }
    let bf16 = CandleOptions { compute_type: Some(ComputeType::Bf16), ..options };
    if open("llama", bf16).is_err() {
        refused.push("products in bf16 on the CPU".to_owned());
    }
    let backend = open("qwen3_5", options).expect("a valid model");
    let spec = backend.spec();
    for (what, is_supported) in [
        ("adapters", backend.adapters().is_some()),
        ("hidden states", spec.hidden_size.is_some()),
        ("recurrent states", spec.state.is_some()),
        ("images", spec.image_width.is_some()),
        ("coordinates and sizes", spec.regions.is_some()),
        ("tokens that are guessed ahead", spec.proposals),
    ] {
        if !is_supported {
            refused.push(what.to_owned());
        }
    }
    println!("the GPU backend refuses: {}", refused.join(", "));
    refused.sort_unstable();
    let mut expected = REFUSED;
    expected.sort_unstable();
    assert_eq!(refused, expected);
}

/// Goal: a KV store that does not fit in memory is refused with the numbers, before anything is
/// allocated, however large it is.
#[test]
fn a_kv_store_that_does_not_fit_is_refused() {
    for blocks in [1 << 30, usize::MAX / 2, usize::MAX] {
        let options =
            CandleOptions { kv_budget: KvBudget::Blocks(blocks), ..fixture::options(256) };
        refused(options, "bytes of memory are needed");
    }
}

/// Goal: a device that this build does not have is refused by its name.
#[test]
fn devices_of_other_builds_are_refused() {
    for (device, name) in [(DeviceChoice::Cuda(3), "cuda:3"), (DeviceChoice::Metal(0), "metal:0")] {
        let error = refused(CandleOptions { device, ..fixture::options(16) }, name);
        assert!(matches!(error, OpenError::Device { .. }));
    }
    for name in ["cpu", "cuda:0", "cuda:7", "metal:1"] {
        let device: DeviceChoice = name.parse().expect("a device");
        assert_eq!(device.to_string(), name);
    }
    for name in ["", "gpu", "cpu:0", "cuda:", "cuda:-1", "cuda:x", "CUDA", "metal:0:1"] {
        let error = name.parse::<DeviceChoice>().expect_err("not a device").to_string();
        assert!(error.contains(&format!("got `{name}`")), "{error}");
    }
}

/// Goal: models and batches that are malformed are refused, and an empty batch is not.
#[test]
fn malformed_models_and_batches_are_refused() {
    let open = fixture::open(fixture::options(16));
    refusals::check_wrong_shape(&open);
    refusals::check_malformed_batches(&open);
    refusals::check_empty_batch(&open);
}
