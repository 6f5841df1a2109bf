//! Typed access to the keys of a JSON configuration, with errors that name the file and the key.
//!
//! A key with the value `null` counts as missing, as in transformers. Only [`Keys::given`]
//! distinguishes them.

use std::cell::RefCell;
use std::collections::HashSet;
use std::rc::Rc;

use serde_json::{Map, Value};

use crate::error::ModelError;

/// Maximum of every size in a configuration. It prevents overflow of products in 64 bits.
pub(crate) const SIZE_MAX: u64 = 1 << 30;

/// One JSON object of a configuration file.
#[derive(Clone, Debug)]
pub(crate) struct Keys<'a> {
    /// Name of the file, used in error messages.
    pub(crate) file: &'a str,
    /// Dotted path of the object within the file, ending in a dot, or empty.
    path: String,
    map: &'a Map<String, Value>,
    /// The paths of the file's keys that were read. All objects of the file share them.
    read: Rc<RefCell<HashSet<String>>>,
}

impl<'a> Keys<'a> {
    /// The outermost object of the file. `file` is the file's name in error messages.
    pub(crate) fn root(file: &'a str, value: &'a Value) -> Result<Self, ModelError> {
        match value {
            Value::Object(map) => Ok(Self { file, path: String::new(), map, read: Rc::default() }),
            other => Err(ModelError::malformed(
                file,
                format!("expected a JSON object, got {}", shown(Some(other))),
            )),
        }
    }

    /// The value of `key`, unless it is missing or null.
    pub(crate) fn value(&self, key: &str) -> Option<&'a Value> {
        self.mark(key);
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// The first of several names of a key that has a value, or `names[0]` if none has.
    pub(crate) fn name_of<'n, const N: usize>(&self, names: [&'n str; N]) -> &'n str {
        names.into_iter().find(|name| self.value(name).is_some()).unwrap_or(names[0])
    }

    /// Whether the key is present, possibly with the value null.
    pub(crate) fn given(&self, key: &str) -> bool {
        self.mark(key);
        self.map.contains_key(key)
    }

    /// Records that `key` was read.
    fn mark(&self, key: &str) {
        if self.map.contains_key(key) {
            self.read.borrow_mut().insert(format!("{}{key}", self.path));
        }
    }

    /// The paths and values of the keys that were not read, in this object and in nested objects
    /// that have at least one key that was read.
    pub(crate) fn unread(&self) -> Vec<(String, &'a Value)> {
        let read = self.read.borrow();
        let mut list = Vec::new();
        unread(self.map, &self.path, &read, &mut list);
        list
    }

    /// All keys of the object.
    pub(crate) fn names(&self) -> impl Iterator<Item = &'a str> {
        self.map.keys().map(String::as_str)
    }

    /// The object under `key`.
    pub(crate) fn object(&self, key: &str) -> Result<Option<Keys<'a>>, ModelError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Object(map)) => {
                let (path, read) = (format!("{}{key}.", self.path), Rc::clone(&self.read));
                Ok(Some(Self { file: self.file, path, map, read }))
            }
            Some(_) => Err(self.invalid(key, "an object")),
        }
    }

    /// A size: an integer from 1 to [`SIZE_MAX`].
    pub(crate) fn size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        self.integer(key, 1)
    }

    /// A size that must be given.
    pub(crate) fn required(&self, key: &str) -> Result<usize, ModelError> {
        self.size(key)?
            .ok_or_else(|| self.invalid(key, &format!("an integer from 1 to {SIZE_MAX}")))
    }

    /// A count: an integer from 0 to [`SIZE_MAX`].
    pub(crate) fn count(&self, key: &str) -> Result<Option<usize>, ModelError> {
        self.integer(key, 0)
    }

    fn integer(&self, key: &str, least: u64) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match whole_number(value) {
            Some(n) if (least..=SIZE_MAX).contains(&n) => Ok(Some(n as usize)),
            _ => Err(self.invalid(key, &format!("an integer from {least} to {SIZE_MAX}"))),
        }
    }

    /// A finite number above 0.
    pub(crate) fn positive(&self, key: &str) -> Result<Option<f64>, ModelError> {
        match self.number(key)? {
            Some(number) if number <= 0.0 => Err(self.invalid(key, "a number above 0")),
            other => Ok(other),
        }
    }

    /// A number that is finite and above 0 as an f32.
    pub(crate) fn positive_f32(&self, key: &str) -> Result<Option<f32>, ModelError> {
        match self.positive(key)?.map(|number| number as f32) {
            Some(number) if !number.is_normal() => Err(self.invalid(key, "a normal f32 above 0")),
            other => Ok(other),
        }
    }

    /// A finite number.
    pub(crate) fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if number.is_finite() => Ok(Some(number)),
            _ => Err(self.invalid(key, "a finite number")),
        }
    }

    /// A boolean.
    pub(crate) fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.invalid(key, "true or false"))
    }

    /// A string.
    pub(crate) fn text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.invalid(key, "a string"))
    }

    /// A list of strings.
    pub(crate) fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>, ModelError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        value
            .as_array()
            .and_then(|list| list.iter().map(Value::as_str).collect())
            .map(Some)
            .ok_or_else(|| self.invalid(key, "a list of strings"))
    }

    /// A list of counts: integers from 0 to [`SIZE_MAX`].
    pub(crate) fn counts(&self, key: &str) -> Result<Option<Vec<usize>>, ModelError> {
        let count = |value: &Value| whole_number(value).filter(|n| *n <= SIZE_MAX);
        let expected = format!("a list of integers from 0 to {SIZE_MAX}");
        self.list(key, &expected, |value| count(value).map(|n| n as usize))
    }

    /// A list of booleans, which may be written as 0 and 1.
    pub(crate) fn flags(&self, key: &str) -> Result<Option<Vec<bool>>, ModelError> {
        self.list(key, "a list of 0 and 1", |value| match whole_number(value) {
            Some(0) => Some(false),
            Some(1) => Some(true),
            _ => value.as_bool(),
        })
    }

    /// A list of numbers that are finite as f32.
    pub(crate) fn numbers(&self, key: &str) -> Result<Option<Vec<f32>>, ModelError> {
        self.list(key, "a list of numbers", |value| {
            value.as_f64().map(|n| n as f32).filter(|n| n.is_finite())
        })
    }

    /// A list whose entries `parse` accepts.
    fn list<T>(
        &self,
        key: &str,
        expected: &str,
        parse: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>, ModelError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        value
            .as_array()
            .and_then(|list| list.iter().map(parse).collect())
            .map(Some)
            .ok_or_else(|| self.invalid(key, expected))
    }

    /// A token id or a list of token ids. Negative ones mean "none" and are omitted.
    pub(crate) fn token_ids(&self, key: &str) -> Result<Option<Vec<u32>>, ModelError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let list = match value {
            Value::Array(list) => list.as_slice(),
            one => std::slice::from_ref(one),
        };
        let wanted = "a token id or a list of them";
        let mut ids = Vec::with_capacity(list.len());
        for entry in list {
            let id = entry.as_i64().ok_or_else(|| self.invalid(key, wanted))?;
            if id >= 0 {
                ids.push(u32::try_from(id).map_err(|_| self.invalid(key, wanted))?);
            }
        }
        Ok(Some(ids))
    }

    /// An error about the value of `key`. `expected` describes the accepted values.
    pub(crate) fn invalid(&self, key: &str, expected: &str) -> ModelError {
        let key_path = format!("{}{key}", self.path);
        ModelError::key(self.file, &key_path, expected, shown(self.map.get(key)))
    }

    /// An error about an option that is valid but not implemented.
    pub(crate) fn unsupported(&self, key: &str, expected: &str) -> ModelError {
        let key_path = format!("{}{key}", self.path);
        ModelError::unsupported(self.file, &key_path, expected, shown(self.map.get(key)))
    }
}

/// Adds the keys of `map` at `path` that are not in `read`. A nested object counts as a single
/// value unless one of its keys was read. The JSON parser limits the depth of nesting.
fn unread<'a>(
    map: &'a Map<String, Value>,
    path: &str,
    read: &HashSet<String>,
    list: &mut Vec<(String, &'a Value)>,
) {
    for (key, value) in map {
        let path = format!("{path}{key}");
        let is_read = read.contains(&path);
        let inside = format!("{path}.");
        match value {
            Value::Object(map) if is_read && read.iter().any(|key| key.starts_with(&inside)) => {
                unread(map, &inside, read, list);
            }
            _ if !is_read => list.push((path, value)),
            _ => {}
        }
    }
}

/// The value as an integer, also if it is written as a float (`8192.0`).
fn whole_number(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| {
        let float = value.as_f64()?;
        (float.fract() == 0.0 && (0.0..=SIZE_MAX as f64).contains(&float)).then_some(float as u64)
    })
}

/// The value as a string for an error message, truncated after 80 characters.
fn shown(value: Option<&Value>) -> String {
    let Some(value) = value else { return "nothing".into() };
    let text = value.to_string();
    match text.char_indices().nth(80) {
        None => text,
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}
