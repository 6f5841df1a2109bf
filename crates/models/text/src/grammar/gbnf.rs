//! Grammars in GBNF, the syntax of llama.cpp, become grammars in Lark.
//!
//! ```text
//! root ::= "yes" | number (", " number)*   # a comment
//! number ::= [0-9]{1,3}
//! ```
//!
//! A rule that refers to itself neither directly nor through other rules is a regular expression,
//! and becomes a terminal. The lexer of `llguidance` finds those exactly, while rules of single
//! characters would be ambiguous to it. The other rules stay rules.

mod read;

use std::collections::HashMap;
use std::fmt::Write;

use serde_json::Value;

use super::GrammarError;

/// The start rule of a grammar.
const ROOT: &str = "root";

/// The grammar in Lark.
///
/// # Errors
/// [`GrammarError`] with the line that is not GBNF.
pub(super) fn to_lark(text: &str) -> Result<String, GrammarError> {
    let rules = read::rules(text)?;
    let indices: HashMap<&str, usize> =
        rules.iter().enumerate().map(|(index, rule)| (rule.name.as_str(), index)).collect();
    if indices.len() < rules.len() {
        return Err(GrammarError::new("expected each rule once, got two with the same name"));
    }
    let root = *indices.get(ROOT).ok_or_else(|| GrammarError::new("expected a rule `root`"))?;
    let mut references = Vec::with_capacity(rules.len());
    for rule in &rules {
        let mut to = Vec::new();
        rule.body.add_references(&indices, &mut to)?;
        references.push(to);
    }
    let is_terminal = terminals(&references);
    let names: Vec<String> = is_terminal
        .iter()
        .enumerate()
        .map(|(index, &terminal)| format!("{}{index}", if terminal { 'R' } else { 'r' }))
        .collect();
    let mut lark = format!("start: {}\n", names[root]);
    for (rule, name) in rules.iter().zip(&names) {
        let _ = write!(lark, "{name}: ");
        rule.body.write(&|name| names[indices[name]].as_str(), &mut lark);
        lark.push('\n');
    }
    Ok(lark)
}

/// Which rules are terminals: those from which no rule that refers to itself can be reached.
fn terminals(references: &[Vec<usize>]) -> Vec<bool> {
    // A rule is a terminal once all that it refers to are.
    let mut left: Vec<usize> = references.iter().map(Vec::len).collect();
    let mut users = vec![Vec::new(); references.len()];
    for (user, used) in references.iter().enumerate() {
        used.iter().for_each(|&used| users[used].push(user));
    }
    let mut ready: Vec<usize> = (0..left.len()).filter(|&rule| left[rule] == 0).collect();
    let mut terminals = vec![false; left.len()];
    while let Some(rule) = ready.pop() {
        terminals[rule] = true;
        for &user in &users[rule] {
            left[user] -= 1;
            if left[user] == 0 {
                ready.push(user);
            }
        }
    }
    terminals
}

struct Rule {
    name: String,
    body: Expression,
}

enum Expression {
    /// One of these.
    Choice(Vec<Expression>),
    /// All of these, one after the other. May be empty.
    Sequence(Vec<Expression>),
    Text(String),
    /// A regular expression of one character.
    Class(String),
    /// Another rule.
    Rule(String),
    /// `?`, `*`, `+`, or a count in Lark's syntax.
    Repeated(Box<Expression>, String),
}

impl Expression {
    fn add_references(
        &self,
        indices: &HashMap<&str, usize>,
        to: &mut Vec<usize>,
    ) -> Result<(), GrammarError> {
        match self {
            Self::Choice(items) | Self::Sequence(items) => {
                items.iter().try_for_each(|item| item.add_references(indices, to))
            }
            Self::Repeated(item, _) => item.add_references(indices, to),
            Self::Rule(name) => match indices.get(name.as_str()) {
                Some(&index) => {
                    to.push(index);
                    Ok(())
                }
                None => Err(GrammarError::new(format!("expected a rule `{name}`, got none"))),
            },
            Self::Text(_) | Self::Class(_) => Ok(()),
        }
    }

    fn write<'a>(&self, name_of: &impl Fn(&str) -> &'a str, lark: &mut String) {
        let mut list = |items: &[Self], separator: &str| {
            lark.push('(');
            for (index, item) in items.iter().enumerate() {
                lark.push_str(if index > 0 { separator } else { "" });
                item.write(name_of, lark);
            }
            lark.push(')');
        };
        match self {
            Self::Sequence(items) if items.is_empty() => lark.push_str("\"\""),
            Self::Choice(items) => list(items, " | "),
            Self::Sequence(items) => list(items, " "),
            Self::Text(text) => lark.push_str(&Value::from(text.as_str()).to_string()),
            Self::Class(regex) => {
                let _ = write!(lark, "/{regex}/");
            }
            Self::Rule(name) => lark.push_str(name_of(name)),
            Self::Repeated(item, count) => {
                lark.push('(');
                item.write(name_of, lark);
                let _ = write!(lark, "){count}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: every form is converted, and only rules that refer to themselves stay rules.
    #[test]
    fn gbnf_becomes_lark() {
        for (gbnf, lark) in [
            (
                "root ::= \"a\\n\" | [^a-c\\]x-]+ # comment",
                "start: R0\nR0: (\"a\\n\" | (/[^a-c\\]x\\-]/)+)\n",
            ),
            (
                "root ::=\n  \"(\" root \")\"\n  | item{2} | item{,3}\nitem ::= [\\x41é] .",
                "start: r0\nr0: ((\"(\" r0 \")\") | (R1){2,2} | (R1){0,3})\nR1: (/[Aé]/ /(.|\\n)/)\n",
            ),
            (
                "root ::= (\n\"a\" |\n\"b\"\n)? other-rule\nother-rule ::= ",
                "start: R0\nR0: (((\"a\" | \"b\"))? R1)\nR1: \"\"\n",
            ),
        ] {
            assert_eq!(to_lark(gbnf), Ok(lark.to_owned()), "{gbnf}");
        }
    }

    /// Goal: text that is not GBNF is refused with its line.
    #[test]
    fn other_texts_are_refused() {
        let nested = format!("root ::= {}", "(".repeat(1000));
        for (gbnf, expected) in [
            ("", "a rule `root`"),
            ("a ::= \"x\"", "a rule `root`"),
            ("root ::= a", "a rule `a`"),
            ("root ::= \"a\"\nroot ::= \"b\"", "each rule once"),
            ("root ::= \"a", "line 1: expected a character"),
            ("\n\nroot ::= [a", "line 3: expected a character"),
            ("root ::= [b-a]", "a range"),
            ("root ::= []", "at least one"),
            ("root ::= a )", "the end of the rule"),
            ("root = a", "`::=`"),
            ("root ::= \"a\"{99999999999}", "repetitions"),
            ("root ::= \"\\uD800\"", "the number of a character"),
            (&nested, "nested parentheses"),
        ] {
            let error = to_lark(gbnf).expect_err("refused").reason;
            assert!(error.contains(expected), "{gbnf}: {error}");
        }
    }
}
