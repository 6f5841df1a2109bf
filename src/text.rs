//! The text side: what stands between a caller's words and the core's token ids.

use stolon_model::chat_template::{ChatMessage, ChatOptions};
use stolon_model::{TextModel, Tokenizer};

use crate::request::Prompt;
use crate::{Error, Request};

/// The model's text side, if there is one. Read-only; shared by all requests.
#[derive(Clone, Debug, Default)]
pub(crate) struct Text {
    model: Option<TextModel>,
}

impl Text {
    pub(crate) fn new(model: Option<TextModel>) -> Text {
        Text { model }
    }

    pub(crate) fn model(&self) -> Result<&TextModel, Error> {
        self.model.as_ref().ok_or(Error::NoTokenizer)
    }

    pub(crate) fn tokenizer(&self) -> Result<&Tokenizer, Error> {
        self.model().map(TextModel::tokenizer)
    }

    /// Ids that end a text; none without a text side.
    pub(crate) fn eos_token_ids(&self) -> &[u32] {
        self.model.as_ref().map_or(&[], TextModel::eos_token_ids)
    }

    pub(crate) fn has_chat_template(&self) -> bool {
        self.model.as_ref().is_some_and(|model| model.chat_template().is_ok())
    }

    /// The token ids of a request's prompt.
    pub(crate) fn prompt_tokens(&self, request: &Request) -> Result<Vec<u32>, Error> {
        match &request.prompt {
            Prompt::Tokens(tokens) => Ok(tokens.clone()),
            Prompt::Text(text) => Ok(self.tokenizer()?.encode(text, true)?),
            Prompt::Chat(messages) => {
                let text = self.render(messages, request.tools.as_ref())?;
                // The template has put the special tokens where they belong.
                Ok(self.tokenizer()?.encode(&text, false)?)
            }
        }
    }

    /// The text of a conversation, up to where the assistant is to answer.
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
