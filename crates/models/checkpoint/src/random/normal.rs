//! A table of quantiles of the standard normal distribution. A uniformly random index into the
//! table selects a normally distributed value.

/// The 65,536 values in ascending order at which the distribution function is `(i + 1/2) / 65536`.
/// Their mean is 0, and their standard deviation is 1 to about three digits.
pub(super) fn quantiles() -> Vec<f32> {
    const COUNT: usize = 1 << 16;
    let mut upper = Vec::with_capacity(COUNT / 2);
    let mut x = 0.0;
    for i in 0..COUNT / 2 {
        let target = (i as f64 + 0.5) / COUNT as f64;
        // Newton's method, started from the previous quantile, converges in a few steps.
        for _ in 0..50 {
            let step = (central_area(x) - target) / density(x);
            x -= step;
            if step.abs() < 1e-9 {
                break;
            }
        }
        upper.push(x as f32);
    }
    upper.iter().rev().map(|x| -x).chain(upper.iter().copied()).collect()
}

/// The probability density at `x`.
fn density(x: f64) -> f64 {
    (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt()
}

/// The area under the density from 0 to `x`, for `x` from 0 to about 6, by Marsaglia's series
/// `x + x^3/3 + x^5/(3*5) + ...`. All terms have the same sign, so nothing cancels.
fn central_area(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    let mut odd = 1.0;
    while term.abs() > 1e-17 * sum.abs() {
        odd += 2.0;
        term *= x * x / odd;
        sum += term;
    }
    density(x) * sum
}
