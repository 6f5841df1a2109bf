use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

/// Functions with an argument `a` of any type and a string `t`.
fn functions() -> Arc<[FunctionSchema]> {
    let parameters = json!({"properties": {"t": {"type": "string"}}});
    let function = |name: &str| FunctionSchema::new(name, parameters.clone());
    ["get", "put"].map(function).into()
}

fn format(tool_calls: Option<ToolCallFormat>, reasoning: bool) -> AnswerFormat {
    AnswerFormat {
        reasoning: reasoning.then_some(ReasoningFormat::Think),
        tool_calls,
        functions: functions(),
        ..AnswerFormat::default()
    }
}

/// The answer as `reasoning|text|name arguments|...`.
fn shown(format: &AnswerFormat, text: &str) -> String {
    let answer = Answer::parse(format, text);
    let calls = answer.calls.iter().map(|call| format!("|{} {}", call.name, call.arguments));
    format!("{}|{}{}", answer.reasoning, answer.text, calls.collect::<String>())
}

/// Goal: calls in each format are found, with the text around them.
#[test]
fn calls_are_found_in_every_format() {
    use ToolCallFormat::{Gemma, Hermes, Llama3Json, Mistral};
    let get = r#"{"name": "get", "arguments": {"a": [1, "}"]}}"#;
    let parameters = r#"{"name": "get", "parameters": {"a": 1}}"#;
    let reversed = r#"{"arguments": {"a": 1}, "name": "put"}"#;
    for (format_of, text, expected) in [
        (Hermes, format!("One.\n<tool_call>\n{get}\n</tool_call>"), r#"|One.|get {"a": [1, "}"]}"#),
        (
            Hermes,
            format!("<tool_call>{get}</tool_call>\n<tool_call>\n{reversed}</tool_call> End. "),
            r#"|End. |get {"a": [1, "}"]}|put {"a": 1}"#,
        ),
        (Hermes, format!("<tool_call>{get}"), r#"||get {"a": [1, "}"]}"#),
        (
            Hermes,
            r#"<tool_call>{"name":"get","arguments":"{\"a\":1}"}"#.to_owned(),
            r#"||get {"a":1}"#,
        ),
        (Hermes, r#"<tool_call>{"name":"get"}</tool_call>"#.to_owned(), "||get {}"),
        (Hermes, r#"<tool_call>{"arguments":null,"name":"get"}"#.to_owned(), "||get {}"),
        (Llama3Json, parameters.to_owned(), r#"||get {"a": 1}"#),
        (Llama3Json, format!("\n{parameters}; {parameters}"), r#"||get {"a": 1}|get {"a": 1}"#),
        (Llama3Json, format!("So <|python_tag|>{parameters}"), r#"|So|get {"a": 1}"#),
        (
            Mistral,
            format!("[TOOL_CALLS][{get}, {reversed}]"),
            r#"||get {"a": [1, "}"]}|put {"a": 1}"#,
        ),
        (
            Mistral,
            "Hm. [TOOL_CALLS]get[ARGS]{\"a\": 1}[TOOL_CALLS]put[CALL_ID]abc[ARGS]{}".to_owned(),
            "|Hm.|get {\"a\": 1}|put {}",
        ),
        (Mistral, "[TOOL_CALLS]get{\"a\": {}}".to_owned(), "||get {\"a\": {}}"),
        (Gemma, format!("```tool_call\n{get}\n```"), r#"||get {"a": [1, "}"]}"#),
        (
            Gemma,
            "I do.\n```tool_code\nget(a=1)\nput()\n``` Ok".to_owned(),
            r#"|I do.Ok|get {"a":1}|put {}"#,
        ),
        (Gemma, "```tool_code\n[get(a='x')]".to_owned(), r#"||get {"a":"x"}"#),
    ] {
        assert_eq!(shown(&format(Some(format_of), false), &text), expected, "{text}");
    }
}

/// Goal: calls that are not JSON are found in the forms that models write, and as JSON between the
/// same markers.
#[test]
fn calls_in_forms_of_their_own_are_found() {
    use ToolCallFormat::{
        Cohere, DeepSeek, DeepSeekV32, Gemma4, GigaChat3, Glm, Granite, Kimi, Lfm2, MiniCpm5,
        MiniMax, MiniMaxM2, Nemotron, Pythonic, Qwen3Coder,
    };
    let json = r#"{"name": "get", "arguments": {"a": 1}}"#;
    for (format_of, text, expected) in [
        (Pythonic, "[get(a=1), put(t='x')]", r#"||get {"a":1}|put {"t":"x"}"#),
        (Pythonic, "<|python_start|>[get(a=[True])]<|python_end|>", r#"||get {"a":[true]}"#),
        (Pythonic, &format!("[{json}]"), r#"||get {"a": 1}"#),
        (
            Gemma4,
            "So.\n<|tool_call>call:get{a:[1,<|\"|>}<tool_call|><|\"|>]}<tool_call|>\
             <|tool_call>call:put{}<tool_call|>",
            r#"|So.|get {"a":[1,"}<tool_call|>"]}|put {}"#,
        ),
        (Gemma4, &format!("<|tool_call>{json}<tool_call|>"), r#"||get {"a": 1}"#),
        (Gemma4, "\ncall:get{a:1}call:put{t:<|\"|>x<|\"|>}", r#"||get {"a":1}|put {"t":"x"}"#),
        (Gemma4, "call:get{a:1}<tool_call|>Well", r#"|Well|get {"a":1}"#),
        (Lfm2, "So<|tool_call_start|>[get(a=1)]<|tool_call_end|>x", r#"|Sox|get {"a":1}"#),
        (
            Qwen3Coder,
            "I look.\n<tool_call>\n<function=get>\n<parameter=a>\n1\n</parameter>\n\
             <parameter=t>\n</tool_call>\n2\n</parameter>\n</function>\n</tool_call>\n\
             <tool_call>\n<function=put>\n</function>\n</tool_call>",
            "|I look.|get {\"a\":1,\"t\":\"</tool_call>\\n2\"}|put {}",
        ),
        (Qwen3Coder, &format!("<tool_call>\n{json}\n</tool_call>"), r#"||get {"a": 1}"#),
        (
            Glm,
            "<tool_call>get\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n\
             <arg_key>t</arg_key><arg_value>2</arg_value>\n</tool_call>",
            r#"||get {"a":1,"t":"2"}"#,
        ),
        (Glm, "<tool_call>get</tool_call>", "||get {}"),
        (
            MiniMaxM2,
            "<minimax:tool_call>\n<invoke name=\"get\">\n<parameter name=\"a\">1</parameter>\n\
             </invoke>\n<invoke name=\"put\"></invoke>\n</minimax:tool_call>",
            r#"||get {"a":1}|put {}"#,
        ),
        (MiniMax, &format!("<tool_calls>\n{json}\n{json}\n</tool_calls>"), "TWO"),
        (
            DeepSeek,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜>\
             <｜tool▁calls▁end｜>",
            r#"||get {"a": 1}"#,
        ),
        (
            DeepSeek,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n{\"a\": 1}\n\
             ```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>put\n```json\n{}\n```\
             <｜tool▁call▁end｜>",
            r#"||get {"a": 1}|put {}"#,
        ),
        (
            DeepSeekV32,
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"get\">\n\
             <｜DSML｜parameter name=\"a\" string=\"true\">1</｜DSML｜parameter>\n\
             <｜DSML｜parameter name=\"b\" string=\"false\">[1]</｜DSML｜parameter>\n\
             </｜DSML｜invoke>\n</｜DSML｜function_calls>",
            r#"||get {"a":"1","b":[1]}"#,
        ),
        (
            Kimi,
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0\
             <|tool_call_argument_begin|>{\"a\": 1}<|tool_call_end|><|tool_calls_section_end|>",
            r#"||get {"a": 1}"#,
        ),
        (
            Cohere,
            "<|START_ACTION|>[\n  {\"tool_call_id\": \"0\", \"tool_name\": \"get\", \
             \"parameters\": {\"a\": 1}}\n]<|END_ACTION|>",
            r#"||get {"a": 1}"#,
        ),
        (Granite, &format!("<|tool_call|>[{json}, {json}]"), "TWO"),
        (Granite, &format!("I look.\n<|tool_call|> [{json}]"), r#"|I look.|get {"a": 1}"#),
        (Nemotron, &format!("<TOOLCALL>[{json}, {json}]</TOOLCALL>"), "TWO"),
        (
            Nemotron,
            &format!("I look.\n<TOOLCALL>[{json}]</TOOLCALL>\n"),
            r#"|I look.|get {"a": 1}"#,
        ),
        (
            MiniCpm5,
            "I look.\n<function name=\"get\"><param name=\"a\">1</param><param name=\"t\">\
             <![CDATA[\n</param></function> & so\n]]></param></function>\n\
             <function name=\"put\"><param name=\"t\"> x</param></function>",
            "|I look.|get {\"a\":1,\"t\":\"\\n</param></function> & so\\n\"}|put {\"t\":\" x\"}",
        ),
        (MiniCpm5, "<function name=\"get\"></function>", "||get {}"),
        (GigaChat3, &format!("I look.<|function_call|>{json}"), r#"|I look.|get {"a": 1}"#),
    ] {
        let two = r#"||get {"a": 1}|get {"a": 1}"#;
        let expected = if expected == "TWO" { two } else { expected };
        assert_eq!(shown(&format(Some(format_of), false), text), expected, "{text}");
    }
}

/// Goal: the channels of gpt-oss become reasoning, text and calls, and broken ones text.
#[test]
fn channels_are_told_apart() {
    let harmony = AnswerFormat {
        reasoning: Some(ReasoningFormat::Harmony),
        ..format(Some(ToolCallFormat::Harmony), false)
    };
    let call = "<|channel|>commentary to=functions.get <|constrain|>json<|message|>";
    for (text, expected) in [
        (
            "<|channel|>analysis<|message|>Why?<|end|><|start|>assistant<|channel|>final<|message|>So.",
            "Why?|So.",
        ),
        (&format!("{call}{{\"a\": 1}}"), "||get {\"a\": 1}"),
        (&format!("{call}{{\"a\": 1}}<|call|>"), "||get {\"a\": 1}"),
        (&format!("{call}{{\"a\": "), "|{\"a\": "),
        (" to=functions.put<|channel|>commentary json<|message|>{}<|call|>", "||put {}"),
        ("<|channel|>commentary to=browser.search<|message|>x", "|x"),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>Ok",
            "|I look.\n\nOk",
        ),
        ("Plain text", "|Plain text"),
        ("Plain text <|end|>", "|Plain text "),
        ("<|channel|>ana", "|<|channel|>ana"),
        ("<|channel|>final<|message|>a<|end|><|start|>assi", "|a"),
        ("<|channel|>final<|message|>Llama 4 ends with <|eot|>.", "|Llama 4 ends with <|eot|>."),
    ] {
        assert_eq!(shown(&harmony, text), expected, "{text}");
    }
    let many = format!("<|channel|>{}", "x".repeat(2 << 20));
    assert_eq!(shown(&harmony, &many), format!("|{many}"));
}

/// Goal: the messages of Muse Glimmer become reasoning, text and calls by their recipients: what
/// looks like a call in a message to the user, or to the model itself, is none.
#[test]
fn recipients_are_told_apart() {
    let muse = AnswerFormat {
        reasoning: Some(ReasoningFormat::MuseGlimmer),
        ..format(Some(ToolCallFormat::MuseGlimmer), false)
    };
    let invoke = "<atem:invoke name=\"put\">\n<atem:parameter name=\"t\">a\nb\n</atem:parameter>\n</atem:invoke>\n";
    let block = format!("<atem:function_calls>\n{invoke}</atem:function_calls>");
    let two = format!("<atem:function_calls>\n{invoke}{invoke}</atem:function_calls>");
    let (call, next) = (r#"put {"t":"a\nb\n"}"#, "<|eom|><|start|>assistant");
    for (text, expected) in [
        (" to=user<|message|>So.<|eot|>", "|So.".to_owned()),
        (&format!(" to=self<|message|>Why?{next} to=user<|message|>So.<|eot|>"), "Why?|So.".into()),
        (&format!(" to=put<|message|>{block}<|eot|>"), format!("||{call}")),
        (&format!(" to=tools.put<|message|>{block}"), format!("||{call}")),
        (&format!(" to=put<|message|>{two}<|eot|>"), format!("||{call}|{call}")),
        (
            &format!(
                " to=user<|message|>I look.{next} to=put<|message|>{block}{next} to=put<|message|>{block}"
            ),
            format!("|I look.|{call}|{call}"),
        ),
        (&format!(" to=user<|message|>Write {block}<|eot|>"), format!("|Write {block}")),
        (
            &format!(" to=self<|message|>Or {block}?{next} to=user<|message|>No."),
            format!("Or {block}?|No."),
        ),
        (" to=put<|message|><atem:function_calls>x", "|<atem:function_calls>x".into()),
        (" to=nobody<|message|>Hm.", "|Hm.".into()),
        (" to=user<|message|>Phi ends with <|end|>.<|eot|>", "|Phi ends with <|end|>.".into()),
        ("Plain text<|eot|>", "|Plain text".into()),
    ] {
        assert_eq!(shown(&muse, text), expected, "{text}");
    }
}

/// Goal: a call whose form is not guaranteed is passed on when it is complete, so that a client
/// never sees the beginning of one that is broken.
#[test]
fn broken_calls_are_not_begun() {
    let mut parser = AnswerParser::new(format(Some(ToolCallFormat::Hermes), false));
    let text = "<tool_call>{\"name\": \"get\", \"arguments\": {\"a\": ";
    assert_eq!(parser.push(text), []);
    let text_of = |parts: Vec<AnswerPart>| -> Option<String> {
        parts.into_iter().map(AnswerPart::into_text).collect()
    };
    assert_eq!(text_of(parser.finish()).as_deref(), Some(text));
}

/// Goal: text that is not a call stays unchanged.
#[test]
fn what_is_not_a_call_is_text() {
    use ToolCallFormat::{
        Gemma, Gemma4, Glm, Hermes, Kimi, Llama3Json, Mistral, Pythonic, Qwen3Coder,
    };
    for (format_of, text) in [
        (Hermes, "no call <tool_cal"),
        (Hermes, " x\n<tool_call>\n{\"name\": \"get\", \"arguments\": {\"a\": 1"),
        (
            Hermes,
            "<tool_call>{\"name\": \"get\", \"arguments\": {\"a\": x}}</tool_call> <tool_call>",
        ),
        (Hermes, "<tool_call>get</tool_call>"),
        (Hermes, "<tool_call>{\"name\": 1}</tool_call>"),
        (Hermes, "<tool_call>{\"name\": \"a\", \"name\": \"b\"}"),
        (Hermes, "<tool_call>{\"name\": \"a\", \"arguments\": [1]}"),
        (Hermes, "<tool_call>{\"arguments\": {}}"),
        (Llama3Json, " {\"name\": \"Ada\", \"parameters\": {}} "),
        (Llama3Json, "{\"answer\": 42}"),
        (Llama3Json, "<|python_tag|>print(1)"),
        (Mistral, "[TOOL_CALLS]get[X]{}"),
        (Gemma, "```tool_code\nimport os\n```\n"),
        (Pythonic, "[1] is a footnote."),
        (Pythonic, "[take(a=1)]"),
        (Pythonic, "[get(a=1)] and text"),
        (Qwen3Coder, "<tool_call>\n<function=take>\n<parameter=a>\n1\n</parameter>\n</function>"),
        (Glm, "<tool_call>take\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>"),
        (Kimi, "<|tool_calls_section_begin|><|tool_call_begin|>take<|tool_call_end|>"),
        (Gemma4, "<|tool_call>call:get{a:1"),
        (Gemma4, "call:take{a:1}"),
        (Gemma4, "call:get it"),
        (Gemma4, "I call:get{a:1}"),
        (Gemma4, "call:ge"),
    ] {
        assert_eq!(shown(&format(Some(format_of), false), text), format!("|{text}"));
    }
    let one_then_broken = "<tool_call>{\"name\": \"get\"}</tool_call><tool_call>{\"name\": }";
    let expected = "|<tool_call>{\"name\": }|get {}";
    assert_eq!(shown(&format(Some(Hermes), false), one_then_broken), expected);
}

/// Goal: reasoning is split off, whether the answer or the prompt begins it; tags elsewhere are
/// text.
#[test]
fn reasoning_is_split_off() {
    let closed = format(Some(ToolCallFormat::Hermes), true);
    let open = AnswerFormat { reasoning_is_open: true, ..closed.clone() };
    for (format, text, expected) in [
        (&closed, "\n<think>\nWhy?\n</think>\n\nSo.\n", "Why?|So.\n"),
        (&closed, "<think></think>So.", "|So."),
        (&closed, "<think>Why? </thi", "Why? </thi|"),
        (&closed, " So. <think>no</think>", "| So. <think>no</think>"),
        (&closed, "<thin", "|<thin"),
        (&open, "Why?\n</think>\n\nSo.", "Why?|So."),
        (&open, "\nWhy?", "Why?|"),
        (
            &open,
            "<tool_call></think>\n<tool_call>{\"name\": \"get\"}</tool_call>",
            "<tool_call>||get {}",
        ),
    ] {
        assert_eq!(shown(format, text), expected, "{text}");
    }
    let off = AnswerFormat::default();
    assert_eq!(shown(&off, " <think>x</think> "), "| <think>x</think> ");
}

/// Goal: Gemma 4 may reason again after a text, and calls may end its reasoning, or follow it
/// without a marker.
#[test]
fn reasoning_and_calls_of_gemma_alternate() {
    let gemma = AnswerFormat {
        reasoning: Some(ReasoningFormat::Gemma4),
        ..format(Some(ToolCallFormat::Gemma4), false)
    };
    for (text, expected) in [
        ("<|channel>thought\nWhy?\n<channel|>So.", "Why?|So."),
        ("<|channel>thought\n<channel|>So.", "|So."),
        ("<|channel>thought\nA<|tool_call>call:get{}<tool_call|>", "A||get {}"),
        ("<|channel>thought\nA\n<channel|>call:get{a:1}", "A||get {\"a\":1}"),
        (
            "<|channel>thought\nA<channel|>B\n<|channel>thought\nC<channel|>\
             <|tool_call>call:get{}<tool_call|>",
            "AC|B|get {}",
        ),
        ("So <|channel>", "|So <|channel>"),
    ] {
        assert_eq!(shown(&gemma, text), expected, "{text}");
    }
    let without_tools = AnswerFormat { tool_calls: None, ..gemma };
    let text = "<|channel>thought\nWhy?<channel|>So. <|tool_call>";
    assert_eq!(shown(&without_tools, text), "Why?|So. <|tool_call>");
}

/// Goal: with a single call, everything after the first call is dropped.
#[test]
fn a_single_call_ends_the_answer() {
    for (format_of, text) in [
        (
            ToolCallFormat::Hermes,
            "x<tool_call>{\"name\": \"get\"}</tool_call><tool_call>{\"name\": \"put\"}",
        ),
        (ToolCallFormat::Gemma, "x```tool_code\nget()\nput()```"),
    ] {
        let single = AnswerFormat { single_call: true, ..format(Some(format_of), false) };
        assert_eq!(shown(&single, text), "|x|get {}");
    }
}

/// Goal: endless calls and very many calls become text, and memory stays bounded by the text.
#[test]
fn endless_calls_become_text() {
    let hermes = format(Some(ToolCallFormat::Hermes), false);
    let start = "<tool_call>{\"name\": \"get\", \"arguments\": {\"a\": \"";
    let text = start.to_owned() + &"x".repeat(3 << 20);
    assert_eq!(Answer::parse(&hermes, &text), Answer { text: text.clone(), ..Answer::default() });
    let many = "<tool_call>{\"name\": \"get\"}</tool_call>".repeat(MAX_CALLS + 1);
    let answer = Answer::parse(&hermes, &many);
    assert_eq!(answer.calls.len(), MAX_CALLS);
    assert!(answer.text.ends_with("<tool_call>{\"name\": \"get\"}</tool_call>"));
}

/// Goal: arguments of guaranteed calls are passed on while they arrive, after the name.
#[test]
fn arguments_arrive_in_pieces() {
    let hermes = format(Some(ToolCallFormat::Hermes), false);
    let mut parser = AnswerParser::new(AnswerFormat { guaranteed: true, ..hermes });
    let mut parts = Vec::new();
    for piece in
        ["Ok <tool", "_call>{\"name\": \"get\", \"argu", "ments\": {\"a\":", " 1", "}", "}"]
    {
        parts.push(parser.push(piece));
    }
    let json = |json: &str| AnswerPart::Arguments { index: 0, json: json.to_owned() };
    assert_eq!(parts[0], [AnswerPart::Text("Ok".to_owned())]);
    assert_eq!(parts[1], [AnswerPart::Call { index: 0, name: "get".to_owned() }]);
    assert_eq!(parts[2..5], [[json("{\"a\":")], [json(" 1")], [json("}")]]);
    assert_eq!(parts[5], [AnswerPart::CallEnd { index: 0 }]);
    assert_eq!(parser.finish(), []);
}

/// Goal: a guaranteed call that the end of the answer cuts off is kept as far as it was generated,
/// and is not repeated as text.
#[test]
fn a_guaranteed_call_that_is_cut_off_remains() {
    let hermes = format(Some(ToolCallFormat::Hermes), false);
    let guaranteed = AnswerFormat { guaranteed: true, ..hermes };
    for text in
        ["<tool_call>{\"name\": \"get\", \"arguments\": {\"a", "<tool_call>{\"name\": \"get\""]
    {
        let answer = Answer::parse(&guaranteed, text);
        let arguments = text.split_once("\"arguments\": ").map_or("", |(_, arguments)| arguments);
        let call = ToolCall { name: "get".to_owned(), arguments: arguments.to_owned() };
        assert_eq!(answer, Answer { calls: vec![call], ..Answer::default() });
    }
    let nameless = "<tool_call>{\"na";
    assert_eq!(shown(&guaranteed, nameless), format!("|{nameless}"));
}

/// A guaranteed call of `get` with these arguments, as the grammar of the format writes it.
fn guaranteed_call(format: ToolCallFormat, arguments: &str) -> String {
    use ToolCallFormat as F;
    let object = format!("{{\"name\": \"get\", \"arguments\": {arguments}}}");
    let parameters = object.replace("arguments", "parameters");
    match format {
        F::Hermes | F::Qwen3Coder | F::Glm => format!("<tool_call>\n{object}\n</tool_call>"),
        F::Llama3Json => parameters,
        F::Mistral => format!("[TOOL_CALLS]get[ARGS]{arguments}"),
        F::Gemma => format!("```tool_call\n{object}\n```"),
        F::Gemma4 => format!("<|tool_call>call:get{arguments}<tool_call|>"),
        F::Pythonic => format!("[{object}]"),
        F::Lfm2 => format!("<|tool_call_start|>[{object}]<|tool_call_end|>"),
        F::MiniMaxM2 => format!("<minimax:tool_call>\n{object}\n</minimax:tool_call>"),
        F::MiniMax => format!("<tool_calls>\n{object}\n</tool_calls>"),
        F::DeepSeek => {
            let call = "<｜tool▁call▁begin｜>get<｜tool▁sep｜>";
            let end = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
            format!("<｜tool▁calls▁begin｜>{call}{arguments}{end}")
        }
        F::DeepSeekV32 => {
            format!("<｜DSML｜function_calls>\n{object}\n</｜DSML｜function_calls>")
        }
        F::Kimi => {
            let call = "<|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>";
            let end = "<|tool_call_end|><|tool_calls_section_end|>";
            format!("<|tool_calls_section_begin|>{call}{arguments}{end}")
        }
        F::Cohere => format!("<|START_ACTION|>[{parameters}]<|END_ACTION|>"),
        F::Granite => format!("<|tool_call|>[{object}]"),
        F::Nemotron => format!("<TOOLCALL>[{object}]</TOOLCALL>"),
        F::MuseGlimmer => format!(" to=get<|message|>{arguments}"),
        F::MiniCpm5 => format!("<function name=\"get\">{arguments}</function>"),
        F::GigaChat3 => format!("<|function_call|>{object}"),
        F::Harmony => {
            let header = "<|channel|>commentary to=functions.get <|constrain|>json<|message|>";
            format!("{header}{arguments}")
        }
    }
}

/// Goal: in every format, a guaranteed call whose arguments have begun stays as far as it came,
/// wherever the end of the answer cuts it off, whole and in pieces alike, and no part of it is text.
#[test]
fn guaranteed_calls_of_every_format_remain() {
    let arguments = r#"{"a": [1, "}"], "t": "é <x> 'y'"}"#;
    for tool_calls in ToolCallFormat::ALL {
        let text = guaranteed_call(tool_calls, arguments);
        let begin = text.find(arguments).expect("the arguments");
        let format = AnswerFormat { guaranteed: true, ..format(Some(tool_calls), false) };
        for end in (begin + 1..=text.len()).filter(|&end| text.is_char_boundary(end)) {
            let came = arguments.get(..end - begin).unwrap_or(arguments);
            let call = ToolCall { name: "get".to_owned(), arguments: came.to_owned() };
            let answer = Answer::parse(&format, &text[..end]);
            let expected = Answer { calls: vec![call], ..Answer::default() };
            assert_eq!(answer, expected, "{tool_calls:?}: {:?}", &text[..end]);
            let mut parser = AnswerParser::new(format.clone());
            let mut parts: Vec<AnswerPart> =
                text[..end].chars().flat_map(|char| parser.push(&char.to_string())).collect();
            parts.extend(parser.finish());
            let mut streamed = String::new();
            for part in parts {
                match part {
                    AnswerPart::Call { name, .. } => assert_eq!(name, "get"),
                    AnswerPart::Arguments { json, .. } => streamed.push_str(&json),
                    AnswerPart::CallEnd { .. } => assert_eq!(came, arguments),
                    other => panic!("{tool_calls:?}: {:?}: {other:?}", &text[..end]),
                }
            }
            assert_eq!(streamed, came, "{tool_calls:?}: {:?}", &text[..end]);
        }
    }
}

fn any_format() -> impl Strategy<Value = AnswerFormat> {
    let calls = prop::option::of(prop::sample::select(&ToolCallFormat::ALL[..]));
    let tagged = vec![ReasoningFormat::Think, ReasoningFormat::Gemma4];
    let reasoning = prop::option::of(prop::sample::select(tagged));
    (calls, reasoning, any::<[bool; 3]>()).prop_map(
        |(calls, reasoning, [open, single, guaranteed])| AnswerFormat {
            reasoning,
            reasoning_is_open: open,
            single_call: single,
            guaranteed,
            ..format(calls, false)
        },
    )
}

/// Calls of all formats, and their pieces.
fn pieces_of_calls() -> Vec<&'static str> {
    vec![
        "<|python_start|>",
        "[get(a=1)]",
        "<|python_end|>",
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        "<function=get>",
        "<parameter=t>1</parameter>",
        "</function>",
        "get\n<arg_key>a</arg_key>",
        "<arg_value>1</arg_value>",
        "<minimax:tool_call>",
        "<invoke name=\"get\">",
        "<parameter name=\"a\">1</parameter>",
        "</invoke>",
        "</minimax:tool_call>",
        "<tool_calls>",
        "</tool_calls>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>get<｜tool▁sep｜>{}",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "<｜DSML｜function_calls>",
        "<｜DSML｜invoke name=\"get\">",
        "<｜DSML｜parameter name=\"a\" string=\"true\">1</｜DSML｜parameter>",
        "</｜DSML｜invoke>",
        "</｜DSML｜function_calls>",
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>{}",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
        "<|channel>thought",
        "<channel|>",
        "call:get{",
        "a:1}",
        "<|tool_call>",
        "call:get{a:",
        "<|\"|>x<|\"|>}",
        "<tool_call|>",
        "<|START_ACTION|>",
        "{\"tool_name\": \"get\", \"parameters\": {}}",
        "<|END_ACTION|>",
        "<|channel|>analysis",
        "<|channel|>final",
        "<|channel|>commentary to=functions.get <|constrain|>json",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "<|start|>assistant",
        " to=self",
        "<|message|>",
        "<|eom|>",
        "<|start|>assistant",
        " to=get",
        "<|message|>",
        "<atem:function_calls>",
        "<atem:invoke name=\"get\">",
        "<atem:parameter name=\"a\">1</atem:parameter>",
        "</atem:invoke>",
        "</atem:function_calls>",
        "<|eot|>",
        "<|function_call|>",
        "<function name=\"get\">",
        "<param name=\"t\"><![CDATA[",
        "]]></param>",
    ]
}

/// Texts that consist of pieces which matter to the parser.
fn any_text() -> impl Strategy<Value = String> {
    let pieces = [
        "<tool_call>",
        "</tool_call>",
        "{\"name\": \"get\", \"arguments\": {\"a\": 1}}",
        "{\"name\"",
        ": \"put\"",
        ", \"parameters\": ",
        "{\"b\": [\"é}\"]}",
        "}",
        "{",
        "[",
        "]",
        "[TOOL_CALLS]",
        "get",
        "[ARGS]",
        "<|python_tag|>",
        "```tool_code",
        "```",
        "put(a=1)",
        "<think>",
        "</think>",
        " ",
        "\n",
        ",",
        ";",
        "text",
        "<",
        "</t",
        "\"",
        "{}",
        "😀",
    ];
    let pieces = [pieces.to_vec(), pieces_of_calls()].concat();
    // The pieces of a call follow each other in the list.
    let neighbors = (0..pieces.len(), 1..6_usize).prop_map(move |(first, count)| {
        pieces[first..].iter().take(count).copied().collect::<String>()
    });
    prop::collection::vec(neighbors, 0..8).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    /// Goal: the answer does not depend on how its text is cut into pieces; each call is complete,
    /// with arguments that are an object, but the last one if it is guaranteed; and without calls
    /// and reasoning the text is unchanged.
    #[test]
    fn pieces_do_not_matter(
        format in any_format(),
        text in any_text(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let whole = Answer::parse(&format, &text);
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
        cuts.retain(|&cut| text.is_char_boundary(cut));
        cuts.extend([0, text.len()]);
        cuts.sort_unstable();
        let (mut parser, mut answer) = (AnswerParser::new(format.clone()), Answer::default());
        let mut open = None;
        let mut parts = Vec::new();
        for cut in cuts.windows(2) {
            parts.extend(parser.push(&text[cut[0]..cut[1]]));
        }
        parts.extend(parser.finish());
        for part in parts {
            match &part {
                AnswerPart::Call { index, .. } => {
                    prop_assert_eq!((open, *index), (None, answer.calls.len()));
                    open = Some(*index);
                }
                AnswerPart::Arguments { index, .. } => prop_assert_eq!(open, Some(*index)),
                AnswerPart::CallEnd { index } => prop_assert_eq!(open.take(), Some(*index)),
                AnswerPart::Reasoning(_) | AnswerPart::Text(_) => prop_assert_eq!(open, None),
            }
            answer.add(part);
        }
        prop_assert!(open.is_none() || format.guaranteed);
        prop_assert_eq!(&answer, &whole);
        for call in &whole.calls[..open.unwrap_or(whole.calls.len())] {
            prop_assert!(serde_json::from_str::<Value>(&call.arguments).is_ok_and(|json| json.is_object()));
        }
        let has_headers = format.tool_calls.is_some_and(|format| format.headers().is_some());
        if whole.calls.is_empty() && format.reasoning.is_none() && !has_headers {
            prop_assert_eq!(&whole.text, &text);
        }
    }
}
