//! Tolerant reading of JSON as clients and models write it, also if it was cut off in the middle.

#[cfg(feature = "tokenizer")]
use serde_json::{Value, json};

/// The member that shows arguments of a call that are not an object.
#[cfg(feature = "tokenizer")]
const ARGUMENTS: &str = "arguments";

/// The arguments of a call as an object, whatever form they have in the history of a conversation:
/// an object, or a string that contains one. `null` and empty arguments become an empty object.
/// Everything else, such as a string that was cut off, becomes the only member of an object.
#[cfg(feature = "tokenizer")]
pub(crate) fn parse_object(arguments: &Value) -> Value {
    let parsed = match arguments {
        Value::String(text) if text.trim().is_empty() => Value::Null,
        Value::String(text) => parse(text).unwrap_or_else(|| arguments.clone()),
        other => other.clone(),
    };
    // Some clients encode the string with the object as JSON once more.
    let parsed = match &parsed {
        Value::String(inner) => parse(inner).filter(Value::is_object).unwrap_or(parsed),
        _ => parsed,
    };
    match parsed {
        Value::Object(_) => parsed,
        Value::Null => json!({}),
        other => json!({ARGUMENTS: other}),
    }
}

#[cfg(feature = "tokenizer")]
fn parse(text: &str) -> Option<Value> {
    serde_json::from_str(text).ok().or_else(|| {
        let mut bytes = text.as_bytes().to_vec();
        if replace_lone_surrogates(&mut bytes) == 0 {
            return None;
        }
        serde_json::from_slice(&bytes).ok()
    })
}

/// Replaces each half of a surrogate pair that stands alone in a JSON text (`\ud83d`) by U+FFFD, as
/// the encoders of Python and JavaScript do. Returns the number of halves.
///
/// A client that cuts a text by UTF-16 units, in the middle of an emoji, writes such a half, and
/// `serde_json` refuses it. The length of the text stays the same.
pub fn replace_lone_surrogates(json: &mut [u8]) -> usize {
    let mut replaced = 0;
    let mut place = 0;
    while let Some(next) = json[place..].iter().position(|&byte| byte == b'\\') {
        place += next;
        let Some(unit) = unit_at(json, place) else {
            // Another escape, which has at least two characters.
            place = (place + 2).min(json.len());
            continue;
        };
        let is_low = |unit: Option<u16>| unit.is_some_and(|unit| (0xdc00..0xe000).contains(&unit));
        let is_high = (0xd800..0xdc00).contains(&unit);
        if is_high && is_low(unit_at(json, place + 6)) {
            place += 12;
            continue;
        }
        if is_high || is_low(Some(unit)) {
            json[place + 2..place + 6].copy_from_slice(b"fffd");
            replaced += 1;
        }
        place += 6;
    }
    replaced
}

/// The UTF-16 unit of the escape `\uXXXX` at this place, if there is one.
fn unit_at(json: &[u8], place: usize) -> Option<u16> {
    let escape = json.get(place..place + 6)?;
    let digits = escape.strip_prefix(b"\\u")?;
    let digits = std::str::from_utf8(digits).ok()?;
    let is_hex = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hex.then(|| u16::from_str_radix(digits, 16).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: halves of surrogate pairs are replaced in their places, pairs and everything else stay.
    #[test]
    fn lone_surrogates_are_replaced() {
        for (json, expected) in [
            (r#""cut \ud83d""#, Some("cut \u{fffd}")),
            (r#""\ude00 x""#, Some("\u{fffd} x")),
            (r#""\ud83d\uD83D""#, Some("\u{fffd}\u{fffd}")),
            (r#""\ude00\ud83d""#, Some("\u{fffd}\u{fffd}")),
            (r#""\ud83dA""#, Some("\u{fffd}A")),
            (r#""\ud83d\n\ud83d\\""#, Some("\u{fffd}\n\u{fffd}\\")),
            (r#""\ud83d\ud83d\ude00""#, Some("\u{fffd}\u{1f600}")),
            (r#""\ud83d\ude00 \u0041 \uffff""#, None),
            (r#""\\ud83d \\\\ude00""#, None),
        ] {
            let mut bytes = json.as_bytes().to_vec();
            let replaced = replace_lone_surrogates(&mut bytes);
            assert_eq!(replaced > 0, expected.is_some(), "{json}");
            let parsed: Value = serde_json::from_slice(&bytes).expect("JSON");
            if let Some(expected) = expected {
                assert_eq!(parsed, expected, "{json}");
            }
            assert_eq!(bytes.len(), json.len());
        }
        for cut in [r#"\"#, r#"\u"#, r#"\ud83"#, r#""\ud83d\ude0"#, r#""\ud83d\"#] {
            let mut bytes = cut.as_bytes().to_vec();
            replace_lone_surrogates(&mut bytes);
            assert_eq!(bytes.len(), cut.len());
        }
    }

    /// Goal: arguments of earlier calls become an object in every form in which clients send them.
    #[test]
    fn arguments_become_an_object() {
        for (given, expected) in [
            (json!({"a": 1}), json!({"a": 1})),
            (json!(r#"{"a": 1}"#), json!({"a": 1})),
            (json!(r#""{\"a\": 1}""#), json!({"a": 1})),
            (json!(r#"{"a": "\ud83d"}"#), json!({"a": "\u{fffd}"})),
            (json!(""), json!({})),
            (json!(" "), json!({})),
            (json!("null"), json!({})),
            (Value::Null, json!({})),
            (json!(r#"{"a": "The mi"#), json!({"arguments": r#"{"a": "The mi"#})),
            (json!("oops"), json!({"arguments": "oops"})),
            (json!(r#""Oslo""#), json!({"arguments": "Oslo"})),
            (json!(r#"["Oslo"]"#), json!({"arguments": ["Oslo"]})),
            (json!(["Oslo"]), json!({"arguments": ["Oslo"]})),
            (json!("3"), json!({"arguments": 3})),
        ] {
            assert_eq!(parse_object(&given), expected, "{given}");
        }
    }
}
