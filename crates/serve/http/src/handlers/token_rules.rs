//! Rules for the tokens that a request may generate.

use serde_json::json;
use stolon::{LogitsProcessor, Request, SamplingError, SharedProcessor};

use crate::handlers::thinking::EndOfThinking;
use crate::wire::error::ApiError;

/// The rules of one request.
#[derive(Debug, Default)]
pub(crate) struct TokenRules {
    pub(crate) allowed: Option<AllowedTokens>,
    pub(crate) thinking: Option<EndOfThinking>,
}

impl TokenRules {
    /// The request with these rules.
    pub(crate) fn apply(&self, request: Request) -> Request {
        if self.allowed.is_none() && self.thinking.is_none() {
            return request;
        }
        request.logits_processor(self.restarted())
    }

    /// The same for another answer.
    fn restarted(&self) -> Self {
        let thinking = self.thinking.as_ref().map(EndOfThinking::restarted);
        Self { allowed: self.allowed.clone(), thinking }
    }
}

impl LogitsProcessor for TokenRules {
    fn process(&self, output: &[u32], logits: &mut [f32]) -> Result<(), SamplingError> {
        if let Some(allowed) = &self.allowed {
            allowed.apply(logits);
        }
        match &self.thinking {
            Some(thinking) => thinking.process(output, logits),
            None => Ok(()),
        }
    }

    fn is_ready(&self, _output: &[u32]) -> bool {
        true
    }

    fn for_sequence(&self) -> Option<SharedProcessor> {
        Some(SharedProcessor::new(self.restarted()))
    }
}

/// The only tokens that may be generated.
#[derive(Clone, Debug)]
pub(crate) struct AllowedTokens {
    /// In ascending order.
    ids: Vec<u32>,
}

impl AllowedTokens {
    /// # Errors
    /// There are none, or one is not in the vocabulary.
    pub(crate) fn new(ids: &[u32], vocab_size: usize) -> Result<Self, ApiError> {
        let param = "allowed_token_ids";
        if ids.is_empty() {
            return Err(ApiError::expected(param, "at least one token id", &json!([])));
        }
        check_ids(param, ids, vocab_size)?;
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        Ok(Self { ids })
    }

    fn apply(&self, logits: &mut [f32]) {
        let mut allowed = self.ids.iter().peekable();
        for (token, logit) in logits.iter_mut().enumerate() {
            let mut is_allowed = false;
            while allowed.next_if(|&&id| id as usize <= token).is_some() {
                is_allowed = true;
            }
            if !is_allowed {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
}

/// # Errors
/// One of the token ids of this parameter is not in the vocabulary.
pub(crate) fn check_ids(param: &str, ids: &[u32], vocab_size: usize) -> Result<(), ApiError> {
    let Some(id) = ids.iter().find(|&&id| id as usize >= vocab_size) else { return Ok(()) };
    let expected = format!("token ids below {vocab_size}, the size of the vocabulary");
    Err(ApiError::expected(param, &expected, &json!(id)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: only the allowed tokens keep their logits, in whatever order they were given.
    #[test]
    fn other_tokens_are_excluded() {
        let allowed = AllowedTokens::new(&[3, 0, 3], 5).expect("valid ids");
        let mut logits = [1.0, 2.0, 3.0, 4.0, 5.0];
        allowed.apply(&mut logits);
        let none = f32::NEG_INFINITY;
        assert_eq!(logits, [1.0, none, none, 4.0, none]);
        assert!(AllowedTokens::new(&[], 5).is_err() && AllowedTokens::new(&[5], 5).is_err());
    }
}
