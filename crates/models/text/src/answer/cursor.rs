//! A place in a text that may not have arrived completely.
//!
//! The readers of calls decide as soon as the text allows only one decision. Until then they ask
//! for more text. So a decision never depends on how the text was cut into pieces.

/// Maximum length of the blanks and short words that are looked at to decide what follows, in
/// bytes.
const MAX_LOOK: usize = 256;

/// The state of the answer after the text that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// More text may follow.
    Open,
    /// Nothing: the model has ended its answer.
    Complete,
    /// Nothing: the answer was cut off. An incomplete part would have continued.
    Cut,
}

/// The reason why nothing was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// The text that has arrived leaves the decision open.
    More,
    /// The text is something else.
    Other,
}

/// The result of reading.
pub(super) type Read<T> = Result<T, Stop>;

/// A place in a text.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cursor<'a> {
    pub(super) text: &'a str,
    /// The place, in bytes.
    pub(super) at: usize,
    pub(super) end: End,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(text: &'a str, end: End) -> Self {
        Self { text, at: 0, end }
    }

    pub(super) fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    /// The next bytes, at least `len` if there are as many.
    pub(super) fn near(&self, len: usize) -> &'a str {
        let rest = self.rest();
        let len = (len..rest.len()).find(|&len| rest.is_char_boundary(len));
        &rest[..len.unwrap_or(rest.len())]
    }

    /// Skips text that was seen.
    pub(super) fn skip(&mut self, len: usize) {
        self.at = (self.at + len).min(self.text.len());
    }

    /// The next character; `None` at the end of the answer.
    pub(super) fn peek(&self) -> Read<Option<char>> {
        match self.rest().chars().next() {
            None if self.end == End::Open => Err(Stop::More),
            next => Ok(next),
        }
    }

    /// Takes the next character. The end of the answer is not expected here.
    pub(super) fn next(&mut self) -> Read<char> {
        let next = self.peek()?.ok_or(Stop::Other)?;
        self.at += next.len_utf8();
        Ok(next)
    }

    pub(super) fn skip_space(&mut self) {
        let rest = self.rest();
        self.at += rest.len() - rest.trim_start().len();
    }

    /// Whether the text continues with `expected`.
    pub(super) fn sees(&self, expected: &str) -> Read<bool> {
        let rest = self.rest();
        if rest.starts_with(expected) {
            return Ok(true);
        }
        match self.end == End::Open && expected.starts_with(rest) {
            true => Err(Stop::More),
            false => Ok(false),
        }
    }

    /// The first of `expected` with which the text continues. If one of them is a prefix of
    /// another, the longer one has to come first.
    pub(super) fn sees_any<'e>(&self, expected: &[&'e str]) -> Read<Option<&'e str>> {
        for &one in expected {
            if self.sees(one)? {
                return Ok(Some(one));
            }
        }
        Ok(None)
    }

    /// Takes `expected` if it is next.
    pub(super) fn takes(&mut self, expected: &str) -> Read<bool> {
        let sees = self.sees(expected)?;
        self.at += if sees { expected.len() } else { 0 };
        Ok(sees)
    }

    /// Takes one of `expected` if it is next.
    pub(super) fn takes_any<'e>(&mut self, expected: &[&'e str]) -> Read<Option<&'e str>> {
        let seen = self.sees_any(expected)?;
        self.at += seen.map_or(0, str::len);
        Ok(seen)
    }

    /// Takes the text before the first character for which `ends` is true, which has at most `max`
    /// bytes.
    pub(super) fn until(&mut self, max: usize, ends: impl Fn(char) -> bool) -> Read<&'a str> {
        let near = self.near(max + 1);
        let text = match near.find(ends) {
            Some(len) => &near[..len],
            None if near.len() < self.rest().len() => return Err(Stop::Other),
            None if self.end == End::Open => return Err(Stop::More),
            None => near,
        };
        if text.len() > max {
            return Err(Stop::Other);
        }
        self.at += text.len();
        Ok(text)
    }

    /// Takes a short word, such as the key of an object.
    pub(super) fn word(&mut self, is_part: impl Fn(char) -> bool) -> Read<&'a str> {
        self.until(MAX_LOOK, |next| !is_part(next))
    }

    /// Whether only space is left of the answer.
    pub(super) fn is_at_end(&self) -> Read<bool> {
        let mut rest = *self;
        rest.skip_space();
        Ok(rest.peek()?.is_none())
    }
}
