//! Structured output in a running engine, on a model with random weights: its logits are almost
//! flat, so it produces everything that a grammar allows.

use futures::future::join_all;
use serde_json::{Value, json};
use stolon::{
    Completion, Engine, EngineError, Error, FinishReason, Grammar, Request, SamplingParams,
};

use crate::support::schemas;

/// A token without a string, which ends an answer.
const END: u32 = 300;

async fn engine(blocks: usize, logit_cache_bytes: usize) -> Engine {
    let builder = Engine::builder().model("random:tiny").threads(1).num_blocks(blocks);
    let builder = builder.logit_cache_bytes(logit_cache_bytes);
    builder.build().await.expect("the engine starts")
}

/// A request whose tokens are drawn from the model's distribution.
fn drawn(prompt: &str, seed: u64, max_tokens: usize) -> Request {
    let sampling =
        SamplingParams { temperature: 1.0, seed: Some(seed), ..SamplingParams::default() };
    Request::text(prompt).sampling(sampling).max_tokens(max_tokens).stop_ids([END])
}

async fn run(engine: &Engine, request: Request) -> Completion {
    engine.complete(request).await.expect("it ends")
}

fn ended(answer: &Completion) -> bool {
    matches!(answer.finish.reason, FinishReason::StopToken(END))
}

/// Goal: every answer to each of 200 random schemas is valid under its schema, as an independent
/// validator says, and an answer that is cut by its length is the beginning of a JSON text. Nearly
/// all answers end.
#[tokio::test(flavor = "multi_thread")]
async fn answers_are_valid_under_200_random_schemas() {
    let engine = engine(1024, 0).await;
    let requests = (0..200).map(|seed| {
        let grammar = Grammar::JsonSchema(schemas::schema(seed));
        run(&engine, drawn("A value: ", seed, 300).grammar(grammar))
    });
    let mut cut = 0;
    for (seed, answer) in (0..).zip(join_all(requests).await) {
        let schema = schemas::schema(seed);
        let text = &answer.text;
        let shown = format!("{schema}\n{text:?} {:?}", answer.finish.reason);
        match serde_json::from_str::<Value>(text) {
            Ok(value) if ended(&answer) => {
                let options = jsonschema::options();
                let validator = options.should_validate_formats(true).build(&schema);
                let result = validator.expect("a valid schema");
                assert!(result.is_valid(&value), "{shown}");
            }
            result => {
                assert_eq!(answer.finish.reason, FinishReason::Length, "{shown}");
                assert!(result.err().is_none_or(|error| error.is_eof()), "{shown}");
                cut += 1;
            }
        }
    }
    assert!(cut <= 10, "{cut} answers were cut");
    engine.audit().await.expect("consistent accounting");
}

fn object() -> Grammar {
    Grammar::JsonSchema(schemas::schema(5))
}

/// Goal: a grammar changes neither which prefixes are shared nor a bit of any answer: warm equals
/// cold, also if the first token is chosen from cached logits; a batch with and without grammars
/// equals each request alone; a preempted request equals an undisturbed one.
#[tokio::test(flavor = "multi_thread")]
async fn answers_are_the_same_in_every_situation() {
    let prompt =
        "A prompt of several full blocks, which all requests of this test have. ".repeat(2);
    let request = |index: u64| {
        let request = drawn(&prompt, index, 90).logprobs(3);
        match index % 4 {
            0 => request.grammar(object()),
            1 => request.grammar(Grammar::Regex("[a-f]{40,60}".to_owned())),
            2 => request.grammar(Grammar::Choice(vec!["yes".to_owned(), "no".to_owned()])),
            _ => request,
        }
    };
    let mut alone = Vec::new();
    for index in 0..8 {
        // A new engine: nothing is cached.
        alone.push(run(&engine(256, 0).await, request(index)).await);
    }
    let caching = engine(256, 1 << 20).await;
    for (index, cold) in (0..).zip(&alone) {
        let warm = run(&caching, request(index)).await;
        assert_eq!((&warm.text, &warm.logprobs), (&cold.text, &cold.logprobs), "{index}");
        let cached = warm.finish.usage.cached_tokens;
        assert!(index == 0 || cached > prompt.len() - 32, "{cached}");
    }
    assert!(caching.stats().first_tokens_from_cache >= 7, "also with a grammar");
    let batch = join_all((0..8).map(|index| run(&caching, request(index)))).await;
    for (index, alone) in alone.iter().enumerate() {
        assert_eq!(batch[index].token_ids, alone.token_ids, "{index}");
        assert_eq!(batch[index].logprobs, alone.logprobs, "{index}");
    }
    caching.audit().await.expect("consistent accounting");
    // A request that is preempted because its consumer is slow.
    let builder = Engine::builder().model("random:tiny").threads(1).num_blocks(16);
    let small = builder.max_running(1).event_capacity(8).build().await.expect("it starts");
    let slow = small.generate(request(1)).await.expect("it fits");
    let other = run(&small, Request::text("Something else.").max_tokens(200)).await;
    assert_eq!(other.token_ids.len(), 200);
    assert!(small.stats().preemptions > 0, "the pool is too small for both");
    let answer = slow.collect_text().await.expect("it ends");
    assert_eq!((&answer.text, &answer.logprobs), (&alone[1].text, &alone[1].logprobs));
}

/// Goal: a grammar works together with every other option of a request.
#[tokio::test(flavor = "multi_thread")]
async fn a_grammar_works_with_other_options() {
    let engine = engine(256, 1 << 20).await;
    let letters = || Grammar::Regex("[a-d]{2,30}".to_owned());
    // Each of several choices has its own state of the grammar.
    let request = drawn("p", 1, 100).grammar(letters());
    let streams = engine.generate_choices(request, 4).await.expect("it fits");
    let answers = join_all(streams.into_iter().map(|stream| stream.collect_text())).await;
    let answers: Vec<_> = answers.into_iter().map(|answer| answer.expect("it ends").text).collect();
    assert!(answers.iter().all(|text| text.bytes().all(|byte| (b'a'..=b'd').contains(&byte))));
    assert!(answers.iter().any(|text| *text != answers[0]), "{answers:?}");
    // The end of the answer is excluded until there are enough tokens, or until the grammar allows
    // nothing else.
    let answer = run(&engine, drawn("p", 2, 100).grammar(letters()).min_tokens(20)).await;
    assert!(answer.text.len() >= 19, "{}", answer.text);
    let answer = run(&engine, drawn("p", 2, 100).grammar(letters()).min_tokens(60)).await;
    assert_eq!((answer.text.len(), ended(&answer)), (30, true));
    // Bias and penalties choose among the tokens that the grammar allows.
    let mut sampling = SamplingParams { repetition_penalty: 1.3, ..SamplingParams::default() };
    sampling.logit_bias = [(u32::from(b'z'), 100.0), (u32::from(b'c'), 90.0)].into();
    let biased = drawn("p", 3, 20).sampling(sampling).grammar(letters());
    assert_eq!(run(&engine, biased).await.text, "c".repeat(20));
    // A stop string ends the answer as without a grammar.
    let stopped = drawn("p", 4, 100).grammar(Grammar::Regex("abc{50}".to_owned())).stop(["cc"]);
    assert_eq!(run(&engine, stopped).await.text, "ab");
    // Log-probabilities are those of the model, without the grammar.
    let free = run(&engine, drawn("p", 5, 1).logprobs(5)).await;
    let bound = run(&engine, drawn("p", 5, 1).logprobs(5).grammar(letters())).await;
    assert_eq!(bound.logprobs[0].top, free.logprobs[0].top);
    assert!(bound.logprobs[0].logprob < -2.0, "one token of 320");
    // The best of several answers.
    let best = engine.best_of(drawn("p", 6, 50).grammar(letters()), 4, 1).await.expect("it ends");
    assert_eq!(best.completions.len(), 1);
}

/// Goal: an invalid grammar is refused before anything is computed, and one that becomes too
/// complex ends its own request only.
#[tokio::test(flavor = "multi_thread")]
async fn a_grammar_that_fails_hurts_nobody_else() {
    let engine = engine(256, 0).await;
    let invalid = Grammar::JsonSchema(json!({"properties": {"a": {"uniqueItems": true}}}));
    let error = engine.complete(drawn("p", 1, 9).grammar(invalid)).await.expect_err("refused");
    assert!(matches!(&error, Error::Grammar(error) if error.path == "properties.a.uniqueItems"));
    let ending = Request::text("p").grammar(object());
    let error = engine.complete(ending).await.expect_err("no token ends an answer");
    assert!(error.to_string().contains("end-of-sequence"), "{error}");
    let complex = Grammar::Regex("((a{0,500}){0,500}){0,500}b".to_owned());
    let sampling =
        SamplingParams { logit_bias: [(u32::from(b'a'), 100.0)].into(), ..Default::default() };
    let (failed, other) = futures::join!(
        engine.complete(drawn("p", 1, 200).sampling(sampling).grammar(complex)),
        run(&engine, drawn("p", 1, 50).grammar(Grammar::Choice(vec!["ab".to_owned()])))
    );
    let error = failed.expect_err("too complex");
    assert!(matches!(&error, Error::Engine(EngineError::LogitsProcessor { .. })), "{error}");
    assert!(error.to_string().contains("too many"), "{error}");
    assert_eq!(other.text, "ab");
    engine.audit().await.expect("consistent accounting");
}
