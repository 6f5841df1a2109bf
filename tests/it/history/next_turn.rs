//! Work between the turns of a conversation: what the next turn begins with is computed while the
//! engine is idle.

use std::time::Duration;

use stolon::Speculation;

use super::*;

/// A question, its answer, and the message after it with one of two texts.
struct Turn {
    request: Request,
    next: fn(&Completion, &str) -> Vec<ChatMessage>,
    /// Number of tokens that the next turn has in common with what was computed for the question and
    /// its answer.
    computed: fn(question: usize, answer: usize) -> usize,
}

fn question() -> ChatMessage {
    user("Think of a word, and look it up.")
}

/// An answer with reasoning, which the template strips before the user's next message.
fn reasoning() -> Turn {
    let format =
        AnswerFormat { reasoning: Some(ReasoningFormat::Think), ..AnswerFormat::default() };
    let regex = "<think>\n[a-z]{30,40}\n</think>\n\n[a-z]{30,40}";
    let request = request(&[question()], 3)
        .max_tokens(200)
        .grammar(Grammar::Regex(regex.to_owned()))
        .show_special_tokens(format.special_tokens())
        .answer_format(format);
    let next = |said: &Completion, text: &str| {
        let (_, word) = said.text.split_once("</think>\n\n").expect("the grammar has it");
        vec![question(), ChatMessage::assistant(word), user(text)]
    };
    Turn { request, next, computed: |question, _| question }
}

/// An answer that calls a function.
fn call() -> Turn {
    let format = AnswerFormat {
        tool_calls: Some(ToolCallFormat::Hermes),
        functions: [FunctionSchema::new("look", json!({}))].into(),
        ..AnswerFormat::default()
    };
    let regex = "<tool_call>\n\\{\"name\":\"look\",\"arguments\":\\{\"word\":\"[a-z]{6,9}\"\\}\\}\n\
                 </tool_call>";
    let request = request(&[question()], 5)
        .max_tokens(100)
        .grammar(Grammar::Regex(regex.to_owned()))
        .show_special_tokens(format.special_tokens())
        .answer_format(format);
    let next = |said: &Completion, text: &str| {
        let json = said.text.split('\n').nth(1).expect("the grammar has lines");
        let function = json.replace("\"arguments\":", "\"arguments\": ");
        let function = serde_json::from_str::<Value>(&function).expect("JSON");
        let call = json!({"id": "1", "type": "function", "function": function});
        let mut result = result("1");
        result.content = ChatMessage::user(text).content;
        vec![question(), calls(json!([call])), result]
    };
    // The last token is not computed, and the one that ends the answer is not in it.
    Turn { request, next, computed: |question, answer| question + answer - 1 }
}

async fn background(engine: &Engine, is_done: impl Fn(&stolon::EngineStats) -> bool) {
    for _ in 0..1000 {
        if is_done(&engine.stats()) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("not done: {:?}", engine.stats());
}

fn whole(tokens: usize) -> usize {
    tokens / BLOCK * BLOCK
}

/// Goal: after an answer, the engine computes the next turn up to the text of its last message, so
/// that this turn computes only the rest. Without the setting, it computes everything after the
/// answer, and after the question if the template strips the reasoning. The answers are those of an
/// engine without a cache. The work is in no count of requests.
#[tokio::test]
async fn the_next_turn_is_computed_in_advance() {
    for turn in [reasoning(), call()] {
        // The number of proposed tokens depends on measured times.
        let on = engine(|builder| builder.speculation(Speculation::off()).next_turn_prefill(true));
        let off = engine(|builder| builder.speculation(Speculation::off()));
        let (on, off) = (on.await, off.await);
        let cold = engine(|builder| builder.prefix_caching(false).history_bytes(0)).await;
        let said = answer(&on, turn.request.clone()).await;
        assert_eq!(said.token_ids, answer(&off, turn.request.clone()).await.token_ids);
        let messages = (turn.next)(&said, "Now another one.");
        let next = tokens(&on, &messages).await;
        let other = tokens(&on, &(turn.next)(&said, "42")).await;
        let common = next.iter().zip(&other).take_while(|(left, right)| left == right).count();

        background(&on, |stats| stats.background_finished == 1).await;
        let usage = said.finish.usage;
        let computed = (turn.computed)(usage.prompt_tokens, usage.completion_tokens);
        let stats = on.stats();
        let done = whole(common) - whole(computed);
        assert!(done >= BLOCK, "{common} {computed}");
        // The position after the last block is computed, too.
        assert_eq!(stats.background_tokens as usize, done + 1);
        assert_eq!((stats.requests, stats.background_dropped), (1, 0));
        assert_eq!(stats.computed_tokens, off.stats().computed_tokens);
        assert_eq!(stats.prompt_tokens as usize, usage.prompt_tokens);

        let request = request(&messages, 4).grammar(words());
        let [first, second] =
            [answer(&on, request.clone()).await, answer(&off, request.clone()).await];
        assert_eq!(first.finish.usage.cached_tokens, whole(common));
        assert_eq!(second.finish.usage.cached_tokens, whole(computed));
        let expected = answer(&cold, request.with_tokens(next)).await;
        for got in [first, second] {
            assert_eq!(got.token_ids, expected.token_ids);
            let bits = |it: &Completion| -> Vec<u32> {
                it.logprobs.iter().map(|token| token.logprob.to_bits()).collect()
            };
            assert_eq!(bits(&got), bits(&expected));
        }
        on.audit().await.expect("a consistent accounting");
        for engine in [on, off, cold] {
            engine.shutdown().await;
        }
    }
}

/// Goal: what was asked for as token ids that the engine has made of a conversation is prepared,
/// too. Nothing is prepared if the request is not to be cached, if there are several answers, or if
/// its prompt was evicted while other requests ran. The engine stops although the work waits.
#[tokio::test]
async fn only_what_is_of_use_is_prepared() {
    let engine = engine(|builder| builder.next_turn_prefill(true)).await;
    let Turn { request, .. } = reasoning();
    answer(&engine, request.clone().skip_writing_prefix_cache(true)).await;
    let streams = engine.generate_choices(request.clone(), 2).await.expect("they are submitted");
    for stream in streams {
        stream.collect_text().await.expect("an answer");
    }
    let long = Request::text("A long answer").max_tokens(10_000).ignore_eos(true);
    let mut busy = engine.generate(long).await.expect("it is submitted");
    busy.next().await;
    answer(&engine, request.clone()).await;
    engine.cache().flush().await.expect("it runs");
    drop(busy);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(engine.stats().background_tokens, 0);

    let tokenized = engine.tokenized(request.clone()).await.expect("it is tokenized");
    answer(&engine, tokenized).await;
    background(&engine, |stats| stats.background_finished == 1).await;
    let _busy = engine.generate(Request::text("More").max_tokens(10_000).ignore_eos(true)).await;
    answer(&engine, request).await;
    engine.shutdown().await;
}
