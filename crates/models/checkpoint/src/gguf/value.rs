//! [`Value`] is a metadata value of a GGUF file.

use super::cursor::Cursor;
use crate::error::ModelError;

/// A metadata value. Numbers of different widths have the same variant.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    /// An unsigned integer of any width.
    Unsigned(u64),
    /// A signed integer of any width.
    Signed(i64),
    /// An f32 or f64.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// A UTF-8 string.
    Text(String),
    /// An array of integers of any width, signed or unsigned, that fit in an i64.
    Integers(Vec<i64>),
    /// An array of f32 or f64, rounded to f32.
    Floats(Vec<f32>),
    /// An array of booleans.
    Bools(Vec<bool>),
    /// An array of UTF-8 strings.
    Texts(Vec<String>),
}

/// The type numbers in the file.
mod id {
    pub(super) const U8: u32 = 0;
    pub(super) const I8: u32 = 1;
    pub(super) const U16: u32 = 2;
    pub(super) const I16: u32 = 3;
    pub(super) const U32: u32 = 4;
    pub(super) const I32: u32 = 5;
    pub(super) const F32: u32 = 6;
    pub(super) const BOOL: u32 = 7;
    pub(super) const STRING: u32 = 8;
    pub(super) const ARRAY: u32 = 9;
    pub(super) const U64: u32 = 10;
    pub(super) const I64: u32 = 11;
    pub(super) const F64: u32 = 12;
}

/// Minimum size in bytes of a value; `None` for an unknown type.
fn bytes_min(type_id: u32) -> Option<u64> {
    match type_id {
        id::U8 | id::I8 | id::BOOL => Some(1),
        id::U16 | id::I16 => Some(2),
        id::U32 | id::I32 | id::F32 => Some(4),
        id::U64 | id::I64 | id::F64 | id::STRING => Some(8),
        _ => None,
    }
}

impl Value {
    /// Reads a type and a value of this type.
    pub(super) fn read(cursor: &mut Cursor<'_>, key: &str) -> Result<Self, ModelError> {
        let what = format!("the value of `{key}`");
        let type_id = cursor.u32(&what)?;
        if type_id != id::ARRAY {
            return Self::scalar(cursor, type_id, &what);
        }
        let type_id = cursor.u32(&what)?;
        let count = cursor.u64(&what)?;
        let Some(entry_bytes) = bytes_min(type_id) else {
            let reason = format!("{what}: unknown type {type_id} of array elements");
            return Err(ModelError::malformed(cursor.file(), reason));
        };
        cursor.check_count(&format!("entries of `{key}`"), count, entry_bytes, u64::MAX)?;
        cursor.count_elements(&what, count)?;
        Self::array(cursor, type_id, count, &what)
    }

    fn scalar(cursor: &mut Cursor<'_>, type_id: u32, what: &str) -> Result<Self, ModelError> {
        Ok(match type_id {
            id::U8 => Self::Unsigned(u64::from(cursor.array::<1>(what)?[0])),
            id::I8 => Self::Signed(i64::from(i8::from_le_bytes(cursor.array(what)?))),
            id::U16 => Self::Unsigned(u64::from(u16::from_le_bytes(cursor.array(what)?))),
            id::I16 => Self::Signed(i64::from(i16::from_le_bytes(cursor.array(what)?))),
            id::U32 => Self::Unsigned(u64::from(cursor.u32(what)?)),
            id::I32 => Self::Signed(i64::from(i32::from_le_bytes(cursor.array(what)?))),
            id::F32 => Self::Float(f64::from(f32::from_le_bytes(cursor.array(what)?))),
            id::BOOL => Self::Bool(cursor.array::<1>(what)?[0] != 0),
            id::STRING => Self::Text(cursor.string(what)?),
            id::U64 => Self::Unsigned(cursor.u64(what)?),
            id::I64 => Self::Signed(i64::from_le_bytes(cursor.array(what)?)),
            id::F64 => Self::Float(f64::from_le_bytes(cursor.array(what)?)),
            _ => {
                let reason = format!("{what}: unknown type {type_id}");
                return Err(ModelError::malformed(cursor.file(), reason));
            }
        })
    }

    fn array(
        cursor: &mut Cursor<'_>,
        type_id: u32,
        count: u64,
        what: &str,
    ) -> Result<Self, ModelError> {
        // Elements are converted one by one, so a large array is never stored as `Value`s.
        Ok(match type_id {
            id::STRING => {
                Self::Texts((0..count).map(|_| cursor.string(what)).collect::<Result<Vec<_>, _>>()?)
            }
            id::BOOL => {
                Self::Bools(cursor.take(what, count)?.iter().map(|byte| *byte != 0).collect())
            }
            id::F32 | id::F64 => {
                let float = |value: Self| value.as_f64().unwrap_or_default() as f32;
                let floats = (0..count).map(|_| Self::scalar(cursor, type_id, what).map(float));
                Self::Floats(floats.collect::<Result<Vec<_>, _>>()?)
            }
            _ => {
                let file = cursor.file();
                let integer = |value: Self| {
                    let too_large =
                        || ModelError::malformed(file, format!("{what}: an integer is too large"));
                    value.as_i64().ok_or_else(too_large)
                };
                let integers =
                    (0..count).map(|_| Self::scalar(cursor, type_id, what).and_then(integer));
                Self::Integers(integers.collect::<Result<Vec<_>, _>>()?)
            }
        })
    }

    pub(crate) fn as_i64(&self) -> Option<i64> {
        match self {
            Self::Unsigned(n) => i64::try_from(*n).ok(),
            Self::Signed(n) => Some(*n),
            _ => None,
        }
    }

    pub(crate) fn as_u64(&self) -> Option<u64> {
        match self {
            Self::Unsigned(n) => Some(*n),
            Self::Signed(n) => u64::try_from(*n).ok(),
            _ => None,
        }
    }

    pub(crate) fn as_f64(&self) -> Option<f64> {
        match self {
            Self::Float(number) => Some(*number),
            Self::Unsigned(n) => Some(*n as f64),
            Self::Signed(n) => Some(*n as f64),
            _ => None,
        }
    }

    pub(crate) fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(flag) => Some(*flag),
            _ => None,
        }
    }

    pub(crate) fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// A short description of the value for error messages.
    pub(crate) fn shown(&self) -> String {
        match self {
            Self::Unsigned(n) => n.to_string(),
            Self::Signed(n) => n.to_string(),
            Self::Float(n) => n.to_string(),
            Self::Bool(flag) => flag.to_string(),
            Self::Text(text) => format!("`{}`", text.chars().take(80).collect::<String>()),
            Self::Integers(list) => format!("{} integers", list.len()),
            Self::Floats(list) => format!("{} floats", list.len()),
            Self::Bools(list) => format!("{} booleans", list.len()),
            Self::Texts(list) => format!("{} strings", list.len()),
        }
    }
}
