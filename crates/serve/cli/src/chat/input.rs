//! Reads the messages and commands of a conversation: with a line editor and history in a terminal,
//! as plain lines otherwise. A message can have several lines in both.

use std::io::{self, BufRead, IsTerminal};

use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::DefaultHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Editor, Helper};

/// Marks the beginning and the end of a message of several lines.
const QUOTES: &str = "\"\"\"";

/// The source of messages and commands.
pub(super) enum Input {
    Terminal(Box<Editor<Lines, DefaultHistory>>),
    Plain,
}

/// The result of a read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Read {
    Text(String),
    /// Ctrl-C.
    Interrupted,
    End,
}

impl Input {
    pub(super) fn new() -> anyhow::Result<Self> {
        if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
            return Ok(Self::Plain);
        }
        let mut editor = Editor::new()?;
        editor.set_helper(Some(Lines));
        Ok(Self::Terminal(Box::new(editor)))
    }

    pub(super) fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal(_))
    }

    /// Columns of the terminal; `None` if the output is not a terminal, or its size is not known.
    pub(super) fn width(&mut self) -> Option<usize> {
        let Self::Terminal(editor) = self else { return None };
        editor.dimensions().map(|(columns, _)| usize::from(columns)).filter(|&columns| columns > 0)
    }

    /// The next message or command. The blocking read happens on another thread, so that it does
    /// not block the runtime.
    pub(super) async fn read(&mut self) -> anyhow::Result<Read> {
        let mut input = std::mem::replace(self, Self::Plain);
        let (input, read) = tokio::task::spawn_blocking(move || {
            let read = input.read_blocking();
            (input, read)
        })
        .await?;
        *self = input;
        read
    }

    fn read_blocking(&mut self) -> anyhow::Result<Read> {
        let Self::Terminal(editor) = self else { return read_lines(&mut io::stdin().lock()) };
        match editor.readline("> ") {
            Ok(text) => {
                editor.add_history_entry(&text)?;
                Ok(Read::Text(join(&text)))
            }
            Err(ReadlineError::Interrupted) => Ok(Read::Interrupted),
            Err(ReadlineError::Eof) => Ok(Read::End),
            Err(error) => Err(error.into()),
        }
    }
}

/// Reads lines until they are complete, or the input ends.
fn read_lines(input: &mut impl BufRead) -> anyhow::Result<Read> {
    let mut text = String::new();
    loop {
        if input.read_line(&mut text)? == 0 {
            let read = if text.is_empty() { Read::End } else { Read::Text(join(&text)) };
            return Ok(read);
        }
        if is_complete(text.trim_end_matches(['\n', '\r'])) {
            return Ok(Read::Text(join(&text)));
        }
    }
}

/// Whether a message needs no further line: it does not end with a backslash, and is not within
/// three quotation marks.
fn is_complete(text: &str) -> bool {
    match text.trim_start().strip_prefix(QUOTES) {
        Some(quoted) => quoted.trim_end().ends_with(QUOTES),
        None => !text.ends_with('\\'),
    }
}

/// The message without backslashes at the ends of lines and without quotation marks around it.
fn join(text: &str) -> String {
    let text = text.trim_end_matches(['\n', '\r']);
    match text.trim().strip_prefix(QUOTES) {
        Some(quoted) => {
            let quoted = quoted.strip_suffix(QUOTES).unwrap_or(quoted);
            quoted.trim_matches(['\n', '\r']).to_owned()
        }
        None => text.replace("\\\r\n", "\n").replace("\\\n", "\n"),
    }
}

/// Lets the line editor read further lines while a message is incomplete.
#[derive(Debug)]
pub(super) struct Lines;

impl Helper for Lines {}

impl Completer for Lines {
    type Candidate = String;
}

impl Validator for Lines {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(match is_complete(context.input()) {
            true => ValidationResult::Valid(None),
            false => ValidationResult::Incomplete,
        })
    }
}

impl Hinter for Lines {
    type Hint = String;
}

impl Highlighter for Lines {}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a message of several lines is read as one, without its marks.
    #[test]
    fn messages_have_several_lines() {
        let mut input: &[u8] =
            b"one\ntwo \\\nlines\r\n\"\"\"a\n\\\nb\"\"\"\n\"\"\"\nc\n\"\"\"\n\"\"\"\"\"\"\nlast \\";
        let mut texts = Vec::new();
        while let Read::Text(text) = read_lines(&mut input).expect("UTF-8") {
            texts.push(text);
        }
        assert_eq!(texts, ["one", "two \nlines", "a\n\\\nb", "c", "", "last \\"]);
    }
}
