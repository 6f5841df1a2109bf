//! The tiers of a build without the feature `tiers`: there are none.

use std::sync::Arc;

use stolon_actors::EngineHandle;
use stolon_kvcache::{EvictionPolicy, Namespace};
use stolon_scheduler::EngineConfig;

use crate::Error;
use crate::text::Text;

/// Nothing can be set.
#[derive(Default)]
pub(crate) struct TierOptions;

/// No tiers.
#[derive(Debug)]
pub(crate) struct EngineTiers;

impl TierOptions {
    pub(crate) fn prepare(self, _: &mut EngineConfig) -> Result<EngineTiers, Error> {
        Ok(EngineTiers)
    }
}

#[allow(clippy::unused_async, reason = "they are async with the feature")]
impl EngineTiers {
    pub(crate) async fn open(self, _: &EngineHandle) -> Result<EngineTiers, Error> {
        Ok(self)
    }

    pub(crate) async fn with_stored_history(
        &self,
        text: Text,
        _: &EngineHandle,
    ) -> Result<Text, Error> {
        Ok(text)
    }

    pub(crate) fn namespace_key(&self) -> Option<[u8; 32]> {
        None
    }

    pub(crate) fn stored(&self, _: &Namespace, _: &Arc<Vec<u32>>) -> usize {
        0
    }

    pub(crate) fn set_eviction_policy(&self, _: EvictionPolicy) {}

    pub(crate) async fn before_stop(&self, _: &EngineHandle) {}

    pub(crate) async fn after_stop(&self, _: &EngineHandle, _: &Text) {}
}
