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
    /// A coordinate or a size.
    Value(TokenSpan),
}

impl PositionRun<'_> {
    /// The text that shows a span, such as `[image, 64 positions]`; `None` for tokens.
    pub fn label(&self) -> Option<String> {
        match *self {
            PositionRun::Tokens(_) => None,
            PositionRun::Image { positions: 1 } => Some("[image, 1 position]".to_owned()),
            PositionRun::Image { positions } => Some(format!("[image, {positions} positions]")),
            PositionRun::Value(TokenSpan::Size { width_bin, height_bin }) => {
                Some(format!("[size {width_bin} x {height_bin}]"))
            }
            PositionRun::Value(TokenSpan::Coordinate { bin }) => {
                Some(format!("[coordinate {bin}]"))
            }
            // An image is not a value.
            PositionRun::Value(TokenSpan::Image { .. }) => None,
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
        positions.chunk_by(is_joined).map(|run| match TokenSpan::of_value(run[0]) {
            Some(value) => PositionRun::Value(value),
            None if run[0] & SPAN == 0 => PositionRun::Tokens(run),
            None => PositionRun::Image { positions: run.len() },
        })
    }
}
