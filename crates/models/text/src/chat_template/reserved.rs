//! Which texts of a conversation are searched for spelled-out special tokens, and for which ones.

use serde_json::Value;

use super::ChatOptions;
use crate::ChatTemplateError;
use crate::spellings::{self, Spellings};

/// The spellings that the texts of a conversation must not contain.
#[derive(Debug)]
pub(crate) struct Reserved {
    /// In the assistant's messages: special tokens. Templates look for other tokens there, such as
    /// `</think>`.
    pub(crate) for_assistant: Option<Spellings>,
    /// Everywhere else: special tokens, and added tokens that the template itself uses.
    pub(crate) for_others: Option<Spellings>,
}

impl Reserved {
    /// Puts separators into the conversation. Returns the separator if one was needed.
    pub(super) fn separate(
        &self,
        messages: &mut [Value],
        options: &mut ChatOptions,
    ) -> Result<Option<char>, ChatTemplateError> {
        let variables = Value::Object(std::mem::take(&mut options.variables));
        let mut others = [
            Value::Array(std::mem::take(&mut options.tools)),
            Value::Array(std::mem::take(&mut options.documents)),
            variables,
        ];
        let spellings = |message: &Value| match message["role"].as_str() {
            Some("assistant") => self.for_assistant.as_ref(),
            _ => self.for_others.as_ref(),
        };
        let occur = messages
            .iter()
            .map(|message| (message, spellings(message)))
            .chain(others.iter().map(|value| (value, self.for_others.as_ref())))
            .any(|(value, spellings)| spellings.is_some_and(|all| all.occur_in(value)));
        let mut separator = None;
        if occur {
            let unused = spellings::unused_character(messages.iter().chain(&others));
            let unused = unused.ok_or_else(|| ChatTemplateError::Failed {
                reason: "expected a character for private use that no message contains".to_owned(),
            })?;
            for message in &mut *messages {
                if let Some(spellings) = spellings(message) {
                    spellings.separate(message, unused);
                }
            }
            for value in &mut others {
                if let Some(spellings) = &self.for_others {
                    spellings.separate(value, unused);
                }
            }
            separator = Some(unused);
        }
        let [tools, documents, variables] = others;
        let list = |value| if let Value::Array(items) = value { items } else { Vec::new() };
        (options.tools, options.documents) = (list(tools), list(documents));
        if let Value::Object(variables) = variables {
            options.variables = variables;
        }
        Ok(separator)
    }
}
