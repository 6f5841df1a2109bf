//! Runs conversations on a simulated scheduler and notes what each request saw. Open loop: a
//! conversation begins at its time, whatever became of the others; its later turns follow the
//! answers.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::time::Duration;

use stolon_actors::{CoreConfig, CoreStats, SequenceEvent, SequenceRequest, Simulation};
use stolon_backend::BackendSpec;

use crate::cost::CostModel;
use crate::workload::{Conversation, Shape};

/// What one request saw. Times are seconds from the start of the run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Record {
    /// When it was sent.
    pub sent: f64,
    /// When its first token came.
    pub first: f64,
    /// When its last token came.
    pub last: f64,
    /// Tokens of its prompt.
    pub prompt: usize,
    /// Those of them that were found in the cache.
    pub cached: usize,
    /// Tokens generated.
    pub output: usize,
}

/// What a run gave.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// The requests that finished, in the order in which they did.
    pub records: Vec<Record>,
    /// `(time, requests running, whether others waited)` at each change.
    pub running: Vec<(f64, usize, bool)>,
    /// The scheduler's own counts.
    pub stats: CoreStats,
    /// Requests turned away at the door; that ended their conversations.
    pub rejected: usize,
    /// Milliseconds that the slowest of them had to wait for that. On a real engine only.
    pub slowest_refusal: f64,
}

/// A conversation under way.
#[derive(Debug)]
struct Talk<'a> {
    plan: &'a Conversation,
    /// All that was said.
    tokens: Vec<u32>,
    /// Turns begun.
    turns: usize,
}

/// A request under way.
#[derive(Debug)]
struct Flying {
    talk: usize,
    record: Record,
}

/// Runs the conversations on a scheduler in virtual time.
///
/// # Errors
/// Settings that cannot work, requests that can never fit, and books that do not balance at the
/// end.
pub fn simulate(
    conversations: &[Conversation],
    spec: BackendSpec,
    config: CoreConfig,
    cost: &CostModel,
) -> anyhow::Result<Run> {
    let block_size = spec.block_size;
    let mut simulation = Simulation::new(spec, config, |batch| cost.step(batch, block_size))?;
    let mut talks: Vec<Talk<'_>> =
        conversations.iter().map(|plan| Talk { plan, tokens: Vec::new(), turns: 0 }).collect();
    let moment = |seconds: f64| Duration::from_secs_f64(seconds);
    let mut arrivals: BinaryHeap<Reverse<(Duration, usize)>> = conversations
        .iter()
        .enumerate()
        .map(|(index, plan)| Reverse((moment(plan.at), index)))
        .collect();
    let mut flying: HashMap<u64, Flying> = HashMap::new();
    let mut run = Run::default();
    loop {
        let next_arrival = arrivals.peek().map(|Reverse((at, _))| *at);
        match (next_arrival, simulation.step_end()) {
            (None, None) => break,
            (Some(at), end) if end.is_none_or(|end| at < end) => {
                arrivals.pop().into_iter().for_each(|Reverse((_, index))| {
                    simulation.wait_until(at);
                    let sent = at.as_secs_f64();
                    match submit(&mut simulation, &mut talks[index]) {
                        Some(id) => {
                            let record = Record { sent, ..Record::new() };
                            flying.insert(id, Flying { talk: index, record });
                        }
                        None => run.rejected += 1,
                    }
                });
            }
            _ => {
                for told in simulation.finish_step()? {
                    let now = simulation.now();
                    let Some(request) = flying.get_mut(&told.request) else { continue };
                    let talk = &mut talks[request.talk];
                    if request.record.take(&told.event?, now.as_secs_f64(), &mut talk.tokens) {
                        run.records.push(request.record);
                        if talk.turns < talk.plan.turns.len() {
                            arrivals.push(Reverse((now + moment(talk.plan.think), request.talk)));
                        }
                        flying.remove(&told.request);
                    }
                }
            }
        }
        let stats = simulation.stats();
        let (running, waited) = (stats.running, stats.waiting > 0);
        if run.running.last().is_none_or(|&(_, last, before)| (last, before) != (running, waited)) {
            run.running.push((simulation.now().as_secs_f64(), running, waited));
        }
    }
    anyhow::ensure!(flying.is_empty(), "{} requests never ended", flying.len());
    let audit = simulation.audit()?;
    anyhow::ensure!(audit.blocks_reserved == 0 && audit.running == 0, "{audit:?}");
    run.stats = simulation.stats();
    Ok(run)
}

/// Conversations a second that can be served: those of the shape, all sent at once, over the time
/// that the scheduler takes for them.
///
/// # Errors
/// As [`simulate`].
pub fn capacity(
    shape: Shape,
    spec: &BackendSpec,
    config: &CoreConfig,
    cost: &CostModel,
    seed: u64,
) -> anyhow::Result<f64> {
    let burst = shape.conversations(f64::INFINITY, spec.vocab_size, seed);
    let run = simulate(&burst, spec.clone(), config.clone(), cost)?;
    let end = run.records.iter().map(|record| record.last).fold(0.0, f64::max);
    Ok(burst.len() as f64 / end)
}

/// Sends a conversation's next turn; `None` when the door refuses it, which ends it.
fn submit<C: FnMut(&stolon_backend::StepBatch) -> Duration>(
    simulation: &mut Simulation<C>,
    talk: &mut Talk<'_>,
) -> Option<u64> {
    let turn = &talk.plan.turns[talk.turns];
    talk.turns += 1;
    talk.tokens.extend_from_slice(&turn.tokens);
    let mut request = SequenceRequest::new(talk.tokens.clone(), turn.output);
    request.priority = talk.plan.priority;
    simulation.submit(request).ok()
}

impl Record {
    pub(crate) fn new() -> Record {
        Record { sent: 0.0, first: 0.0, last: 0.0, prompt: 0, cached: 0, output: 0 }
    }

    /// Notes an event; whether it was the last.
    fn take(&mut self, event: &SequenceEvent, now: f64, tokens: &mut Vec<u32>) -> bool {
        match event {
            SequenceEvent::Started { .. } | SequenceEvent::PromptLogprobs(_) => {}
            SequenceEvent::Token { id, .. } => {
                if self.output == 0 {
                    self.first = now;
                }
                self.last = now;
                self.output += 1;
                tokens.push(*id);
            }
            SequenceEvent::Finished(finish) => {
                self.prompt = finish.prompt_tokens;
                self.cached = finish.cached_tokens;
                return true;
            }
        }
        false
    }
}
