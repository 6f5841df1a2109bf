//! Reading an answer whose calls may have any form: where no grammar guarantees it.
//!
//! Text that may begin a call is held back until it is decided whether it is one. Calls that belong
//! together are passed on together.

use super::calls::{Beginning, Calls, MAX_BYTES, Reader};
use super::cursor::{Cursor, End, Read, Stop};
use super::object_call::Call;
use super::offered::Offered;
use super::parser::{AnswerParser, Mode};
use super::{AnswerPart, MAX_CALLS, ToolCallFormat};

/// Length of text that suffices to recognize most text that is not a call, in bytes.
const SHORT: usize = 512;
/// Maximum number of longer texts that turn out not to be calls. After that, no more calls are
/// looked for.
const MAX_REJECTED: usize = 32;
/// Length of a held text that is read again with each piece, in bytes.
const MAX_REREAD: usize = 4096;
/// Maximum number of times that a longer text is read again because a call may have ended.
const MAX_TRIES: usize = 16;

/// The state of reading at the present place of the text.
#[derive(Clone, Debug)]
pub(super) struct Scan {
    /// Whether no character of the text has been read, apart from space.
    is_first: bool,
    /// Whether the line is blank so far.
    is_line: bool,
    /// Number of long texts that turned out not to be calls.
    rejected: usize,
    /// How the text that is held back begins a call, if it does.
    held: Option<Beginning>,
    /// The length of the held text when it was read last, and how often it was read.
    read_len: usize,
    tries: usize,
}

impl Default for Scan {
    fn default() -> Self {
        Self { is_first: true, is_line: true, rejected: 0, held: None, read_len: 0, tries: 0 }
    }
}

impl Scan {
    /// The state at the beginning of a part of the answer.
    pub(super) fn restart(&mut self) {
        *self = Self { rejected: self.rejected, ..Self::default() };
    }

    fn pass(&mut self, character: char) {
        if character == '\n' {
            self.is_line = true;
        } else if !character.is_whitespace() {
            (self.is_first, self.is_line) = (false, false);
        }
    }

    /// Whether the held text is worth reading again: all of it if it is short, else if a call may
    /// have ended, or if it has grown by a quarter. So the time for any text is limited.
    fn is_due(&mut self, text: &str, end: End) -> bool {
        let grown = text.len() > self.read_len + self.read_len / 4;
        let may_have_ended = text.trim_end().ends_with(['>', '}', ']', ')', '`']);
        let tried = text.len() > MAX_REREAD && !grown;
        if end == End::Open && tried && (self.tries >= MAX_TRIES || !may_have_ended) {
            return false;
        }
        self.tries += usize::from(tried);
        self.read_len = text.len();
        true
    }

    fn hold(&mut self, beginning: Beginning) {
        (self.held, self.read_len, self.tries) = (Some(beginning), 0, 0);
    }
}

/// The kind of part that begins at a place of the text.
enum Begins {
    Nothing,
    /// The tag that ends the reasoning, or begins it again.
    Tag,
    /// A possible call.
    Call(Beginning),
}

impl AnswerParser {
    /// Reads pending text of an answer whose calls may have any form. Returns whether more of it can
    /// be read now.
    pub(super) fn in_free(&mut self, parts: &mut Vec<AnswerPart>, end: End) -> bool {
        let pending = std::mem::take(&mut self.pending);
        let (read, goes_on) = self.read_free(&pending, parts, end);
        self.pending = pending;
        self.pending.drain(..read);
        goes_on
    }

    /// Reads a text. Returns how much of it was read, in bytes, and whether more can be read now.
    fn read_free(&mut self, text: &str, parts: &mut Vec<AnswerPart>, end: End) -> (usize, bool) {
        let in_reasoning = matches!(self.mode, Mode::Reasoning);
        let part = if in_reasoning { AnswerPart::Reasoning } else { AnswerPart::Text };
        let tag = self.next_tag(in_reasoning);
        let mut at = 0;
        while let Some(character) = text[at..].chars().next() {
            let rest = &text[at..];
            if self.scan.held.is_none() {
                match self.what_begins(rest, character, tag, end) {
                    Ok(Begins::Nothing) => {}
                    Ok(Begins::Call(beginning)) => self.scan.hold(beginning),
                    Ok(Begins::Tag) => {
                        self.emit(&text[..at], parts, part);
                        self.change_mode(in_reasoning);
                        return (at + tag.map_or(0, str::len), true);
                    }
                    Err(_) => {
                        self.emit(&text[..at], parts, part);
                        return (at, false);
                    }
                }
            }
            if let Some(beginning) = self.scan.held {
                match self.read_held(rest, beginning, tag.filter(|_| in_reasoning), end) {
                    Err(Stop::More) => {
                        self.emit(&text[..at], parts, part);
                        return (at, false);
                    }
                    Ok(calls) => {
                        self.emit(&text[..at], parts, part);
                        self.pass_on(calls.calls, parts);
                        if in_reasoning {
                            self.mode = Mode::Dropped;
                        }
                        return (at + calls.len, true);
                    }
                    Err(Stop::Other) => {}
                }
            }
            self.scan.pass(character);
            at += character.len_utf8();
        }
        self.emit(text, parts, part);
        (text.len(), false)
    }

    /// The tag that ends the reasoning, or begins it again.
    fn next_tag(&self, in_reasoning: bool) -> Option<&'static str> {
        let (open, close) = self.format.reasoning?.tags();
        if in_reasoning { Some(close) } else { Some(open).filter(|_| self.is_interleaved()) }
    }

    /// The reasoning ends, or begins again.
    fn change_mode(&mut self, in_reasoning: bool) {
        self.mode = if in_reasoning { self.text_mode() } else { Mode::Reasoning };
        self.at_start = true;
        self.space.clear();
        self.scan.restart();
    }

    /// The kind of part that begins at the beginning of the text, if any.
    fn what_begins(&self, text: &str, first: char, tag: Option<&str>, end: End) -> Read<Begins> {
        let tag = tag.filter(|tag| tag.starts_with(first));
        if let Some(tag) = tag
            && Cursor::new(text, end).sees(tag)?
        {
            return Ok(Begins::Tag);
        }
        let is_first =
            self.scan.is_first && !matches!(self.mode, Mode::Reasoning) && !first.is_whitespace();
        let is_glm_line = self.scan.is_line && self.format.tool_calls == Some(ToolCallFormat::Glm);
        let is_gemma = first == 'c' && self.format.tool_calls == Some(ToolCallFormat::Gemma4);
        let may_begin =
            is_first || is_glm_line || is_gemma || matches!(first, '<' | '[' | '`' | '{');
        if !may_begin || self.format.tool_calls.is_none() || self.scan.rejected >= MAX_REJECTED {
            return Ok(Begins::Nothing);
        }
        let begins = self.reader().begins(text, end, is_first, self.scan.is_line)?;
        Ok(begins.map_or(Begins::Nothing, Begins::Call))
    }

    fn reader(&self) -> Reader<'_> {
        let format = self.format.tool_calls.unwrap_or(ToolCallFormat::Hermes);
        Reader { format, offered: Offered(&self.format.functions) }
    }

    /// Reads the text that is held back, if it is worth reading again. `close` is the tag that ends
    /// the reasoning, if the text is a part of it.
    fn read_held(
        &mut self,
        text: &str,
        beginning: Beginning,
        close: Option<&str>,
        end: End,
    ) -> Read<Calls> {
        if !self.scan.is_due(text, end) {
            return Err(Stop::More);
        }
        let read = match close {
            Some(close) => self.read_last_calls(text, close, end, beginning),
            None => self.read_calls(text, end, beginning),
        };
        if read != Err(Stop::More) {
            self.scan.held = None;
        }
        if read == Err(Stop::Other) {
            // Only a text that takes long to read counts. The count must not depend on the pieces.
            let short = (0..=SHORT.min(text.len())).rev().find(|&at| text.is_char_boundary(at));
            let short = &text[..short.unwrap_or(0)];
            let is_long = short.len() < text.len()
                && self.reader().read(short, End::Open, beginning) == Err(Stop::More);
            self.scan.rejected += usize::from(is_long);
        }
        read
    }

    fn read_calls(&self, text: &str, end: End, beginning: Beginning) -> Read<Calls> {
        let calls = self.reader().read(text, end, beginning)?;
        let is_too_many = calls.calls.len() > self.max_calls() - self.calls;
        if is_too_many && !self.format.single_call { Err(Stop::Other) } else { Ok(calls) }
    }

    /// Reads calls that end the reasoning: until the end of the answer, or until the closing tag at
    /// the end of the answer. No call continues after the closing tag.
    fn read_last_calls(&self, text: &str, close: &str, end: End, first: Beginning) -> Read<Calls> {
        let reader = self.reader();
        let (reasoning, after) = match text.split_once(close) {
            Some((reasoning, after)) => (reasoning, Some(after)),
            None => (text, None),
        };
        let end_of_reasoning = if after.is_some() { End::Cut } else { end };
        let (mut calls, mut beginning) = (Vec::new(), first);
        let mut cursor = Cursor::new(reasoning, end_of_reasoning);
        loop {
            let read = reader.read(cursor.rest(), end_of_reasoning, beginning)?;
            cursor.skip(read.len);
            calls.extend(read.calls);
            if calls.len() > MAX_CALLS || cursor.at > MAX_BYTES {
                return Err(Stop::Other);
            }
            cursor.skip_space();
            if cursor.peek()?.is_none() {
                let is_last = Cursor::new(after.unwrap_or_default(), end).is_at_end()?;
                let is_complete = is_last && end == End::Complete;
                let all = Calls { calls, len: text.len() };
                return if is_complete { Ok(all) } else { Err(Stop::Other) };
            }
            if cursor.sees(close)? {
                return Err(Stop::Other);
            }
            let next = reader.begins(cursor.rest(), end, false, true)?;
            beginning = next.ok_or(Stop::Other)?;
        }
    }

    /// Passes on complete calls, up to the last one that the answer may have.
    fn pass_on(&mut self, calls: Vec<Call>, parts: &mut Vec<AnswerPart>) {
        self.space.clear();
        self.at_start = true;
        for (name, json) in calls.into_iter().take(self.max_calls() - self.calls) {
            let index = self.calls;
            self.calls += 1;
            parts.push(AnswerPart::Call { index, name });
            parts.push(AnswerPart::Arguments { index, json });
            parts.push(AnswerPart::CallEnd { index });
        }
        self.scan.restart();
        self.scan.is_first = false;
        if self.calls == self.max_calls() {
            self.mode = if self.format.single_call { Mode::Dropped } else { Mode::PlainText };
        }
    }
}
