//! Why a prompt was not cached: conversations of an agent with one planted cause each, and the
//! reason that the engine names.

use serde_json::{Value, json};
use stolon::{
    AnswerFormat, CacheMiss, ChatMessage, Completion, Engine, EngineBuilder, MissReason,
    ReasoningFormat, Request,
};

/// Strips the reasoning of answers before the user's last message, prints the tools and a variable
/// at the beginning.
const TEMPLATE: &str = "{%- set last = namespace(user=-1) -%}\
    {%- for message in messages -%}{%- if message.role == 'user' -%}\
    {%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}\
    {{- '<|system|>\n' + (today or '') + '\n' -}}\
    {%- for tool in tools or [] -%}{{- tool | tojson + '\n' -}}{%- endfor -%}{{- '<|end|>\n' -}}\
    {%- for message in messages -%}{{ '<|' + message.role + '|>\n' }}\
    {%- if message.reasoning_content and loop.index0 > last.user -%}\
    {{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{%- endif -%}\
    {{- message.content or '' -}}\
    {%- for call in message.tool_calls or [] -%}\
    {{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{%- endfor -%}\
    {{ '<|end|>\n' }}{%- endfor -%}\
    {%- if add_generation_prompt -%}{{ '<|assistant|>\n' }}{%- endif -%}";

async fn engine(set: impl FnOnce(EngineBuilder) -> EngineBuilder) -> Engine {
    let path = format!("{}/crates/models/demo_model/text", env!("CARGO_MANIFEST_DIR"));
    let builder = Engine::builder().model(path).num_blocks(512).block_size(4);
    set(builder.chat_template(TEMPLATE)).build().await.expect("the demo model loads")
}

/// A page of text that differs by `number`.
fn page(number: usize) -> String {
    let lines = (0..12).map(|line| format!("The room {line} of house {number} is on the left. "));
    lines.collect()
}

fn tool(name: &str) -> Value {
    let parameters = json!({"type": "object", "properties": {"page": {"type": "integer"}}});
    json!({"type": "function", "function": {"name": name, "parameters": parameters}})
}

/// A conversation of an agent: instructions, and two turns of the user with their answers.
fn conversation() -> Vec<ChatMessage> {
    vec![
        ChatMessage::system(page(0)),
        ChatMessage::user(page(1)),
        ChatMessage::assistant(page(2)),
        ChatMessage::user(page(3)),
        ChatMessage::assistant(page(4)),
        ChatMessage::user(page(5)),
    ]
}

fn request(messages: &[ChatMessage]) -> Request {
    Request::chat(messages).tools(json!([tool("look")])).max_tokens(8)
}

async fn run(engine: &Engine, request: Request) -> Completion {
    engine.complete(request).await.expect("an answer")
}

async fn explain(engine: &Engine, request: &Request) -> Option<CacheMiss> {
    engine.cache().explain(request).await.expect("it is rendered")
}

/// Runs the conversation, and explains a request for the conversation as `plant` has changed it.
async fn planted(plant: impl FnOnce(&mut Vec<ChatMessage>)) -> CacheMiss {
    let engine = engine(|builder| builder).await;
    let mut messages = conversation();
    run(&engine, request(&messages)).await;
    plant(&mut messages);
    let miss = explain(&engine, &request(&messages)).await.expect("a miss");
    engine.shutdown().await;
    miss
}

/// Checks the reason, the message that it is about, and that tokens are lost, but not those before
/// the cause.
fn check(miss: &CacheMiss, reason: MissReason, message: Option<(usize, &str)>) {
    assert_eq!(miss.reason, reason, "{miss:?}");
    let named = miss.message.as_ref().map(|message| (message.index, message.role.as_str()));
    assert_eq!(named, message, "{miss:?}");
    assert!(miss.lost_tokens >= 100, "{miss:?}");
    assert!(miss.cached_tokens + miss.lost_tokens <= miss.prompt_tokens, "{miss:?}");
    assert!(miss.lost_time.is_some(), "{miss:?}");
}

/// Goal: a message that was changed, inserted or removed is named with its index and role, and the
/// texts on both sides begin where they differ.
#[tokio::test]
async fn changed_messages_are_named() {
    let miss = planted(|messages| messages[1] = ChatMessage::user(page(9))).await;
    check(&miss, MissReason::MessageChanged, Some((1, "user")));
    assert!(miss.prompt_text.trim_start().starts_with('9'), "{miss:?}");
    assert!(miss.earlier_text.trim_start().starts_with('1'), "{miss:?}");
    assert!(miss.cached_tokens <= miss.common_tokens && miss.common_tokens < miss.prompt_tokens);

    let time = |now: &str| ChatMessage::system(format!("It is {now}. {}", page(0)));
    let miss = planted(|messages| messages[0] = time("noon")).await;
    check(&miss, MissReason::MessageChanged, Some((0, "system")));

    let reminder = ChatMessage::user("Remember the rules.");
    let miss = planted(|messages| messages.insert(1, reminder)).await;
    check(&miss, MissReason::MessageInserted, Some((1, "user")));

    let miss = planted(|messages| drop(messages.remove(1))).await;
    check(&miss, MissReason::MessageRemoved, Some((1, "user")));

    // A client that cuts the oldest turns off.
    let miss = planted(|messages| drop(messages.drain(1..3))).await;
    check(&miss, MissReason::MessageRemoved, Some((1, "user")));

    let miss = planted(|messages| messages[2] = ChatMessage::assistant(page(9))).await;
    check(&miss, MissReason::AnswerChanged, Some((2, "assistant")));
}

/// Goal: a call whose arguments are another JSON text of the same value is no cause, so a message
/// after it that has changed is named.
#[tokio::test]
async fn the_form_of_arguments_is_no_cause() {
    let call = |arguments: &str| -> ChatMessage {
        let function = json!({"name": "look", "arguments": arguments});
        let calls = json!([{"id": "1", "type": "function", "function": function}]);
        serde_json::from_value(json!({"role": "assistant", "content": "", "tool_calls": calls}))
            .expect("a message")
    };
    let engine = engine(|builder| builder).await;
    let mut messages = conversation();
    messages[2] = call(r#"{"page": 1, "line": 2}"#);
    run(&engine, request(&messages)).await;
    messages[2] = call("{\n  \"line\": 2,\n  \"page\": 1\n}");
    messages[3] = ChatMessage::user(page(9));
    let miss = explain(&engine, &request(&messages)).await.expect("a miss");
    check(&miss, MissReason::MessageChanged, Some((3, "user")));
    engine.shutdown().await;
}

/// Goal: other tools, in any order, and other variables of the template are told from messages.
#[tokio::test]
async fn changed_tools_and_variables_are_named() {
    let engine = engine(|builder| builder).await;
    let messages = conversation();
    run(&engine, request(&messages)).await;
    let other = request(&messages).tools(json!([tool("look"), tool("write")]));
    check(&explain(&engine, &other).await.expect("a miss"), MissReason::ToolsChanged, None);
    let dated = request(&messages).template_variable("today", "Sunday");
    check(&explain(&engine, &dated).await.expect("a miss"), MissReason::OptionsChanged, None);
    engine.shutdown().await;
}

/// Goal: the same prompt with another salt is named as such, and nothing is told to another tenant.
#[tokio::test]
async fn other_salts_are_named_and_other_tenants_are_not() {
    let engine = engine(|builder| builder).await;
    let messages = conversation();
    run(&engine, request(&messages).tenant("a")).await;
    let salted = request(&messages).tenant("a").cache_salt("s");
    check(&explain(&engine, &salted).await.expect("a miss"), MissReason::OtherSalt, None);
    let other = request(&messages).tenant("b").cache_salt("s");
    let miss = explain(&engine, &other).await.expect("nothing is cached");
    assert_eq!((miss.reason, miss.lost_tokens, miss.common_tokens), (MissReason::New, 0, 0));
    assert_eq!(miss.earlier_text, "");
    engine.shutdown().await;
}

/// Goal: a prompt that was evicted is told from one that was never computed to its end.
#[tokio::test]
async fn evicted_prompts_are_named() {
    let engine = engine(|builder| builder).await;
    let messages = conversation();
    let asked = request(&messages);
    run(&engine, asked.clone()).await;
    assert_eq!(explain(&engine, &asked).await, None, "all of it is cached");
    engine.cache().evict_prefix(&asked).await.expect("the engine runs");
    check(&explain(&engine, &asked).await.expect("a miss"), MissReason::Evicted, None);
    run(&engine, asked.clone()).await;
    let changed = [messages, vec![ChatMessage::assistant(page(7)), ChatMessage::user(page(8))]];
    let changed = request(&changed.concat());
    drop(engine.generate(changed.clone()).await.expect("it is submitted"));
    while engine.stats().running + engine.stats().waiting > 0 {
        tokio::task::yield_now().await;
    }
    if let Some(miss) = explain(&engine, &changed).await {
        check(&miss, MissReason::NotComputed, None);
    }
    engine.shutdown().await;
}

/// Goal: a template that strips the reasoning of earlier turns is the cause, not the client; other
/// reasoning, or another answer, is the client's.
#[tokio::test]
async fn changed_answers_are_told_from_stripped_reasoning() {
    let engine = engine(|builder| builder).await;
    let format =
        AnswerFormat { reasoning: Some(ReasoningFormat::Think), ..AnswerFormat::default() };
    let thinks = stolon::Grammar::Regex(format!("<think>\n{}\n</think>\n\nleft", page(6)));
    let first = run(&engine, request(&conversation())).await;
    let turn = vec![ChatMessage::assistant(first.text), ChatMessage::user(page(9))];
    let conversation = [conversation(), turn].concat();
    let asked = request(&conversation)
        .grammar(thinks)
        .answer_format(format.clone())
        .show_special_tokens(format.special_tokens())
        .max_tokens(600);
    run(&engine, asked).await;
    let answered = |answer: ChatMessage, next: ChatMessage| {
        request(&[conversation.clone(), vec![answer, next]].concat())
    };
    let left = || ChatMessage::assistant("left");
    let with = |reasoning: &str| {
        let mut message = left();
        message.extra.insert("reasoning_content".to_owned(), reasoning.into());
        message
    };
    let mut result = ChatMessage::new("tool", page(8));
    result.extra.insert("tool_call_id".to_owned(), "1".into());
    // The template shows the reasoning, which is given back.
    let kept = explain(&engine, &answered(left(), result.clone())).await.expect("a new message");
    assert_eq!((kept.reason, kept.lost_tokens), (MissReason::New, 0), "{kept:?}");
    let stripped = explain(&engine, &answered(left(), ChatMessage::user(page(8)))).await;
    check(&stripped.expect("a miss"), MissReason::TemplateChanged, None);
    let other = explain(&engine, &answered(with("No idea."), result.clone())).await;
    check(&other.expect("a miss"), MissReason::ReasoningChanged, Some((8, "assistant")));
    let other = explain(&engine, &answered(ChatMessage::assistant("right"), result)).await;
    check(&other.expect("a miss"), MissReason::AnswerChanged, Some((8, "assistant")));
    engine.shutdown().await;
}

/// Goal: prompts of tokens and of text are explained, too: another text, or other tokens of the
/// same text.
#[tokio::test]
async fn prompts_that_are_no_conversations_are_explained() {
    let engine = engine(|builder| builder).await;
    let text = [page(0), page(1)].concat();
    run(&engine, Request::text(&text).max_tokens(4)).await;
    let other = Request::text([page(0), page(2)].concat());
    check(&explain(&engine, &other).await.expect("a miss"), MissReason::TextChanged, None);
    // The same text, one byte a token from its second half on.
    let mut tokens = engine.tokenize(page(0), true).await.expect("it has a tokenizer");
    for letter in page(1).chars() {
        tokens.extend(engine.tokenize(letter, false).await.expect("it has a tokenizer"));
    }
    let miss = explain(&engine, &Request::tokens(tokens)).await.expect("a miss");
    check(&miss, MissReason::OtherTokens, None);
    engine.shutdown().await;
}

/// Goal: requests that were submitted are counted by reason and listed, and their streams have the
/// same explanation; looking at a prompt counts nothing.
#[tokio::test]
async fn misses_of_requests_are_counted() {
    let engine = engine(|builder| builder).await;
    let mut messages = conversation();
    run(&engine, request(&messages)).await;
    messages[1] = ChatMessage::user(page(9));
    let changed = request(&messages).tenant("a");
    assert!(explain(&engine, &changed).await.is_some());
    let stream = engine.generate(request(&messages)).await.expect("it is submitted");
    let miss = stream.cache_miss().cloned().expect("a miss");
    check(&miss, MissReason::MessageChanged, Some((1, "user")));
    stream.collect_text().await.expect("an answer");
    let logged = engine.cache().misses();
    assert_eq!(logged.len(), 1, "the first prompt was new, and has lost nothing");
    assert_eq!((&*logged[0].miss, &logged[0].tenant), (&miss, &None));
    for count in engine.cache().miss_counts() {
        let expected = match count.reason {
            MissReason::New => (1, 0),
            MissReason::MessageChanged => (1, miss.lost_tokens as u64),
            _ => (0, 0),
        };
        assert_eq!((count.requests, count.lost_tokens), expected, "{:?}", count.reason);
    }
    engine.shutdown().await;
}

/// Goal: an engine that remembers nothing explains nothing.
#[tokio::test]
async fn an_engine_without_a_history_explains_nothing() {
    let engine = engine(|builder| builder.history_bytes(0)).await;
    assert_eq!(explain(&engine, &request(&conversation())).await, None);
    engine.shutdown().await;
}
