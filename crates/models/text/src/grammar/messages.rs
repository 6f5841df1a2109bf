//! [`message`]: errors of the grammar library in this project's words. Its own are written for
//! those who work on it: they name its types, options and states.

const TOO_COMPLEX: &str = "the grammar is too complex: it has too many alternatives in one place, \
                           too large repetitions, or too many ways to read the same text";
/// The reason why a grammar is refused, if nothing more precise is known.
pub(super) const FAILED: &str = "the grammar cannot be compiled";
/// Maximum length of the message of an error, in bytes.
const MAX_MESSAGE: usize = 400;

/// The beginnings of the text after the part of an error that is about the grammar: the state of
/// the parser, and the lines of the grammar.
const STATE: [&str; 5] =
    ["\n<state>", "\n<non-verbose", "\n<backtrace>", "\n  while processing", "\n   1 | "];

/// Parts of error messages, and the reason that each stands for.
const MEANINGS: [(&str, &str); 19] = [
    ("operation cancelled", TOO_COMPLEX),
    ("ParserTooComplex", TOO_COMPLEX),
    ("LexerTooComplex", TOO_COMPLEX),
    (" max is ", TOO_COMPLEX),
    ("Too many items", TOO_COMPLEX),
    ("too many expressions", TOO_COMPLEX),
    ("too many states", TOO_COMPLEX),
    ("fuel", TOO_COMPLEX),
    ("too big", TOO_COMPLEX),
    ("schema too large", "the schema is too large: its alternatives have too many combinations"),
    ("stack level", "the schema is too large: its alternatives have too many combinations"),
    (
        "NoExtensionBias",
        "no text can follow the grammar, for example because a rule or a `$ref` leads only to itself",
    ),
    (
        "lookarounds not supported",
        "a regular expression cannot look around: `\\b`, and `^` and `$` inside of it, are not \
         supported",
    ),
    (
        "patternProperty regex",
        "expected patterns in `patternProperties` of which no two match the same name",
    ),
    ("circular references", "a `$ref` that leads to itself cannot have other keywords next to it"),
    ("'multipleOf' has too many digits", "`multipleOf` has too many digits"),
    ("no start rule", "the grammar has no rule `start`"),
    ("schema is false", "no value is valid under the schema `false`"),
    ("incompatible types", "no value is valid under the schema: its types and values exclude all"),
];

/// The statement of a library error about the grammar.
pub(super) fn message(error: &str) -> String {
    let end = STATE.iter().filter_map(|mark| error.find(mark)).min().unwrap_or(error.len());
    let mut text = meaning(error[..end].trim());
    if text.len() > MAX_MESSAGE {
        let end = (0..=MAX_MESSAGE).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
        text.truncate(end);
        text.push_str("...");
    }
    text
}

fn meaning(error: &str) -> String {
    if error.is_empty() {
        return "no answer follows the grammar".to_owned();
    }
    if let Some((_, reason)) = error.split_once("regex parse error:") {
        let reason = reason.rsplit_once("error: ").map_or("a syntax error", |(_, reason)| reason);
        return format!("the regular expression is not valid: {reason}");
    }
    if let Some((_, meaning)) = MEANINGS.iter().find(|(part, _)| error.contains(part)) {
        return (*meaning).to_owned();
    }
    if let Some((_, reason)) = error.split_once("Unsatisfiable schema: ") {
        // These are about numbers in the schema, such as a minimum above the maximum.
        let is_known = ["minimum", "min", "integer interval"].iter();
        return match is_known.clone().any(|start| reason.starts_with(start)) {
            true => format!("no value is valid under the schema: {reason}"),
            false => "no value is valid under the schema".to_owned(),
        };
    }
    if error.contains("Reference segment") || error.contains("$ref") {
        let reference = error.trim_end_matches('.').trim_end_matches('\'').rsplit('\'').next();
        let expected = "expected a `$ref` to a schema, such as `#/$defs/name`";
        return format!("{expected}, got `{}`", reference.unwrap_or_default());
    }
    if let Some((_, of_schema)) = error.split_once("failed to compile JSON schema: ") {
        return meaning(of_schema);
    }
    if let Some(name) = error.strip_prefix("unknown grammar ") {
        return format!("the grammar refers to `{name}`, which does not exist");
    }
    of_line(error).unwrap_or_else(|| FAILED.to_owned())
}

/// An error in a line of Lark, `at 2(5): reason` or `2(5): reason (at TOKEN)`.
fn of_line(error: &str) -> Option<String> {
    let (place, reason) = error.strip_prefix("at ").unwrap_or(error).split_once("): ")?;
    let (line, column) = place.split_once('(')?;
    let (line, column): (usize, usize) = (line.parse().ok()?, column.parse().ok()?);
    let reason = reason.split(" (at ").next()?.split("; following").next()?;
    let reason = match reason {
        "lexer error" => "expected a rule, a string or another token of the grammar",
        reason => reason,
    };
    let mut letters = reason.chars();
    let first = letters.next()?.to_lowercase();
    Some(format!("line {line}, column {column}: {first}{}", letters.as_str()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::{Grammar, GrammarCompiler};
    use super::*;
    use crate::Tokenizer;

    /// Goal: errors describe the problem in terms of the grammar, and never name the library's
    /// types, files or states.
    #[test]
    fn errors_are_in_our_own_words() {
        let lark = |text: &str| Grammar::Lark(text.to_owned());
        let regex = |text: &str| Grammar::Regex(text.to_owned());
        let compiler = GrammarCompiler::new(Tokenizer::bytes(), &[0]);
        for (grammar, expected) in [
            (regex("(a"), "the regular expression is not valid: unclosed group"),
            (regex("\\p{Foo}"), "the regular expression is not valid: Unicode property not found"),
            (regex("a\\bc"), "a regular expression cannot look around"),
            (regex("[^\\x00-\\x{10FFFF}]"), "no text can follow the grammar"),
            (lark("start: other"), "line 1, column 8: unknown name: \"other\""),
            (lark("begin: \"a\""), "the grammar has no rule `start`"),
            (lark("start: @missing"), "the grammar refers to `@missing`, which does not exist"),
            (lark("start: \"a"), "line 1, column 10: expected a rule, a string or another token"),
            (lark("start: ("), "line 1, column 9: expected token ')', found '\\n'"),
            (lark("%import a.b\nstart: b"), "line 1, column 1: unknown common regex: a.b"),
            (lark("start: <x>"), FAILED),
            (lark("start: %json {\"type\": 1}"), FAILED),
            (Grammar::JsonSchema(json!(false)), "no value is valid under the schema `false`"),
            (
                Grammar::JsonSchema(json!({"type": "string", "enum": [1]})),
                "no value is valid under the schema: its types",
            ),
            (
                Grammar::JsonSchema(json!({"type": "integer", "minimum": 2, "maximum": 1})),
                "no value is valid under the schema: minimum (2) is greater than maximum (1)",
            ),
            (
                Grammar::JsonSchema(json!({"$ref": "#/$defs/none"})),
                "expected a `$ref` to a schema, such as `#/$defs/name`, got `#/$defs/none`",
            ),
            (
                Grammar::JsonSchema(json!({"$ref": "#none"})),
                "expected a `$ref` to a schema, such as `#/$defs/name`, got `#none`",
            ),
            (
                Grammar::JsonSchema(json!({"patternProperties": {"a": {}, "b": {}}})),
                "expected patterns in `patternProperties`",
            ),
            (
                Grammar::JsonSchema(json!({"type": "number", "multipleOf": 1e300})),
                "`multipleOf` has too many digits",
            ),
            (Grammar::JsonSchema(json!({"$ref": "#"})), "no text can follow the grammar"),
        ] {
            let error = compiler.compile(&grammar).expect_err("invalid").to_string();
            assert!(error.starts_with(expected), "{grammar:?}: {error}");
        }
        assert_eq!(message("panic: index out of bounds"), FAILED);
        assert_eq!(message("initial lexer configuration (grammar) too big (limit 5)"), TOO_COMPLEX);
        assert!(message(&format!("at 1(2): {}", "é".repeat(900))).len() <= MAX_MESSAGE + 3);
    }
}
