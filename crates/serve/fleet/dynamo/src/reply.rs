//! The stream of an answer, as Dynamo expects it.

use dynamo_backend_common::engine::GenerateContext;
use dynamo_backend_common::{
    BackendError, DynamoError, LLMEngineOutput, LLMEngineOutputExt, PromptTokensDetails,
    StopReason, TopLogprob, usage,
};
use futures::stream::BoxStream;
use stolon::{Event, Finish, FinishReason, TokenEvent, TokenStream, Usage};

use crate::error::{error, of_engine};

/// An item of a stream: a part of the answer, or the error that ends it.
type Chunk = Result<LLMEngineOutput, DynamoError>;

/// The parts of the answer. The last one has a finish reason or is an error. If the context is
/// stopped, the stream ends with `Cancelled`, and the request with the stream.
pub(crate) fn reply(
    mut tokens: TokenStream,
    context: GenerateContext,
) -> BoxStream<'static, Chunk> {
    let stream = async_stream::stream! {
        loop {
            let event = tokio::select! {
                biased;
                () = context.stopped() => None,
                event = tokens.next() => Some(event),
            };
            let Some(event) = event else {
                yield Ok(LLMEngineOutput::cancelled());
                return;
            };
            match event {
                Some(Ok(Event::Token(token))) => {
                    if let Some(chunk) = part(token) {
                        yield Ok(chunk);
                    }
                }
                Some(Ok(Event::Finished(finish))) => {
                    yield Ok(end(&finish));
                    return;
                }
                Some(Ok(_)) => {}
                Some(Err(cause)) => {
                    yield Err(of_engine(&cause));
                    return;
                }
                None => {
                    let message = "the answer ended without a reason";
                    yield Err(error(BackendError::StreamIncomplete, message));
                    return;
                }
            }
        }
    };
    Box::pin(stream)
}

/// A token. The text of an answer is made by Dynamo's frontend, which also looks for stop strings.
fn part(token: TokenEvent) -> Option<LLMEngineOutput> {
    let mut output = LLMEngineOutput { token_ids: vec![token.id?], ..LLMEngineOutput::default() };
    if let Some(logprob) = token.logprob {
        output.log_probs = Some(vec![f64::from(logprob.logprob)]);
        let top = (1_u32..).zip(&logprob.top).map(|(rank, &(token_id, logprob))| TopLogprob {
            rank,
            token_id,
            token: None,
            logprob: f64::from(logprob),
            bytes: None,
        });
        output.top_logprobs = Some(vec![top.collect()]);
    }
    Some(output)
}

fn end(finish: &Finish) -> LLMEngineOutput {
    let mut output = match &finish.reason {
        FinishReason::Length => LLMEngineOutput::length(),
        _ => LLMEngineOutput::stop(),
    };
    if let FinishReason::StopToken(id) = &finish.reason {
        output.stop_reason = Some(StopReason::Int(i64::from(*id)));
    }
    let Usage { prompt_tokens, cached_tokens, completion_tokens, image_tokens: _ } = finish.usage;
    let mut counts = usage(count(prompt_tokens), count(completion_tokens));
    counts.prompt_tokens_details = Some(PromptTokensDetails {
        cached_tokens: Some(count(cached_tokens)),
        ..PromptTokensDetails::default()
    });
    output.with_usage(counts)
}

fn count(tokens: usize) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use stolon::{Timings, TokenLogprob};

    use super::*;

    /// Goal: log-probabilities keep their tokens and their order, and text alone is not a token.
    #[test]
    fn tokens_have_their_log_probabilities() {
        let top = vec![(9, -0.5), (5, -1.0)];
        let logprob = TokenLogprob { token_id: 5, logprob: -1.0, rank: 2, top };
        let token = TokenEvent { id: Some(5), logprob: Some(logprob), ..TokenEvent::default() };
        let output = part(token).expect("a part");
        assert_eq!((output.token_ids, output.log_probs), (vec![5], Some(vec![-1.0])));
        let top = &output.top_logprobs.expect("most likely tokens")[0];
        assert_eq!((top[0].rank, top[0].token_id, top[1].token_id), (1, 9, 5));
        assert!(part(TokenEvent { text: "x".to_owned(), ..TokenEvent::default() }).is_none());
    }

    /// Goal: the reason and the usage of an answer arrive.
    #[test]
    fn the_end_has_reason_and_usage() {
        let usage =
            Usage { prompt_tokens: 9, cached_tokens: 4, completion_tokens: 3, image_tokens: 0 };
        let finish = |reason| Finish { reason, usage, timings: Timings::default() };
        let output = end(&finish(FinishReason::StopToken(7)));
        assert_eq!(output.stop_reason, Some(StopReason::Int(7)));
        let counts = output.completion_usage.expect("usage");
        assert_eq!((counts.prompt_tokens, counts.completion_tokens), (9, 3));
        let details = counts.prompt_tokens_details.expect("details");
        assert_eq!(details.cached_tokens, Some(4));
        for (reason, name) in [
            (FinishReason::Length, "length"),
            (FinishReason::Repetition, "stop"),
            (FinishReason::Stop, "stop"),
        ] {
            let reason = end(&finish(reason)).finish_reason.expect("a reason");
            assert_eq!(reason.to_string(), name);
        }
    }
}
