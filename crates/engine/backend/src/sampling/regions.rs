//! Coordinates and sizes, which take the places of tokens of the vocabulary.

use super::{Sampled, SamplerState, SamplingError, select};
use crate::regions::{RegionBins, RegionLogits};

impl SamplerState {
    /// Chooses the next token from a row that ends with the logits of `bins`: the request's processor
    /// may replace the token of the vocabulary by a coordinate or a size. The log-probability is
    /// still the one of the token of the vocabulary.
    pub(super) fn choose_region(
        &self,
        row: &mut [f32],
        bins: RegionBins,
    ) -> Result<Sampled, SamplingError> {
        assert!(row.len() >= bins.width(), "a row ends with the logits of all bins");
        let (logits, regions) = row.split_at_mut(row.len() - bins.width());
        select::best(regions)?;
        let mut sampled = self.choose(logits)?;
        if let Some(processor) = &self.params.processor {
            let regions = RegionLogits::new(bins, regions);
            let token = processor.replace_caught(&self.output, sampled.token, &regions)?;
            if token as usize >= logits.len() && !bins.have(token) {
                let vocab_size = logits.len();
                let reason = format!("expected a token below {vocab_size} or a bin, got {token}");
                return Err(SamplingError::ProcessorFailed { reason });
            }
            sampled.token = token;
        }
        Ok(sampled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::regions::RegionToken;
    use crate::sampling::{LogitsProcessor, SamplingParams, SharedProcessor};

    /// Excludes the token 1, and replaces the first token by this one.
    struct First(u32);

    impl LogitsProcessor for First {
        fn process(&self, _output: &[u32], logits: &mut [f32]) -> Result<(), SamplingError> {
            logits[1] = f32::NEG_INFINITY;
            Ok(())
        }

        fn replace(&self, output: &[u32], token: u32, regions: &RegionLogits<'_>) -> u32 {
            assert_eq!((token, regions.widths.len(), regions.heights), (0, 2, &[8.0, 9.0][..]));
            if output.is_empty() { self.0 } else { token }
        }
    }

    /// Goal: the processor replaces a token of the vocabulary or keeps it, its results count as
    /// output, and broken logits of bins and unknown tokens end the request.
    #[test]
    fn processors_replace_tokens() {
        let bins = RegionBins { coordinates: 3, sizes: 2 };
        let row = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0];
        let sampler = |token| {
            let processor = Some(SharedProcessor::new(First(token)));
            let params = SamplingParams { processor, ..SamplingParams::default() };
            SamplerState::new(params, &[]).with_regions(bins)
        };
        let coordinate = |bin| RegionToken::Coordinate { bin }.token().expect("a token");
        let (mut broken, mut state) = (row, sampler(coordinate(2)));
        broken[4] = f32::NAN;
        let error = state.sample(&mut broken).expect_err("a NaN");
        assert!(matches!(error, SamplingError::BadLogit { .. }), "{error}");
        for token in [coordinate(2), 0] {
            let sampled = state.sample(&mut row.clone()).expect("good logits");
            assert_eq!(sampled, Sampled { token, logprob: None });
        }
        assert_eq!(state.output, [coordinate(2), 0]);
        for unknown in [2, coordinate(3)] {
            let error = sampler(unknown).sample(&mut row.clone());
            let error = error.expect_err("an unknown token").to_string();
            assert_eq!(error, format!("expected a token below 2 or a bin, got {unknown}"));
        }
    }
}
