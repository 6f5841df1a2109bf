//! *n accepted of m proposed*: sampling one or several tokens of a sequence in one step.
//!
//! The last slice of a sequence has a row for its last token and, behind it, one for each token that
//! was proposed to follow. Each row is sampled as in plain decoding: with the sampler that has
//! counted all tokens before it, so with the same random number, penalties, processor and
//! log-probabilities. As long as the token that was sampled is the one that was proposed, the next
//! row is the row that plain decoding would have computed, and it is sampled, too. All rows after
//! the first other token belong to positions that never existed, and are dropped.
//!
//! So a step yields one token more than it has accepted, and they are the tokens of plain decoding,
//! bit for bit, whatever was proposed.

use stolon_backend::{Sampled, SamplerState, SamplingError};

/// The rows of a sequence from which tokens are sampled, `[1 + proposals, width]`.
#[derive(Debug)]
pub(crate) struct Rows<'a> {
    /// The rows, as the backend returned them. Sampling overwrites them.
    pub(crate) logits: &'a mut [f32],
    /// Number of values of a row.
    pub(crate) width: usize,
    /// The tokens that were proposed, of which each has the row after the one that it may be
    /// sampled from.
    pub(crate) proposals: &'a [u32],
}

/// The tokens that were sampled from the rows of a sequence.
#[derive(Debug, Default)]
pub(crate) struct Verified {
    /// The tokens in their order: all but the last one had been proposed.
    pub(crate) sampled: Vec<Sampled>,
    /// The row after them could not be sampled from.
    pub(crate) failure: Option<SamplingError>,
    /// The logits processor was not ready for the row after them, which has this number.
    pub(crate) not_ready: Option<usize>,
}

impl Rows<'_> {
    /// Samples a token from each row, up to the first that is not the proposed one. `waits` is
    /// whether to wait for a logits processor that is not ready.
    pub(crate) fn verify(self, sampler: &mut SamplerState, waits: bool) -> Verified {
        let Rows { logits, width, proposals } = self;
        let mut verified = Verified::default();
        for (index, row) in logits.chunks_exact_mut(width.max(1)).enumerate() {
            if !waits && !sampler.is_ready() {
                verified.not_ready = Some(index);
                break;
            }
            let sampled = match sampler.sample(row) {
                Ok(sampled) => sampled,
                Err(failure) => {
                    verified.failure = Some(failure);
                    break;
                }
            };
            let is_proposed = proposals.get(index) == Some(&sampled.token);
            verified.sampled.push(sampled);
            if !is_proposed {
                break;
            }
        }
        verified
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};
    use stolon_backend::SamplingParams;

    use super::*;

    const VOCAB: usize = 8;

    /// The row after `tokens`, a function of them all.
    fn row(tokens: &[u32]) -> Vec<f32> {
        let seed = tokens.iter().fold(7_u64, |seed, &t| seed.wrapping_mul(31) + u64::from(t));
        let mut random = SmallRng::seed_from_u64(seed);
        (0..VOCAB).map(|_| random.random_range(-3.0..3.0)).collect()
    }

    fn sampler(seed: u64, prompt: &[u32]) -> SamplerState {
        let params = SamplingParams {
            temperature: [0.0, 0.8, 1.5][seed as usize % 3],
            top_k: [None, Some(4)][seed as usize % 2],
            repetition_penalty: [1.0, 1.3][seed as usize / 2 % 2],
            presence_penalty: 0.5,
            logit_bias: [(3, 1.0)].into(),
            logprobs: Some(2),
            seed: Some(seed),
            ..SamplingParams::default()
        };
        SamplerState::new(params, prompt)
    }

    /// Goal: whatever is proposed, the sampled tokens with their log-probabilities are those of
    /// plain decoding, and there is one more than were accepted.
    #[test]
    fn any_proposals_give_the_tokens_of_plain_decoding() {
        let mut random = SmallRng::seed_from_u64(5);
        let mut accepted = 0;
        for seed in 0..200 {
            let prompt = [1, 2, 3];
            let (mut plain, mut tokens) = (sampler(seed, &prompt), prompt.to_vec());
            let mut expected = Vec::new();
            for _ in 0..20 {
                let sampled = plain.sample(&mut row(&tokens)).expect("a finite row");
                tokens.push(sampled.token);
                expected.push(sampled);
            }
            let (mut state, mut got) = (sampler(seed, &prompt), Vec::new());
            while got.len() < expected.len() - 6 {
                let done = prompt.len() + got.len();
                let mut proposals = tokens[done..done + random.random_range(0..6)].to_vec();
                if random.random() {
                    let wrong = random.random_range(0..proposals.len() + 1);
                    proposals.truncate(wrong + 1);
                    if let Some(token) = proposals.get_mut(wrong) {
                        *token = (*token + 1) % VOCAB as u32;
                    }
                }
                let mut logits = Vec::new();
                let mut path = tokens[..done].to_vec();
                logits.extend(row(&path));
                for &token in &proposals {
                    path.push(token);
                    logits.extend(row(&path));
                }
                let rows = Rows { logits: &mut logits, width: VOCAB, proposals: &proposals };
                let Verified { sampled, failure, not_ready } = rows.verify(&mut state, false);
                assert!(failure.is_none() && not_ready.is_none());
                assert!((1..=proposals.len() + 1).contains(&sampled.len()));
                accepted += sampled.len() - 1;
                got.extend(sampled);
            }
            assert_eq!(got, expected[..got.len()], "seed {seed}");
        }
        assert!(accepted > 500, "{accepted} proposals were accepted");
    }

    /// Goal: a row that cannot be sampled from ends the tokens, and those before it count.
    #[test]
    fn tokens_before_a_bad_row_count() {
        let mut state = SamplerState::new(SamplingParams::default(), &[]);
        let mut logits = [0.0, 1.0, 0.0, f32::NAN, 1.0, 0.0];
        let rows = Rows { logits: &mut logits, width: 2, proposals: &[1, 0] };
        let Verified { sampled, failure, .. } = rows.verify(&mut state, false);
        assert_eq!(sampled.len(), 1);
        assert!(matches!(failure, Some(SamplingError::BadLogit { token: 1, .. })), "{failure:?}");
    }
}
