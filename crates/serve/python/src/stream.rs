//! The class `Stream`: the tokens of one answer, for a thread that waits and for an event loop.
//!
//! A task submits the request and reads its events into a small queue. It ends, and the request is
//! canceled, when the stream is closed or dropped.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use stolon::{Event, TokenStream};
use tokio::sync::{mpsc, oneshot};

use crate::answer::{Assembler, Completion, Token};
use crate::error::Failure;
use crate::process::{ProcessBound, runtime, wait_with};

/// Number of tokens that are read before the caller asks for them. The engine pauses the request
/// of a caller that does not.
const QUEUE: usize = 16;

/// The next token, or the whole answer at its end.
#[derive(Debug, IntoPyObject)]
enum Item {
    Token(Token),
    End(Completion),
}

type Items = mpsc::Receiver<Result<Item, Failure>>;

/// The tokens of one answer. `stolon.Stream` wraps it.
#[pyclass(frozen, module = "stolon._native")]
#[derive(Debug)]
pub(crate) struct Stream {
    state: ProcessBound<State>,
}

#[derive(Debug)]
struct State {
    items: Arc<tokio::sync::Mutex<Items>>,
    /// Dropping it ends the task.
    cancel: Mutex<Option<oneshot::Sender<()>>>,
}

impl Stream {
    /// Begins to read the stream that `submitted` makes.
    pub(crate) fn start(
        py: Python<'_>,
        submitted: impl Future<Output = Result<(TokenStream, Assembler), Failure>> + Send + 'static,
    ) -> PyResult<Stream> {
        let (sender, items) = mpsc::channel(QUEUE);
        let (cancel, mut canceled) = oneshot::channel::<()>();
        runtime(py)?.spawn(async move {
            tokio::select! {
                _ = &mut canceled => {}
                () = read(submitted, sender) => {}
            }
        });
        let items = Arc::new(tokio::sync::Mutex::new(items));
        let state = State { items, cancel: Mutex::new(Some(cancel)) };
        Ok(Stream { state: ProcessBound::new(state) })
    }
}

#[pymethods]
impl Stream {
    /// Waits for the next item. `None` after the last one.
    fn next(&self, py: Python<'_>) -> PyResult<Option<Item>> {
        let items = Arc::clone(&self.state.get(py)?.items);
        let item = wait_with(py, async move { items.lock().await.recv().await }, |_| Ok(()))?;
        Ok(item.transpose()?)
    }

    /// Calls `done` with the next item, or `None` after the last one, and with an exception or
    /// `None`, on a thread that may wait for the interpreter's lock.
    fn next_async(&self, py: Python<'_>, done: Py<PyAny>) -> PyResult<()> {
        let items = Arc::clone(&self.state.get(py)?.items);
        runtime(py)?.spawn(async move {
            let item = items.lock().await.recv().await;
            let call = move || {
                // Nobody waits when the interpreter has ended.
                Python::try_attach(|py| {
                    let called = match item.transpose() {
                        Ok(item) => done.call1(py, (item, None::<Py<PyAny>>)),
                        Err(failure) => {
                            let exception = PyErr::from(failure).into_value(py);
                            done.call1(py, (None::<Item>, exception))
                        }
                    };
                    // The event loop may have been closed.
                    drop(called);
                })
            };
            drop(tokio::task::spawn_blocking(call).await);
        });
        Ok(())
    }

    /// Cancels the request. Items that were read stay.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let state = self.state.get(py)?;
        drop(state.cancel.lock().unwrap_or_else(PoisonError::into_inner).take());
        Ok(())
    }
}

/// Reads a stream to its end, or until nobody reads the queue.
async fn read(
    submitted: impl Future<Output = Result<(TokenStream, Assembler), Failure>>,
    sender: mpsc::Sender<Result<Item, Failure>>,
) {
    let (mut events, mut assembler) = match submitted.await {
        Ok(submitted) => submitted,
        Err(failure) => return drop(sender.send(Err(failure)).await),
    };
    while let Some(event) = events.next().await {
        let item = match event {
            Ok(Event::PromptLogprobs(entries)) => {
                assembler.set_prompt_logprobs(entries);
                continue;
            }
            Ok(Event::Token(token)) => Ok(Item::Token(assembler.token(token))),
            Ok(Event::Finished(finish)) => {
                let (last, completion) = assembler.finish(finish);
                if let Some(token) = last {
                    drop(sender.send(Ok(Item::Token(token))).await);
                }
                return drop(sender.send(Ok(Item::End(completion))).await);
            }
            Ok(_) => continue,
            Err(error) => Err(error.into()),
        };
        if sender.send(item).await.is_err() {
            return;
        }
    }
}
