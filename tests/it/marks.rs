//! Marks: the parts of a prompt that a client expects to use again.

use std::time::Duration;

use stolon::{CacheMark, ChatMessage, Engine, EngineBuilder, EvictionPolicy, Request};

use crate::support::fake;

const HOUR: Duration = Duration::from_secs(3600);

/// A prompt of `count` blocks of 16 tokens that begins with `first`, and one generated token.
fn blocks(first: u32, count: u32) -> Request {
    Request::tokens((0..16 * count).map(|n| (first + n * 7) % 256).collect::<Vec<_>>())
        .max_tokens(1)
}

fn marked(request: Request, ttl: Duration) -> Request {
    request.marks([CacheMark::whole(ttl)])
}

fn cached(engine: &Engine, request: &Request) -> usize {
    engine.cache().query_match_len(request).expect("tokens")
}

async fn ask(engine: &Engine, request: Request) {
    engine.complete(request).await.expect("it fits");
}

/// An engine with a pool of eight blocks, of which marks protect at most `budget`.
async fn engine(budget: usize) -> Engine {
    build(fake::builder(8).0.pin_budget(budget)).await
}

async fn build(builder: EngineBuilder) -> Engine {
    builder.eviction_policy(EvictionPolicy::Lru).build().await.expect("valid settings")
}

/// Numbers of marked blocks, oldest mark first.
async fn marks(engine: &Engine) -> Vec<usize> {
    let pins = engine.cache().pins().await.expect("it runs");
    assert!(pins.iter().all(|pin| pin.is_mark));
    pins.iter().map(|pin| pin.blocks).collect()
}

/// Goal: a marked prefix stays cached where an unmarked one is evicted, and is evicted once its
/// time has passed.
#[tokio::test]
async fn a_marked_prefix_is_evicted_last_until_its_time_has_passed() {
    let ttl = Duration::from_millis(400);
    for is_marked in [false, true] {
        let engine = engine(4).await;
        let system = blocks(3, 2);
        let first = match is_marked {
            true => marked(system.clone(), ttl),
            false => system.clone(),
        };
        ask(&engine, first).await;
        for other in 50..54 {
            ask(&engine, blocks(other, 5)).await;
        }
        assert_eq!(cached(&engine, &system), if is_marked { 32 } else { 0 });
        while !marks(&engine).await.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        for other in 60..64 {
            ask(&engine, blocks(other, 5)).await;
        }
        assert_eq!(cached(&engine, &system), 0, "the mark has ended");
        engine.audit().await.expect("consistent accounting");
    }
}

/// Goal: marks refuse no request, also one that needs the whole pool, and no pin.
#[tokio::test]
async fn marks_give_way_to_requests_and_pins() {
    let engine = engine(7).await;
    ask(&engine, marked(blocks(3, 6), HOUR)).await;
    assert_eq!(marks(&engine).await, [6]);
    ask(&engine, blocks(90, 7)).await;
    assert!(cached(&engine, &blocks(3, 6)) <= 16, "the pool has one block left");
    engine.cache().pin(&blocks(90, 7), None).await.expect("marks use no part of its budget");
    engine.audit().await.expect("consistent accounting");
}

/// Goal: a mark protects only as much as the budget has room for, from the beginning of the prompt.
#[tokio::test]
async fn marks_beyond_the_budget_decay() {
    let engine = engine(3).await;
    ask(&engine, marked(blocks(3, 5), HOUR)).await;
    assert_eq!(marks(&engine).await, [3]);
    ask(&engine, blocks(70, 3)).await;
    ask(&engine, blocks(80, 3)).await;
    assert_eq!(cached(&engine, &blocks(3, 5)), 48);
    ask(&engine, marked(blocks(120, 1), HOUR)).await;
    assert_eq!(marks(&engine).await, [1], "the older mark of the tenant has ended");
    let none = build(fake::builder(8).0.pin_budget(0)).await;
    ask(&none, marked(blocks(3, 2), HOUR)).await;
    assert_eq!(marks(&none).await, [0; 0]);
    engine.audit().await.expect("consistent accounting");
}

/// Goal: however much a tenant marks, another one gets a fair share of the budget.
#[tokio::test]
async fn tenants_share_the_budget() {
    let engine = engine(4).await;
    let of = |request: Request, tenant: &str| marked(request, HOUR).tenant(tenant);
    for first in 0..5 {
        ask(&engine, of(blocks(first * 10, 2), "greedy")).await;
    }
    assert_eq!(marks(&engine).await, [2, 2]);
    ask(&engine, of(blocks(100, 1), "modest")).await;
    for first in 0..5 {
        ask(&engine, of(blocks(first * 10, 2), "greedy")).await;
    }
    let modest = cached(&engine, &blocks(100, 1));
    assert_eq!((modest, marks(&engine).await.iter().sum::<usize>()), (16, 3));
    engine.audit().await.expect("consistent accounting");
}

/// Goal: the mark of a conversation's next turn replaces the one before it, and a repeated mark
/// lives longer without another one.
#[tokio::test]
async fn a_longer_mark_replaces_a_shorter_one() {
    let engine = engine(6).await;
    for count in [1, 2, 2, 3, 2] {
        ask(&engine, marked(blocks(3, count), HOUR)).await;
    }
    let pins = engine.cache().pins().await.expect("it runs");
    let described: Vec<_> = pins.iter().map(|pin| (pin.tokens, pin.is_mark)).collect();
    assert_eq!(described, [(48, true), (32, true)], "the last one ends last");
    ask(&engine, marked(blocks(3, 3), HOUR)).await;
    assert_eq!(marks(&engine).await, [3]);
    // Removing the prefix ends its mark.
    assert_eq!(engine.cache().evict_prefix(&blocks(3, 3)).await.expect("it runs"), 3);
    assert_eq!(marks(&engine).await, [0; 0]);
}

/// Goal: a mark with an endless time to live ends after a day, and thousands of them are one.
#[tokio::test]
async fn marks_are_bounded() {
    let engine = engine(7).await;
    let mark = |message| CacheMark { message, parts_left_out: 0, ttl: Duration::MAX };
    let many = blocks(3, 2).marks((0..100_000).map(mark));
    ask(&engine, many).await;
    let pins = engine.cache().pins().await.expect("it runs");
    assert_eq!(pins.len(), 1);
    assert!(pins[0].ends_in.expect("a time to live") <= 24 * HOUR);
}

/// The tokens and the bits of the log-probabilities of an answer.
async fn answer(engine: &Engine, request: &Request) -> Vec<(u32, u32)> {
    let answer = engine.complete(request.clone().max_tokens(4).logprobs(0)).await.expect("it fits");
    let bits = answer.logprobs.iter().map(|entry| entry.logprob.to_bits());
    answer.token_ids.iter().copied().zip(bits).collect()
}

/// Goal: a mark within a conversation protects what precedes it, and not what follows. Answers have
/// the same bits with and without marks, with a pool that has no room, and with a recurrent model,
/// whose checkpoint is kept, too.
#[tokio::test]
async fn marks_within_conversations_keep_what_precedes_them() {
    let document = "The violet tent costs 45 crowns. ".repeat(6);
    let ask = |question: &str| {
        let parts = serde_json::json!([{"type": "text", "text": document},
                                       {"type": "text", "text": question}]);
        let content = stolon::MessageContent::Parts(parts.as_array().expect("a list").clone());
        let mut message = ChatMessage::user("");
        message.content = Some(content);
        Request::chat(vec![message])
    };
    let template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n\
                    {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    for model in ["random:tiny", "random:hybrid-tiny"] {
        let plain =
            build(Engine::builder().model(model).chat_template(template).prefix_caching(false))
                .await;
        let builder = Engine::builder().model(model).chat_template(template);
        let builder = builder.num_blocks(96).pin_budget(48);
        let engine = build(builder.max_positions(512)).await;
        let mark = CacheMark { message: 0, parts_left_out: 1, ttl: HOUR };
        let (mut lens, mut found) = (Vec::new(), Vec::new());
        for (index, question) in ["What is it?", "How much?", "Why violet?"].iter().enumerate() {
            let request = ask(question).marks([mark]);
            let expected = answer(&plain, &ask(question)).await;
            assert_eq!(answer(&engine, &request).await, expected, "{model} {index}");
            let pins = engine.cache().pins().await.expect("it runs");
            lens.extend(pins.iter().map(|pin| pin.tokens));
            for other in 0..12 {
                let text = format!("{other} {index} ").repeat(30);
                let other = Request::chat(vec![ChatMessage::user(text)]).max_tokens(2);
                engine.complete(other).await.expect("it fits");
            }
            found.push(engine.cache().query_resume(&ask(question)).expect("a template"));
        }
        assert_eq!(lens.len(), 3, "{model}: one mark for all questions");
        assert!(lens.iter().all(|&len| len == lens[0]), "{model}: {lens:?}");
        assert!(found.iter().all(|found| found.cached == lens[0]), "{model}: {lens:?} {found:?}");
        assert!(found.iter().all(|found| found.resume == lens[0]), "{model}: {lens:?} {found:?}");
        engine.audit().await.expect("consistent accounting");
    }
}
