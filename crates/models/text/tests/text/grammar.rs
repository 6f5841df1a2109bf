//! Structured output: random answers that follow a grammar, on a vocabulary of bytes and pairs.
//!
//! A random walk through the allowed tokens, each as likely as any other, is the hardest model: it
//! does everything that a grammar allows.

use std::collections::BTreeSet;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde::de::IgnoredAny;
use serde_json::{Value, json};
use stolon_text::{
    Answer, AnswerFormat, CompiledGrammar, FunctionSchema, Grammar, GrammarCompiler,
    GrammarFailure, Otherwise, ReasoningFormat, Tokenizer, ToolCallFormat, ToolCallGrammar,
};

use crate::vocabularies::byte_level;

/// A byte-level vocabulary with some pairs of characters that occur in JSON, and with the markers
/// of tool calls and of reasoning as special tokens if `special_markers` is set.
fn tokenizer(special_markers: bool) -> Tokenizer {
    let mut document = byte_level();
    let spelled =
        ["\":", "\",", "{\"", "\"}", "},", "\",\"", "]}", "10", "ab", "Ġ\"", "ĠĠ", "\"ĊĊ"];
    let vocab = document["model"]["vocab"].as_object_mut().expect("an object");
    let mut id = vocab.len() + 3;
    for token in spelled {
        vocab.insert(token.to_owned(), json!(id));
        id += 1;
    }
    let markers = [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<think>",
        "</think>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁sep｜>",
        "<|tool_call_argument_begin|>",
        "<|channel|>",
        "<|message|>",
        "<|tool_call>",
        "<tool_call|>",
        "<|channel>",
        "<channel|>",
    ];
    for marker in markers.into_iter().filter(|_| special_markers) {
        let token = json!({"id": id, "content": marker, "special": true, "single_word": false,
                           "lstrip": false, "rstrip": false, "normalized": false});
        document["added_tokens"].as_array_mut().expect("a list").push(token);
        id += 1;
    }
    Tokenizer::from_json("test", document.to_string().as_bytes()).expect("a valid tokenizer")
}

fn compiler(tokenizer: &Tokenizer) -> GrammarCompiler {
    GrammarCompiler::new(tokenizer.clone(), &[end(tokenizer)])
}

fn end(tokenizer: &Tokenizer) -> u32 {
    tokenizer.token_id("<|end|>").expect("in the vocabulary")
}

/// The tokens of a random answer, with its end. `None` if it does not end within `max_tokens`.
fn walk(
    grammar: &CompiledGrammar,
    tokenizer: &Tokenizer,
    rng: &mut SmallRng,
    max_tokens: usize,
) -> Option<Vec<u32>> {
    let (state, end) = (grammar.state(), end(tokenizer));
    let mut tokens = Vec::new();
    while tokens.len() < max_tokens {
        let mask = state.mask(&tokens).expect("a mask");
        let size = u32::try_from(tokenizer.vocab_size()).expect("a small vocabulary");
        let allowed: Vec<u32> = (0..size).filter(|&token| mask.allows(token)).collect();
        assert_eq!(mask.allows(end), mask.may_end());
        let token = allowed[rng.random_range(0..allowed.len())];
        tokens.push(token);
        if token == end {
            return Some(tokens);
        }
        state.begin(&tokens);
    }
    None
}

/// The texts of 20 random answers that end.
fn answers(tokenizer: &Tokenizer, grammar: &Grammar) -> Vec<String> {
    let compiled = compiler(tokenizer).compile(grammar).expect("a valid grammar");
    let mut rng = SmallRng::seed_from_u64(7);
    let walks = (0..20).filter_map(|_| walk(&compiled, tokenizer, &mut rng, 400));
    // The markers are part of the text, the end is not.
    let texts = walks.map(|tokens| tokenizer.decode(&tokens[..tokens.len() - 1], false));
    texts.collect()
}

/// Goal: answers follow grammars of every kind, and every choice of a grammar can be reached.
#[test]
fn answers_follow_every_kind_of_grammar() {
    let tokenizer = tokenizer(false);
    let text = |text: &str| text.to_owned();
    let choice = ["yes", "no", "no, \"thanks\"", "\\d ü"].map(text);
    let reached: BTreeSet<String> =
        answers(&tokenizer, &Grammar::Choice(choice.to_vec())).into_iter().collect();
    assert_eq!(reached, choice.into_iter().collect());
    for answer in answers(&tokenizer, &Grammar::Regex(text("^(a|b/){2,3}[0-9]{2}\\$$"))) {
        let rest = answer.strip_suffix('$').expect("the end");
        let (letters, digits) = rest.split_at(rest.len() - 2);
        let parts = letters.replace("b/", "a").len();
        assert!((2..=3).contains(&parts) && digits.parse::<u32>().is_ok(), "{answer}");
    }
    let lark = "start: \"(\" start \")\" | \"x\"".to_owned();
    for answer in answers(&tokenizer, &Grammar::Lark(lark)) {
        let depth = answer.find('x').expect("the middle");
        assert_eq!(answer, format!("{}x{}", "(".repeat(depth), ")".repeat(depth)));
    }
    let gbnf = "root ::= \"(\" root \")\" | item\nitem ::= \"true\" | [a-z]{2} # two".to_owned();
    for answer in answers(&tokenizer, &Grammar::Gbnf(gbnf)) {
        let item = answer.trim_matches(['(', ')']);
        let is_word = item.len() == 2 && item.bytes().all(|byte| byte.is_ascii_lowercase());
        assert!(is_word || item == "true", "{answer}");
        let depth = (answer.len() - item.len()) / 2;
        assert_eq!(answer, format!("{}{item}{}", "(".repeat(depth), ")".repeat(depth)));
    }
    let objects = answers(&tokenizer, &Grammar::JsonObject);
    assert!(!objects.is_empty());
    for answer in objects {
        // Numbers may be beyond the range of a `Value`.
        serde_json::from_str::<IgnoredAny>(&answer).expect("JSON");
        assert!(answer.starts_with('{'), "{answer}");
    }
}

fn weather(strict: bool) -> FunctionSchema {
    let parameters = json!({
        "type": "object",
        "properties": {"days": {"$ref": "#/$defs/days"}, "exact": {"type": "boolean"}},
        "required": ["days"], "additionalProperties": false,
        "$defs": {"days": {"enum": [1, 3, 7]}},
    });
    let parameters = if strict { parameters } else { json!({"maxProperties": 0}) };
    FunctionSchema::new(if strict { "get_weather" } else { "now.utc" }, parameters)
}

/// Goal: in every format, with markers that are special tokens and with markers that are text, an
/// answer consists of calls that the parser of answers reads, with valid arguments, and of nothing
/// else unless text is allowed.
#[test]
fn tool_calls_are_read_back_in_every_format() {
    for special in [false, true] {
        let tokenizer = tokenizer(special);
        for format in ToolCallFormat::ALL {
            for (single, text) in [(false, false), (true, false), (false, true), (true, true)] {
                let functions = vec![weather(true), weather(false)];
                let called = functions.clone().into();
                let otherwise = if text { Otherwise::Text } else { Otherwise::Nothing };
                let grammar = ToolCallGrammar {
                    format,
                    functions,
                    best_effort: Vec::new(),
                    single,
                    otherwise,
                };
                let form = AnswerFormat {
                    tool_calls: Some(format),
                    functions: called,
                    ..Default::default()
                };
                let answers = answers(&tokenizer, &Grammar::ToolCalls(grammar));
                assert!(!answers.is_empty(), "{format}");
                for text_of_answer in answers {
                    let answer = Answer::parse(&form, &text_of_answer);
                    let shown = format!("{format} {single} {text}: {text_of_answer:?} {answer:?}");
                    if !text {
                        assert!(answer.text.trim().is_empty(), "{shown}");
                        assert!(!answer.calls.is_empty(), "{shown}");
                    }
                    assert!(answer.calls.len() <= 1 || !single, "{shown}");
                    for call in answer.calls {
                        let arguments: Value = serde_json::from_str(&call.arguments).expect("JSON");
                        match call.name.as_str() {
                            "get_weather" => {
                                assert!([1, 3, 7].iter().any(|day| arguments["days"] == *day));
                            }
                            "now.utc" => assert_eq!(arguments, json!({}), "{shown}"),
                            _ => panic!("{shown}"),
                        }
                    }
                }
            }
        }
    }
}

/// Goal: a text that is allowed instead of calls cannot begin a call that does not follow the
/// grammar. The beginning of the call is forced on the walk.
#[test]
fn a_call_within_free_text_follows_its_grammar() {
    for special in [false, true] {
        let tokenizer = tokenizer(special);
        let grammar = Grammar::ToolCalls(ToolCallGrammar {
            format: ToolCallFormat::Hermes,
            functions: vec![weather(true)],
            best_effort: Vec::new(),
            single: false,
            otherwise: Otherwise::Text,
        });
        let compiled = compiler(&tokenizer).compile(&grammar).expect("valid");
        let state = compiled.state();
        let tokens = tokenizer.encode("Let me see. <tool_call>\n", false).expect("encodable");
        for len in 0..tokens.len() {
            assert!(state.mask(&tokens[..len]).expect("a mask").allows(tokens[len]), "{len}");
        }
        let mask = state.mask(&tokens).expect("a mask");
        assert!(!mask.may_end());
        let allowed = (0..256).filter(|&token| mask.allows(token)).count();
        assert_eq!(allowed, 1, "only the brace of the call");
    }
}

/// Goal: the grammar applies after the reasoning, which cannot end the answer.
#[test]
fn reasoning_is_free() {
    for (special, reasoning) in [
        (false, ReasoningFormat::Think),
        (true, ReasoningFormat::Think),
        (false, ReasoningFormat::Gemma4),
        (true, ReasoningFormat::Gemma4),
    ] {
        let tokenizer = tokenizer(special);
        let (open, close) = reasoning.tags();
        for is_open in [false, true] {
            let then = Box::new(Grammar::Choice(vec!["ab".to_owned(), "c".to_owned()]));
            let grammar = Grammar::AfterReasoning { reasoning, is_open, then };
            let compiled = compiler(&tokenizer).compile(&grammar).expect("valid");
            let open = if is_open { "" } else { open };
            let text = format!("{open}No {{\"x\": 1}}, <b>.{close}\n\nab");
            let state = compiled.state();
            let tokens = tokenizer.encode(&text, false).expect("encodable");
            for len in 0..=tokens.len() {
                let mask = state.mask(&tokens[..len]).expect("a mask");
                assert_eq!(mask.may_end(), len == tokens.len(), "{len}");
                assert!(tokens.get(len).is_none_or(|&token| mask.allows(token)), "{text} {len}");
            }
            // Without the reasoning, the answer may follow at once.
            let first = state.restarted().mask(&[]).expect("a mask");
            let x = tokenizer.encode("x", false).expect("encodable")[0];
            assert_eq!(first.allows(x), is_open);
        }
    }
}

/// Goal: grammars that cannot be compiled are refused with an error that says why.
#[test]
fn invalid_grammars_are_refused() {
    let tokenizer = tokenizer(false);
    let compiler = compiler(&tokenizer);
    let text = |text: &str| text.to_owned();
    for (grammar, expected) in [
        (Grammar::Regex(text("(a")), "unclosed"),
        (Grammar::Regex(text("(?=a)b")), "look-around"),
        (Grammar::Lark(text("start: other")), "other"),
        (Grammar::Lark(text("begin: \"a\"")), "start"),
        (Grammar::Lark(text("start: /a/ @missing")), "missing"),
        (Grammar::Choice(vec![]), "choices"),
        (Grammar::JsonSchema(json!({"type": "text"})), "text"),
        (Grammar::JsonSchema(json!({"$ref": "#/$defs/none"})), "none"),
        (Grammar::JsonSchema(json!(false)), "false"),
        (Grammar::JsonSchema(json!({"minimum": 2, "maximum": 1, "type": "integer"})), ""),
        (Grammar::JsonSchema(json!({"pattern": "(", "type": "string"})), "unclosed"),
        (Grammar::JsonSchema(json!({"format": "postcode", "type": "string"})), "postcode"),
        (Grammar::Regex("a".repeat(Grammar::MAX_BYTES + 1)), "4096 bytes"),
    ] {
        let error = compiler.compile(&grammar).expect_err("invalid").to_string();
        assert!(error.contains(expected), "{grammar:?}: {error}");
        assert!(error.len() < 1000 && !error.contains("panic"), "{error}");
    }
}

/// Goal: an error has the path of the innermost wrong schema, and does not name options of the
/// library.
#[test]
fn errors_have_the_path_of_what_is_wrong() {
    let compiler = compiler(&tokenizer(false));
    let any_of = json!([{"type": "integer"}, {"type": "string", "pattern": "("}]);
    let one_of = json!([{"type": "object", "required": ["a"]}, {"type": "object"}]);
    for (schema, path, reason) in [
        (
            json!({"properties": {"a": {"anyOf": any_of}}}),
            "properties.a.anyOf.1.pattern",
            "unclosed",
        ),
        (json!({"properties": {"a": {"oneOf": one_of}}}), "properties.a.oneOf", "told apart"),
        (json!({"$ref": "#"}), "", "leads only to itself"),
    ] {
        let compiled = compiler.compile(&Grammar::JsonSchema(schema.clone()));
        let Err(GrammarFailure::Invalid(error)) = compiled else { panic!("{schema} is compiled") };
        assert_eq!(error.path, path, "{error}");
        assert!(!error.reason.contains("coerce") && error.reason.contains(reason), "{error}");
    }
}

/// Goal: the schema of a function that a grammar cannot follow does not keep the model from calling
/// it, or others, if the best effort is enough; the others' schemas are followed. Otherwise the
/// error names the function and what is wrong in its schema.
#[test]
fn schemas_are_followed_as_far_as_possible_if_that_is_enough() {
    let tokenizer = tokenizer(false);
    let compiler = compiler(&tokenizer);
    let unsatisfiable = json!({"type": "string", "enum": [1]});
    let many: serde_json::Map<String, Value> =
        (0..9000).map(|index| (format!("p{index}"), json!({"type": "boolean"}))).collect();
    let mut deep = json!({});
    for _ in 0..100 {
        deep = json!({"properties": {"a": deep}});
    }
    for (parameters, path) in [
        (json!({"properties": {"a": {"type": "any"}}}), "properties.a.type"),
        (json!({"properties": {"a": unsatisfiable}, "required": ["a"]}), "properties.a"),
        (json!({"properties": {"a": {"patternProperties": {"a": {}, "b": {}}}}}), "properties.a"),
        (json!({"properties": {"a": {"allOf": [{"$ref": "#"}, {"type": "object"}]}}}), ""),
        (json!({"properties": many, "additionalProperties": false}), ""),
        (deep, ""),
        (json!(false), ""),
        (json!(7), ""),
    ] {
        let other = FunctionSchema::new("other", parameters.clone());
        let calls = |best_effort: &[&str]| ToolCallGrammar {
            format: ToolCallFormat::Hermes,
            functions: vec![weather(true), other.clone()],
            best_effort: best_effort.iter().map(|&name| name.to_owned()).collect(),
            single: false,
            otherwise: Otherwise::Nothing,
        };
        let shown: String = parameters.to_string().chars().take(80).collect();
        let grammar = Grammar::ToolCalls(calls(&["other"]));
        let compiled =
            compiler.compile(&grammar).unwrap_or_else(|error| panic!("{shown}: {error}"));
        let state = compiled.state();
        let follows = |text: &str| {
            let tokens = tokenizer.encode(text, false).expect("encodable");
            (0..tokens.len())
                .all(|len| state.mask(&tokens[..len]).is_ok_and(|mask| mask.allows(tokens[len])))
        };
        let call = |name: &str, arguments: &str| {
            format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}")
        };
        assert!(follows(&call("other", "{\"x\": [1]}")), "{shown}");
        assert!(follows(&call("get_weather", "{\"days\": 3}")), "{shown}");
        assert!(!follows(&call("get_weather", "{\"x\": 3}")), "{shown}");
        let error = compiler.compile(&Grammar::ToolCalls(calls(&[])));
        let Err(GrammarFailure::Invalid(error)) = error else { panic!("{shown}: compiled") };
        let function = error.function.as_deref();
        assert!(function == Some("other") || path.is_empty(), "{shown}: {error}");
        assert!(error.path.starts_with(path), "{shown}: {error}");
    }
}

/// Goal: large grammars of a client, which are stopped at their limit, are its own fault, and
/// another client gets its grammars meanwhile. The first grammar does not pay for the vocabulary.
#[test]
fn large_grammars_of_one_client_do_not_keep_others_from_theirs() {
    let compiler = compiler(&tokenizer(false));
    compiler.prepare().expect("a usable vocabulary");
    let large = |seed: usize| {
        let properties: serde_json::Map<String, Value> = (0..12_000)
            .map(|index| (format!("p{seed}_{index}"), json!({"type": "boolean"})))
            .collect();
        Grammar::JsonSchema(json!({"properties": properties, "additionalProperties": false}))
    };
    std::thread::scope(|scope| {
        let hostile: Vec<_> = (0..2)
            .map(|seed| {
                let (compiler, grammar) = (compiler.clone(), large(seed));
                scope.spawn(move || compiler.compile_for(&grammar, Some("hostile".into())))
            })
            .collect();
        for index in 0..20 {
            let small = Grammar::Choice(vec![format!("yes {index}"), "no".to_owned()]);
            let compiled = compiler.compile_for(&small, Some("other".into()));
            assert!(compiled.is_ok(), "{:?}", compiled.err());
        }
        for thread in hostile {
            let result = thread.join().expect("no panic");
            assert!(result.is_err(), "a grammar far above the limits");
        }
    });
}

/// Goal: grammars at the limits that are announced can be followed to their end: as many choices
/// as there may be, and as many required properties as OpenAI allows. Optional ones take a time that
/// grows with their square, so there can be fewer.
#[test]
fn grammars_at_the_limits_are_followed() {
    let tokenizer = tokenizer(false);
    let compiler = compiler(&tokenizer);
    let mut random = SmallRng::seed_from_u64(7);
    let choice = |index: usize| format!("{index:04} {}", "x".repeat(56));
    let choices: Vec<String> = (0..Grammar::MAX_CHOICES).map(choice).collect();
    let compiled = compiler.compile(&Grammar::Choice(choices.clone())).expect("within the limits");
    for _ in 0..20 {
        let tokens = walk(&compiled, &tokenizer, &mut random, 200).expect("it ends");
        let answer = tokenizer.decode(&tokens[..tokens.len() - 1], false);
        assert!(choices.contains(&answer), "{answer}");
    }
    for (count, are_required) in [(5000, true), (1000, false)] {
        let properties: serde_json::Map<String, Value> =
            (0..count).map(|index| (format!("p{index}"), json!({"type": "boolean"}))).collect();
        let required: Vec<&String> = properties.keys().filter(|_| are_required).collect();
        let schema = json!({"type": "object", "properties": properties, "required": required,
                            "additionalProperties": false});
        let compiled = compiler.compile(&Grammar::JsonSchema(schema)).expect("within the limits");
        walk(&compiled, &tokenizer, &mut random, 60);
    }
}

/// Goal: hostile grammars, which would take much time or memory, end with an error or a mask, and
/// do not delay other grammars.
#[test]
fn hostile_grammars_end() {
    let tokenizer = tokenizer(false);
    let compiler = compiler(&tokenizer);
    let mut nested = json!({"type": "string"});
    let mut chain = "start: A0\n".to_owned();
    for level in 0..2000 {
        chain.push_str(&format!("A{level}: \"a\" A{}?\n", level + 1));
    }
    chain.push_str("A2000: \"b\"\n");
    let mut product = json!({"allOf": []});
    for level in 0..20 {
        nested = json!({"anyOf": [nested, {"type": "array", "items": {"type": "string"}}]});
        let alternatives = json!({"anyOf": [
            {"properties": {format!("a{level}"): {"const": 1}}},
            {"properties": {format!("b{level}"): {"const": 2}}},
        ]});
        product["allOf"].as_array_mut().expect("a list").push(alternatives);
    }
    let parentheses = format!("start: {}\"a\"{}", "(".repeat(20_000), ")".repeat(20_000));
    for grammar in [
        Grammar::Regex("(a|b)*a(a|b){200}c".to_owned()),
        Grammar::Regex("((a{0,500}){0,500}){0,500}b".to_owned()),
        Grammar::Regex("(x+x+)+y".to_owned()),
        Grammar::Regex("a?".repeat(1_300) + &"a".repeat(1_300)),
        Grammar::Regex("(".repeat(2_000) + "a" + &")".repeat(2_000)),
        Grammar::Regex(vec!["[a-m]+x"; 500].join("|")),
        Grammar::Lark(format!("start: /{}/", "a?".repeat(2_000))),
        Grammar::Lark("start: start start | \"a\" | \"\"".to_owned()),
        Grammar::Lark("start: start".to_owned()),
        Grammar::Lark(chain),
        Grammar::Lark(parentheses),
        Grammar::Lark("start: \"a\"{1000000000}".to_owned()),
        Grammar::JsonSchema(json!({"type": "string", "minLength": 65_000, "maxLength": 65_001})),
        Grammar::JsonSchema(json!({"type": "array", "minItems": 65_536})),
        Grammar::JsonSchema(json!({"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"})),
        Grammar::JsonSchema(json!({"$ref": "#"})),
        Grammar::JsonSchema(json!({"allOf": [{"$ref": "#"}, {"$ref": "#"}]})),
        Grammar::JsonSchema(json!({"type": "number", "multipleOf": 1e-300})),
        Grammar::JsonSchema(json!({"enum": vec!["é".repeat(60); 200], "type": 1})),
        Grammar::JsonSchema(nested),
        Grammar::JsonSchema(product),
    ] {
        // Whether it is refused at once, or when it has become too complex, is not specified.
        let Ok(compiled) = compiler.compile(&grammar) else { continue };
        let state = compiled.state();
        let mut tokens = Vec::new();
        while tokens.len() < 30
            && let Ok(mask) = state.mask(&tokens)
            && let Some(token) = (0..400).find(|&token| mask.allows(token))
        {
            tokens.push(token);
        }
    }
    let other = compiler.compile(&Grammar::JsonObject).expect("a valid grammar");
    assert!(other.state().mask(&[]).is_ok());
}

/// Goal: a grammar that was compiled before allows the same tokens as one that is compiled anew,
/// also after other requests have used it; and schemas that differ only in the order of their
/// properties are different grammars.
#[test]
fn cached_grammars_equal_compiled_ones() {
    let tokenizer = tokenizer(true);
    let shared = compiler(&tokenizer);
    let schema = |text: &str| Grammar::JsonSchema(serde_json::from_str(text).expect("JSON"));
    let properties = [r#""a":{"type":"string","maxLength":9}"#, r#""b":{"enum":["x",1,null]}"#];
    let object = |first: &str, second: &str| {
        let head = r#"{"type":"object","required":["a","b"],"additionalProperties":false,"#;
        schema(&format!("{head}\"properties\":{{{first},{second}}}}}"))
    };
    let calls = ToolCallGrammar {
        format: ToolCallFormat::ALL[0],
        functions: vec![weather(true)],
        best_effort: Vec::new(),
        single: false,
        otherwise: Otherwise::Text,
    };
    let grammars = [
        object(properties[0], properties[1]),
        object(properties[1], properties[0]),
        Grammar::JsonObject,
        Grammar::Regex("(ab|a)*c{2,9}".to_owned()),
        Grammar::ToolCalls(calls),
    ];
    let mut rng = SmallRng::seed_from_u64(3);
    for round in 0..3 {
        let mut answers = Vec::new();
        for grammar in &grammars {
            let fresh = compiler(&tokenizer).compile(grammar).expect("a valid grammar");
            let cached = shared.compile(grammar).expect("a valid grammar");
            let answer = walk(&fresh, &tokenizer, &mut rng, 60).unwrap_or_default();
            let (fresh, state) = (fresh.state(), cached.state());
            for length in 0..answer.len() {
                let tokens = &answer[..length];
                let (one, other) = (fresh.mask(tokens), state.mask(tokens));
                assert_eq!(one, other, "round {round}: {grammar:?} after {tokens:?}");
            }
            answers.push(tokenizer.decode(&answer, true));
        }
        assert!(answers[0].is_empty() || answers[0].find("\"a\"") < answers[0].find("\"b\""));
        assert!(answers[1].is_empty() || answers[1].find("\"b\"") < answers[1].find("\"a\""));
    }
}

/// Goal: however many slow grammars a client begins, the mask of another client does not wait for
/// them.
#[test]
fn slow_grammars_of_one_client_do_not_delay_another() {
    let compiler = compiler(&tokenizer(false));
    let ambiguous = "start: a a a a a a a a\na: a a | b |\nb: a | /[a-z ]/\n";
    let slow = compiler.compile(&Grammar::Lark(ambiguous.to_owned())).expect("a valid grammar");
    let quick = compiler.compile(&Grammar::JsonObject).expect("a valid grammar");
    // Some seconds of work, however busy the machine is.
    let tokens = vec![u32::from(b'a'); 60];
    let hostile: Vec<_> = (0..400).map(|_| slow.state_for(Some("hostile".into()))).collect();
    hostile.iter().for_each(|state| state.begin(&tokens));
    let other = quick.state_for(Some("other".into()));
    assert!(other.mask(&[u32::from(b'{')]).is_ok());
    let waiting = hostile.iter().filter(|state| !state.is_ready(&tokens)).count();
    assert!(waiting > 0, "all were computed before");
}
