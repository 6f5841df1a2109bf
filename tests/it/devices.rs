//! Settings that choose a device.

use stolon::{DeviceChoice, Engine, EngineBuilder, KvType, WeightType, WindowKv};

fn builder(device: &str) -> EngineBuilder {
    Engine::builder().model("random:tiny").device(device.parse().expect("a device"))
}

/// Goal: without a GPU in this build, an engine on one does not start and names the device and the
/// feature; on the CPU the setting changes nothing, and settings that only GPUs have are ignored.
#[cfg(not(any(feature = "cuda-core", feature = "metal")))]
#[tokio::test]
async fn a_device_that_this_build_lacks_is_an_error() {
    for (device, feature) in [("cuda:1", "`cuda`"), ("metal", "`metal`")] {
        let error = builder(device).build().await.expect_err("no such device").to_string();
        assert!(error.contains(device) && error.contains(feature), "{error}");
    }
    let engine = builder("cpu").num_blocks(8).gpu_memory_utilization(7.0).batch_invariant(false);
    let engine = engine.kv_type(KvType::Int8).threads(1).build().await.expect("the CPU backend");
    assert_eq!(engine.model_info().block_size, 16);
    engine.shutdown().await;
}

/// Goal: settings that have no effect on a GPU, and values out of range, are refused by name.
#[tokio::test]
async fn settings_are_checked() {
    for (builder, expected) in [
        (builder("cuda").threads(2), "threads"),
        (builder("cuda").weights(WeightType::Q8_0), "weights"),
        (builder("cuda").map_embeddings(true), "map_embeddings"),
        (builder("cuda").window_kv(WindowKv::States), "window_kv"),
        (builder("cuda").gpu_memory_utilization(1.5), "GPU memory utilization"),
        (builder("cuda").kv_type(KvType::K8V4), "k8v4"),
        (builder("cuda").kv_type(KvType::Int4), "int4"),
        (builder("cuda").block_size(7), "block size"),
    ] {
        let error = builder.build().await.expect_err("a setting that is refused").to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert_eq!(DeviceChoice::default(), DeviceChoice::Cpu);
}
