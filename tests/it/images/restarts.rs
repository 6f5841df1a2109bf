//! Backends that panic or fail while they encode or compute an image.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use stolon_actors::{EngineHandle, PinOptions};
use stolon_checkpoint::{KvBudget, LoadOptions, LoadedModel, ModelSource};
use stolon_cpu::{CpuBackend, CpuOptions};
use stolon_kvcache::Namespace;
use stolon_scheduler::{EngineConfig, EngineError, Event, SequenceRequest};
use stolon_vision::{ImageProcessor, Picture, PictureLimits};

use super::picture;
use stolon::backend::{
    Backend, BackendError, BackendSpec, ImageEmbeddings, ImageInput, StepBatch, StepOutput,
};

/// Images of SmolVLM have several tiles, positions of an image of Moondream are one span and attend
/// to each other, and Qwen3.5 has recurrent states.
const MODELS: [&str; 3] = ["smolvlm-tiny", "moondream3-tiny", "qwen3.5-vl-tiny"];

/// The number of calls of a backend's encoder and steps so far, and the call that goes wrong.
#[derive(Debug)]
struct Plan {
    calls: AtomicUsize,
    /// The number of the call, from 0. If the number is odd, the call goes wrong after it has
    /// computed, otherwise before.
    wrong: usize,
    panics: bool,
}

impl Plan {
    fn run<T>(&self, call: impl FnOnce() -> Result<T, BackendError>) -> Result<T, BackendError> {
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        if number != self.wrong {
            return call();
        }
        if number % 2 == 1 {
            call()?;
        }
        assert!(!self.panics, "a panic was injected");
        Err(BackendError::Failed("an error was injected".to_owned()))
    }
}

/// The CPU backend, which encodes a layer per call.
struct Faulty {
    inner: CpuBackend,
    plan: Arc<Plan>,
}

impl Backend for Faulty {
    fn spec(&self) -> &BackendSpec {
        self.inner.spec()
    }

    fn step(&mut self, batch: &StepBatch) -> Result<StepOutput, BackendError> {
        self.plan.run(|| self.inner.step(batch))
    }

    fn encode(
        &mut self,
        image: &Arc<ImageInput>,
        _time: Duration,
    ) -> Result<Option<ImageEmbeddings>, BackendError> {
        self.plan.run(|| self.inner.encode(image, Duration::ZERO))
    }
}

/// An engine with a pinned prefix, whose backend panics or fails once.
struct Engine {
    handle: EngineHandle,
    plan: Arc<Plan>,
    tiles: Vec<Arc<ImageInput>>,
}

/// The tokens of an answer with the bits of their log-probabilities.
type Answer = Vec<(u32, u32)>;

fn open(preset: &str) -> LoadedModel {
    let source = ModelSource::Random { preset: preset.to_owned(), seed: 0 };
    stolon_checkpoint::load(&source, &LoadOptions::default()).expect("a random model")
}

impl Engine {
    async fn start(model: &str, wrong: usize, panics: bool) -> Engine {
        let model = open(model);
        let images = model.images.expect("a vision model");
        let picture = Picture::decode(&picture(40, 30, 1), &PictureLimits::default());
        let processor = ImageProcessor::new(images.processor);
        let prepared = processor.prepare(&picture.expect("a picture")).expect("it fits");
        let options = CpuOptions {
            block_size: 4,
            kv_budget: KvBudget::Blocks(256),
            threads: Some(1),
            ..CpuOptions::default()
        };
        let inner =
            CpuBackend::with_encoder(model.config, Some(images.encoder), model.weights, options);
        // No call goes wrong before the count begins.
        let plan = Arc::new(Plan { calls: AtomicUsize::new(usize::MAX / 2), wrong, panics });
        let inner = inner.expect("valid settings");
        let backend = Box::new(Faulty { inner, plan: Arc::clone(&plan) });
        let config = EngineConfig {
            max_batched_tokens: 16,
            pin_budget: Some(64),
            ..EngineConfig::default()
        };
        let handle = EngineHandle::start(backend, config).await.expect("valid settings");
        let tiles = prepared.tiles.into_iter().map(Arc::new).collect();
        let engine = Engine { handle, plan, tiles };
        let prefix = engine.request(&[50; 9], false, &[1]);
        let tokens = prefix.tokens.to_vec();
        engine.run(prefix).await.expect("an answer");
        let pin = engine.handle.pin(Namespace::default(), tokens, PinOptions::default());
        pin.await.expect("a cached prefix");
        engine.plan.calls.store(0, Ordering::Relaxed);
        engine
    }

    /// A prompt of `before`, the picture and `after`, or without the picture.
    fn request(&self, before: &[u32], with_picture: bool, after: &[u32]) -> SequenceRequest {
        let (mut tokens, context) = (before.to_vec(), self.handle.context());
        let tiles = self.tiles.iter().filter(|_| with_picture);
        let placed = tiles.map(|tile| context.append_image(Arc::clone(tile), &mut tokens));
        let images: Vec<_> = placed.map(|placed| placed.expect("a short image")).collect();
        tokens.extend(after);
        let mut request =
            SequenceRequest { images: images.into(), ..SequenceRequest::new(tokens, 4) };
        request.options.sampling.logprobs = Some(0);
        request
    }

    /// All requests of the test. Two of them have the picture after the same prefix.
    fn requests(&self) -> [SequenceRequest; 4] {
        [
            self.request(&[], true, &[9, 8, 7]),
            self.request(&[], true, &[9, 8, 5]),
            self.request(&[50; 9], false, &[1]),
            self.request(&[7; 5], true, &[9]),
        ]
    }

    async fn run(&self, request: SequenceRequest) -> Result<Answer, EngineError> {
        let mut stream = self.handle.submit(request)?;
        let mut answer = Vec::new();
        while let Some(event) = stream.next().await {
            if let Event::Token(token) = event? {
                let logprob = token.logprob.expect("a log-probability").logprob;
                answer.push((token.id.expect("a token"), logprob.to_bits()));
            }
        }
        Ok(answer)
    }
}

/// The answers of an engine whose backend works, and how many calls of the backend they took.
async fn undisturbed(model: &str) -> (Vec<Answer>, usize) {
    let engine = Engine::start(model, usize::MAX, false).await;
    let mut answers = Vec::new();
    for request in engine.requests() {
        answers.push(engine.run(request).await.expect("an answer"));
    }
    let calls = engine.plan.calls.load(Ordering::Relaxed);
    engine.handle.shutdown().await;
    (answers, calls)
}

/// Goal: whichever call of the encoder or step goes wrong, and whether it panics or fails, requests
/// in flight end with their answer or an error. Afterward all are answered as by an engine whose
/// backend works. Blocks, pins and embeddings are accounted for: no request holds a block, a
/// restart or a failed step ends the pins, and a picture that was encoded since then is not encoded
/// again.
#[tokio::test]
async fn a_failure_within_an_image_changes_no_later_answer() {
    for model in MODELS {
        let (expected, calls) = undisturbed(model).await;
        assert!(calls > 10, "{calls}");
        for (wrong, panics) in (0..calls).flat_map(|wrong| [(wrong, true), (wrong, false)]) {
            let case = format!("{model}, call {wrong}, panics: {panics}");
            let engine = Engine::start(model, wrong, panics).await;
            disturb(&engine, &expected, &case).await;
            let restarts = engine.handle.context().stats().restarts;
            assert_eq!(restarts, u64::from(panics), "{case}");
            engine.handle.shutdown().await;
        }
    }
}

/// Runs all requests at the same time, and then one after the other.
async fn disturb(engine: &Engine, expected: &[Answer], case: &str) {
    let handle = &engine.handle;
    let all = engine.requests().map(|request| engine.run(request));
    let mut failed = 0;
    for (answer, expected) in futures::future::join_all(all).await.into_iter().zip(expected) {
        match answer {
            Ok(answer) => assert_eq!(answer, *expected, "{case}"),
            Err(EngineError::Interrupted { .. }) if engine.plan.panics => failed += 1,
            Err(EngineError::StepFailed { .. }) if !engine.plan.panics => failed += 1,
            Err(other) => panic!("{case}: {other}"),
        }
    }
    // When requests run together, they take fewer calls, so the call that goes wrong may not have
    // been reached.
    let reached = engine.plan.calls.load(Ordering::Relaxed) > engine.plan.wrong;
    assert_eq!(failed > 0, reached, "{case}");
    for (request, expected) in engine.requests().into_iter().zip(expected) {
        let answer = loop {
            match engine.run(request.clone()).await {
                Err(EngineError::Interrupted { .. } | EngineError::StepFailed { .. }) => {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                answer => break answer.expect("an answer"),
            }
        };
        assert_eq!(answer, *expected, "{case}, afterwards");
    }
    let encoded = handle.context().stats().images_encoded;
    let again = engine.request(&[60; 3], true, &[4]);
    engine.run(again).await.expect("an answer");
    assert_eq!(handle.context().stats().images_encoded, encoded, "{case}");
    assert!(handle.idle(Duration::from_secs(20)).await, "{case}");
    let pins = handle.pins().await.expect("the pins");
    let stats = handle.context().stats();
    let is_flushed = stats.restarts + stats.steps_failed > 0;
    assert_eq!(pins.len(), usize::from(!is_flushed), "{case}: {pins:?}");
    for pin in pins {
        assert!(handle.unpin(pin.id).await.expect("an answer"), "{case}");
    }
    let audit = handle.audit().await.expect("a consistent accounting");
    assert_eq!((audit.running, audit.waiting, audit.blocks_reserved), (0, 0, 0), "{case}");
    assert_eq!(audit.blocks_evictable, audit.blocks_committed, "{case}");
    assert_eq!(audit.blocks_free + audit.blocks_committed, audit.blocks_total, "{case}");
}
