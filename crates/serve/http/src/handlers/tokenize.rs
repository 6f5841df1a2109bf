//! The handlers of `POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::json;
use stolon::{ChatOptions, Request};

use crate::api::chat::Message;
use crate::api::tokenize::{
    DetokenizeRequest, Detokenized, TokenizeRequest, Tokenized, TokenizerInfo,
};
use crate::guard::access::Caller;
use crate::handlers::app::App;
use crate::handlers::chat::{messages, tools};
use crate::handlers::context::{Incoming, RequestContext};
use crate::handlers::logprobs::token_piece;
use crate::handlers::options;
use crate::wire::advice::Ignored;
use crate::wire::error::ApiError;
use crate::wire::history;

/// `POST /tokenize`.
pub(crate) async fn tokenize(
    Incoming { body: mut request, context }: Incoming<TokenizeRequest>,
) -> Result<Json<Tokenized>, ApiError> {
    let RequestContext { app, caller, ignored, held: _held, .. } = context;
    if let Some(model) = &request.model {
        app.check_model(model, &ignored)?;
    }
    let tokens = match (request.prompt.take(), request.messages.take()) {
        (Some(prompt), None) => {
            text_tokens(&app, prompt, &request, caller.identity.clone()).await?
        }
        (None, Some(conversation)) => {
            let return_token_strs = request.return_token_strs.take();
            let tokens = chat_tokens(&app, &caller, &ignored, conversation, request).await?;
            return tokenized(app, caller, tokens, return_token_strs).await;
        }
        (None, None) => return Err(ApiError::missing("prompt")),
        (Some(_), Some(_)) => {
            let message = "expected either `prompt` or `messages`, got both";
            return Err(ApiError::invalid(Some("messages"), message));
        }
    };
    tokenized(app, caller, tokens, request.return_token_strs).await
}

/// The tokens of a conversation, which is rendered as the request says.
pub(crate) async fn chat_tokens(
    app: &App,
    caller: &Caller,
    ignored: &Ignored,
    conversation: Vec<Message>,
    mut request: TokenizeRequest,
) -> Result<Vec<u32>, ApiError> {
    let conversation = messages(conversation, ignored)?;
    let conversation = history::conversation(&app.engine, conversation, true, ignored);
    let options = request.chat_options(app, ignored)?;
    let request = Request::chat(conversation).chat_options(options);
    let tokens = app.engine.prompt_tokens(&caller.sign(request)).await?;
    Ok(options::reported_ids(&app.engine, &tokens))
}

/// The reply with these tokens.
async fn tokenized(
    app: Arc<App>,
    caller: Caller,
    tokens: Vec<u32>,
    return_token_strs: Option<bool>,
) -> Result<Json<Tokenized>, ApiError> {
    let max_model_len = app.engine.model_info().max_positions;
    let count = tokens.len();
    if !return_token_strs.unwrap_or(false) {
        return Ok(Json(Tokenized { count, max_model_len, tokens, token_strs: None }));
    }
    let engine = app.engine.clone();
    let with_texts = move || {
        let texts = tokens.iter().map(|&token| token_piece(&engine, token)).collect();
        Tokenized { count, max_model_len, tokens, token_strs: Some(texts) }
    };
    Ok(Json(app.parser.run(caller.identity, count, with_texts).await?))
}

/// `POST /detokenize`.
pub(crate) async fn detokenize(
    Incoming { body: request, context }: Incoming<DetokenizeRequest>,
) -> Result<Json<Detokenized>, ApiError> {
    let RequestContext { app, caller, ignored, held: _held, .. } = context;
    if let Some(model) = &request.model {
        app.check_model(model, &ignored)?;
    }
    let limit = app.engine.model_info().vocab_size;
    if let Some(token) = request.tokens.iter().find(|&&token| token as usize >= limit) {
        let expected = format!("token ids below {limit}, the size of the vocabulary");
        return Err(ApiError::expected("tokens", &expected, &json!(token)));
    }
    let engine = app.engine.clone();
    let count = request.tokens.len();
    let decode = move || engine.detokenize(&request.tokens, false);
    Ok(Json(Detokenized { prompt: app.parser.run(caller.identity, count, decode).await?? }))
}

/// `GET /tokenizer_info`.
pub(crate) async fn info(State(app): State<Arc<App>>) -> Result<Json<TokenizerInfo>, ApiError> {
    let (engine, info) = (&app.engine, app.engine.model_info());
    // Without a tokenizer, tokens have no text.
    let text = |token: &u32| match engine.detokenize(&[*token], false) {
        Err(stolon::Error::NoTokenizer) => Ok(None),
        text => text.map(Some),
    };
    // The special tokens around an empty text; the last may be the one that ends a text.
    let around = match engine.tokenize("", true).await {
        Err(stolon::Error::NoTokenizer) => Vec::new(),
        around => around?,
    };
    let bos = around.first().filter(|token| !info.eos_token_ids.contains(token));
    let options = ChatOptions::default();
    let template = engine.chat_template().ok().and_then(|template| template.source(&options).ok());
    Ok(Json(TokenizerInfo {
        bos_token: bos.map_or(Ok(None), text)?,
        eos_token: info.eos_token_ids.first().map_or(Ok(None), text)?,
        pad_token: None,
        chat_template: template.map(str::to_owned),
        vocab_size: info.vocab_size,
        model_max_length: info.max_positions,
    }))
}

async fn text_tokens(
    app: &App,
    prompt: String,
    request: &TokenizeRequest,
    client: Option<Arc<str>>,
) -> Result<Vec<u32>, ApiError> {
    if request.add_generation_prompt.is_some() {
        return Err(only_with_messages("add_generation_prompt"));
    }
    if request.continue_final_message == Some(true) {
        return Err(only_with_messages("continue_final_message"));
    }
    if request.chat_template_kwargs.is_some() {
        return Err(only_with_messages("chat_template_kwargs"));
    }
    if request.tools.as_ref().is_some_and(|tools| !tools.is_empty()) {
        return Err(only_with_messages("tools"));
    }
    let add_special = request.add_special_tokens.unwrap_or(true);
    Ok(app.engine.tokenize_for(prompt, add_special, client).await?)
}

fn only_with_messages(param: &str) -> ApiError {
    ApiError::invalid(Some(param), format!("`{param}` is allowed only with `messages`"))
}

impl TokenizeRequest {
    /// How the conversation is rendered.
    fn chat_options(&mut self, app: &App, ignored: &Ignored) -> Result<ChatOptions, ApiError> {
        if self.add_special_tokens == Some(true) {
            let expected = "false with `messages`, because the chat template adds special tokens";
            return Err(ApiError::expected("add_special_tokens", expected, &json!(true)));
        }
        let tools = tools(self.tools.take().unwrap_or_default(), ignored)?;
        let continues = self.continue_final_message.unwrap_or(false);
        if continues && self.add_generation_prompt == Some(true) {
            let message =
                "`continue_final_message` is not possible with `add_generation_prompt`: true";
            return Err(ApiError::invalid(Some("continue_final_message"), message));
        }
        Ok(ChatOptions {
            add_generation_prompt: self.add_generation_prompt.unwrap_or(true) && !continues,
            continue_final_message: continues,
            tools: tools.iter().map(|tool| tool.spec.definition()).collect(),
            variables: self.chat_template_kwargs.take().unwrap_or_default(),
            ..app.chat_options()
        })
    }
}
