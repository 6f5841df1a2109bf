//! One answer for the APIs whose replies are lists of items: OpenAI's Responses and Anthropic's
//! Messages. The whole reply is made by the same code as the streamed one, so both are equal.

use std::collections::VecDeque;
use std::convert::Infallible;

use axum::Json;
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::{Stream, stream};
use serde_json::Value;
use stolon::{AnswerFormat, AnswerParser, AnswerPart, Event, Finish, Request, TokenStream, Usage};

use super::App;
use super::error::ApiError;
use super::options::Call;

/// The name and the content of a server-sent event.
pub(super) type NamedEvent = (&'static str, Value);

/// A reply that grows with the parts of an answer.
pub(super) trait ItemReply: Send + 'static {
    /// The answer begins. `usage` counts the prompt.
    fn begin(&mut self, usage: Usage) -> Vec<NamedEvent>;

    /// The answer goes on.
    fn part(&mut self, part: AnswerPart) -> Vec<NamedEvent>;

    /// The answer has ended.
    fn end(&mut self, finish: &Finish) -> Vec<NamedEvent>;

    /// The answer cannot be completed.
    fn fail(&mut self, error: &ApiError) -> Vec<NamedEvent>;

    /// The whole reply, after its end.
    fn into_value(self) -> Value;
}

/// Runs a request and replies whole or streamed.
pub(super) async fn respond<R: ItemReply>(
    app: &App,
    call: Call,
    mut request: Request,
    format: AnswerFormat,
    reply: R,
) -> Result<Response, ApiError> {
    call.admit(&app.engine, std::slice::from_mut(&mut request)).await?;
    let stream = app.engine.generate(call.apply(request)).await?;
    let parser = Some(AnswerParser::new(format));
    let hides_cached_tokens = app.hide_cached_tokens;
    let mut answer = Answer { stream, parser, reply, begun: false, hides_cached_tokens };
    if call.stream {
        let events = answer.into_events();
        return Ok(Sse::new(events).keep_alive(KeepAlive::default()).into_response());
    }
    while let Some(event) = answer.stream.next().await {
        answer.on_event(event?);
    }
    Ok(Json(answer.reply.into_value()).into_response())
}

/// An answer that is being generated. Dropping it cancels its request.
struct Answer<R> {
    stream: TokenStream,
    /// `None` after the end.
    parser: Option<AnswerParser>,
    reply: R,
    begun: bool,
    hides_cached_tokens: bool,
}

impl<R: ItemReply> Answer<R> {
    /// The events of a streamed reply.
    fn into_events(self) -> impl Stream<Item = Result<sse::Event, Infallible>> {
        let state = (Some(self), VecDeque::new());
        stream::unfold(state, |(mut answer, mut ready)| async move {
            loop {
                if let Some((name, content)) = ready.pop_front() {
                    let content: Value = content;
                    let event = sse::Event::default().event(name).data(content.to_string());
                    return Some((Ok(event), (answer, ready)));
                }
                let running = answer.as_mut()?;
                match running.stream.next().await {
                    Some(Ok(event)) => ready.extend(running.on_event(event)),
                    Some(Err(error)) => {
                        ready.extend(running.reply.fail(&ApiError::from(error)));
                        answer = None;
                    }
                    None => answer = None,
                }
            }
        })
    }

    fn on_event(&mut self, event: Event) -> Vec<NamedEvent> {
        match event {
            // A preempted request starts a second time.
            Event::Started { cached_tokens, .. } if !self.begun => {
                self.begun = true;
                let prompt_tokens = self.stream.prompt_tokens();
                let usage = Usage { prompt_tokens, cached_tokens, ..Usage::default() };
                self.reply.begin(self.shown(usage))
            }
            Event::Token(token) => {
                let parts = self.parser.as_mut().map(|parser| parser.push(&token.text));
                self.add(parts)
            }
            Event::Finished(mut finish) => {
                finish.usage = self.shown(finish.usage);
                let parts = self.parser.take().map(AnswerParser::finish);
                let mut events = self.add(parts);
                events.extend(self.reply.end(&finish));
                events
            }
            _ => Vec::new(),
        }
    }

    fn add(&mut self, parts: Option<Vec<AnswerPart>>) -> Vec<NamedEvent> {
        parts.into_iter().flatten().flat_map(|part| self.reply.part(part)).collect()
    }

    /// The usage as clients may see it.
    fn shown(&self, usage: Usage) -> Usage {
        let cached_tokens = if self.hides_cached_tokens { 0 } else { usage.cached_tokens };
        Usage { cached_tokens, ..usage }
    }
}
