//! Bounds the number of values in a JSON text before it is parsed.
//!
//! A parsed value takes up to 50 times the memory of its text (`[0,0,0]`). One pass over the bytes
//! counts the values without allocating.

/// Whether the text has at most `max` values, object keys not counted. The count is exact for valid
/// JSON; the parser refuses any other.
pub(crate) fn has_at_most(json: &[u8], max: usize) -> bool {
    let mut values = 1_usize; // The outermost value.
    let mut in_string = false;
    let mut escaped = false;
    for &byte in json {
        if in_string {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => in_string = false,
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => in_string = true,
            // Each of these begins a value. An empty list or object counts one too many.
            b',' | b'[' | b'{' => values += 1,
            _ => {}
        }
        if values > max {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: values are counted at every depth, and punctuation inside strings is not.
    #[test]
    fn values_are_counted() {
        for (json, values) in [
            ("1", 1),
            ("[1]", 2),
            ("[1,2,3]", 4),
            (r#"{"a": [1, 2], "b": "x"}"#, 5),
            (r#"{"a": "[,{\",,"}"#, 2),
            (r#""\\",,"#, 3),
        ] {
            assert!(has_at_most(json.as_bytes(), values), "{json}");
            assert!(!has_at_most(json.as_bytes(), values - 1), "{json}");
        }
    }
}
