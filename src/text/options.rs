//! Methods that need the feature `text`: tokenizers and chat templates of programs and requests.

use std::sync::Arc;

use stolon_text::{ChatOptions, ChatTemplate, TextModel};

use super::Text;
use crate::{Engine, EngineBuilder, Error, Request};

impl EngineBuilder {
    /// The chat template to use instead of those of the [`model`](Self::model): the source of a
    /// Jinja template. A template that is malformed, or a model without a tokenizer, is an error
    /// when the engine is built, and so is a `text_model` or a custom backend, whose templates are
    /// those of the `text_model`.
    pub fn chat_template(mut self, source: impl Into<String>) -> Self {
        self.chat_template = Some(source.into());
        self
    }

    /// Makes a language model a reranker ([`Engine::rerank`](crate::Engine::rerank) and
    /// [`Engine::score`](crate::Engine::score)): the score of a query and a document is the
    /// probability of `positive` among the two answers, or `1 / (1 + e^-x)` for the logit `x` of
    /// `positive` alone. Each answer must be one token. The model generates text all the same.
    ///
    /// Default: the tokens that the model's files name, in `1_LogitScore` of sentence-transformers or
    /// in a GGUF file with `pooling_type` 4.
    pub fn rerank_tokens(mut self, positive: impl Into<String>, negative: Option<&str>) -> Self {
        self.rerank.tokens = Some((positive.into(), negative.map(str::to_owned)));
        self
    }

    /// The prompt of a reranker with [`rerank_tokens`](Self::rerank_tokens): a text with `{query}`
    /// and, after it, `{document}`. A token that begins every sequence is part of it.
    ///
    /// Default: the template `rerank` of a GGUF file, or the chat template if it has messages with
    /// the roles `query` and `document`, or the template of Qwen3-Reranker if the vocabulary has its
    /// tokens.
    pub fn rerank_template(mut self, template: impl Into<String>) -> Self {
        self.rerank.template = Some(template.into());
        self
    }

    /// The tokenizer and chat templates to use, with a custom [`backend`](Self::backend) or instead
    /// of those of a [`model`](Self::model). Default: those of the model; none for a custom
    /// backend. A tokenizer of your own is a [`CustomTokenizer`](crate::CustomTokenizer).
    ///
    /// A token id that the model does not have is refused when a prompt contains it.
    pub fn text_model(mut self, model: TextModel) -> Self {
        self.text = Some(Text::new(model));
        self
    }
}

impl Request {
    /// How a conversation is rendered: template variables such as `enable_thinking`, documents, the
    /// name of the template. Only chat prompts use it. Its `tools` are replaced by those of
    /// [`Request::tools`] if that is called.
    pub fn chat_options(mut self, options: ChatOptions) -> Request {
        self.chat = Arc::new(options);
        self
    }

    /// Sets one variable that the chat template may read, for example `enable_thinking`. Only chat
    /// prompts use it.
    pub fn template_variable(
        mut self,
        name: impl Into<String>,
        value: impl Into<serde_json::Value>,
    ) -> Request {
        let variables = &mut Arc::make_mut(&mut self.chat).variables;
        variables.insert(name.into(), value.into());
        self
    }
}

impl Engine {
    /// The model's chat templates.
    ///
    /// # Errors
    /// [`Error::NoTokenizer`], and [`Error::ChatTemplate`] if there are none or they are malformed.
    pub fn chat_template(&self) -> Result<&ChatTemplate, Error> {
        self.inner.prompts.text.chat_template()
    }
}
