//! A JSON scanner that reads one character at a time. It accepts exactly the values of RFC 8259, up
//! to a depth, and says where keys and values of objects begin and end.

/// Maximum number of nested arrays and objects.
const MAX_DEPTH: usize = 64;

/// The text is not JSON, or is nested too deeply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NotJson;

/// The meaning of a character of a JSON text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// Whitespace, punctuation, or the middle of a value.
    Other,
    /// The first quotation mark of a key.
    KeyStart,
    /// The last quotation mark of a key.
    KeyEnd,
    /// The first character of a value.
    ValueStart,
    /// The last character of a string, array, object or literal. The end of a number is not
    /// reported.
    ValueEnd,
}

/// The position in a JSON text.
#[derive(Clone, Debug)]
pub(super) struct Scanner {
    /// The open containers, outermost first. True for an object.
    objects: Vec<bool>,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// A value must follow. With `or_end`, the array may also end.
    Value {
        or_end: bool,
    },
    /// A key must follow. With `or_end`, the object may also end.
    Key {
        or_end: bool,
    },
    /// The colon after a key must follow.
    Colon,
    /// A comma or the end of the container must follow.
    AfterValue,
    String(StringState, Role),
    Number(NumberState),
    /// The rest of `true`, `false` or `null`.
    Literal(&'static str),
    /// The outermost value has ended.
    End,
}

/// The role of a string.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Key,
    Value,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StringState {
    Text,
    Escape,
    /// This many hexadecimal digits of `\u` must follow.
    Hex(u8),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NumberState {
    Minus,
    Zero,
    Integer,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
}

impl Scanner {
    /// A scanner for one value.
    pub(super) fn new() -> Self {
        Self { objects: Vec::new(), state: State::Value { or_end: false } }
    }

    /// Number of open containers.
    pub(super) fn depth(&self) -> usize {
        self.objects.len()
    }

    /// Whether the outermost value, an array, object, string or literal, has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.state == State::End
    }

    /// Reads the next character.
    pub(super) fn push(&mut self, character: char) -> Result<Seen, NotJson> {
        match self.state {
            State::String(string, role) => self.in_string(string, role, character),
            State::Number(number) => match number.next(character) {
                Some(next) => {
                    self.state = State::Number(next);
                    Ok(Seen::Other)
                }
                None if number.may_end() => {
                    self.state = self.after_value();
                    self.between(character)
                }
                None => Err(NotJson),
            },
            State::Literal(rest) => {
                let rest = rest.strip_prefix(character).ok_or(NotJson)?;
                if !rest.is_empty() {
                    self.state = State::Literal(rest);
                    return Ok(Seen::Other);
                }
                self.state = self.after_value();
                Ok(Seen::ValueEnd)
            }
            _ => self.between(character),
        }
    }

    /// Reads a character outside of strings, numbers and literals.
    fn between(&mut self, character: char) -> Result<Seen, NotJson> {
        if matches!(character, ' ' | '\t' | '\n' | '\r') {
            return Ok(Seen::Other);
        }
        match (self.state, character) {
            (State::Value { or_end: true }, ']')
            | (State::Key { or_end: true } | State::AfterValue, '}')
            | (State::AfterValue, ']') => self.close(character == '}'),
            (State::Value { .. }, _) => self.begin_value(character),
            (State::Key { .. }, '"') => {
                self.state = State::String(StringState::Text, Role::Key);
                Ok(Seen::KeyStart)
            }
            (State::Colon, ':') => {
                self.state = State::Value { or_end: false };
                Ok(Seen::Other)
            }
            (State::AfterValue, ',') => {
                let in_object = self.objects.last() == Some(&true);
                self.state = if in_object {
                    State::Key { or_end: false }
                } else {
                    State::Value { or_end: false }
                };
                Ok(Seen::Other)
            }
            _ => Err(NotJson),
        }
    }

    fn begin_value(&mut self, character: char) -> Result<Seen, NotJson> {
        self.state = match character {
            '{' | '[' => {
                if self.objects.len() == MAX_DEPTH {
                    return Err(NotJson);
                }
                self.objects.push(character == '{');
                if character == '{' {
                    State::Key { or_end: true }
                } else {
                    State::Value { or_end: true }
                }
            }
            '"' => State::String(StringState::Text, Role::Value),
            '-' => State::Number(NumberState::Minus),
            '0' => State::Number(NumberState::Zero),
            '1'..='9' => State::Number(NumberState::Integer),
            't' => State::Literal("rue"),
            'f' => State::Literal("alse"),
            'n' => State::Literal("ull"),
            _ => return Err(NotJson),
        };
        Ok(Seen::ValueStart)
    }

    fn close(&mut self, object: bool) -> Result<Seen, NotJson> {
        if self.objects.pop() != Some(object) {
            return Err(NotJson);
        }
        self.state = self.after_value();
        Ok(Seen::ValueEnd)
    }

    fn after_value(&self) -> State {
        if self.objects.is_empty() { State::End } else { State::AfterValue }
    }

    fn in_string(
        &mut self,
        string: StringState,
        role: Role,
        character: char,
    ) -> Result<Seen, NotJson> {
        let next = match (string, character) {
            (StringState::Text, '"') => {
                return Ok(match role {
                    Role::Key => {
                        self.state = State::Colon;
                        Seen::KeyEnd
                    }
                    Role::Value => {
                        self.state = self.after_value();
                        Seen::ValueEnd
                    }
                });
            }
            (StringState::Text, '\\') => StringState::Escape,
            (StringState::Text, character) if character >= ' ' => StringState::Text,
            (StringState::Escape, 'u') => StringState::Hex(4),
            (StringState::Escape, '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't')
            | (StringState::Hex(1), '0'..='9' | 'a'..='f' | 'A'..='F') => StringState::Text,
            (StringState::Hex(left), '0'..='9' | 'a'..='f' | 'A'..='F') => {
                StringState::Hex(left - 1)
            }
            _ => return Err(NotJson),
        };
        self.state = State::String(next, role);
        Ok(Seen::Other)
    }
}

impl NumberState {
    /// The state after a character that belongs to the number; `None` if it does not.
    fn next(self, character: char) -> Option<Self> {
        Some(match (self, character) {
            (Self::Minus, '0') => Self::Zero,
            (Self::Minus, '1'..='9') | (Self::Integer, '0'..='9') => Self::Integer,
            (Self::Zero | Self::Integer, '.') => Self::Point,
            (Self::Point | Self::Fraction, '0'..='9') => Self::Fraction,
            (Self::Zero | Self::Integer | Self::Fraction, 'e' | 'E') => Self::Exponent,
            (Self::Exponent, '+' | '-') => Self::ExponentSign,
            (Self::Exponent | Self::ExponentSign | Self::ExponentDigits, '0'..='9') => {
                Self::ExponentDigits
            }
            _ => return None,
        })
    }

    fn may_end(self) -> bool {
        matches!(self, Self::Zero | Self::Integer | Self::Fraction | Self::ExponentDigits)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Whether the scanner accepts the text as one complete value.
    fn accepts(text: &str) -> bool {
        let mut scanner = Scanner::new();
        text.chars().all(|character| scanner.push(character).is_ok()) && scanner.has_ended()
    }

    fn of_serde(text: &str) -> bool {
        serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(3000))]

        /// Goal: the scanner accepts the same objects as serde_json.
        #[test]
        fn agrees_with_serde_json(text in "\\{([\\[\\]{}:, \"\\\\uea01.+-]|null|true|\"a\"|\"b\":|1e5){0,12}\\}") {
            prop_assert_eq!(accepts(&text), of_serde(&text), "{}", text);
        }
    }

    /// Goal: each kind of value is accepted, and nesting is limited.
    #[test]
    fn values_and_their_limits() {
        for text in [
            r#"{"a":[1,-0,2.5e-3,1E9],"b":{"c":"\u00e9\n\"é😀"},"d":[true,false,null,[],{}]}"#,
            " \n[ ]",
            r#""x""#,
        ] {
            assert!(accepts(text) && of_serde(text), "{text}");
        }
        for text in
            ["{", "{,}", "{\"a\"}", "[1,]", "[01]", "[1.]", "{\"a\":'b'}", "[\"\n\"]", "[tru]"]
        {
            assert!(!accepts(text) && !of_serde(text), "{text}");
        }
        let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        assert!(accepts(&nested(MAX_DEPTH)) && !accepts(&nested(MAX_DEPTH + 1)));
    }
}
