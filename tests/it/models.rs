//! Several models in one program: loads, leases, the budget of memory, idle times, and models that
//! start warm after they were unloaded.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use futures::poll;
use stolon::{
    Engine, EngineBuilder, EngineError, Error, ModelRecipe, ModelSet, ModelSetError, ModelState,
    Request,
};
use stolon_backend::fake::{FakeBackend, FakeOptions};
use stolon_fixtures::path;

fn fake() -> EngineBuilder {
    Engine::builder().backend("fake", Box::new(FakeBackend::new(FakeOptions::default())))
}

/// A model on the fake backend that takes one byte of a budget.
fn model(name: &str) -> ModelRecipe {
    ModelRecipe::new(name, || Ok(fake())).memory(1)
}

fn state(models: &ModelSet, name: &str) -> ModelState {
    let model = models.list().into_iter().find(|model| model.name == name);
    model.expect("a model").state
}

/// Waits until a model has this state.
async fn until(models: &ModelSet, name: &str, expected: ModelState) {
    let reached = async {
        while state(models, name) != expected {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let reached = tokio::time::timeout(Duration::from_secs(30), reached).await;
    assert!(reached.is_ok(), "{name} is not {expected:?}: {:?}", models.list());
}

/// Goal: a model is loaded by its first request, once for all requests that come meanwhile, and has
/// its name and its engine.
#[tokio::test]
async fn concurrent_requests_wait_for_one_load() {
    let loads = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&loads);
    let recipe = ModelRecipe::new("a", move || {
        counted.fetch_add(1, SeqCst);
        Ok(fake())
    });
    let models = ModelSet::builder().model(recipe).model(model("b")).build().expect("a set");
    assert_eq!(models.names().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(state(&models, "a"), ModelState::Sleeping);
    let leases = futures::future::join_all((0..16).map(|_| models.get("a"))).await;
    assert_eq!(loads.load(SeqCst), 1);
    for lease in &leases {
        let lease = lease.as_ref().expect("a model");
        assert_eq!((lease.name(), lease.model_info().id.as_str()), ("a", "fake"));
    }
    assert_eq!(models.list()[0].leases, 16);
    assert_eq!(state(&models, "b"), ModelState::Sleeping);
    let Err(error) = models.get("c").await else { panic!("there is no such model") };
    assert_eq!(error.to_string(), "there is no model `c`: expected one of `a`, `b`");
    drop(leases);
    models.shutdown().await;
    assert!(matches!(models.get("a").await, Err(ModelSetError::Stopped)));
}

/// Goal: a load that fails, or panics, is an error for each request that waits for it, and a later
/// request loads the model again.
#[tokio::test]
async fn a_failed_load_is_tried_again() {
    let works = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&works);
    let recipe = ModelRecipe::new("a", move || match flag.load(SeqCst) {
        true => Ok(fake()),
        false => Ok(Engine::builder().model("no/such/directory/model.gguf")),
    });
    let panics = ModelRecipe::new("b", || panic!("a recipe that panics"));
    let models = ModelSet::builder().model(recipe).model(panics).build().expect("a set");
    for lease in futures::future::join_all((0..4).map(|_| models.get("a"))).await {
        let error = lease.expect_err("there is no such file").to_string();
        assert!(error.starts_with("the model `a` cannot be loaded: "), "{error}");
        assert!(error.contains("no/such/directory"), "{error}");
    }
    assert!(models.list()[0].error.is_some() && models.list()[0].leases == 0);
    works.store(true, SeqCst);
    let lease = models.get("a").await.expect("it works now");
    assert!(models.list()[0].error.is_none());
    lease.complete(Request::tokens([1, 2]).max_tokens(1)).await.expect("an answer");
    assert!(matches!(models.get("b").await, Err(ModelSetError::Load { .. })));
}

/// Goal: a model is not unloaded while it has leases, a request that comes meanwhile waits and gets
/// a new engine, and what was attached to the old one is gone.
#[tokio::test]
async fn a_model_is_unloaded_after_its_last_lease() {
    let models = ModelSet::builder().model(model("a")).build().expect("a set");
    let lease = models.get("a").await.expect("a model");
    let attached = Arc::downgrade(&lease.attached(|_| 7_u32).expect("a number"));
    assert_eq!(lease.attached(|_| 8_u32).as_deref(), Some(&7));
    assert!(lease.attached(|_| "a text").is_none());
    let mut stream =
        lease.generate(Request::tokens([1, 2]).max_tokens(64)).await.expect("accepted");
    let mut unload = Box::pin(models.unload("a"));
    assert!(poll!(&mut unload).is_pending());
    assert_eq!(state(&models, "a"), ModelState::Unloading);
    assert!(models.peek("a").expect("a model").is_none());
    let mut next = Box::pin(models.get("a"));
    assert!(poll!(&mut next).is_pending());
    let mut tokens = 0;
    while let Some(event) = stream.next().await {
        tokens += usize::from(matches!(event.expect("not stopped"), stolon::Event::Token(_)));
    }
    assert!(tokens >= 64, "{tokens}");
    assert!(poll!(&mut unload).is_pending() && poll!(&mut next).is_pending());
    assert!(attached.upgrade().is_some());
    drop(lease);
    let next = next.await.expect("the model is loaded again");
    unload.await.expect("it was unloaded");
    assert!(attached.upgrade().is_none());
    assert_eq!(next.stats().requests, 0, "a new engine");
    drop(next);
    models.unload("a").await.expect("a model");
    assert_eq!(state(&models, "a"), ModelState::Sleeping);
    models.unload("a").await.expect("nothing to do");
}

/// Goal: a model whose engine has stopped by itself is loaded again by the next request.
#[tokio::test]
async fn a_stopped_engine_is_replaced() {
    let models = ModelSet::builder().model(model("a")).build().expect("a set");
    let lease = models.get("a").await.expect("a model");
    lease.shutdown().await;
    drop(lease);
    let lease = models.get("a").await.expect("a model");
    lease.complete(Request::tokens([1, 2]).max_tokens(1)).await.expect("an answer");
}

/// Goal: a model is unloaded when it was idle for long enough after its last request, unless it is
/// pinned, has a longer time of its own, or is in use; a look at it does not count as a use.
#[tokio::test]
async fn idle_models_are_unloaded() {
    let models = ModelSet::builder()
        .model(model("a"))
        .model(model("pinned").pinned(true).at_start(true))
        .model(model("kept"))
        .model(model("used"))
        .idle_timeout(Duration::from_millis(100))
        .build()
        .expect("a set");
    models.load_at_start().await.expect("loaded");
    assert_eq!(state(&models, "pinned"), ModelState::Loaded);
    assert_eq!(state(&models, "a"), ModelState::Sleeping);
    drop(models.get("a").await.expect("a model"));
    let kept = models.get("kept").await.expect("a model");
    kept.keep_alive(None);
    drop(kept);
    let used = models.get("used").await.expect("a model");
    let looks = async {
        loop {
            drop(models.peek("a").expect("a model"));
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::select! {
        () = looks => {}
        () = until(&models, "a", ModelState::Sleeping) => {}
    }
    for name in ["pinned", "kept", "used"] {
        assert_eq!(state(&models, name), ModelState::Loaded, "{name}");
    }
    drop(used);
    until(&models, "used", ModelState::Sleeping).await;
    let kept = models.get("kept").await.expect("a model");
    kept.keep_alive(Some(Duration::ZERO));
    drop(kept);
    until(&models, "kept", ModelState::Sleeping).await;
}

/// Goal: models share one budget. The idle one that was used least recently leaves for another one;
/// if all are in use, one takes no new requests, so that the model that waits is loaded; and what
/// can never fit is refused.
#[tokio::test]
async fn models_share_a_budget() {
    let models = ModelSet::builder()
        .model(model("a"))
        .model(model("b"))
        .model(model("c"))
        .model(model("pinned").pinned(true))
        .model(model("large").memory(3))
        .memory(3)
        .build()
        .expect("a set");
    for name in ["pinned", "a", "b", "a"] {
        drop(models.get(name).await.expect("a model"));
    }
    let c = models.get("c").await.expect("a model");
    assert_eq!(state(&models, "b"), ModelState::Sleeping, "the least recently used");
    assert_eq!(models.list().iter().map(|model| model.memory).sum::<u64>(), 3);
    let a = models.get("a").await.expect("a model");
    // Both are in use now, `c` longer than `a`.
    let mut b = Box::pin(models.get("b"));
    assert!(poll!(&mut b).is_pending());
    until(&models, "c", ModelState::Unloading).await;
    let mut again = Box::pin(models.get("c"));
    assert!(poll!(&mut again).is_pending());
    assert!(poll!(&mut b).is_pending());
    drop(c);
    let b = b.await.expect("there is room now");
    drop((a, b));
    drop(again.await.expect("a model"));
    match models.get("large").await {
        Err(error @ ModelSetError::TooLarge { needed: 3, available: 2, budget: 3, .. }) => {
            assert!(error.to_string().contains("`large`"), "{error}");
        }
        other => panic!("it never fits: {other:?}"),
    }
    assert_eq!(state(&models, "pinned"), ModelState::Loaded);
}

/// Goal: a budget knows the memory of models in files, and asks for what it cannot know.
#[tokio::test]
async fn the_memory_of_models_is_known() {
    let needed = |builder: EngineBuilder| builder.memory_needed();
    let llama = |blocks| Engine::builder().model(path("llama")).num_blocks(blocks).block_size(16);
    let with = |blocks| needed(llama(blocks)).expect("a model in files");
    let engine = llama(8).build().await.expect("an engine");
    let kv = engine.model_info().kv_bytes as u64;
    assert_eq!(with(16) - with(8), kv);
    assert_eq!(with(0) + kv, with(8));
    let encoder = path("encoders/bert");
    let size = std::fs::metadata(encoder.join("model.safetensors")).expect("a file").len();
    let tensors = needed(Engine::builder().model(encoder)).expect("a model in files");
    assert!(tensors <= size && tensors > size / 2, "{tensors} of {size}");
    let unsized_kv = needed(Engine::builder().model(path("llama")));
    assert!(unsized_kv.is_err_and(|error| error.to_string().contains("kv_memory")));
    assert!(needed(Engine::builder().model("random:tiny")).is_err());
    assert!(needed(fake()).is_err());
    let recipe = ModelRecipe::new("a", || Ok(fake()));
    let models = ModelSet::builder().model(recipe).memory(1 << 30).build().expect("a set");
    assert!(matches!(models.get("a").await, Err(ModelSetError::Load { .. })));
}

/// Goal: within a budget, models without a size of their KV cache divide what all weights leave, next
/// to a text encoder, and are all loaded at the same time.
#[tokio::test]
async fn kv_caches_without_a_size_divide_the_budget() {
    const KV: u64 = 3 << 20;
    let llama = || Engine::builder().model(path("llama")).block_size(16);
    let encoder = || Engine::builder().model(path("encoders/bert"));
    let weights = llama().num_blocks(0).memory_needed().expect("a model in files");
    let budget = 2 * (weights + KV) + encoder().memory_needed().expect("a model in files");
    let models = ModelSet::builder()
        .model(ModelRecipe::new("a", move || Ok(llama())))
        .model(ModelRecipe::new("embed", move || Ok(encoder())))
        .model(ModelRecipe::new("b", move || Ok(llama())))
        .memory(budget)
        .build()
        .expect("a set");
    for name in ["a", "b", "embed"] {
        let lease = models.get(name).await.expect("a model");
        let (kv, block) =
            (lease.model_info().kv_bytes as u64, lease.model_info().num_blocks as u64);
        if name != "embed" {
            assert!(kv <= KV && kv > KV - kv / block, "{name}: {kv} bytes in {block} blocks");
        }
    }
    let loaded = models.list().iter().all(|model| model.state == ModelState::Loaded);
    let counted: u64 = models.list().iter().map(|model| model.memory).sum();
    assert!(loaded && counted == budget, "{counted} of {budget} bytes: {:?}", models.list());
}

/// Goal: a set without models, or whose names are not different or have a wrong length, is refused.
#[tokio::test]
async fn wrong_sets_are_refused() {
    let long = "x".repeat(257);
    for names in [&[][..], &["a", "b", "a"], &[""], &[&long]] {
        let set = names.iter().fold(ModelSet::builder(), |set, name| set.model(model(name)));
        let refused = set.build().expect_err("a wrong set");
        assert!(
            matches!(refused, Error::Engine(EngineError::InvalidParameter { .. })),
            "{names:?}"
        );
    }
}

#[cfg(feature = "tiers")]
mod warm {
    use stolon::{KvType, SessionOptions};

    use super::*;
    use crate::support::tiers::{Directory, answer, ask, prompt, slow_fake};

    /// Goal: a model that was unloaded to make room for another one is warm when it is loaded again:
    /// its KV is read from its disk tier and its sessions continue, with the bits of an engine that
    /// computes everything.
    #[tokio::test]
    async fn a_model_that_returns_is_warm_with_the_same_bits() {
        let directory = Directory::new("models-warm");
        let tiny = || Engine::builder().model("random:tiny").num_blocks(64).kv_type(KvType::F32);
        let recipe = |name: &str| {
            let own = directory.0.join(name);
            ModelRecipe::new(name, move || Ok(tiny().kv_cache_dir(&own, 1 << 30))).memory(1)
        };
        let (a, b) = (recipe("a"), recipe("b"));
        let set = ModelSet::builder().model(a).model(b).memory(1);
        let models = set.build().expect("a set");
        let cold = tiny().build().await.expect("an engine");
        let (tokens, more) = (prompt(200, 1), prompt(40, 2));
        let turn = |tokens: &[u32]| Request::tokens(tokens).max_tokens(4).ignore_eos(true);

        let first = models.get("a").await.expect("a model");
        answer(&first, &tokens).await;
        let session = first.sessions().open(SessionOptions::default()).expect("a session").id;
        let said = first.complete(turn(&tokens).session(&session)).await.expect("an answer");
        drop(first);

        let other = models.get("b").await.expect("a model");
        assert_eq!(answer(&other, &tokens).await.1, 0, "each model has a directory of its own");
        drop(other);
        assert_eq!(state(&models, "a"), ModelState::Sleeping);

        let second = models.get("a").await.expect("a model");
        let longer = [tokens.clone(), more.clone()].concat();
        let (expected, _) = answer(&cold, &longer).await;
        assert_eq!(answer(&second, &longer).await, (expected, 192));
        assert_eq!(second.stats().loaded_tokens, 192, "a new engine has read them");
        assert_eq!(second.sessions().get(&session).expect("a session").tokens, 204);
        let whole = [&tokens[..], &said.token_ids, &more].concat();
        let expected = cold.complete(turn(&whole)).await.expect("an answer").token_ids;
        let next = second.complete(turn(&more).session(&session).append()).await;
        let next = next.expect("an answer");
        assert_eq!(next.token_ids, expected);
        assert!(next.finish.usage.cached_tokens >= 192, "{:?}", next.finish.usage);
        second.audit().await.expect("the accounting is right");
        drop(second);
        models.shutdown().await;
    }

    /// Goal: the pins of a model end when it is unloaded, also in its disk tier, which then evicts
    /// what they held like everything else. Until then it is warm, and can be pinned again.
    #[tokio::test]
    async fn pins_end_when_a_model_is_unloaded() {
        // The size of a record of the fake backend: 64 positions with 24 bytes of KV and a token each.
        const RECORD_BYTES: u64 = 176 + 64 * (24 + 4) + 32;
        let directory = Directory::new("models-pins");
        let own = directory.0.clone();
        let fake = move || {
            let fake = slow_fake(64, Duration::from_micros(500)).pin_budget(16);
            Ok(fake.kv_cache_dir(&own, 3 * RECORD_BYTES))
        };
        let set = ModelSet::builder().model(ModelRecipe::new("a", fake));
        let models = set.build().expect("a set");
        let request = Request::tokens(prompt(70, 1));
        let pinned = models.get("a").await.expect("a model");
        ask(&pinned, &prompt(70, 1)).await;
        let id = pinned.cache().pin(&request, None).await.expect("it is cached");
        drop(pinned);
        models.unload("a").await.expect("a model");

        let next = models.get("a").await.expect("a model");
        assert!(next.cache().pins().await.expect("it runs").is_empty());
        assert!(!next.cache().unpin(id).await.expect("it runs"), "the pin is unknown");
        assert_eq!(ask(&next, &prompt(70, 1)).await, 64, "read from the disk");
        next.cache().pin(&request, None).await.expect("it is cached");
        drop(next);
        models.unload("a").await.expect("a model");

        let last = models.get("a").await.expect("a model");
        for seed in 2..8 {
            ask(&last, &prompt(70, seed)).await;
            last.tiers().flush().await.expect("it runs");
        }
        let stored = last.tiers().query(&request).expect("tokens").disk;
        assert_eq!(stored, 0, "it is the oldest, and not pinned");
        drop(last);
        models.shutdown().await;
    }
}
