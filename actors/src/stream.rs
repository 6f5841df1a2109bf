//! The stream of one request's events, owned by the caller.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures::Stream;
use ractor::ActorRef;
use stolon_scheduler::{EngineError, Event, EventReceiver};

use crate::admission::AdmissionMessage;
use crate::handle::Shared;
use crate::supervisor::{Generation, GenerationEnd, end_error};

/// The events of one request. Dropping the stream cancels the request.
#[derive(Debug)]
pub struct SequenceStream {
    id: u64,
    events: EventReceiver,
    admission: ActorRef<AdmissionMessage>,
    /// Why the generation ended, if the event channel closes before the request has ended.
    end: GenerationEnd,
    /// Keeps the engine alive while the stream of a request exists.
    _shared: Option<Arc<Shared>>,
    ended: bool,
}

impl SequenceStream {
    pub(crate) fn new(
        id: u64,
        events: EventReceiver,
        generation: &Generation,
        shared: Option<Arc<Shared>>,
    ) -> SequenceStream {
        let (admission, end) = (generation.admission.clone(), generation.end.clone());
        SequenceStream { id, events, admission, end, _shared: shared, ended: false }
    }

    /// Ends the request because the caller needs no more tokens, for example after a stop string.
    /// It counts as finished and not as canceled.
    pub fn complete(self) {
        self.events.complete();
    }

    /// The next event; `None` after the end.
    pub async fn next(&mut self) -> Option<Result<Event, EngineError>> {
        std::future::poll_fn(|context| Pin::new(&mut *self).poll_next(context)).await
    }
}

impl Stream for SequenceStream {
    type Item = Result<Event, EngineError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let received = ready!(self.events.poll(context));
        if received.resume {
            // Fails only if the engine has stopped.
            let _ = self.admission.cast(AdmissionMessage::Resume);
        }
        let event = match received.event {
            Some(event) => event,
            None => Err(end_error(ready!(Pin::new(&mut self.end).poll(context)))),
        };
        self.ended = matches!(event, Err(_) | Ok(Event::Finished(_)));
        Poll::Ready(Some(event))
    }
}

impl Drop for SequenceStream {
    fn drop(&mut self) {
        if !self.ended {
            // Fails only if the engine has stopped, and the request with it.
            let _ = self.admission.cast(AdmissionMessage::Cancel(self.id));
        }
    }
}
