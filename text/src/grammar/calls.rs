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
    /// What begins a block, and is not part of a text.
    open: &'static str,
    /// What follows it, before the first call.
    begin: &'static str,
    /// What separates the calls of a block; `None` if a block has one call.
    separator: Option<&'static str>,
    /// What ends a block.
    end: &'static str,
    /// The special token that ends it.
    close: &'static str,
    /// What separates two blocks; `None` if there can only be one.
    next: Option<&'static str>,
    /// The name of the arguments. Empty if they follow the function's name and `[ARGS]`.
    arguments: &'static str,
}

fn form(format: ToolCallFormat, tokenizer: &Tokenizer) -> Form {
    let (separator, next) = (None, Some("\n"));
    match format {
        ToolCallFormat::Hermes => Form {
            open: "<tool_call>",
            begin: "\n",
            separator,
            end: "\n",
            close: "</tool_call>",
            next,
            arguments: "arguments",
        },
        ToolCallFormat::Llama3Json => Form {
            open: "",
            begin: "",
            separator: Some("; "),
            end: "",
            close: "",
            next: None,
            arguments: "parameters",
        },
        ToolCallFormat::Mistral if tokenizer.token_id("[ARGS]").is_some() => Form {
            open: "[TOOL_CALLS]",
            begin: "",
            separator,
            end: "",
            close: "",
            next: Some(""),
            arguments: "",
        },
        ToolCallFormat::Mistral => Form {
            open: "[TOOL_CALLS]",
            begin: "[",
            separator: Some(", "),
            end: "]",
            close: "",
            next: None,
            arguments: "arguments",
        },
        ToolCallFormat::Gemma => Form {
            // The text must not begin the other form of calls either.
            open: "```tool_c",
            begin: "all\n",
            separator,
            end: "\n```",
            close: "",
            next,
            arguments: "arguments",
        },
    }
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
        let call = if form.arguments.is_empty() {
            format!("{} {} {args}", literal(name), marker(tokenizer, "[ARGS]"))
        } else {
            // Models differ in where they write a space.
            let (name, arguments) = (name.replace('.', "\\."), form.arguments);
            format!(r#"/\{{[ \n]?"name": ?"{name}",[ \n]?"{arguments}": ?/ {args} "}}""#)
        };
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
    match &calls.otherwise {
        Otherwise::Nothing => lark.push_str("start: calls\n"),
        Otherwise::Grammar(_) => {
            let _ = writeln!(lark, "start: calls | @{content}");
        }
        Otherwise::Text if form.open.is_empty() => {
            // A text that begins with a brace would be read as a call.
            lark.push_str("start: calls | PLAIN?\nPLAIN: /[ \\t\\r\\n]*[^{ \\t\\r\\n](.|\\n)*/\n");
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
