//! An engine in this process as a target of the load generator.

use stolon::{Engine, EngineError, Error, Event, Request, TokenStream};

use super::drive::{Clock, Failure, Target};
use super::metrics::RequestRecord;
use super::workload::Turn;

impl Target for Engine {
    /// Token ids.
    type History = Vec<u32>;
    type Answer = TokenStream;

    async fn submit(
        &self,
        history: &mut Vec<u32>,
        turn: &Turn,
        priority: i32,
    ) -> Result<TokenStream, Failure> {
        history.extend_from_slice(&turn.tokens);
        let request = Request::tokens(history.clone())
            .max_tokens(turn.output_tokens)
            .priority(priority)
            .ignore_eos(true);
        Ok(self.generate(request).await?)
    }

    async fn read(
        &self,
        mut stream: TokenStream,
        history: &mut Vec<u32>,
        record: &mut RequestRecord,
        clock: Clock,
    ) -> Result<(), Failure> {
        while let Some(event) = stream.next().await {
            match event? {
                Event::Token(token) => {
                    // The last event of a stream may have text but no token.
                    if let Some(id) = token.id {
                        record.token_times.push(clock.now());
                        history.push(id);
                    }
                }
                Event::Finished(finish) => {
                    record.prompt_tokens = finish.usage.prompt_tokens;
                    record.cached_tokens = finish.usage.cached_tokens;
                }
                _ => {}
            }
        }
        record.output_tokens = record.token_times.len();
        Ok(())
    }
}

impl From<Error> for Failure {
    /// An engine in this process fails only for reasons that make the figures meaningless.
    fn from(error: Error) -> Self {
        match error {
            Error::Engine(EngineError::Overloaded { retry_after, .. }) => {
                Self::Overloaded { retry_after: Some(retry_after) }
            }
            error => Self::Fatal(error.into()),
        }
    }
}
