//! Finds stop strings in text that arrives in pieces, as the detokenizer returns it.
//!
//! The text ends at the first position where any stop string is complete. If several are complete
//! at the same position, the longest one counts. This depends only on the text, not on how it was
//! cut into pieces. Only the longest suffix of the text that may still become a stop string is held
//! back.

use std::sync::Arc;

use crate::StopStringsError;

/// Maximum number of stop strings of one request.
pub const MAX_STOP_STRINGS: usize = 64;
/// Maximum length in bytes of all stop strings of one request together.
pub const MAX_STOP_BYTES: usize = 4096;

/// Looks for stop strings in the text of one sequence. Its lifecycle:
///
/// 1. [`StopStrings::new`] creates it for the sequence's output. Clones, for further choices of the
///    same request, share the stop strings and their tables.
/// 2. [`StopStrings::push`] is called with each piece of text in order, until it reports a match.
/// 3. If the text ends without a match, [`StopStrings::finish`] returns the text held back.
#[derive(Clone, Debug)]
pub struct StopStrings {
    patterns: Arc<[Pattern]>,
    /// For each pattern, the length in bytes of its longest prefix that the text so far ends with.
    /// Below the pattern's length between pieces.
    seen: Vec<u16>,
    include_stop: bool,
    /// Text that was not returned yet: the longest prefix of a stop string that the text ends with.
    held: String,
    matched: bool,
}

/// One stop string.
#[derive(Debug)]
struct Pattern {
    text: String,
    /// The failure function of the Knuth-Morris-Pratt algorithm: `fallback[n - 1]` is the length of
    /// the longest proper prefix of `text[..n]` that is also its suffix, in bytes. At most
    /// [`MAX_STOP_BYTES`].
    fallback: Vec<u16>,
}

/// The result of one piece of text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopScan {
    /// Text that can be passed on now.
    pub text: String,
    /// Index of the stop string that ended the text, in the list passed to [`StopStrings::new`].
    /// All later results are empty.
    pub matched: Option<usize>,
}

impl StopStrings {
    /// Looks for any of `stops`. With `include_stop`, the returned text includes the stop string.
    ///
    /// # Errors
    /// [`StopStringsError`] if one of `stops` is empty, or if there are more than
    /// [`MAX_STOP_STRINGS`] or they have more than [`MAX_STOP_BYTES`] together.
    pub fn new<S: AsRef<str>>(
        stops: impl IntoIterator<Item = S>,
        include_stop: bool,
    ) -> Result<Self, StopStringsError> {
        let mut patterns = Vec::new();
        let mut bytes = 0_usize;
        for stop in stops {
            let stop = stop.as_ref();
            bytes = bytes.saturating_add(stop.len());
            if stop.is_empty() {
                return Err(StopStringsError::Empty);
            }
            if patterns.len() == MAX_STOP_STRINGS {
                return Err(StopStringsError::TooMany);
            }
            if bytes > MAX_STOP_BYTES {
                return Err(StopStringsError::TooLong);
            }
            patterns.push(Pattern::new(stop.to_owned()));
        }
        let seen = vec![0; patterns.len()];
        let patterns = patterns.into();
        Ok(Self { patterns, seen, include_stop, held: String::new(), matched: false })
    }

    /// Adds the next piece of text. After a match, all further text is discarded.
    pub fn push(&mut self, piece: &str) -> StopScan {
        if self.matched {
            return StopScan::default();
        }
        for (index, byte) in piece.bytes().enumerate() {
            if let Some(stop) = self.advance(byte) {
                return self.end_at(stop, piece, index + 1);
            }
        }
        let mut text = std::mem::take(&mut self.held);
        text.push_str(piece);
        // A stop string begins at a character boundary, so this is a character boundary too.
        let held_len = self.seen.iter().copied().max().unwrap_or(0);
        self.held = text.split_off(text.len() - usize::from(held_len));
        StopScan { text, matched: None }
    }

    /// Returns the text that was held back and starts the search anew. A stop string that spans
    /// this place is not found.
    pub(crate) fn release(&mut self) -> String {
        self.seen.fill(0);
        std::mem::take(&mut self.held)
    }

    /// Ends the text without a stop string and returns the text that was held back.
    #[must_use]
    pub fn finish(self) -> String {
        self.held
    }

    /// Adds one byte to every pattern. Returns the index of the longest pattern that it completes.
    fn advance(&mut self, byte: u8) -> Option<usize> {
        let mut longest: Option<usize> = None;
        for index in 0..self.patterns.len() {
            let complete = self.patterns[index].advance(&mut self.seen[index], byte);
            let len = |index: usize| self.patterns[index].text.len();
            if complete && longest.is_none_or(|best| len(index) > len(best)) {
                longest = Some(index);
            }
        }
        longest
    }

    /// Ends the text `end` bytes into `piece`, where the stop string with the index `stop` is
    /// complete.
    fn end_at(&mut self, stop: usize, piece: &str, end: usize) -> StopScan {
        self.matched = true;
        let mut text = std::mem::take(&mut self.held);
        text.push_str(&piece[..end]);
        if !self.include_stop {
            text.truncate(text.len() - self.patterns[stop].text.len());
        }
        StopScan { text, matched: Some(stop) }
    }
}

impl Pattern {
    fn new(text: String) -> Self {
        let bytes = text.as_bytes();
        let mut fallback = vec![0_u16; bytes.len()];
        let mut len = 0_u16;
        for end in 1..bytes.len() {
            while len > 0 && bytes[usize::from(len)] != bytes[end] {
                len = fallback[usize::from(len) - 1];
            }
            len += u16::from(bytes[usize::from(len)] == bytes[end]);
            fallback[end] = len;
        }
        Self { text, fallback }
    }

    /// Adds one byte to a text that ends with the first `seen` bytes of the pattern. Returns
    /// whether it completes the pattern.
    fn advance(&self, seen: &mut u16, byte: u8) -> bool {
        let bytes = self.text.as_bytes();
        while *seen > 0 && bytes[usize::from(*seen)] != byte {
            *seen = self.fallback[usize::from(*seen) - 1];
        }
        *seen += u16::from(bytes[usize::from(*seen)] == byte);
        usize::from(*seen) == bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    /// The match as `(index of the stop string, end in bytes)`, found by trying every end.
    fn naive(text: &str, stops: &[String]) -> Option<(usize, usize)> {
        (1..=text.len()).filter(|&end| text.is_char_boundary(end)).find_map(|end| {
            (0..stops.len())
                .filter(|&index| text[..end].ends_with(&stops[index]))
                .max_by_key(|&index| (stops[index].len(), std::cmp::Reverse(index)))
                .map(|index| (index, end))
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        /// Goal: for any stop strings and pieces, the result equals that of a naive search, and
        /// after each piece only text that may still become a stop string is held back.
        #[test]
        fn finds_the_same_match_as_a_naive_search(
            pieces in vec("[abé]{0,4}", 0..12),
            stops in vec("[abé]{1,5}", 0..5),
            include_stop: bool,
        ) {
            let mut matcher = StopStrings::new(stops.clone(), include_stop).expect("none is empty");
            let (mut so_far, mut given, mut matched) = (String::new(), String::new(), None);
            for piece in &pieces {
                let scan = matcher.push(piece);
                prop_assert!(matched.is_none() || scan == StopScan::default());
                given.push_str(&scan.text);
                matched = matched.or(scan.matched);
                so_far.push_str(piece);
                if matched.is_none() {
                    let held = &so_far[given.len()..];
                    let longest = so_far
                        .char_indices()
                        .map(|(start, _)| &so_far[start..])
                        .find(|end| stops.iter().any(|stop| stop.starts_with(end)))
                        .unwrap_or("");
                    prop_assert_eq!(held, longest);
                }
            }
            given.push_str(&matcher.finish());
            match naive(&so_far, &stops) {
                None => {
                    prop_assert_eq!(matched, None);
                    prop_assert_eq!(given, so_far);
                }
                Some((index, end)) => {
                    prop_assert_eq!(matched, Some(index));
                    let len = if include_stop { end } else { end - stops[index].len() };
                    prop_assert_eq!(given, &so_far[..len]);
                }
            }
        }
    }

    /// Goal: a stop string that spans three pieces is found, and text that was held back is
    /// returned as soon as it cannot become a stop string any longer.
    #[test]
    fn finds_a_stop_string_across_pieces() {
        let mut matcher = StopStrings::new(["</end>"], false).expect("not empty");
        let mut push = |piece: &str| {
            let scan = matcher.push(piece);
            (scan.text, scan.matched)
        };
        assert_eq!(push("a < b </e"), ("a < b ".to_owned(), None));
        assert_eq!(push("m> </"), ("</em> ".to_owned(), None));
        assert_eq!(push("end"), (String::new(), None));
        assert_eq!(push("> rest"), (String::new(), Some(0)));
        assert_eq!(push("more"), (String::new(), None));
    }

    /// Goal: an empty stop string, too many and too long ones are refused, before tables are built.
    #[test]
    fn stop_strings_are_limited() {
        let error = |stops: Vec<String>| StopStrings::new(stops, false).err();
        assert_eq!(error(vec!["a".to_owned(), String::new()]), Some(StopStringsError::Empty));
        assert_eq!(error(vec!["a".to_owned(); 64]), None);
        assert_eq!(error(vec!["a".to_owned(); 65]), Some(StopStringsError::TooMany));
        assert_eq!(error(vec!["a".repeat(1024); 4]), None);
        assert_eq!(
            error(vec!["a".repeat(1024), "a".repeat(3073)]),
            Some(StopStringsError::TooLong)
        );
        let message = StopStringsError::TooLong.to_string();
        assert_eq!(message, "invalid stop: expected strings of at most 4096 bytes in all");
    }

    /// Goal: the choices of a request share the tables, and each has its own state.
    #[test]
    fn clones_share_their_tables() {
        let mut first = StopStrings::new(["ab"], false).expect("not empty");
        let mut second = first.clone();
        assert!(Arc::ptr_eq(&first.patterns, &second.patterns));
        assert_eq!(first.push("a").text, "");
        assert_eq!(second.push("b").text, "b");
        assert_eq!(first.push("b").matched, Some(0));
    }
}
