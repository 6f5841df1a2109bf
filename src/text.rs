//! The text layer: renders and tokenises prompts, and provides detokenizers for answers.

use std::sync::Arc;

use stolon_text::{ChatMessage, ChatOptions, TextModel, Tokenizer};

pub(crate) use stolon_text::Detokenizer;

use crate::Error;
use crate::prompt::PromptSource;
use crate::request::Prompt;

/// The model's tokenizer and chat templates, if it has any. All requests share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Text {
    model: Option<TextModel>,
    eos_ids: Arc<[u32]>,
}

impl Text {
    pub(crate) fn new(model: TextModel) -> Text {
        let eos_ids = model.eos_token_ids().into();
        Text { model: Some(model), eos_ids }
    }

    fn model(&self) -> Result<&TextModel, Error> {
        self.model.as_ref().ok_or(Error::NoTokenizer)
    }

    fn tokenizer(&self) -> Result<&Tokenizer, Error> {
        self.model().map(TextModel::tokenizer)
    }

    /// # Errors
    /// [`Error::NoTokenizer`].
    pub(crate) fn require_tokenizer(&self) -> Result<(), Error> {
        self.tokenizer().map(|_| ())
    }

    /// A detokenizer for one answer. `None` if there is no tokenizer.
    pub(crate) fn detokenizer(&self) -> Option<Detokenizer> {
        let tokenizer = self.tokenizer().ok()?;
        Some(Detokenizer::continuing(tokenizer.clone(), true))
    }

    pub(crate) fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, Error> {
        Ok(self.tokenizer()?.encode(text, add_special)?)
    }

    pub(crate) fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, Error> {
        Ok(self.tokenizer()?.decode(ids, skip_special))
    }

    /// Token ids that end an answer. Empty if there is no tokenizer.
    pub(crate) fn eos_ids(&self) -> Arc<[u32]> {
        Arc::clone(&self.eos_ids)
    }

    pub(crate) fn has_chat_template(&self) -> bool {
        self.model.as_ref().is_some_and(|model| model.chat_template().is_ok())
    }

    /// The token ids of a request's prompt.
    pub(crate) fn prompt_tokens(&self, source: &PromptSource) -> Result<Vec<u32>, Error> {
        match &source.prompt {
            Prompt::Tokens(tokens) => Ok(tokens.clone()),
            Prompt::Text(text) => self.encode(text, true),
            // The template has inserted the special tokens already.
            Prompt::Chat(messages) => {
                self.encode(&self.render(messages, source.tools.as_ref())?, false)
            }
        }
    }

    /// The prompt text of a conversation, ending where the assistant's answer begins.
    pub(crate) fn render(
        &self,
        messages: &[ChatMessage],
        tools: Option<&serde_json::Value>,
    ) -> Result<String, Error> {
        let tools = match tools {
            None | Some(serde_json::Value::Null) => Vec::new(),
            Some(serde_json::Value::Array(tools)) => tools.clone(),
            Some(other) => return Err(Error::invalid("tools", "a list of functions", other)),
        };
        let options = ChatOptions { tools, ..ChatOptions::default() };
        Ok(self.model()?.render_chat(messages, &options)?)
    }
}
