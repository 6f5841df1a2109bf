//! Conversations whose answers come back as text: the next prompt is made of the tokens that were
//! sampled.

#[path = "history/next_turn.rs"]
mod next_turn;
#[cfg(feature = "tiers")]
#[path = "history/stored.rs"]
mod stored;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use stolon::inspect::{InspectOptions, inspect};
use stolon::{
    Answer, AnswerFormat, ChatMessage, ChatOptions, Completion, Engine, EngineBuilder,
    FunctionSchema, Grammar, ModelSource, Otherwise, ReasoningFormat, Request, SamplingParams,
    TextModel, TokenizerSource, ToolCallFormat, ToolCallGrammar,
};
use stolon_backend::fake::{FakeBackend, FakeOptions};

/// Shows the reasoning of answers after the user's last message only, and the arguments of calls
/// with spaces.
const TEMPLATE: &str = "{%- set last = namespace(user=-1) -%}\
    {%- for message in messages -%}{%- if message.role == 'user' -%}\
    {%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}\
    {%- for message in messages -%}{{ '<|' + message.role + '|>\n' }}\
    {%- if message.reasoning_content and loop.index0 > last.user -%}\
    {{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{%- endif -%}\
    {{- message.content or '' -}}\
    {%- for call in message.tool_calls or [] -%}\
    {{ '<tool_call>\n{\"name\": \"' + call.function.name + '\", \"arguments\": ' }}\
    {{- call.function.arguments | tojson + '}\n</tool_call>' }}{%- endfor -%}\
    {{ '<|end|>\n' }}{%- endfor -%}\
    {%- if add_generation_prompt -%}{{ '<|assistant|>\n' }}{%- endif -%}\
    {#- tools -#}";

/// Number of positions in a block.
const BLOCK: usize = 4;

async fn engine(set: impl FnOnce(EngineBuilder) -> EngineBuilder) -> Engine {
    let path = format!("{}/crates/models/demo_model/text", env!("CARGO_MANIFEST_DIR"));
    let builder = Engine::builder().model(path).num_blocks(1024).block_size(BLOCK);
    let engine = set(builder.chat_template(TEMPLATE)).build().await;
    engine.expect("the demo model loads")
}

/// A request that is sampled at so high a temperature that words are spelled in unusual pieces.
fn request(messages: &[ChatMessage], seed: u64) -> Request {
    let sampling = SamplingParams { temperature: 50.0, seed: Some(seed), ..Default::default() };
    Request::chat(messages).sampling(sampling).max_tokens(48)
}

/// Words that are single tokens, if the text is tokenized.
fn words() -> Grammar {
    Grammar::Regex("a( (lighthouse|corridor|theatre|terrace|gallery|checkered)){3}".to_owned())
}

async fn answer(engine: &Engine, request: Request) -> Completion {
    let answer = engine.complete(request).await.expect("an answer");
    // An answer arrives before its last block is in the tree.
    engine.audit().await.expect("consistent accounting");
    answer
}

async fn tokens(engine: &Engine, messages: &[ChatMessage]) -> Vec<u32> {
    engine.prompt_tokens(&Request::chat(messages)).await.expect("it is rendered")
}

/// The tokens of the text of a conversation.
async fn of_text(engine: &Engine, messages: &[ChatMessage]) -> Vec<u32> {
    let text = engine.render_chat(messages, None).expect("it is rendered");
    engine.tokenize(text, false).await.expect("it is tokenized")
}

/// The tokens of an answer without the token that ends it.
fn without_end(answer: &Completion) -> &[u32] {
    answer.token_ids.split_last().expect("it ends with a token").1
}

fn user(text: &str) -> ChatMessage {
    ChatMessage::user(text)
}

/// A message that repeats calls, with their arguments as given.
fn calls(calls: Value) -> ChatMessage {
    let mut message = ChatMessage::assistant("");
    message.content = None;
    message.extra.insert("tool_calls".to_owned(), calls);
    message
}

fn result(id: &str) -> ChatMessage {
    let mut message = ChatMessage::new("tool", "it is there");
    message.extra.insert("tool_call_id".to_owned(), id.into());
    message
}

/// Goal: each prompt of a conversation consists of the last prompt, the sampled tokens and the new
/// text, so that everything that was computed is cached; its text is the same as when it is
/// tokenized again; and the answer is that of an engine without a cache for the same tokens.
#[tokio::test]
async fn a_conversation_continues_with_the_tokens_that_were_sampled() {
    let warm = engine(|builder| builder).await;
    let cold = engine(|builder| builder.prefix_caching(false).history_bytes(0)).await;
    let mut messages = vec![user("Write three words.")];
    let (mut known, mut differs) = (Vec::new(), 0);
    for turn in 0..8 {
        let prompt = tokens(&warm, &messages).await;
        assert!(prompt.starts_with(&known), "turn {turn}");
        differs += usize::from(prompt != of_text(&warm, &messages).await);
        let text = warm.detokenize(&prompt, false).expect("it has a tokenizer");
        assert_eq!(text, warm.render_chat(&messages, None).expect("it is rendered"));
        let request = request(&messages, turn).grammar(words());
        let said = answer(&warm, request.clone()).await;
        let cached = said.finish.usage.cached_tokens;
        assert!(cached >= known.len() / BLOCK * BLOCK, "turn {turn}: {cached} of {}", known.len());
        assert_eq!(said.finish.usage.prompt_tokens, prompt.len());
        let same = answer(&cold, request.with_tokens(prompt.clone())).await;
        assert_eq!(said.token_ids, same.token_ids, "turn {turn}");
        known = [&prompt, without_end(&said)].concat();
        messages.push(ChatMessage::assistant(said.text));
        messages.push(user("Three more."));
    }
    assert!(differs > 4, "the sampled tokens of {differs} prompts differ from those of the text");
    let again = tokens(&cold, &messages).await;
    assert_eq!(again, of_text(&cold, &messages).await, "without a history, text is tokenized");
    warm.shutdown().await;
    cold.shutdown().await;
}

/// Goal: a retry, a second answer to the same question and an edited answer each get the tokens
/// that are right for them.
#[tokio::test]
async fn branches_of_a_conversation_have_their_own_tokens() {
    let engine = engine(|builder| builder).await;
    let question = [user("Write three words.")];
    let prompt = tokens(&engine, &question).await;
    let several = request(&question, 7).grammar(words());
    let streams = engine.generate_choices(several, 3).await.expect("they are submitted");
    let mut answers = Vec::new();
    for stream in streams {
        answers.push(stream.collect_text().await.expect("an answer"));
    }
    for said in &answers {
        let messages =
            [question[0].clone(), ChatMessage::assistant(said.text.clone()), user("More.")];
        let known = [&prompt, without_end(said)].concat();
        assert!(tokens(&engine, &messages).await.starts_with(&known));
        let edited = ChatMessage::assistant(format!("{}.", said.text));
        let messages = [question[0].clone(), edited, user("More.")];
        assert_eq!(tokens(&engine, &messages).await, of_text(&engine, &messages).await);
    }
    engine.shutdown().await;
}

/// Goal: reasoning that the client leaves out is part of the next prompt where the template shows
/// it, as sampled, and is not where the template strips it.
#[tokio::test]
async fn reasoning_that_the_client_left_out_is_given_back() {
    let engine = engine(|builder| builder).await;
    let format =
        AnswerFormat { reasoning: Some(ReasoningFormat::Think), ..AnswerFormat::default() };
    let regex = "<think>\n[a-z]{6,12}\n</think>\n\n[a-z]{6,12}";
    let question = [user("Think of a word.")];
    let asked = request(&question, 3)
        .grammar(Grammar::Regex(regex.to_owned()))
        .answer_format(format.clone())
        .show_special_tokens(format.special_tokens());
    let prompt = tokens(&engine, &question).await;
    let said = answer(&engine, asked).await;
    let (_, word) = said.text.split_once("</think>\n\n").expect("the grammar has it");
    let known = [&prompt, without_end(&said)].concat();
    // In a turn that continues, a template shows the reasoning.
    let answered = [question[0].clone(), ChatMessage::assistant(word), result("1")];
    assert!(tokens(&engine, &answered).await.starts_with(&known));
    // After the user's next message, it does not.
    let next = [question[0].clone(), ChatMessage::assistant(word), user("Another.")];
    assert_eq!(tokens(&engine, &next).await, of_text(&engine, &next).await);
    // Other reasoning is not what was sampled.
    let mut other = answered.clone();
    other[1].extra.insert("reasoning_content".to_owned(), "hm".into());
    assert_eq!(tokens(&engine, &other).await, of_text(&engine, &other).await);
    engine.shutdown().await;
}

/// Goal: calls are compared as JSON, so that the sampled tokens are used although client and
/// template write the arguments otherwise; a call that was changed is not the one that was sampled.
#[tokio::test]
async fn calls_are_the_same_with_other_spaces() {
    let engine = engine(|builder| builder).await;
    let function = FunctionSchema::new("look", json!({}));
    let format = AnswerFormat {
        tool_calls: Some(ToolCallFormat::Hermes),
        functions: [function].into(),
        ..AnswerFormat::default()
    };
    let regex = "<tool_call>\n\\{\"name\":\"look\",\"arguments\":\\{\"page\":[1-9][0-9]{2},\
                 \"word\":\"[a-z]{6,9}\"\\}\\}\n</tool_call>";
    let question = [user("Look it up.")];
    let asked = request(&question, 5)
        .max_tokens(100)
        .grammar(Grammar::Regex(regex.to_owned()))
        .answer_format(format.clone())
        .show_special_tokens(format.special_tokens());
    let prompt = tokens(&engine, &question).await;
    let said = answer(&engine, asked).await;
    let json = said.text.split('\n').nth(1).expect("the grammar has lines");
    let mut arguments = serde_json::from_str::<Value>(json).expect("JSON")["arguments"].take();
    let conversation = |arguments: String| {
        let function = json!({"name": "look", "arguments": arguments});
        let call = json!({"id": "1", "type": "function", "function": function});
        [question[0].clone(), calls(json!([call])), result("1")]
    };
    let known = [&prompt, without_end(&said)].concat();
    let (word, page) = (arguments["word"].to_string(), arguments["page"].clone());
    let spaced = format!("{{ \"word\" : {word} ,\n  \"page\" : {page} }}");
    for same in [arguments.to_string(), spaced] {
        let messages = conversation(same);
        let next = tokens(&engine, &messages).await;
        assert!(next.starts_with(&known));
        assert_ne!(next, of_text(&engine, &messages).await);
        // What follows is the text that follows the call in the template.
        let rest = engine.detokenize(&next[known.len()..], false).expect("it has a tokenizer");
        assert_eq!(rest, "<|end|>\n<|tool|>\nit is there<|end|>\n<|assistant|>\n");
    }
    arguments["page"] = 7.into();
    let other = conversation(arguments.to_string());
    assert_eq!(tokens(&engine, &other).await, of_text(&engine, &other).await);
    engine.shutdown().await;
}

/// Goal: what one tenant was answered is unknown to another one, to another salt, and to requests
/// that are not to be cached; and an engine with little memory forgets what is oldest.
#[tokio::test]
async fn answers_are_known_to_their_own_client_and_within_the_memory() {
    let engine = engine(|builder| builder.history_bytes(4 << 10)).await;
    let ask = async |question: &str, set: &dyn Fn(Request) -> Request| {
        let question = [user(question)];
        let said = answer(&engine, set(request(&question, 9).grammar(words()))).await;
        [question[0].clone(), ChatMessage::assistant(said.text), user("More.")]
    };
    let is_known = async |messages: &[ChatMessage], set: &dyn Fn(Request) -> Request| {
        let request = set(Request::chat(messages));
        let prompt = engine.prompt_tokens(&request).await.expect("it is rendered");
        prompt != of_text(&engine, messages).await
    };
    let own: &dyn Fn(Request) -> Request = &|request| request.tenant("a").cache_salt("s");
    let others: [&dyn Fn(Request) -> Request; 4] = [
        &|request| request,
        &|request| request.tenant("b").cache_salt("s"),
        &|request| request.tenant("a"),
        &|request| request.tenant("a").cache_salt("t"),
    ];
    let messages = ask("Write three words.", own).await;
    assert!(is_known(&messages, own).await);
    for other in others {
        assert!(!is_known(&messages, other).await);
    }
    let secret = ask("Keep it.", &|request| request.skip_writing_prefix_cache(true)).await;
    assert!(!is_known(&secret, &|request| request).await);
    for index in 0..8 {
        ask(&format!("Write other words {index}."), own).await;
    }
    assert!(!is_known(&messages, own).await, "it is forgotten");
    let last = ask("Write last words.", own).await;
    assert!(is_known(&last, own).await);
    engine.shutdown().await;
}

/// Goal: a request with the tokens that `Engine::tokenized` returned is remembered as the
/// conversation that they are of.
#[tokio::test]
async fn a_conversation_that_was_tokenized_before_is_remembered() {
    let engine = engine(|builder| builder).await;
    let options = ChatOptions::default();
    let question = [user("Write three words.")];
    let asked = request(&question, 1).grammar(words()).chat_options(options);
    let asked = engine.tokenized(asked).await.expect("it is rendered");
    let said = answer(&engine, asked).await;
    let messages = [question[0].clone(), ChatMessage::assistant(said.text.clone()), user("More.")];
    let known = [&tokens(&engine, &question).await, without_end(&said)].concat();
    assert!(tokens(&engine, &messages).await.starts_with(&known));
    engine.shutdown().await;
}

/// A family of models: its chat template, and the tokens of its vocabulary that the template uses,
/// of which the first ends an answer.
struct Family {
    template: &'static str,
    tokens: &'static [&'static str],
}

/// Templates in the style of Qwen, Gemma, Mistral and Llama.
const FAMILIES: [Family; 4] = [
    Family {
        template: include_str!(
            "../../crates/models/text/tests/fixtures/chat_templates/think_style.jinja"
        ),
        tokens: &["<|im_end|>", "<|im_start|>"],
    },
    Family {
        template: include_str!(
            "../../crates/models/text/tests/fixtures/chat_templates/turn_style.jinja"
        ),
        tokens: &["<end_of_turn>", "<start_of_turn>"],
    },
    Family {
        template: include_str!(
            "../../crates/models/text/tests/fixtures/chat_templates/bracket_style.jinja"
        ),
        tokens: &["</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
    },
    Family {
        template: include_str!(
            "../../crates/models/text/tests/fixtures/chat_templates/header_style.jinja"
        ),
        tokens: &["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
    },
];

impl Family {
    /// An engine without a model, with the demo model's tokenizer and the tokens of the family.
    async fn engine(&self) -> Engine {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/crates/models/demo_model/text");
        let demo = inspect(&ModelSource::Directory(path.into()), &InspectOptions::default());
        let mut source = demo.expect("a model").text.expect("it has a tokenizer");
        let bytes = std::fs::read(format!("{path}/tokenizer.json")).expect("it is committed");
        let mut json: Value = serde_json::from_slice(&bytes).expect("JSON");
        let first = json["model"]["vocab"].as_object().expect("an object").len();
        for (index, token) in self.tokens.iter().enumerate() {
            let added = json!({"id": first + index, "content": token, "special": true,
                               "single_word": false, "lstrip": false, "rstrip": false,
                               "normalized": false});
            json["added_tokens"].as_array_mut().expect("a list").push(added);
        }
        let bytes = json.to_string().into_bytes().into();
        source.tokenizer = TokenizerSource::Json { file: "tokenizer.json".to_owned(), bytes };
        source.tokenizer_config = Some(json!({"eos_token": self.tokens[0], "bos_token": ""}));
        source.chat_template = Some(self.template.to_owned());
        let text = TextModel::new(&source, &[first as u32]).expect("a tokenizer");
        let options = FakeOptions {
            vocab_size: first + self.tokens.len(),
            max_positions: 1 << 13,
            block_size: BLOCK,
            block_count: 1 << 13,
            ..FakeOptions::default()
        };
        let builder = Engine::builder().backend("fake", Box::new(FakeBackend::new(options)));
        builder.text_model(text).build().await.expect("an engine")
    }
}

/// A client's message for an answer, with the arguments of calls as it has parsed and written them,
/// and without the reasoning.
fn from_client(answer: &Answer, turn: usize) -> ChatMessage {
    let mut message = ChatMessage::assistant(answer.text.clone());
    let calls = answer.calls.iter().enumerate().map(|(index, call)| {
        let arguments: Value = serde_json::from_str(&call.arguments).expect("JSON");
        let arguments = serde_json::to_string_pretty(&arguments).expect("JSON");
        let function = json!({"name": call.name, "arguments": arguments});
        json!({"id": format!("call{turn:04}{index}"), "type": "function", "function": function})
    });
    let calls: Vec<Value> = calls.collect();
    if !calls.is_empty() {
        message.content = None;
        message.extra.insert("tool_calls".to_owned(), Value::Array(calls));
    }
    message
}

/// Goal: with the templates of four families, an agent's turns of text, reasoning and calls continue
/// with the sampled tokens wherever the template shows what was sampled, and the text of each
/// prompt says the same as the template's. Reasoning that a template strips, and the ids of calls
/// that a template prints and the model has not sampled, are the template's.
#[tokio::test]
async fn templates_of_well_known_families_continue_as_sampled() {
    let mut continued = Vec::new();
    for family in &FAMILIES {
        let engine = family.engine().await;
        let template = engine.chat_template().expect("a template");
        let parameters = json!({"type": "object", "required": ["page", "word"], "properties":
            {"page": {"type": "integer", "minimum": 1, "maximum": 9}, "word": {"enum": ["corridor"]}}});
        let functions = vec![FunctionSchema::new("look", parameters.clone())];
        let options = ChatOptions {
            tools: vec![json!({"type": "function", "function": {"name": "look",
                        "description": "Looks.", "parameters": parameters}})],
            ..ChatOptions::default()
        };
        let tool_use = template.tool_use(&options).expect("a template");
        let reasoning = ReasoningFormat::of_template(family.template);
        let format = AnswerFormat {
            reasoning,
            tool_calls: Some(tool_use.format),
            functions: functions.clone().into(),
            ..AnswerFormat::default()
        };
        let call = Grammar::ToolCalls(ToolCallGrammar {
            format: tool_use.format,
            functions,
            best_effort: Vec::new(),
            single: true,
            otherwise: Otherwise::Nothing,
        });
        let mut messages = vec![ChatMessage::system("Be brief."), user("Where is the corridor?")];
        let (mut known, mut hits) = (Vec::new(), String::new());
        for turn in 0..6 {
            let grammar = match (turn % 3, reasoning) {
                (0, _) => call.clone(),
                (1, Some(_)) => Grammar::Regex(
                    "<think>\n[a-z]{4,9} corridor\n</think>\n\na (terrace|gallery)".to_owned(),
                ),
                _ => words(),
            };
            let asked = request(&messages, turn as u64)
                .chat_options(options.clone())
                .max_tokens(200)
                .grammar(grammar)
                .answer_format(format.clone())
                .show_special_tokens(format.special_tokens());
            let prompt = engine.prompt_tokens(&asked).await.expect("it is rendered");
            if turn > 0 {
                hits.push(if prompt.starts_with(&known) { '+' } else { '-' });
            }
            let said = answer(&engine, asked).await;
            let parsed = Answer::parse(&format, &said.text);
            assert_eq!(parsed.calls.len(), usize::from(turn % 3 == 0), "{}", said.text);
            known = [&prompt, without_end(&said)].concat();
            let message = from_client(&parsed, turn);
            let next = match message.extra.get("tool_calls") {
                Some(calls) => result(calls[0]["id"].as_str().expect("an id")),
                None => user("And the terrace?"),
            };
            messages.extend([message, next]);
        }
        continued.push(hits);
        engine.shutdown().await;
    }
    // After a call, after reasoning (which Qwen strips when the user goes on), after a text, and again.
    // Mistral prints ids and moves the tools to the last question of the user, unless it is the same.
    assert_eq!(continued, ["+-++-", "+++++", "----+", "+++++"]);
}

/// Goal: over many turns of many conversations, with retries, branches, forgotten answers and an
/// evicted cache, each prompt begins with the tokens of the turn that it continues, and each answer
/// is that of an engine without a cache for the same tokens.
#[tokio::test]
#[ignore = "takes minutes; .ci/deep runs it optimized"]
async fn ten_thousand_turns_continue_with_the_tokens_that_were_sampled() {
    /// Number of conversations at a time, which do not fit into the cache together.
    const CONVERSATIONS: usize = 48;
    const TURNS: usize = 10_000;
    let warm = engine(|builder| builder.num_blocks(2048)).await;
    let cold = engine(|builder| builder.prefix_caching(false).history_bytes(0)).await;
    let mut random = StdRng::seed_from_u64(7);
    // The messages of each conversation, with the tokens of prompt and answer after each turn.
    let mut conversations: Vec<Vec<(Vec<ChatMessage>, Vec<u32>)>> = vec![Vec::new(); CONVERSATIONS];
    let (mut known_turns, mut differs, mut cached) = (0, 0, 0);
    for turn in 0..TURNS {
        let conversation = &mut conversations[random.random_range(0..CONVERSATIONS)];
        // A conversation begins again when it is long; a client may go back some turns.
        if conversation.len() > 12 {
            conversation.clear();
        } else if random.random_bool(0.1) {
            let kept = random.random_range(0..=conversation.len());
            conversation.truncate(kept);
        }
        let (mut messages, known) = conversation.last().cloned().unwrap_or_default();
        messages.push(user(&format!("Question {}.", random.random_range(0..1000))));
        let request = request(&messages, turn as u64).grammar(words()).max_tokens(24);
        let prompt = tokens(&warm, &messages).await;
        assert!(prompt.starts_with(&known), "turn {turn}");
        known_turns += usize::from(!known.is_empty());
        differs += usize::from(prompt != of_text(&warm, &messages).await);
        let said = answer(&warm, request.clone()).await;
        cached += said.finish.usage.cached_tokens;
        let same = answer(&cold, request.with_tokens(prompt.clone())).await;
        assert_eq!(said.token_ids, same.token_ids, "turn {turn}");
        let is_whole = said.finish.reason == stolon::FinishReason::Stop;
        let sampled = if is_whole { without_end(&said) } else { &said.token_ids };
        let known = [&prompt, sampled].concat();
        messages.push(ChatMessage::assistant(said.text));
        conversation.push((messages, known));
    }
    println!(
        "{known_turns} turns continued, {differs} prompts differ from their text, {cached} tokens cached"
    );
    assert!(known_turns > TURNS / 2 && differs > TURNS / 2);
    assert!(warm.stats().evictions > 0, "the cache was too large");
    warm.audit().await.expect("the accounting is right");
    warm.shutdown().await;
    cold.shutdown().await;
}
