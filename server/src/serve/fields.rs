//! Reading a request's JSON object field by field, so that every refusal names the parameter,
//! what was expected and what came, and so that a field nobody read is an error, not silence.

use serde_json::{Map, Value};

use super::error::ApiError;

/// A JSON object's fields that have not been read yet. `null` counts as absent, as OpenAI's own
/// clients send it for parameters left alone.
#[derive(Debug)]
pub(super) struct Fields(Map<String, Value>);

impl Fields {
    /// Parses a request body.
    pub(super) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(mut fields)) => {
                fields.retain(|_, value| !value.is_null());
                Ok(Self(fields))
            }
            Ok(other) => Err(ApiError::invalid(
                None,
                format!("the body must be a JSON object, got {}", brief(&other)),
            )),
            Err(error) => Err(ApiError::invalid(None, format!("the body is not JSON: {error}"))),
        }
    }

    /// Takes a field as it is.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name)
    }

    /// Takes a field with `read`, which says `None` where the value is not `expected`.
    fn take_as<T>(
        &mut self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.0.remove(name) else { return Ok(None) };
        read(&value).map(Some).ok_or_else(|| ApiError::expected(name, expected, &value))
    }

    /// Takes a string.
    pub(super) fn take_string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        self.take_as(name, "a string", |value| value.as_str().map(str::to_owned))
    }

    /// Takes a boolean.
    pub(super) fn take_bool(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        self.take_as(name, "true or false", Value::as_bool)
    }

    /// Takes a finite number. Its range is the engine's to check.
    pub(super) fn take_f32(&mut self, name: &str) -> Result<Option<f32>, ApiError> {
        self.take_as(name, "a finite number", |value| {
            value.as_f64().map(|number| number as f32).filter(|number| number.is_finite())
        })
    }

    /// Takes a whole number from `low` to `high`.
    pub(super) fn take_count(
        &mut self,
        name: &str,
        low: usize,
        high: usize,
    ) -> Result<Option<usize>, ApiError> {
        self.take_as(name, &format!("a whole number from {low} to {high}"), |value| {
            let count = usize::try_from(value.as_u64()?).ok()?;
            (low..=high).contains(&count).then_some(count)
        })
    }

    /// Takes a whole number of 32 bits.
    pub(super) fn take_i32(&mut self, name: &str) -> Result<Option<i32>, ApiError> {
        self.take_as(name, "a whole number of 32 bits", |value| value.as_i64()?.try_into().ok())
    }

    /// Takes a 64-bit seed; negative ones are taken by their bits.
    pub(super) fn take_seed(&mut self, name: &str) -> Result<Option<u64>, ApiError> {
        self.take_as(name, "a 64-bit whole number", |value| {
            value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned))
        })
    }

    /// Takes a string or a list of strings, at most `most` of them.
    pub(super) fn take_strings(
        &mut self,
        name: &str,
        most: usize,
    ) -> Result<Vec<String>, ApiError> {
        let expected = format!("a string or a list of at most {most} strings");
        let strings = self.take_as(name, &expected, |value| match value {
            Value::String(one) => Some(vec![one.clone()]),
            Value::Array(many) if many.len() <= most => {
                many.iter().map(|item| item.as_str().map(str::to_owned)).collect()
            }
            _ => None,
        })?;
        Ok(strings.unwrap_or_default())
    }

    /// Takes a list of token ids.
    pub(super) fn take_token_ids(&mut self, name: &str) -> Result<Vec<u32>, ApiError> {
        Ok(self.take_as(name, "a list of token ids", token_ids)?.unwrap_or_default())
    }

    /// Takes OpenAI's `logit_bias`: an object from token ids, written as strings, to numbers.
    pub(super) fn take_logit_bias(&mut self, name: &str) -> Result<Vec<(u32, f32)>, ApiError> {
        let expected = "an object from token ids to numbers from -100 to 100";
        let bias = self.take_as(name, expected, |value| {
            let pairs = value.as_object()?.iter().map(|(id, bias)| {
                let bias = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias))?;
                Some((id.parse().ok()?, bias as f32))
            });
            pairs.collect::<Option<Vec<(u32, f32)>>>()
        })?;
        Ok(bias.unwrap_or_default())
    }

    /// Takes a nested object, as fields of its own.
    pub(super) fn take_object(&mut self, name: &str) -> Result<Option<Self>, ApiError> {
        self.take_as(name, "an object", |value| {
            let mut fields = value.as_object()?.clone();
            fields.retain(|_, value| !value.is_null());
            Some(Self(fields))
        })
    }

    /// Takes fields whose value changes nothing here: labels that only a hosted service uses.
    pub(super) fn ignore(&mut self, names: &[&str]) {
        for name in names {
            self.0.remove(*name);
        }
    }

    /// Takes a field that this server does not implement, when its value asks for nothing.
    pub(super) fn accept_only(&mut self, name: &str, neutral: &[Value]) -> Result<(), ApiError> {
        match self.0.remove(name) {
            Some(value) if !neutral.contains(&value) => {
                Err(ApiError::unsupported(name, Some(&value)))
            }
            _ => Ok(()),
        }
    }

    /// Ends the reading: what is left over is a parameter this server does not know.
    pub(super) fn finish(self) -> Result<(), ApiError> {
        match self.0.keys().next() {
            Some(name) => Err(ApiError::unsupported(name, None)),
            None => Ok(()),
        }
    }
}

/// A list of token ids, or `None`.
pub(super) fn token_ids(value: &Value) -> Option<Vec<u32>> {
    value.as_array()?.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect()
}

/// A value as it is shown in an error: cut short, on a character border.
pub(super) fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((cut, _)) => format!("{}...", &text[..cut]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(body: &Value) -> Fields {
        Fields::parse(body.to_string().as_bytes()).expect("an object")
    }

    /// Goal: what is read comes back, null counts as absent, and nothing is left.
    #[test]
    fn fields_are_read_once() {
        let mut f = fields(&json!({
            "a": "x", "b": true, "c": 0.5, "d": 3, "e": ["p", "q"], "f": "solo", "g": null,
            "h": {"7": -100, "9": 1.5}, "i": [1, 2], "seed": -1, "user": "someone"
        }));
        assert_eq!(f.take_string("a").expect("string"), Some("x".to_owned()));
        assert_eq!(f.take_bool("b").expect("bool"), Some(true));
        assert_eq!(f.take_f32("c").expect("number"), Some(0.5));
        assert_eq!(f.take_count("d", 1, 3).expect("count"), Some(3));
        assert_eq!(f.take_strings("e", 4).expect("strings"), ["p", "q"]);
        assert_eq!(f.take_strings("f", 4).expect("strings"), ["solo"]);
        assert_eq!(f.take_string("g").expect("null"), None);
        assert_eq!(f.take_logit_bias("h").expect("bias"), [(7, -100.0), (9, 1.5)]);
        assert_eq!(f.take_token_ids("i").expect("ids"), [1, 2]);
        assert_eq!(f.take_seed("seed").expect("seed"), Some(u64::MAX));
        f.ignore(&["user", "never there"]);
        f.finish().expect("all read");
    }

    /// Goal: each wrong value is refused with its parameter, what was expected and what came.
    #[test]
    fn wrong_values_are_named() {
        fn check(body: Value, read: impl FnOnce(&mut Fields) -> Result<(), ApiError>, got: &str) {
            let error = read(&mut fields(&body)).expect_err("a wrong value");
            let shown = error.to_json().to_string();
            assert_eq!(error.to_json()["error"]["param"], "x", "{shown}");
            assert!(shown.contains("expected") && shown.contains(got), "{shown}");
        }
        check(json!({"x": 3}), |f| f.take_string("x").map(drop), "3");
        check(json!({"x": "yes"}), |f| f.take_bool("x").map(drop), "yes");
        check(json!({"x": "1"}), |f| f.take_f32("x").map(drop), "1");
        check(json!({"x": 1e300}), |f| f.take_f32("x").map(drop), "1e+300");
        check(json!({"x": 9}), |f| f.take_count("x", 1, 8).map(drop), "9");
        check(json!({"x": 1.5}), |f| f.take_count("x", 1, 8).map(drop), "1.5");
        check(json!({"x": ["a", 7]}), |f| f.take_strings("x", 4).map(drop), "7");
        check(json!({"x": ["a", "b"]}), |f| f.take_strings("x", 1).map(drop), "b");
        check(json!({"x": [-1]}), |f| f.take_token_ids("x").map(drop), "-1");
        check(json!({"x": {"seven": 1}}), |f| f.take_logit_bias("x").map(drop), "seven");
        check(json!({"x": {"7": 101}}), |f| f.take_logit_bias("x").map(drop), "101");
        check(json!({"x": []}), |f| f.take_object("x").map(drop), "[]");
    }

    /// Goal: an unknown parameter is an error, and one with a neutral value is not.
    #[test]
    fn unknown_parameters_are_loud() {
        let mut f = fields(&json!({"tools": []}));
        f.accept_only("tools", &[json!([])]).expect("neutral");
        f.finish().expect("nothing left");
        let mut f = fields(&json!({"tools": [1]}));
        assert!(f.accept_only("tools", &[json!([])]).is_err());
        let error = fields(&json!({"temprature": 1})).finish().expect_err("unknown");
        assert_eq!(error.to_json()["error"]["param"], "temprature");
    }

    /// Goal: what is no object, or no JSON, is refused, and a long value is cut on a border.
    #[test]
    fn bodies_that_are_no_object() {
        assert!(Fields::parse(b"[1]").is_err());
        assert!(Fields::parse(b"{").is_err());
        let long = Value::String("\u{e9}".repeat(200));
        assert_eq!(brief(&long).chars().count(), 83);
    }
}
