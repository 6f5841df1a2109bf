//! Sessions through the public API: the blocks that they hold, the events that end a hold, and that
//! they change no answer.

use std::time::Duration;

use fake::builder;
use stolon::{
    Completion, Engine, EngineError, Error, Event, Request, SessionError, SessionId, SessionOptions,
};
use stolon_backend::fake::FakeFault;

use crate::support::fake;

/// `count` tokens that begin with `first`.
fn tokens(first: u32, count: u32) -> Vec<u32> {
    (0..count).map(|n| (first + n * 7) % 256).collect()
}

fn open(engine: &Engine, name: &str) -> SessionId {
    engine.sessions().open(SessionOptions::new(name)).expect("a free id").id
}

async fn complete(engine: &Engine, request: Request) -> Completion {
    engine.complete(request).await.expect("it fits")
}

/// The session error of a request that is refused.
async fn refused(engine: &Engine, request: Request) -> SessionError {
    match engine.generate(request).await {
        Err(Error::Engine(EngineError::Session(error))) => error,
        other => panic!("expected the error of a session, got {other:?}"),
    }
}

/// Waits until no request runs or waits, not even a canceled one.
async fn ended(engine: &Engine) {
    while engine.stats().running + engine.stats().waiting > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Two turns of a conversation with other requests in between, which use up the pool. Returns the
/// answers and how much of the second prompt was cached.
async fn conversation(session: bool) -> (Vec<u32>, Vec<u32>, usize) {
    let (builder, _) = builder(16);
    let engine = builder.build().await.expect("valid settings");
    let id = open(&engine, "chat");
    let turn = |tokens: Vec<u32>| {
        let request = Request::tokens(tokens).max_tokens(20);
        if session { request.session(&id) } else { request }
    };
    let mut prompt = tokens(3, 40);
    let first = complete(&engine, turn(prompt.clone())).await.token_ids;
    for other in 50..60 {
        complete(&engine, Request::tokens(tokens(other, 150)).max_tokens(5)).await;
    }
    prompt.extend(&first);
    prompt.extend(tokens(9, 10));
    let second = complete(&engine, turn(prompt)).await;
    engine.audit().await.expect("consistent accounting");
    (first, second.token_ids, second.finish.usage.cached_tokens)
}

/// Goal: a conversation with a session survives cache pressure that evicts the same conversation
/// without one, and both get the same answers.
#[tokio::test]
async fn a_session_survives_cache_pressure_and_changes_no_answer() {
    let (first, second, cached) = conversation(true).await;
    let (cold_first, cold_second, cold_cached) = conversation(false).await;
    // The last token of an answer is never computed, so 59 of 60 positions were, the last 11 of them
    // in a block that is not full.
    assert_eq!((cached, cold_cached), (59, 0));
    assert_eq!((first, second), (cold_first, cold_second));
}

/// Goal: sessions never make a request fail: a request that needs the whole pool takes the blocks
/// that they hold, first of the session that has been idle longest.
#[tokio::test]
async fn requests_take_what_sessions_hold_if_they_have_no_other_block() {
    let (builder, _) = builder(16);
    let engine = builder.session_budget(16).build().await.expect("valid settings");
    let ids = ["a", "b", "c"].map(|name| open(&engine, name));
    let prompt = |index: usize| Request::tokens(tokens(index as u32, 80)).max_tokens(1);
    for (index, id) in ids.iter().enumerate() {
        complete(&engine, prompt(index).session(id)).await;
    }
    let held = || ids.clone().map(|id| engine.sessions().get(&id).expect("open").held_blocks);
    assert_eq!(held(), [5, 5, 5]);
    assert_eq!(engine.stats().blocks_in_sessions, 15);
    complete(&engine, Request::tokens(tokens(100, 90)).max_tokens(1)).await;
    assert_eq!(held(), [0, 5, 5]);
    // This request grows into the blocks that the sessions hold.
    let long = complete(&engine, Request::tokens(tokens(200, 16)).max_tokens(241)).await;
    assert_eq!(long.token_ids.len(), 241);
    assert_eq!(held(), [0, 0, 0]);
    complete(&engine, prompt(0).session(&ids[0])).await;
    assert_eq!(held(), [5, 0, 0]);
    let stats = engine.stats();
    assert_eq!((stats.sessions, stats.session_turns, stats.session_holds_lost), (3, 4, 3));
    engine.audit().await.expect("consistent accounting");
}

/// Goal: a turn that is canceled or fails leaves its session as it was, and idle.
#[tokio::test]
async fn turns_that_do_not_complete_change_nothing() {
    let (builder, backend) = builder(16);
    let engine = builder.build().await.expect("valid settings");
    let id = open(&engine, "chat");
    let first = Request::tokens(tokens(3, 40)).max_tokens(8).session(&id);
    complete(&engine, first.clone()).await;
    let before = engine.sessions().get(&id).expect("open");
    let unchanged = |held: usize| {
        let now = engine.sessions().get(&id).expect("open");
        assert_eq!((now.tokens, now.turns), (before.tokens, before.turns));
        assert_eq!(now.held_blocks, held);
        assert!(now.idle.is_some());
    };
    unchanged(3);

    // Canceled in the middle of the answer, and before the first step. The first of these turns
    // has taken the partial block.
    let mut stream = engine.generate(first.clone().max_tokens(100)).await.expect("it fits");
    while !matches!(stream.next().await, Some(Ok(Event::Token(_)))) {}
    assert_eq!(refused(&engine, first.clone()).await, SessionError::Busy { id: id.clone() });
    assert_eq!(engine.sessions().get(&id).expect("open").idle, None);
    drop(stream);
    unchanged(2);
    drop(engine.generate(first.clone()).await.expect("it fits"));
    unchanged(2);

    // The engine refuses this request after its turn has begun.
    let too_long = Request::tokens(tokens(3, 4000)).session(&id);
    engine.generate(too_long).await.expect_err("it does not fit");
    unchanged(2);
    let choices = engine.generate_choices(first.clone(), 2).await.expect_err("one answer");
    assert!(choices.to_string().contains("1 in a turn of a session"), "{choices}");

    // A step that fails empties the cache.
    ended(&engine).await;
    backend.inject_next(FakeFault::Fail);
    let cold = Request::tokens(tokens(90, 40)).max_tokens(8).session(&id);
    engine.complete(cold.clone()).await.expect_err("the step fails");
    unchanged(0);
    complete(&engine, first.clone()).await;
    assert_eq!(engine.sessions().get(&id).expect("open").held_blocks, 3);

    // A step that panics restarts the engine. Ids and tokens stay.
    ended(&engine).await;
    backend.inject_next(FakeFault::Panic);
    engine.complete(cold).await.expect_err("the step panics");
    let mut answer = engine.complete(first.clone()).await;
    while answer.as_ref().is_err_and(Error::is_retryable) {
        assert_eq!(engine.sessions().get(&id).expect("open").held_blocks, 0);
        tokio::time::sleep(Duration::from_millis(2)).await;
        answer = engine.complete(first.clone()).await;
    }
    answer.expect("the engine runs again");
    assert_eq!(engine.sessions().get(&id).expect("open").held_blocks, 3);
    engine.audit().await.expect("consistent accounting");
    assert!(engine.sessions().close(&id));
    let report = engine.audit().await.expect("consistent accounting");
    assert_eq!(report.blocks_evictable, report.blocks_committed);
}

/// Goal: a session whose answer ended at a stop string can continue at once, and has the tokens up
/// to that string, however many more were computed.
#[tokio::test]
async fn a_stop_string_ends_a_turn_at_once() {
    let (builder, _) = builder(64);
    let engine = builder.build().await.expect("valid settings");
    let id = open(&engine, "chat");
    let mut prompt = tokens(3, 40);
    let free = complete(&engine, Request::tokens(prompt.clone()).max_tokens(60)).await;
    let stop = free.text.chars().nth(9).expect("a long answer").to_string();
    for _ in 0..8 {
        let request = Request::tokens(prompt.clone()).max_tokens(60).stop([stop.clone()]);
        let answer = complete(&engine, request.session(&id)).await;
        prompt.extend(&answer.token_ids);
        let info = engine.sessions().get(&id).expect("open");
        assert_eq!((info.tokens, info.idle.is_some()), (prompt.len(), true));
    }
    engine.audit().await.expect("consistent accounting");
}

/// Goal: a flush releases the blocks that sessions hold, and so does the eviction of their cache
/// salt, also for turns in progress. The eviction of a prefix does not.
#[tokio::test]
async fn operators_end_what_sessions_hold() {
    let (builder, backend) = builder(16);
    let engine = builder.build().await.expect("valid settings");
    let options = SessionOptions::new("salted").cache_salt("s");
    let salted = engine.sessions().open(options).expect("a free id").id;
    let plain = open(&engine, "plain");
    let request = Request::tokens(tokens(3, 40)).max_tokens(1);
    let of_plain = request.clone().session(&plain);
    let of_salted = request.clone().cache_salt("s").session(&salted);
    let wrong = refused(&engine, request.clone().session(&salted)).await;
    assert_eq!(wrong, SessionError::OtherNamespace { id: salted.clone() });
    for turn in [&of_plain, &of_salted] {
        complete(&engine, turn.clone()).await;
    }
    let held = || [&plain, &salted].map(|id| engine.sessions().get(id).expect("open").held_blocks);
    assert_eq!(held(), [3, 3]);
    assert_eq!(engine.cache().evict_prefix(&request).await.expect("it runs"), 0);
    assert_eq!(engine.cache().evict_salt(Some("s")).await.expect("it runs"), 2);
    assert_eq!(held(), [3, 0]);
    engine.cache().flush().await.expect("it runs");
    assert_eq!(held(), [0, 0]);
    assert_eq!(engine.audit().await.expect("consistent accounting").blocks_free, 16);

    // The turn is in progress when its salt is evicted.
    backend.inject(backend.step_count() + 4, FakeFault::Stall(Duration::from_millis(300)));
    let turn = of_salted.clone().max_tokens(8);
    let mut stream = engine.generate(turn).await.expect("it fits");
    while !matches!(stream.next().await, Some(Ok(Event::Token(_)))) {}
    engine.cache().evict_salt(Some("s")).await.expect("it runs");
    while let Some(event) = stream.next().await {
        event.expect("it completes");
    }
    assert_eq!(held(), [0, 0]);
    complete(&engine, of_salted).await;
    assert_eq!(held(), [0, 3]);
    engine.audit().await.expect("consistent accounting");
}

/// Goal: sessions have a time to live, which turns renew; limits are checked when the engine
/// starts.
#[tokio::test]
async fn sessions_expire_and_have_limits() {
    let (builder, _) = builder(16);
    let builder = builder.session_ttl(Duration::from_millis(30)).max_sessions(2);
    let engine = builder.build().await.expect("valid settings");
    let short = open(&engine, "short");
    let options = SessionOptions::new("long").ttl(Duration::from_secs(3600));
    let long = engine.sessions().open(options).expect("a free id").id;
    let turn = Request::tokens(tokens(3, 40)).max_tokens(1);
    while engine.sessions().get(&short).is_ok() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let unknown = refused(&engine, turn.clone().session(&short)).await;
    assert_eq!(unknown, SessionError::Unknown { id: short });
    complete(&engine, turn.session(&long)).await;
    for name in ["1", "2", "3"] {
        open(&engine, name);
    }
    assert_eq!(engine.sessions().list().len(), 2);
    let stats = engine.stats();
    assert_eq!((stats.sessions, stats.sessions_expired), (2, 1));
    assert!(stats.sessions_displaced >= 1);
    for (name, refused) in [
        ("session_budget", fake::builder(8).0.session_budget(9)),
        ("max_sessions", fake::builder(8).0.max_sessions(0)),
        ("session_ttl", fake::builder(8).0.session_ttl(Duration::ZERO)),
    ] {
        let error = refused.build().await.expect_err("an impossible setting").to_string();
        assert!(error.contains(name), "{error}");
    }
    let (none, _) = fake::builder(8);
    let engine = none.session_budget(0).build().await.expect("valid settings");
    let id = open(&engine, "a");
    complete(&engine, Request::tokens(tokens(3, 40)).max_tokens(1).session(&id)).await;
    assert_eq!(engine.sessions().get(&id).expect("open").held_blocks, 0);
}

/// Goal: branches of a conversation share the blocks that they hold, stay when other branches end,
/// and get the answers that they would get without sessions; a session that was rewound continues
/// from there.
#[tokio::test]
async fn conversations_branch_and_go_back() {
    let (builder, backend) = builder(32);
    let engine = builder.build().await.expect("valid settings");
    let trunk = open(&engine, "trunk");
    let prompt = tokens(3, 40);
    let first = complete(&engine, Request::tokens(prompt.clone()).max_tokens(20).session(&trunk));
    let history = [prompt, first.await.token_ids].concat();
    let branch = engine.sessions().fork(&trunk, "branch", None).await.expect("a free id");
    assert_eq!((branch.tokens, branch.held_blocks), (60, 3));
    let early = engine.sessions().fork(&trunk, "early", Some(20)).await.expect("a free id");
    assert_eq!((early.tokens, early.held_tokens), (20, 16));
    assert_eq!(
        engine.stats().blocks_in_sessions,
        4,
        "no branch has the partial block of the trunk"
    );
    assert!(engine.sessions().close(&trunk));
    for other in 50..60 {
        complete(&engine, Request::tokens(tokens(other, 300)).max_tokens(5)).await;
    }
    let mut answers = Vec::new();
    for last in [1, 2] {
        let turn = Request::tokens([&history[..], &[last]].concat()).max_tokens(9);
        let answer = complete(&engine, turn.clone().session(&branch.id)).await;
        assert!(answer.finish.usage.cached_tokens >= 48);
        answers.push((turn, answer.token_ids));
        let rewound = engine.sessions().rewind(&branch.id, 60).await.expect("an idle session");
        assert_eq!((rewound.tokens, rewound.held_blocks), (60, 3));
    }
    let missing = engine.sessions().rewind(&branch.id, 61).await.expect_err("it has 60");
    assert!(missing.to_string().contains("tokens: expected at most 60"), "{missing}");
    engine.cache().flush().await.expect("it runs");
    for (turn, answer) in answers {
        assert_eq!(complete(&engine, turn).await.token_ids, answer);
    }
    let empty = engine.sessions().rewind(&branch.id, 0).await.expect("an idle session");
    assert_eq!((empty.tokens, empty.held_blocks), (0, 0));
    drop(backend);
    engine.audit().await.expect("consistent accounting");
}

/// Goal: a turn that sends only the new tokens equals one that sends the whole conversation, and a
/// turn that was prepared for other tokens than the session has is refused.
#[tokio::test]
async fn turns_can_have_only_what_is_new() {
    let (backend, _) = builder(64);
    let engine = backend.build().await.expect("valid settings");
    let (whole, new) = (open(&engine, "whole"), open(&engine, "new"));
    let mut conversation = Vec::new();
    for turn in 0..4 {
        let added = tokens(turn * 31, 20 + turn);
        conversation.extend(&added);
        let request = Request::tokens(conversation.clone()).max_tokens(7).session(&whole);
        let expected = complete(&engine, request).await;
        let appended = Request::tokens(added).max_tokens(7).session(&new).append();
        let tokenized = engine.tokenized(appended.clone()).await.expect("it is idle");
        assert_eq!(engine.prompt_tokens(&appended).await.expect("it is idle"), conversation);
        // A turn may also have been tokenized before. Its tokens are then appended only once.
        let request = if turn % 2 == 0 { appended } else { tokenized };
        let answer = complete(&engine, request).await;
        assert_eq!(answer.token_ids, expected.token_ids);
        assert_eq!(answer.finish.usage.prompt_tokens, conversation.len());
        conversation.extend(&answer.token_ids);
    }
    let append = || Request::tokens([1, 2]).session(&new).append();
    let stale = engine.tokenized(append()).await.expect("it is idle");
    complete(&engine, append().max_tokens(1)).await;
    assert!(matches!(refused(&engine, stale).await, SessionError::Busy { .. }));
    let stream = engine.generate(append().max_tokens(50)).await.expect("it is idle");
    assert!(matches!(refused(&engine, append()).await, SessionError::Busy { .. }));
    drop(stream);
    let unknown = Request::tokens([1]).session("nobody").append();
    assert!(matches!(refused(&engine, unknown).await, SessionError::Unknown { .. }));
    for wrong in [Request::tokens([1]).append(), Request::chat([]).session(&new).append()] {
        let error = engine.generate(wrong).await.expect_err("it cannot follow anything");
        assert!(error.to_string().contains("append"), "{error}");
    }
    ended(&engine).await;
    engine.audit().await.expect("consistent accounting");
}
