//! Skills: tasks for which a model was trained with prompts of their own, and their tokens.

mod regions;

use std::sync::Arc;

use stolon_model::{PromptParts, SkillPrompts};

pub use regions::{BoundingBox, Point};

use crate::after::{After, TokenRule, exclude};
use crate::text::Text;
use crate::{Error, Request, SharedProcessor};
use regions::Finder;

/// A task for which a model was trained with a prompt of its own. Only Moondream has skills.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Skill {
    /// Answers a question about the request's image, or one without an image.
    Query(String),
    /// Describes the request's image.
    Caption(CaptionLength),
    /// Finds the points of all things of this name in the request's image.
    Point(String),
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
            Self::Query(words) | Self::Point(words) | Self::Detect(words) => words,
            Self::Caption(_) => "",
        }
    }
}

impl Request {
    /// Answers a question, about an image if there is one ([`Request::image`]), with a model that
    /// was trained for it ([`ModelInfo::skills`](crate::ModelInfo::skills)).
    pub fn query(question: impl Into<String>) -> Request {
        Request::new(crate::Prompt::Skill(Skill::Query(question.into())))
    }

    /// Finds the points of all things of a name in an image ([`Request::image`]), with a model that
    /// was trained for it ([`ModelInfo::skills`](crate::ModelInfo::skills)). A point takes two
    /// tokens, and the end one. [`Completion::points`](crate::Completion::points) reads them.
    pub fn point(object: impl Into<String>) -> Request {
        Request::new(crate::Prompt::Skill(Skill::Point(object.into())))
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
    /// Whether the backend has bins of coordinates and sizes.
    has_regions: bool,
}

impl Skills {
    pub(crate) fn new(prompts: Option<SkillPrompts>, has_regions: bool) -> Skills {
        Skills { prompts: prompts.map(Arc::new), has_regions }
    }

    /// Their names, as in the paths of Moondream's API.
    pub(crate) fn names(&self) -> Vec<&'static str> {
        let Some(prompts) = &self.prompts else { return Vec::new() };
        let known = [
            ("query", prompts.query.is_some()),
            ("caption", !prompts.captions.is_empty()),
            ("point", self.has_regions && prompts.point.is_some()),
            ("detect", self.has_regions && prompts.detect.is_some()),
        ];
        known.into_iter().filter(|(_, known)| *known).map(|(name, _)| name).collect()
    }

    /// The token ids of a prompt after an image, or after the token that begins a prompt.
    pub(crate) fn tokens(&self, skill: &Skill, text: &Text) -> Result<Vec<u32>, Error> {
        let prompts = self.prompts.as_deref();
        let refused = |expected: &str| Error::invalid("skill", expected, "another model");
        match skill {
            Skill::Query(question) => {
                let parts = prompts.and_then(|prompts| prompts.query.as_ref());
                let expected = "a model that was trained to answer questions (Moondream)";
                let PromptParts { prefix, suffix } = parts.ok_or_else(|| refused(expected))?;
                let question = question.trim();
                if question.is_empty() {
                    return Err(Error::invalid("question", "a question", "an empty text"));
                }
                Ok([prefix, &text.encode(question, false)?[..], suffix].concat())
            }
            Skill::Point(object) | Skill::Detect(object) => {
                let parts = prompts.filter(|_| self.has_regions).and_then(|prompts| match skill {
                    Skill::Point(_) => prompts.point.as_ref(),
                    _ => prompts.detect.as_ref(),
                });
                let expected = "a model that was trained to find things in images (Moondream)";
                let PromptParts { prefix, suffix } = parts.ok_or_else(|| refused(expected))?;
                let object = object.trim();
                if object.is_empty() {
                    return Err(Error::invalid("object", "the name of a thing", "an empty text"));
                }
                let words = text.encode(&format!(" {object}"), false)?;
                Ok([prefix, &words[..], suffix].concat())
            }
            Skill::Caption(length) => {
                let name = length.name();
                let caption = prompts.and_then(|prompts| prompts.captions.get(name));
                let expected = "a model that was trained to describe images (Moondream)";
                caption.cloned().ok_or_else(|| refused(expected))
            }
        }
    }

    /// The same for a prompt without an image.
    pub(crate) fn prompt_tokens(&self, skill: &Skill, text: &Text) -> Result<Vec<u32>, Error> {
        if !matches!(skill, Skill::Query(_)) {
            return Err(Error::invalid("images", "an image", 0));
        }
        let tokens = self.tokens(skill, text)?;
        let first = self.prompts.iter().map(|prompts| prompts.first_token);
        Ok(first.chain(tokens).collect())
    }

    /// The request for a task with the processor that the task needs, which runs after the
    /// request's own one. That for text never chooses tokens that do not occur in answers.
    pub(crate) fn prepare(&self, mut request: Request) -> Request {
        let crate::Prompt::Skill(skill) = request.prompt() else { return request };
        let finds_boxes = match skill {
            Skill::Point(_) => Some(false),
            Skill::Detect(_) => Some(true),
            Skill::Query(_) | Skill::Caption(_) => None,
        };
        if let (Some(boxes), Some(prompts)) = (finds_boxes, &self.prompts) {
            let &SkillPrompts { coordinate, end, .. } = &**prompts;
            request.processor = Some(SharedProcessor::new(Finder { boxes, coordinate, end }));
            request.options.regions = true;
            let ends = request.get_stop_ids().to_vec().into_iter().chain([end]);
            return request.stop_ids(ends);
        }
        let inner = request.processor.take();
        let inner = inner.or(request.options.sampling.processor.take());
        request.processor = self.excluding(inner);
        request
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
        let skills = Skills::new(Some(prompts), false);
        let processor = skills.excluding(Some(SharedProcessor::new(Zero))).expect("a processor");
        let mut logits = [1.0, 2.0, 3.0];
        processor.process(&[], &mut logits).expect("nothing can fail");
        assert_eq!(logits, [0.0, f32::NEG_INFINITY, 0.0]);
        assert!(Skills::default().excluding(None).is_none());
    }
}
