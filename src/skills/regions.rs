//! Points and boxes: which tokens a model may choose for them, and how the tokens are read.

use stolon_backend::{LogitsProcessor, RegionBins, RegionLogits, RegionToken, SamplingError};

use crate::{Completion, ModelInfo, PromptPart};

/// A point in an image. Both coordinates are from 0, the left or the upper edge, to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// As a fraction of the width.
    pub x: f32,
    /// As a fraction of the height.
    pub y: f32,
}

/// A box around a thing in an image. All coordinates are from 0, the left or the upper edge, to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BoundingBox {
    /// The left edge.
    pub x_min: f32,
    /// The upper edge.
    pub y_min: f32,
    /// The right edge.
    pub x_max: f32,
    /// The lower edge.
    pub y_max: f32,
}

/// A place in an image that a question refers to ([`Request::query_about`]).
///
/// [`Request::query_about`]: crate::Request::query_about
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SpatialRef {
    /// A point.
    Point(Point),
    /// A box, which stands for the thing in it.
    Box(BoundingBox),
}

impl SpatialRef {
    /// The parts of a prompt that name the place: the coordinates of a point, or the coordinates of
    /// the center of a box and its size. `None` for numbers that are out of order or range.
    pub(super) fn parts(&self) -> Option<Vec<PromptPart>> {
        let is_known = |low: f32, high: f32| 0.0 <= low && low <= high && high <= 1.0;
        match *self {
            SpatialRef::Point(Point { x, y }) if is_known(x, x) && is_known(y, y) => {
                Some([x, y].map(PromptPart::Coordinate).into())
            }
            SpatialRef::Box(BoundingBox { x_min, y_min, x_max, y_max })
                if is_known(x_min, x_max) && is_known(y_min, y_max) =>
            {
                Some(vec![
                    PromptPart::Coordinate(x_min.midpoint(x_max)),
                    PromptPart::Coordinate(y_min.midpoint(y_max)),
                    PromptPart::Size { width: x_max - x_min, height: y_max - y_min },
                ])
            }
            SpatialRef::Point(_) | SpatialRef::Box(_) => None,
        }
    }
}

impl Completion {
    /// The points in the answer to [`Request::point`](crate::Request::point). A last one that is
    /// cut off is left out.
    #[must_use]
    pub fn points(&self, model: &ModelInfo) -> Vec<Point> {
        model.regions.map(|bins| points(&self.token_ids, bins)).unwrap_or_default()
    }

    /// The boxes in the answer to [`Request::detect`](crate::Request::detect). A last one that is
    /// cut off is left out.
    #[must_use]
    pub fn boxes(&self, model: &ModelInfo) -> Vec<BoundingBox> {
        let Some(bins) = model.regions else { return Vec::new() };
        let regions: Vec<RegionToken> = regions(&self.token_ids).collect();
        let boxes = regions.chunks_exact(3).filter_map(|regions| match regions {
            &[
                RegionToken::Coordinate { bin: x },
                RegionToken::Coordinate { bin: y },
                RegionToken::Size { width_bin, height_bin },
            ] => Some(bounding_box(bins, [x, y], [width_bin, height_bin])),
            _ => None,
        });
        boxes.collect()
    }
}

/// The points among tokens. A last one that is cut off is left out.
pub(super) fn points(tokens: &[u32], bins: RegionBins) -> Vec<Point> {
    let coordinates: Vec<f32> = regions(tokens)
        .filter_map(|region| match region {
            RegionToken::Coordinate { bin } => Some(bins.coordinate(bin)),
            _ => None,
        })
        .collect();
    coordinates.chunks_exact(2).map(|point| Point { x: point[0], y: point[1] }).collect()
}

/// The coordinates and sizes among tokens.
fn regions(tokens: &[u32]) -> impl Iterator<Item = RegionToken> {
    tokens.iter().filter_map(|token| RegionToken::of(*token))
}

/// The box around a center, within the image.
fn bounding_box(bins: RegionBins, center: [u32; 2], size: [u32; 2]) -> BoundingBox {
    let [[x_min, x_max], [y_min, y_max]] = [0, 1].map(|axis| {
        let (center, half) = (bins.coordinate(center[axis]), bins.size(size[axis]) / 2.0);
        [(center - half).max(0.0), (center + half).min(1.0)]
    });
    BoundingBox { x_min, y_min, x_max, y_max }
}

/// Chooses the tokens of points or boxes: a horizontal and a vertical coordinate, for boxes a size,
/// and so on, until the model ends the list in place of a horizontal coordinate. The most likely
/// bin is chosen; among equally likely ones, the first.
#[derive(Clone, Copy, Debug)]
pub(super) struct Finder {
    pub(super) boxes: bool,
    /// The token in whose place a coordinate is chosen.
    pub(super) coordinate: u32,
    /// The token that ends the list.
    pub(super) end: u32,
}

impl Finder {
    /// Which part of a point or a box follows `output`, from 0.
    fn stage(&self, output: &[u32]) -> usize {
        output.len() % if self.boxes { 3 } else { 2 }
    }
}

impl LogitsProcessor for Finder {
    fn process(&self, output: &[u32], logits: &mut [f32]) -> Result<(), SamplingError> {
        let allowed = match self.stage(output) {
            0 => [self.end, self.coordinate],
            _ => [self.coordinate; 2],
        };
        let allowed = allowed.map(|token| (token, logits.get(token as usize).copied()));
        logits.fill(f32::NEG_INFINITY);
        for (token, logit) in allowed {
            if let Some(logit) = logit {
                logits[token as usize] = logit;
            }
        }
        Ok(())
    }

    fn replace(&self, output: &[u32], token: u32, regions: &RegionLogits<'_>) -> u32 {
        match self.stage(output) {
            0 if token == self.end => token,
            0 | 1 => coordinate(regions).unwrap_or(token),
            _ => {
                let [width_bin, height_bin] = [regions.widths, regions.heights].map(largest);
                RegionToken::Size { width_bin, height_bin }.token().unwrap_or(token)
            }
        }
    }

    fn is_ready(&self, _output: &[u32]) -> bool {
        true
    }
}

/// The token of the most likely coordinate.
pub(super) fn coordinate(regions: &RegionLogits<'_>) -> Option<u32> {
    RegionToken::Coordinate { bin: largest(regions.coordinates) }.token()
}

/// The index of the largest value; the first one among equal values.
fn largest(values: &[f32]) -> u32 {
    let mut best = 0;
    for (index, value) in values.iter().enumerate() {
        if *value > values[best] {
            best = index;
        }
    }
    best as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: points have two coordinates, boxes a size in addition, and the list ends only in place
    /// of a horizontal coordinate.
    #[test]
    fn tokens_are_chosen_in_turn() {
        let coordinate = |bin| RegionToken::Coordinate { bin }.token().expect("a bin");
        let size = RegionToken::Size { width_bin: 1, height_bin: 0 }.token();
        let regions = RegionLogits {
            coordinates: &[0.0, 2.0, 2.0],
            widths: &[1.0, 3.0],
            heights: &[4.0, 4.0],
        };
        for (boxes, period) in [(false, 2), (true, 3)] {
            let finder = Finder { boxes, coordinate: 2, end: 0 };
            for len in 0..7 {
                let output = vec![coordinate(0); len];
                let (mut logits, none) = ([1.0, 9.0, 0.5], f32::NEG_INFINITY);
                finder.process(&output, &mut logits).expect("nothing can fail");
                let end = if len % period == 0 { 1.0 } else { none };
                assert_eq!(logits, [end, none, 0.5]);
                let expected = match len % period {
                    2 => size,
                    _ => Some(coordinate(1)),
                };
                assert_eq!(Some(finder.replace(&output, 2, &regions)), expected);
                if len % period == 0 {
                    assert_eq!(finder.replace(&output, 0, &regions), 0);
                }
            }
        }
    }

    /// Goal: boxes are around their centers, and within the image.
    #[test]
    fn boxes_are_within_the_image() {
        let bins = RegionBins { coordinates: 5, sizes: 11 };
        let check = |center, size, expected: [f64; 4]| {
            let BoundingBox { x_min, y_min, x_max, y_max } = bounding_box(bins, center, size);
            for (found, expected) in [x_min, y_min, x_max, y_max].into_iter().zip(expected) {
                // Sizes are powers of 2 that are computed in f32.
                assert!((f64::from(found) - expected).abs() < 1e-6, "{found}, not {expected}");
                assert!((0.0..=1.0).contains(&found), "{found}");
            }
        };
        // A width of a half and a height of 1.
        check([1, 2], [9, 10], [0.0, 0.0, 0.5, 1.0]);
        check([4, 0], [8, 9], [0.875, 0.0, 1.0, 0.25]);
    }
}
