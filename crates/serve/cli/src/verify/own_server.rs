//! A server in this process, on a free port, for `stolon verify` without an address.

use std::sync::Arc;
use std::time::Duration;

use stolon::Engine;
use stolon_http::{ConnectionLimits, Gate, RouterOptions, listen, router};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::args::EngineArgs;

/// Size of the KV cache in tokens, unless a flag sets it: so small that prompts are evicted.
const CACHE_TOKENS: usize = 8192;
/// The only client is this process.
const LIMITS: ConnectionLimits = ConnectionLimits {
    count: 64,
    header_timeout: Duration::from_secs(30),
    write_timeout: Duration::from_secs(60),
};

/// An engine with the HTTP API.
#[derive(Debug)]
pub(super) struct OwnServer {
    /// The address of the API.
    pub(super) url: String,
    engine: Engine,
    stop: watch::Sender<bool>,
    serving: JoinHandle<()>,
}

impl OwnServer {
    /// Loads the model and serves it.
    ///
    /// # Errors
    /// If the engine cannot be started or no port is free.
    pub(super) async fn start(mut args: EngineArgs) -> anyhow::Result<Self> {
        if args.kv_memory.is_none() && args.num_blocks.is_none() {
            let block_size = args.cpu_block_size();
            args.block_size = Some(block_size);
            args.num_blocks = Some(CACHE_TOKENS / block_size);
        }
        let engine = args.start().await?;
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let url = format!("http://{}", listener.local_addr()?);
        let gate = Arc::new(Gate::loading());
        gate.open(router(engine.clone(), RouterOptions::default()));
        let (stop, stopped) = watch::channel(false);
        let serving = tokio::spawn(listen(listener, gate, LIMITS, None, stopped));
        Ok(Self { url, engine, stop, serving })
    }

    /// Stops the server and the engine.
    pub(super) async fn stop(self) {
        self.stop.send_replace(true);
        let _ = self.serving.await;
        self.engine.shutdown().await;
    }
}
