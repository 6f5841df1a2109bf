//! Skills: tasks for which a model was trained with prompts of their own, and their tokens.

mod reasoning;
mod regions;

use std::sync::Arc;

use stolon_backend::{RegionBins, RegionToken};
use stolon_checkpoint::{PromptParts, ReasoningTokens, SkillPrompts};

pub use reasoning::{Grounding, Reasoning};
pub use regions::{BoundingBox, Point, SpatialRef};

use crate::after::{After, TokenRule, exclude};
use crate::text::Text;
use crate::{Error, PromptPart, Request, SharedProcessor};
use reasoning::Reasoner;
use regions::Finder;

/// A task for which a model was trained with a prompt of its own. Only Moondream has skills.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Skill {
    /// Answers a question about the request's image and places in it, or one without an image.
    Query(String, Vec<SpatialRef>),
    /// Reasons about a question and places as in [`Skill::Query`], and then answers it.
    Reason(String, Vec<SpatialRef>),
    /// Describes the request's image.
    Caption(CaptionLength),
    /// Finds the points of all things of this name in the request's image, next to the places that
    /// the name refers to.
    Point(String, Vec<SpatialRef>),
    /// Finds the boxes around all things of this name in the request's image.
    Detect(String),
}

/// How long the description of an image is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CaptionLength {
    /// One sentence.
    Short,
    /// A few sentences.
    #[default]
    Normal,
    /// A paragraph.
    Long,
}

impl CaptionLength {
    /// The name of the length: `short`, `normal` or `long`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Short => "short",
            Self::Normal => "normal",
            Self::Long => "long",
        }
    }
}

impl Skill {
    /// The words of the prompt.
    pub(crate) fn words(&self) -> &str {
        match self {
            Self::Query(words, _) | Self::Reason(words, _) | Self::Point(words, _) => words,
            Self::Detect(words) => words,
            Self::Caption(_) => "",
        }
    }
}

impl Request {
    /// Answers a question, about an image if there is one ([`Request::image`]), with a model that
    /// was trained for it ([`ModelInfo::skills`](crate::ModelInfo::skills)).
    pub fn query(question: impl Into<String>) -> Request {
        Request::query_about(question, [])
    }

    /// As [`Request::query`], about places in the image: a point of it takes two tokens of the
    /// prompt, a box three. The places come before the question, as the model was trained. Their
    /// numbers are rounded to the nearest of the model's bins.
    pub fn query_about(
        question: impl Into<String>,
        places: impl IntoIterator<Item = SpatialRef>,
    ) -> Request {
        let places = places.into_iter().collect();
        Request::new(crate::Prompt::Skill(Skill::Query(question.into(), places)))
    }

    /// As [`Request::query_about`], with a model that reasons before it answers
    /// ([`ModelInfo::reasons`](crate::ModelInfo::reasons)). [`Request::max_tokens`] bounds both
    /// together. The text of the stream is the text of the answer;
    /// [`Engine::reasoning`](crate::Engine::reasoning) reads the rest.
    pub fn reason_about(
        question: impl Into<String>,
        places: impl IntoIterator<Item = SpatialRef>,
    ) -> Request {
        let places = places.into_iter().collect();
        Request::new(crate::Prompt::Skill(Skill::Reason(question.into(), places)))
    }

    /// Finds the points of all things of a name in an image ([`Request::image`]), with a model that
    /// was trained for it ([`ModelInfo::skills`](crate::ModelInfo::skills)). A point takes two
    /// tokens, and the end one. [`Completion::points`](crate::Completion::points) reads them. With
    /// a temperature, it is drawn at random whether another point follows.
    pub fn point(object: impl Into<String>) -> Request {
        Request::point_about(object, [])
    }

    /// As [`Request::point`], with places in the image that the name refers to, as in
    /// [`Request::query_about`].
    pub fn point_about(
        object: impl Into<String>,
        places: impl IntoIterator<Item = SpatialRef>,
    ) -> Request {
        let places = places.into_iter().collect();
        Request::new(crate::Prompt::Skill(Skill::Point(object.into(), places)))
    }

    /// Finds the boxes around all things of a name in an image ([`Request::image`]), with a model
    /// that was trained for it ([`ModelInfo::skills`](crate::ModelInfo::skills)). A box takes three
    /// tokens, and the end one. [`Completion::boxes`](crate::Completion::boxes) reads them.
    pub fn detect(object: impl Into<String>) -> Request {
        Request::new(crate::Prompt::Skill(Skill::Detect(object.into())))
    }

    /// Describes an image ([`Request::image`]), with a model that was trained for it
    /// ([`ModelInfo::skills`](crate::ModelInfo::skills)).
    pub fn caption(length: CaptionLength) -> Request {
        Request::new(crate::Prompt::Skill(Skill::Caption(length)))
    }
}

/// The skills of an engine's model. All requests share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Skills {
    prompts: Option<Arc<SkillPrompts>>,
    /// The backend's bins of coordinates and sizes.
    regions: Option<RegionBins>,
}

impl Skills {
    pub(crate) fn new(prompts: Option<SkillPrompts>, regions: Option<RegionBins>) -> Skills {
        Skills { prompts: prompts.map(Arc::new), regions }
    }

    /// Their names, as in the paths of Moondream's API.
    pub(crate) fn names(&self) -> Vec<&'static str> {
        let Some(prompts) = &self.prompts else { return Vec::new() };
        let known = [
            ("query", prompts.query.is_some()),
            ("caption", !prompts.captions.is_empty()),
            ("point", self.regions.is_some() && prompts.point.is_some()),
            ("detect", self.regions.is_some() && prompts.detect.is_some()),
        ];
        known.into_iter().filter(|(_, known)| *known).map(|(name, _)| name).collect()
    }

    /// The token ids of a prompt after an image, or after the token that begins a prompt.
    pub(crate) fn tokens(&self, skill: &Skill, text: &Text) -> Result<Vec<u32>, Error> {
        let prompts = self.prompts.as_deref();
        let refused = |expected: &str| Error::invalid("skill", expected, "another model");
        match skill {
            Skill::Query(question, places) | Skill::Reason(question, places) => {
                let parts = prompts.and_then(|prompts| prompts.query.as_ref());
                let expected = "a model that was trained to answer questions (Moondream)";
                let PromptParts { prefix, suffix } = parts.ok_or_else(|| refused(expected))?;
                let suffix = match skill {
                    Skill::Reason(..) => &self.reasoning()?.0.suffix,
                    _ => suffix,
                };
                let question = question.trim();
                if question.is_empty() {
                    return Err(Error::invalid("question", "a question", "an empty text"));
                }
                let (places, words) = (self.places(places)?, text.encode(question, false)?);
                Ok([prefix, &places[..], &words, suffix].concat())
            }
            Skill::Point(object, places) => self.finding(
                prompts.and_then(|prompts| prompts.point.as_ref()),
                object,
                places,
                text,
            ),
            Skill::Detect(object) => {
                self.finding(prompts.and_then(|prompts| prompts.detect.as_ref()), object, &[], text)
            }
            Skill::Caption(length) => {
                let name = length.name();
                let caption = prompts.and_then(|prompts| prompts.captions.get(name));
                let expected = "a model that was trained to describe images (Moondream)";
                caption.cloned().ok_or_else(|| refused(expected))
            }
        }
    }

    /// The tokens of reasoning, and the bins of the coordinates in it.
    fn reasoning(&self) -> Result<(&ReasoningTokens, RegionBins), Error> {
        let tokens = self.prompts.as_deref().and_then(|prompts| prompts.reasoning.as_ref());
        let expected = "a model that reasons before it answers (Moondream 3)";
        let refused = || Error::invalid("reasoning", expected, "another model");
        tokens.zip(self.regions).ok_or_else(refused)
    }

    /// Whether the model can reason before it answers.
    pub(crate) fn reason(&self) -> bool {
        self.reasoning().is_ok()
    }

    /// The token ids of a prompt to find things.
    fn finding(
        &self,
        parts: Option<&PromptParts>,
        object: &str,
        places: &[SpatialRef],
        text: &Text,
    ) -> Result<Vec<u32>, Error> {
        let expected = "a model that was trained to find things in images (Moondream)";
        let refused = || Error::invalid("skill", expected, "another model");
        let parts = parts.filter(|_| self.regions.is_some());
        let PromptParts { prefix, suffix } = parts.ok_or_else(refused)?;
        let object = object.trim();
        if object.is_empty() {
            return Err(Error::invalid("object", "the name of a thing", "an empty text"));
        }
        let (places, words) = (self.places(places)?, text.encode(&format!(" {object}"), false)?);
        Ok([prefix, &places[..], &words, suffix].concat())
    }

    /// The token of a coordinate or a size.
    pub(crate) fn value(&self, part: &PromptPart) -> Result<u32, Error> {
        let Some(bins) = self.regions else {
            let expected = "none, because the model has no tokens for coordinates and sizes";
            return Err(Error::invalid("prompt", expected, format!("{part:?}")));
        };
        let region = match *part {
            PromptPart::Coordinate(at) if (0.0..=1.0).contains(&at) => {
                RegionToken::Coordinate { bin: bins.coordinate_bin(at) }
            }
            PromptPart::Size { width, height }
                if (0.0..=1.0).contains(&width) && (0.0..=1.0).contains(&height) =>
            {
                let [width_bin, height_bin] = [width, height].map(|size| bins.size_bin(size));
                RegionToken::Size { width_bin, height_bin }
            }
            _ => return Err(Error::invalid("prompt", "numbers from 0 to 1", format!("{part:?}"))),
        };
        let expected = "bins that are tokens";
        region.token().ok_or_else(|| Error::invalid("prompt", expected, format!("{region:?}")))
    }

    /// The tokens of places.
    fn places(&self, places: &[SpatialRef]) -> Result<Vec<u32>, Error> {
        let mut tokens = Vec::new();
        for place in places {
            let expected = "points [x, y] and boxes [x_min, y_min, x_max, y_max] from 0 to 1";
            let invalid = || Error::invalid("spatial_refs", expected, format!("{place:?}"));
            for part in place.parts().ok_or_else(invalid)? {
                tokens.push(self.value(&part)?);
            }
        }
        Ok(tokens)
    }

    /// The same for a prompt without an image.
    pub(crate) fn prompt_tokens(&self, skill: &Skill, text: &Text) -> Result<Vec<u32>, Error> {
        match skill {
            Skill::Query(_, places) | Skill::Reason(_, places) if places.is_empty() => {}
            Skill::Query(_, places) | Skill::Reason(_, places) => {
                let expected = "none without an image";
                return Err(Error::invalid("spatial_refs", expected, places.len()));
            }
            _ => return Err(Error::invalid("images", "an image", 0)),
        }
        let tokens = self.tokens(skill, text)?;
        let first = self.prompts.iter().map(|prompts| prompts.first_token);
        Ok(first.chain(tokens).collect())
    }

    /// The request for a task with the processor that the task needs, which runs after the
    /// request's own one. The processor for text never chooses tokens that do not occur in answers.
    /// The tokens of an answer with coordinates are chosen by the task's processor alone.
    pub(crate) fn prepare(&self, mut request: Request) -> Result<Request, Error> {
        let prompt = Arc::clone(&request.prompt);
        let crate::Prompt::Skill(skill) = &*prompt else { return Ok(request) };
        let Some(prompts) = &self.prompts else { return Ok(request) };
        let SkillPrompts { coordinate, end, .. } = **prompts;
        let (processor, ends) = match skill {
            Skill::Query(..) | Skill::Caption(_) => {
                let inner = request.processor.take();
                let inner = inner.or(request.options.sampling.processor.take());
                request.processor = self.excluding(inner);
                return Ok(request);
            }
            Skill::Reason(..) => {
                let (reasoning, _) = self.reasoning()?;
                request.text_after = Some(reasoning.end);
                (SharedProcessor::new(Reasoner::new(prompts, reasoning)), None)
            }
            Skill::Point(..) | Skill::Detect(_) => {
                let boxes = matches!(skill, Skill::Detect(_));
                (SharedProcessor::new(Finder { boxes, coordinate, end }), Some(end))
            }
        };
        let refused = |name| Error::invalid(name, "none for an answer with coordinates", "one");
        if request.grammar.is_some() {
            return Err(refused("grammar"));
        }
        if request.processor.or(request.options.sampling.processor.take()).is_some() {
            return Err(refused("processor"));
        }
        request.processor = Some(processor);
        request.options.regions = true;
        let ends = request.get_stop_ids().iter().copied().chain(ends).collect::<Vec<u32>>();
        Ok(request.stop_ids(ends))
    }

    /// The processor of answers that are texts, which runs after `inner`.
    fn excluding(&self, inner: Option<SharedProcessor>) -> Option<SharedProcessor> {
        match &self.prompts {
            Some(prompts) if !prompts.excluded.is_empty() => {
                let rule = Excluded(prompts.excluded.clone().into());
                Some(SharedProcessor::new(After { inner, rule }))
            }
            _ => inner,
        }
    }
}

/// Excludes tokens.
#[derive(Clone, Debug)]
struct Excluded(Arc<[u32]>);

impl TokenRule for Excluded {
    fn apply(&self, _output: &[u32], logits: &mut [f32]) {
        exclude(&self.0, logits);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LogitsProcessor, SamplingError};

    /// Goal: tokens that do not occur in answers are excluded, after the request's own processor
    /// has run.
    #[test]
    fn tokens_are_excluded() {
        struct Zero;
        impl LogitsProcessor for Zero {
            fn process(&self, _output: &[u32], logits: &mut [f32]) -> Result<(), SamplingError> {
                logits.fill(0.0);
                Ok(())
            }
        }
        let prompts = SkillPrompts { excluded: vec![1, 99], ..SkillPrompts::default() };
        let skills = Skills::new(Some(prompts), None);
        let processor = skills.excluding(Some(SharedProcessor::new(Zero))).expect("a processor");
        let mut logits = [1.0, 2.0, 3.0];
        processor.process(&[], &mut logits).expect("nothing can fail");
        assert_eq!(logits, [0.0, f32::NEG_INFINITY, 0.0]);
        assert!(Skills::default().excluding(None).is_none());
    }
}
