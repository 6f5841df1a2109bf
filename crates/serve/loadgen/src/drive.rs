//! Sends conversations to a [`Target`] and records when each token arrived.
//!
//! [`open_loop`] sends each conversation at its start time, however slow the target is: this shows
//! the latency for users at a given rate of arrivals. [`closed_loop`] keeps a fixed number of
//! conversations in progress: this shows the capacity of the target. [`in_turns`] lets many
//! conversations alternate, so that each of them waits for the others between its turns.

use std::fmt;
use std::time::{Duration, Instant};

use futures::StreamExt;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::metrics::RequestRecord;
use super::workload::{Conversation, Turn};

/// The target of a load: an engine in this process ([`stolon::Engine`]), or a server
/// ([`HttpTarget`](super::http::HttpTarget)).
pub trait Target: Clone + Send + Sync + 'static {
    /// The turns and answers of a conversation so far, in the form from which the target makes
    /// prompts.
    type History: Default + Send;
    /// A request that was sent, and whose answer has not been read.
    type Answer: Send;

    /// Appends a turn to the history and sends it. Requests are submitted in the order of their
    /// arrival. A target that cannot accept requests immediately returns without waiting, and sends
    /// the request when its answer is read.
    ///
    /// # Errors
    /// A [`Failure`] ends the conversation.
    fn submit(
        &self,
        history: &mut Self::History,
        turn: &Turn,
        priority: i32,
    ) -> impl Future<Output = Result<Self::Answer, Failure>> + Send;

    /// Reads an answer to its end, records it, and appends it to the history. `clock` gives the
    /// times of the record.
    ///
    /// # Errors
    /// A [`Failure`] ends the conversation.
    fn read(
        &self,
        answer: Self::Answer,
        history: &mut Self::History,
        record: &mut RequestRecord,
        clock: Clock,
    ) -> impl Future<Output = Result<(), Failure>> + Send;
}

/// The time since a run began.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Clock {
    /// Seconds since the run began.
    #[must_use]
    pub fn now(self) -> f64 {
        self.0.elapsed().as_secs_f64()
    }
}

/// Why a request was not answered.
#[derive(Debug)]
pub enum Failure {
    /// The target refused the request because it is overloaded.
    Overloaded {
        /// Time after which it wants to be asked again, if it says one.
        retry_after: Option<Duration>,
    },
    /// The request failed; the run continues. Failures are counted by `kind`.
    Counted {
        /// A few words that are the same for all failures of one sort.
        kind: String,
        /// Message about this request.
        message: String,
    },
    /// The run ends with this error.
    Fatal(anyhow::Error),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Overloaded { .. } => f.write_str("the server is overloaded (status 429)"),
            Self::Counted { kind, message } => write!(f, "{kind}: {message}"),
            Self::Fatal(error) => write!(f, "{error:#}"),
        }
    }
}

/// The measurements of a run.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// The answered requests: by conversation in the order of the workload, then by turn.
    pub records: Vec<RequestRecord>,
    /// For each request that the target refused because it was overloaded: how long the refusal
    /// took. A refusal ends its conversation.
    pub refusals: Vec<Duration>,
    /// Kind and message of each request that failed otherwise, which ends its conversation, too.
    pub failures: Vec<(String, String)>,
    /// Time from the start to the end of the last conversation.
    pub elapsed: Duration,
}

/// Starts each conversation at its time, whether or not earlier ones have been answered.
/// `on_finished` is called after each conversation.
///
/// # Errors
/// The first [`Failure::Fatal`]; all requests are then canceled.
pub async fn open_loop<T: Target>(
    target: &T,
    conversations: &[Conversation],
    on_finished: impl Fn(),
) -> anyhow::Result<Measured> {
    let begin = Instant::now();
    let mut tasks = JoinSet::new();
    let mut clients: Vec<Option<Client<T>>> = conversations.iter().map(|_| None).collect();
    for (index, conversation) in conversations.iter().enumerate() {
        let due = tokio::time::Instant::from_std(begin + conversation.start);
        loop {
            tokio::select! {
                biased;
                () = tokio::time::sleep_until(due) => break,
                Some(finished) = tasks.join_next() => {
                    let (index, client) = finished?;
                    clients[index] = Some(client?);
                    on_finished();
                }
            }
        }
        let mut client = Client::new(target.clone(), conversation.clone(), begin);
        // Submitted here rather than in the task, so that requests arrive in the workload's order.
        let first = client.submit().await?;
        tasks.spawn(async move { (index, client.run(first).await) });
    }
    while let Some(finished) = tasks.join_next().await {
        let (index, client) = finished?;
        clients[index] = Some(client?);
        on_finished();
    }
    Ok(measured(begin, clients.into_iter().flatten()))
}

/// Runs all conversations, `concurrency` of them at a time: each time one ends, the next begins.
/// Start times and pauses between turns are ignored. `on_finished` is called after each
/// conversation.
///
/// # Errors
/// As [`open_loop`].
pub async fn closed_loop<T: Target>(
    target: &T,
    conversations: &[Conversation],
    concurrency: usize,
    on_finished: impl Fn(),
) -> anyhow::Result<Measured> {
    let begin = Instant::now();
    let clients = conversations.iter().enumerate().map(|(index, conversation)| {
        let conversation = Conversation { pause: Duration::ZERO, ..conversation.clone() };
        let mut client = Client::new(target.clone(), conversation, begin);
        async move {
            let first = client.submit().await?;
            anyhow::Ok((index, client.run(first).await?))
        }
    });
    let mut running = futures::stream::iter(clients).buffer_unordered(concurrency);
    let mut finished = Vec::with_capacity(conversations.len());
    while let Some(client) = running.next().await {
        finished.push(client?);
        on_finished();
    }
    finished.sort_by_key(|(index, _)| *index);
    Ok(measured(begin, finished.into_iter().map(|(_, client)| client)))
}

/// Runs all conversations, with `concurrency` requests in progress at a time. A conversation's next
/// turn is sent after the turns of all others that were due before it. Start times and pauses are
/// ignored. `on_answered` is called after each answer.
///
/// # Errors
/// As [`open_loop`].
pub async fn in_turns<T: Target>(
    target: &T,
    conversations: &[Conversation],
    concurrency: usize,
    on_answered: impl Fn(),
) -> anyhow::Result<Measured> {
    let begin = Instant::now();
    // The permits are given in the order in which they were asked for.
    let permits = Semaphore::new(concurrency);
    let clients = conversations.iter().map(|conversation| async {
        let mut client = Client::new(target.clone(), conversation.clone(), begin);
        loop {
            let _permit = permits.acquire().await?;
            let Some(sent) = client.submit().await? else { break };
            if !client.read(sent).await? {
                break;
            }
            on_answered();
        }
        anyhow::Ok(client)
    });
    let finished: Vec<_> = futures::future::try_join_all(clients).await?;
    Ok(measured(begin, finished))
}

fn measured<T: Target>(begin: Instant, clients: impl IntoIterator<Item = Client<T>>) -> Measured {
    let mut measured = Measured { elapsed: begin.elapsed(), ..Measured::default() };
    for client in clients {
        measured.records.extend(client.records);
        measured.refusals.extend(client.refusal);
        measured.failures.extend(client.failure);
    }
    measured
}

/// A conversation in progress.
struct Client<T: Target> {
    target: T,
    conversation: Conversation,
    /// Start of the run; the times in records count from it.
    clock: Clock,
    /// All turns and answers so far: the prompt of the next turn.
    history: T::History,
    turns_sent: usize,
    records: Vec<RequestRecord>,
    refusal: Option<Duration>,
    failure: Option<(String, String)>,
}

/// A request that was submitted.
struct Sent<T: Target> {
    record: RequestRecord,
    answer: T::Answer,
}

impl<T: Target> Client<T> {
    fn new(target: T, conversation: Conversation, begin: Instant) -> Self {
        Self {
            target,
            conversation,
            clock: Clock(begin),
            history: T::History::default(),
            turns_sent: 0,
            records: Vec::new(),
            refusal: None,
            failure: None,
        }
    }

    /// Submits the next turn. `None` if there is none, or if it failed.
    async fn submit(&mut self) -> anyhow::Result<Option<Sent<T>>> {
        let Some(turn) = self.conversation.turns.get(self.turns_sent) else { return Ok(None) };
        self.turns_sent += 1;
        let sent_at = self.clock.now();
        match self.target.submit(&mut self.history, turn, self.conversation.priority).await {
            Ok(answer) => {
                let record = RequestRecord { sent_at, ..RequestRecord::default() };
                Ok(Some(Sent { record, answer }))
            }
            Err(failure) => {
                self.fail(failure, sent_at)?;
                Ok(None)
            }
        }
    }

    /// Reads the answer to `sent` and continues the conversation to its end.
    async fn run(mut self, mut sent: Option<Sent<T>>) -> anyhow::Result<Self> {
        while let Some(request) = sent {
            if !self.read(request).await? {
                break;
            }
            if self.turns_sent < self.conversation.turns.len() {
                tokio::time::sleep(self.conversation.pause).await;
            }
            sent = self.submit().await?;
        }
        Ok(self)
    }

    /// Reads an answer. Returns whether the conversation continues.
    async fn read(&mut self, sent: Sent<T>) -> anyhow::Result<bool> {
        let Sent { mut record, answer } = sent;
        let read = self.target.read(answer, &mut self.history, &mut record, self.clock).await;
        match read {
            Ok(()) => self.records.push(record),
            Err(failure) => {
                self.fail(failure, record.sent_at)?;
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn fail(&mut self, failure: Failure, sent_at: f64) -> anyhow::Result<()> {
        match failure {
            Failure::Overloaded { .. } => {
                let seconds = (self.clock.now() - sent_at).max(0.0);
                self.refusal = Some(Duration::from_secs_f64(seconds));
            }
            Failure::Counted { kind, message } => self.failure = Some((kind, message)),
            Failure::Fatal(error) => return Err(error),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex, PoisonError};

    use super::*;

    /// Notes the first token of every turn.
    #[derive(Clone, Default)]
    struct Notes(Arc<Mutex<Vec<u32>>>);

    impl Target for Notes {
        type History = ();
        type Answer = ();

        async fn submit(&self, _: &mut (), turn: &Turn, _: i32) -> Result<(), Failure> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).push(turn.tokens[0]);
            Ok(())
        }

        async fn read(
            &self,
            (): (),
            _: &mut (),
            record: &mut RequestRecord,
            clock: Clock,
        ) -> Result<(), Failure> {
            tokio::task::yield_now().await;
            record.token_times.push(clock.now());
            Ok(())
        }
    }

    /// Goal: conversations that take turns come around in order with every concurrency, and
    /// their records are by conversation, then by turn.
    #[tokio::test]
    async fn conversations_take_turns() {
        let turn = |id| Turn { tokens: vec![id], output_tokens: 1 };
        let plan: Vec<Conversation> = (0..3)
            .map(|client| Conversation {
                turns: vec![turn(client), turn(10 + client)],
                ..Conversation::default()
            })
            .collect();
        for concurrency in 1..=3 {
            let notes = Notes::default();
            let measured = in_turns(&notes, &plan, concurrency, || {}).await.expect("answers");
            assert_eq!(measured.records.len(), 6);
            let sent = notes.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
            assert_eq!(sent, [0, 1, 2, 10, 11, 12], "{concurrency} at a time");
        }
    }
}
