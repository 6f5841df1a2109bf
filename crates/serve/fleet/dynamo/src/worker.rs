//! [`StolonWorker`]: Dynamo's trait `LLMEngine` on a Stolon engine.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use dynamo_backend_common::engine::GenerateContext;
use dynamo_backend_common::{
    BackendError, DynamoError, EngineConfig, KvEventSource, LLMEngine, LLMEngineOutput,
    LlmRegistration, MetricsBindings, MetricsCtx, OnPublisherReady, OnSnapshotPublisherReady,
    PreprocessedRequest,
};
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use serde_json::json;
use stolon::{Engine, EngineStats, ModelInfo};
use stolon_fleet::CacheFeed;
use tokio::task::JoinHandle;

use crate::error::{error, of_engine};
use crate::{events, load, reply, request};

/// Loads the model and starts the engine.
pub type StartEngine =
    Box<dyn Fn() -> BoxFuture<'static, anyhow::Result<Engine>> + Send + Sync + 'static>;

/// Maximum number of changes of the cache that wait to be published. If there are more, the whole
/// cache is published again.
const WAITING_EVENTS_MAX: usize = 100_000;

/// The settings of a worker that its engine does not know.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    /// Name of the model for clients; `None` for the engine's own.
    pub served_name: Option<String>,
    /// Maximum number of requests that run at the same time.
    pub max_running: usize,
    /// Maximum number of tokens of a forward pass.
    pub max_batched_tokens: usize,
    /// The time that running requests have to finish when the worker stops.
    pub shutdown_timeout: Duration,
}

/// A worker of Dynamo. Its engine runs from `start` to `cleanup`.
pub struct StolonWorker {
    start: StartEngine,
    options: WorkerOptions,
    running: Mutex<Option<Running>>,
}

/// A started engine.
struct Running {
    engine: Engine,
    /// The tasks that publish its events and its load.
    tasks: Arc<Mutex<Vec<JoinHandle<()>>>>,
}

impl StolonWorker {
    /// A worker that has not been started.
    #[must_use]
    pub fn new(start: StartEngine, options: WorkerOptions) -> Self {
        Self { start, options, running: Mutex::new(None) }
    }

    /// The engine, if it was started and not stopped.
    fn engine(&self) -> Result<Engine, DynamoError> {
        self.of_running(|running| running.engine.clone())
    }

    /// The list of tasks that end with the engine.
    fn tasks(&self) -> Result<Arc<Mutex<Vec<JoinHandle<()>>>>, DynamoError> {
        self.of_running(|running| Arc::clone(&running.tasks))
    }

    fn of_running<T>(&self, get: impl FnOnce(&Running) -> T) -> Result<T, DynamoError> {
        let running = lock(&self.running);
        let stopped = || error(BackendError::EngineShutdown, "the engine does not run");
        running.as_ref().map(get).ok_or_else(stopped)
    }

    fn registration(&self, info: &ModelInfo) -> EngineConfig {
        let llm = LlmRegistration {
            context_length: u32::try_from(info.max_positions).ok(),
            kv_cache_block_size: u32::try_from(info.block_size).ok(),
            total_kv_blocks: Some(info.num_blocks as u64),
            max_num_seqs: Some(self.options.max_running as u64),
            max_num_batched_tokens: Some(self.options.max_batched_tokens as u64),
            ..LlmRegistration::default()
        };
        EngineConfig {
            model: info.id.clone(),
            served_model_name: self.options.served_name.clone(),
            llm: Some(llm),
            ..EngineConfig::default()
        }
    }
}

#[async_trait]
impl LLMEngine for StolonWorker {
    async fn start(&self, _worker_id: u64) -> Result<EngineConfig, DynamoError> {
        let started = (self.start)().await;
        let engine =
            started.map_err(|cause| error(BackendError::EngineShutdown, format!("{cause:#}")))?;
        let registration = self.registration(engine.model_info());
        let tasks = Arc::default();
        *lock(&self.running) = Some(Running { engine, tasks });
        Ok(registration)
    }

    async fn generate(
        &self,
        request: PreprocessedRequest,
        ctx: GenerateContext,
    ) -> Result<BoxStream<'static, Result<LLMEngineOutput, DynamoError>>, DynamoError> {
        let engine = self.engine()?;
        let longest = engine.model_info().max_positions;
        let request = request::translate(&request, engine.recommended_sampling(), longest)?;
        let tokens = engine.generate(request).await.map_err(|cause| of_engine(&cause))?;
        Ok(reply::reply(tokens, ctx))
    }

    async fn is_quiescent(&self) -> Result<Option<bool>, DynamoError> {
        let EngineStats { running, waiting, .. } = self.engine()?.stats();
        Ok(Some(running + waiting == 0))
    }

    async fn cleanup(&self) -> Result<(), DynamoError> {
        let Some(Running { engine, tasks }) = lock(&self.running).take() else { return Ok(()) };
        if !engine.drain(self.options.shutdown_timeout).await {
            let limit = self.options.shutdown_timeout;
            tracing::warn!(?limit, "not all requests have finished");
        }
        lock(&tasks).drain(..).for_each(|task| task.abort());
        Ok(())
    }

    async fn kv_event_sources(&self) -> Result<Vec<KvEventSource>, DynamoError> {
        let engine = self.engine()?;
        if !engine.model_info().prefix_caching {
            return Ok(Vec::new());
        }
        let tasks = self.tasks()?;
        let feed = CacheFeed::open(&engine, WAITING_EVENTS_MAX).await;
        let feed = feed.map_err(|cause| of_engine(&cause))?;
        let on_ready: OnPublisherReady = Box::new(move |publisher| {
            lock(&tasks).push(tokio::spawn(events::publish(feed, publisher)));
            Ok(())
        });
        Ok(vec![KvEventSource::Push { on_ready, dp_rank: events::RANK }])
    }

    async fn setup_metrics(&self, ctx: MetricsCtx<'_>) -> Result<MetricsBindings, DynamoError> {
        let (engine, tasks) = (self.engine()?, self.tasks()?);
        let scraped = stolon_http::EngineMetrics::new(engine.clone(), ctx.model.to_owned());
        ctx.metrics.add_expfmt_callback(Arc::new(move || Ok(scraped.plain_text()?)));
        let on_ready: OnSnapshotPublisherReady = Box::new(move |publisher| {
            lock(&tasks).push(tokio::spawn(load::publish(engine, publisher)));
            Ok(())
        });
        Ok(MetricsBindings { dp_ranks: vec![events::RANK], on_publisher_ready: Some(on_ready) })
    }

    /// One token after a prompt of one token, which is too short to be cached.
    async fn health_check_payload(&self) -> Result<Option<serde_json::Value>, DynamoError> {
        Ok(Some(json!({"token_ids": [0], "stop_conditions": {"max_tokens": 1}})))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No statement that holds it panics.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
