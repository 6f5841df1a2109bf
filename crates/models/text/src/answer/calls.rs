//! Reads calls in any format, also where they are nearly right.
//!
//! The name of the function decides: if it may be called, the text is a call even if its markers
//! are incomplete. All other text stays text. The form of a call is recognized by its beginning,
//! whatever the format of the model is.

use super::cursor::{Cursor, End, Read, Stop};
use super::envelope::{CallPart, Envelope};
use super::format::ToolCallFormat;
use super::markers::{CLOSES, DEEPSEEK, FENCE_END, FENCES, KIMI, OPENS, TAGGED};
use super::object_call::{self, Call};
use super::offered::Offered;
use super::{MAX_CALLS, gemma, lenient, python, tagged};

/// Maximum length of calls that belong together, as the model writes them, in bytes.
pub(super) const MAX_BYTES: usize = 1 << 20;
/// Maximum length of the text before the arguments of a call, in bytes.
const MAX_HEAD: usize = 512;
/// Maximum number of markers in a row.
const MAX_MARKERS: usize = 4;
/// How often the marker that ends a program may occur within it.
const MAX_PROGRAM_ENDS: usize = 8;
/// The languages of fenced blocks with a call.
const LANGUAGES: &[&str] = &["json", "python", "xml", "text"];
/// Characters that separate calls.
const SEPARATORS: [char; 2] = [',', ';'];
/// Characters that a model may write too often at the end of a call.
const EXCESS: [char; 3] = ['}', ']', ')'];

/// How calls may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Beginning {
    /// With a marker.
    Marked,
    /// With a marker that people write, too, in the middle of a line. The calls then end with a
    /// marker or a bracket.
    Inline,
    /// Without one, at the beginning of a line. The calls then end with a marker or with the
    /// answer.
    Bare,
    /// Without one, within a text. The calls then end with a marker.
    Closed,
}

/// Calls that belong together, and the length of their text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Calls {
    pub(super) calls: Vec<Call>,
    pub(super) len: usize,
}

/// Reads the calls that an answer may have.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reader<'a> {
    pub(super) format: ToolCallFormat,
    pub(super) offered: Offered<'a>,
}

/// A block of calls while it is read.
#[derive(Default)]
struct Block {
    /// Whether a fence began it.
    is_fenced: bool,
    /// Whether a marker began it.
    is_marked: bool,
    /// Whether the calls are in a list.
    is_listed: bool,
}

impl Reader<'_> {
    /// Whether calls may begin here. `is_first` tells whether the text of the answer begins here,
    /// `is_line` whether a line does.
    pub(super) fn begins(
        self,
        text: &str,
        end: End,
        is_first: bool,
        is_line: bool,
    ) -> Read<Option<Beginning>> {
        let cursor = Cursor::new(text, end);
        let Some(first) = cursor.peek()? else { return Ok(None) };
        if matches!(first, '<' | '[' | '`') {
            for markers in [OPENS, TAGGED, &[KIMI[0], DEEPSEEK[0]]] {
                if let Some(marker) = cursor.sees_any(markers)? {
                    let second = marker.as_bytes().get(1).copied();
                    let is_inline =
                        !is_line && second.is_some_and(|byte| byte.is_ascii_lowercase());
                    let beginning = if is_inline { Beginning::Inline } else { Beginning::Marked };
                    return Ok(Some(beginning));
                }
            }
        }
        let is_bare = match first {
            '{' => is_line && self.is_bare_object(cursor)?,
            '[' if is_line && self.is_bare_list(cursor)? => true,
            '`' => is_line && self.is_bare_fence(cursor)?,
            '[' => is_first && self.is_bare_program(cursor)?,
            _ if is_first || (is_line && self.format == ToolCallFormat::Glm) => {
                self.is_bare_name(cursor)?
            }
            // Gemma 4 leaves out the marker even after a text.
            'c' if self.format == ToolCallFormat::Gemma4 && self.is_bare_name(cursor)? => {
                return Ok(Some(Beginning::Closed));
            }
            _ => false,
        };
        Ok(is_bare.then_some(Beginning::Bare))
    }

    /// Whether a list in Python begins with a call of a function.
    fn is_bare_program(self, mut cursor: Cursor<'_>) -> Read<bool> {
        cursor.skip(1);
        match self.first_called(cursor) {
            Err(Stop::Other) => Ok(false),
            name => Ok(self.offered.find(name?).is_some()),
        }
    }

    /// Whether an object without a marker begins like a call of a function.
    fn is_bare_object(self, mut cursor: Cursor<'_>) -> Read<bool> {
        for _ in 0..MAX_MARKERS {
            if cursor.peek()? == Some('{') {
                cursor.skip(1);
                cursor.skip_space();
            }
        }
        let Some(quote @ ('"' | '\'')) = cursor.peek()? else { return Ok(false) };
        cursor.skip(1);
        let Some(key) = short(&mut cursor, quote)? else { return Ok(false) };
        if !object_call::may_begin_with(key) {
            return Ok(false);
        }
        cursor.skip(1);
        cursor.skip_space();
        if cursor.peek()? != Some(':') {
            return Ok(false);
        }
        cursor.skip(1);
        cursor.skip_space();
        if cursor.peek()? != Some(quote) {
            return Ok(true);
        }
        cursor.skip(1);
        let value = short(&mut cursor, quote)?.unwrap_or_default();
        Ok(match key {
            "type" => value == "function",
            key => !object_call::is_name(key) || self.offered.find(value).is_some(),
        })
    }

    /// Whether a fenced block begins with an object that is a call of a function.
    fn is_bare_fence(self, mut cursor: Cursor<'_>) -> Read<bool> {
        if !cursor.takes(FENCE_END)? {
            return Ok(false);
        }
        cursor.takes_any(LANGUAGES)?;
        cursor.skip_space();
        match cursor.peek()? {
            Some('{') => self.is_bare_object(cursor),
            Some('[') => self.is_bare_list(cursor),
            _ => Ok(false),
        }
    }

    fn is_bare_list(self, mut cursor: Cursor<'_>) -> Read<bool> {
        cursor.skip(1);
        cursor.skip_space();
        Ok(cursor.peek()? == Some('{') && self.is_bare_object(cursor)?)
    }

    /// Whether a call begins with the name of its function.
    fn is_bare_name(self, mut cursor: Cursor<'_>) -> Read<bool> {
        let name = match word(&mut cursor) {
            Err(Stop::Other) => return Ok(false),
            name => name?,
        };
        let name = match self.format {
            ToolCallFormat::Gemma4 => match name.strip_prefix("call:") {
                Some(name) => name,
                None => return Ok(false),
            },
            ToolCallFormat::Mistral | ToolCallFormat::Glm => name,
            format if format.is_python() => name,
            _ => return Ok(false),
        };
        if self.offered.find(name).is_none() {
            return Ok(false);
        }
        match self.format {
            ToolCallFormat::Mistral => cursor.sees("[ARGS]"),
            ToolCallFormat::Glm => {
                cursor.skip_space();
                cursor.sees("<arg_key>")
            }
            ToolCallFormat::Gemma4 => Ok(matches!(cursor.peek()?, Some('{' | '('))),
            _ => Ok(cursor.peek()? == Some('(')),
        }
    }

    /// Reads calls that belong together from the beginning of the text.
    pub(super) fn read(self, text: &str, end: End, beginning: Beginning) -> Read<Calls> {
        if text.len() <= MAX_BYTES {
            return self.read_within(text, end, beginning);
        }
        let max = (0..=MAX_BYTES).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
        match self.read_within(&text[..max], End::Open, beginning) {
            Err(Stop::More) => Err(Stop::Other),
            read => read,
        }
    }

    fn read_within(self, text: &str, end: End, beginning: Beginning) -> Read<Calls> {
        let mut cursor = Cursor::new(text, end);
        let mut block = Block {
            is_marked: matches!(beginning, Beginning::Marked | Beginning::Inline),
            ..Block::default()
        };
        self.open(&mut cursor, &mut block)?;
        let mut read = Calls::default();
        let mut is_closed = false;
        loop {
            match self.call(&mut cursor, &block) {
                Ok(calls) => read.calls.extend(calls),
                Err(Stop::Other) if !read.calls.is_empty() => break,
                Err(stop) => return Err(stop),
            }
            if read.calls.len() > MAX_CALLS {
                return Err(Stop::Other);
            }
            is_closed = close(&mut cursor, &mut block)?;
            read.len = cursor.at;
            if is_closed || !self.separates(&mut cursor)? {
                break;
            }
        }
        if !is_closed {
            read.len = skip_last_opening(cursor, read.len)?;
        }
        if beginning == Beginning::Closed && !is_closed {
            return Err(Stop::Other);
        }
        let is_bare = !block.is_marked && (!is_closed || block.is_fenced);
        let mut rest = Cursor { at: read.len, ..cursor };
        rest.skip_space();
        if is_bare && !rest.is_at_end()? && rest.sees_any(OPENS)?.is_none() {
            return Err(Stop::Other);
        }
        let all = text[..read.len].trim_end();
        let is_ended = || CLOSES.iter().chain(&[FENCE_END]).any(|close| all.ends_with(close));
        if beginning == Beginning::Inline && !all.ends_with(EXCESS) && !is_ended() {
            return Err(Stop::Other);
        }
        Ok(read)
    }

    /// Takes the markers that begin a block.
    fn open(self, cursor: &mut Cursor<'_>, block: &mut Block) -> Read<()> {
        for _ in 0..MAX_MARKERS {
            cursor.skip_space();
            let Some(marker) = cursor.takes_any(OPENS)? else { break };
            if FENCES.contains(&marker) {
                block.is_fenced = true;
                cursor.takes("s")?;
            }
        }
        cursor.skip_space();
        if cursor.takes(FENCE_END)? {
            block.is_fenced = true;
            cursor.takes_any(LANGUAGES)?;
            cursor.skip_space();
        }
        let mut list = *cursor;
        if list.takes("[")? {
            list.skip_space();
            if list.peek()? == Some('{') {
                block.is_listed = true;
                *cursor = list;
            }
        }
        Ok(())
    }

    /// Whether another call of the block may follow. Takes the separator.
    fn separates(self, cursor: &mut Cursor<'_>) -> Read<bool> {
        cursor.skip_space();
        while cursor.peek()?.is_some_and(|next| SEPARATORS.contains(&next)) {
            cursor.skip(1);
            cursor.skip_space();
        }
        Ok(cursor.peek()?.is_some())
    }

    /// Reads one call, or all calls of a program.
    fn call(self, cursor: &mut Cursor<'_>, block: &Block) -> Read<Vec<Call>> {
        cursor.skip_space();
        if cursor.takes_any(TAGGED)?.is_some() {
            return tagged::call(cursor, self.offered).map(|call| vec![call]);
        }
        if cursor.takes(KIMI[0])? {
            return self.numbered_call(cursor, block);
        }
        if cursor.takes(DEEPSEEK[0])? {
            return self.separated_call(cursor, block);
        }
        match cursor.peek()?.ok_or(Stop::Other)? {
            '{' => self.object(cursor, block),
            '[' => self.program(cursor, block),
            _ => self.named_call(cursor, block),
        }
    }

    /// A call that is an object. Without a marker, it has to have arguments: an object that has only
    /// a name is more likely an answer. Llama writes such calls.
    fn object(self, cursor: &mut Cursor<'_>, block: &Block) -> Read<Vec<Call>> {
        let start = *cursor;
        let calls = self.any_object(cursor)?;
        let text = &start.text[start.at..cursor.at];
        let may_be_bare = block.is_marked || self.format == ToolCallFormat::Llama3Json;
        match may_be_bare || object_call::has_arguments(text) {
            true => Ok(calls),
            false => Err(Stop::Other),
        }
    }

    fn any_object(self, cursor: &mut Cursor<'_>) -> Read<Vec<Call>> {
        let mut exact = *cursor;
        match self.exact_object(&mut exact) {
            Ok(call) => {
                *cursor = exact;
                return Ok(vec![call]);
            }
            Err(Stop::More) => return Err(Stop::More),
            Err(Stop::Other) => {}
        }
        let value = lenient::value(cursor)?;
        object_call::calls_in(&value, self.offered).ok_or(Stop::Other)
    }

    /// A call that is an object as models are trained to write it. Its arguments are as the model
    /// wrote them.
    fn exact_object(self, cursor: &mut Cursor<'_>) -> Read<Call> {
        let (mut envelope, mut parts) = (Envelope::new(), Vec::new());
        while !envelope.has_ended() {
            // At the end of the answer, a call with missing parts may be read less strictly.
            let next = cursor.next()?;
            envelope.push(next, &mut parts).map_err(|_| Stop::Other)?;
        }
        let (mut name, mut arguments) = (None, String::new());
        for part in parts {
            match part {
                CallPart::Name(called) => name = Some(called),
                CallPart::Arguments(json) => arguments.push_str(&json),
            }
        }
        let function = name.and_then(|name| self.offered.find(&name)).ok_or(Stop::Other)?;
        Ok((function.name.clone(), arguments))
    }

    /// A call of Kimi, from its id on. The name of the function is in it, or in the arguments.
    fn numbered_call(self, cursor: &mut Cursor<'_>, block: &Block) -> Read<Vec<Call>> {
        let id = cursor.until(MAX_HEAD, |next| matches!(next, '<' | '{' | '"'))?;
        cursor.takes(KIMI[1])?;
        if let Some(function) = self.offered.find_numbered(id) {
            let arguments = object_call::arguments(cursor, CLOSES)?;
            return Ok(vec![(function.name.clone(), arguments)]);
        }
        let is_of_id = |next: char| next.is_ascii_alphanumeric() || "_-.:".contains(next);
        cursor.skip_space();
        match cursor.peek()? {
            Some('{') if id.trim().chars().all(is_of_id) => self.object(cursor, block),
            _ => Err(Stop::Other),
        }
    }

    /// A call of DeepSeek. V3.1 writes the name before the separator. R1 and V3 write the word
    /// `function` there, and the name before a fenced block with the arguments.
    fn separated_call(self, cursor: &mut Cursor<'_>, block: &Block) -> Read<Vec<Call>> {
        let ends = |next: char| matches!(next, '<' | '{' | '\n' | '`');
        let mut name = cursor.until(MAX_HEAD, ends)?.trim();
        cursor.takes(DEEPSEEK[1])?;
        if self.offered.find(name).is_none() || name == "function" {
            let mut inner = *cursor;
            inner.skip_space();
            let named = inner.until(MAX_HEAD, ends)?.trim();
            if self.offered.find(named).is_some() {
                (name, *cursor) = (named, inner);
            }
        }
        if name.is_empty() && cursor.peek()? == Some('{') {
            return self.object(cursor, block);
        }
        let function = self.offered.find(name).ok_or(Stop::Other)?;
        let arguments = object_call::arguments(cursor, CLOSES)?;
        Ok(vec![(function.name.clone(), arguments)])
    }

    /// A call that begins with the name of its function.
    fn named_call(self, cursor: &mut Cursor<'_>, block: &Block) -> Read<Vec<Call>> {
        let start = *cursor;
        let mut name = word(cursor)?;
        if matches!(name, "call:" | "call" | ":") && self.format == ToolCallFormat::Gemma4 {
            cursor.skip_space();
            cursor.takes(":")?;
            cursor.skip_space();
            name = word(cursor)?;
        }
        let of_gemma = name.strip_prefix("call:").or_else(|| name.strip_prefix(':'));
        if let Some(function) = of_gemma.and_then(|name| self.offered.find(name)) {
            return gemma::call(cursor, function).map(|call| vec![call]);
        }
        cursor.skip_space();
        if cursor.peek()? == Some('(') {
            *cursor = start;
            return self.program(cursor, block);
        }
        if cursor.takes(KIMI[1])? || cursor.takes(DEEPSEEK[1])? {
            let function = self.offered.find_numbered(name).ok_or(Stop::Other)?;
            let arguments = object_call::arguments(cursor, CLOSES)?;
            return Ok(vec![(function.name.clone(), arguments)]);
        }
        if tagged::sees_argument(cursor)? {
            let function = self.offered.find(name).ok_or(Stop::Other)?;
            return tagged::arguments(cursor, function).map(|call| vec![call]);
        }
        if self.offered.find(name).is_none() && cursor.sees("</arg_key>")? {
            let function = tagged::joined_with_key(name, self.offered).ok_or(Stop::Other)?;
            *cursor = Cursor { at: start.at + function.name.len(), ..*cursor };
            return tagged::glm_call(cursor, function).map(|call| vec![call]);
        }
        let function = self.offered.find(name).ok_or(Stop::Other)?;
        if self.format == ToolCallFormat::Gemma4 {
            return gemma::call(cursor, function).map(|call| vec![call]);
        }
        if cursor.takes("[CALL_ID]")? {
            cursor.until(MAX_HEAD, |next| matches!(next, '[' | '{'))?;
        }
        if cursor.takes("[ARGS]")? || cursor.peek()? == Some('{') {
            let arguments = object_call::arguments(cursor, CLOSES)?;
            return Ok(vec![(function.name.clone(), arguments)]);
        }
        if self.format != ToolCallFormat::Glm && !cursor.sees("<arg_key>")? {
            return Err(Stop::Other);
        }
        tagged::glm_call(cursor, function).map(|call| vec![call])
    }

    /// The calls of a program in Python. It ends with a marker, which may also be within a text, or
    /// with the answer.
    fn program(self, cursor: &mut Cursor<'_>, block: &Block) -> Read<Vec<Call>> {
        let name = self.first_called(*cursor)?;
        if name != "print" && self.offered.find(name).is_none() {
            return Err(Stop::Other);
        }
        let ends: &[&str] = if block.is_fenced { &[FENCE_END] } else { CLOSES };
        let rest = cursor.rest();
        let mut places = Cursor { at: 0, text: rest, end: cursor.end };
        let mut found = 0;
        while let Some(len) = places.rest().find(['<', '`']) {
            places.skip(len);
            let at = places.at;
            if places.takes_any(ends)?.is_none() {
                places.skip(1);
                continue;
            }
            if let Some(calls) = self.in_program(&rest[..at]) {
                cursor.skip(at);
                return Ok(calls);
            }
            found += 1;
            if found == MAX_PROGRAM_ENDS {
                return Err(Stop::Other);
            }
        }
        if cursor.end == End::Open {
            return Err(Stop::More);
        }
        let calls = self.in_program(rest).ok_or(Stop::Other)?;
        cursor.skip(rest.len());
        Ok(calls)
    }

    /// The name of the function that a program calls first.
    fn first_called<'t>(self, mut cursor: Cursor<'t>) -> Read<&'t str> {
        cursor.skip_space();
        cursor.takes("[")?;
        cursor.skip_space();
        let name = word(&mut cursor)?;
        cursor.skip_space();
        if cursor.peek()? == Some('(') { Ok(name) } else { Err(Stop::Other) }
    }

    fn in_program(self, program: &str) -> Option<Vec<Call>> {
        let calls = python::parse_calls(program.trim())?.into_iter();
        let offered = calls.map(|(name, arguments)| {
            let function = self.offered.find(&name)?;
            Some((function.name.clone(), arguments.to_string()))
        });
        offered.collect()
    }
}

/// A word before a quotation mark; `None` if it is too long for a name.
fn short<'a>(cursor: &mut Cursor<'a>, quote: char) -> Read<Option<&'a str>> {
    match cursor.word(|next| next != quote && next != '\n') {
        Err(Stop::Other) => Ok(None),
        word => word.map(Some),
    }
}

/// A name with its namespaces.
fn word<'a>(cursor: &mut Cursor<'a>) -> Read<&'a str> {
    let is_part =
        |next: char| next.is_alphanumeric() || matches!(next, '_' | '-' | '.' | ':' | '/');
    let word = cursor.word(is_part)?;
    if word.is_empty() { Err(Stop::Other) } else { Ok(word) }
}

/// Takes the end of a call or a block: surplus brackets, and markers. Returns whether the block has
/// ended.
fn close(cursor: &mut Cursor<'_>, block: &mut Block) -> Read<bool> {
    let mut after = *cursor;
    after.skip_space();
    if block.is_listed && after.takes("]")? {
        block.is_listed = false;
        *cursor = after;
        after.skip_space();
    }
    while after.peek()?.is_some_and(|next| EXCESS.contains(&next)) {
        after.skip(1);
        after.skip_space();
    }
    let mut is_closed = false;
    let mut has_marker = false;
    for _ in 0..MAX_MARKERS {
        let taken = if block.is_fenced && !sees_fence(&after)? && after.takes(FENCE_END)? {
            Some(FENCE_END)
        } else {
            after.takes_any(CLOSES)?
        };
        let Some(taken) = taken else { break };
        has_marker = true;
        is_closed |= !ends_one_call(taken);
        after.skip_space();
    }
    // Brackets belong to the call only if it ends after them.
    let ends =
        has_marker || after.peek()?.is_none_or(|next| SEPARATORS.contains(&next) || next == '{');
    if ends || after.sees_any(OPENS)?.is_some() {
        *cursor = after;
    }
    Ok(is_closed)
}

/// Skips a marker that begins a block in place of one that ends it: it is the last text of the
/// answer. Returns the place after it, or `at`.
fn skip_last_opening(cursor: Cursor<'_>, at: usize) -> Read<usize> {
    let mut after = Cursor { at, ..cursor };
    after.skip_space();
    let is_opening = after.takes_any(OPENS)?.is_some();
    Ok(if is_opening && after.is_at_end()? { after.at } else { at })
}

/// Whether the marker of another fenced block follows, and not the end of this one.
fn sees_fence(cursor: &Cursor<'_>) -> Read<bool> {
    Ok(cursor.sees_any(&FENCES)?.is_some())
}

/// Whether other calls of the same block may follow the marker.
fn ends_one_call(marker: &str) -> bool {
    let ends = [
        "</function>",
        "</invoke>",
        "</atem:invoke>",
        "</｜DSML｜invoke>",
        "<|tool_call_end|>",
        "<｜tool▁call▁end｜>",
    ];
    ends.contains(&marker)
}
