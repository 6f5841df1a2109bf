//! Checks values against JSON schemas, with the keywords that the description of the API uses. Any
//! other keyword is a failure of the test.

use serde_json::Value;

/// The reason why `value` does not conform to `schema`; `None` if it conforms. `root` is the
/// document that references are resolved in.
pub(crate) fn violation(root: &Value, schema: &Value, value: &Value) -> Option<String> {
    let Some(keywords) = schema.as_object() else {
        return (schema != &Value::Bool(true)).then(|| format!("{value} is not allowed"));
    };
    keywords.iter().find_map(|(keyword, wanted)| {
        let holds = match keyword.as_str() {
            "$ref" => {
                let pointer = wanted.as_str()?.trim_start_matches('#');
                return violation(root, root.pointer(pointer).expect("a definition"), value);
            }
            "properties" => {
                return wanted.as_object()?.iter().find_map(|(name, schema)| {
                    let found = violation(root, schema, value.get(name)?)?;
                    Some(format!("{name}: {found}"))
                });
            }
            "additionalProperties" => {
                let named = keywords.get("properties");
                let is_named = |name: &str| named.is_some_and(|named| named.get(name).is_some());
                let mut others = value.as_object()?.iter().filter(|(name, _)| !is_named(name));
                return others.find_map(|(_, member)| violation(root, wanted, member));
            }
            "items" => {
                return value.as_array()?.iter().find_map(|item| violation(root, wanted, item));
            }
            "type" => match wanted {
                Value::Array(types) => types.iter().any(|name| has_type(name, value)),
                name => has_type(name, value),
            },
            "required" => value.as_object().is_none_or(|object| {
                let mut names = wanted.as_array().into_iter().flatten();
                names.all(|name| object.contains_key(name.as_str().unwrap_or_default()))
            }),
            "enum" => wanted.as_array()?.contains(value),
            "const" => wanted == value,
            "anyOf" => accepting(root, wanted, value) > 0,
            "oneOf" => accepting(root, wanted, value) == 1,
            "minimum" => value.as_f64().is_none_or(|number| number >= number_of(wanted)),
            "maximum" => value.as_f64().is_none_or(|number| number <= number_of(wanted)),
            "exclusiveMinimum" => value.as_f64().is_none_or(|number| number > number_of(wanted)),
            "minItems" => value.as_array().is_none_or(|it| it.len() as f64 >= number_of(wanted)),
            "maxItems" => value.as_array().is_none_or(|it| it.len() as f64 <= number_of(wanted)),
            "maxProperties" => {
                value.as_object().is_none_or(|it| it.len() as f64 <= number_of(wanted))
            }
            // Names of members are strings whose form no test here depends on.
            "propertyNames" | "description" | "title" | "default" => true,
            other => panic!("the keyword `{other}` is not known here"),
        };
        (!holds).then(|| format!("expected {keyword} {wanted}, got {value}"))
    })
}

/// Number of schemas that accept the value.
fn accepting(root: &Value, schemas: &Value, value: &Value) -> usize {
    let schemas = schemas.as_array().expect("a list of schemas").iter();
    schemas.filter(|schema| violation(root, schema, value).is_none()).count()
}

fn number_of(value: &Value) -> f64 {
    value.as_f64().expect("a number")
}

fn has_type(name: &Value, value: &Value) -> bool {
    match name.as_str().expect("the name of a type") {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "number" => value.is_number(),
        "integer" => value.is_u64() || value.is_i64(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("there is no type `{other}`"),
    }
}
