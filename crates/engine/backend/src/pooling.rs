//! Pooling: how the hidden states of a prompt become one vector, its embedding.

use serde::Serialize;

/// How an embedding is made from the hidden states of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Pooling {
    /// The hidden state of the last token. Only the positions that are not cached are computed.
    Last,
    /// The mean of the hidden states of all tokens. The whole prompt is computed, because hidden
    /// states are not cached.
    Mean,
    /// The hidden state of the first token (CLS). The whole prompt is computed.
    First,
    /// The largest value of each feature over all tokens. The whole prompt is computed.
    Max,
    /// The mean with weights that grow with the position: 1 for the first token, 2 for the second
    /// one and so on. The whole prompt is computed.
    WeightedMean,
    /// The sum divided by the square root of the number of tokens. The whole prompt is computed.
    MeanSqrtLen,
}

impl Pooling {
    /// The name, in lower case.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Last => "last",
            Self::Mean => "mean",
            Self::First => "first",
            Self::Max => "max",
            Self::WeightedMean => "weightedmean",
            Self::MeanSqrtLen => "meansqrtlen",
        }
    }
}

impl std::fmt::Display for Pooling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Pools the hidden states of one prompt, which come in any number of chunks, in order of position.
/// Sums are in f64 and in the order of positions, so that they do not depend on the chunks.
#[derive(Clone, Debug)]
pub struct Pooler {
    pooling: Pooling,
    /// `[hidden_size]`: the sum or the maximum of the states so far, or the first or last one; empty
    /// before the first.
    sum: Vec<f64>,
    /// Number of states so far.
    count: usize,
}

impl Pooler {
    /// Starts a prompt.
    #[must_use]
    pub fn new(pooling: Pooling) -> Self {
        Self { pooling, sum: Vec::new(), count: 0 }
    }

    /// How it pools.
    #[must_use]
    pub fn pooling(&self) -> Pooling {
        self.pooling
    }

    /// Adds hidden states `[rows, hidden_size]`.
    ///
    /// # Panics
    /// If `hidden_size` is 0.
    pub fn push(&mut self, states: &[f32], hidden_size: usize) {
        for state in states.chunks_exact(hidden_size) {
            let values = state.iter().map(|&value| f64::from(value));
            if self.count == 0 || self.pooling == Pooling::Last {
                self.sum.clear();
                self.sum.extend(values);
            } else {
                let all = self.sum.iter_mut();
                match self.pooling {
                    Pooling::First | Pooling::Last => {}
                    Pooling::Max => all.zip(values).for_each(|(all, value)| *all = all.max(value)),
                    Pooling::WeightedMean => {
                        let weight = (self.count + 1) as f64;
                        all.zip(values).for_each(|(all, value)| *all += weight * value);
                    }
                    Pooling::Mean | Pooling::MeanSqrtLen => {
                        all.zip(values).for_each(|(all, value)| *all += value);
                    }
                }
            }
            self.count += 1;
        }
    }

    /// The pooled vector `[hidden_size]`; empty if there was no hidden state.
    #[must_use]
    pub fn finish(&self) -> Vec<f32> {
        let count = self.count.max(1) as f64;
        let divisor = match self.pooling {
            Pooling::Last | Pooling::First | Pooling::Max => 1.0,
            Pooling::Mean => count,
            Pooling::MeanSqrtLen => count.sqrt(),
            Pooling::WeightedMean => count * (count + 1.0) / 2.0,
        };
        self.sum.iter().map(|sum| (sum / divisor) as f32).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: all ways of pooling are right, and independent of how states come in chunks.
    #[test]
    fn pooling_does_not_depend_on_chunks() {
        let states: Vec<f32> = (0..21).map(|i| 0.1 + (i * i % 13) as f32 / 7.0).collect();
        let values = |column: usize| states.iter().skip(column).step_by(3).map(|&v| f64::from(v));
        let each = |of: &dyn Fn(usize) -> f64| (0..3).map(|column| of(column) as f32).collect();
        let weighted = |column| -> f64 {
            (1..).map(f64::from).zip(values(column)).map(|(weight, value)| weight * value).sum()
        };
        for (pooling, expected) in [
            (Pooling::Last, states[18..].to_vec()),
            (Pooling::First, states[..3].to_vec()),
            (Pooling::Mean, each(&|column| values(column).sum::<f64>() / 7.0)),
            (Pooling::MeanSqrtLen, each(&|column| values(column).sum::<f64>() / 7f64.sqrt())),
            (Pooling::WeightedMean, each(&|column| weighted(column) / 28.0)),
            (Pooling::Max, each(&|column| values(column).fold(f64::MIN, f64::max))),
        ] {
            for chunk in [1, 2, 7] {
                let mut pooler = Pooler::new(pooling);
                assert!(pooler.finish().is_empty());
                states.chunks(3 * chunk).for_each(|states| pooler.push(states, 3));
                assert_eq!(pooler.finish(), expected, "{pooling}, chunks of {chunk}");
            }
        }
    }
}
