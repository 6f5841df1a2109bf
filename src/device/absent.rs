//! The device of a build without the feature `candle`: the CPU.

use stolon_backend::Backend;
use stolon_checkpoint::{DecoderConfig, KvBudget, Weights};
use stolon_scheduler::EngineConfig;

use crate::{EngineBuilder, Error};

/// Nothing can be set.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Device;

/// Has no values: there is no GPU.
pub(crate) enum GpuOptions {}

impl Device {
    pub(crate) fn is_set(&self) -> bool {
        false
    }

    pub(crate) fn gpu_options(
        &self,
        _: &EngineBuilder,
        _: &EngineConfig,
        _: KvBudget,
    ) -> Result<Option<GpuOptions>, Error> {
        Ok(None)
    }
}

impl GpuOptions {
    pub(crate) fn open(self, _: DecoderConfig, _: Weights) -> Result<Box<dyn Backend>, Error> {
        match self {}
    }
}
