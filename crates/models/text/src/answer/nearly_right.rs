//! Answers as models write them when they are nearly right, in all formats.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

/// Functions whose arguments are strings, a number, a list, and nothing.
fn functions() -> Arc<[FunctionSchema]> {
    let text = json!({"type": "string"});
    let number = json!({"type": "integer"});
    [
        (
            "find",
            json!({"properties": {"pattern": text, "depth": number}, "required": ["pattern"]}),
        ),
        ("now", json!({})),
        (
            "write",
            json!({"properties": {"path": text, "text": text}, "required": ["path", "text"]}),
        ),
        (
            "search",
            json!({"properties": {"query": text, "limit": number, "tags": {"type": "array"}}}),
        ),
    ]
    .map(|(name, parameters)| FunctionSchema::new(name, parameters))
    .into()
}

fn format(tool_calls: ToolCallFormat) -> AnswerFormat {
    AnswerFormat { tool_calls: Some(tool_calls), functions: functions(), ..AnswerFormat::default() }
}

/// The format of a model whose prompt begins the reasoning.
fn open(tool_calls: ToolCallFormat) -> AnswerFormat {
    AnswerFormat {
        reasoning: Some(ReasoningFormat::Think),
        reasoning_is_open: true,
        ..format(tool_calls)
    }
}

/// The answer as `reasoning|text|name arguments|...`, the same whole and cut in two at every place.
fn shown(format: &AnswerFormat, text: &str) -> String {
    let whole = Answer::parse(format, text);
    for cut in (0..=text.len()).filter(|&cut| text.is_char_boundary(cut)) {
        let (mut parser, mut answer) = (AnswerParser::new(format.clone()), Answer::default());
        for piece in [&text[..cut], &text[cut..]] {
            parser.push(piece).into_iter().for_each(|part| answer.add(part));
        }
        parser.finish().into_iter().for_each(|part| answer.add(part));
        assert_eq!(answer, whole, "{text} cut at {cut}");
    }
    let (mut parser, mut answer) = (AnswerParser::new(format.clone()), Answer::default());
    for character in text.chars() {
        parser
            .push(character.encode_utf8(&mut [0; 4]))
            .into_iter()
            .for_each(|part| answer.add(part));
    }
    parser.finish().into_iter().for_each(|part| answer.add(part));
    assert_eq!(answer, whole, "{text} in characters");
    let calls = whole.calls.iter().map(|call| {
        let arguments: Value = serde_json::from_str(&call.arguments).expect("JSON");
        format!("|{} {arguments}", call.name)
    });
    format!("{}|{}{}", whole.reasoning, whole.text, calls.collect::<String>())
}

/// Checks the answers of models with one format.
fn check(tool_calls: ToolCallFormat, cases: &[(&str, &str)]) {
    for (text, expected) in cases {
        assert_eq!(shown(&format(tool_calls), text), *expected, "{tool_calls} {text}");
    }
}

const FIND: &str = r#"|find {"pattern":"*.txt"}"#;

/// Goal: calls between tags are found without the tags that models leave out, and a value ends
/// before the next argument.
#[test]
fn tags_may_be_missing() {
    let call = "<function=find>\n<parameter=pattern>\n*.txt\n</parameter>\n</function>";
    let write = r#"|write {"path":"a.txt","text":"hello"}"#;
    check(
        ToolCallFormat::Qwen3Coder,
        &[
            (&format!("So.\n\n{call}\n</tool_call>"), &format!("|So.{FIND}")),
            (call, &format!("|{FIND}")),
            (&format!("<tool_call>\n{call}{call}"), &format!("|{FIND}{FIND}")),
            (
                &format!("<tool_call>\n<tool_call>\n{call}\n</tool_call>\n</tool_call>"),
                &format!("|{FIND}"),
            ),
            (
                &format!("<tool_call>{call}</tool_call><tool_call>{call}</tool_call>"),
                &format!("|{FIND}{FIND}"),
            ),
            (&format!("{call}\n\n{call}\n</tool_call> Done."), &format!("|Done.{FIND}{FIND}")),
            (
                "<tool_call>\n<function=write>\n<parameter=path>\na.txt\n<parameter=text>\nhello\n\
             </parameter>\n</function>\n</tool_call>",
                &format!("|{write}"),
            ),
            (
                "<tool_call>\n<function=write>\n<parameter=path>a.txt<parameter=text>hello</parameter>\n\
             </function>\n</tool_call>",
                &format!("|{write}"),
            ),
            (
                "<tool_call>\n<function=write>\n<parameter=path>\na.txt\n</parameter>\n<parameter=text>\n\
             hello\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
                &format!("|{write}|now {{}}"),
            ),
            (
                "<tool_call>\n<function=write>\n<parameter=path>\na.txt\n</parameter>\n<parameter=text>\n\
             hello\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
                &format!("|{write}|now {{}}"),
            ),
            ("<tool_call>\n<function=now>\n</tool_call>", "||now {}"),
            ("<tool_call>\n<function=now", "||now {}"),
            ("<tool_call>\n<function=now>", "||now {}"),
            ("<function name=\"now\">\n</function>", "||now {}"),
            ("<invoke name=now>\n</invoke>", "||now {}"),
            ("Write <function=foo> to begin a call.", "|Write <function=foo> to begin a call."),
            ("Write <tool_call> first.", "|Write <tool_call> first."),
            (
                &format!("Write <tool_call> first.\n<tool_call>\n{call}\n</tool_call>"),
                &format!("|Write <tool_call> first.{FIND}"),
            ),
            ("Write <function=now>", "|Write <function=now>"),
            ("Write <tool_call><function=now>", "|Write <tool_call><function=now>"),
            (
                "Use <function=find><parameter=pattern> so.",
                "|Use <function=find><parameter=pattern> so.",
            ),
            ("So.<tool_call><function=now></function></tool_call>", "|So.|now {}"),
            ("<tool_call>\n<function=find>\n<parameter=pattern>\n*.txt", &format!("|{FIND}")),
            (
                "<tool_call>\n<function=take>\n</function>\n</tool_call>",
                "|<tool_call>\n<function=take>\n</function>\n</tool_call>",
            ),
            (
                "<tool_call>\n<function=write>\n<parameter=path>\na.t",
                "|<tool_call>\n<function=write>\n<parameter=path>\na.t",
            ),
        ],
    );
    check(
        ToolCallFormat::MiniMaxM2,
        &[
            (
                "So.\n<invoke name=\"find\">\n<parameter name=\"pattern\">*.txt</parameter>\n</invoke>\n\
             </minimax:tool_call>",
                &format!("|So.{FIND}"),
            ),
            (
                "<minimax:tool_call>\n<invoke name=\"find\">\n<parameter name=\"pattern\">*.txt\n\
             <parameter name=\"depth\">3</parameter>\n</invoke>\n<invoke name=\"now\">\n</invoke>",
                r#"||find {"pattern":"*.txt","depth":3}|now {}"#,
            ),
        ],
    );
    check(
        ToolCallFormat::DeepSeekV32,
        &[(
            "<｜DSML｜invoke name=\"find\">\n<｜DSML｜parameter name=\"pattern\" string=\"true\">*.txt\
         </｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
            &format!("|{FIND}"),
        )],
    );
    check(
        ToolCallFormat::Glm,
        &[
            ("<tool_call>now", "||now {}"),
            (
                "<tool_call>find\n<arg_key>pattern</arg_key>\n<arg_value>*.txt</arg_value>",
                &format!("|{FIND}"),
            ),
            (
                "<tool_call>find\n<tool_call>pattern</arg_key>\n<arg_value>*.txt</arg_value>\n</tool_call>",
                &format!("|{FIND}"),
            ),
            (
                "<tool_call>find\n<arg_key>pattern</arg_key>\n<arg_value>*.txt\n<arg_key>depth</arg_key>\n\
             <arg_value>3</arg_value>\n</tool_call>",
                r#"||find {"pattern":"*.txt","depth":3}"#,
            ),
            (
                "<tool_call>find<arg_key>pattern</arg_key>*.txt</arg_value></tool_call>",
                &format!("|{FIND}"),
            ),
            ("<tool_call>now</tool_call><tool_call>now</tool_call>", "||now {}|now {}"),
            (
                "<tool_call>findpattern</arg_key><arg_value>*.txt</arg_value></tool_call>",
                &format!("|{FIND}"),
            ),
            (
                "<tool_call>find pattern</arg_key><arg_value>*.txt</arg_value></tool_call>",
                &format!("|{FIND}"),
            ),
            ("<tool_call>now</arg_value></tool_call>", "||now {}"),
            (
                "So.\nfind\n<arg_key>pattern</arg_key>\n<arg_value>*.txt</arg_key>\n</tool_call>",
                &format!("|So.{FIND}"),
            ),
            ("So.\nfind it", "|So.\nfind it"),
            ("<tool_call>take</tool_call>", "|<tool_call>take</tool_call>"),
        ],
    );
}

/// Goal: calls that are objects are found with other keys, and where their JSON is nearly right.
#[test]
fn objects_may_be_nearly_json() {
    let call = r#"{"name": "find", "arguments": {"pattern": "*.txt"}}"#;
    let found = format!("|{FIND}");
    for text in [
        r#"{{"name": "find", "arguments": {"pattern": "*.txt"}}}"#,
        r#"{"name": "find", "arguments": {"pattern": "*.txt"}"#,
        r#"{"name": "find", "arguments": {"pattern": "*.txt"}}}"#,
        r#"{"name": "find", "arguments": {"pattern": "*.txt",}}"#,
        r#"{"type": "function", "function": {"name": "find", "arguments": {"pattern": "*.txt"}}}"#,
        r#"{"type": "function", "function": {"name": "find", "arguments": "{\"pattern\": \"*.txt\"}"}}"#,
        r#"{"function": "find", "parameters": {"pattern": "*.txt"}}"#,
        r#"{"tool": "find", "args": {"pattern": "*.txt"}}"#,
        r#"{"name": "functions.find", "input": {"pattern": "*.txt"}}"#,
        r#"{"name": "find", "pattern": "*.txt"}"#,
        r#"{"find": {"pattern": "*.txt"}}"#,
        r#"{name: "find", arguments: {pattern: "*.txt"}}"#,
        "find\n<parameter=pattern>\n*.txt\n</parameter>\n</function>",
        "find.call(pattern='*.txt')",
        r#"{"name": "find", "arguments": [{"pattern": "*.txt"}]}"#,
        "{'name': 'find', 'arguments': {'pattern': '*.txt'}}",
        r#"[{"name": "find", "arguments": {"pattern": "*.txt"}}]"#,
        "```json\n{\"name\": \"find\", \"arguments\": {\"pattern\": \"*.txt\"}}\n```",
        r#"find(pattern="*.txt")"#,
        r#"[find(pattern="*.txt")]"#,
        r#"find{"pattern": "*.txt"}"#,
        "<function=find>\n<parameter=pattern>\n*.txt\n</parameter>\n</function>",
    ] {
        let marked = format!("<tool_call>\n{text}\n</tool_call>");
        assert_eq!(shown(&format(ToolCallFormat::Hermes), &marked), found, "{marked}");
        let adjacent = format!("{marked}{marked}");
        assert_eq!(shown(&format(ToolCallFormat::Hermes), &adjacent), format!("{found}{FIND}"));
    }
    check(
        ToolCallFormat::Hermes,
        &[
            (&format!("<tool_call>\n{call}\n<tool_call>"), &found),
            (&format!("So.\n{call}\n</tool_call>"), &format!("|So.{FIND}")),
            (&format!("So.\n{call}"), &format!("|So.{FIND}")),
            (&format!("So.\n{call}\nThat is a call."), &format!("|So.\n{call}\nThat is a call.")),
            (&format!("So {call}"), &format!("|So {call}")),
            (
                "<tool_call>\n{\"name\": \"write\", \"arguments\": {\"path\": \"a\", \"text\": \"x\ny\"}}\n</tool_call>",
                "||write {\"path\":\"a\",\"text\":\"x\\ny\"}",
            ),
            (
                r#"<tool_call>{"name": "write", "arguments": {"path": "a", "text": "print("hi", 1)"}}</tool_call>"#,
                r#"||write {"path":"a","text":"print(\"hi\", 1)"}"#,
            ),
            (
                r#"<tool_call>{"name": "take", "arguments": {}}</tool_call>"#,
                r#"|<tool_call>{"name": "take", "arguments": {}}</tool_call>"#,
            ),
            (&format!("<tools>\n{call}\n</tools>"), &found),
            (&format!("<function_call>{call}</function_call>"), &found),
            (&format!("So.\n```json\n{call}\n```"), &format!("|So.{FIND}")),
            (&format!("```\n{call}\n```\n"), &found),
            (
                &format!("```json\n{call}\n```\nThat is it."),
                &format!("|```json\n{call}\n```\nThat is it."),
            ),
            (
                r#"<tool_call>{"name": "find", "arguments": {"pattern": "</tool_call>"}}</tool_call>"#,
                r#"||find {"pattern":"</tool_call>"}"#,
            ),
            (r#"{"name": "find"}"#, r#"|{"name": "find"}"#),
            (r#"{"name": "Ada", "arguments": {}}"#, r#"|{"name": "Ada", "arguments": {}}"#),
        ],
    );
    check(
        ToolCallFormat::Llama3Json,
        &[
            ("<function=find>{\"pattern\": \"*.txt\"}</function>", &found),
            ("[find(pattern='*.txt')]", &found),
            ("[find(pattern='*.txt')] is it.", "|[find(pattern='*.txt')] is it."),
            (r#"{"type": "function", "name": "find", "parameters": {"pattern": "*.txt"}}"#, &found),
        ],
    );
    check(
        ToolCallFormat::Mistral,
        &[
            ("[TOOL_CALLS]find\n{\"pattern\": \"*.txt\"}", &found),
            ("find[ARGS]{\"pattern\": \"*.txt\"}", &found),
            (&format!("[TOOL_CALLS]{call}"), &found),
        ],
    );
    check(
        ToolCallFormat::Gemma,
        &[
            (
                "```tool_call\n{\"name\": \"now\", \"arguments\": {}}\n```tool_call\n{\"name\": \"now\"}\n```",
                "||now {}|now {}",
            ),
            ("```tool_code\nnow()\n``````tool_code\nnow()\n```", "||now {}|now {}"),
            ("```tool_code\nprint(default_api.find(pattern='*.txt'))\n```\n", &found),
        ],
    );
    check(
        ToolCallFormat::Pythonic,
        &[("find(pattern='*.txt')", &found), ("now() is it.", "|now() is it.")],
    );
    check(
        ToolCallFormat::Cohere,
        &[(
            r#"<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "find", "parameters": {"pattern": "*.txt"}}]"#,
            &found,
        )],
    );
}

/// Goal: calls of Gemma 4 are found without the marks that it leaves out.
#[test]
fn calls_of_gemma_may_be_nearly_right() {
    let kites = r#"||search {"query":"red kites"}"#;
    check(
        ToolCallFormat::Gemma4,
        &[
            (r#"<|tool_call>call:search(query=<|"|>red kites<|"|>)<tool_call|>"#, kites),
            (r#"<|tool_call>call:search{query:red kites<|"|>}<tool_call|>"#, kites),
            (r#"<|tool_call>call:search{query:<|"|>red kites}<tool_call|>"#, kites),
            (r#"<|tool_call>call:search{query:<|"|><|"|>red kites<|"|><|"|>}<tool_call|>"#, kites),
            (r#"<|tool_call>call:mcp:web:search{query:'red kites'}<tool_call|>"#, kites),
            (r#"<|tool_call>call:default_api.search{"query":"red kites"}"#, kites),
            (r#"<|tool_call>:search{query:<|"|>red kites<|"|>}<tool_call|>"#, kites),
            (r#"<|tool_call>search{query:<|"|>red kites<|"|>}<tool_call|>"#, kites),
            (
                r#"<|tool_call>call:search{query:<|"|>a}<tool_call|><|tool_call>call:search{query:<|"|>b<|"|>}<tool_call|>"#,
                r#"||search {"query":"a"}|search {"query":"b"}"#,
            ),
            (
                r#"<|tool_call>call:write{path:<|"|>a.py<|"|>,text:<|"|>print(<|"|>hi<|"|>)<|"|>}<tool_call|>"#,
                r#"||write {"path":"a.py","text":"print(\"hi\")"}"#,
            ),
            ("<|tool_call>call:now<tool_call|>", "||now {}"),
            (r#"<|tool_call>call: search{query:<|"|>red kites<|"|>}<tool_call|>"#, kites),
            ("So. call:now{}<tool_call|>", "|So.|now {}"),
            ("So. call:now{}", "|So. call:now{}"),
            ("A call:center.", "|A call:center."),
            ("<|tool_call>call:now{}<tool_call|>\nSo.", "|So.|now {}"),
            ("<|tool_call>call:take{}<tool_call|>", "|<|tool_call>call:take{}<tool_call|>"),
        ],
    );
}

/// Goal: calls of Kimi and DeepSeek are found with other ids and markers.
#[test]
fn markers_of_calls_may_be_others() {
    let argument = r#"<|tool_call_argument_begin|>{"pattern": "*.txt"}<|tool_call_end|>"#;
    let found = format!("|{FIND}");
    for id in [
        "functions.find:0",
        "functions.find",
        "find:3",
        "functionsfind5",
        "functions_find_1",
        "find",
    ] {
        for (begin, end) in [
            ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            ("<|tool_call_section_begin|>", "<|tool_call_section_end|>"),
            ("", ""),
        ] {
            let text = format!("{begin}<|tool_call_begin|>{id}{argument}{end}");
            assert_eq!(shown(&format(ToolCallFormat::Kimi), &text), found, "{text}");
        }
    }
    let kimi = |call: &str| format!("<|tool_calls_section_begin|><|tool_call_begin|>{call}");
    check(
        ToolCallFormat::Kimi,
        &[
            (
                &kimi(
                    "functions.find:0<|tool_call_argument_begin|>\"{\\\"pattern\\\": \\\"*.txt\\\"}\"<|tool_call_end|>",
                ),
                &found,
            ),
            (
                &kimi(
                    "call_ab12<|tool_call_argument_begin|>{\"name\": \"find\", \"pattern\": \"*.txt\"}<|tool_call_end|>",
                ),
                &found,
            ),
            (&kimi("functions.now:0<|tool_call_argument_begin|><|tool_call_end|>"), "||now {}"),
            (&kimi("functions.find:0{\"pattern\": \"*.txt\"}<|tool_call_end|>"), &found),
            (&kimi("functions.find:0<|tool_call_argument_begin|>{\"pattern\": \"*.txt\"}"), &found),
            (
                "<|tool_calls_section_begin|>functions.find:0<|tool_call_argument_begin|>{\"pattern\": \"*.txt\"}",
                &found,
            ),
            (
                &kimi("functions.take:0<|tool_call_argument_begin|>{}"),
                &format!("|{}", kimi("functions.take:0<|tool_call_argument_begin|>{}")),
            ),
        ],
    );
    let deepseek =
        "<｜tool▁call▁begin｜>find<｜tool▁sep｜>{\"pattern\": \"*.txt\"}<｜tool▁call▁end｜>";
    check(
        ToolCallFormat::DeepSeek,
        &[
            (deepseek, &found),
            (&format!("<｜tool▁calls▁begin｜>{deepseek}{deepseek}"), &format!("|{FIND}{FIND}")),
            (
                "<｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>",
                "||now {}",
            ),
            (
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{\"pattern\": \"*.txt\"}\n```<｜tool▁call▁end｜>",
                &found,
            ),
        ],
    );
}

/// Goal: a complete call at the end of reasoning that is not closed, or that nothing follows, is a
/// call. One that the reasoning only talks about is a part of it.
#[test]
fn calls_may_end_the_reasoning() {
    let kimi = "<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0\
                <|tool_call_argument_begin|>{\"pattern\": \"*.txt\"}<|tool_call_end|><|tool_calls_section_end|>";
    for (tool_calls, call) in [
        (
            ToolCallFormat::Qwen3Coder,
            "<tool_call>\n<function=find>\n<parameter=pattern>\n*.txt\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            ToolCallFormat::Qwen3Coder,
            "<function=find>\n<parameter=pattern>\n*.txt\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            ToolCallFormat::Hermes,
            "<tool_call>\n{\"name\": \"find\", \"arguments\": {\"pattern\": \"*.txt\"}}\n</tool_call>",
        ),
        (
            ToolCallFormat::Glm,
            "<tool_call>find\n<arg_key>pattern</arg_key>\n<arg_value>*.txt</arg_value>\n</tool_call>",
        ),
        (
            ToolCallFormat::MiniMaxM2,
            "<minimax:tool_call>\n<invoke name=\"find\">\n<parameter name=\"pattern\">*.txt</parameter>\n</invoke>\n</minimax:tool_call>",
        ),
        (
            ToolCallFormat::DeepSeek,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{\"pattern\": \"*.txt\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        (ToolCallFormat::Kimi, kimi),
    ] {
        let format = open(tool_calls);
        for (text, expected) in [
            (format!("Why?\n\n{call}"), format!("Why?|{FIND}")),
            (format!("Why?\n{call}\n{call}\n"), format!("Why?|{FIND}{FIND}")),
            (format!("Why?\n{call}\n</think>\n\n"), format!("Why?|{FIND}")),
            (format!("Why?\n{call}\n</think>\nSo."), format!("Why?\n{call}|So.")),
            (format!("Why?\n{call}\n</think>\n{call}"), format!("Why?\n{call}|{FIND}")),
            (format!("{call}\nNo.\n{call}"), format!("{call}\nNo.|{FIND}")),
            (format!("{call}\nNo."), format!("{call}\nNo.|")),
            (
                format!("Use <tool_call><function=find><parameter=pattern>x.</think>\n{call}"),
                format!("Use <tool_call><function=find><parameter=pattern>x.|{FIND}"),
            ),
            (
                format!("Use\n<tool_call>find\n<arg_key>pattern</arg_key></think>\n{call}"),
                format!("Use\n<tool_call>find\n<arg_key>pattern</arg_key>|{FIND}"),
            ),
        ] {
            assert_eq!(shown(&format, &text), expected, "{tool_calls} {text}");
        }
        let mut parser = AnswerParser::new(format);
        let mut answer = Answer::default();
        parser.push(call).into_iter().for_each(|part| answer.add(part));
        parser.cut_off().into_iter().for_each(|part| answer.add(part));
        assert_eq!(answer, Answer { reasoning: call.to_owned(), ..Answer::default() });
    }
    // An incomplete one is not a call if the reasoning is closed after it.
    let text = "Why?\n<tool_call>\n<function=now>\n</think>";
    assert_eq!(
        shown(&open(ToolCallFormat::Qwen3Coder), text),
        "Why?\n<tool_call>\n<function=now>|"
    );
    let text = "Some write <tool_call>, others <function=x>.\n</think>\n\nBoth.";
    assert_eq!(
        shown(&open(ToolCallFormat::Qwen3Coder), text),
        "Some write <tool_call>, others <function=x>.|Both."
    );
}

/// Goal: a call that was cut off is not completed, but one whose arguments are complete remains.
#[test]
fn calls_that_are_cut_off_are_text() {
    let cut = |tool_calls: ToolCallFormat, text: &str| {
        let mut parser = AnswerParser::new(format(tool_calls));
        let mut answer = Answer::default();
        parser.push(text).into_iter().for_each(|part| answer.add(part));
        parser.cut_off().into_iter().for_each(|part| answer.add(part));
        answer
    };
    for (tool_calls, text) in [
        (ToolCallFormat::Qwen3Coder, "<tool_call>\n<function=find>\n<parameter=pattern>\n*.t"),
        (
            ToolCallFormat::Qwen3Coder,
            "<tool_call>\n<function=find>\n<parameter=pattern>\n*.txt\n</parameter>\n",
        ),
        (ToolCallFormat::Qwen3Coder, "<tool_call>\n<function=now>\n"),
        (
            ToolCallFormat::Hermes,
            "<tool_call>\n{\"name\": \"find\", \"arguments\": {\"pattern\": \"*.txt\"}",
        ),
        (ToolCallFormat::Glm, "<tool_call>now"),
        (
            ToolCallFormat::Glm,
            "<tool_call>find\n<arg_key>pattern</arg_key>\n<arg_value>*.txt</arg_value>",
        ),
        (ToolCallFormat::Gemma4, "<|tool_call>call:now"),
        (ToolCallFormat::Kimi, "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>"),
        (ToolCallFormat::Pythonic, "[now(), find("),
    ] {
        let expected = Answer { text: text.to_owned(), ..Answer::default() };
        assert_eq!(cut(tool_calls, text), expected, "{text}");
    }
    for (tool_calls, text) in [
        (ToolCallFormat::Hermes, "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}"),
        (ToolCallFormat::Qwen3Coder, "<tool_call>\n<function=now>\n</function>\n</tool_ca"),
        (ToolCallFormat::Gemma4, "<|tool_call>call:now{}"),
    ] {
        assert_eq!(cut(tool_calls, text).calls.len(), 1, "{text}");
    }
}

/// Goal: the headers of gpt-oss may have other words, a call may have no arguments, and the answer
/// may continue reasoning.
#[test]
fn headers_may_be_malformed() {
    let harmony = AnswerFormat {
        reasoning: Some(ReasoningFormat::Harmony),
        ..format(ToolCallFormat::Harmony)
    };
    let found = format!("|{FIND}");
    for (text, expected) in [
        ("<|channel|>commentary to=functions.now<|message|><|call|>", "||now {}"),
        ("<|channel|>commentary to=functions.now<|message|>", "||now {}"),
        (
            "<|channel|>analysis to=functions.find code<|message|>{\"pattern\": \"*.txt\"}<|call|>",
            &found,
        ),
        (
            "<|channel|>––commentary to=find<|constrain|>json<|message|>{\"pattern\": \"*.txt\"}}<|call|>",
            &found,
        ),
        ("<|channel|>commentary to=functions.find<|message|>{'pattern': '*.txt'}<|call|>", &found),
        (
            "<|channel|>commentary to=functions.find<|message|>\"{\\\"pattern\\\": \\\"*.txt\\\"}\"<|call|>",
            &found,
        ),
        ("<|channel|>analysis??<|message|>Why?<|end|><|start|>assistant<|message|>So.", "Why?|So."),
        ("<|message|>So.", "|So."),
        (
            "<|channel|>analysis<|message|>Why?<|end|>Hm. <|start|>assistant<|channel|>final<|message|>So.",
            "Why?|Hm. \n\nSo.",
        ),
        (
            "<|channel|>analysis<|message|>Why?<|end|><|channel|>commentary to=functions.now<|message|>{}<|call|>",
            "Why?||now {}",
        ),
        ("<|channel|>??<|end|><|start|>assistant<|channel|>final<|message|>So.", "|So."),
        ("<|channel|>final So.<|end|>", "|So."),
        ("<|channel|>commentary to=functions.find json{\"pattern\": \"*.txt\"}", &found),
        (
            "<|channel|>commentary to=functions.find <|constrain|>json{\"pattern\": \"*.txt\"}<|call|>",
            &found,
        ),
        ("<|channel|>commentary to=functions.take<|message|>{}<|call|>", "|{}"),
    ] {
        assert_eq!(shown(&harmony, text), expected, "{text}");
    }
    let text = "so.<|end|><|start|>assistant<|channel|>final<|message|>Yes.";
    let continued = AnswerFormat { reasoning_is_open: true, ..harmony };
    assert_eq!(shown(&continued, text), "so.|Yes.");
}

/// Goal: strings end an answer only in its text.
#[test]
fn reasoning_and_calls_do_not_end_an_answer() {
    let call =
        "<tool_call>\n{\"name\": \"find\", \"arguments\": {\"pattern\": \"stop\"}}\n</tool_call>";
    let format = open(ToolCallFormat::Hermes);
    for (text, expected, matched) in [
        (format!("No stop.</think>\nGo {call}"), "No stop.|Go|find {\"pattern\": \"stop\"}", None),
        ("No stop.</think>\nGo. st".to_owned(), "No stop.|Go. st", None),
        (
            format!("No stop.</think>\nGo st{call}op"),
            "No stop.|Go stop|find {\"pattern\": \"stop\"}",
            None,
        ),
        (format!("No stop.</think>\nGo. stop {call}"), "No stop.|Go. ", Some(0)),
        ("stop</think>\n\nstop".to_owned(), "stop|", Some(0)),
    ] {
        for step in [1, 3, 7, 1000] {
            let stops = crate::StopStrings::new(["stop"], false).expect("valid");
            let mut parser = AnswerParser::with_stops(format.clone(), stops);
            let mut answer = Answer::default();
            for piece in text.as_bytes().chunks(step) {
                let piece = std::str::from_utf8(piece).expect("ASCII");
                parser.push(piece).into_iter().for_each(|part| answer.add(part));
            }
            parser.finish().into_iter().for_each(|part| answer.add(part));
            let calls =
                answer.calls.iter().map(|call| format!("|{} {}", call.name, call.arguments));
            let shown =
                format!("{}|{}{}", answer.reasoning, answer.text, calls.collect::<String>());
            assert_eq!((shown.as_str(), parser.matched()), (expected, matched), "{text}");
        }
    }
}

/// Goal: hostile answers take time that grows with their length, and lose no text.
#[test]
fn hostile_answers_take_little_time() {
    let started = std::time::Instant::now();
    for (tool_calls, begin, repeated) in [
        (ToolCallFormat::Qwen3Coder, "", "<tool_call>"),
        (ToolCallFormat::Qwen3Coder, "<function=write><parameter=path>", "<parameter=text>"),
        (ToolCallFormat::Qwen3Coder, "<function=write><parameter=path>", "</function>"),
        (
            ToolCallFormat::Hermes,
            "",
            "<tool_call>{\"name\": \"find\", \"arguments\": {\"pattern\": \"",
        ),
        (ToolCallFormat::Hermes, "<tool_call>", "{"),
        (
            ToolCallFormat::Hermes,
            "<tool_call>{\"name\": \"find\", \"arguments\": {\"pattern\": \"",
            "\"}",
        ),
        (ToolCallFormat::Gemma4, "<|tool_call>call:search{query:<|\"|>", "<|\"|>x,"),
        (ToolCallFormat::Gemma4, "<|tool_call>call:search{query:", ",limit"),
        (ToolCallFormat::Pythonic, "[find(pattern='", "<|python_end|>"),
        (
            ToolCallFormat::Kimi,
            "",
            "<|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{",
        ),
    ] {
        let text = begin.to_owned() + &repeated.repeat((100 << 10) / repeated.len());
        for format in [format(tool_calls), open(tool_calls)] {
            let (mut parser, mut answer) = (AnswerParser::new(format), Answer::default());
            for piece in text.as_bytes().chunks(16) {
                let piece = String::from_utf8_lossy(piece);
                parser.push(&piece).into_iter().for_each(|part| answer.add(part));
            }
            parser.finish().into_iter().for_each(|part| answer.add(part));
            let kept = answer.reasoning.len() + answer.text.len();
            assert!(!answer.calls.is_empty() || kept >= text.len(), "{text:.60}: {kept}");
        }
        assert!(started.elapsed().as_secs() < 100, "{text:.60}");
    }
}

/// Pieces of calls. In the answers of the test, many are missing or doubled.
fn pieces() -> Vec<&'static str> {
    vec![
        "<tool_call>",
        "</tool_call>",
        "\n",
        " ",
        "<function=find>",
        "<function=write>",
        "</function>",
        "<parameter=pattern>",
        "<parameter=path>",
        "<parameter=text>",
        "</parameter>",
        "*.txt",
        "{",
        "}",
        "\"",
        "'",
        ",",
        ":",
        "\"name\"",
        "\"find\"",
        "\"arguments\"",
        "\"pattern\"",
        "{\"name\": \"find\", ",
        "\"arguments\": {\"pattern\": \"x\"}}",
        "[",
        "]",
        "(",
        ")",
        "<|tool_call>",
        "<tool_call|>",
        "call:search{",
        "call:now",
        "query:",
        "limit:3",
        "<|\"|>",
        "kites",
        "tags:",
        "<arg_key>pattern</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "find",
        "now",
        "<|tool_call_begin|>",
        "functions.find:0",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<invoke name=\"find\">",
        "<parameter name=\"pattern\">",
        "</invoke>",
        "</think>",
        "```tool_code",
        "```",
        "find(pattern='x')",
        "[TOOL_CALLS]",
        "[ARGS]",
        "text",
        "é",
        "<",
        "</",
        "<|",
        "<|channel>thought",
        "<channel|>",
        "<think>",
        "\\",
        "null",
        "3",
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    /// Goal: however a call is malformed, the answer does not depend on the pieces, whether it ends
    /// or is cut off, and every call names a function that may be called, and has an object as
    /// arguments.
    #[test]
    fn malformed_answers_do_not_depend_on_the_pieces(
        tool_calls in prop::sample::select(&ToolCallFormat::ALL[..]),
        reasoning in prop::option::of(prop::sample::select(vec![ReasoningFormat::Think, ReasoningFormat::Gemma4])),
        is_open: bool,
        is_cut: bool,
        text in prop::collection::vec(prop::sample::select(pieces()), 0..24),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let text = text.concat();
        let format = AnswerFormat { reasoning, reasoning_is_open: is_open, ..format(tool_calls) };
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
        cuts.retain(|&cut| text.is_char_boundary(cut));
        cuts.extend([0, text.len()]);
        cuts.sort_unstable();
        let read = |cuts: &[usize]| {
            let (mut parser, mut answer) = (AnswerParser::new(format.clone()), Answer::default());
            for cut in cuts.windows(2) {
                parser.push(&text[cut[0]..cut[1]]).into_iter().for_each(|part| answer.add(part));
            }
            let rest = if is_cut { parser.cut_off() } else { parser.finish() };
            rest.into_iter().for_each(|part| answer.add(part));
            answer
        };
        let whole = read(&[0, text.len()]);
        prop_assert_eq!(&read(&cuts), &whole);
        // Nothing that is not markup is lost.
        let kept = |word: &str| {
            let calls = whole.calls.iter().map(|call| call.arguments.matches(word).count());
            let texts = [&whole.reasoning, &whole.text].map(|text| text.matches(word).count());
            calls.chain(texts).sum::<usize>()
        };
        prop_assert_eq!(kept("é"), text.matches('é').count(), "{} {:?}", text, whole);
        if whole.calls.is_empty() && reasoning.is_none() && tool_calls.headers().is_none() {
            prop_assert_eq!(&whole.text, &text);
        }
        for call in &whole.calls {
            prop_assert!(format.functions.iter().any(|function| function.name == call.name));
            prop_assert!(serde_json::from_str::<Value>(&call.arguments).is_ok_and(|json| json.is_object()));
        }
    }
}
