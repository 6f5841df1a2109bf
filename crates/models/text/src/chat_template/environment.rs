//! The filters, tests, functions and methods of Jinja2, with Python's behavior. Each takes the size
//! of its arguments and of its result from the rendering's budget first.

use minijinja::value::{Rest, ValueKind};
use minijinja::{AutoEscape, filters, functions, tests};
use minijinja::{Environment, Error, ErrorKind, State, UndefinedBehavior, Value};
use minijinja_contrib::{globals, pycompat};

use super::limits::{Budget, MAX_WIDTH, refused, shortened};
use super::templates::Raised;
use super::{guards, lists, methods, python};

/// Creates the environment that all templates of a model share, in which a rendering may execute
/// `fuel` instructions.
pub(super) fn environment(fuel: u64) -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(fuel));
    environment.set_debug(false);
    environment.set_formatter(|output, state, value| {
        let text = python::to_str(&Budget::of(state), value)?;
        output.write_str(&text).map_err(|_| ErrorKind::WriteFailure.into())
    });
    environment.set_unknown_method_callback(call_method);
    guards::add(&mut environment);
    lists::add(&mut environment);
    add_filters(&mut environment);
    add_tests(&mut environment);
    for (name, function) in [
        ("range", Value::from_function(functions::range)),
        ("dict", Value::from_function(functions::dict)),
        ("namespace", Value::from_function(functions::namespace)),
        ("joiner", Value::from_function(globals::joiner)),
        ("cycler", Value::from_function(|items: Rest<Value>| globals::cycler(items.0))),
    ] {
        environment.add_function(name, move |state: &State<'_, '_>, arguments: Rest<Value>| {
            let budget = Budget::of(state);
            for argument in arguments.iter() {
                budget.charge_items(argument)?;
            }
            function.call(state, &arguments)
        });
    }
    // It would print all variables.
    environment.remove_global("debug");
    environment.add_function("raise_exception", raise_exception);
    environment
}

fn raise_exception(state: &State<'_, '_>, message: &Value) -> Result<Value, Error> {
    let message = shortened(python::to_str(&Budget::of(state), message)?);
    Err(refused(message.clone()).with_source(Raised(message)))
}

/// How much of its arguments a filter reads.
#[derive(Clone, Copy, PartialEq)]
enum Reads {
    /// Only the items of a list. A string is divided into characters.
    Items,
    /// Everything.
    All,
    /// Everything, several times.
    Sorted,
}

fn add_filters(environment: &mut Environment<'static>) {
    use Reads::{All, Items, Sorted};
    macro_rules! filters {
        ($($name:literal $function:path, $reads:expr;)*) => {
            [$(($name, Value::from_function($function), $reads)),*]
        };
    }
    let all = filters! {
        "safe" filters::safe, All; "escape" filters::escape, All; "e" filters::escape, All;
        "lower" filters::lower, All; "upper" filters::upper, All; "title" filters::title, All;
        "capitalize" filters::capitalize, All; "replace" filters::replace, All;
        "truncate" methods::truncate, All; "center" methods::center, All;
        "trim" filters::trim, All; "join" filters::join, All; "split" filters::split, Items;
        "lines" filters::lines, Items; "indent" filters::indent, All;
        "format" filters::format, All; "pprint" filters::pprint, All; "bool" filters::bool, Items;
        "tojson" python::to_json, All; "string" python::to_string, All;
        "int" methods::int, All; "float" python::to_float, All;
        "round" methods::round, Items; "abs" filters::abs, Items; "attr" filters::attr, Items;
        "items" filters::items, Items; "reverse" filters::reverse, Items;
        "list" filters::list, Items; "batch" filters::batch, Items;
        "slice" filters::slice, Items; "sum" methods::sum, All; "chain" filters::chain, Items;
        "zip" filters::zip, Items; "map" filters::map, Items; "select" filters::select, Items;
        "reject" filters::reject, Items; "selectattr" filters::selectattr, Items;
        "rejectattr" filters::rejectattr, Items; "min" filters::min, All;
        "max" filters::max, All; "sort" filters::sort, Sorted; "unique" filters::unique, Sorted;
        "dictsort" filters::dictsort, Sorted; "groupby" filters::groupby, Sorted;
    };
    for (name, function, reads) in all {
        let filter = move |state: &State<'_, '_>, arguments: Rest<Value>| {
            let budget = Budget::of(state);
            charge_filter(&budget, name, reads, &arguments)?;
            budget.eager(function.call(state, &arguments)?)
        };
        environment.add_filter(name, filter);
    }
    // These read at most one item of a list that is in memory.
    for (name, function) in [
        ("length", Value::from_function(python::length)),
        ("count", Value::from_function(python::length)),
        ("first", Value::from_function(filters::first)),
        ("last", Value::from_function(filters::last)),
    ] {
        environment.add_filter(name, move |state: &State<'_, '_>, value: &Value| {
            Budget::of(state).charge_iterated(value)?;
            function.call(state, std::slice::from_ref(value))
        });
    }
}

fn charge_filter(
    budget: &Budget,
    name: &str,
    reads: Reads,
    arguments: &[Value],
) -> Result<(), Error> {
    let text = arguments.first().and_then(Value::as_str);
    let mut total = 0_usize;
    for argument in arguments {
        if reads == Reads::Items && argument.kind() != ValueKind::Map {
            budget.charge_items(argument)?;
        } else {
            total = total.saturating_add(budget.measure(argument)?.bytes());
        }
    }
    let argument = |index: usize| arguments.get(index);
    let number = |index: usize| argument(index).and_then(Value::as_usize).unwrap_or(0);
    match (name, text) {
        ("replace", Some(text)) => charge_replace(budget, text, argument(1), argument(2)),
        ("split", Some(text)) => charge_split(budget, text, argument(1).and_then(Value::as_str)),
        ("trim", Some(text)) => charge_strip(budget, text, argument(1)),
        ("join", _) => charge_join(budget, argument(0), argument(1)),
        ("indent", Some(text)) => {
            let width = named(arguments, "width").and_then(|width| width.as_usize());
            let width = check_width(width.unwrap_or(number(1)).max(4))?;
            budget.charge(text.matches('\n').count().saturating_add(1).saturating_mul(width))
        }
        // The name may be any value, and is hashed.
        ("attr", _) => argument(1).map_or(Ok(()), |name| budget.measure(name).map(drop)),
        ("batch" | "slice", _) => budget.charge_values(number(1)),
        ("format", Some(text)) => charge_format(budget, text, &arguments[1..]),
        (_, Some(text)) if reads == Reads::Items => budget.charge_values(text.len()),
        _ if reads == Reads::Sorted => budget.charge(total.saturating_mul(8)),
        _ => Ok(()),
    }
}

/// The argument with this name.
fn named(arguments: &[Value], name: &str) -> Option<Value> {
    let last = arguments.last().filter(|last| last.is_kwargs())?;
    last.get_attr(name).ok().filter(|value| !value.is_undefined())
}

fn add_tests(environment: &mut Environment<'static>) {
    macro_rules! tests {
        ($($($name:literal)* $function:path;)*) => {
            [$($(($name, Value::from_function($function))),*),*]
        };
    }
    // The other tests of minijinja look at one value, but not at the values in it.
    let all = tests! {
        "eq" tests::is_eq; "equalto" tests::is_eq; "==" tests::is_eq;
        "ne" tests::is_ne; "!=" tests::is_ne;
        "lt" tests::is_lt; "lessthan" tests::is_lt; "<" tests::is_lt;
        "le" tests::is_le; "<=" tests::is_le;
        "gt" tests::is_gt; "greaterthan" tests::is_gt; ">" tests::is_gt;
        "ge" tests::is_ge; ">=" tests::is_ge;
        "in" tests::is_in; "sameas" tests::is_sameas;
        "startingwith" tests::is_startingwith; "endingwith" tests::is_endingwith;
        "lower" tests::is_lower; "upper" tests::is_upper;
    };
    for (name, test) in all {
        environment.add_test(name, move |state: &State<'_, '_>, arguments: Rest<Value>| {
            let budget = Budget::of(state);
            for argument in arguments.iter() {
                budget.measure(argument)?;
            }
            Ok::<_, Error>(test.call(state, &arguments)?.is_true())
        });
    }
    environment.add_test("sequence", python::is_sequence);
    environment.add_test("iterable", python::is_sequence);
}

/// Methods of Python's strings, lists and mappings.
fn call_method(
    state: &State<'_, '_>,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    let budget = Budget::of(state);
    budget.charge_items(value)?;
    let first = arguments.first();
    for argument in arguments {
        budget.measure(argument)?;
    }
    let Some(text) = value.as_str() else {
        if method == "count" {
            budget.measure(value)?;
        }
        if matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
            && let Some(result) = methods::of_list(&budget, value, method, arguments)?
        {
            return Ok(result);
        }
        return budget.eager(pycompat::unknown_method_callback(state, value, method, arguments)?);
    };
    match method {
        "replace" => charge_replace(&budget, text, first, arguments.get(1))?,
        "splitlines" => charge_split(&budget, text, Some("\n"))?,
        "strip" | "lstrip" | "rstrip" => charge_strip(&budget, text, first)?,
        "join" => charge_join(&budget, first, Some(value))?,
        "format" => charge_format(&budget, text, arguments)?,
        // minijinja's own method never ends for an empty string.
        "count" if first.and_then(Value::as_str) == Some("") => {
            return Ok(Value::from(text.chars().count() + 1));
        }
        _ => {}
    }
    if let Some(result) = methods::of_text(&budget, text, method, arguments)? {
        return Ok(result);
    }
    if let [argument] = arguments
        && let Some(affix) = argument.as_str()
    {
        match method {
            "removeprefix" => return Ok(text.strip_prefix(affix).unwrap_or(text).into()),
            "removesuffix" => return Ok(text.strip_suffix(affix).unwrap_or(text).into()),
            _ => {}
        }
    }
    budget.eager(pycompat::unknown_method_callback(state, value, method, arguments)?)
}

fn charge_replace(
    budget: &Budget,
    text: &str,
    old: Option<&Value>,
    new: Option<&Value>,
) -> Result<(), Error> {
    let (Some(old), Some(new)) = (old.and_then(Value::as_str), new) else { return Ok(()) };
    // A value that is not a string is printed.
    let new = budget.measure(new)?.bytes();
    budget.charge(text.matches(old).count().saturating_mul(new))
}

pub(super) fn charge_split(
    budget: &Budget,
    text: &str,
    separator: Option<&str>,
) -> Result<(), Error> {
    let count = match separator {
        Some(separator) => text.matches(separator).count(),
        None => text.split_whitespace().count(),
    };
    budget.charge_values(count)
}

fn charge_strip(budget: &Budget, text: &str, characters: Option<&Value>) -> Result<(), Error> {
    // Each character of the string is compared with each of these.
    let count = characters.and_then(Value::as_str).map_or(1, |text| text.chars().count());
    budget.charge(text.len().saturating_mul(count))
}

fn charge_join(
    budget: &Budget,
    items: Option<&Value>,
    separator: Option<&Value>,
) -> Result<(), Error> {
    let count = match items {
        Some(items) => items.as_str().map(str::len).or(items.len()).unwrap_or(0),
        None => 0,
    };
    if let Some(items) = items {
        budget.measure(items)?;
    }
    let separator = separator.and_then(Value::as_str).map_or(0, str::len);
    budget.charge(count.saturating_mul(separator.saturating_add(24)))
}

/// Formatted values are padded to a width, which the format or an argument tells.
fn charge_format(budget: &Budget, format: &str, arguments: &[Value]) -> Result<(), Error> {
    let mut total = 0_usize;
    for digits in format.split(|character: char| !character.is_ascii_digit()) {
        if !digits.is_empty() {
            total += check_width(digits.parse().unwrap_or(usize::MAX))?;
        }
    }
    if format.contains('*') {
        for width in arguments.iter().filter_map(Value::as_i64) {
            let width = usize::try_from(width.unsigned_abs()).unwrap_or(usize::MAX);
            total += check_width(width)?;
        }
    }
    // An argument may be named several times.
    let mut size = 0_usize;
    for argument in arguments {
        size = size.saturating_add(budget.measure(argument)?.bytes());
    }
    let fields = format.matches(['%', '{']).count();
    budget.charge(total.saturating_add(fields.saturating_mul(size)))
}

/// `width`, if it is allowed.
pub(super) fn check_width(width: usize) -> Result<usize, Error> {
    if width > MAX_WIDTH {
        return Err(refused(format!("expected a width of at most {MAX_WIDTH}, got {width}")));
    }
    Ok(width)
}
