//! The device that runs the model (feature `candle`).

use stolon_backend::Backend;
use stolon_checkpoint::{DecoderConfig, KvBudget, WeightType, Weights, WindowKv};
use stolon_cuda::{CandleBackend, CandleOptions, DeviceChoice, OpenError};
use stolon_scheduler::{EngineConfig, EngineError};

use crate::{EngineBuilder, Error};

/// The settings of a device, if any was set.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Device(Option<DeviceSettings>);

#[derive(Clone, Copy, Debug, Default)]
struct DeviceSettings {
    device: DeviceChoice,
    memory_utilization: Option<f64>,
    /// Whether results may depend on the batch.
    batch_dependent: bool,
    /// Whether decode steps are not captured as CUDA graphs.
    without_graphs: bool,
}

/// The options of a backend on a GPU.
pub(crate) struct GpuOptions(CandleOptions);

impl Device {
    pub(crate) fn is_set(&self) -> bool {
        self.0.is_some()
    }

    /// The options of the backend, unless it runs on the CPU.
    pub(crate) fn gpu_options(
        &self,
        builder: &EngineBuilder,
        config: &EngineConfig,
        kv_budget: KvBudget,
    ) -> Result<Option<GpuOptions>, Error> {
        let Some(settings) = self.0.filter(|settings| settings.device != DeviceChoice::Cpu) else {
            return Ok(None);
        };
        let weights = builder.weights.is_some_and(|weights| weights != WeightType::Stored);
        let windows = builder.window_kv.is_some_and(|place| place != WindowKv::Blocks);
        let ignored = [
            ("window_kv", windows),
            ("threads", builder.threads.is_some()),
            ("draft_model", builder.draft_model.is_some()),
            ("mtp", builder.has_mtp()),
            ("bind_threads", builder.bind_threads),
            ("weights", weights),
            ("map_embeddings", builder.map_embeddings),
        ];
        if let Some((name, _)) = ignored.into_iter().find(|(_, is_set)| *is_set) {
            return Err(Error::invalid(name, "no value on a GPU", "a value"));
        }
        let default = CandleOptions::default();
        Ok(Some(GpuOptions(CandleOptions {
            device: settings.device,
            block_size: builder.block_size.unwrap_or(default.block_size),
            kv_budget,
            memory_utilization: settings.memory_utilization.unwrap_or(default.memory_utilization),
            step_tokens: config.max_batched_tokens,
            step_sequences: config.max_running,
            state_slots: config.max_running,
            kv_type: builder.kv_type,
            adapter_bytes: builder.adapters.reserved(),
            batch_invariant: !settings.batch_dependent,
            cuda_graphs: !settings.without_graphs
                && matches!(settings.device, DeviceChoice::Cuda(_)),
            kv_copies: cfg!(feature = "tiers") && !settings.batch_dependent,
            ..default
        })))
    }
}

impl GpuOptions {
    pub(crate) fn open(
        self,
        config: DecoderConfig,
        weights: Weights,
    ) -> Result<Box<dyn Backend>, Error> {
        match CandleBackend::open(config, weights, self.0) {
            Ok(backend) => Ok(Box::new(backend)),
            Err(OpenError::Model(error)) => Err(error.into()),
            Err(error) => Err(EngineError::StartFailed { reason: error.to_string() }.into()),
        }
    }
}

impl EngineBuilder {
    /// The device that runs the model. Default: the CPU. A GPU needs the feature `cuda` or `metal`.
    ///
    /// On a GPU, [`threads`](Self::threads), [`weights`](Self::weights),
    /// [`map_embeddings`](Self::map_embeddings), [`draft_model`](Self::draft_model),
    /// [`mtp`](Self::mtp) and [`window_kv`](Self::window_kv) would have no effect, so
    /// [`build`](Self::build) refuses them.
    pub fn device(mut self, device: DeviceChoice) -> Self {
        self.device.0.get_or_insert_default().device = device;
        self
    }

    /// Share of a GPU's memory that the engine may use, above 0 and up to 1. The KV cache gets what
    /// the weights and a step's activations leave, unless its size is set. Memory that other
    /// programs use counts. Default: 0.9. It has no effect on the CPU.
    pub fn gpu_memory_utilization(mut self, share: f64) -> Self {
        self.device.0.get_or_insert_default().memory_utilization = Some(share);
        self
    }

    /// Whether a GPU computes matrix products of a fixed number of rows, so that an answer does not
    /// depend on the cache or on other requests. Default: true. Without it, long prompts are
    /// computed faster, and KV cannot be stored or exported. It has no effect on the CPU, where
    /// answers never depend on it.
    pub fn batch_invariant(mut self, on: bool) -> Self {
        self.device.0.get_or_insert_default().batch_dependent = !on;
        self
    }

    /// Whether decode steps on a CUDA device are captured as CUDA graphs, which launch all kernels
    /// of a step at once, so that small models do not wait for the host. Default: true. With batch
    /// invariance, answers are the same without CUDA graphs. It takes memory for a second step, and
    /// has no effect on models with experts or on steps with log-probabilities, penalties, biases
    /// or grammars.
    pub fn cuda_graphs(mut self, on: bool) -> Self {
        self.device.0.get_or_insert_default().without_graphs = !on;
        self
    }
}
