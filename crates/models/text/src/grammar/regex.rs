//! Whether a regular expression of a JSON schema can be part of a grammar.

use llguidance::derivre::{RegexAst, RegexBuilder};
use llguidance::regex_to_lark;

use super::messages::message;
use crate::bounded::catch;

/// The reason why a regular expression cannot be part of a grammar, such as a syntax error. `None`
/// if it can be.
pub(super) fn error(regex: &str) -> Option<String> {
    // As JSON schemas are compiled: `\d` and `\w` are ASCII.
    let searched = RegexAst::SearchRegex(regex_to_lark(regex, "dw"));
    match catch(|| RegexBuilder::new().mk(&searched).map(drop)) {
        Ok(built) => built.err().map(|error| message(&error.to_string())),
        Err(_) => Some("the regular expression cannot be compiled".to_owned()),
    }
}
