//! [`PositionRun`]: positions divided into tokens and spans, for code that shows them to people.

use super::{SPAN, TokenSpan};

/// A part of a list of positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PositionRun<'a> {
    /// Token ids that follow one another.
    Tokens(&'a [u32]),
    /// An image.
    Image {
        /// Number of its positions that are in the list, which may begin or end inside it.
        positions: usize,
    },
    /// The position of a value.
    Value(u32),
}

impl PositionRun<'_> {
    /// The text that shows a span, such as `[image, 64 positions]`; `None` for tokens.
    pub fn label(&self) -> Option<String> {
        match *self {
            PositionRun::Tokens(_) => None,
            PositionRun::Image { positions: 1 } => Some("[image, 1 position]".to_owned()),
            PositionRun::Image { positions } => Some(format!("[image, {positions} positions]")),
            PositionRun::Value(position) => Some(format!("[value {position:#x}]")),
        }
    }
}

impl TokenSpan {
    /// Divides positions into tokens and spans.
    pub fn runs(positions: &[u32]) -> impl Iterator<Item = PositionRun<'_>> {
        let is_joined = |position: &u32, next: &u32| match TokenSpan::may_end_after(*position) {
            true => (position | next) & SPAN == 0,
            false => TokenSpan::image_number(*position) == TokenSpan::image_number(*next),
        };
        positions.chunk_by(is_joined).map(|run| match run[0] {
            first if first & SPAN == 0 => PositionRun::Tokens(run),
            first if TokenSpan::of_value(first).is_some() => PositionRun::Value(first),
            _ => PositionRun::Image { positions: run.len() },
        })
    }
}
