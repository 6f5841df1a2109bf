//! Sends conversations to a [`Target`] and records when each token arrived.
//!
//! [`open_loop`] sends each conversation at its start time, however slow the target is: this shows
//! what users see at a given rate of arrivals. [`closed_loop`] keeps a fixed number of
//! conversations in progress: this shows what the target can serve.

use std::time::{Duration, Instant};

use futures::StreamExt;
use tokio::task::JoinSet;

use super::metrics::RequestRecord;
use super::workload::{Conversation, Turn};

/// What conversations are sent to: an engine in this process ([`stolon::Engine`]), or a server
/// ([`HttpTarget`](super::http::HttpTarget)).
pub trait Target: Clone + Send + Sync + 'static {
    /// What was said in a conversation so far, in the form of which prompts are made.
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
    Overloaded,
    /// The request failed; the run continues. Failures are counted by `kind`.
    Counted {
        /// A few words that are the same for all failures of one sort.
        kind: String,
        /// What happened to this request.
        message: String,
    },
    /// The run ends with this error.
    Fatal(anyhow::Error),
}

/// What a run measured.
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
/// The first [`Failure::Fatal`]; all requests are then cancelled.
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
        while let Some(Sent { mut record, answer }) = sent {
            let read = self.target.read(answer, &mut self.history, &mut record, self.clock).await;
            if let Err(failure) = read {
                self.fail(failure, record.sent_at)?;
                break;
            }
            self.records.push(record);
            if self.turns_sent < self.conversation.turns.len() {
                tokio::time::sleep(self.conversation.pause).await;
            }
            sent = self.submit().await?;
        }
        Ok(self)
    }

    fn fail(&mut self, failure: Failure, sent_at: f64) -> anyhow::Result<()> {
        match failure {
            Failure::Overloaded => {
                let seconds = (self.clock.now() - sent_at).max(0.0);
                self.refusal = Some(Duration::from_secs_f64(seconds));
            }
            Failure::Counted { kind, message } => self.failure = Some((kind, message)),
            Failure::Fatal(error) => return Err(error),
        }
        Ok(())
    }
}
