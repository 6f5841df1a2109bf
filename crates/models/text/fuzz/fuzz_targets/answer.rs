//! Arbitrary answers in every format, cut in two at every place: the parts equal the parts of the
//! whole text, and the arguments of every call are a JSON object.
#![no_main]

use libfuzzer_sys::fuzz_target;
use stolon_text::{
    Answer, AnswerFormat, AnswerParser, FunctionSchema, ReasoningFormat, ToolCallFormat,
};

fuzz_target!(|input: (u8, u8, &str)| {
    let (choice, format, text) = input;
    let parameters = serde_json::json!({"properties": {"t": {"type": "string"}}});
    let end = (0..=text.len().min(256)).rev().find(|&end| text.is_char_boundary(end));
    let text = &text[..end.unwrap_or(0)];
    let reasoning = match choice & 64 {
        0 => ReasoningFormat::Think,
        _ => ReasoningFormat::Gemma4,
    };
    let format = AnswerFormat {
        reasoning: (choice & 4 != 0).then_some(reasoning),
        reasoning_is_open: choice & 8 != 0,
        tool_calls: Some(ToolCallFormat::ALL[usize::from(format) % ToolCallFormat::ALL.len()]),
        functions: [FunctionSchema::new("f", parameters)].into(),
        single_call: choice & 16 != 0,
        guaranteed: choice & 32 != 0,
    };
    let whole = Answer::parse(&format, text);
    for call in &whole.calls {
        let arguments: serde_json::Value = serde_json::from_str(&call.arguments).expect("JSON");
        assert!(arguments.is_object());
    }
    for cut in (0..=text.len()).filter(|&cut| text.is_char_boundary(cut)) {
        let (mut parser, mut answer) = (AnswerParser::new(format.clone()), Answer::default());
        parser.push(&text[..cut]).into_iter().for_each(|part| answer.add(part));
        parser.push(&text[cut..]).into_iter().for_each(|part| answer.add(part));
        parser.finish().into_iter().for_each(|part| answer.add(part));
        assert_eq!(answer, whole);
    }
});
