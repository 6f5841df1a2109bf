//! A server of several models in this process.

use std::ops::Deref;
use std::sync::{Arc, mpsc};

use stolon::{Engine, EngineBuilder, ModelRecipe, ModelSet, ModelSetBuilder};
use stolon_http::{Gate, RouterOptions, listen, models_router};
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::{Client, LIMITS, RUNTIME};

/// A running server of several models, which stops when it is dropped.
pub(crate) struct SeveralModels {
    client: Client,
    pub(crate) models: ModelSet,
    stop: watch::Sender<bool>,
}

impl Deref for SeveralModels {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

/// A model that takes one byte of a budget.
pub(crate) fn recipe(name: &str, source: &str) -> ModelRecipe {
    with(name, source, |builder| builder)
}

/// The same with these settings.
pub(crate) fn with(
    name: &str,
    source: &str,
    set: impl Fn(EngineBuilder) -> EngineBuilder + Send + Sync + 'static,
) -> ModelRecipe {
    let source = source.to_owned();
    let block_size = if source == "demo" { 4 } else { 16 };
    let builder =
        move || Engine::builder().model(source.as_str()).num_blocks(512).block_size(block_size);
    ModelRecipe::new(name, move || Ok(set(builder()))).memory(1)
}

impl SeveralModels {
    /// Starts a server on a free port.
    pub(crate) fn start(set: ModelSetBuilder, options: RouterOptions) -> Self {
        let (stop, stopping) = watch::channel(false);
        let (sender, started) = mpsc::channel();
        RUNTIME.spawn(async move {
            let models = set.build().expect("a set");
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
            let address = listener.local_addr().expect("an address");
            let gate = Arc::new(Gate::loading());
            gate.open(models_router(models.clone(), options));
            sender.send((models, address)).expect("the test waits");
            listen(listener, gate, LIMITS, None, stopping).await;
        });
        let (models, address) = started.recv().expect("a server");
        Self { client: Client::new(format!("http://{address}")), models, stop }
    }
}

impl Drop for SeveralModels {
    fn drop(&mut self) {
        self.stop.send_replace(true);
        let models = self.models.clone();
        RUNTIME.spawn(async move { models.shutdown().await });
    }
}
