//! Opens candle backends, and CPU backends to compare them with, of the models of the fixtures.

use stolon_checkpoint::{KvBudget, KvType, LoadedModel};
use stolon_cpu::{CpuBackend, CpuOptions};
use stolon_cuda::{CandleBackend, CandleOptions};
use stolon_kernels::Path;

pub(super) use crate::suite::fixture::*;
use crate::suite::{Open, Sizes};

/// The fixtures that the backend refuses, each with a part of the reason. The parity test checks
/// that it refuses exactly these.
pub(super) const REFUSED: [(&str, &str); 0] = [];

/// The names of the models that the backend computes.
pub(super) fn names() -> Vec<String> {
    let mut names = crate::suite::fixture::names();
    names.retain(|name| REFUSED.iter().all(|(refused, _)| refused != name));
    names
}

/// Options with a KV store of at least 1,024 positions. Checkpoints of states take more blocks than
/// the positions of such small models.
pub(super) fn options(block_size: usize) -> CandleOptions {
    let kv_budget = KvBudget::Blocks(1024 / block_size + 512);
    CandleOptions { block_size, kv_budget, ..CandleOptions::default() }
}

/// A backend of `model` on `Device::Cpu`.
pub(super) fn backend(model: LoadedModel, options: CandleOptions) -> CandleBackend {
    CandleBackend::open(model.config, model.weights, options).expect("a valid model")
}

/// The CPU backend of `model` with keys and values in `kv_type`, without instructions that round the
/// operands of attention.
pub(super) fn cpu_backend(model: LoadedModel, block_size: usize, kv_type: KvType) -> CpuBackend {
    let options = CpuOptions {
        block_size,
        kv_budget: KvBudget::Blocks(128),
        kv_type: Some(kv_type),
        path: Some(Path::PORTABLE),
        threads: Some(1),
        ..CpuOptions::default()
    };
    CpuBackend::new(model.config, model.weights, options).expect("a valid model")
}

/// A way of opening backends with `options`, except for the sizes, for the tests of all backends.
pub(super) fn open(options: CandleOptions) -> Open<'static> {
    Box::new(move |model, Sizes { block_size, threads }| {
        assert_eq!(threads, 1, "candle chooses the number of threads");
        let CandleOptions { kv_budget, .. } = self::options(block_size);
        let options = CandleOptions { block_size, kv_budget, ..options };
        let backend = CandleBackend::open(model.config, model.weights, options);
        backend.map(|backend| Box::new(backend) as _).map_err(|error| error.to_string())
    })
}
