//! Converts the forms of structured output in requests to the engine's grammars.

use std::collections::HashMap;

use serde_json::Value;
use stolon::{Grammar, GrammarError, SchemaOptions};

use crate::api::neutral::Scope;
use crate::api::options::GenerationOptions;
use crate::api::structured::{ResponseFormat, StructuredOutputs};
use crate::wire::advice::Ignored;
use crate::wire::body::{brief, refuse_unknown};
use crate::wire::error::ApiError;

/// A parameter in the form of `response_format` with its name.
pub(crate) type Format = (&'static str, ResponseFormat);

/// A grammar of a request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Given {
    /// The name of its parameter.
    param: &'static str,
    /// Path of the grammar in the request, for example `response_format.json_schema.schema`.
    pub(crate) path: String,
    pub(crate) grammar: Grammar,
}

impl Given {
    fn new(param: &'static str, grammar: Grammar) -> Self {
        Self { param, path: param.to_owned(), grammar }
    }
}

/// The grammar of a request's answers; `None` if they are free. At most one of the parameters may
/// be given. `format` is the parameter that an API has in addition to those of all APIs.
pub(crate) fn grammar(
    options: &mut GenerationOptions,
    format: Option<Format>,
    ignored: &Ignored,
) -> Result<Option<Given>, ApiError> {
    let mut given: Vec<Given> = Vec::new();
    let outputs = options.structured_outputs.take();
    let closed = outputs.as_ref().and_then(|outputs| outputs.disable_additional_properties);
    let additional_properties = closed == Some(false);
    let response_format = options.response_format.take().map(|format| ("response_format", format));
    for (name, format) in format.into_iter().chain(response_format) {
        given.extend(of_format(name, format, additional_properties, ignored)?);
    }
    if let Some(outputs) = outputs {
        refuse_unknown("structured_outputs.", &outputs.unknown, Scope::StructuredOutputs, ignored)?;
        let names = [
            "structured_outputs.json",
            "structured_outputs.json_object",
            "structured_outputs.regex",
            "structured_outputs.choice",
            "structured_outputs.grammar",
        ];
        add(names, outputs, additional_properties, &mut given)?;
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
        additional_properties,
        &mut given,
    )?;
    if let [Given { param: first, .. }, Given { param: second, .. }, ..] = given.as_slice() {
        let message = format!("`{second}` is not possible with `{first}`: expected one of them");
        return Err(ApiError::invalid(Some(second), message));
    }
    Ok(given.pop())
}

/// Adds the grammars of `outputs`, whose members have these names in the request.
fn add(
    names: [&'static str; 5],
    outputs: StructuredOutputs,
    additional_properties: bool,
    given: &mut Vec<Given>,
) -> Result<(), ApiError> {
    let [json, json_object, regex, choice, grammar] = names;
    let checked = given.len();
    if let Some(schema) = outputs.json {
        let options =
            SchemaOptions { strict: false, refuse_unsupported: true, additional_properties };
        let schema = options.apply(schema_value(json, schema)?);
        given.push(Given::new(json, Grammar::JsonSchema(schema)));
    }
    if outputs.json_object == Some(true) {
        given.push(Given::new(json_object, Grammar::JsonObject));
    }
    given.extend(outputs.regex.map(|text| Given::new(regex, Grammar::Regex(text))));
    given.extend(outputs.choice.map(|texts| Given::new(choice, Grammar::Choice(texts))));
    given.extend(outputs.grammar.map(|text| Given::new(grammar, Grammar::of_text(text))));
    for Given { path, grammar, .. } in &given[checked..] {
        grammar.check().map_err(|error| refused(path, &error))?;
    }
    Ok(())
}

/// A schema that may be written as a string.
fn schema_value(name: &str, schema: Value) -> Result<Value, ApiError> {
    let Value::String(text) = schema else { return Ok(schema) };
    serde_json::from_str(&text).map_err(|error| {
        ApiError::invalid(Some(name), format!("`{name}`: expected a JSON schema, got {error}"))
    })
}

/// The grammar of a `response_format`, which is the parameter `param`.
fn of_format(
    param: &'static str,
    format: ResponseFormat,
    additional_properties: bool,
    ignored: &Ignored,
) -> Result<Option<Given>, ApiError> {
    refuse_unknown(&format!("{param}."), &format.unknown, Scope::None, ignored)?;
    let kind = format!("{param}.type");
    let strict = format.json_schema.as_ref().and_then(|schema| schema.strict).or(format.strict);
    let (path, schema) = match (format.kind.as_str(), format.json_schema, format.schema) {
        ("text", None, None) => return Ok(None),
        ("json_object", None, None) => return Ok(Some(Given::new(param, Grammar::JsonObject))),
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
    let strict = strict.unwrap_or(false);
    let options = SchemaOptions { strict, refuse_unsupported: strict, additional_properties };
    let grammar = Grammar::JsonSchema(options.apply(schema));
    grammar.check().map_err(|error| refused(&path, &error))?;
    Ok(Some(Given { param, path, grammar }))
}

/// The reply for an error of the engine. The error of a grammar names its path in the request: the
/// path of the tool whose schema it is about, by its name in `tools`, or else `path`.
pub(crate) fn refused_by_engine(
    error: stolon::Error,
    tools: &HashMap<String, String>,
    path: Option<&str>,
) -> ApiError {
    let stolon::Error::Grammar(error) = error else { return error.into() };
    let of_tool = error.function.as_ref().and_then(|name| tools.get(name));
    refused(of_tool.map(String::as_str).or(path).unwrap_or("tools"), &error)
}

/// The reply for a grammar in the parameter `param` that is refused.
pub(crate) fn refused(param: &str, error: &GrammarError) -> ApiError {
    let path = match error.path.as_str() {
        "" => param.to_owned(),
        path => format!("{param}.{path}"),
    };
    let of_tool = match &error.function {
        Some(name) => format!(" of the tool {}", brief(&Value::from(name.as_str()))),
        None => String::new(),
    };
    let message = format!("`{}`{of_tool}: {}", brief_path(&path), error.reason);
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
        let given = grammar(&mut options, None, &Ignored::default())?;
        Ok(given.map(|given| given.grammar))
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
            (json!({"json_schema": schema}), json_schema()),
            (json!({"structured_outputs": {"json_object": true}}), Some(Grammar::JsonObject)),
            (json!({"structured_outputs": {"regex": "a|b"}}), Some(Grammar::Regex(text()))),
            (json!({"guided_regex": "a|b"}), Some(Grammar::Regex(text()))),
            (json!({"guided_choice": ["a|b"]}), Some(Grammar::Choice(vec![text()]))),
            (json!({"guided_grammar": "start: X"}), Some(Grammar::Lark("start: X".to_owned()))),
            (json!({"grammar": "root ::= x"}), Some(Grammar::Gbnf("root ::= x".to_owned()))),
        ] {
            assert_eq!(parse(options.clone()), Ok(expected), "{options}");
        }
    }

    /// Goal: objects are closed, unless the client wants other properties, too.
    #[test]
    fn objects_are_closed_by_default() {
        let open = json!({"type": "object", "properties": {"a": {"uniqueItems": true}}});
        let format = json!({"type": "json_schema", "json_schema": {"schema": open}});
        let relaxed = json!({"type": "object", "properties": {"a": {}}});
        let mut closed = relaxed.clone();
        closed["additionalProperties"] = json!(false);
        for (options, expected) in [
            (json!({"response_format": format}), &closed),
            (
                json!({"response_format": format,
                       "structured_outputs": {"disable_additional_properties": false}}),
                &relaxed,
            ),
            (json!({"guided_json": open}), &closed),
            (
                json!({"structured_outputs": {"json": open, "disable_additional_properties": false}}),
                &relaxed,
            ),
        ] {
            let grammar = parse(options.clone()).expect("valid");
            assert_eq!(grammar, Some(Grammar::JsonSchema(expected.clone())), "{options}");
        }
    }

    /// Goal: a schema that is not strict is followed as far as a grammar can, and one that is given
    /// to guide the answer keeps all its constraints.
    #[test]
    fn keywords_of_other_programs_are_annotations() {
        let schema = |extra: Value| {
            let mut member = json!({"type": "string", "nullable": true, "maxLength": 524_288,
                                    "markdownDescription": "m", "enumDescriptions": ["e"]});
            member
                .as_object_mut()
                .expect("an object")
                .extend(extra.as_object().expect("an object").clone());
            json!({"type": "object", "properties": {"a": member}})
        };
        let constrained = schema(json!({"not": {}, "if": {}, "contains": {}, "strict": true}));
        let format = json!({"type": "json_schema", "json_schema": {"schema": constrained}});
        let expected = Grammar::JsonSchema(json!({
            "type": "object", "properties": {"a": {"type": "string"}},
            "additionalProperties": false,
        }));
        for options in
            [json!({"response_format": format}), json!({"guided_json": schema(json!({}))})]
        {
            assert_eq!(parse(options.clone()), Ok(Some(expected.clone())), "{options}");
        }
    }

    /// Goal: unsupported requests are refused with the path of the parameter.
    #[test]
    fn other_forms_are_refused_by_name() {
        let bad = json!({"properties": {"a": {"not": {}}}});
        let unique = json!({"properties": {"a": {"uniqueItems": true}}});
        let json_schema = json!({"type": "json_schema",
                                 "json_schema": {"schema": unique, "strict": true}});
        for (options, param) in [
            (json!({"response_format": {"type": "xml"}}), "response_format.type"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema"),
            (
                json!({"response_format": json_schema}),
                "response_format.json_schema.schema.properties.a.uniqueItems",
            ),
            (
                json!({"response_format": {"type": "json_schema",
                       "json_schema": {"schema": bad, "strict": true}}}),
                "response_format.json_schema.schema.properties.a.not",
            ),
            (json!({"guided_json": bad}), "guided_json.properties.a.not"),
            (json!({"guided_json": "{"}), "guided_json"),
            (
                json!({"structured_outputs": {"structural_tag": "x"}}),
                "structured_outputs.structural_tag",
            ),
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
