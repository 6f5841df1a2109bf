//! The requests of `stolon verify`, and the order in which they are sent.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use futures::future::join_all;
use indicatif::ProgressBar;
use stolon_loadgen::drive::Failure;
use stolon_loadgen::http::{Answer, HttpTarget, Message};

use super::checks::{Checks, Scenario};
use super::conversations::{Note, Writer};

/// Number of prompts that are asked alone, with nothing of them in the cache.
const COLD: usize = 4;
/// Number of continuations of one note.
const BRANCHES: usize = 8;
/// Sizes of batches: the first is of prompts that were asked alone before, the second of prompts
/// that are asked alone afterwards.
const BATCHES: [usize; 2] = [8, 16];
/// Number of conversations, and the number of their turns.
const GROWING: usize = 3;
const TURNS: usize = 4;
/// Number of prompts that are asked next to canceled requests.
const CANCELED: usize = 4;
/// Length of an unrelated prompt, as a multiple of the length of a note.
const UNRELATED_LENGTH: usize = 4;
/// Number of unrelated prompts that are sent at a time.
const UNRELATED_AT_ONCE: usize = 4;
/// Number of requests that may fail before the run stops.
const MAX_FAILURES: usize = 5;
/// Wait before a request is repeated that was refused without a time.
const PAUSE: Duration = Duration::from_secs(1);

/// How much is asked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// Words of a note.
    pub(super) words: usize,
    /// Maximum number of tokens of an answer.
    pub(super) max_tokens: usize,
    /// Number of long unrelated prompts of a round.
    pub(super) unrelated: usize,
    /// Time for an answer, together with the waits for a server that is overloaded.
    pub(super) timeout: Duration,
}

impl Sizes {
    /// Number of answers of a round.
    pub(super) fn answers(&self) -> usize {
        let growing = GROWING * TURNS;
        let evicted = COLD + BRANCHES + BATCHES[0] + BATCHES[1] + growing + CANCELED * 2;
        let batched = (BATCHES[0] + BATCHES[1]) * 2;
        let before = (COLD + BRANCHES + growing) * 3 + batched + CANCELED * 4;
        before + self.unrelated + evicted
    }
}

/// The run of all scenarios on one server.
#[derive(Debug)]
pub(super) struct Run<'a> {
    target: &'a HttpTarget,
    sizes: Sizes,
    writer: Writer,
    checks: Checks,
    bar: ProgressBar,
    /// Mean time of an answer that was asked alone with nothing in the cache.
    cold_time: Duration,
}

/// Asks once, and again while the server is overloaded and there is time.
pub(super) async fn ask(
    target: &HttpTarget,
    messages: &[Message],
    sizes: Sizes,
) -> Result<Answer, Failure> {
    let begin = Instant::now();
    loop {
        let failure = match target.ask(messages, sizes.max_tokens).await {
            Ok(answer) => return Ok(answer),
            Err(failure) => failure,
        };
        let pause = match &failure {
            Failure::Overloaded { retry_after } => retry_after.unwrap_or(PAUSE),
            Failure::Counted { kind, .. } if kind == "status 503" => PAUSE,
            _ => return Err(failure),
        };
        if begin.elapsed() + pause > sizes.timeout {
            return Err(failure);
        }
        tokio::time::sleep(pause).await;
    }
}

impl<'a> Run<'a> {
    pub(super) fn new(
        target: &'a HttpTarget,
        sizes: Sizes,
        writer: Writer,
        bar: ProgressBar,
    ) -> Self {
        let checks = Checks::default();
        Self { target, sizes, writer, checks, bar, cold_time: Duration::ZERO }
    }

    /// What the run has found.
    pub(super) fn finish(self) -> Checks {
        self.bar.finish_and_clear();
        self.checks
    }

    /// Sends all requests of a round. Breaks if too many have failed.
    pub(super) async fn round(&mut self) -> ControlFlow<()> {
        let first = self.checks.len();
        self.warm().await?;
        self.branches().await?;
        self.batched().await?;
        self.growing().await?;
        self.canceled().await?;
        let mut prompts: Vec<usize> = (first..self.checks.len()).collect();
        self.evict().await?;
        self.writer.rng().shuffle(&mut prompts);
        self.in_turn(Scenario::Evicted, &prompts).await
    }

    /// Prompts with an empty cache, and the same prompts from the cache.
    async fn warm(&mut self) -> ControlFlow<()> {
        let prompts = self.prompts(COLD, self.sizes.words);
        let begin = Instant::now();
        self.in_turn(Scenario::Cold, &prompts).await?;
        self.cold_time = begin.elapsed() / COLD as u32;
        self.in_turn(Scenario::Warm, &prompts).await?;
        self.in_turn(Scenario::Warm, &prompts).await
    }

    /// Prompts that share a long beginning, in three orders.
    async fn branches(&mut self) -> ControlFlow<()> {
        let branches = self.writer.branches(self.sizes.words, BRANCHES);
        let mut prompts: Vec<usize> =
            branches.into_iter().map(|message| self.checks.add(vec![message])).collect();
        self.in_turn(Scenario::Branches, &prompts).await?;
        prompts.reverse();
        self.in_turn(Scenario::Branches, &prompts).await?;
        self.writer.rng().shuffle(&mut prompts);
        self.in_turn(Scenario::Branches, &prompts).await
    }

    /// Prompts alone and then at once, and others at once and then alone.
    async fn batched(&mut self) -> ControlFlow<()> {
        let prompts = self.prompts(BATCHES[0], self.sizes.words);
        self.in_turn(Scenario::Cold, &prompts).await?;
        self.at_once(Scenario::Batched, &prompts).await?;
        let prompts = self.prompts(BATCHES[1], self.sizes.words);
        self.at_once(Scenario::Batched, &prompts).await?;
        self.in_turn(Scenario::Batched, &prompts).await
    }

    /// Conversations that grow turn by turn, by the answers of the server, next to each other; then
    /// each of their prompts as a whole, alone and at once.
    async fn growing(&mut self) -> ControlFlow<()> {
        let mut prompts = Vec::new();
        let notes: Vec<Note> = (0..GROWING).map(|_| self.writer.note(self.sizes.words)).collect();
        let mut talks: Vec<Vec<Message>> = notes.iter().map(|note| vec![note.ask(0)]).collect();
        for turn in 1..=TURNS {
            for (note, talk) in notes.iter().zip(&mut talks) {
                let prompt = self.checks.add(talk.clone());
                prompts.push(prompt);
                self.in_turn(Scenario::Growing, &[prompt]).await?;
                let answer = self.checks.reference(prompt).unwrap_or_default().to_owned();
                talk.push(Message { role: "assistant", text: answer });
                talk.push(note.ask_again(turn));
            }
        }
        self.writer.rng().shuffle(&mut prompts);
        self.in_turn(Scenario::Growing, &prompts).await?;
        self.at_once(Scenario::Growing, &prompts).await
    }

    /// Prompts after, next to and again after requests with the same beginning that are canceled at
    /// any moment of their work.
    async fn canceled(&mut self) -> ControlFlow<()> {
        for _ in 0..CANCELED {
            let note = self.writer.note(self.sizes.words);
            let prompt = self.checks.add(vec![note.ask(0)]);
            let other = self.checks.add(vec![note.ask(1)]);
            let [first, second, third] = [(); 3].map(|()| self.some_time());
            self.cancel(other, first).await;
            self.in_turn(Scenario::Canceled, &[prompt]).await?;
            let next_to = ask(self.target, self.checks.messages(prompt), self.sizes);
            let (outcome, (), ()) =
                tokio::join!(next_to, self.cancel(other, second), self.cancel(prompt, third));
            self.record(Scenario::Canceled, prompt, outcome)?;
            self.in_turn(Scenario::Canceled, &[prompt, other]).await?;
        }
        ControlFlow::Continue(())
    }

    /// Long prompts that push others out of the cache.
    async fn evict(&mut self) -> ControlFlow<()> {
        let prompts = self.prompts(self.sizes.unrelated, self.sizes.words * UNRELATED_LENGTH);
        for prompts in prompts.chunks(UNRELATED_AT_ONCE) {
            self.at_once(Scenario::Unrelated, prompts).await?;
        }
        ControlFlow::Continue(())
    }

    /// New prompts, each about a note of its own with this many words.
    fn prompts(&mut self, count: usize, words: usize) -> Vec<usize> {
        let add = |question| {
            let note = self.writer.note(words);
            self.checks.add(vec![note.ask(question)])
        };
        (0..count).map(add).collect()
    }

    /// Sends prompts one after the other.
    async fn in_turn(&mut self, scenario: Scenario, prompts: &[usize]) -> ControlFlow<()> {
        for &prompt in prompts {
            let outcome = ask(self.target, self.checks.messages(prompt), self.sizes).await;
            self.record(scenario, prompt, outcome)?;
        }
        ControlFlow::Continue(())
    }

    /// Sends prompts at once.
    async fn at_once(&mut self, scenario: Scenario, prompts: &[usize]) -> ControlFlow<()> {
        let asked =
            prompts.iter().map(|&id| ask(self.target, self.checks.messages(id), self.sizes));
        let outcomes = join_all(asked).await;
        prompts
            .iter()
            .zip(outcomes)
            .try_for_each(|(&id, outcome)| self.record(scenario, id, outcome))
    }

    /// A part of the time of an answer: mostly a small one, in which the prompt is computed.
    fn some_time(&mut self) -> Duration {
        self.cold_time.mul_f64(self.writer.rng().unit().powi(2))
    }

    /// Sends a prompt, and cancels the request after this time if it has not been answered.
    async fn cancel(&self, prompt: usize, after: Duration) {
        let asked = self.target.ask(self.checks.messages(prompt), self.sizes.max_tokens);
        let _ = tokio::time::timeout(after, asked).await;
    }

    fn record(
        &mut self,
        scenario: Scenario,
        prompt: usize,
        outcome: Result<Answer, Failure>,
    ) -> ControlFlow<()> {
        self.checks.record(scenario, prompt, outcome);
        self.bar.inc(1);
        match self.checks.unanswered.len() < MAX_FAILURES {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        }
    }
}
