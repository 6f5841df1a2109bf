//! The grammar of an answer with tool calls, in Lark. It accepts the form that
//! [`AnswerParser`](crate::AnswerParser) reads and that models of the format are trained on.

use std::fmt::Write;

use super::{Otherwise, ToolCallGrammar};
use crate::{Tokenizer, ToolCallFormat};

/// Any text, of at least one character.
const TEXT: &str = "TEXT: /(.|\\n)+/\n";

/// A text in a Lark grammar: one special token if the vocabulary has it, else its bytes.
pub(super) fn marker(tokenizer: &Tokenizer, text: &str) -> String {
    match tokenizer.token_id(text).filter(|&token| tokenizer.is_special(token)) {
        Some(token) => format!("<[{token}]>"),
        None => literal(text),
    }
}

/// A text in a Lark grammar, as its bytes.
pub(super) fn literal(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// A rule `name` of a free text that ends with the first `end`.
pub(super) fn text_until(tokenizer: &Tokenizer, name: &str, end: &str) -> String {
    let end = marker(tokenizer, end);
    if end.starts_with('<') {
        // A special token is not part of any text.
        format!("{name}: TEXT? {end}\n{TEXT}")
    } else {
        format!("{name}[suffix={end}]: /(.|\\n)*/\n")
    }
}

/// How the calls of a format are written.
struct Form {
    /// The string that begins a block, and cannot occur in text.
    open: &'static str,
    /// The string after it, before the first call.
    begin: &'static str,
    /// The separator of the calls of a block; `None` if a block has one call.
    separator: Option<&'static str>,
    /// The string that ends a block.
    end: &'static str,
    /// The special token that ends it.
    close: &'static str,
    /// The separator of two blocks; `None` if there can only be one.
    next: Option<&'static str>,
    /// The name of the arguments in the object of a call.
    arguments: &'static str,
}

/// The form of Hermes.
const HERMES: Form = Form {
    open: "<tool_call>",
    begin: "\n",
    separator: None,
    end: "\n",
    close: "</tool_call>",
    next: Some("\n"),
    arguments: "arguments",
};

/// A list of objects that has no markers.
const LIST: Form = Form {
    open: "",
    begin: "[",
    separator: Some(", "),
    end: "]",
    close: "",
    next: None,
    arguments: "arguments",
};

/// Objects in lines.
const LINES: Form = Form { separator: Some("\n"), next: None, ..HERMES };

/// Calls that follow each other.
const ROW: Form = Form { begin: "", separator: Some(""), end: "", ..LIST };

fn form(format: ToolCallFormat, tokenizer: &Tokenizer) -> Form {
    use ToolCallFormat as F;
    match format {
        F::Hermes | F::Qwen3Coder | F::Glm => HERMES,
        F::Llama3Json => {
            Form { begin: "", separator: Some("; "), end: "", arguments: "parameters", ..LIST }
        }
        F::Mistral if tokenizer.token_id("[ARGS]").is_some() => {
            Form { open: "[TOOL_CALLS]", separator: None, next: Some(""), ..ROW }
        }
        F::Mistral => Form { open: "[TOOL_CALLS]", ..LIST },
        // The text must not begin the other form of calls either.
        F::Gemma => Form { open: "```tool_c", begin: "all\n", end: "\n```", close: "", ..HERMES },
        F::Gemma4 => Form { open: "<|tool_call>", close: "<tool_call|>", next: Some(""), ..ROW },
        F::Pythonic => LIST,
        F::Lfm2 => Form { open: "<|tool_call_start|>", close: "<|tool_call_end|>", ..LIST },
        F::MiniMaxM2 => {
            Form { open: "<minimax:tool_call>", close: "</minimax:tool_call>", ..LINES }
        }
        F::MiniMax => Form { open: "<tool_calls>", close: "</tool_calls>", ..LINES },
        F::DeepSeek => {
            Form {
                open: "<｜tool▁calls▁begin｜>", close: "<｜tool▁calls▁end｜>", ..ROW
            }
        }
        F::DeepSeekV32 => {
            let (open, close) = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>");
            Form { open, close, ..LINES }
        }
        F::Kimi => {
            let (open, close) = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>");
            Form { open, close, ..ROW }
        }
        F::Cohere => {
            let (open, close) = ("<|START_ACTION|>", "<|END_ACTION|>");
            Form { open, close, arguments: "parameters", ..LIST }
        }
        F::Granite => Form { open: "<|tool_call|>", ..LIST },
        F::Nemotron => Form { open: "<TOOLCALL>", close: "</TOOLCALL>", ..LIST },
        F::Harmony | F::MuseGlimmer => Form { separator: None, ..ROW },
        F::MiniCpm5 => Form { open: "<function name=", separator: None, next: Some("\n"), ..ROW },
        F::GigaChat3 => Form { open: "<|function_call|>", separator: None, ..ROW },
    }
}

/// A call in a format that writes the name of the function before its arguments; `None` in one that
/// writes an object with both.
fn named_call(
    format: ToolCallFormat,
    tokenizer: &Tokenizer,
    name: &str,
    arguments: &str,
) -> Option<String> {
    let marker = |text: &str| marker(tokenizer, text);
    Some(match format {
        ToolCallFormat::Mistral if tokenizer.token_id("[ARGS]").is_some() => {
            format!("{} {} {arguments}", literal(name), marker("[ARGS]"))
        }
        ToolCallFormat::DeepSeek | ToolCallFormat::Kimi => {
            let [begin, separator, end] = format.call_markers()?.map(marker);
            let name = match format {
                ToolCallFormat::Kimi => {
                    format!("{} /[0-9]{{1,3}}/", literal(&format!("functions.{name}:")))
                }
                _ => literal(name),
            };
            format!("{begin} {name} {separator} {arguments} {end}")
        }
        // In place of the model's own form of values, which has no grammar, it writes JSON.
        ToolCallFormat::Gemma4 => format!("{} {arguments}", literal(&format!("call:{name}"))),
        ToolCallFormat::Harmony => format!(
            "{} {} {} \"json\" {} {arguments}",
            marker("<|channel|>"),
            literal(&format!("commentary to=functions.{name} ")),
            marker("<|constrain|>"),
            marker("<|message|>")
        ),
        ToolCallFormat::MuseGlimmer => {
            format!("{} {} {arguments}", literal(&format!(" to={name}")), marker("<|message|>"))
        }
        ToolCallFormat::MiniCpm5 => {
            format!("{} {arguments} \"</function>\"", literal(&format!("\"{name}\">")))
        }
        _ => return None,
    })
}

/// The header of a message, which is given as its parts.
pub(super) fn header(tokenizer: &Tokenizer, parts: &[&str]) -> String {
    parts.iter().map(|part| marker(tokenizer, part)).collect::<Vec<_>>().join(" ")
}

/// The grammar. The arguments of the function `i` are the grammar `@{arguments}{i}`, and `content`
/// is the name of the grammar of [`Otherwise::Grammar`].
pub(super) fn lark(
    calls: &ToolCallGrammar,
    tokenizer: &Tokenizer,
    arguments: &str,
    content: &str,
) -> String {
    let form = form(calls.format, tokenizer);
    let mut lark = String::new();
    for (index, function) in calls.functions.iter().enumerate() {
        let (name, args) = (&function.name, format!("@{arguments}{index}"));
        let call = named_call(calls.format, tokenizer, name, &args).unwrap_or_else(|| {
            // Models differ in where they write a space.
            let (name, arguments) = (name.replace('.', "\\."), form.arguments);
            format!(r#"/\{{[ \n]?"name": ?"{name}",[ \n]?"{arguments}": ?/ {args} "}}""#)
        });
        let _ = writeln!(lark, "call{index}: {call}");
    }
    let names: Vec<_> = (0..calls.functions.len()).map(|index| format!("call{index}")).collect();
    let _ = writeln!(lark, "call: {}", names.join(" | "));
    let separated = form.separator.filter(|_| !calls.single);
    let more = separated.map_or(String::new(), |text| format!(" ({} call)*", literal(text)));
    let close = if form.close.is_empty() { String::new() } else { marker(tokenizer, form.close) };
    // Some models leave out a line break.
    let spaced = |text: &str| literal(text) + if text == "\n" { "?" } else { "" };
    let (begin, end) = (spaced(form.begin), spaced(form.end));
    let _ = writeln!(lark, "rest: {begin} call{more} {end} {close}");
    let open = if form.open.is_empty() { String::new() } else { marker(tokenizer, form.open) };
    let next = form.next.filter(|_| !calls.single);
    let next = next.map_or(String::new(), |text| format!(" ({} {open} rest)*", spaced(text)));
    let _ = writeln!(lark, "calls: {open} rest{next}");
    // Text is in a separate message.
    let headers = calls.format.headers();
    let text = headers.map_or(String::new(), |headers| header(tokenizer, headers.text));
    match &calls.otherwise {
        Otherwise::Nothing => lark.push_str("start: calls\n"),
        Otherwise::Grammar(_) => {
            let _ = writeln!(lark, "start: calls | {text} @{content}");
        }
        Otherwise::Text if headers.is_some() => {
            let _ = writeln!(lark, "start: calls | {text} TEXT?\n{TEXT}");
        }
        Otherwise::Text if form.open.is_empty() => {
            // A text that begins like a call would be read as one.
            let first = if form.begin.is_empty() { "{" } else { "{\\[" };
            let plain = format!("/[ \\t\\r\\n]*[^{first} \\t\\r\\n](.|\\n)*/");
            let _ = writeln!(lark, "start: calls | PLAIN?\nPLAIN: {plain}");
        }
        Otherwise::Text => {
            let many = if calls.single { "(opened rest)? | TEXT" } else { "(opened rest)* TEXT?" };
            let _ = writeln!(lark, "start: {many}");
            let opened = text_until(tokenizer, "opened", form.open);
            lark.push_str(&opened);
            if !opened.contains(TEXT) {
                lark.push_str(TEXT);
            }
        }
    }
    lark
}
