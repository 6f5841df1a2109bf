//! Reads the rules of a grammar in GBNF.

use std::fmt::Write;
use std::iter::Peekable;
use std::str::Chars;

use super::{Expression, Rule};
use crate::grammar::GrammarError;

/// Maximum number of nested parentheses.
const MAX_DEPTH: usize = 64;
/// Maximum number of repetitions.
const MAX_COUNT: u32 = 65_536;

/// The rules of a grammar, in their order.
pub(super) fn rules(text: &str) -> Result<Vec<Rule>, GrammarError> {
    Reader { rest: text.chars().peekable(), line: 1 }.rules()
}

struct Reader<'a> {
    rest: Peekable<Chars<'a>>,
    line: usize,
}

impl Reader<'_> {
    fn fail<T>(&mut self, expected: &str) -> Result<T, GrammarError> {
        let got = match self.rest.peek() {
            Some(character) => format!("`{}`", character.escape_default()),
            None => "the end".to_owned(),
        };
        let line = self.line;
        Err(GrammarError::new(format!("GBNF, line {line}: expected {expected}, got {got}")))
    }

    /// Skips spaces and comments, and line breaks if `lines` is set.
    fn skip(&mut self, lines: bool) {
        while let Some(&next) = self.rest.peek() {
            match next {
                '#' => while self.rest.next_if(|&next| next != '\n').is_some() {},
                '\n' if lines => {
                    self.line += 1;
                    self.rest.next();
                }
                '\n' => return,
                space if space.is_whitespace() => drop(self.rest.next()),
                _ => return,
            }
        }
    }

    fn takes(&mut self, expected: char) -> bool {
        self.rest.next_if_eq(&expected).is_some()
    }

    fn rules(mut self) -> Result<Vec<Rule>, GrammarError> {
        let mut rules = Vec::new();
        self.skip(true);
        while self.rest.peek().is_some() {
            let name = self.name()?;
            self.skip(false);
            for expected in "::=".chars() {
                if !self.takes(expected) {
                    return self.fail("`::=` after the name of a rule");
                }
            }
            // A rule may begin in the line after its name.
            self.skip(true);
            let body = self.choice(0)?;
            if !matches!(self.rest.peek(), None | Some('\n')) {
                return self.fail("the end of the rule");
            }
            rules.push(Rule { name, body });
            self.skip(true);
        }
        Ok(rules)
    }

    fn name(&mut self) -> Result<String, GrammarError> {
        let mut name = String::new();
        let is_part = |next: &char| next.is_ascii_alphanumeric() || matches!(next, '-' | '_');
        while let Some(next) = self.rest.next_if(is_part) {
            name.push(next);
        }
        if name.is_empty() { self.fail("the name of a rule") } else { Ok(name) }
    }

    /// Reads alternatives. Within parentheses they may be in several lines, and `|` may begin one.
    fn choice(&mut self, depth: usize) -> Result<Expression, GrammarError> {
        if depth > MAX_DEPTH {
            return self.fail(&format!("at most {MAX_DEPTH} nested parentheses"));
        }
        let mut alternatives = vec![self.sequence(depth)?];
        loop {
            if depth == 0 {
                self.skip_to_alternative();
            }
            if !self.takes('|') {
                break;
            }
            self.skip(true);
            alternatives.push(self.sequence(depth)?);
        }
        Ok(match alternatives.len() {
            1 => alternatives.remove(0),
            _ => Expression::Choice(alternatives),
        })
    }

    /// Skips lines if the next alternative follows.
    fn skip_to_alternative(&mut self) {
        let mut ahead = Reader { rest: self.rest.clone(), line: self.line };
        ahead.skip(true);
        if ahead.rest.peek() == Some(&'|') {
            (self.rest, self.line) = (ahead.rest, ahead.line);
        }
    }

    fn sequence(&mut self, depth: usize) -> Result<Expression, GrammarError> {
        let mut items = Vec::new();
        loop {
            self.skip(depth > 0);
            let item = match self.rest.peek() {
                Some('"') => self.text()?,
                Some('[') => self.class()?,
                Some('.') => {
                    self.rest.next();
                    Expression::Class("(.|\\n)".to_owned())
                }
                Some('(') => {
                    self.rest.next();
                    let group = self.choice(depth + 1)?;
                    if !self.takes(')') {
                        return self.fail("`)`");
                    }
                    group
                }
                Some(next) if next.is_ascii_alphanumeric() => Expression::Rule(self.name()?),
                _ => break,
            };
            items.push(self.repeated(item)?);
        }
        Ok(if items.len() == 1 { items.remove(0) } else { Expression::Sequence(items) })
    }

    fn repeated(&mut self, item: Expression) -> Result<Expression, GrammarError> {
        let repeated = |item, count: &str| Expression::Repeated(Box::new(item), count.to_owned());
        let mut item = item;
        loop {
            self.skip(false);
            item = match self.rest.peek() {
                Some(&sign @ ('?' | '*' | '+')) => {
                    self.rest.next();
                    repeated(item, &sign.to_string())
                }
                Some('{') => {
                    let count = self.count()?;
                    repeated(item, &count)
                }
                _ => return Ok(item),
            };
        }
    }

    /// Reads `{2}`, `{2,}`, `{,3}` or `{2,3}`.
    fn count(&mut self) -> Result<String, GrammarError> {
        self.rest.next();
        let least = self.number()?;
        self.skip(false);
        if self.takes('}') {
            let count = least.map_or_else(|| self.fail("a number"), Ok)?;
            return Ok(format!("{{{count},{count}}}"));
        }
        if !self.takes(',') {
            return self.fail("`,` or `}`");
        }
        self.skip(false);
        let most = self.number()?;
        self.skip(false);
        if !self.takes('}') {
            return self.fail("`}`");
        }
        let least = least.unwrap_or(0);
        let most = most.map(|most| most.to_string()).unwrap_or_default();
        Ok(format!("{{{least},{most}}}"))
    }

    fn number(&mut self) -> Result<Option<u32>, GrammarError> {
        self.skip(false);
        let mut digits = String::new();
        while let Some(digit) = self.rest.next_if(char::is_ascii_digit) {
            digits.push(digit);
        }
        if digits.is_empty() {
            return Ok(None);
        }
        match digits.parse() {
            Ok(number) if number <= MAX_COUNT => Ok(Some(number)),
            _ => self.fail(&format!("a number of at most {MAX_COUNT} repetitions")),
        }
    }

    fn text(&mut self) -> Result<Expression, GrammarError> {
        self.rest.next();
        let mut text = String::new();
        loop {
            if self.takes('"') {
                return Ok(Expression::Text(text));
            }
            text.push(self.character()?);
        }
    }

    /// Reads a class of characters, which becomes one of a regular expression.
    fn class(&mut self) -> Result<Expression, GrammarError> {
        self.rest.next();
        let mut class = String::from(if self.takes('^') { "[^" } else { "[" });
        let empty = class.len();
        while !self.takes(']') {
            let first = self.character()?;
            push_escaped(first, &mut class);
            if self.rest.peek() != Some(&'-') {
                continue;
            }
            self.rest.next();
            if self.rest.peek() == Some(&']') {
                push_escaped('-', &mut class);
                continue;
            }
            let last = self.character()?;
            if last < first {
                return self.fail("a range whose end is not before its beginning");
            }
            class.push('-');
            push_escaped(last, &mut class);
        }
        if class.len() == empty {
            return self.fail("a class with at least one character");
        }
        class.push(']');
        Ok(Expression::Class(class))
    }

    /// Reads a character of a text or class, which may be escaped.
    fn character(&mut self) -> Result<char, GrammarError> {
        let expected = "a character; a text ends with `\"` and a class with `]`";
        match self.rest.next() {
            None | Some('\n') => self.fail(expected),
            Some('\\') => match self.rest.next() {
                Some('n') => Ok('\n'),
                Some('r') => Ok('\r'),
                Some('t') => Ok('\t'),
                Some(same @ ('\\' | '"' | '[' | ']' | '-' | '^' | '/' | '\'')) => Ok(same),
                Some('x') => self.code(2),
                Some('u') => self.code(4),
                Some('U') => self.code(8),
                _ => self.fail("an escape that GBNF has"),
            },
            Some(character) => Ok(character),
        }
    }

    fn code(&mut self, digits: usize) -> Result<char, GrammarError> {
        let mut code = 0;
        for _ in 0..digits {
            let digit = self.rest.peek().and_then(|next| next.to_digit(16));
            let Some(digit) = digit else { return self.fail("a hexadecimal digit") };
            code = code * 16 + digit;
            self.rest.next();
        }
        match char::from_u32(code) {
            Some(character) => Ok(character),
            None => self.fail("the number of a character"),
        }
    }
}

/// Appends a character as itself in a class of a regular expression.
fn push_escaped(character: char, class: &mut String) {
    match character {
        '\n' => class.push_str("\\n"),
        '\r' => class.push_str("\\r"),
        '\t' => class.push_str("\\t"),
        letter if letter.is_alphanumeric() || letter == ' ' || letter == '_' => class.push(letter),
        mark if mark.is_ascii_punctuation() => class.extend(['\\', mark]),
        other => {
            let _ = write!(class, "\\u{{{:x}}}", u32::from(other));
        }
    }
}
