//! Rotary position embedding: the frequencies, and their scaling for longer contexts.

use std::ops::Range;

use super::keys::SIZE_MAX;
use crate::error::ModelError;

/// How the frequencies are scaled relative to `theta^(-2i / rotary_dim)`.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// No scaling.
    None,
    /// Every frequency is divided by `factor`.
    Linear {
        /// The divisor, above 0.
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
    /// YaRN (Peng et al., 2023): low frequencies are divided by `factor`, high frequencies are
    /// unchanged, and frequencies in between are interpolated linearly in the index of the
    /// frequency.
    Yarn {
        /// The divisor of low frequencies, at least 1.
        factor: f64,
        /// A frequency is high if it makes more than this number of turns within
        /// `original_max_position_embeddings`. Above 0.
        beta_fast: f64,
        /// A frequency is low if it makes fewer than this number of turns within
        /// `original_max_position_embeddings`. Above 0.
        beta_slow: f64,
        /// Whether the bounds of the interpolation are rounded to whole indices, away from each
        /// other.
        truncate: bool,
        /// Context length in positions of the model's original training.
        original_max_position_embeddings: usize,
        /// Factor of rotated queries and keys, above 0.
        attention_factor: f32,
    },
    /// Only the first pairs of a head are rotated. Their frequencies are the same as if all pairs
    /// were rotated, and the other pairs have the frequency 0 (`proportional` in the files of Gemma
    /// 4).
    FirstPairs {
        /// Number of pairs that are rotated: at most half of the elements of a head.
        pairs: usize,
        /// The divisor of the frequencies, above 0.
        factor: f64,
    },
    /// A divisor for each frequency. This is Phi-3's LongRoPE (Ding et al., 2024). GGUF files also
    /// store Llama 3.1's scaling in this form.
    Divisors {
        /// `[rotary_dim / 2]`, all above 0.
        divisors: Vec<f32>,
        /// Factor of rotated queries and keys, above 0.
        attention_factor: f32,
        /// LongRoPE's divisors for shorter contexts; `None` if there are none.
        short: Option<ShortContext>,
    },
}

/// The divisors of LongRoPE for contexts up to a maximum length.
#[derive(Clone, Debug, PartialEq)]
pub struct ShortContext {
    /// Maximum context length in positions, which is the context length of the model's original
    /// training.
    pub length: usize,
    /// `[rotary_dim / 2]`, all above 0.
    pub divisors: Vec<f32>,
}

impl RopeScaling {
    /// LongRoPE has divisors for contexts up to `original`, the length of the model's original
    /// training, and others for longer contexts. `read(true)` reads the divisors for longer
    /// contexts, and `read(false)` the others. `missing` makes the error for divisors that do not
    /// exist.
    ///
    /// transformers chooses by the length of each sequence, so all keys of a sequence change when
    /// it becomes longer than `original`. But cached keys must not depend on later tokens.
    /// Therefore the context length decides, as in vLLM and llama.cpp. It is `max_positions`, the
    /// model's context length, or the limit that users set ([`limit`](Self::limit)).
    pub(crate) fn long_rope<E>(
        max_positions: usize,
        original: usize,
        attention_factor: f64,
        read: impl Fn(bool) -> Result<Option<Vec<f32>>, E>,
        missing: impl Fn(bool) -> E,
    ) -> Result<Self, E> {
        let is_long = max_positions > original;
        let divisors = read(is_long)?.ok_or_else(|| missing(is_long))?;
        let other = if is_long { read(false)? } else { None };
        let short = other.map(|divisors| ShortContext { length: original, divisors });
        Ok(Self::Divisors { divisors, attention_factor: attention_factor as f32, short })
    }

    /// Chooses the divisors for contexts of at most `max_positions`. Returns a note for users about
    /// the choice, if there was one.
    pub(crate) fn limit(&mut self, max_positions: Option<usize>) -> Option<String> {
        let Self::Divisors { divisors, short: short @ Some(_), .. } = self else { return None };
        let original = short.as_ref().map_or(0, |short| short.length);
        let is_short = max_positions.is_some_and(|max_positions| max_positions <= original);
        if let Some(chosen) = short.take_if(|_| is_short) {
            *divisors = chosen.divisors;
            return Some(format!("LongRoPE: using the factors for at most {original} tokens"));
        }
        Some(format!(
            "LongRoPE: using the factors for more than {original} tokens, also for shorter \
             texts; a maximum model length of at most {original} selects the others"
        ))
    }

    /// YaRN's attention factor if the configuration does not have one: `0.1 ln(factor) + 1`.
    pub(crate) fn yarn_attention_factor(factor: f64) -> f64 {
        0.1 * factor.max(1.0).ln() + 1.0
    }

    /// YaRN's factor of the scores of latent attention. `mscale_all_dim` is the value of this key,
    /// or 0.
    pub(crate) fn yarn_score_factor(factor: f64, mscale_all_dim: f64) -> f32 {
        let magnitude = mscale_all_dim * (Self::yarn_attention_factor(factor) - 1.0) + 1.0;
        (magnitude * magnitude) as f32
    }
}

/// One rotary embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies, above 0.
    pub theta: f64,
    /// How the frequencies are scaled.
    pub scaling: RopeScaling,
    /// For rotary positions with three coordinates (interleaved M-RoPE of Qwen3-VL and Qwen3.5),
    /// the number of pairs of a head that each coordinate rotates: the temporal position, the row
    /// and the column. See [`axis`](Self::axis). `None` if positions have one coordinate, which
    /// rotates all pairs.
    pub sections: Option<[usize; 3]>,
}

impl Rope {
    /// Checks the ranges of the numbers, and that the angles of all positions are finite. `file` is
    /// the file's name in error messages.
    pub(crate) fn check(
        &self,
        file: &str,
        rotary_dim: usize,
        max_positions: usize,
    ) -> Result<(), ModelError> {
        let positive = |key: &str, number: f64| {
            if number.is_finite() && number > 0.0 {
                return Ok(());
            }
            Err(ModelError::key(file, key, "a finite number above 0", number))
        };
        positive("rope_theta", self.theta)?;
        if let Some(sections) = self.sections
            && sections.iter().try_fold(0_usize, |sum, n| sum.checked_add(*n))
                != Some(rotary_dim / 2)
        {
            let expected = format!("numbers of pairs whose sum is {}", rotary_dim / 2);
            let key = "rope_scaling.mrope_section";
            return Err(ModelError::key(file, key, expected, format!("{sections:?}")));
        }
        match &self.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } | RopeScaling::Llama3 { factor, .. } => {
                positive("rope_scaling.factor", *factor)?;
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, attention_factor, .. } => {
                positive("rope_scaling.factor", *factor)?;
                positive("rope_scaling.beta_fast", *beta_fast)?;
                positive("rope_scaling.beta_slow", *beta_slow)?;
                positive("rope_scaling.attention_factor", f64::from(*attention_factor))?;
            }
            RopeScaling::FirstPairs { pairs, factor } => {
                positive("rope_scaling.factor", *factor)?;
                if *pairs > rotary_dim / 2 {
                    let expected = format!("a share of the {} pairs of a head", rotary_dim / 2);
                    return Err(ModelError::key(file, "partial_rotary_factor", expected, pairs));
                }
            }
            RopeScaling::Divisors { divisors, attention_factor, short } => {
                for divisors in [divisors].into_iter().chain(short.iter().map(|s| &s.divisors)) {
                    if divisors.len() != rotary_dim / 2 {
                        let expected =
                            format!("{} divisors (half of the rotated elements)", rotary_dim / 2);
                        return Err(ModelError::key(
                            file,
                            "rope_scaling",
                            expected,
                            divisors.len(),
                        ));
                    }
                    divisors.iter().try_for_each(|d| positive("rope_scaling", f64::from(*d)))?;
                }
                positive("rope_scaling.attention_factor", f64::from(*attention_factor))?;
            }
        }
        let angle = |frequency: f32| frequency * max_positions as f32;
        match self.inverse_frequencies(rotary_dim).into_iter().find(|f| !angle(*f).is_finite()) {
            None => Ok(()),
            Some(got) => {
                let expected = "a base and a scaling with finite frequencies";
                Err(ModelError::key(file, "rope_theta", expected, format!("the frequency {got}")))
            }
        }
    }

    /// The coordinate that rotates pair `pair` of a head: 0 for the temporal position, 1 for the
    /// row and 2 for the column. Rows and columns each rotate every third pair until they have as
    /// many as [`sections`](Self::sections) says. The temporal position rotates all other pairs.
    #[must_use]
    pub fn axis(&self, pair: usize) -> usize {
        let Some(sections) = self.sections else { return 0 };
        let axis = pair % 3;
        if pair / 3 < sections[axis] { axis } else { 0 }
    }

    /// Factor of the cosines and sines, and therefore of rotated queries and keys.
    #[must_use]
    pub fn attention_factor(&self) -> f32 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. }
            | RopeScaling::Divisors { attention_factor, .. } => attention_factor,
            _ => 1.0,
        }
    }

    /// The cosines and sines of `positions`, `[positions, rotary_dim / 2]` each, multiplied by
    /// [`attention_factor`](Self::attention_factor). At position `p`, pair `i` of a head consists
    /// of its elements `i` and `rotary_dim / 2 + i`.
    #[must_use]
    pub fn rotations(&self, rotary_dim: usize, positions: Range<usize>) -> (Vec<f32>, Vec<f32>) {
        let (frequencies, factor) = (self.inverse_frequencies(rotary_dim), self.attention_factor());
        // The product is rounded to f32 before the cosine and sine, as in transformers.
        let angles = positions.flat_map(|position| {
            frequencies.iter().map(move |frequency| position as f32 * frequency)
        });
        angles.map(|angle| (factor * angle.cos(), factor * angle.sin())).unzip()
    }

    /// The context length in positions for which the scaling is designed. `max_positions` is the
    /// context length of the configuration. With YaRN, the result is longer, because configurations
    /// often keep the context length of the original training.
    pub(crate) fn context(&self, max_positions: usize) -> usize {
        match self.scaling {
            RopeScaling::Yarn { factor, original_max_position_embeddings, .. } => {
                let scaled = original_max_position_embeddings as f64 * factor;
                max_positions.max(scaled.min(SIZE_MAX as f64) as usize)
            }
            _ => max_positions,
        }
    }

    /// The inverse frequencies, `[rotary_dim / 2]`: at position `p`, pair `i` of a head is rotated
    /// by `p * f[i]` radians. Computed in f32 with the same operations as in transformers.
    #[must_use]
    pub fn inverse_frequencies(&self, rotary_dim: usize) -> Vec<f32> {
        let theta = self.theta as f32;
        let plain =
            (0..rotary_dim / 2).map(|i| 1.0 / theta.powf((2 * i) as f32 / rotary_dim as f32));
        match &self.scaling {
            RopeScaling::None => plain.collect(),
            RopeScaling::Linear { factor } => plain.map(|f| f / *factor as f32).collect(),
            RopeScaling::FirstPairs { pairs, factor } => {
                let rotated = plain.take(*pairs).map(|f| f / *factor as f32);
                let all = rotated.chain(std::iter::repeat(0.0));
                all.take(rotary_dim / 2).collect()
            }
            RopeScaling::Divisors { divisors, .. } => {
                plain.zip(divisors).map(|(f, d)| f / d).collect()
            }
            RopeScaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                truncate,
                original_max_position_embeddings,
                ..
            } => {
                let context = *original_max_position_embeddings as f64;
                let index = |turns| yarn_index(turns, rotary_dim, self.theta, context);
                let (mut low, mut high) = (index(*beta_fast), index(*beta_slow));
                if *truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let (low, high) = (low.max(0.0) as f32, high.min(rotary_dim as f64 - 1.0) as f32);
                let width = if low == high { 0.001 } else { high - low };
                let frequency = |(i, plain): (usize, f32)| {
                    let share = 1.0 - ((i as f32 - low) / width).clamp(0.0, 1.0);
                    plain / *factor as f32 * (1.0 - share) + plain * share
                };
                plain.enumerate().map(frequency).collect()
            }
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

/// The unrounded index of the frequency that makes `turns` turns within `context` positions.
fn yarn_index(turns: f64, rotary_dim: usize, theta: f64, context: f64) -> f64 {
    let wavelength = context / (turns * 2.0 * std::f64::consts::PI);
    rotary_dim as f64 * wavelength.ln() / (2.0 * theta.ln())
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
