//! Routes of Ollama's API.

use super::Role::Client;
use super::{ErrorForm, Group, Route, delete, get, post};
use crate::api::cache::Explanations;
use crate::api::ollama::{
    ChatReply, Embedded, Embeddings, GenerateReply, OllamaChat, OllamaEmbed, OllamaEmbeddings,
    OllamaEvent, OllamaGenerate, OllamaModel, Running, Shown, Status, Tags, Version,
};
use crate::handlers::ollama;

/// The rows.
pub(super) fn group() -> Group {
    let mut routes = vec![
        post("/api/chat", Client, ollama::chat)
            .described("ollamaChat", "Answer a conversation, in Ollama's form")
            .takes::<OllamaChat>()
            .replies::<ChatReply>()
            .lines::<OllamaEvent>()
            .generates()
            .traced_as("chat")
            .fails(&[404, 409]),
        post("/api/generate", Client, ollama::generate)
            .described("ollamaGenerate", "Answer a question, continue a text or fill a gap in it")
            .takes::<OllamaGenerate>()
            .replies::<GenerateReply>()
            .lines::<OllamaEvent>()
            .generates()
            .traced_as("text_completion")
            .fails(&[404, 409]),
        post("/api/embed", Client, ollama::embed)
            .described("ollamaEmbed", "The vectors of texts, in Ollama's form")
            .takes::<OllamaEmbed>()
            .replies::<Embedded>()
            .generates()
            .traced_as("embeddings")
            .fails(&[404, 409]),
        post("/api/embeddings", Client, ollama::embeddings)
            .described("ollamaEmbeddings", "The vector of a text, in an older form of Ollama")
            .takes::<OllamaEmbeddings>()
            .replies::<Embeddings>()
            .generates()
            .traced_as("embeddings")
            .fails(&[404, 409]),
        get("/api/tags", Client, ollama::tags)
            .described("ollamaTags", "The names of the model and of its LoRA adapters")
            .replies::<Tags>(),
        get("/api/ps", Client, ollama::ps)
            .described("ollamaPs", "The model in memory")
            .replies::<Running>(),
        post("/api/show", Client, ollama::show)
            .described("ollamaShow", "The template, context length and capabilities of the model")
            .takes::<OllamaModel>()
            .replies::<Shown>()
            .fails(&[404]),
        post("/api/pull", Client, ollama::pull)
            .described("ollamaPull", "Succeeds for a model that is served; nothing is loaded")
            .takes::<OllamaModel>()
            .replies::<Status>()
            .fails(&[404]),
        get("/api/version", Client, ollama::version)
            .described("ollamaVersion", "The version of Ollama whose API this is")
            .replies::<Version>(),
        post("/api/create", Client, ollama::unavailable),
        post("/api/push", Client, ollama::unavailable),
        post("/api/copy", Client, ollama::unavailable),
        delete("/api/delete", Client, ollama::unavailable),
        post("/api/blobs/{digest}", Client, ollama::unavailable),
    ];
    let explained = |route: Route, id: &'static str| {
        route
            .explains()
            .described(id, "Why a prompt is not cached; nothing is computed")
            .replies::<Explanations>()
            .fails(&[404])
    };
    routes.extend([
        explained(post("/v1/cache/explain/ollama/chat", Client, ollama::chat), "explainOllamaChat")
            .takes::<OllamaChat>(),
        explained(
            post("/v1/cache/explain/ollama/generate", Client, ollama::generate),
            "explainOllamaGenerate",
        )
        .takes::<OllamaGenerate>(),
    ]);
    let routes = routes.into_iter().map(|route| route.fails_as(ErrorForm::Ollama)).collect();
    let description = "Ollama's API, for programs that speak no other one.";
    Group { name: "Ollama", description, routes }
}
