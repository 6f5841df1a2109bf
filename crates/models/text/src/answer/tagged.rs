//! Calls whose arguments are written between tags, one by one and without quotation marks. The
//! schema of the function tells whether such an argument is a string.
//!
//! Models leave out tags. A value ends at a closing tag that is followed by text which can follow
//! an argument. If there is none, the next argument of the function begins within the value, or the
//! call ends within it.

use serde_json::{Map, Value};

use super::cursor::{Cursor, End, Read, Stop};
use super::lenient;
use super::markers::{CLOSES, OPENS, TAGGED};
use super::offered::{self, Offered};
use crate::FunctionSchema;

/// Maximum length of a tag, in bytes.
const MAX_TAG: usize = 256;

const ARGUMENTS: &[&str] =
    &["<parameter=", "<parameter name=", "<｜DSML｜parameter name=", EXACT[0], EXACT[1]];
const ARGUMENT_ENDS: &[&str] =
    &["</parameter>", "</｜DSML｜parameter>", "</atem:parameter>", "</param>"];
const CALL_ENDS: &[&str] = &["</function>", "</invoke>", "</｜DSML｜invoke>", "</atem:invoke>"];

/// The tags of arguments whose values have no lines of their own: line breaks belong to the values.
const EXACT: [&str; 2] = ["<atem:parameter name=", "<param name="];
/// The section of MiniCPM 5 in which a value may have any characters.
const CDATA: [&str; 2] = ["<![CDATA[", "]]>"];

const GLM_ARGUMENTS: &[&str] = &["<arg_key>"];
const GLM_ARGUMENT_ENDS: &[&str] = &["</arg_value>"];
const GLM_CALL_ENDS: &[&str] = &["</tool_call>"];

/// The tags of a format.
#[derive(Clone, Copy, Debug)]
struct Tags {
    arguments: &'static [&'static str],
    argument_ends: &'static [&'static str],
    call_ends: &'static [&'static str],
    is_glm: bool,
}

const TAGS: Tags = Tags {
    arguments: ARGUMENTS,
    argument_ends: ARGUMENT_ENDS,
    call_ends: CALL_ENDS,
    is_glm: false,
};

const GLM: Tags = Tags {
    arguments: GLM_ARGUMENTS,
    argument_ends: GLM_ARGUMENT_ENDS,
    call_ends: GLM_CALL_ENDS,
    is_glm: true,
};

/// A tag within a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tag {
    Argument,
    ArgumentEnd,
    Call,
    CallEnd,
}

/// The arguments of a call so far.
struct Arguments<'a> {
    function: &'a FunctionSchema,
    values: Map<String, Value>,
    /// Whether the answer has ended within the last value.
    is_open: bool,
    /// Whether the text is more likely one about calls, which does not have values in separate
    /// lines.
    is_doubtful: bool,
}

/// Reads a call from the name of its function on.
pub(super) fn call(cursor: &mut Cursor<'_>, offered: Offered<'_>) -> Read<(String, String)> {
    cursor.skip_space();
    let head = head(cursor)?;
    let function = offered.find(name_in(head)).ok_or(Stop::Other)?;
    arguments(cursor, function)
}

/// Whether the tag of an argument follows.
pub(super) fn sees_argument(cursor: &Cursor<'_>) -> Read<bool> {
    Ok(cursor.sees_any(ARGUMENTS)?.is_some())
}

/// Reads a call from its arguments on.
pub(super) fn arguments(
    cursor: &mut Cursor<'_>,
    function: &FunctionSchema,
) -> Read<(String, String)> {
    let mut arguments = Arguments::new(function);
    loop {
        cursor.skip_space();
        if cursor.takes_any(CALL_ENDS)?.is_some() {
            return arguments.into_call();
        }
        if let Some(tag) = cursor.takes_any(ARGUMENTS)? {
            cursor.skip_space();
            let head = self::head(cursor)?;
            let is_text = match head {
                _ if head.contains("string=\"true\"") => Some(true),
                _ if head.contains("string=\"false\"") => Some(false),
                _ => None,
            };
            let key = name_in(head);
            let section = if tag == EXACT[1] { cdata(cursor)? } else { None };
            let value = match section {
                Some(value) => value,
                None if EXACT.contains(&tag) => arguments.value(cursor, TAGS, key)?,
                None => lines(arguments.value(cursor, TAGS, key)?),
            };
            arguments.add(key, value, is_text)?;
        } else if cursor.takes_any(ARGUMENT_ENDS)?.is_none() {
            if follows_call(*cursor)? {
                return arguments.into_call();
            }
            if let Some((key, value)) = child(cursor, function)? {
                arguments.add(key, lines(value), None)?;
                continue;
            }
            if cursor.peek()? != Some('{') || !arguments.values.is_empty() {
                return Err(Stop::Other);
            }
            // Llama writes all arguments as one object.
            let json = lenient::object(cursor)?;
            cursor.skip_space();
            cursor.takes_any(CALL_ENDS)?;
            return Ok((function.name.clone(), json));
        }
    }
}

/// Takes a section with a value. The tag that ends the argument follows it.
fn cdata<'a>(cursor: &mut Cursor<'a>) -> Read<Option<&'a str>> {
    let mut next = *cursor;
    if !next.takes(CDATA[0])? {
        return Ok(None);
    }
    let start = next.at;
    while let Some(len) = next.rest().find(CDATA[1]) {
        let value = &next.text[start..next.at + len];
        next.skip(len + CDATA[1].len());
        if next.takes_any(ARGUMENT_ENDS)?.is_some() {
            *cursor = next;
            return Ok(Some(value));
        }
    }
    if next.end == End::Open { Err(Stop::More) } else { Ok(None) }
}

/// A value without the line breaks that separate it from its tags.
fn lines(value: &str) -> &str {
    let value = value.strip_prefix('\n').unwrap_or(value);
    value.strip_suffix('\n').unwrap_or(value)
}

/// Takes an argument that is written as a tag of its own: `<key>value</key>`.
fn child<'a>(
    cursor: &mut Cursor<'a>,
    function: &FunctionSchema,
) -> Read<Option<(&'a str, &'a str)>> {
    let mut next = *cursor;
    if !next.takes("<")? {
        return Ok(None);
    }
    let key = match next.word(|next| next.is_alphanumeric() || matches!(next, '_' | '-' | '.')) {
        Err(Stop::Other) => return Ok(None),
        key => key?,
    };
    if !offered::has_argument(function, key) || !next.takes(">")? {
        return Ok(None);
    }
    let (start, end) = (next.at, format!("</{key}>"));
    while let Some(len) = next.rest().find(&end) {
        next.skip(len);
        let value = &next.text[start..next.at];
        next.skip(end.len());
        let mut after = next;
        after.skip_space();
        if after.peek()?.is_none_or(|next| next == '<') {
            *cursor = next;
            return Ok(Some((key, value)));
        }
    }
    Err(if next.end == End::Open { Stop::More } else { Stop::Other })
}

/// Reads the arguments of a call of GLM: keys and values, each between tags.
pub(super) fn glm_call(
    cursor: &mut Cursor<'_>,
    function: &FunctionSchema,
) -> Read<(String, String)> {
    let mut arguments = Arguments::new(function);
    loop {
        cursor.skip_space();
        if cursor.takes_any(GLM_ARGUMENT_ENDS)?.is_some() {
            // Nothing is before it.
            continue;
        }
        let is_key = cursor.takes(GLM_ARGUMENTS[0])? || takes_wrong_key(cursor)?;
        if !is_key && !sees_bare_key(*cursor, function)? {
            return match follows_call(*cursor)? {
                true => arguments.into_call(),
                false => Err(Stop::Other),
            };
        }
        let key = cursor.until(MAX_TAG, |next| next == '<')?.trim();
        let is_closed = cursor.takes("</arg_key>")?;
        cursor.skip_space();
        if !cursor.takes("<arg_value>")? && !is_closed {
            return Err(Stop::Other);
        }
        let value = arguments.value(cursor, GLM, key)?;
        arguments.add(key, lines(value), None)?;
    }
}

/// Takes `<tool_call>` in place of the tag before a key.
fn takes_wrong_key(cursor: &mut Cursor<'_>) -> Read<bool> {
    let mut next = *cursor;
    if !next.takes("<tool_call>")? {
        return Ok(false);
    }
    let key = next;
    next.until(MAX_TAG, |next| next == '<')?;
    let is_key = next.sees("</arg_key>")?;
    if is_key {
        *cursor = key;
    }
    Ok(is_key)
}

/// Whether the key of an argument follows whose tag is missing.
fn sees_bare_key(mut cursor: Cursor<'_>, function: &FunctionSchema) -> Read<bool> {
    let key = match cursor.word(|next| next.is_alphanumeric() || matches!(next, '_' | '-' | '.')) {
        Err(Stop::Other) => return Ok(false),
        key => key?,
    };
    Ok(offered::has_argument(function, key) && cursor.sees("</arg_key>")?)
}

/// The function of a call whose name and first key are joined to one word, because the tag between
/// them is missing.
pub(super) fn joined_with_key<'a>(word: &str, offered: Offered<'a>) -> Option<&'a FunctionSchema> {
    offered.0.iter().find(|function| {
        let key = word.strip_prefix(function.name.as_str());
        key.is_some_and(|key| offered::has_argument(function, key))
    })
}

/// Whether a call has ended without a closing tag: with the answer, or because a marker follows.
pub(super) fn follows_call(mut cursor: Cursor<'_>) -> Read<bool> {
    cursor.skip_space();
    match cursor.peek()? {
        None => Ok(cursor.end == End::Complete),
        Some('<' | '[' | '`') => {
            let markers = [CLOSES, OPENS, TAGGED];
            for markers in markers {
                if cursor.sees_any(markers)?.is_some() {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        Some(_) => Ok(false),
    }
}

/// The rest of a tag, up to its end. Some models leave that out.
fn head<'a>(cursor: &mut Cursor<'a>) -> Read<&'a str> {
    let head = cursor.until(MAX_TAG, |next| matches!(next, '>' | '<' | '\n'))?;
    cursor.takes(">")?;
    Ok(head)
}

/// The name at the beginning of a tag, with or without quotation marks.
fn name_in(head: &str) -> &str {
    let head = head.trim().trim_start_matches(['"', '\'']);
    head.split(['"', '\'']).next().unwrap_or_default().trim()
}

impl Tags {
    /// Takes a tag if one is next.
    fn take(self, cursor: &mut Cursor<'_>) -> Read<Option<Tag>> {
        let calls = if self.is_glm { &[][..] } else { TAGGED };
        for (texts, tag) in [
            (self.arguments, Tag::Argument),
            (self.argument_ends, Tag::ArgumentEnd),
            (calls, Tag::Call),
            (self.call_ends, Tag::CallEnd),
        ] {
            if cursor.takes_any(texts)?.is_some() {
                return Ok(Some(tag));
            }
        }
        Ok(None)
    }

    /// Takes a closing tag with another name, if the text after it can follow an argument.
    fn takes_other_end(self, cursor: &mut Cursor<'_>, key: &str) -> Read<bool> {
        let mut after = *cursor;
        let end = if self.is_glm { "</arg_key>" } else { &format!("</{key}>") };
        let is_end = after.takes(end)? && self.follows_argument(after)?;
        if is_end {
            *cursor = after;
        }
        Ok(is_end)
    }

    /// Whether the text at the cursor can follow an argument.
    fn follows_argument(self, mut cursor: Cursor<'_>) -> Read<bool> {
        cursor.skip_space();
        for texts in [self.arguments, self.argument_ends, self.call_ends] {
            if cursor.sees_any(texts)?.is_some() {
                return Ok(true);
            }
        }
        Ok(cursor.peek()?.is_none() || follows_call(cursor)?)
    }

    /// The key of an argument, from the end of the text of [`Tags::arguments`] on.
    fn key(self, mut cursor: Cursor<'_>) -> Read<&str> {
        match self.is_glm {
            true => Ok(cursor.until(MAX_TAG, |next| next == '<')?.trim()),
            false => Ok(name_in(head(&mut cursor)?)),
        }
    }
}

impl<'a> Arguments<'a> {
    fn new(function: &'a FunctionSchema) -> Self {
        Self { function, values: Map::new(), is_open: false, is_doubtful: false }
    }

    /// Adds an argument. A call cannot have two with the same name.
    fn add(&mut self, key: &str, value: &str, is_text: Option<bool>) -> Read<()> {
        let value = offered::value(self.function, key, value, is_text);
        let is_new = !key.is_empty() && self.values.insert(key.to_owned(), value).is_none();
        if is_new { Ok(()) } else { Err(Stop::Other) }
    }

    fn into_call(self) -> Read<(String, String)> {
        let has_all =
            || offered::required(self.function).all(|name| self.values.contains_key(name));
        if self.is_doubtful || (self.is_open && !has_all()) {
            return Err(Stop::Other);
        }
        Ok((self.function.name.clone(), Value::Object(self.values).to_string()))
    }

    /// Reads the value of the argument `key`, and its closing tag if it has one.
    fn value<'t>(&mut self, cursor: &mut Cursor<'t>, tags: Tags, key: &str) -> Read<&'t str> {
        let start = cursor.at;
        let mut within = Within::default();
        let end = loop {
            let Some(len) = cursor.rest().find('<') else {
                if cursor.end != End::Complete {
                    return Err(if cursor.end == End::Open { Stop::More } else { Stop::Other });
                }
                self.is_open = within.marker.is_none() && within.next.is_none();
                self.is_doubtful |= self.is_open && !cursor.text[start..].starts_with('\n');
                break within.marker.unwrap_or(cursor.text.len());
            };
            cursor.skip(len);
            let at = cursor.at;
            match tags.take(cursor)? {
                Some(Tag::Argument) => {
                    if within.next.is_none() && self.begins(*cursor, at, tags, key)? {
                        within.next = Some(at);
                    }
                    within.arguments += 1;
                }
                Some(Tag::ArgumentEnd) if within.arguments > 0 => {
                    within.arguments -= 1;
                    within.last_end = Some((at, cursor.at));
                }
                Some(Tag::ArgumentEnd)
                    if within.calls == 0 && tags.follows_argument(*cursor)? =>
                {
                    return Ok(&cursor.text[start..at]);
                }
                Some(Tag::Call) => within.calls += 1,
                Some(Tag::CallEnd) if within.calls > 0 => within.calls -= 1,
                Some(Tag::CallEnd) if follows_call(*cursor)? || cursor.is_at_end()? => break at,
                Some(Tag::CallEnd) => {
                    within.marker.get_or_insert(at);
                }
                Some(Tag::ArgumentEnd) => {}
                None if within.arguments == 0 && tags.takes_other_end(cursor, key)? => {
                    return Ok(&cursor.text[start..at]);
                }
                None => {
                    if within.marker.is_none() && cursor.sees_any(CLOSES)?.is_some() {
                        within.marker = Some(at);
                    }
                    cursor.skip(1);
                }
            }
        };
        let end = within.end(cursor.text, end);
        cursor.at = end;
        let value = &cursor.text[start..end];
        if within.last_end.is_some_and(|(at, _)| at == end) {
            cursor.takes_any(tags.argument_ends)?;
        }
        Ok(value)
    }

    /// Whether the next argument begins in the value of the argument `key`, whose closing tag is
    /// missing: one that the function has, and the call does not have yet. `at` is where its tag
    /// begins.
    fn begins(&self, cursor: Cursor<'_>, at: usize, tags: Tags, key: &str) -> Read<bool> {
        let next = tags.key(cursor)?;
        let is_new = next != key && !self.values.contains_key(next);
        let before = &cursor.text[..at];
        let line = before.rsplit('\n').next().unwrap_or_default();
        let is_line = line.len() < before.len() && line.trim().is_empty();
        let known = offered::has_argument(self.function, next);
        Ok(known && is_new && (is_line || offered::requires(self.function, next)))
    }
}

/// The tags that were found within a value.
#[derive(Default)]
struct Within {
    /// Number of arguments and of calls that have begun in it.
    arguments: usize,
    calls: usize,
    /// The place where the next argument of the call begins.
    next: Option<usize>,
    /// The last closing tag of an argument.
    last_end: Option<(usize, usize)>,
    /// The first marker that may end the call.
    marker: Option<usize>,
}

impl Within {
    /// The end of a value whose closing tag was not found before `end`.
    fn end(&self, text: &str, end: usize) -> usize {
        let closing = self
            .last_end
            .filter(|&(at, after)| after <= end && at < end && text[after..end].trim().is_empty());
        self.next.filter(|&next| next < end).or(closing.map(|(at, _)| at)).unwrap_or(end)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn functions() -> Vec<FunctionSchema> {
        let parameters = json!({
            "properties": {"p": {"type": "string"}, "t": {"type": "string"}, "n": {"type": "integer"}},
            "required": ["p"],
        });
        vec![FunctionSchema::new("f", parameters)]
    }

    fn read(text: &str, end: End) -> Read<(Value, String)> {
        let functions = functions();
        let mut cursor = Cursor::new(text, end);
        cursor.takes("<function=")?;
        let (_, arguments) = call(&mut cursor, Offered(&functions))?;
        Ok((serde_json::from_str(&arguments).expect("JSON"), cursor.rest().to_owned()))
    }

    /// Goal: values end where the model meant it, with and without tags.
    #[test]
    fn values_end_where_they_should() {
        for (text, expected) in [
            ("f>\n<parameter=p>\n1\n</parameter>\n</function>", json!({"p": "1"})),
            ("f>\n<parameter=p>\n a\n\n</parameter>\n</function>", json!({"p": " a\n"})),
            (
                "f>\n<parameter=p>a</parameter> b</parameter></function>",
                json!({"p": "a</parameter> b"}),
            ),
            (
                "f>\n<parameter=p>\na\n<parameter=n>\n3\n</parameter>\n</function>",
                json!({"p": "a", "n": 3}),
            ),
            ("f>\n<parameter=n>3<parameter=p>a</parameter></function>", json!({"n": 3, "p": "a"})),
            (
                "f>\n<parameter=p>\na\n<parameter=t>\nb\n<parameter=n>\n3\n</function>",
                json!({"p": "a", "t": "b", "n": 3}),
            ),
            ("f>\n<parameter=p>\na\n</function>", json!({"p": "a"})),
            ("f>\n<parameter=p>\na\n</tool_call>", json!({"p": "a"})),
            ("f>\n<parameter=p>\na\n</parameter>\n</tool_call>", json!({"p": "a"})),
            ("f>\n<parameter=p>\na\n</parameter>", json!({"p": "a"})),
            ("f>\n<parameter=p>\na", json!({"p": "a"})),
            ("f\n<parameter=p\na\n</parameter></function>", json!({"p": "a"})),
            // A value that shows the format.
            (
                "f>\n<parameter=p>\nUse\n<parameter=n>\n3\n</parameter>\nso.\n</parameter>\n</function>",
                json!({"p": "Use\n<parameter=n>\n3\n</parameter>\nso."}),
            ),
            (
                "f>\n<parameter=p>\n<function=f>\n<parameter=p>\nx\n</parameter>\n</function>\n</tool_call>\n\
                 </parameter>\n</function>\n</tool_call>",
                json!({"p": "<function=f>\n<parameter=p>\nx\n</parameter>\n</function>\n</tool_call>"}),
            ),
            (
                "f>\n<parameter=p>\nWrite <parameter=t> first.\n</parameter>\n</function>",
                json!({"p": "Write <parameter=t> first."}),
            ),
            ("f>{\"p\": \"a\"}</function>", json!({"p": "a"})),
            ("f></function>", json!({})),
            ("f>\n<parameter=\np>\na\n</p>\n</function>", json!({"p": "a"})),
            ("f>\n<p>a</p>\n<n>3</n></function>", json!({"p": "a", "n": 3})),
            ("f><parameter=p><![CDATA[a]]></parameter></function>", json!({"p": "<![CDATA[a]]>"})),
            ("f><param name=\"p\"><![CDATA[a]]></param></function>", json!({"p": "a"})),
        ] {
            let text = format!("<function={text}");
            let read = read(&text, End::Complete).map(|(arguments, _)| arguments);
            assert_eq!(read, Ok(expected), "{text}");
        }
    }

    /// Goal: text of another form is not a call, and a call that was cut off is not completed.
    #[test]
    fn other_texts_are_not_calls() {
        for text in [
            "",
            "g></function>",
            ">\n</function>",
            "f> text",
            "f><parameter=t>1",
            "f><parameter=p>1",
            "f><parameter=p>1</parameter><parameter=p>1</parameter></function>",
        ] {
            let text = format!("<function={text}");
            assert_eq!(read(&text, End::Complete), Err(Stop::Other), "{text}");
        }
        for text in ["f><parameter=p>1", "f><parameter=p>1</parameter>", "f>"] {
            let text = format!("<function={text}");
            assert_eq!(read(&text, End::Cut), Err(Stop::Other), "{text}");
            assert_eq!(read(&text, End::Open), Err(Stop::More), "{text}");
        }
    }
}
