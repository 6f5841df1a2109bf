//! Opens CPU backends of the models of the fixtures.

use stolon_checkpoint::{KvBudget, KvType, LoadedModel, WeightType, WindowKv};
use stolon_cpu::{CpuBackend, CpuOptions};
use stolon_kernels::Path;

pub(super) use crate::suite::fixture::*;
use crate::suite::{Open, Sizes};

/// The options of a test's backend.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setup {
    pub(super) block_size: usize,
    pub(super) threads: usize,
    pub(super) kv_type: KvType,
    pub(super) path: Option<Path>,
    pub(super) weight_type: WeightType,
    pub(super) window_kv: WindowKv,
    pub(super) step_tokens: usize,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            block_size: 16,
            threads: 1,
            kv_type: KvType::F32,
            path: None,
            weight_type: WeightType::Stored,
            window_kv: WindowKv::Blocks,
            step_tokens: 512,
        }
    }
}

/// Creates a backend of `model` with a KV store of at least 1,024 positions.
pub(super) fn backend(model: LoadedModel, setup: Setup) -> CpuBackend {
    CpuBackend::new(model.config, model.weights, options(setup)).expect("a valid model")
}

fn options(setup: Setup) -> CpuOptions {
    CpuOptions {
        block_size: setup.block_size,
        // Checkpoints of states take more blocks than the positions of such small models.
        kv_budget: KvBudget::Blocks(1024 / setup.block_size + 1024),
        kv_type: Some(setup.kv_type),
        threads: Some(setup.threads),
        path: setup.path,
        weight_type: setup.weight_type,
        window_kv: setup.window_kv,
        step_tokens: setup.step_tokens,
        ..CpuOptions::default()
    }
}

/// A way of opening backends with the options `setup`, for the tests of all backends.
pub(super) fn open(setup: Setup) -> Open<'static> {
    Box::new(move |model, Sizes { block_size, threads }| {
        let options = options(Setup { block_size, threads, ..setup });
        let backend = CpuBackend::new(model.config, model.weights, options);
        backend.map(|backend| Box::new(backend) as _).map_err(|error| error.to_string())
    })
}
