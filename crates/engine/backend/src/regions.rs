//! Coordinates and sizes as tokens: the bins into which they are divided, and the logits of the
//! bins.

use stolon_kvcache::TokenSpan;

/// The numbers of bins into which a model divides coordinates and sizes. Each bin is one token
/// ([`TokenSpan`](stolon_kvcache::TokenSpan)).
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
        match TokenSpan::of_value(token) {
            Some(TokenSpan::Coordinate { bin }) => (bin as usize) < self.coordinates,
            Some(TokenSpan::Size { width_bin, height_bin }) => {
                (width_bin.max(height_bin) as usize) < self.sizes
            }
            Some(TokenSpan::Image { .. }) | None => false,
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

    /// Goal: a row is divided at the bins.
    #[test]
    fn rows_are_divided() {
        let bins = RegionBins { coordinates: 3, sizes: 2 };
        let row: Vec<f32> = (0..bins.width()).map(|value| value as f32).collect();
        let RegionLogits { coordinates, widths, heights } = RegionLogits::new(bins, &row);
        assert_eq!((coordinates, widths, heights), (&row[..3], &row[3..5], &row[5..]));
    }
}
