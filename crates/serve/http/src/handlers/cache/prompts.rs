//! The prompts of requests about the cache.

use stolon::{ChatOptions, Request};

use crate::api::cache::{CachePrompt, MAX_PROMPTS};
use crate::guard::access::Tenant;
use crate::handlers::app::App;
use crate::handlers::chat::messages;
use crate::handlers::completions::engine_request;
use crate::handlers::skills::with_image;
use crate::wire::advice::Ignored;
use crate::wire::error::ApiError;
use crate::wire::history;

impl CachePrompt {
    /// The engine's salt for these prompts.
    pub(super) fn salt(&self) -> Option<String> {
        Tenant::named(self.tenant.clone()).salt(self.cache_salt.as_deref())
    }

    /// Whether there is a prompt.
    pub(super) fn is_given(&self) -> bool {
        self.prompt.is_some() || self.messages.is_some() || self.question.is_some()
    }

    /// Refuses members that belong to another form of prompt.
    fn check_companions(&self) -> Result<(), ApiError> {
        let (chat, question) = (self.messages.is_some(), self.question.is_some());
        for (param, is_given, form, has_form) in [
            ("chat_template_kwargs", self.chat_template_kwargs.is_some(), "messages", chat),
            ("add_generation_prompt", self.add_generation_prompt.is_some(), "messages", chat),
            ("image_url", self.image_url.is_some(), "question", question),
        ] {
            if is_given && !has_form {
                let message = format!("`{param}` is allowed only with `{form}`");
                return Err(ApiError::invalid(Some(param), message));
            }
        }
        Ok(())
    }

    /// The engine's requests for these prompts, made in the same way as those of completions, chat
    /// and questions.
    pub(super) fn into_requests(self, app: &App) -> Result<Vec<Request>, ApiError> {
        let salt = self.salt();
        let ignored = Ignored::default();
        let adapter =
            self.model.as_deref().map(|model| app.adapter_of(model, &ignored)).transpose()?;
        self.check_companions()?;
        let mut requests: Vec<Request> = match (self.prompt, self.messages, self.question) {
            (Some(prompt), None, None) => {
                prompt.into_prompts().into_iter().map(engine_request).collect()
            }
            (None, Some(conversation), None) => {
                let options = ChatOptions {
                    add_generation_prompt: self.add_generation_prompt.unwrap_or(true),
                    variables: self.chat_template_kwargs.unwrap_or_default(),
                    ..app.chat_options()
                };
                let conversation = messages(conversation, &ignored)?;
                let conversation = history::conversation(&app.engine, conversation, true, &ignored);
                vec![Request::chat(conversation).chat_options(options)]
            }
            (None, None, Some(question)) => {
                vec![with_image(Request::query(question), self.image_url)]
            }
            (None, None, None) => return Err(ApiError::missing("prompt")),
            (_, messages, _) => {
                let param = if messages.is_some() { "messages" } else { "question" };
                let message = "expected only one of `prompt`, `messages` and `question`";
                return Err(ApiError::invalid(Some(param), message));
            }
        };
        if requests.is_empty() || requests.len() > MAX_PROMPTS {
            let message =
                format!("`prompt`: expected 1 to {MAX_PROMPTS} prompts, got {}", requests.len());
            return Err(ApiError::invalid(Some("prompt"), message));
        }
        if let Some(salt) = salt {
            requests.iter_mut().for_each(|r| *r = r.clone().cache_salt(salt.clone()));
        }
        if let Some(adapter) = adapter.flatten() {
            requests.iter_mut().for_each(|r| *r = r.clone().adapter(&adapter));
        }
        Ok(requests)
    }
}
