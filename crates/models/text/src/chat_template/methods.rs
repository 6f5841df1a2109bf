//! Methods of Python's strings and lists, and filters and functions of Jinja2, that minijinja's own
//! library lacks. Used by the environment of [`ChatTemplate`](super::ChatTemplate) only.

use minijinja::value::{Kwargs, Rest, from_args};
use minijinja::{Error, State, Value, filters};

use super::environment::{charge_split, check_width};
use super::limits::{Budget, refused};

/// The result of a method of strings; `None` for a method that minijinja has.
pub(super) fn of_text(
    budget: &Budget,
    text: &str,
    method: &str,
    arguments: &[Value],
) -> Result<Option<Value>, Error> {
    let result = match method {
        "split" | "rsplit" => {
            let (separator, most, named): (Option<String>, Option<i64>, Kwargs) =
                from_args(arguments)?;
            let separator = separator.or(named.get("sep")?);
            let most = most.or(named.get("maxsplit")?).and_then(|most| usize::try_from(most).ok());
            named.assert_all_used()?;
            let parts = split(budget, text, separator.as_deref(), most, method)?;
            parts.into_iter().map(Value::from).collect()
        }
        "find" | "rfind" | "index" | "rindex" => match (place_in(text, method, arguments)?, method)
        {
            (Some(place), _) => place.into(),
            (None, "find" | "rfind") => Value::from(-1),
            (None, _) => {
                return Err(refused(format!("{method}: the string does not contain the argument")));
            }
        },
        "ljust" | "rjust" | "center" => {
            let (width, fill) = from_args(arguments)?;
            padded(text, method, width, fill)?.into()
        }
        "zfill" => {
            let (width,) = from_args(arguments)?;
            let digits = text.trim_start_matches(['+', '-']);
            let sign = &text[..text.len() - digits.len()];
            let missing = missing(text, width)?;
            format!("{sign}{}{digits}", "0".repeat(missing)).into()
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(arguments)?;
            let found = match method {
                "partition" => text.split_once(separator),
                _ => text.rsplit_once(separator),
            };
            let parts = match found {
                Some((before, after)) => [before, separator, after],
                None if method == "partition" => [text, "", ""],
                None => ["", "", text],
            };
            parts.into_iter().map(Value::from).collect()
        }
        "isdecimal" => (!text.is_empty() && text.chars().all(char::is_numeric)).into(),
        "casefold" => text.to_lowercase().replace('ß', "ss").into(),
        "swapcase" => {
            let mut swapped = String::with_capacity(text.len());
            for char in text.chars() {
                match char.is_uppercase() {
                    true => swapped.extend(char.to_lowercase()),
                    false => swapped.extend(char.to_uppercase()),
                }
            }
            swapped.into()
        }
        _ => return Ok(None),
    };
    Ok(Some(result))
}

/// The place of the first argument in a string, in characters, between those that the other two
/// arguments tell. minijinja counts bytes.
fn place_in(text: &str, method: &str, arguments: &[Value]) -> Result<Option<usize>, Error> {
    let (wanted, start, end): (&str, Option<i64>, Option<i64>) = from_args(arguments)?;
    let count = text.chars().count();
    let place = |index: i64| {
        let distance = usize::try_from(index.unsigned_abs()).unwrap_or(usize::MAX);
        if index < 0 { count.saturating_sub(distance) } else { distance }
    };
    let (start, end) = (start.map_or(0, place), end.map_or(count, place).min(count));
    if start > end {
        return Ok(None);
    }
    let byte = |index: usize| text.char_indices().nth(index).map_or(text.len(), |(byte, _)| byte);
    let part = &text[byte(start)..byte(end)];
    let found = if method.starts_with('r') { part.rfind(wanted) } else { part.find(wanted) };
    Ok(found.map(|found| start + part[..found].chars().count()))
}

/// The result of a method of lists; `None` for a method that minijinja has.
pub(super) fn of_list(
    budget: &Budget,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Option<Value>, Error> {
    if method != "index" {
        return Ok(None);
    }
    budget.measure(value)?;
    let (wanted,): (Value,) = from_args(arguments)?;
    match value.try_iter()?.position(|item| item == wanted) {
        Some(place) => Ok(Some(place.into())),
        None => Err(refused("index: the list does not contain the argument")),
    }
}

/// Python's `split` and `rsplit`: at each `separator`, or at white space, `most` times.
fn split<'a>(
    budget: &Budget,
    text: &'a str,
    separator: Option<&str>,
    most: Option<usize>,
    method: &str,
) -> Result<Vec<&'a str>, Error> {
    charge_split(budget, text, separator)?;
    let most = most.unwrap_or(usize::MAX);
    let mut parts = Vec::new();
    match (separator, method) {
        (Some(""), _) => return Err(refused("split: expected a separator that is not empty")),
        (Some(separator), "split") => {
            parts.extend(text.splitn(most.saturating_add(1), separator));
        }
        (Some(separator), _) => {
            parts.extend(text.rsplitn(most.saturating_add(1), separator));
            parts.reverse();
        }
        (None, "split") => {
            let mut rest = text.trim_start();
            while !rest.is_empty() && parts.len() < most {
                let (part, after) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
                parts.push(part);
                rest = after.trim_start();
            }
            parts.extend((!rest.is_empty()).then_some(rest));
        }
        (None, _) => {
            let mut rest = text.trim_end();
            while !rest.is_empty() && parts.len() < most {
                let (before, part) = rest.rsplit_once(char::is_whitespace).unwrap_or(("", rest));
                parts.push(part);
                rest = before.trim_end();
            }
            parts.extend((!rest.is_empty()).then_some(rest));
            parts.reverse();
        }
    }
    Ok(parts)
}

/// How many characters `text` lacks to have `width`.
fn missing(text: &str, width: i64) -> Result<usize, Error> {
    let width = check_width(usize::try_from(width).unwrap_or(0))?;
    Ok(width.saturating_sub(text.chars().count()))
}

fn padded(text: &str, method: &str, width: i64, fill: Option<char>) -> Result<String, Error> {
    let missing = missing(text, width)?;
    let left = match method {
        "ljust" => 0,
        "rjust" => missing,
        // As Python does: the odd one is on the left if the width is odd, too.
        _ => missing / 2 + usize::from(missing % 2 == 1 && width % 2 == 1),
    };
    let fill = |count: usize| fill.unwrap_or(' ').to_string().repeat(count);
    Ok(format!("{}{text}{}", fill(left), fill(missing - left)))
}

/// The filter `center`.
pub(super) fn center(text: &str, width: Option<i64>) -> Result<String, Error> {
    padded(text, "center", width.unwrap_or(80), None)
}

/// The filter `truncate`, with its length, whether words may be cut, the end of a cut text, and how
/// much longer an uncut one may be.
pub(super) fn truncate(text: &str, arguments: Rest<Value>) -> Result<String, Error> {
    type Arguments<'a> = (Option<usize>, Option<bool>, Option<&'a str>, Option<usize>, Kwargs);
    let (length, kill_words, end, leeway, named): Arguments<'_> = from_args(&arguments)?;
    let length = length.or(named.get("length")?).unwrap_or(255);
    let kill_words = kill_words.or(named.get("killwords")?).unwrap_or(false);
    let end = end.or(named.get("end")?).unwrap_or("...");
    let leeway = leeway.or(named.get("leeway")?).unwrap_or(5);
    named.assert_all_used()?;
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text.to_owned());
    }
    let kept = length.saturating_sub(end.chars().count());
    let kept: String = text.chars().take(kept).collect();
    let kept = match kept.rsplit_once(' ') {
        Some((words, _)) if !kill_words => words,
        _ => &kept,
    };
    Ok(format!("{kept}{end}"))
}

/// The filter `sum`: of the items, or of an attribute of each.
pub(super) fn sum(
    state: &State<'_, '_>,
    values: Value,
    attribute: Option<Value>,
    start: Option<Value>,
    named: Kwargs,
) -> Result<Value, Error> {
    let attribute = attribute.or(named.get("attribute")?).filter(|attribute| !attribute.is_none());
    let start = start.or(named.get("start")?);
    named.assert_all_used()?;
    let values = match attribute {
        Some(attribute) => {
            let name = Kwargs::from_iter([("attribute", attribute)]);
            state.apply_filter("map", &[values, name.into()])?
        }
        None => values,
    };
    let values = start.into_iter().chain(values.try_iter()?).collect();
    filters::sum(state, values)
}

/// The filter `round`, which rounds halves to the even neighbor as Python does.
pub(super) fn round(
    value: Value,
    precision: Option<i32>,
    method: Option<&str>,
    named: Kwargs,
) -> Result<Value, Error> {
    let precision = precision.or(named.get("precision")?).unwrap_or(0).clamp(-400, 400);
    let method = method.or(named.get("method")?).unwrap_or("common");
    named.assert_all_used()?;
    if !value.is_number() || (value.is_integer() && method == "common" && precision >= 0) {
        return filters::round(value, Some(precision));
    }
    let number = f64::try_from(value)?;
    let scale = 10_f64.powi(precision);
    let rounded = match method {
        "ceil" => (number * scale).ceil() / scale,
        "floor" => (number * scale).floor() / scale,
        "common" if precision >= 0 => {
            let digits = usize::try_from(precision).unwrap_or(0);
            format!("{number:.digits$}").parse().unwrap_or(number)
        }
        "common" => (number * scale).round_ties_even() / scale,
        _ => return Err(refused("round: expected the method common, ceil or floor")),
    };
    Ok(rounded.into())
}

/// The filter `int`, which returns the default for a value that is not a number.
pub(super) fn int(
    state: &State<'_, '_>,
    value: &Value,
    default: Option<Value>,
    base: Option<u32>,
    named: Kwargs,
) -> Result<Value, Error> {
    let default = default.or(named.get("default")?).unwrap_or_else(|| Value::from(0));
    let base = base.or(named.get("base")?).unwrap_or(10);
    named.assert_all_used()?;
    if base != 10
        && let Some(text) = value.as_str()
    {
        return Ok(in_base(text.trim(), base).map_or(default, Value::from));
    }
    let trimmed = value.as_str().map(|text| Value::from(text.trim()));
    Ok(filters::int(state, trimmed.as_ref().unwrap_or(value)).unwrap_or(default))
}

/// An integer in a base of 2 to 36, with or without the prefix of Python for this base.
fn in_base(text: &str, base: u32) -> Option<i128> {
    let digits = text.trim_start_matches(['+', '-']).to_ascii_lowercase();
    let prefix = match base {
        2 => "0b",
        8 => "0o",
        16 => "0x",
        _ => "",
    };
    let digits = digits.strip_prefix(prefix).unwrap_or(&digits);
    if !(2..=36).contains(&base) || digits.starts_with(['+', '-']) {
        return None;
    }
    let number = i128::from_str_radix(digits, base).ok()?;
    Some(if text.starts_with('-') { -number } else { number })
}
