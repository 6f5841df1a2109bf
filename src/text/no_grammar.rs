//! Structured output in a build without the feature `grammar`: every grammar is an error.

use std::sync::Arc;

use stolon_text::{Grammar, GrammarError, GrammarFailure, TextModel};

use crate::SharedProcessor;
use crate::long_work::Client;

/// Refuses every grammar.
#[derive(Clone, Debug)]
pub(super) struct Grammars;

impl Grammars {
    pub(super) fn new(_: &TextModel) -> Grammars {
        Grammars
    }

    pub(super) fn prepare(&self) {}

    pub(super) fn processor(
        &self,
        _: &Grammar,
        _: Arc<[u32]>,
        _: Option<SharedProcessor>,
        _: Client,
    ) -> Result<SharedProcessor, GrammarFailure> {
        let reason = "this library was built without the feature `grammar`".to_owned();
        Err(GrammarError { function: None, path: String::new(), reason }.into())
    }
}
