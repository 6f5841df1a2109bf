//! Routes that answer with the model.

use super::Role::Client;
use super::{ErrorForm, Group, Route, delete, get, post};
use crate::api::chat::{ChatCompletion, ChatCompletionChunk, ChatRequest};
use crate::api::completions::{Completion, CompletionRequest};
use crate::api::embeddings::{Embeddings, EmbeddingsRequest, PooledVector};
use crate::api::llama_cpp::{InfillRequest, LlamaCompletionRequest, LlamaEvent, LlamaReply};
use crate::api::messages::{MessageEvent, MessageReply, MessagesRequest, TokenCount};
use crate::api::responses::{Response, ResponseDeleted, ResponseEvent, ResponsesRequest};
use crate::api::scores::{
    Classified, ClassifyRequest, GenerativeScoringRequest, PairScore, RerankRequest, Reranked,
    ScoreList, ScoreRequest,
};
use crate::api::skills::{
    BoxesReply, CaptionRequest, PointsReply, QueryRequest, RegionsRequest, SkillChunk, SkillReply,
};
use crate::handlers::{
    chat, completions, embeddings, llama_cpp, messages, responses, scores, skills,
};

/// The rows.
pub(super) fn group() -> Group {
    let mut routes = vec![
        post("/v1/chat/completions", Client, chat::create)
            .described("createChatCompletion", "Answer a conversation")
            .takes::<ChatRequest>()
            .replies::<ChatCompletion>()
            .streams::<ChatCompletionChunk>()
            .generates()
            .traced_as("chat")
            .fails(&[404, 409]),
        post("/v1/completions", Client, completions::create)
            .described("createCompletion", "Continue prompts")
            .takes::<CompletionRequest>()
            .replies::<Completion>()
            .streams::<Completion>()
            .generates()
            .traced_as("text_completion")
            .fails(&[404, 409]),
        post("/completion", Client, llama_cpp::completion)
            .described("completeText", "Continue a prompt, as llama.cpp's server does")
            .takes::<LlamaCompletionRequest>()
            .replies::<LlamaReply>()
            .streams::<LlamaEvent>()
            .generates()
            .traced_as("text_completion")
            .fails(&[404, 409]),
        post("/infill", Client, llama_cpp::infill)
            .described("infill", "Fill a gap in a text, as llama.cpp's server does")
            .takes::<InfillRequest>()
            .replies::<LlamaReply>()
            .streams::<LlamaEvent>()
            .generates()
            .traced_as("text_completion")
            .fails(&[404, 409]),
        post("/v1/responses", Client, responses::create)
            .described("createResponse", "Answer a conversation, or continue a response")
            .takes::<ResponsesRequest>()
            .replies::<Response>()
            .streams::<ResponseEvent>()
            .generates()
            .traced_as("chat")
            .fails(&[404, 409]),
        get("/v1/responses/{id}", Client, responses::get)
            .described("retrieveResponse", "A response that is kept")
            .replies::<Response>()
            .fails(&[404]),
        delete("/v1/responses/{id}", Client, responses::delete)
            .described("deleteResponse", "Forget a response; those that continue it stay")
            .replies::<ResponseDeleted>()
            .fails(&[404]),
        post("/v1/embeddings", Client, embeddings::create)
            .described(
                "createEmbedding",
                "The vectors of texts, if the model is made for embeddings",
            )
            .takes::<EmbeddingsRequest>()
            .replies::<Embeddings>()
            .generates()
            .traced_as("embeddings")
            .fails(&[404, 409]),
        post("/pooling", Client, embeddings::pool)
            .described("pool", "The vectors or scores of texts, in vLLM's form")
            .takes::<EmbeddingsRequest>()
            .replies::<ScoreList<PooledVector>>()
            .generates()
            .traced_as("embeddings")
            .fails(&[404, 409]),
        post("/v1/messages", Client, messages::create)
            .described("createMessage", "Answer a conversation, in Anthropic's form")
            .takes::<MessagesRequest>()
            .replies::<MessageReply>()
            .streams::<MessageEvent>()
            .generates()
            .traced_as("chat")
            .fails(&[404, 409])
            .fails_as(ErrorForm::Anthropic),
        post("/v1/messages/count_tokens", Client, messages::count_tokens)
            .described(
                "countMessageTokens",
                "Count the tokens of a conversation, in Anthropic's form",
            )
            .takes::<MessagesRequest>()
            .replies::<TokenCount>()
            .fails(&[404])
            .fails_as(ErrorForm::Anthropic),
    ];
    routes.extend(skills());
    routes.extend(scoring());
    Group { name: "Generation", description: "OpenAI's, Anthropic's and Moondream's APIs.", routes }
}

/// The rows of models that compute scores.
fn scoring() -> [Route; 8] {
    let rerank = |path, id| {
        post(path, Client, scores::rerank)
            .described(id, "Rank documents for a query, in Jina's and Cohere's form")
            .takes::<RerankRequest>()
            .replies::<Reranked>()
            .generates()
            .traced_as("rerank")
            .fails(&[404, 409])
    };
    let score = |path, id| {
        post(path, Client, scores::score)
            .described(id, "Score pairs of texts, in vLLM's form")
            .takes::<ScoreRequest>()
            .replies::<ScoreList<PairScore>>()
            .generates()
            .traced_as("score")
            .fails(&[404, 409])
    };
    let classify = |path, id| {
        post(path, Client, scores::classify)
            .described(id, "Find the labels of texts, in vLLM's form")
            .takes::<ClassifyRequest>()
            .replies::<ScoreList<Classified>>()
            .generates()
            .traced_as("classify")
            .fails(&[404, 409])
    };
    [
        rerank("/v1/rerank", "rerank"),
        rerank("/v2/rerank", "rerankV2"),
        rerank("/rerank", "rerankWithoutVersion"),
        score("/v1/score", "score"),
        score("/score", "scoreWithoutVersion"),
        classify("/v1/classify", "classify"),
        classify("/classify", "classifyWithoutVersion"),
        post("/generative_scoring", Client, scores::generative)
            .described("generativeScoring", "Score texts by the next token, in vLLM's form")
            .takes::<GenerativeScoringRequest>()
            .replies::<ScoreList<PairScore>>()
            .generates()
            .traced_as("score")
            .fails(&[404, 409]),
    ]
}

/// The rows of Moondream's API.
fn skills() -> [Route; 4] {
    [
        post("/v1/query", Client, skills::query)
            .described("query", "Answer a question about an image, in Moondream's form")
            .takes::<QueryRequest>()
            .replies::<SkillReply>()
            .streams::<SkillChunk>()
            .generates()
            .traced_as("generate_content")
            .fails(&[404, 409]),
        post("/v1/caption", Client, skills::caption)
            .described("caption", "Describe an image, in Moondream's form")
            .takes::<CaptionRequest>()
            .replies::<SkillReply>()
            .streams::<SkillChunk>()
            .generates()
            .traced_as("generate_content")
            .fails(&[404, 409]),
        post("/v1/point", Client, skills::point)
            .described("point", "Find the points of things in an image, in Moondream's form")
            .takes::<RegionsRequest>()
            .replies::<PointsReply>()
            .generates()
            .traced_as("generate_content")
            .fails(&[404, 409]),
        post("/v1/detect", Client, skills::detect)
            .described("detect", "Find the boxes around things in an image, in Moondream's form")
            .takes::<RegionsRequest>()
            .replies::<BoxesReply>()
            .generates()
            .traced_as("generate_content")
            .fails(&[404, 409]),
    ]
}
