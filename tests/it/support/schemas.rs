//! Random JSON schemas whose answers are short.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

/// A random schema. The same seed leads to the same schema.
pub(crate) fn schema(seed: u64) -> Value {
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut schema = object(&mut rng, 2);
    if schema.to_string().contains("#/$defs/short") {
        schema["$defs"] = json!({"short": {"type": "array", "items": {"enum": ["x", 1.5, null]},
                                           "minItems": 1, "maxItems": 3}});
    }
    schema
}

fn object(rng: &mut SmallRng, depth: usize) -> Value {
    let count = rng.random_range(1..=4);
    let names = ["id", "name", "größe", "a b", "tags", "\"quoted\""];
    let first = rng.random_range(0..names.len());
    let mut properties = json!({});
    let mut required = Vec::new();
    for index in 0..count {
        let name = names[(first + index) % names.len()];
        properties[name] = value(rng, depth);
        if rng.random_bool(0.6) {
            required.push(name);
        }
    }
    json!({"type": "object", "title": "ignored", "properties": properties, "required": required,
           "additionalProperties": false})
}

fn value(rng: &mut SmallRng, depth: usize) -> Value {
    let kinds = if depth == 0 { 12 } else { 16 };
    match rng.random_range(0..kinds) {
        0 => json!({"type": "boolean"}),
        1 => json!({"type": ["null", "boolean"]}),
        2 => json!({"const": ["a", {"b": 1}]}),
        3 => json!({"enum": ["red", "green\n", "\\", 7, false]}),
        4 => json!({"type": "string", "minLength": 1, "maxLength": rng.random_range(1..8)}),
        5 => json!({"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"}),
        6 => json!({"type": "string", "format": "date"}),
        7 => json!({"type": "string", "format": "ipv4"}),
        8 => {
            json!({"type": "integer", "minimum": -20, "exclusiveMaximum": rng.random_range(0..999)})
        }
        9 => json!({"type": "integer", "multipleOf": 3, "minimum": 0, "maximum": 300}),
        10 => json!({"type": "number", "minimum": 0.5, "maximum": 2.25}),
        11 => json!({"$ref": "#/$defs/short"}),
        12 => object(rng, depth - 1),
        13 => json!({"type": "array", "items": value(rng, depth - 1),
                     "minItems": rng.random_range(0..2), "maxItems": rng.random_range(2..4)}),
        14 => json!({"type": "array", "prefixItems": [value(rng, 0), value(rng, 0)],
                     "items": false, "minItems": 2}),
        _ => json!({"anyOf": [value(rng, depth - 1), value(rng, depth - 1)]}),
    }
}
