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
}

impl Pooling {
    /// The name: `last` or `mean`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Last => "last",
            Self::Mean => "mean",
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
    /// `[hidden_size]`: the sum of the states so far, or the last one; empty before the first.
    sum: Vec<f64>,
    /// Number of states in the sum.
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
                self.count = 1;
            } else {
                self.sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
                self.count += 1;
            }
        }
    }

    /// The pooled vector `[hidden_size]`; empty if there was no hidden state.
    #[must_use]
    pub fn finish(&self) -> Vec<f32> {
        let count = self.count.max(1) as f64;
        self.sum.iter().map(|sum| (sum / count) as f32).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: both ways of pooling are right, and independent of how states come in chunks.
    #[test]
    fn pooling_does_not_depend_on_chunks() {
        let states: Vec<f32> = (0..21).map(|i| 0.1 + (i * i % 13) as f32 / 7.0).collect();
        let mean = |column: usize| {
            let values = states.chunks_exact(3).map(|state| f64::from(state[column]));
            (values.sum::<f64>() / 7.0) as f32
        };
        for (pooling, expected) in
            [(Pooling::Last, states[18..].to_vec()), (Pooling::Mean, (0..3).map(mean).collect())]
        {
            for chunk in [1, 2, 7] {
                let mut pooler = Pooler::new(pooling);
                assert!(pooler.finish().is_empty());
                states.chunks(3 * chunk).for_each(|states| pooler.push(states, 3));
                assert_eq!(pooler.finish(), expected, "{pooling}, chunks of {chunk}");
            }
        }
    }
}
