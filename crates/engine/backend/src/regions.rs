//! Coordinates and sizes as tokens: the bins into which they are divided, and the logits of the
//! bins.

use std::fmt;

use stolon_kvcache::TokenSpan;

/// The kinds of the [values](TokenSpan::Value) that coordinates and sizes are.
const COORDINATE: u32 = 1;
const SIZE: u32 = 2;
/// Number of bits of the bin of a height. The bits above are the bin of the width.
const HEIGHT_BITS: u32 = 14;

/// A coordinate or a size that takes the place of a token of the vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionToken {
    /// A quantized coordinate.
    Coordinate {
        /// The bin, below 2^28.
        bin: u32,
    },
    /// A quantized size.
    Size {
        /// The bin of the width, below 2^14.
        width_bin: u32,
        /// The bin of the height, below 2^14.
        height_bin: u32,
    },
}

impl RegionToken {
    /// The coordinate or the size that a token is; `None` for any other token.
    #[must_use]
    pub fn of(token: u32) -> Option<Self> {
        match TokenSpan::of_value(token)? {
            TokenSpan::Value { kind: COORDINATE, value } => Some(Self::Coordinate { bin: value }),
            TokenSpan::Value { kind: SIZE, value } => {
                let height_bin = value & ((1 << HEIGHT_BITS) - 1);
                Some(Self::Size { width_bin: value >> HEIGHT_BITS, height_bin })
            }
            _ => None,
        }
    }

    /// The token; `None` for a bin that is out of range.
    #[must_use]
    pub fn token(self) -> Option<u32> {
        let (kind, value) = match self {
            Self::Coordinate { bin } => (COORDINATE, bin),
            Self::Size { width_bin, height_bin } => {
                if width_bin.max(height_bin) >> HEIGHT_BITS > 0 {
                    return None;
                }
                (SIZE, width_bin << HEIGHT_BITS | height_bin)
            }
        };
        TokenSpan::Value { kind, value }.value_position()
    }
}

impl fmt::Display for RegionToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Coordinate { bin } => write!(f, "[coordinate {bin}]"),
            Self::Size { width_bin, height_bin } => write!(f, "[size {width_bin} x {height_bin}]"),
        }
    }
}

/// The numbers of bins into which a model divides coordinates and sizes. Each bin is one token
/// ([`RegionToken`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionBins {
    /// Number of bins of a coordinate, from 2 to 2^14.
    pub coordinates: usize,
    /// Number of bins of a width, and of a height, from 2 to 2^14.
    pub sizes: usize,
}

/// The smallest size, as a power of 2. Sizes are exponential, from this one to 1.
const SMALLEST_EXPONENT: f32 = -10.0;

impl RegionBins {
    /// Number of logits of a row: of a coordinate, a width and a height.
    #[must_use]
    pub fn width(self) -> usize {
        self.coordinates + 2 * self.sizes
    }

    /// Whether a token is a coordinate or a size in one of the bins.
    #[must_use]
    pub fn have(self, token: u32) -> bool {
        match RegionToken::of(token) {
            Some(RegionToken::Coordinate { bin }) => (bin as usize) < self.coordinates,
            Some(RegionToken::Size { width_bin, height_bin }) => {
                (width_bin.max(height_bin) as usize) < self.sizes
            }
            None => false,
        }
    }

    /// The coordinate of a bin: from 0, the left or the upper edge, to 1.
    #[must_use]
    pub fn coordinate(self, bin: u32) -> f32 {
        fraction(bin, self.coordinates)
    }

    /// The width or the height of a bin, from 2^-10 to 1, as a fraction of the image's width or
    /// height.
    #[must_use]
    pub fn size(self, bin: u32) -> f32 {
        (SMALLEST_EXPONENT * (1.0 - fraction(bin, self.sizes))).exp2()
    }

    /// The bin whose coordinate is nearest to this one.
    #[must_use]
    pub fn coordinate_bin(self, coordinate: f32) -> u32 {
        nearest(coordinate, self.coordinates)
    }

    /// The bin whose size is nearest to this one in proportion.
    #[must_use]
    pub fn size_bin(self, size: f32) -> u32 {
        // Minus infinity for 0, and NaN for numbers below, which lead to the first bin.
        nearest(1.0 - size.log2() / SMALLEST_EXPONENT, self.sizes)
    }
}

/// The place of a bin among `count` bins, from 0 to 1.
fn fraction(bin: u32, count: usize) -> f32 {
    bin as f32 / (count.max(2) - 1) as f32
}

/// The bin whose place is nearest to `fraction`.
fn nearest(fraction: f32, count: usize) -> u32 {
    // Conversions of floating-point numbers saturate, and NaN becomes 0.
    ((fraction * (count.max(2) - 1) as f32).round() as u32).min(count.max(2) as u32 - 1)
}

/// The logits of the bins at one token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RegionLogits<'a> {
    /// The logits of a coordinate, one per bin.
    pub coordinates: &'a [f32],
    /// The logits of a width, one per bin.
    pub widths: &'a [f32],
    /// The logits of a height, one per bin.
    pub heights: &'a [f32],
}

impl<'a> RegionLogits<'a> {
    /// The logits in `row`, which has [`RegionBins::width`] values.
    ///
    /// # Panics
    /// If it has another number.
    #[must_use]
    pub fn new(bins: RegionBins, row: &'a [f32]) -> Self {
        assert_eq!(row.len(), bins.width(), "a row has the logits of all bins");
        let (coordinates, sizes) = row.split_at(bins.coordinates);
        let (widths, heights) = sizes.split_at(bins.sizes);
        Self { coordinates, widths, heights }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BINS: RegionBins = RegionBins { coordinates: 1024, sizes: 1024 };

    /// Goal: the tables equal those of Moondream, in both directions, and values out of range lead
    /// to the bins at the ends.
    #[test]
    fn bins_and_values_belong_to_each_other() {
        assert_eq!((BINS.coordinate(0), BINS.coordinate(1023)), (0.0, 1.0));
        assert_eq!((BINS.size(0), BINS.size(1023)), (1.0 / 1024.0, 1.0));
        assert!((BINS.coordinate(341) - 1.0 / 3.0).abs() < 1e-7);
        assert!((BINS.size(512) - 0.031_356).abs() < 1e-5, "{}", BINS.size(512));
        for bin in 0..1024 {
            assert_eq!(BINS.coordinate_bin(BINS.coordinate(bin)), bin);
            assert_eq!(BINS.size_bin(BINS.size(bin)), bin);
        }
        for (value, bin) in [(f32::NAN, 0), (-1.0, 0), (0.0, 0), (2.0, 1023), (f32::INFINITY, 1023)]
        {
            assert_eq!((BINS.coordinate_bin(value), BINS.size_bin(value)), (bin, bin), "{value}");
        }
    }

    /// Goal: coordinates and sizes are read back from their tokens, and bins out of range have none.
    #[test]
    fn tokens_are_read_back() {
        let (coordinate, size) = (
            |bin| RegionToken::Coordinate { bin },
            |width_bin, height_bin| RegionToken::Size { width_bin, height_bin },
        );
        let (last, height) = ((1 << 28) - 1, (1 << 14) - 1);
        for region in [coordinate(0), coordinate(last), size(height, 0), size(3, height)] {
            assert_eq!(region.token().and_then(RegionToken::of), Some(region));
        }
        for region in [coordinate(last + 1), size(0, height + 1), size(height + 1, 0)] {
            assert_eq!(region.token(), None);
        }
        assert_eq!([0, 7, 1 << 31].map(RegionToken::of), [None; 3]);
        assert_eq!(format!("{} {}", coordinate(5), size(3, 4)), "[coordinate 5] [size 3 x 4]");
    }

    /// Goal: a row is divided at the bins.
    #[test]
    fn rows_are_divided() {
        let bins = RegionBins { coordinates: 3, sizes: 2 };
        let row: Vec<f32> = (0..bins.width()).map(|value| value as f32).collect();
        let RegionLogits { coordinates, widths, heights } = RegionLogits::new(bins, &row);
        assert_eq!((coordinates, widths, heights), (&row[..3], &row[3..5], &row[5..]));
    }
}
