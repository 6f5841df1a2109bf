//! Rotary position embedding: the frequencies, and how models scale them for longer contexts.

use crate::error::ModelError;

/// How the frequencies differ from `theta^(-2i / head_dim)`.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// No scaling.
    None,
    /// Every frequency is divided by `factor`.
    Linear {
        /// The divisor, at least 1.
        factor: f64,
    },
    /// Llama 3.1: low frequencies are divided by `factor`, high frequencies are unchanged, and
    /// frequencies in between are interpolated.
    Llama3 {
        /// The divisor of low frequencies, at least 1.
        factor: f64,
        /// A frequency is low if its wavelength in positions is above
        /// `original_max_position_embeddings / low_freq_factor`.
        low_freq_factor: f64,
        /// A frequency is high if its wavelength in positions is below
        /// `original_max_position_embeddings / high_freq_factor`.
        high_freq_factor: f64,
        /// Context length in positions of the model's original training.
        original_max_position_embeddings: usize,
    },
    /// `[head_dim / 2]`, all above 0: the divisor of each frequency. GGUF files store Llama 3.1's
    /// scaling in this form.
    Divisors(Vec<f32>),
}

/// One rotary embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies, above 0.
    pub theta: f64,
    /// How the frequencies are scaled.
    pub scaling: RopeScaling,
}

impl Rope {
    /// Checks the ranges of the numbers, and that the angles of all positions are finite. `file` is
    /// the file's name in error messages.
    pub(crate) fn check(
        &self,
        file: &str,
        head_dim: usize,
        max_positions: usize,
    ) -> Result<(), ModelError> {
        let positive = |key: &str, number: f64| {
            if number.is_finite() && number > 0.0 {
                return Ok(());
            }
            Err(ModelError::key(file, key, "a finite number above 0", number))
        };
        positive("rope_theta", self.theta)?;
        match &self.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } | RopeScaling::Llama3 { factor, .. } => {
                positive("rope_scaling.factor", *factor)?;
            }
            RopeScaling::Divisors(divisors) if divisors.len() != head_dim / 2 => {
                let expected = format!("{} numbers (head_dim / 2)", head_dim / 2);
                return Err(ModelError::key(file, "rope_freqs", expected, divisors.len()));
            }
            RopeScaling::Divisors(divisors) => {
                divisors.iter().try_for_each(|d| positive("rope_freqs", f64::from(*d)))?;
            }
        }
        let angle = |frequency: f32| frequency * max_positions as f32;
        match self.inverse_frequencies(head_dim).into_iter().find(|f| !angle(*f).is_finite()) {
            None => Ok(()),
            Some(got) => {
                let expected = "a base and a scaling with finite frequencies";
                Err(ModelError::key(file, "rope_theta", expected, format!("the frequency {got}")))
            }
        }
    }

    /// The inverse frequencies, `[head_dim / 2]`: at position `p`, pair `i` of a head is rotated by
    /// `p * f[i]` radians. Computed in f32 with the same operations as in transformers.
    #[must_use]
    pub fn inverse_frequencies(&self, head_dim: usize) -> Vec<f32> {
        let theta = self.theta as f32;
        let plain = (0..head_dim / 2).map(|i| 1.0 / theta.powf((2 * i) as f32 / head_dim as f32));
        match &self.scaling {
            RopeScaling::None => plain.collect(),
            RopeScaling::Linear { factor } => plain.map(|f| f / *factor as f32).collect(),
            RopeScaling::Divisors(divisors) => plain.zip(divisors).map(|(f, d)| f / d).collect(),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                let (factor, low) = (*factor as f32, *low_freq_factor as f32);
                let high = *high_freq_factor as f32;
                let context = *original_max_position_embeddings as f32;
                plain.map(|f| llama3_frequency(f, factor, low, high, context)).collect()
            }
        }
    }
}

/// Scales one frequency by Llama 3.1's rule.
fn llama3_frequency(frequency: f32, factor: f32, low: f32, high: f32, context: f32) -> f32 {
    let wavelength = 2.0 * std::f32::consts::PI / frequency;
    if wavelength > context / low {
        return frequency / factor;
    }
    if wavelength < context / high {
        return frequency;
    }
    let smooth = (context / wavelength - low) / (high - low);
    (1.0 - smooth) * frequency / factor + smooth * frequency
}
