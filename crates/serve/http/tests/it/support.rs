//! Servers in this process, each with an engine of its own and a port of this machine.

use std::ops::Deref;
use std::path::Path;
use std::sync::{Arc, LazyLock, mpsc};
use std::time::Duration;

use stolon::{Engine, EngineBuilder};
use stolon_http::{
    ApiKey, ApiKeys, ConnectionLimits, Gate, KeyLimits, RouterOptions, Secret, listen, router,
};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinHandle;

pub(crate) mod adapters;
mod client;
pub(crate) mod infill;
pub(crate) mod several;

use client::Client;
pub(crate) use client::{
    EMBEDDING, GUARD, SCRIPTED, TINY, begin, connect, head, prompt, status, texts,
};

/// The directory of a text encoder, a reranker or a classifier.
pub(crate) fn encoder(name: &str) -> String {
    let fixtures = "../../models/checkpoint/tests/fixtures/encoders";
    format!("{}/{fixtures}/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Limits that no test reaches.
pub(crate) const LIMITS: ConnectionLimits = ConnectionLimits {
    count: 1024,
    header_timeout: Duration::from_secs(30),
    write_timeout: Duration::from_secs(60),
};

/// Runs the servers of all tests. A test's own runtime ends with the test, and blocks while a
/// server starts.
static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Runtime::new().expect("a runtime"));

/// A running server, which stops when it is dropped.
pub(crate) struct Server {
    client: Client,
    engine: Engine,
    gate: Arc<Gate>,
    stop: watch::Sender<bool>,
    /// Accepts connections; `None` after [`Server::stop`].
    listening: Option<JoinHandle<()>>,
}

impl Deref for Server {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Server {
    /// Starts a server on a free port.
    pub(crate) fn start(model: &str) -> Self {
        Self::with(model, |engine, _| engine)
    }

    /// The same with these settings of the engine and of the router.
    pub(crate) fn with(
        model: &str,
        set: impl FnOnce(EngineBuilder, &mut RouterOptions) -> EngineBuilder,
    ) -> Self {
        Self::limited(model, LIMITS, set)
    }

    /// The same with these limits of connections.
    pub(crate) fn limited(
        model: &str,
        limits: ConnectionLimits,
        set: impl FnOnce(EngineBuilder, &mut RouterOptions) -> EngineBuilder,
    ) -> Self {
        let mut options = RouterOptions {
            // As for `stolon serve`, a path on this machine is not a name for clients.
            alias: Some(model.to_owned()).filter(|model| !Path::new(model).exists()),
            page: true,
            ..RouterOptions::default()
        };
        let builder = Engine::builder().model(model).num_blocks(512);
        let builder = if model == "demo" { builder.block_size(4) } else { builder };
        let builder = set(builder, &mut options);
        let (stop, stopping) = watch::channel(false);
        let (sender, started) = mpsc::channel();
        let gate = Arc::new(Gate::loading().below(options.root_path.clone()));
        let opened = Arc::clone(&gate);
        let listening = RUNTIME.spawn(async move {
            let engine = builder.build().await.expect("an engine");
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
            let address = listener.local_addr().expect("an address");
            opened.open(router(engine.clone(), options));
            sender.send((engine, address)).expect("the test waits");
            listen(listener, opened, limits, None, stopping).await;
        });
        let (engine, address) = started.recv().expect("a server");
        let client = Client::new(format!("http://{address}"));
        Self { client, engine, gate, stop, listening: Some(listening) }
    }

    /// Stops the server, and waits until its connections have ended.
    pub(crate) async fn stop(mut self) {
        self.close();
        let listening = self.listening.take().expect("a server that runs");
        listening.await.expect("no panic");
    }

    /// Refuses requests from now on.
    fn close(&self) {
        self.gate.close();
        self.stop.send_replace(true);
    }

    pub(crate) fn tiny() -> Self {
        Self::start(TINY)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.close();
        let engine = self.engine.clone();
        RUNTIME.spawn(async move { engine.shutdown().await });
    }
}

/// One key without limits, as `--api-key` gives it.
pub(crate) fn api_key(key: &str) -> ApiKeys {
    api_keys(&[("default", key)])
}

/// Keys without limits, each with the name of its client before it.
pub(crate) fn api_keys(keys: &[(&str, &str)]) -> ApiKeys {
    let limits = KeyLimits::default();
    let keys = keys.iter().map(|&(name, key)| {
        let key = Secret::from(key.to_owned());
        ApiKey { name: name.to_owned(), key, limits }
    });
    keys.collect::<Vec<_>>().into()
}
