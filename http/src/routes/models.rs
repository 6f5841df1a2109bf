//! Routes of the served model and its tokenizer.

use super::Role::Client;
use super::{Group, get, post};
use crate::api::models::{Model, ModelList};
use crate::api::tokenize::{
    DetokenizeRequest, Detokenized, TokenizeRequest, Tokenized, TokenizerInfo,
};
use crate::{admin, tokenize};

/// The rows.
pub(super) fn group() -> Group {
    let routes = vec![
        get("/v1/models", Client, admin::models)
            .described("listModels", "The names under which the model is served")
            .replies::<ModelList>(),
        get("/v1/models/{*id}", Client, admin::model)
            .described(
                "retrieveModel",
                "The model under one of its names, which may contain slashes",
            )
            .replies::<Model>()
            .fails(&[400, 404]),
        post("/tokenize", Client, tokenize::tokenize)
            .described("tokenize", "The token ids of a text or of a conversation")
            .takes::<TokenizeRequest>()
            .replies::<Tokenized>()
            .fails(&[404]),
        post("/detokenize", Client, tokenize::detokenize)
            .described("detokenize", "The text of token ids")
            .takes::<DetokenizeRequest>()
            .replies::<Detokenized>()
            .fails(&[404]),
        get("/tokenizer_info", Client, tokenize::info)
            .described("tokenizerInfo", "Special tokens and the chat template")
            .replies::<TokenizerInfo>(),
    ];
    let description = "The served model and its tokenizer.";
    Group { name: "Models and tokens", description, routes }
}
