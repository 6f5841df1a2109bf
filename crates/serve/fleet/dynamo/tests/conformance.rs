//! The worker against Dynamo's own conformance kit, with the demo model.

use std::time::Duration;

use dynamo_backend_common::engine::GenerateContext;
use dynamo_backend_common::testing::{mock_context, run_conformance};
use dynamo_backend_common::{FinishReason, LLMEngine, PreprocessedRequest};
use futures::StreamExt;
use serde_json::json;
use stolon::{Engine, ModelSource};
use stolon_dynamo::{StartEngine, StolonWorker, WorkerOptions};

fn worker() -> StolonWorker {
    let start: StartEngine = Box::new(|| {
        let engine = Engine::builder().model(ModelSource::Demo).block_size(4).num_blocks(512);
        Box::pin(async { Ok(engine.build().await?) })
    });
    let options = WorkerOptions {
        served_name: None,
        max_running: 8,
        max_batched_tokens: 512,
        shutdown_timeout: Duration::from_secs(5),
    };
    StolonWorker::new(start, options)
}

/// Goal: the worker fulfills Dynamo's contract.
#[tokio::test]
async fn the_worker_conforms() {
    run_conformance(worker).await.expect("a worker that conforms");
}

/// Goal: the answer through Dynamo's interface has the tokens of the engine's own answer, and the
/// second of two equal prompts is reported as cached.
#[tokio::test]
async fn answers_are_those_of_the_engine() {
    let worker = worker();
    worker.start(0).await.expect("a start");
    let prompt: Vec<u32> = (10..42).collect();
    let request: PreprocessedRequest = serde_json::from_value(json!({
        "model": "demo", "token_ids": prompt, "mdc_sum": null, "router_config_override": null,
        "stop_conditions": {"max_tokens": 6, "ignore_eos": true},
    }))
    .expect("a request");
    let alone = Engine::builder().model(ModelSource::Demo).build().await.expect("an engine");
    let own = stolon::Request::tokens(prompt).max_tokens(6).ignore_eos(true);
    let own = own.sampling(alone.recommended_sampling());
    let expected = alone.complete(own).await.expect("an answer").token_ids;
    for cached in [0, 28] {
        let context = GenerateContext::new(mock_context(), None);
        let stream = worker.generate(request.clone(), context).await.expect("a stream");
        let parts: Vec<_> = stream.map(|part| part.expect("a part")).collect().await;
        let tokens: Vec<u32> = parts.iter().flat_map(|part| part.token_ids.clone()).collect();
        assert_eq!(tokens, expected);
        let end = parts.last().expect("an end");
        assert!(matches!(end.finish_reason, Some(FinishReason::Length)));
        let usage = end.completion_usage.as_ref().expect("usage");
        let details = usage.prompt_tokens_details.as_ref().expect("details");
        assert!(details.cached_tokens >= Some(cached), "{details:?}");
    }
    worker.cleanup().await.expect("an end");
    let context = GenerateContext::new(mock_context(), None);
    assert!(worker.generate(request, context).await.is_err(), "it has stopped");
}
