//! Starting an engine: the thread of its backend, the settings that it refuses, and the runtime on
//! which it runs.

use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;
use std::time::Duration;

use fake::{builder, bytes};
use futures::executor::block_on;
use stolon::backend::{Backend, BackendError, BackendSpec, StepBatch, StepOutput};
use stolon::{Engine, EngineBuilder, EngineError, Error, KvType, Request, WeightType, WindowKv};
use stolon_backend::fake::{FakeBackend, FakeFault, FakeHandle, FakeOptions};

use crate::support::fake;

/// The calls of a [`ThreadBound`] backend, each with the thread on which it ran.
type Log = Arc<Mutex<Vec<(&'static str, ThreadId)>>>;

/// A backend that is not `Send` and records the threads that use it.
struct ThreadBound {
    inner: FakeBackend,
    log: Log,
    _not_send: Rc<()>,
}

impl ThreadBound {
    fn new(log: Log) -> (ThreadBound, FakeHandle) {
        let inner = FakeBackend::new(FakeOptions::default());
        let handle = inner.handle();
        let backend = ThreadBound { inner, log, _not_send: Rc::new(()) };
        backend.note("make");
        (backend, handle)
    }

    fn note(&self, what: &'static str) {
        let mut log = self.log.lock().expect("no thread panics while it holds the log");
        log.push((what, std::thread::current().id()));
    }
}

impl Backend for ThreadBound {
    fn spec(&self) -> &BackendSpec {
        self.inner.spec()
    }

    fn step(&mut self, batch: &StepBatch) -> Result<StepOutput, BackendError> {
        self.note("step");
        self.inner.step(batch)
    }
}

impl Drop for ThreadBound {
    fn drop(&mut self) {
        self.note("drop");
    }
}

async fn answer(engine: &Engine) -> Result<Vec<u32>, Error> {
    let stream = engine.generate(Request::tokens([1, 2, 3]).max_tokens(4)).await?;
    Ok(stream.collect_text().await?.token_ids)
}

async fn refused(builder: EngineBuilder) -> Error {
    builder.build().await.expect_err("it is refused")
}

/// Goal: one thread makes a backend, computes its steps, also after a restart, and drops it, so a
/// backend does not have to be `Send`. `shutdown` returns after the drop.
#[tokio::test]
async fn one_thread_makes_uses_and_drops_a_backend() {
    let log = Log::default();
    let (sender, handle) = std::sync::mpsc::channel();
    let make = {
        let log = Arc::clone(&log);
        move || {
            let (backend, handle) = ThreadBound::new(log);
            sender.send(handle).expect("the test waits for it");
            Ok::<_, BackendError>(backend)
        }
    };
    let engine = Engine::builder().backend_with("bound", make).build().await.expect("it starts");
    let handle: FakeHandle = handle.recv().expect("it was made");
    let before = answer(&engine).await.expect("an answer");
    handle.inject_next(FakeFault::Panic);
    let error = answer(&engine).await.expect_err("the step panics");
    assert!(error.is_retryable(), "{error}");
    while engine.stats().restarts == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(answer(&engine).await.expect("an answer"), before);
    engine.shutdown().await;
    let log = log.lock().expect("no thread panicked");
    assert_eq!((log[0].0, log[log.len() - 1].0), ("make", "drop"));
    assert!(log.iter().all(|(_, thread)| *thread == log[0].1), "{log:?}");
    assert_ne!(log[0].1, std::thread::current().id());
}

/// Goal: a slow drop of a backend blocks no task of the application.
#[tokio::test]
async fn dropping_an_engine_does_not_wait_for_its_backend() {
    let (release, wait) = std::sync::mpsc::channel::<()>();
    let (done, is_done) = tokio::sync::oneshot::channel();
    struct Slow(
        FakeBackend,
        std::sync::mpsc::Receiver<()>,
        Option<tokio::sync::oneshot::Sender<()>>,
    );
    impl Backend for Slow {
        fn spec(&self) -> &BackendSpec {
            self.0.spec()
        }
        fn step(&mut self, batch: &StepBatch) -> Result<StepOutput, BackendError> {
            self.0.step(batch)
        }
    }
    impl Drop for Slow {
        fn drop(&mut self) {
            // This fails if the test has ended, which is fine.
            let _ = self.1.recv();
            let _ = self.2.take().map(|done| done.send(()));
        }
    }
    let backend = Slow(FakeBackend::new(FakeOptions::default()), wait, Some(done));
    let engine =
        Engine::builder().backend("slow", Box::new(backend)).build().await.expect("starts");
    answer(&engine).await.expect("an answer");
    drop(engine);
    // The runtime has one thread. If the drop ran on it, the release would never be sent.
    tokio::time::sleep(Duration::from_millis(5)).await;
    release.send(()).expect("the backend waits");
    is_done.await.expect("it was dropped");
}

/// Goal: a factory that fails or panics is reported as an error that says why.
#[tokio::test]
async fn a_factory_that_fails_is_an_error() {
    let failing = || Err::<FakeBackend, _>("no device");
    let error = refused(Engine::builder().backend_with("none", failing)).await;
    assert!(matches!(error, Error::Engine(EngineError::StartFailed { .. })), "{error}");
    assert!(error.to_string().contains("no device"), "{error}");
    let panicking = || -> Result<FakeBackend, BackendError> { panic!("no driver") };
    let error = refused(Engine::builder().backend_with("none", panicking)).await;
    assert!(error.to_string().contains("no driver"), "{error}");
    assert!(!error.is_retryable());
}

/// Goal: settings that a custom backend would ignore are refused with an error that names them.
#[tokio::test]
async fn settings_that_a_custom_backend_ignores_are_refused() {
    type Set = fn(EngineBuilder) -> EngineBuilder;
    let settings: [(&str, Set); 12] = [
        ("model", |b| b.model("random:tiny")),
        ("kv_memory", |b| b.kv_memory(1 << 20)),
        ("num_blocks", |b| b.num_blocks(8)),
        ("block_size", |b| b.block_size(16)),
        ("kv_type", |b| b.kv_type(KvType::F32)),
        ("window_kv", |b| b.window_kv(WindowKv::States)),
        ("threads", |b| b.threads(1)),
        ("bind_threads", |b| b.bind_threads(true)),
        ("weights", |b| b.weights(WeightType::Stored)),
        ("map_embeddings", |b| b.map_embeddings(true)),
        ("chat_template", |b| b.chat_template("{{ messages }}")),
        ("chat_template", |b| b.chat_template("{{ malformed")),
    ];
    for (name, set) in settings {
        match refused(set(builder(8).0)).await {
            Error::Engine(EngineError::InvalidParameter { name: refused, .. }) => {
                assert_eq!(refused, name);
            }
            other => panic!("{name}: {other}"),
        }
    }
}

/// Goal: `text_model` replaces the tokenizer of a model, here of one that has none.
#[tokio::test]
async fn a_model_runs_with_another_tokenizer() {
    let model = || Engine::builder().model(stolon_fixtures::path("llama")).num_blocks(8).threads(1);
    let without = model().build().await.expect("it starts");
    assert!(matches!(without.tokenize("ab", false).await, Err(Error::NoTokenizer)));
    let engine = model().text_model(bytes(&[])).build().await.expect("it starts");
    assert_eq!(engine.tokenize("ab", false).await.expect("bytes"), [97, 98]);
    answer(&engine).await.expect("an answer");
    let error = refused(model().text_model(bytes(&[])).chat_template("{{ messages }}")).await;
    assert!(error.to_string().contains("chat_template"), "{error}");
}

/// Goal: an engine can be built and used without a runtime if it is given one; otherwise building
/// it is an error.
#[test]
fn an_engine_runs_on_the_runtime_that_it_is_given() {
    let error = block_on(refused(builder(8).0));
    assert!(error.to_string().contains("tokio runtime"), "{error}");
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_time()
        .build()
        .expect("a runtime");
    let builder = builder(8).0.runtime(runtime.handle().clone());
    let engine = block_on(builder.build()).expect("it starts");
    assert_eq!(block_on(answer(&engine)).expect("an answer").len(), 4);
    block_on(engine.audit()).expect("consistent accounting");
    assert!(block_on(engine.drain(Duration::MAX)));
}
