//! From the forms of structured output in requests to the engine's grammars.

use serde_json::Value;
use stolon::{Grammar, GrammarError};

use super::advice::Ignored;
use super::body::{brief, refuse_unknown};
use super::error::ApiError;
use crate::api::neutral::Scope;
use crate::api::options::GenerationOptions;
use crate::api::structured::{ResponseFormat, StructuredOutputs};

/// A parameter in the form of `response_format` with its name.
pub(super) type Format = (&'static str, ResponseFormat);

/// The grammar of a request's answers; `None` if they are free. At most one of the parameters may
/// be given. `format` is the one that an API has in addition to those of all.
pub(super) fn grammar(
    options: &mut GenerationOptions,
    format: Option<Format>,
    ignored: &Ignored,
) -> Result<Option<Grammar>, ApiError> {
    let mut given: Vec<(&str, Grammar)> = Vec::new();
    let response_format = options.response_format.take().map(|format| ("response_format", format));
    for (name, format) in format.into_iter().chain(response_format) {
        given.extend(of_format(name, format, ignored)?.map(|grammar| (name, grammar)));
    }
    if let Some(outputs) = options.structured_outputs.take() {
        refuse_unknown("structured_outputs.", &outputs.unknown, Scope::StructuredOutputs, ignored)?;
        let names = [
            "structured_outputs.json",
            "structured_outputs.json_object",
            "structured_outputs.regex",
            "structured_outputs.choice",
            "structured_outputs.grammar",
        ];
        add(names, outputs, &mut given)?;
    }
    let guided = StructuredOutputs {
        json: options.guided_json.take(),
        regex: options.guided_regex.take(),
        choice: options.guided_choice.take(),
        grammar: options.guided_grammar.take(),
        ..StructuredOutputs::default()
    };
    add(
        ["guided_json", "", "guided_regex", "guided_choice", "guided_grammar"],
        guided,
        &mut given,
    )?;
    if let [(first, _), (second, _), ..] = given.as_slice() {
        let message = format!("`{second}` is not possible with `{first}`: expected one of them");
        return Err(ApiError::invalid(Some(second), message));
    }
    Ok(given.pop().map(|(_, grammar)| grammar))
}

/// Adds what `outputs` request, whose members have these names in the request.
fn add<'a>(
    names: [&'a str; 5],
    outputs: StructuredOutputs,
    given: &mut Vec<(&'a str, Grammar)>,
) -> Result<(), ApiError> {
    let [json, json_object, regex, choice, grammar] = names;
    if let Some(schema) = outputs.json {
        given.push((json, Grammar::JsonSchema(schema_value(json, schema)?)));
    }
    if outputs.json_object == Some(true) {
        given.push((json_object, Grammar::JsonObject));
    }
    given.extend(outputs.regex.map(|text| (regex, Grammar::Regex(text))));
    given.extend(outputs.choice.map(|texts| (choice, Grammar::Choice(texts))));
    if let Some(text) = outputs.grammar {
        if text.contains("::=") {
            let message =
                format!("`{grammar}`: expected the syntax of Lark (`start: ...`), got GBNF");
            return Err(ApiError::invalid(Some(grammar), message));
        }
        given.push((grammar, Grammar::Lark(text)));
    }
    for (name, grammar) in given {
        grammar.check().map_err(|error| refused(name, &error))?;
    }
    Ok(())
}

/// A schema that may be written as text.
fn schema_value(name: &str, schema: Value) -> Result<Value, ApiError> {
    let Value::String(text) = schema else { return Ok(schema) };
    serde_json::from_str(&text).map_err(|error| {
        ApiError::invalid(Some(name), format!("`{name}`: expected a JSON schema, got {error}"))
    })
}

/// The grammar of a `response_format`, which is the parameter `param`.
fn of_format(
    param: &str,
    format: ResponseFormat,
    ignored: &Ignored,
) -> Result<Option<Grammar>, ApiError> {
    refuse_unknown(&format!("{param}."), &format.unknown, Scope::None, ignored)?;
    let kind = format!("{param}.type");
    let (path, schema) = match (format.kind.as_str(), format.json_schema, format.schema) {
        ("text", None, None) => return Ok(None),
        ("json_object", None, None) => return Ok(Some(Grammar::JsonObject)),
        ("json_schema", Some(json_schema), None) => {
            let path = format!("{param}.json_schema.");
            refuse_unknown(&path, &json_schema.unknown, Scope::None, ignored)?;
            (format!("{path}schema"), json_schema.schema)
        }
        ("json_object", None, schema) => (format!("{param}.schema"), schema),
        ("json_schema", None, None) if param == "response_format" => {
            return Err(ApiError::missing("response_format.json_schema"));
        }
        ("json_schema", None, schema) => (format!("{param}.schema"), schema),
        ("text" | "json_object" | "json_schema", ..) => {
            let message = format!("`{param}`: a schema is given twice, or with another type");
            return Err(ApiError::invalid(Some(param), message));
        }
        (other, ..) => {
            let expected = "text, json_object or json_schema";
            return Err(ApiError::expected(&kind, expected, &Value::from(other)));
        }
    };
    let schema = schema.ok_or_else(|| ApiError::missing(&path))?;
    if !schema.is_object() {
        return Err(ApiError::expected(&path, "a JSON schema, an object", &schema));
    }
    let grammar = Grammar::JsonSchema(schema);
    grammar.check().map_err(|error| refused(&path, &error))?;
    Ok(Some(grammar))
}

/// The reply for a grammar in the parameter `param` that is refused.
pub(super) fn refused(param: &str, error: &GrammarError) -> ApiError {
    let path = match error.path.as_str() {
        "" => param.to_owned(),
        path => format!("{param}.{path}"),
    };
    let message = format!("`{}`: {}", brief_path(&path), error.reason);
    ApiError::invalid(Some(&path), message).code("invalid_json_schema_or_grammar")
}

fn brief_path(path: &str) -> String {
    brief(&Value::from(path)).trim_matches('"').to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(options: Value) -> Result<Option<Grammar>, ApiError> {
        let mut options: GenerationOptions = serde_json::from_value(options).expect("the types");
        grammar(&mut options, None, &Ignored::default())
    }

    /// Goal: every form leads to its grammar.
    #[test]
    fn every_form_has_its_grammar() {
        let schema = json!({"type": "object"});
        let json_schema = || Some(Grammar::JsonSchema(schema.clone()));
        let text = || "a|b".to_owned();
        for (options, expected) in [
            (json!({}), None),
            (json!({"response_format": {"type": "text"}}), None),
            (json!({"response_format": {"type": "json_object"}}), Some(Grammar::JsonObject)),
            (
                json!({"response_format": {"type": "json_schema", "json_schema":
                      {"name": "n", "schema": schema, "strict": true}}}),
                json_schema(),
            ),
            (json!({"structured_outputs": {"json": schema}}), json_schema()),
            (json!({"guided_json": schema.to_string()}), json_schema()),
            (json!({"structured_outputs": {"json_object": true}}), Some(Grammar::JsonObject)),
            (json!({"structured_outputs": {"regex": "a|b"}}), Some(Grammar::Regex(text()))),
            (json!({"guided_regex": "a|b"}), Some(Grammar::Regex(text()))),
            (json!({"guided_choice": ["a|b"]}), Some(Grammar::Choice(vec![text()]))),
            (json!({"guided_grammar": "start: X"}), Some(Grammar::Lark("start: X".to_owned()))),
        ] {
            assert_eq!(parse(options.clone()), Ok(expected), "{options}");
        }
    }

    /// Goal: what cannot be done is refused with the path of the parameter.
    #[test]
    fn other_forms_are_refused_by_name() {
        let bad = json!({"properties": {"a": {"uniqueItems": true}}});
        let json_schema = json!({"type": "json_schema", "json_schema": {"schema": bad}});
        for (options, param) in [
            (json!({"response_format": {"type": "xml"}}), "response_format.type"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema"),
            (
                json!({"response_format": json_schema}),
                "response_format.json_schema.schema.properties.a.uniqueItems",
            ),
            (json!({"guided_json": bad}), "guided_json.properties.a.uniqueItems"),
            (json!({"guided_json": "{"}), "guided_json"),
            (
                json!({"structured_outputs": {"structural_tag": "x"}}),
                "structured_outputs.structural_tag",
            ),
            (json!({"guided_grammar": "root ::= \"a\""}), "guided_grammar"),
            (json!({"guided_choice": []}), "guided_choice"),
            (
                json!({"guided_regex": "a", "response_format": {"type": "json_object"}}),
                "guided_regex",
            ),
        ] {
            let error = parse(options.clone()).expect_err("refused").reply().error;
            assert_eq!(error.param.as_deref(), Some(param), "{options}");
        }
    }
}
