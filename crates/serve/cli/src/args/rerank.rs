//! The flags of a language model that is a reranker.

use std::path::PathBuf;

use clap::Args;
use stolon::EngineBuilder;

use super::files;

/// The answers and the prompt of a reranker.
#[derive(Clone, Debug, Args)]
pub struct RerankArgs {
    /// Rank documents by the probability of the first of two answers, which are one token each:
    /// `yes,no`; or by the logit of a single one
    ///
    /// For language models such as Qwen3-Reranker. Not needed if the model's files name the tokens,
    /// as those of sentence-transformers and of llama.cpp do.
    #[arg(long, value_name = "YES[,NO]", value_delimiter = ',', num_args = 1)]
    pub rerank_tokens: Vec<String>,
    /// File with the prompt of a reranker: a text with {query} and, after it, {document}
    ///
    /// By default the template of the model's files, or that of Qwen3-Reranker.
    #[arg(long, value_name = "FILE")]
    pub rerank_template: Option<PathBuf>,
}

impl RerankArgs {
    /// # Errors
    /// If there are more than two tokens, or the template cannot be read.
    pub(super) fn apply(&self, builder: EngineBuilder) -> anyhow::Result<EngineBuilder> {
        let builder = match self.rerank_tokens.as_slice() {
            [] => builder,
            [positive] => builder.rerank_tokens(positive, None),
            [positive, negative] => builder.rerank_tokens(positive, Some(negative)),
            more => {
                anyhow::bail!("--rerank-tokens: expected one or two tokens, got {}", more.len())
            }
        };
        Ok(match &self.rerank_template {
            Some(path) => builder.rerank_template(files::read_template(path)?),
            None => builder,
        })
    }
}
