//! A JSON object with one string, whose text follows a grammar in Lark: the arguments of a tool that
//! takes a text, from a model that calls tools with JSON.
//!
//! Each terminal of the grammar is replaced by the form that its text has inside of a JSON string.
//! All characters are written as they are, except those that JSON does not allow there, which have
//! one form each: `\n`, `\"`, `\\` and so on.

use std::iter::Peekable;
use std::str::CharIndices;

use regex_syntax::hir::print::Printer;
use regex_syntax::hir::{Class, ClassUnicode, ClassUnicodeRange, Hir, HirKind, Repetition};

use super::GrammarError;

/// The rule that takes the place of the grammar's own `start`.
const START: &str = "text_of_the_tool";

/// The terminals of `%import common` whose text has another form in a JSON string.
const COMMON: [(&str, &str); 10] = [
    ("ESCAPED_STRING", r#""([^"\\]|\\.)*""#),
    ("WS_INLINE", r"[ \t]+"),
    ("WS", r"[ \t\f\r\n]+"),
    ("CR", r"\r"),
    ("LF", r"\n"),
    ("NEWLINE", r"(\r?\n)+"),
    ("SH_COMMENT", r"#[^\n]*"),
    ("CPP_COMMENT", r"//[^\n]*"),
    ("C_COMMENT", r"/\*[^*]*\*+(?:[^/*][^*]*\*+)*/"),
    ("SQL_COMMENT", r"--[^\n]*"),
];

/// The grammar in Lark of an object whose only member is `argument`.
///
/// # Errors
/// The grammar has a part whose form in a JSON string is not known.
pub(super) fn to_lark(argument: &str, lark: &str) -> Result<String, GrammarError> {
    let name = regex_syntax::escape(&super::calls::literal(argument)).replace('/', "\\/");
    let rest = Source { text: lark, chars: lark.char_indices().peekable() }.quoted()?;
    // Models differ in where they write a space.
    Ok(format!("start: /\\{{[ \\n]?{name}: ?\"/ {START} /\"[ \\n]?\\}}/\n{rest}\n"))
}

fn unsupported(what: &str) -> GrammarError {
    GrammarError::new(format!("{what} cannot be followed in a JSON string"))
}

/// The source of a grammar.
struct Source<'a> {
    text: &'a str,
    chars: Peekable<CharIndices<'a>>,
}

impl Source<'_> {
    /// The grammar with other terminals.
    fn quoted(mut self) -> Result<String, GrammarError> {
        let mut lark = String::with_capacity(self.text.len());
        while let Some((at, char)) = self.chars.next() {
            match char {
                '#' => self.skip_line(),
                '/' if self.next_is('/') => self.skip_line(),
                '/' => {
                    let (end, flags) = self.end_of('/', at, |flag| "imslux".contains(flag))?;
                    let (pattern, flags) = (&self.text[at + 1..end], &self.text[flags]);
                    lark.push_str(&of_pattern(&match flags {
                        "" => pattern.to_owned(),
                        flags => format!("(?{flags}){pattern}"),
                    })?);
                }
                '"' => lark.push_str(&self.string(at)?),
                '%' => self.directive(&mut lark)?,
                '<' | '@' | '&' => return Err(unsupported(&format!("`{char}`"))),
                '~' => {
                    let count = self.text[at + 1..].trim_start().starts_with(char::is_numeric);
                    if !count {
                        return Err(unsupported("the complement of a terminal"));
                    }
                    lark.push(char);
                }
                char if is_of_name(char) => {
                    let name = self.name(at);
                    lark.push_str(if name == "start" { START } else { name });
                    if self.next_is('[') {
                        return Err(unsupported("a rule with attributes"));
                    }
                }
                other => lark.push(other),
            }
        }
        Ok(lark)
    }

    fn next_is(&mut self, char: char) -> bool {
        self.chars.peek().is_some_and(|&(_, next)| next == char)
    }

    /// Skips a comment. Its line break stays.
    fn skip_line(&mut self) {
        while self.chars.next_if(|&(_, char)| char != '\n').is_some() {}
    }

    /// The name that begins at `at`. Its first character has been read.
    fn name(&mut self, at: usize) -> &str {
        while self.chars.next_if(|&(_, char)| is_of_name(char) || char == '-').is_some() {}
        &self.text[at..self.place()]
    }

    /// The place of the next character.
    fn place(&mut self) -> usize {
        self.chars.peek().map_or(self.text.len(), |&(at, _)| at)
    }

    /// The place of the `quote` that ends what begins at `at`, and the place of the flags after it.
    fn end_of(
        &mut self,
        quote: char,
        at: usize,
        is_flag: impl Fn(char) -> bool,
    ) -> Result<(usize, std::ops::Range<usize>), GrammarError> {
        while let Some((end, char)) = self.chars.next() {
            if char == '\\' {
                self.chars.next();
            } else if char == quote {
                while self.chars.next_if(|&(_, char)| is_flag(char)).is_some() {}
                return Ok((end, end + 1..self.place()));
            }
        }
        let begin: String = self.text[at..].chars().take(20).collect();
        Err(GrammarError::new(format!("expected an end of {begin:?}")))
    }

    /// The string that begins at `at`, or the range of two.
    fn string(&mut self, at: usize) -> Result<String, GrammarError> {
        let (end, flags) = self.end_of('"', at, |flag| flag == 'i')?;
        let text = unescaped(&self.text[at..=end])?;
        if flags.is_empty() && self.text[end + 1..].trim_start().starts_with("..") {
            while self.chars.next_if(|&(_, char)| char == ' ' || char == '.').is_some() {}
            let at = self.place();
            if self.chars.next().is_none_or(|(_, char)| char != '"') {
                return Err(unsupported("a range of other things than strings"));
            }
            let (end, _) = self.end_of('"', at, |_| false)?;
            let last = unescaped(&self.text[at..=end])?;
            let escaped = |text: &str| regex_syntax::escape(text).replace('-', "\\-");
            return of_pattern(&format!("[{}-{}]", escaped(&text), escaped(&last)));
        }
        match flags.is_empty() {
            true => Ok(super::calls::literal(&inside(&text))),
            false => of_pattern(&format!("(?i){}", regex_syntax::escape(&text))),
        }
    }

    /// A line that begins with `%`, which has been read.
    fn directive(&mut self, lark: &mut String) -> Result<(), GrammarError> {
        let at = self.place();
        match self.name(at) {
            "ignore" => lark.push_str("%ignore"),
            "import" => {
                let at = self.place();
                self.skip_line();
                let line = self.text[at..self.place()].trim();
                let line = line.split(['#']).next().unwrap_or(line).trim();
                lark.push_str(&import(line)?);
            }
            other => return Err(unsupported(&format!("`%{other}`"))),
        }
        Ok(())
    }
}

fn is_of_name(char: char) -> bool {
    char.is_ascii_alphanumeric() || char == '_'
}

/// What `%import` brings, in the form for JSON strings.
fn import(what: &str) -> Result<String, GrammarError> {
    let unknown = || unsupported(&format!("`%import {what}`"));
    let names = what.strip_prefix("common").ok_or_else(unknown)?.trim_start();
    let names: Vec<(&str, &str)> = match (names.strip_prefix('.'), names.strip_prefix('(')) {
        (Some(name), _) => {
            let (name, alias) = name.split_once("->").unwrap_or((name, name));
            vec![(name.trim(), alias.trim())]
        }
        (None, Some(list)) => {
            let list = list.strip_suffix(')').ok_or_else(unknown)?;
            list.split(',').map(|name| (name.trim(), name.trim())).collect()
        }
        (None, None) => return Err(unknown()),
    };
    let mut lark = String::new();
    for (name, alias) in names {
        match COMMON.iter().find(|(common, _)| *common == name) {
            Some((_, pattern)) => lark.push_str(&format!("{alias}: {}\n", of_pattern(pattern)?)),
            None => lark.push_str(&format!("%import common.{name} -> {alias}\n")),
        }
    }
    Ok(lark)
}

/// The text of a string in Lark, which is one of JSON that may also have `\xHH`.
fn unescaped(string: &str) -> Result<String, GrammarError> {
    let json = string.replace("\\\\", "\\u005c").replace("\\x", "\\u00");
    serde_json::from_str(&json)
        .map_err(|error| GrammarError::new(format!("expected a string, got {string}: {error}")))
}

/// A text as a part of a JSON string.
fn inside(text: &str) -> String {
    let json = super::calls::literal(text);
    json[1..json.len() - 1].to_owned()
}

/// A terminal in Lark for the texts of a regular expression as parts of a JSON string.
fn of_pattern(pattern: &str) -> Result<String, GrammarError> {
    let hir = regex_syntax::parse(pattern).map_err(|error| {
        GrammarError::new(format!("expected a regular expression, got {pattern:?}: {error}"))
    })?;
    let mut quoted = String::new();
    // Writing to a string cannot fail.
    let _ = Printer::new().print(&of_hir(&hir)?, &mut quoted);
    Ok(format!("/{}/", quoted.replace('/', "\\/")))
}

fn of_hir(hir: &Hir) -> Result<Hir, GrammarError> {
    let all = |parts: &[Hir]| parts.iter().map(of_hir).collect::<Result<Vec<_>, _>>();
    Ok(match hir.kind() {
        HirKind::Empty => Hir::empty(),
        HirKind::Literal(literal) => match std::str::from_utf8(&literal.0) {
            Ok(text) => Hir::literal(inside(text).into_bytes()),
            Err(_) => return Err(unsupported("a part of a character")),
        },
        HirKind::Class(Class::Unicode(class)) => of_class(class),
        HirKind::Class(Class::Bytes(class)) => match class.to_unicode_class() {
            Some(class) => of_class(&class),
            None => return Err(unsupported("a part of a character")),
        },
        HirKind::Look(_) => return Err(unsupported("an assertion such as `^` or `\\b`")),
        HirKind::Repetition(repetition) => {
            let sub = Box::new(of_hir(&repetition.sub)?);
            Hir::repetition(Repetition { sub, ..*repetition })
        }
        HirKind::Capture(capture) => of_hir(&capture.sub)?,
        HirKind::Concat(parts) => Hir::concat(all(parts)?),
        HirKind::Alternation(parts) => Hir::alternation(all(parts)?),
    })
}

/// The characters of a class as parts of a JSON string.
fn of_class(class: &ClassUnicode) -> Hir {
    let range = ClassUnicodeRange::new;
    let special = [range('\0', '\u{1f}'), range('"', '"'), range('\\', '\\')];
    let special = ClassUnicode::new(special);
    let (mut plain, mut escaped) = (class.clone(), class.clone());
    plain.difference(&special);
    escaped.intersect(&special);
    let escaped = escaped.ranges().iter().flat_map(|range| range.start()..=range.end());
    let escaped = escaped.map(|char| Hir::literal(inside(&char.to_string()).into_bytes()));
    let plain = (!plain.ranges().is_empty()).then(|| Hir::class(Class::Unicode(plain)));
    Hir::alternation(plain.into_iter().chain(escaped).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the terminals of a grammar get their form in a JSON string, and everything else stays.
    #[test]
    fn terminals_are_quoted() {
        for (lark, expected) in [
            (r#"start: "a\"b" x // c"#, r#"text_of_the_tool: "a\\\"b" x "#),
            (r#"x: "\n"* | "\x41\\x""#, r#"x: "\\n"* | "A\\\\x""#),
            (r#"x: "a".."c" ~ 2..3"#, "x: /[a-c]/ ~ 2..3"),
            (r#"X: /a+[b"\n]/"#, r#"X: /(?:a+(?:b|(?:\\n)|(?:\\")))/"#),
            (r#"X: /(a|"\/)?/ -> y"#, r#"X: /(?:a|(?:\\"\/))?/ -> y"#),
            ("%import common.LF\nx: LF", "LF: /(?:\\\\n)/\n\nx: LF"),
            ("%import common (INT, CR)", "%import common.INT -> INT\nCR: /(?:\\\\r)/\n"),
            ("%ignore X", "%ignore X"),
            (r#"x: "ab"i"#, "x: /(?:[Aa][Bb])/"),
        ] {
            let quoted = Source { text: lark, chars: lark.char_indices().peekable() }.quoted();
            let quoted = quoted.unwrap_or_else(|error| panic!("{lark}: {error}"));
            assert_eq!(quoted, expected, "{lark}");
        }
        for lark in [
            "x: <tool>",
            "x: @other",
            "x: ~X",
            "x: X & Y",
            "x[lazy]: X",
            "x: %json {}",
            "%import other.X",
            "X: /^a/",
            "X: /a",
            "X: /(/",
        ] {
            let quoted = Source { text: lark, chars: lark.char_indices().peekable() }.quoted();
            assert!(quoted.is_err(), "{lark}: {quoted:?}");
        }
    }
}
