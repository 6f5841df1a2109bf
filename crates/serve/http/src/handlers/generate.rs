//! The path of a call through the engine, which is the same for all APIs: from a conversation to a
//! prompt, and from the prompts to the reply.

use axum::Extension;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use futures::future::try_join_all;
use futures::{StreamExt, stream};
use stolon::{Completion, Event, Finish, FinishReason, Prompt, Timings, TokenEvent, TokenStream};

use crate::api::cache::MISS_HEADER;
use crate::api::options::GenerationOptions;
use crate::handlers::cache_misses::{self, header};
use crate::handlers::context::{Purpose, RequestContext};
use crate::handlers::dialogue::Dialogue;
use crate::handlers::options::{ApiOptions, Call};
use crate::handlers::warm_up::Warmed;
use crate::wire::error::ApiError;
use crate::wire::reply::{self, Choice, Dialect, ReplyOptions};

impl Call {
    /// The call of an API whose prompt is a conversation.
    pub(crate) async fn chat(
        context: RequestContext,
        options: GenerationOptions,
        mut own: ApiOptions,
        dialogue: Dialogue,
    ) -> Result<Self, ApiError> {
        let prediction = own.prediction.take();
        let mut call = Self::new(context, options, ApiOptions { is_chat: true, ..own })?;
        call.context.app.check_answers("n", call.choice_count)?;
        call.schema_paths = dialogue.schema_paths();
        call.customs = dialogue.customs();
        let (ids, grammar) = (dialogue.call_ids(), call.grammar.take());
        let prompt = dialogue.prepare(&call.context, |request| call.sign(request), grammar).await?;
        let format = prompt.get_answer_format().cloned().unwrap_or_default();
        let prompt = match prediction {
            Some(text) => prompt.prediction(text),
            None => prompt,
        };
        call.call_ids = ids.with_format(format.tool_calls);
        (call.prompts, call.format) = (vec![prompt], format);
        call.join_session()?;
        call.describe();
        call.truncate().await?;
        call.set_prompt_ids().await?;
        Ok(call)
    }

    /// Replaces each conversation that is longer than the request permits by the part of it that is
    /// kept.
    ///
    /// # Errors
    /// The errors of rendering and tokenizing the prompt, and a prompt with images, which cannot be
    /// cut.
    async fn truncate(&mut self) -> Result<(), ApiError> {
        if !self.truncates() {
            return Ok(());
        }
        for index in 0..self.prompts.len() {
            let mut prompt = self.tokenized(&self.prompts[index]).await?;
            if let Prompt::Tokens(tokens) = prompt.prompt()
                && let Some(kept) = self.kept_of(tokens)?
            {
                prompt = prompt.with_tokens(kept);
            }
            self.prompts[index] = prompt;
        }
        Ok(())
    }

    /// Submits the prompts, each for as many choices as were requested, and replies. The choices of
    /// prompt `p` have the indices `p * n` to `p * n + n - 1`.
    ///
    /// If an explanation of the cache is wanted, or that the prompts are cached, that is the reply.
    pub(crate) async fn respond<D: Dialect>(
        mut self,
        mut dialect: D,
    ) -> Result<Response, ApiError> {
        if self.context.purpose == Purpose::Warm {
            return self.warm().await;
        }
        if self.context.purpose == Purpose::Explain {
            if self.context.app.hide_cached_tokens {
                let message = "the operator does not report cached tokens to clients";
                return Err(ApiError::new(StatusCode::FORBIDDEN, message));
            }
            let requests = self.prompts.iter().map(|prompt| self.sign(prompt.clone()));
            let explained = cache_misses::explain(&self.context.app, requests.collect()).await?;
            return Ok(explained.into_response());
        }
        self.check_prompt_logprobs().await?;
        let rules = self.rules().await?;
        let prompts = std::mem::take(&mut self.prompts);
        let requests = prompts
            .into_iter()
            .map(|prompt| rules.apply(self.apply(prompt).answer_format(self.format.clone())));
        let engine = self.engine();
        let (mut choices, mut miss) = (Vec::new(), None);
        if let Some(candidates) = self.candidate_count {
            // All prompts are submitted before the first is awaited. An error cancels the others.
            let asked =
                requests.map(|request| engine.best_of(request, candidates, self.choice_count));
            let mut usage = self.usage_sum;
            for best in try_join_all(asked).await.map_err(|error| self.refused(error))? {
                usage.add_prompt(best.usage);
                choices.extend(best.completions.into_iter().map(replay));
            }
            self.usage_sum = usage.closed();
        } else {
            for request in requests {
                // If a request is refused, the streams made so far are dropped, which cancels them.
                let streams = engine.generate_choices(request, self.choice_count).await;
                let streams = streams.map_err(|error| self.refused(error))?;
                streams.first().into_iter().for_each(|stream| dialect.marked(stream.marks()));
                let of_prompt = streams.first().and_then(TokenStream::cache_miss);
                miss = miss.or_else(|| of_prompt.filter(|miss| miss.lost_tokens > 0).cloned());
                choices.extend(streams.into_iter().map(TokenStream::boxed));
            }
        }
        // The prompts have been tokenized, and their images decoded.
        self.context.held = None;
        let hides_cached_tokens = self.context.app.hide_cached_tokens;
        let mut reply = self.reply(choices, dialect).await?;
        if let Some(value) = miss.filter(|_| !hides_cached_tokens).as_ref().and_then(header) {
            reply.headers_mut().insert(MISS_HEADER, value);
        }
        Ok(reply)
    }

    /// Computes the prompts, one after another.
    async fn warm(self) -> Result<Response, ApiError> {
        let mut tokens = 0;
        for prompt in &self.prompts {
            let request = self.sign(prompt.clone());
            tokens += self.engine().cache().warm(request).await.map_err(|e| self.refused(e))?;
        }
        Ok((Extension(Warmed(tokens)), StatusCode::NO_CONTENT).into_response())
    }

    /// Replies with the choices of all prompts, for which nothing is generated.
    pub(crate) async fn respond_without_answers<D: Dialect>(
        self,
        dialect: D,
    ) -> Result<Response, ApiError> {
        let finish = Finish {
            reason: FinishReason::Length,
            usage: stolon::Usage::default(),
            timings: Timings::default(),
        };
        let started = Event::Started { prompt_tokens: 0, cached_tokens: 0 };
        let events = [started, Event::Finished(finish)];
        let events = || stream::iter(events.clone()).map(Ok).boxed();
        let choices = (0..self.prompts.len() * self.choice_count).map(|_| events()).collect();
        self.reply(choices, dialect).await
    }

    async fn reply<D: Dialect>(
        self,
        choices: Vec<Choice>,
        dialect: D,
    ) -> Result<Response, ApiError> {
        let options = ReplyOptions {
            stream: self.stream,
            // The engine has looked for stop strings in an answer that is text alone.
            stops: self.stop_strings().filter(|_| !self.format.is_text()),
            min_tokens: self.min_tokens(),
            unreported: self.unreported,
            format: self.format,
            usage: self.usage_sum,
        };
        reply::reply(choices, options, dialect).await
    }
}

/// A complete answer as the events of a stream.
fn replay(completion: Completion) -> Choice {
    let Completion { text, token_ids, logprobs, prompt_logprobs, finish, .. } = completion;
    let Finish { usage: stolon::Usage { prompt_tokens, cached_tokens, .. }, .. } = finish;
    let mut logprobs = logprobs.into_iter();
    let tokens: Vec<TokenEvent> = token_ids
        .into_iter()
        .map(|id| TokenEvent { id: Some(id), text: String::new(), logprob: logprobs.next() })
        .chain([TokenEvent { text, ..TokenEvent::default() }])
        .collect();
    let of_prompt = Some(prompt_logprobs).filter(|entries| !entries.is_empty());
    stream::iter([Event::Started { prompt_tokens, cached_tokens }])
        .chain(stream::iter(of_prompt).map(Event::PromptLogprobs))
        .chain(stream::iter(tokens).map(Event::Token))
        .chain(stream::iter([Event::Finished(finish)]))
        .map(Ok)
        .boxed()
}
