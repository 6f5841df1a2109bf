//! The limit of the tokens that a model may spend on its reasoning. When they are used up, only the
//! tokens of the tag that ends the reasoning can be chosen, and the model has to answer.

use std::sync::{Arc, Mutex, PoisonError};

use stolon::{AnswerFormat, Engine, LogitsProcessor, SamplingError};

use crate::wire::error::ApiError;

/// Number of tokens in which the text of a tag is searched. No tag has as many characters.
const WINDOW: usize = 40;

/// The limit that a request sets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ThinkingBudget {
    /// Number of tokens.
    pub(crate) tokens: usize,
    /// The parameter that sets the limit; `None` if it is only advice, which has no effect on a
    /// model whose reasoning cannot be told from its answer.
    pub(crate) param: Option<&'static str>,
}

impl ThinkingBudget {
    /// The processor that ends the reasoning of answers in this format.
    ///
    /// # Errors
    /// The reasoning cannot be limited, because nothing delimits it.
    pub(crate) async fn processor(
        self,
        engine: &Engine,
        format: &AnswerFormat,
    ) -> Result<Option<EndOfThinking>, ApiError> {
        let Some(reasoning) = format.reasoning else {
            let Some(param) = self.param else { return Ok(None) };
            let message = format!(
                "`{param}`: nothing delimits the reasoning of this model, or of its completions, so \
                 that it cannot be limited"
            );
            return Err(ApiError::invalid(Some(param), message));
        };
        let (begin, end) = reasoning.tags();
        let tags = Tags {
            begin: Tag { text: begin, tokens: engine.tokenize(begin, false).await? },
            end: Tag { text: end, tokens: engine.tokenize(end, false).await? },
            budget: self.tokens,
            begins_open: format.reasoning_is_open,
        };
        Ok(Some(EndOfThinking::new(engine.clone(), Arc::new(tags))))
    }
}

/// A tag around the reasoning.
#[derive(Debug)]
struct Tag {
    text: &'static str,
    /// The tokens that the tag's text alone is tokenized to. In an answer, other tokens may have
    /// the same text.
    tokens: Vec<u32>,
}

impl Tag {
    /// Whether the last of these tokens completes the tag.
    fn ends(&self, tokens: &[u32], decode: impl Fn(&[u32]) -> String) -> bool {
        // A tag with a token of its own is always that token.
        tokens.ends_with(&self.tokens)
            || (self.tokens.len() > 1 && decode(tokens).contains(self.text))
    }
}

/// The tags and the limit that the answers to a request have in common.
#[derive(Debug)]
struct Tags {
    begin: Tag,
    end: Tag,
    /// Maximum number of tokens of the reasoning.
    budget: usize,
    /// Whether the prompt has begun the reasoning.
    begins_open: bool,
}

/// The reasoning of one answer so far.
#[derive(Debug)]
struct Progress {
    /// Number of tokens of the answer that have been read.
    read: usize,
    is_open: bool,
    /// Number of tokens of the reasoning, its tags included.
    spent: usize,
    /// The last tokens after the last tag.
    tail: Vec<u32>,
}

impl Progress {
    fn new(tags: &Tags) -> Self {
        Self { read: 0, is_open: tags.begins_open, spent: 0, tail: Vec::new() }
    }

    /// Reads the tokens that the answer has got since the last call.
    fn advance(&mut self, tags: &Tags, output: &[u32], decode: impl Fn(&[u32]) -> String) {
        if output.len() < self.read {
            *self = Self::new(tags);
        }
        for &token in &output[self.read..] {
            if self.tail.len() == WINDOW {
                self.tail.remove(0);
            }
            self.tail.push(token);
            self.spent += usize::from(self.is_open);
            let tag = if self.is_open { &tags.end } else { &tags.begin };
            if tag.ends(&self.tail, &decode) {
                self.is_open = !self.is_open;
                self.tail.clear();
            }
        }
        self.read = output.len();
    }

    /// The only token that may follow; `None` if all may.
    fn forced(&self, tags: &Tags) -> Option<u32> {
        if !self.is_open || self.spent < tags.budget {
            return None;
        }
        let end = &tags.end.tokens;
        let written = (0..end.len()).rev().find(|&count| self.tail.ends_with(&end[..count]))?;
        end.get(written).copied()
    }
}

/// Ends the reasoning of an answer when its tokens are used up.
#[derive(Debug)]
pub(crate) struct EndOfThinking {
    engine: Engine,
    tags: Arc<Tags>,
    progress: Mutex<Progress>,
}

impl EndOfThinking {
    fn new(engine: Engine, tags: Arc<Tags>) -> Self {
        let progress = Mutex::new(Progress::new(&tags));
        Self { engine, tags, progress }
    }

    /// The same for another answer.
    pub(crate) fn restarted(&self) -> Self {
        Self::new(self.engine.clone(), Arc::clone(&self.tags))
    }
}

impl LogitsProcessor for EndOfThinking {
    fn process(&self, output: &[u32], logits: &mut [f32]) -> Result<(), SamplingError> {
        let decode = |tokens: &[u32]| self.engine.detokenize(tokens, false).unwrap_or_default();
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        progress.advance(&self.tags, output, decode);
        let forced = progress.forced(&self.tags).map(|token| token as usize);
        if let Some(token) = forced.filter(|&token| token < logits.len()) {
            logits.fill(f32::NEG_INFINITY);
            logits[token] = 0.0;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text of tokens that are characters.
    fn decode(tokens: &[u32]) -> String {
        tokens.iter().filter_map(|&token| char::from_u32(token)).collect()
    }

    fn tags(budget: usize, begins_open: bool) -> Tags {
        let tag = |text: &'static str| Tag { text, tokens: text.chars().map(u32::from).collect() };
        Tags { begin: tag("<t>"), end: tag("</t>"), budget, begins_open }
    }

    /// The answer of a model that would write `script`, of at most `script` characters.
    fn answer(tags: &Tags, script: &str) -> String {
        let (mut progress, mut output) = (Progress::new(tags), Vec::new());
        for own in script.chars() {
            progress.advance(tags, &output, decode);
            output.push(progress.forced(tags).unwrap_or(u32::from(own)));
        }
        decode(&output)
    }

    /// Goal: reasoning ends when its tokens are used up, whether the prompt or the answer has begun
    /// it, and also in the middle of its end; shorter reasoning and the answer stay as they are.
    #[test]
    fn reasoning_ends_with_its_budget() {
        for (budget, begins_open, script, expected) in [
            (3, true, "abcdefghi", "abc</t>hi"),
            (0, true, "abcdef", "</t>ef"),
            (3, false, "<t>abcdefghi", "<t>abc</t>hi"),
            (3, false, "no reasoning", "no reasoning"),
            (5, true, "ab</t>an answer", "ab</t>an answer"),
            (4, true, "ab</t>an answer", "ab</t>an answer"),
            // The tokens of all parts of the reasoning count.
            (6, false, "<t>a</t>b<t>cdefghi", "<t>a</t>b<t>c</t>hi"),
        ] {
            assert_eq!(answer(&tags(budget, begins_open), script), expected, "{budget} {script}");
        }
    }

    /// Goal: an answer that begins anew is read from its beginning.
    #[test]
    fn progress_follows_the_answer() {
        let tags = tags(2, true);
        let mut progress = Progress::new(&tags);
        let of = |text: &str| text.chars().map(u32::from).collect::<Vec<u32>>();
        progress.advance(&tags, &of("abc"), decode);
        assert_eq!(progress.forced(&tags), Some(u32::from('<')));
        progress.advance(&tags, &of("a"), decode);
        assert_eq!(progress.forced(&tags), None);
    }
}
