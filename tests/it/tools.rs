//! Conversations in which a model calls functions of the program.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde::Deserialize;
use serde_json::{Value, json};
use stolon::schemars::JsonSchema;
use stolon::{
    AnswerRules, ChatMessage, Completion, Engine, Error, FinishReason, LogitsProcessor,
    MessageContent, Request, SamplingError, Tool, ToolChoice, ToolSpec,
};

#[derive(Deserialize, JsonSchema)]
#[schemars(crate = "stolon::schemars")]
struct Place {
    city: String,
}

/// The model `demo`, whose chat template does not support functions.
async fn engine() -> Engine {
    let builder = Engine::builder().model("demo").kv_memory(32 << 20).block_size(16).threads(1);
    builder.build().await.expect("the engine starts")
}

/// Makes the answers of a model, one after the other.
struct Script {
    answers: Vec<Vec<u32>>,
    begun: AtomicUsize,
}

impl Script {
    async fn new(engine: &Engine, answers: &[&str]) -> Script {
        let end = engine.model_info().eos_token_ids[0];
        let mut tokens = Vec::new();
        for answer in answers {
            let mut answer = engine.tokenize(*answer, false).await.expect("it is text");
            answer.push(end);
            tokens.push(answer);
        }
        Script { answers: tokens, begun: AtomicUsize::new(0) }
    }
}

impl LogitsProcessor for Script {
    fn process(&self, output: &[u32], logits: &mut [f32]) -> Result<(), SamplingError> {
        if output.is_empty() {
            self.begun.fetch_add(1, Ordering::Relaxed);
        }
        let answer = &self.answers[self.begun.load(Ordering::Relaxed) - 1];
        let next = answer[output.len()] as usize;
        let excluded = |(token, logit): (usize, &mut f32)| {
            if token != next {
                *logit = f32::NEG_INFINITY;
            }
        };
        logits.iter_mut().enumerate().for_each(excluded);
        Ok(())
    }
}

fn question() -> [ChatMessage; 1] {
    [ChatMessage::user("What is the weather in Lima and in Oslo?")]
}

fn call(city: &str) -> String {
    format!(
        "<tool_call>\n{{\"name\": \"weather\", \"arguments\": {{\"city\": \"{city}\"}}}}\n</tool_call>"
    )
}

/// A function that knows one city, and the number of its calls.
fn weather() -> (Tool, Arc<AtomicUsize>) {
    let calls = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&calls);
    let weather = Tool::new_async("weather", "The weather in a city.", move |place: Place| {
        count.fetch_add(1, Ordering::Relaxed);
        async move {
            match place.city.as_str() {
                "Lima" => Ok("sunny".to_owned()),
                other => Err(format!("{other:?} is not known")),
            }
        }
    });
    (weather, calls)
}

fn text(message: &ChatMessage) -> &str {
    match &message.content {
        Some(MessageContent::Text(text)) => text,
        _ => "",
    }
}

/// Goal: the model gets the results of its calls, and the errors, until it has an answer; and only
/// what is new in each round is computed.
#[tokio::test(flavor = "multi_thread")]
async fn functions_are_called_until_there_is_an_answer() {
    let engine = engine().await;
    let both = format!("I look. {}\n{}", call("Lima"), call("Oslo"));
    let script = Script::new(&engine, &[&both, &call("Lima"), "Sunny in Lima."]).await;
    let request = Request::chat(question()).max_tokens(200).logits_processor(script);
    let (tool, calls) = weather();
    let tools = [tool];
    let run = engine.run_tools(request, &tools, 5).await.expect("an answer");
    assert_eq!(run.text(), "Sunny in Lima.");
    assert_eq!((run.completions.len(), calls.load(Ordering::Relaxed)), (3, 3));
    let roles: Vec<&str> = run.messages.iter().map(|message| message.role.as_str()).collect();
    assert_eq!(roles, ["assistant", "tool", "tool", "assistant", "tool", "assistant"]);
    let [first, lima, oslo, _, again, last] = &run.messages[..] else { panic!("six messages") };
    assert_eq!((text(first), text(lima), text(last)), ("I look.", "sunny", "Sunny in Lima."));
    assert_eq!((text(oslo), text(again)), ("Error: \"Oslo\" is not known", "sunny"));
    let ids = |message: &ChatMessage| message.extra["tool_call_id"].clone();
    assert_eq!(first.extra["tool_calls"][1]["id"], ids(oslo));
    assert_eq!(
        (ids(lima), ids(oslo), ids(again)),
        (json!("functions.weather:0"), json!("functions.weather:1"), json!("functions.weather:2"))
    );

    // The last prompt is the conversation before the answer.
    let rules = AnswerRules { tools: vec![tools[0].spec().clone()], ..AnswerRules::default() };
    let messages = [&question()[..], &run.messages[..5]].concat();
    let asked = engine.with_rules(Request::chat(messages), rules).await.expect("rules");
    let tokens = engine.prompt_tokens(&asked).await.expect("a prompt");
    let usage = run.completions[2].finish.usage;
    assert_eq!(usage.prompt_tokens, tokens.len());
    let shown = engine.detokenize(&tokens, false).expect("tokens of the model");
    assert!(shown.contains("is not known") && shown.contains("The weather in a city."), "{shown}");
    let before = run.completions[1].finish.usage.prompt_tokens;
    assert!(usage.cached_tokens + 16 > before, "{} of {before} cached", usage.cached_tokens);
}

/// Goal: the number of rounds is bounded. The calls that were not executed are in the answer.
#[tokio::test(flavor = "multi_thread")]
async fn rounds_are_bounded() {
    let engine = engine().await;
    let script = Script::new(&engine, &[&call("Lima"), &call("Lima")]).await;
    let request = Request::chat(question()).max_tokens(200).logits_processor(script);
    let (tool, calls) = weather();
    let run = engine.run_tools(request.clone(), &[tool], 1).await.expect("an answer");
    assert_eq!((run.completions.len(), calls.load(Ordering::Relaxed)), (2, 1));
    assert_eq!(run.completions[1].answer.calls[0].name, "weather");
    let error =
        engine.run_tools(Request::text("What?"), &[], 1).await.expect_err("no conversation");
    assert!(error.to_string().contains("expected a conversation"), "{error}");
}

/// Goal: a model whose chat template does not support functions is told about them.
#[tokio::test(flavor = "multi_thread")]
async fn functions_are_described() {
    let engine = engine().await;
    let definition = weather().0.spec().definition();
    let with = Request::chat(question()).tools(json!([definition]));
    let tokens = engine.prompt_tokens(&with).await.expect("a prompt");
    let shown = engine.detokenize(&tokens, false).expect("tokens of the model");
    assert!(shown.contains("The weather in a city."), "{shown}");
    let without = engine.prompt_tokens(&Request::chat(question())).await.expect("a prompt");
    assert!(tokens.len() > without.len() + 20, "{} and {}", tokens.len(), without.len());
}

/// Goal: a stop string ends an answer where its text has it, and not where a call has it. The parts
/// are those before it.
#[tokio::test(flavor = "multi_thread")]
async fn stop_strings_end_the_text_of_an_answer() {
    let engine = engine().await;
    let rules = AnswerRules { tools: vec![weather().0.spec().clone()], ..AnswerRules::default() };
    let text = format!("I look. {}", call("Lima"));
    for (stop, expected, calls) in [("ok", "I lo", 0), ("city", "I look.", 1)] {
        let request = Request::chat(question()).max_tokens(200).stop([stop]);
        let request = request.logits_processor(Script::new(&engine, &[&text]).await);
        let request = engine.with_rules(request, rules.clone()).await.expect("rules");
        let Completion { answer, finish, .. } = engine.complete(request).await.expect("an answer");
        assert_eq!((answer.text.as_str(), answer.calls.len()), (expected, calls), "{stop}");
        let is_stopped = matches!(finish.reason, FinishReason::StopString(_));
        assert_eq!(is_stopped, calls == 0, "{stop}");
    }
}

/// Goal: a required call follows its schema, and rules that contradict each other are refused.
#[tokio::test(flavor = "multi_thread")]
async fn rules_hold() {
    let engine = engine().await;
    let spec = |name: &str, parameters: Value| {
        let mut spec = ToolSpec::new(name, parameters);
        spec.strict = true;
        spec
    };
    let schema = json!({"type": "object", "required": ["n"], "additionalProperties": false,
                        "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 5}}});
    let rules = |tools: Vec<ToolSpec>, tool_choice: ToolChoice| AnswerRules {
        tools,
        tool_choice,
        ..AnswerRules::default()
    };
    let asked = |rules: AnswerRules| engine.with_rules(Request::chat(question()), rules);
    let request = asked(rules(vec![spec("set", schema.clone())], ToolChoice::Required)).await;
    let request = request.expect("rules").max_tokens(200);
    let answer = engine.complete(request).await.expect("an answer").answer;
    let arguments: Value = serde_json::from_str(&answer.calls[0].arguments).expect("JSON");
    assert!((3..=5).contains(&arguments["n"].as_i64().expect("a number")), "{arguments}");
    let unsupported = json!({"type": "object", "not": {}});
    for (tools, choice, part) in [
        (vec![], ToolChoice::Required, "tool_choice"),
        (vec![spec("a", schema.clone())], ToolChoice::Function("b".to_owned()), "tool_choice"),
        (vec![spec("a b", schema)], ToolChoice::Auto, "\"a b\""),
        (vec![spec("a", unsupported)], ToolChoice::Auto, "not"),
    ] {
        let error = asked(rules(tools, choice.clone())).await.expect_err("refused");
        assert!(error.to_string().contains(part), "{choice:?}: {error}");
        assert!(!matches!(error, Error::Load(_)));
    }
}
