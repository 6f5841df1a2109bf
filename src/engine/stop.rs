//! The end of an engine.

use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;

use super::{Engine, Inner};

impl Engine {
    /// Stops the engine. Running and waiting requests end with
    /// [`EngineError::Stopped`](crate::EngineError::Stopped), and the model's memory is released
    /// before this returns. The exception is a backend that hangs for longer than
    /// [`EngineBuilder::step_timeout`](crate::EngineBuilder::step_timeout): this then returns false,
    /// and the backend's thread, its weights and the KV cache are released when it returns from its
    /// step, which may be never. Without a `step_timeout`, the default, this may wait forever.
    pub async fn shutdown(&self) -> bool {
        self.stop().await
    }

    /// As [`Engine::shutdown`], compiled once, as the futures of [`EngineHandle`] are.
    fn stop(&self) -> BoxFuture<'_, bool> {
        async move {
            let Inner { handle, tiers, prompts, .. } = &*self.inner;
            tiers.before_stop(handle).await;
            let is_released = handle.shutdown().await;
            tiers.after_stop(handle, &prompts.text).await;
            is_released
        }
        .boxed()
    }

    /// Refuses new requests with [`EngineError::Draining`](crate::EngineError::Draining) from now
    /// on, waits until no request runs or waits, for at most `limit`, then stops the engine.
    /// Returns whether all requests had ended before that; those that had not end with
    /// [`EngineError::Stopped`](crate::EngineError::Stopped).
    ///
    /// The limit is for the requests. This waits for a backend that hangs as [`Engine::shutdown`]
    /// does.
    ///
    /// If the returned future is dropped, the engine keeps running and refusing new requests.
    pub async fn drain(&self, limit: Duration) -> bool {
        let idle = self.inner.handle.finish_requests(limit).await;
        self.shutdown().await;
        idle
    }
}
