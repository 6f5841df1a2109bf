//! Routes of the served model and its tokenizer.

use super::Role::{Client, Operator};
use super::{Group, Reply, get, post};
use crate::api::adapters::{AdapterList, LoadAdapter, UnloadAdapter};
use crate::api::llama_cpp::{AppliedTemplate, Props};
use crate::api::models::{Model, ModelList, NamedModel, Succeeded};
use crate::api::tokenize::{
    DetokenizeRequest, Detokenized, TokenizeRequest, Tokenized, TokenizerInfo,
};
use crate::handlers::{adapters, admin, llama_cpp, tokenize};

/// The media type of the replies to operators who load and unload adapters.
const TEXT: &str = "text/plain";

/// The rows.
pub(super) fn group() -> Group {
    let routes = vec![
        get("/v1/models", Client, admin::models)
            .described(
                "listModels",
                "The names under which the model is served, and its LoRA adapters",
            )
            .replies::<ModelList>(),
        get("/v1/models/{*id}", Client, admin::model)
            .described(
                "retrieveModel",
                "The model under one of its names, which may contain slashes",
            )
            .replies::<Model>()
            .fails(&[400, 404]),
        post("/models/load", Operator, admin::load_model)
            .described("loadModel", "Load a model of a server of several, as in llama.cpp")
            .takes::<NamedModel>()
            .replies::<Succeeded>()
            .fails(&[404]),
        post("/models/unload", Operator, admin::unload_model)
            .described("unloadModel", "Unload a model of a server of several when it is idle")
            .takes::<NamedModel>()
            .replies::<Succeeded>()
            .fails(&[404, 501]),
        post("/v1/load_lora_adapter", Operator, adapters::load)
            .described("loadLoraAdapter", "Load a LoRA adapter from the server's disk")
            .takes::<LoadAdapter>()
            .replies_as(Reply::Text(TEXT))
            .fails(&[404, 501]),
        post("/v1/unload_lora_adapter", Operator, adapters::unload)
            .described("unloadLoraAdapter", "Unload a LoRA adapter; requests that use it go on")
            .takes::<UnloadAdapter>()
            .replies_as(Reply::Text(TEXT))
            .fails(&[404]),
        get("/v1/lora_adapters", Operator, adapters::list)
            .described("listLoraAdapters", "The LoRA adapters, their sizes and their use")
            .replies::<AdapterList>(),
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
        post("/apply-template", Client, llama_cpp::apply_template)
            .described("applyTemplate", "The prompt of a conversation as text, as in llama.cpp")
            .takes::<TokenizeRequest>()
            .replies::<AppliedTemplate>()
            .fails(&[404]),
        get("/props", Client, llama_cpp::props)
            .described("props", "The served model, as in llama.cpp's server")
            .replies::<Props>(),
    ];
    let description = "The served model, its LoRA adapters and its tokenizer.";
    Group { name: "Models and tokens", description, routes }
}
