//! Calls that are objects in JSON, with the names of members that models use.

use serde_json::{Map, Value};

use super::cursor::{Cursor, End, Read, Stop};
use super::lenient;
use super::offered::{Offered, has_argument};

/// A call: the name of the function, and its arguments as the JSON of an object.
pub(super) type Call = (String, String);

/// Names of the member with the name of the function.
const NAMES: &[&str] =
    &["name", "tool_name", "function_name", "function", "tool", "action", "recipient_name"];
/// Names of the member with the arguments.
const ARGUMENTS: &[&str] = &[
    "arguments",
    "parameters",
    "args",
    "params",
    "kwargs",
    "input",
    "tool_input",
    "action_input",
    "tool_arguments",
    "tool_parameters",
];
/// Names of the member with a call, or with several.
const CALLS: &[&str] =
    &["function", "function_call", "tool_call", "tool_calls", "tool_uses", "calls"];
/// Names of members that say nothing about the call.
const OTHERS: &[&str] = &["id", "type", "index", "tool_call_id", "call_id"];
/// Maximum number of objects around a call.
const MAX_WRAPPERS: usize = 3;

/// Whether an object without a marker that begins with a member of this name may be a call.
pub(super) fn may_begin_with(key: &str) -> bool {
    key == "type" || [NAMES, ARGUMENTS, CALLS].iter().any(|names| names.contains(&key))
}

/// Whether the text of an object may have a member with arguments.
pub(super) fn has_arguments(text: &str) -> bool {
    ARGUMENTS
        .iter()
        .any(|name| text.match_indices(name).any(|(at, _)| text[..at].ends_with(['"', '\''])))
}

/// Whether the member with this name has the name of the function.
pub(super) fn is_name(key: &str) -> bool {
    NAMES.contains(&key)
}

/// The calls in a value.
pub(super) fn calls_in(value: &Value, offered: Offered<'_>) -> Option<Vec<Call>> {
    let mut calls = Vec::new();
    add_calls(value, offered, 0, &mut calls)?;
    (!calls.is_empty()).then_some(calls)
}

fn add_calls(
    value: &Value,
    offered: Offered<'_>,
    wrappers: usize,
    calls: &mut Vec<Call>,
) -> Option<()> {
    if wrappers > MAX_WRAPPERS {
        return None;
    }
    match value {
        Value::Array(items) => {
            items.iter().try_for_each(|item| add_calls(item, offered, wrappers + 1, calls))
        }
        Value::Object(members) => {
            if let Some(call) = call_in(members, offered) {
                calls.push(call);
                return Some(());
            }
            let inner = CALLS.iter().find_map(|name| members.get(*name))?;
            add_calls(inner, offered, wrappers + 1, calls)
        }
        _ => None,
    }
}

/// The call that an object represents, if it is one.
fn call_in(members: &Map<String, Value>, offered: Offered<'_>) -> Option<Call> {
    let named = NAMES.iter().find_map(|&name| Some((name, members.get(name)?.as_str()?)));
    let Some((member, name)) = named else {
        // The name of the only member is the name of the function.
        let (name, arguments) = members.iter().next().filter(|_| members.len() == 1)?;
        return Some((offered.find(name)?.name.clone(), arguments_of(arguments)?));
    };
    let function = offered.find(name)?;
    let given = ARGUMENTS.iter().find_map(|name| members.get(*name));
    // A function may have an argument with such a name.
    let is_rest = |(key, _): &(&String, &Value)| *key != member && !OTHERS.contains(&key.as_str());
    let rest: Map<String, Value> =
        members.iter().filter(is_rest).map(|(key, value)| (key.clone(), value.clone())).collect();
    let are_arguments = !rest.is_empty() && rest.keys().all(|key| has_argument(function, key));
    let arguments = match given.map(arguments_of) {
        Some(Some(arguments)) => arguments,
        Some(None) if !are_arguments => return None,
        None if !are_arguments && !rest.is_empty() => return None,
        _ => Value::Object(rest).to_string(),
    };
    Some((function.name.clone(), arguments))
}

/// Arguments as the JSON of an object. `value` is an object, a string that contains one, or
/// nothing.
fn arguments_of(value: &Value) -> Option<String> {
    match value {
        Value::Object(_) => Some(value.to_string()),
        Value::Null => Some("{}".to_owned()),
        Value::Array(items) if items.is_empty() => Some("{}".to_owned()),
        Value::Array(items) if items.len() == 1 && items[0].is_object() => {
            Some(items[0].to_string())
        }
        Value::String(text) => object_in(text),
        _ => None,
    }
}

/// The object in a string that contains nothing else.
fn object_in(text: &str) -> Option<String> {
    if text.trim().is_empty() {
        return Some("{}".to_owned());
    }
    let mut cursor = Cursor::new(text, End::Cut);
    let object = lenient::object(&mut cursor).ok()?;
    cursor.rest().trim().is_empty().then_some(object)
}

/// Reads arguments that are written after a name: an object, also in a fence or as a string, or
/// nothing before `ends`.
pub(super) fn arguments(cursor: &mut Cursor<'_>, ends: &[&str]) -> Read<String> {
    cursor.skip_space();
    let is_fenced = cursor.takes("```")?;
    if is_fenced {
        cursor.takes("json")?;
        cursor.skip_space();
    }
    let arguments = match cursor.peek()? {
        Some('{') => lenient::object(cursor)?,
        Some('"') => {
            let text = lenient::value(cursor)?;
            arguments_of(&text).ok_or(Stop::Other)?
        }
        Some('n') if cursor.takes("null")? => "{}".to_owned(),
        Some(_) if cursor.sees_any(ends)?.is_some() => "{}".to_owned(),
        None if cursor.end == End::Complete => "{}".to_owned(),
        _ => return Err(Stop::Other),
    };
    if is_fenced {
        cursor.skip_space();
        cursor.takes("```")?;
    }
    Ok(arguments)
}
