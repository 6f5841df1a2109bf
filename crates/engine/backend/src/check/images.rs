//! Checks the images of a slice.

use super::malformed;
use crate::{BackendError, BackendSpec, SequenceSlice, SliceImage};

/// Checks the images of a slice: their order, where they lie, and their embeddings.
pub(super) fn check_images(
    index: usize,
    slice: &SequenceSlice,
    spec: &BackendSpec,
) -> Result<(), BackendError> {
    if !slice.images.is_empty() && spec.image_width.is_none() {
        return Err(malformed(index, format_args!("expected no image, which is not supported")));
    }
    let (mut before, end) = (slice.start, slice.start + slice.token_count);
    for image in &slice.images {
        let SliceImage { start, len, full_attention, columns, embeddings } = image;
        let image_end = start.saturating_add(*len);
        let is_inside = *start >= slice.start && image_end <= end;
        let overlaps = *start < end && image_end > before;
        let follows = *start >= before || before == slice.start;
        if !overlaps || !follows || *full_attention && !is_inside {
            let all = if *full_attention { "all of" } else { "some of" };
            let reason = format_args!(
                "expected {all} an image within {before}..{end}, got {start}..{image_end}"
            );
            return Err(malformed(index, reason));
        }
        let (values, expected) = (embeddings.values.len(), spec.image_values(*len));
        if values != expected {
            let reason = format_args!(
                "expected {expected} values for an image of {len} positions, got {values}"
            );
            return Err(malformed(index, reason));
        }
        if *columns > 0 && !len.is_multiple_of(*columns) {
            let reason =
                format_args!("expected an image in rows of {columns}, got {len} positions");
            return Err(malformed(index, reason));
        }
        before = image_end;
    }
    check_lag(index, slice)
}

/// Checks that the images before a slice have not skipped more rotary positions than there are
/// positions.
fn check_lag(index: usize, slice: &SequenceSlice) -> Result<(), BackendError> {
    let first = slice.images.first().map_or(slice.start, |image| image.start.min(slice.start));
    match slice.rotary_lag <= first {
        true => Ok(()),
        false => {
            let got = slice.rotary_lag;
            Err(malformed(index, format_args!("expected a lag of at most {first}, got {got}")))
        }
    }
}
