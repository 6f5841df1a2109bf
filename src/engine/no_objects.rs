//! The object tier of a build without the feature `object-store`: there is none.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use stolon_kvcache::Namespace;
use stolon_tiers::{ChainKey, DiskTier, ObjectStats, Place};

use crate::Error;

/// An object store; there can be none.
#[derive(Debug)]
pub(super) struct Objects(Infallible);

impl Objects {
    #[allow(clippy::unused_async, reason = "it is async with the feature")]
    pub(super) async fn open(url: String, _: Arc<DiskTier>) -> Result<Objects, Error> {
        let expected = "a build with the feature `object-store`";
        Err(Error::invalid("kv_object_store", expected, url))
    }

    pub(super) fn offer(&self, _: &[ChainKey]) {
        match self.0 {}
    }

    pub(super) fn contains(&self, _: &ChainKey) -> bool {
        match self.0 {}
    }

    pub(super) fn speed_is_due(&self) -> bool {
        match self.0 {}
    }

    pub(super) fn fetch_time(&self, _: usize) -> Duration {
        match self.0 {}
    }

    #[allow(clippy::unused_async, reason = "it is async with the feature")]
    pub(super) async fn fetch(&self, _: Namespace, _: Arc<Vec<u32>>, _: Vec<Place>) -> Vec<Bytes> {
        match self.0 {}
    }

    #[allow(clippy::unused_async, reason = "it is async with the feature")]
    pub(super) async fn flush(&self) {
        match self.0 {}
    }

    pub(super) fn stats(&self) -> ObjectStats {
        match self.0 {}
    }
}
