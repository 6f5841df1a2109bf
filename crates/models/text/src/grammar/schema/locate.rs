//! Finds the part of a schema that an error is about.

use serde_json::Value;

use super::{member_schemas, shortened};
use crate::grammar::GrammarError;

/// Maximum number of schemas that are compiled to find the one that is wrong.
const MAX_TRIES: usize = 64;

/// The path of the innermost schema that fails within a schema that `fails`, and the reason. Calls
/// `fails` a limited number of times.
pub(in crate::grammar) fn locate(
    schema: &Value,
    error: GrammarError,
    fails: impl Fn(&Value) -> Option<GrammarError>,
) -> GrammarError {
    let definitions: Vec<_> = ["$defs", "definitions"]
        .into_iter()
        .filter_map(|name| Some((name.to_owned(), schema.get(name)?.clone())))
        .collect();
    let (mut left, mut path, mut found, mut at) = (MAX_TRIES, Vec::new(), error, schema.clone());
    'inner: while let Value::Object(members) = &mut at {
        let mut inner = Vec::new();
        member_schemas(members, |keyword, name, schema| {
            if inner.len() < MAX_TRIES {
                inner.push((keyword.to_owned(), name.to_owned(), schema.clone()));
            }
        });
        for (keyword, name, schema) in inner {
            let mut alone = schema.clone();
            if let Value::Object(members) = &mut alone {
                members.extend(definitions.iter().cloned());
            }
            if left == 0 {
                break 'inner;
            }
            left -= 1;
            if let Some(error) = fails(&alone) {
                path.push(keyword);
                path.extend((!name.is_empty()).then_some(name));
                (found, at) = (error, schema);
                continue 'inner;
            }
        }
        break;
    }
    GrammarError { path: shortened(path.join(".")), ..found }
}
