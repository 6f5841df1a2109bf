//! The reasoning of a model before its answer: which tokens it may choose, and how the tokens are
//! read.

use std::sync::Arc;

use stolon_backend::{LogitsProcessor, RegionBins, RegionLogits, SamplingError};
use stolon_checkpoint::{ReasoningTokens, SkillPrompts};

use super::Point;
use super::regions::{coordinate, points};
use crate::after::exclude;
use crate::{Engine, Error};

/// The reasoning of a model before its answer to
/// [`Request::reason_about`](crate::Request::reason_about).
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Reasoning {
    /// The text.
    pub text: String,
    /// The parts of the text that the model has shown in the image, in order.
    pub grounding: Vec<Grounding>,
}

/// A part of the text of a reasoning, and where in the image it is.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Grounding {
    /// Number of characters of the text before this part.
    pub start: usize,
    /// Number of characters of the text before the end of this part; at least `start`.
    pub end: usize,
    /// Points in the image; at least one.
    pub points: Vec<Point>,
}

impl Engine {
    /// The reasoning in an answer to [`Request::reason_about`](crate::Request::reason_about), whose
    /// first tokens are `token_ids`: all of the answer, or those that have arrived.
    ///
    /// # Errors
    /// `InvalidParameter` if the model does not reason ([`ModelInfo::reasons`]), and
    /// [`Error::NoTokenizer`].
    ///
    /// [`ModelInfo::reasons`]: crate::ModelInfo::reasons
    pub fn reasoning(&self, token_ids: &[u32]) -> Result<Reasoning, Error> {
        let text = &self.inner.prompts.text;
        let (tokens, bins) = text.skills.reasoning()?;
        read(token_ids, tokens, bins, |ids| text.decode(ids, true))
    }
}

/// Reads the reasoning at the beginning of an answer. `decode` returns the text of tokens.
fn read(
    answer: &[u32],
    tokens: &ReasoningTokens,
    bins: RegionBins,
    decode: impl Fn(&[u32]) -> Result<String, Error>,
) -> Result<Reasoning, Error> {
    let (mut reasoning, mut end) = (Reasoning::default(), 0);
    let before_end = answer.split(|token| *token == tokens.end).next().unwrap_or_default();
    for part in before_end.split(|token| tokens.grounding.contains(token)) {
        let text = decode(part)?;
        let (start, points) = (end, points(part, bins));
        end += text.chars().count();
        reasoning.text.push_str(&text);
        if !points.is_empty() {
            reasoning.grounding.push(Grounding { start, end, points });
        }
    }
    Ok(reasoning)
}

/// Lets a model reason and answer: certain tokens are excluded in both, and coordinates are chosen
/// in the reasoning only. The most likely bin is chosen, as the published code does.
#[derive(Clone, Debug)]
pub(super) struct Reasoner {
    prompts: Arc<SkillPrompts>,
    reasoning: ReasoningTokens,
}

impl Reasoner {
    pub(super) fn new(prompts: &Arc<SkillPrompts>, reasoning: &ReasoningTokens) -> Reasoner {
        Reasoner { prompts: Arc::clone(prompts), reasoning: reasoning.clone() }
    }

    /// Whether the reasoning continues after `output`.
    fn goes_on(&self, output: &[u32]) -> bool {
        !output.contains(&self.reasoning.end)
    }
}

impl LogitsProcessor for Reasoner {
    fn process(&self, output: &[u32], logits: &mut [f32]) -> Result<(), SamplingError> {
        let of_reasoning = self.goes_on(output);
        let excluded = if of_reasoning { &self.reasoning.excluded } else { &self.prompts.excluded };
        exclude(excluded, logits);
        Ok(())
    }

    fn replace(&self, output: &[u32], token: u32, regions: &RegionLogits<'_>) -> u32 {
        match token == self.prompts.coordinate && self.goes_on(output) {
            true => coordinate(regions).unwrap_or(token),
            false => token,
        }
    }

    fn is_ready(&self, _output: &[u32]) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use stolon_backend::RegionToken;

    use super::*;

    fn tokens() -> ReasoningTokens {
        ReasoningTokens { suffix: vec![4], end: 3, grounding: [7, 9], excluded: vec![0, 6] }
    }

    fn bin(bin: u32) -> u32 {
        RegionToken::Coordinate { bin }.token().expect("a bin")
    }

    /// Goal: the reasoning ends where the answer begins, points belong to the text around them that
    /// is between two marks, parts are counted in characters, and half a point is left out.
    #[test]
    fn points_belong_to_parts_of_the_text() {
        let decode = |ids: &[u32]| {
            let texts = ids.iter().filter_map(|id| char::from_u32(*id));
            Ok(texts.collect::<String>())
        };
        let bins = RegionBins { coordinates: 5, sizes: 2 };
        let read = |answer: &[u32]| read(answer, &tokens(), bins, decode).expect("a reasoning");
        let (a, e) = (u32::from('a'), u32::from('é'));
        let point = |x, y| Point { x, y };
        let answer = [e, 7, bin(0), bin(2), a, e, bin(4), bin(1), 9, a, 7, a, bin(3), 9, 7, bin(4)];
        let first = Grounding { start: 1, end: 3, points: vec![point(0.0, 0.5), point(1.0, 0.25)] };
        let text = "éaéaa".to_owned();
        let whole = Reasoning { text: text.clone(), grounding: vec![first.clone()] };
        assert_eq!(read(&answer), whole);
        let after = [&answer[..], &[bin(4), 3, a, 7, bin(1), bin(1)]].concat();
        let last = Grounding { start: 5, end: 5, points: vec![point(1.0, 1.0)] };
        assert_eq!(read(&after), Reasoning { text, grounding: vec![first, last] });
        assert_eq!(read(&[]), Reasoning::default());
        assert_eq!(read(&[3, a]), Reasoning::default());
    }

    /// Goal: tokens are excluded in the reasoning or in the answer, and a coordinate takes the
    /// place of its token in the reasoning only.
    #[test]
    fn reasoning_and_answer_have_their_tokens() {
        let prompts = SkillPrompts { coordinate: 5, excluded: vec![3], ..SkillPrompts::default() };
        let reasoner = Reasoner::new(&Arc::new(prompts), &tokens());
        let regions = RegionLogits { coordinates: &[0.0, 2.0], widths: &[], heights: &[] };
        for (output, excluded, replaced) in [
            (&[][..], &[0, 6][..], bin(1)),
            (&[1, bin(0)], &[0, 6], bin(1)),
            (&[1, 3], &[3], 5),
            (&[3, 1, 1], &[3], 5),
        ] {
            let mut logits = [1.0; 8];
            reasoner.process(output, &mut logits).expect("nothing can fail");
            let expected = |token| if excluded.contains(&token) { f32::NEG_INFINITY } else { 1.0 };
            assert_eq!(logits, std::array::from_fn(expected));
            assert_eq!(reasoner.replace(output, 5, &regions), replaced);
            assert_eq!(reasoner.replace(output, 2, &regions), 2);
        }
    }
}
