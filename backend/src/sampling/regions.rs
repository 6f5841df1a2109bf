//! Coordinates and sizes, which a request's processor chooses from the logits of their bins.

use super::{Sampled, SamplerState, SamplingError, select};
use crate::regions::{RegionBins, RegionLogits};

impl SamplerState {
    /// As [`SamplerState::sample`], for a row that ends with the logits of `bins`: the request's
    /// processor may choose a coordinate or a size from them, which has no log-probability.
    ///
    /// # Errors
    /// As for [`SamplerState::sample`], also for the logits of bins.
    ///
    /// # Panics
    /// If the row is shorter than the logits of the bins.
    pub fn sample_regions(
        &mut self,
        row: &mut [f32],
        bins: RegionBins,
    ) -> Result<Sampled, SamplingError> {
        assert!(row.len() >= bins.width(), "a row ends with the logits of all bins");
        let (logits, regions) = row.split_at_mut(row.len() - bins.width());
        if let Some(processor) = self.params.processor.clone() {
            select::best(logits)?;
            select::best(regions)?;
            let regions = RegionLogits::new(bins, regions);
            if let Some(token) = processor.choose_caught(&self.output, logits, &regions)? {
                self.observe(token);
                return Ok(Sampled { token, logprob: None });
            }
        }
        self.sample(logits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::{LogitsProcessor, SamplingParams, SharedProcessor};

    /// Chooses the best coordinate as the first token, and samples the others.
    struct First;

    impl LogitsProcessor for First {
        fn process(&self, output: &[u32], logits: &mut [f32]) -> Result<(), SamplingError> {
            assert_eq!(output, [1 << 31]);
            logits[1] = f32::NEG_INFINITY;
            Ok(())
        }

        fn choose(
            &self,
            output: &[u32],
            logits: &[f32],
            regions: &RegionLogits<'_>,
        ) -> Option<u32> {
            assert_eq!(
                (logits.len(), regions.widths.len(), regions.heights),
                (2, 2, &[8.0, 9.0][..])
            );
            output.is_empty().then_some(1 << 31)
        }
    }

    /// Goal: the processor chooses a token from the logits of bins or leaves it to the sampler, all
    /// tokens count as output, and broken logits of bins end the request.
    #[test]
    fn processors_choose_regions() {
        let bins = RegionBins { coordinates: 3, sizes: 2 };
        let row = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0];
        let processor = Some(SharedProcessor::new(First));
        let params = SamplingParams { processor, ..SamplingParams::default() };
        let mut sampler = SamplerState::new(params, &[]);
        let mut broken = row;
        broken[4] = f32::NAN;
        let error = sampler.sample_regions(&mut broken, bins).expect_err("a NaN");
        assert!(matches!(error, SamplingError::BadLogit { .. }), "{error}");
        for token in [1 << 31, 0] {
            let sampled = sampler.sample_regions(&mut row.clone(), bins).expect("good logits");
            assert_eq!(sampled, Sampled { token, logprob: None });
        }
    }
}
