//! Deserializers of fields with error messages that a client understands, and the collector of
//! unknown fields.
//!
//! serde's messages name the expected Rust type (`f32`, `u32`). The functions here are used with
//! `#[serde(deserialize_with = "...")]` and describe the expected JSON value instead.

use std::marker::PhantomData;

use serde::de::{Error, SeqAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use super::options::{MAX_TOKEN_IDS, Truncation};

/// The members of a JSON object for which the struct has no field. For use with
/// `#[serde(flatten)]`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(transparent)]
pub struct UnknownFields(Map<String, Value>);

impl UnknownFields {
    /// Names and values of the members that are not `null`.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        let given = self.0.iter().filter(|(_, value)| !value.is_null());
        given.map(|(name, value)| (name.as_str(), value))
    }
}

/// A finite number, or `null`.
pub(super) fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f32>, D::Error> {
    Ok(Option::<Number>::deserialize(deserializer)?.map(|Number(number)| number))
}

/// A whole number from `MIN` to `MAX`, or `null`.
pub(super) fn count<'de, D, const MIN: usize, const MAX: usize>(
    deserializer: D,
) -> Result<Option<usize>, D::Error>
where
    D: Deserializer<'de>,
{
    Ok(Option::<Count<MIN, MAX>>::deserialize(deserializer)?.map(|Count(count)| count))
}

/// As [`count`]; `false` counts as `null`.
pub(super) fn count_or_false<'de, D, const MIN: usize, const MAX: usize>(
    deserializer: D,
) -> Result<Option<usize>, D::Error>
where
    D: Deserializer<'de>,
{
    match Value::deserialize(deserializer)? {
        Value::Bool(false) => Ok(None),
        value => count::<_, MIN, MAX>(value).map_err(D::Error::custom),
    }
}

/// The number of tokens to keep, where 0 and -1 keep all, or `null`.
pub(super) fn top_k<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<usize>, D::Error> {
    match Value::deserialize(deserializer)? {
        value if value == -1 => Ok(Some(0)),
        value => count::<_, 0, { u32::MAX as usize }>(value).map_err(D::Error::custom),
    }
}

/// A number of tokens, where -1 is no limit, or `null`.
pub(super) fn count_or_unlimited<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<usize>, D::Error> {
    match Value::deserialize(deserializer)? {
        value if value == -1 => Ok(None),
        value => count::<_, 0, { u32::MAX as usize }>(value).map_err(D::Error::custom),
    }
}

/// The number of tokens to keep of a prompt, where -1 is as many as fit, or `null`.
pub(super) fn truncation<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Truncation>, D::Error> {
    match Value::deserialize(deserializer)? {
        value if value == -1 => Ok(Some(Truncation::Context)),
        value => {
            let tokens = count::<_, 1, { usize::MAX }>(value).map_err(D::Error::custom)?;
            Ok(tokens.map(Truncation::Tokens))
        }
    }
}

/// A list of at most `MAX` elements. Longer ones are refused at the first element too many.
pub(super) fn list<'de, D, T, const MAX: usize>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    struct ListVisitor<T, const MAX: usize>(PhantomData<T>);
    impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for ListVisitor<T, MAX> {
        type Value = Vec<T>;
        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "a list of at most {MAX} elements")
        }
        fn visit_seq<S: SeqAccess<'de>>(self, mut elements: S) -> Result<Vec<T>, S::Error> {
            let mut list = Vec::new();
            while let Some(element) = elements.next_element()? {
                if list.len() == MAX {
                    return Err(S::Error::invalid_length(MAX + 1, &self));
                }
                list.push(element);
            }
            Ok(list)
        }
    }
    deserializer.deserialize_seq(ListVisitor::<T, MAX>(PhantomData))
}

/// As [`list`], or `null`.
pub(super) fn optional_list<'de, D, T, const MAX: usize>(
    deserializer: D,
) -> Result<Option<Vec<T>>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    struct List<T, const MAX: usize>(Vec<T>);
    impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for List<T, MAX> {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            list::<_, _, MAX>(deserializer).map(Self)
        }
    }
    Ok(Option::<List<T, MAX>>::deserialize(deserializer)?.map(|List(list)| list))
}

/// A whole number of 32 bits with a sign, or `null`.
pub(super) fn signed_32<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<i32>, D::Error> {
    Ok(Option::<Signed32>::deserialize(deserializer)?.map(|Signed32(number)| number))
}

/// A whole number of 64 bits, or `null`. A negative one is converted by its bits, so that every
/// integer that a client may use as a seed is a valid one.
pub(super) fn seed<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    Ok(Option::<Seed>::deserialize(deserializer)?.map(|Seed(seed)| seed))
}

/// A list of at most [`MAX_TOKEN_IDS`] token ids, or `null`.
pub(super) fn token_ids<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Vec<u32>>, D::Error> {
    struct Ids(Vec<Count<0, { u32::MAX as usize }>>);
    impl<'de> Deserialize<'de> for Ids {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            list::<_, _, MAX_TOKEN_IDS>(deserializer).map(Self)
        }
    }
    let ids = Option::<Ids>::deserialize(deserializer)?;
    Ok(ids.map(|Ids(ids)| ids.into_iter().map(|Count(id)| id as u32).collect()))
}

/// OpenAI's `logit_bias`, or `null`: an object from token ids, written as strings because JSON
/// has no other keys, to numbers from -100 to 100. The order is kept. An id is written in one way
/// only (`1`, not `01` or `+1`), so that no token has two biases.
pub(super) fn logit_bias<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Vec<(u32, f32)>>, D::Error> {
    Ok(Option::<LogitBias>::deserialize(deserializer)?.map(|LogitBias(pairs)| pairs))
}

#[derive(Debug)]
struct Number(f32);

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NumberVisitor;
        impl Visitor<'_> for NumberVisitor {
            type Value = Number;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a finite number")
            }
            fn visit_f64<E: Error>(self, number: f64) -> Result<Number, E> {
                let narrow = number as f32;
                if narrow.is_finite() {
                    return Ok(Number(narrow));
                }
                Err(E::invalid_value(Unexpected::Float(number), &self))
            }
            fn visit_u64<E: Error>(self, number: u64) -> Result<Number, E> {
                self.visit_f64(number as f64)
            }
            fn visit_i64<E: Error>(self, number: i64) -> Result<Number, E> {
                self.visit_f64(number as f64)
            }
        }
        deserializer.deserialize_f64(NumberVisitor)
    }
}

#[derive(Debug)]
struct Count<const MIN: usize, const MAX: usize>(usize);

impl<'de, const MIN: usize, const MAX: usize> Deserialize<'de> for Count<MIN, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct CountVisitor<const MIN: usize, const MAX: usize>;
        impl<const MIN: usize, const MAX: usize> Visitor<'_> for CountVisitor<MIN, MAX> {
            type Value = Count<MIN, MAX>;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match MAX {
                    usize::MAX => write!(f, "a whole number, {MIN} or above"),
                    _ => write!(f, "a whole number from {MIN} to {MAX}"),
                }
            }
            fn visit_u64<E: Error>(self, number: u64) -> Result<Self::Value, E> {
                match usize::try_from(number) {
                    Ok(count) if (MIN..=MAX).contains(&count) => Ok(Count(count)),
                    _ => Err(E::invalid_value(Unexpected::Unsigned(number), &self)),
                }
            }
        }
        deserializer.deserialize_u64(CountVisitor)
    }
}

#[derive(Debug)]
struct Signed32(i32);

impl<'de> Deserialize<'de> for Signed32 {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Signed32Visitor;
        impl Visitor<'_> for Signed32Visitor {
            type Value = Signed32;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "a whole number from {} to {}", i32::MIN, i32::MAX)
            }
            fn visit_i64<E: Error>(self, number: i64) -> Result<Signed32, E> {
                let narrow = i32::try_from(number).map(Signed32);
                narrow.map_err(|_| E::invalid_value(Unexpected::Signed(number), &self))
            }
            fn visit_u64<E: Error>(self, number: u64) -> Result<Signed32, E> {
                let narrow = i32::try_from(number).map(Signed32);
                narrow.map_err(|_| E::invalid_value(Unexpected::Unsigned(number), &self))
            }
        }
        deserializer.deserialize_i64(Signed32Visitor)
    }
}

#[derive(Debug)]
struct Seed(u64);

impl<'de> Deserialize<'de> for Seed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SeedVisitor;
        impl Visitor<'_> for SeedVisitor {
            type Value = Seed;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a whole number of at most 64 bits")
            }
            fn visit_u64<E: Error>(self, seed: u64) -> Result<Seed, E> {
                Ok(Seed(seed))
            }
            fn visit_i64<E: Error>(self, seed: i64) -> Result<Seed, E> {
                Ok(Seed(seed.cast_unsigned()))
            }
        }
        deserializer.deserialize_u64(SeedVisitor)
    }
}

#[derive(Debug)]
struct LogitBias(Vec<(u32, f32)>);

impl<'de> Deserialize<'de> for LogitBias {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct LogitBiasVisitor;
        impl<'de> Visitor<'de> for LogitBiasVisitor {
            type Value = LogitBias;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(
                    f,
                    "an object from at most {MAX_TOKEN_IDS} token ids to numbers from -100 to 100"
                )
            }
            fn visit_map<M: serde::de::MapAccess<'de>>(
                self,
                mut map: M,
            ) -> Result<LogitBias, M::Error> {
                let mut pairs = Vec::new();
                while let Some((key, Number(bias))) = map.next_entry::<String, Number>()? {
                    let id: Option<u32> = key.parse().ok();
                    let id = id.filter(|id| id.to_string() == key);
                    let id =
                        id.ok_or_else(|| M::Error::invalid_value(Unexpected::Str(&key), &self))?;
                    if pairs.len() == MAX_TOKEN_IDS {
                        return Err(M::Error::invalid_length(MAX_TOKEN_IDS + 1, &self));
                    }
                    if !(-100.0..=100.0).contains(&bias) {
                        let got = Unexpected::Float(f64::from(bias));
                        return Err(M::Error::invalid_value(got, &self));
                    }
                    pairs.push((id, bias));
                }
                Ok(LogitBias(pairs))
            }
        }
        deserializer.deserialize_map(LogitBiasVisitor)
    }
}
