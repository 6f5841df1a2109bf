//! The members of a body that a server of several models reads before it passes the request on.

use std::fmt;

use serde::de::{Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::wire::error::ApiError;
use crate::wire::receive::Received;

/// Bodies of up to this many bytes are read on the thread that received them.
const INLINE_BYTES: usize = 32 << 10;
/// Maximum length of a text that is kept, in bytes. No name of a model is longer.
const TEXT_BYTES_MAX: usize = 512;

/// What a request asks for. A member that is missing or has another type is its default: the handler
/// of the route refuses what is wrong.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Asked {
    model: Scalar,
    /// As `model`, in Ollama's older requests.
    name: Scalar,
    stream: Scalar,
    keep_alive: Scalar,
}

/// A value of JSON that is no list and no object.
#[derive(Debug, Default)]
pub(crate) enum Scalar {
    /// Anything else.
    #[default]
    Other,
    Text(String),
    Number(f64),
    Switch(bool),
}

impl Asked {
    /// Reads the members. The body stays whole. Takes about a millisecond per megabyte, elsewhere
    /// if the body is large, and no memory for members that are not read.
    ///
    /// # Errors
    /// If the runtime ends.
    pub(crate) async fn of(mut body: Received) -> Result<(Self, Received), ApiError> {
        let length = body.bytes.len();
        let work = move || {
            let bytes = std::mem::take(&mut body.bytes).join();
            let asked = serde_json::from_slice(&bytes).unwrap_or_default();
            body.bytes = bytes.into();
            (asked, body)
        };
        if length <= INLINE_BYTES {
            return Ok(work());
        }
        tokio::task::spawn_blocking(work).await.map_err(|_| ApiError::internal())
    }

    /// The name of the model. `may_be_name` permits Ollama's older `name`.
    pub(crate) fn model(&self, may_be_name: bool) -> Option<&str> {
        match (&self.model, &self.name) {
            (Scalar::Text(model), _) => Some(model),
            (_, Scalar::Text(name)) if may_be_name => Some(name),
            _ => None,
        }
    }

    /// Whether the reply is to be sent in pieces.
    pub(crate) fn streams(&self) -> bool {
        matches!(self.stream, Scalar::Switch(true))
    }

    /// Ollama's `keep_alive`.
    pub(crate) fn keep_alive(&self) -> &Scalar {
        &self.keep_alive
    }
}

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AnyValue;

        impl<'de> Visitor<'de> for AnyValue {
            type Value = Scalar;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("any value")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Scalar, E> {
                let is_short = text.len() <= TEXT_BYTES_MAX;
                Ok(if is_short { Scalar::Text(text.to_owned()) } else { Scalar::Other })
            }

            fn visit_f64<E: Error>(self, number: f64) -> Result<Scalar, E> {
                Ok(Scalar::Number(number))
            }

            fn visit_u64<E: Error>(self, number: u64) -> Result<Scalar, E> {
                Ok(Scalar::Number(number as f64))
            }

            fn visit_i64<E: Error>(self, number: i64) -> Result<Scalar, E> {
                Ok(Scalar::Number(number as f64))
            }

            fn visit_bool<E: Error>(self, switch: bool) -> Result<Scalar, E> {
                Ok(Scalar::Switch(switch))
            }

            fn visit_unit<E: Error>(self) -> Result<Scalar, E> {
                Ok(Scalar::Other)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Scalar, A::Error> {
                while list.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Scalar::Other)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Scalar, A::Error> {
                while object.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Scalar::Other)
            }
        }

        deserializer.deserialize_any(AnyValue)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the members are found wherever they are and whatever else is there, and values of other
    /// types are as if they were missing.
    #[tokio::test]
    async fn members_are_found() {
        let long = "x".repeat(TEXT_BYTES_MAX + 1);
        let big = format!(r#"{{"input": "{}", "model": "a"}}"#, "y".repeat(3 * INLINE_BYTES));
        for (body, model, streams) in [
            (r#"{"model": "a", "stream": true}"#, Some("a"), true),
            (r#"{"messages": [{"model": "b"}], "model": "a"}"#, Some("a"), false),
            (r#"{"messages": ["\ud800"], "model": "a"}"#, Some("a"), false),
            (r#"{"name": "b", "stream": "true"}"#, None, false),
            (r#"{"model": ["a"], "stream": {"x": 1}}"#, None, false),
            (r#"{"model": 1, "stream": null}"#, None, false),
            (&format!(r#"{{"model": "{long}"}}"#), None, false),
            (&big, Some("a"), false),
            ("[", None, false),
            ("", None, false),
        ] {
            let (asked, received) = Asked::of(body.to_owned().into()).await.expect("no panic");
            assert_eq!((asked.model(false), asked.streams()), (model, streams), "{body:.80}");
            assert!(received.bytes.join() == body.as_bytes(), "{body:.80}");
        }
        let (asked, _) = Asked::of(r#"{"name": "b"}"#.to_owned().into()).await.expect("no panic");
        assert_eq!(asked.model(true), Some("b"));
    }
}
