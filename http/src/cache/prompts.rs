//! The prompts of requests about the cache.

use stolon::{ChatOptions, Request};

use crate::App;
use crate::access::Tenant;
use crate::advice::Ignored;
use crate::api::cache::{CachePrompt, MAX_PROMPTS};
use crate::chat::messages;
use crate::completions::engine_request;
use crate::dialogue::tool_use;
use crate::error::ApiError;

impl CachePrompt {
    /// The engine's salt for these prompts.
    pub(super) fn salt(&self) -> Option<String> {
        Tenant::named(self.tenant.clone()).salt(self.cache_salt.as_deref())
    }

    /// Whether there is a prompt.
    pub(super) fn is_given(&self) -> bool {
        self.prompt.is_some() || self.messages.is_some()
    }

    /// The engine's requests for these prompts, made in the same way as those of completions and
    /// chat.
    pub(super) fn into_requests(self, app: &App) -> Result<Vec<Request>, ApiError> {
        let salt = self.salt();
        let adapter = self.model.as_deref().map(|model| app.adapter_of(model)).transpose()?;
        if self.messages.is_none() {
            for (param, given) in [
                ("chat_template_kwargs", self.chat_template_kwargs.is_some()),
                ("add_generation_prompt", self.add_generation_prompt.is_some()),
            ] {
                if given {
                    let message = format!("`{param}` is allowed only with `messages`");
                    return Err(ApiError::invalid(Some(param), message));
                }
            }
        }
        let mut requests: Vec<Request> = match (self.prompt, self.messages) {
            (Some(prompt), None) => prompt.into_prompts().into_iter().map(engine_request).collect(),
            (None, Some(conversation)) => {
                let mut options = ChatOptions {
                    special_tokens_in_messages: app.special_tokens_in_messages,
                    add_generation_prompt: self.add_generation_prompt.unwrap_or(true),
                    variables: self.chat_template_kwargs.unwrap_or_default(),
                    ..ChatOptions::default()
                };
                options.describe_tools = tool_use(app, &options)?.is_described;
                vec![
                    Request::chat(messages(conversation, &Ignored::default())?)
                        .chat_options(options),
                ]
            }
            (None, None) => return Err(ApiError::missing("prompt")),
            (Some(_), Some(_)) => {
                let message = "expected either `prompt` or `messages`, got both";
                return Err(ApiError::invalid(Some("messages"), message));
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
