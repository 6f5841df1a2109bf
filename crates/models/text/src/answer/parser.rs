//! [`AnswerParser`]: the states of reading an answer.

use super::block::{Block, Change, Next};
use super::cursor::End;
use super::envelope::CallPart;
use super::free::Scan;
use super::harmony::Harmony;
use super::{AnswerFormat, AnswerPart, MAX_CALLS, ReasoningFormat, ToolCallFormat};
use crate::StopStrings;

/// Maximum length of the text that is read at a time, in bytes. The text that was read is removed
/// only afterward, so long pieces would be moved often.
const MAX_PIECE: usize = 4096;

/// Takes one answer apart while it arrives: [`AnswerParser::push`] is called with each piece of
/// text in order, and [`AnswerParser::finish`] at the end.
#[derive(Clone, Debug)]
pub struct AnswerParser {
    pub(super) format: AnswerFormat,
    pub(super) mode: Mode,
    /// Text that was not read yet. Between two pieces, it may be the beginning of a marker or of a
    /// call.
    pub(super) pending: String,
    /// Whitespace that is dropped if a tag or a call follows.
    pub(super) space: String,
    /// Whether whitespace is dropped until other text arrives.
    pub(super) at_start: bool,
    /// The state of reading where calls may have any form.
    pub(super) scan: Scan,
    /// Number of calls that have begun.
    pub(super) calls: usize,
    /// Whether the last call has begun and not ended.
    in_call: bool,
    /// The parts of this call, which are passed on at its end unless its form is guaranteed.
    held: Vec<AnswerPart>,
    /// The strings that end the answer where its text has one.
    stops: Option<StopStrings>,
    /// The index of the one that has ended it.
    matched: Option<usize>,
}

#[derive(Clone, Debug)]
pub(super) enum Mode {
    /// Before the first character, in an answer that may begin with reasoning.
    Start,
    Reasoning,
    /// Before the first character of the text, in a format whose guaranteed calls have no marker.
    MayBeCall,
    Text,
    Block(Block),
    /// In an answer of messages in channels.
    Harmony(Box<Harmony>),
    /// All further text is text of the answer, also if it contains markers.
    PlainText,
    /// The rest is dropped.
    Dropped,
}

impl AnswerParser {
    /// A parser for one answer.
    #[must_use]
    pub fn new(format: AnswerFormat) -> Self {
        let mut parser = Self {
            mode: Mode::Start,
            pending: String::new(),
            space: String::new(),
            at_start: false,
            scan: Scan::default(),
            calls: 0,
            in_call: false,
            held: Vec::new(),
            stops: None,
            matched: None,
            format,
        };
        let format = &parser.format;
        let headers = format.reasoning.and_then(ReasoningFormat::headers);
        let headers = headers.or(format.tool_calls.and_then(ToolCallFormat::headers));
        if let Some(headers) = headers {
            parser.mode = Mode::Harmony(Box::new(Harmony::new(headers, format)));
            return parser;
        }
        match parser.format.reasoning {
            Some(_) if parser.format.reasoning_is_open => {
                parser.mode = Mode::Reasoning;
                parser.at_start = true;
            }
            Some(_) => {}
            None => parser.mode = parser.text_mode(),
        }
        parser
    }

    /// A parser for an answer that ends where its text has one of these strings. Reasoning and calls
    /// do not end it.
    #[must_use]
    pub fn with_stops(format: AnswerFormat, stops: StopStrings) -> Self {
        Self { stops: Some(stops), ..Self::new(format) }
    }

    /// The index of the string that has ended the answer, in the list given to
    /// [`StopStrings::new`]. Further text is dropped.
    #[must_use]
    pub fn matched(&self) -> Option<usize> {
        self.matched
    }

    /// Adds the next piece of text.
    pub fn push(&mut self, piece: &str) -> Vec<AnswerPart> {
        let parts = self.read(piece);
        self.until_stop(parts)
    }

    /// Adds the next piece of text, in which no string ends the answer.
    pub fn push_before_stops(&mut self, piece: &str) -> Vec<AnswerPart> {
        self.read(piece)
    }

    /// The model has ended the answer.
    pub fn finish(&mut self) -> Vec<AnswerPart> {
        self.end(End::Complete)
    }

    /// The answer was cut off, by a limit on its length for example. A call that is incomplete is
    /// text.
    pub fn cut_off(&mut self) -> Vec<AnswerPart> {
        self.end(End::Cut)
    }

    fn read(&mut self, piece: &str) -> Vec<AnswerPart> {
        let mut parts = Vec::new();
        let mut rest = piece;
        while !rest.is_empty() {
            let max = MAX_PIECE.min(rest.len());
            let len = (0..=max).rev().find(|&at| rest.is_char_boundary(at));
            let (next, after) = rest.split_at(len.unwrap_or(max));
            rest = after;
            if let Mode::Harmony(harmony) = &mut self.mode {
                harmony.push(next, &mut parts);
                continue;
            }
            self.pending.push_str(next);
            while self.advance(&mut parts, End::Open) {}
        }
        parts
    }

    /// Ends the text.
    fn end(&mut self, end: End) -> Vec<AnswerPart> {
        let mut parts = Vec::new();
        if let Mode::Harmony(harmony) = &mut self.mode {
            harmony.finish(end, &mut parts);
        } else {
            while self.advance(&mut parts, end) {}
            self.end_block_at_end(&mut parts);
        }
        let mut parts = self.until_stop(parts);
        if self.matched.is_none() {
            parts.extend(self.stops.take().map(StopStrings::finish).and_then(text_part));
        }
        self.mode = Mode::Dropped;
        parts
    }

    /// Ends a block of guaranteed calls, and passes on the text that was held back.
    fn end_block_at_end(&mut self, parts: &mut Vec<AnswerPart>) {
        if let Mode::Block(block) = &mut self.mode {
            let mut changes = Vec::new();
            let next = block.finish(&mut changes);
            self.apply(changes, parts);
            if next == Next::Broken {
                self.break_call(parts);
            }
        }
        if !matches!(self.mode, Mode::Reasoning | Mode::Dropped) {
            let rest = std::mem::take(&mut self.space) + &std::mem::take(&mut self.pending);
            add_text(parts, &rest);
        }
    }

    /// The parts up to the first string in a text that ends the answer.
    fn until_stop(&mut self, parts: Vec<AnswerPart>) -> Vec<AnswerPart> {
        let Some(stops) = &mut self.stops else { return parts };
        let mut kept = Vec::new();
        for part in parts {
            if self.matched.is_some() {
                break;
            }
            match part {
                AnswerPart::Text(text) => {
                    let scan = stops.push(&text);
                    kept.extend(text_part(scan.text));
                    self.matched = scan.matched;
                }
                other => {
                    // The text before it has ended.
                    kept.extend(text_part(stops.release()));
                    kept.push(other);
                }
            }
        }
        if self.matched.is_some() {
            self.mode = Mode::Dropped;
            self.pending.clear();
        }
        kept
    }

    pub(super) fn max_calls(&self) -> usize {
        if self.format.single_call { 1 } else { MAX_CALLS }
    }

    /// The mode after the reasoning, or at the beginning.
    pub(super) fn text_mode(&self) -> Mode {
        match self.format.tool_calls {
            None if !self.is_interleaved() => Mode::PlainText,
            Some(format) if self.format.guaranteed && format.needs_no_marker() => Mode::MayBeCall,
            _ => Mode::Text,
        }
    }

    /// Reads pending text. Returns whether more of it can be read now.
    fn advance(&mut self, parts: &mut Vec<AnswerPart>, end: End) -> bool {
        let at_end = end != End::Open;
        match self.mode {
            Mode::Start => self.at_beginning(at_end),
            Mode::Reasoning | Mode::Text if self.is_free() => self.in_free(parts, end),
            Mode::Reasoning => self.in_reasoning(parts, at_end),
            Mode::MayBeCall => self.before_text(),
            Mode::Text => self.in_text(parts, at_end),
            Mode::Block(_) => self.in_block(parts, at_end),
            // It has read all text already.
            Mode::Harmony(_) => false,
            Mode::PlainText => {
                let text = std::mem::take(&mut self.pending);
                self.emit(&text, parts, AnswerPart::Text);
                let space = std::mem::take(&mut self.space);
                add_text(parts, &space);
                false
            }
            Mode::Dropped => {
                self.pending.clear();
                false
            }
        }
    }

    /// Moves whitespace at the beginning of the pending text to `space`.
    fn take_space(&mut self) {
        let len = self.pending.len() - self.pending.trim_start().len();
        self.space.extend(self.pending.drain(..len));
    }

    fn at_beginning(&mut self, at_end: bool) -> bool {
        let Some((open, _)) = self.format.reasoning.map(ReasoningFormat::tags) else {
            return false;
        };
        self.take_space();
        if self.pending.starts_with(open) {
            self.pending.drain(..open.len());
            self.space.clear();
            (self.mode, self.at_start) = (Mode::Reasoning, true);
            return true;
        }
        if open.starts_with(self.pending.as_str()) && !at_end {
            return false;
        }
        self.mode = self.text_mode();
        // The space belongs to the text.
        self.pending.insert_str(0, &std::mem::take(&mut self.space));
        true
    }

    /// Reads the reasoning of an answer whose calls are guaranteed. No call is within it.
    fn in_reasoning(&mut self, parts: &mut Vec<AnswerPart>, at_end: bool) -> bool {
        let Some((_, close)) = self.format.reasoning.map(ReasoningFormat::tags) else {
            return false;
        };
        let found = find(&self.pending, &[close], at_end);
        let text: String = self.pending.drain(..found.text).collect();
        self.emit(&text, parts, AnswerPart::Reasoning);
        if found.marker == 0 {
            return false;
        }
        self.pending.drain(..close.len());
        self.space.clear();
        (self.mode, self.at_start) = (self.text_mode(), true);
        true
    }

    /// Whether calls may have any form.
    fn is_free(&self) -> bool {
        !self.format.guaranteed || self.format.tool_calls.is_none()
    }

    /// Whether reasoning may follow a text.
    pub(super) fn is_interleaved(&self) -> bool {
        self.format.reasoning == Some(ReasoningFormat::Gemma4)
    }

    /// Before the text in a format whose calls need no marker.
    fn before_text(&mut self) -> bool {
        self.take_space();
        if self.at_start {
            self.space.clear();
        }
        let Some(first) = self.pending.chars().next() else { return false };
        let is_listed = self.format.tool_calls == Some(ToolCallFormat::Pythonic);
        if first == '{' || first == '[' && is_listed {
            self.begin_block(String::new());
        } else {
            self.mode = Mode::Text;
            self.pending.insert_str(0, &std::mem::take(&mut self.space));
        }
        true
    }

    /// Reads the text of an answer whose calls are guaranteed.
    fn in_text(&mut self, parts: &mut Vec<AnswerPart>, at_end: bool) -> bool {
        let Some(format) = self.format.tool_calls else { return false };
        let reasoning = self.format.reasoning.filter(|_| self.is_interleaved());
        let reasoning = reasoning.map(|format| format.tags().0);
        let markers: Vec<&str> = format.markers().open.iter().copied().chain(reasoning).collect();
        let found = find(&self.pending, &markers, at_end);
        let text: String = self.pending.drain(..found.text).collect();
        self.emit(&text, parts, AnswerPart::Text);
        if found.marker == 0 {
            return false;
        }
        let marker: String = self.pending.drain(..found.marker).collect();
        if reasoning == Some(marker.as_str()) {
            self.space.clear();
            (self.mode, self.at_start) = (Mode::Reasoning, true);
        } else {
            self.begin_block(marker);
        }
        true
    }

    /// Begins a block of calls. The space before it belongs to it.
    fn begin_block(&mut self, marker: String) {
        if let Some(format) = self.format.tool_calls {
            let functions = self.format.functions.clone();
            let space = std::mem::take(&mut self.space);
            self.mode = Mode::Block(Block::new(format, functions, space, &marker));
        }
    }

    fn in_block(&mut self, parts: &mut Vec<AnswerPart>, at_end: bool) -> bool {
        let complete = self.calls - usize::from(self.in_call);
        let mut left = self.max_calls().saturating_sub(complete);
        let Mode::Block(block) = &mut self.mode else { return false };
        let pending = std::mem::take(&mut self.pending);
        let mut changes = Vec::new();
        let mut next = Next::Continue;
        let mut read = pending.len();
        for (at, character) in pending.char_indices() {
            let before = changes.len();
            next = block.push(character, &mut changes);
            if next != Next::Continue {
                read = at;
                break;
            }
            if changes.len() > before && changes.last() == Some(&Change::CallEnd) {
                left = left.saturating_sub(1);
                if left == 0 {
                    read = at + character.len_utf8();
                    break;
                }
            }
        }
        self.pending = pending[read..].to_owned();
        self.apply(changes, parts);
        match next {
            Next::Continue if left == 0 => {
                self.mode = if self.format.single_call { Mode::Dropped } else { Mode::PlainText };
                true
            }
            Next::Continue => false,
            Next::Broken => {
                self.break_call(parts);
                true
            }
            Next::MayEnd => self.end_block(at_end),
        }
    }

    /// Ends a block whose closing marker, or a text, follows.
    fn end_block(&mut self, at_end: bool) -> bool {
        let close = self.format.tool_calls.map_or("", |format| format.markers().close);
        if close.starts_with(self.pending.as_str()) && close != self.pending && !at_end {
            return false;
        }
        if self.pending.starts_with(close) {
            self.pending.drain(..close.len());
        } else if close.starts_with(self.pending.as_str()) {
            // The end of the answer has cut the marker off.
            self.pending.clear();
        }
        (self.mode, self.at_start) = (Mode::Text, true);
        true
    }

    /// Passes on what a block contains, up to the last call that may be passed on.
    fn apply(&mut self, changes: Vec<Change>, parts: &mut Vec<AnswerPart>) {
        for change in changes {
            if self.calls >= self.max_calls() && !self.in_call {
                return;
            }
            let index = self.calls.saturating_sub(1);
            match change {
                Change::Part(CallPart::Name(name)) => {
                    self.in_call = true;
                    self.held.push(AnswerPart::Call { index: self.calls, name });
                    self.calls += 1;
                }
                Change::Part(CallPart::Arguments(json)) => match self.held.last_mut() {
                    Some(AnswerPart::Arguments { json: last, .. }) => last.push_str(&json),
                    _ => self.held.push(AnswerPart::Arguments { index, json }),
                },
                Change::CallEnd => {
                    self.in_call = false;
                    self.held.push(AnswerPart::CallEnd { index });
                    parts.append(&mut self.held);
                }
            }
        }
        if self.format.guaranteed {
            parts.append(&mut self.held);
        }
    }

    /// Turns the text since the last complete call, and everything after it, into text of the
    /// answer. A call that was passed on before its end remains: nothing follows it.
    fn break_call(&mut self, parts: &mut Vec<AnswerPart>) {
        if self.in_call && self.format.guaranteed {
            self.mode = Mode::Dropped;
            return;
        }
        let Mode::Block(block) = std::mem::replace(&mut self.mode, Mode::PlainText) else { return };
        if std::mem::take(&mut self.in_call) {
            self.calls = self.calls.saturating_sub(1);
            self.held.clear();
        }
        self.at_start = false;
        add_text(parts, &block.into_raw());
    }

    /// Passes on text, apart from space that may have to be dropped.
    pub(super) fn emit(
        &mut self,
        text: &str,
        parts: &mut Vec<AnswerPart>,
        part: impl Fn(String) -> AnswerPart,
    ) {
        let text = if self.at_start { text.trim_start() } else { text };
        if text.is_empty() {
            return;
        }
        self.at_start = false;
        let end = text.trim_end().len();
        if end > 0 {
            let mut ready = std::mem::take(&mut self.space);
            ready.push_str(&text[..end]);
            parts.push(part(ready));
        }
        self.space.push_str(&text[end..]);
    }
}

/// The place of a marker.
pub(super) struct Found {
    /// Length of the text before it, or of the text that cannot be part of a marker.
    pub(super) text: usize,
    /// Length of the marker; 0 if there is none.
    pub(super) marker: usize,
}

/// Finds the first of `markers`. Unless the text is `at_end`, the beginning of a marker at its end
/// is not counted as text.
pub(super) fn find(text: &str, markers: &[&str], at_end: bool) -> Found {
    let first = markers.iter().filter_map(|marker| Some((text.find(marker)?, marker.len()))).min();
    if let Some((at, marker)) = first {
        return Found { text: at, marker };
    }
    let partial = |marker: &&str| {
        (1..marker.len())
            .rev()
            .find(|&len| marker.is_char_boundary(len) && text.ends_with(&marker[..len]))
    };
    let held = if at_end { 0 } else { markers.iter().filter_map(partial).max().unwrap_or(0) };
    Found { text: text.len() - held, marker: 0 }
}

fn text_part(text: String) -> Option<AnswerPart> {
    (!text.is_empty()).then_some(AnswerPart::Text(text))
}

fn add_text(parts: &mut Vec<AnswerPart>, text: &str) {
    if !text.is_empty() {
        parts.push(AnswerPart::Text(text.to_owned()));
    }
}
