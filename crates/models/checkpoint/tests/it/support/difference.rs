//! How much computed values differ from expected ones.

/// Maximum difference of the elements of two rows, in standard deviations of `expected`.
pub(crate) fn difference(got: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(got.len(), expected.len());
    let count = expected.len() as f32;
    let mean = expected.iter().sum::<f32>() / count;
    let variance = expected.iter().map(|value| (value - mean).powi(2)).sum::<f32>() / count;
    let differences = got.iter().zip(expected).map(|(a, b)| (a - b).abs());
    // A NaN must not be lost in the maximum.
    let largest = differences.fold(0.0, |largest, d| if d <= largest { largest } else { d });
    largest / variance.sqrt()
}
