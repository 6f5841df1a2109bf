//! Sends conversations to an engine and records when each token arrived.
//!
//! [`open_loop`] sends each conversation at its start time, however slow the engine is: this shows
//! what users see at a given rate of arrivals. [`closed_loop`] keeps a fixed number of
//! conversations in progress: this shows what the engine can serve.

use std::time::{Duration, Instant};

use futures::StreamExt;
use stolon::{Engine, EngineError, Error, Event, Request, TokenStream};
use tokio::task::JoinSet;

use super::metrics::RequestRecord;
use super::workload::Conversation;

/// What a run measured.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// The answered requests: by conversation in the order of the workload, then by turn.
    pub records: Vec<RequestRecord>,
    /// For each request that the engine refused because it was overloaded: how long the refusal
    /// took. A refusal ends its conversation.
    pub refusals: Vec<Duration>,
    /// Time from the start to the end of the last conversation.
    pub elapsed: Duration,
}

/// Starts each conversation at its time, whether or not earlier ones have been answered.
/// `on_finished` is called after each conversation.
///
/// # Errors
/// The first error of any request other than [`EngineError::Overloaded`]; all others are then cancelled.
pub async fn open_loop(
    engine: &Engine,
    conversations: &[Conversation],
    on_finished: impl Fn(),
) -> anyhow::Result<Measured> {
    let begin = Instant::now();
    let mut tasks = JoinSet::new();
    let mut clients: Vec<Option<Client>> = conversations.iter().map(|_| None).collect();
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
        let mut client = Client::new(engine.clone(), conversation.clone(), begin);
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
pub async fn closed_loop(
    engine: &Engine,
    conversations: &[Conversation],
    concurrency: usize,
    on_finished: impl Fn(),
) -> anyhow::Result<Measured> {
    let begin = Instant::now();
    let clients = conversations.iter().enumerate().map(|(index, conversation)| {
        let conversation = Conversation { pause: Duration::ZERO, ..conversation.clone() };
        let mut client = Client::new(engine.clone(), conversation, begin);
        async move {
            let first = client.submit().await?;
            Ok::<_, Error>((index, client.run(first).await?))
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

fn measured(begin: Instant, clients: impl IntoIterator<Item = Client>) -> Measured {
    let mut measured = Measured { elapsed: begin.elapsed(), ..Measured::default() };
    for client in clients {
        measured.records.extend(client.records);
        measured.refusals.extend(client.refusal);
    }
    measured
}

/// A conversation in progress.
struct Client {
    engine: Engine,
    conversation: Conversation,
    /// Start of the run; the times in records count from it.
    begin: Instant,
    /// Token ids of all turns and answers so far: the prompt of the next turn.
    history: Vec<u32>,
    turns_sent: usize,
    records: Vec<RequestRecord>,
    refusal: Option<Duration>,
}

/// A request that the engine accepted.
struct Sent {
    record: RequestRecord,
    stream: TokenStream,
}

impl Client {
    fn new(engine: Engine, conversation: Conversation, begin: Instant) -> Self {
        let history = Vec::new();
        let (turns_sent, records, refusal) = (0, Vec::new(), None);
        Self { engine, conversation, begin, history, turns_sent, records, refusal }
    }

    /// Submits the next turn. `None` if there is none, or if the engine is overloaded.
    async fn submit(&mut self) -> Result<Option<Sent>, Error> {
        let Some(turn) = self.conversation.turns.get(self.turns_sent) else { return Ok(None) };
        self.turns_sent += 1;
        self.history.extend_from_slice(&turn.tokens);
        let request = Request::tokens(self.history.clone())
            .max_tokens(turn.output_tokens)
            .priority(self.conversation.priority)
            .ignore_eos(true);
        let sent = Instant::now();
        match self.engine.generate(request).await {
            Ok(stream) => {
                let sent_at = sent.duration_since(self.begin).as_secs_f64();
                let record = RequestRecord { sent_at, ..RequestRecord::default() };
                Ok(Some(Sent { record, stream }))
            }
            Err(Error::Engine(EngineError::Overloaded { .. })) => {
                self.refusal = Some(sent.elapsed());
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Reads the answer to `sent` and continues the conversation to its end.
    async fn run(mut self, mut sent: Option<Sent>) -> Result<Self, Error> {
        while let Some(Sent { mut record, stream }) = sent {
            self.read(&mut record, stream).await?;
            self.records.push(record);
            if self.turns_sent < self.conversation.turns.len() {
                tokio::time::sleep(self.conversation.pause).await;
            }
            sent = self.submit().await?;
        }
        Ok(self)
    }

    async fn read(
        &mut self,
        record: &mut RequestRecord,
        mut stream: TokenStream,
    ) -> Result<(), Error> {
        while let Some(event) = stream.next().await {
            match event? {
                Event::Token(token) => {
                    // The last event of a stream may have text but no token.
                    if let Some(id) = token.id {
                        record.token_times.push(self.begin.elapsed().as_secs_f64());
                        self.history.push(id);
                    }
                }
                Event::Finished(finish) => {
                    record.prompt_tokens = finish.usage.prompt_tokens;
                    record.cached_tokens = finish.usage.cached_tokens;
                }
                _ => {}
            }
        }
        Ok(())
    }
}
