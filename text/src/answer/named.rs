//! Calls that are written as the name of a function and a JSON object with its arguments, between
//! markers: DeepSeek and Kimi.

use serde_json::Value;

use super::MAX_CALLS;
use super::format::ToolCallFormat;
use super::tagged::split_value;

/// The names and the JSON of the arguments of all calls of a block; `None` if it has anything else.
pub(super) fn parse_calls(format: ToolCallFormat, block: &str) -> Option<Vec<(String, String)>> {
    let [begin, separator, end] = format.call_markers()?;
    let mut calls = Vec::new();
    let mut rest = block.trim();
    while !rest.is_empty() {
        let (head, body) = rest.strip_prefix(begin)?.split_once(separator)?;
        let ends = |next: &str| next.is_empty() || next.starts_with(begin);
        let (body, after) = split_value(body, end, ends)?;
        let (name, arguments) = match format {
            ToolCallFormat::Kimi => (kimi_name(head)?, body),
            _ => deepseek_call(head, body)?,
        };
        if calls.len() == MAX_CALLS || name.is_empty() {
            return None;
        }
        calls.push((name.to_owned(), object(arguments)?));
        rest = after.trim_start();
    }
    (!calls.is_empty()).then_some(calls)
}

/// The text of a JSON object.
pub(super) fn object(text: &str) -> Option<String> {
    let text = text.trim();
    let value: Value = serde_json::from_str(text).ok()?;
    value.is_object().then(|| text.to_owned())
}

/// The name in `functions.name:0`.
fn kimi_name(head: &str) -> Option<&str> {
    let (name, number) = head.trim().rsplit_once(':')?;
    let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| name.strip_prefix("functions.").unwrap_or(name))
}

/// DeepSeek V3.1 writes the name before the separator. R1 and V3 write the word `function` there,
/// and the name before a fenced block with the arguments.
fn deepseek_call<'a>(head: &'a str, body: &'a str) -> Option<(&'a str, &'a str)> {
    let (head, body) = (head.trim(), body.trim());
    if head != "function" || body.starts_with('{') {
        return Some((head, body));
    }
    let (name, fenced) = body.split_once('\n')?;
    let fenced = fenced.trim_start().strip_prefix("```")?.strip_suffix("```")?;
    Some((name.trim(), fenced.strip_prefix("json").unwrap_or(fenced)))
}
