//! Runs conversations on the scheduler in virtual time and records when each token arrives.
//!
//! This is open loop: a conversation starts at its time, however long the queue is. Its later
//! turns are sent after the answers to the earlier ones.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::time::Duration;

use stolon_backend::{BackendSpec, StepBatch};
use stolon_loadgen::metrics::RequestRecord;
use stolon_loadgen::workload::Conversation;
use stolon_scheduler::{EngineConfig, EngineStats, Event, SequenceRequest, Simulation};

use crate::cost::CostModel;
use crate::workload::Workload;

/// The result of a run.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// The requests that finished, in the order in which they finished.
    pub records: Vec<RequestRecord>,
    /// `(seconds since the start, requests running, whether others waited)` at each change.
    pub running: Vec<(f64, usize, bool)>,
    /// The scheduler's counters.
    pub stats: EngineStats,
    /// Requests that were refused because the queue was full. A refusal ends its conversation.
    pub rejected: usize,
}

/// A conversation in progress.
#[derive(Debug)]
struct Client<'a> {
    conversation: &'a Conversation,
    /// Token ids of all turns and answers so far.
    history: Vec<u32>,
    turns_sent: usize,
}

/// A request in progress.
#[derive(Debug)]
struct InFlight {
    /// Index of its conversation.
    client: usize,
    record: RequestRecord,
}

/// Runs the conversations on a scheduler whose steps take as long as `cost` says.
///
/// # Errors
/// If the configuration cannot work, a request can never fit, or the check of the block accounting
/// at the end fails.
pub fn simulate(
    conversations: &[Conversation],
    spec: BackendSpec,
    config: EngineConfig,
    cost: &CostModel,
) -> anyhow::Result<Run> {
    let block_size = spec.block_size;
    let mut simulation = Simulation::new(spec, config, |batch| cost.step(batch, block_size))?;
    let new_client = |conversation| Client { conversation, history: Vec::new(), turns_sent: 0 };
    let mut clients: Vec<Client<'_>> = conversations.iter().map(new_client).collect();
    let starts = conversations.iter().map(|conversation| conversation.start);
    let mut arrivals: BinaryHeap<Reverse<(Duration, usize)>> =
        starts.enumerate().map(|(index, start)| Reverse((start, index))).collect();
    let mut in_flight: HashMap<u64, InFlight> = HashMap::new();
    let mut run = Run::default();
    loop {
        let next_arrival = arrivals.peek().map(|Reverse((at, _))| *at);
        match (next_arrival, simulation.step_end()) {
            (None, None) => break,
            (Some(at), end) if end.is_none_or(|end| at < end) => {
                arrivals.pop().into_iter().for_each(|Reverse((_, client))| {
                    simulation.wait_until(at);
                    let sent_at = at.as_secs_f64();
                    match submit(&mut simulation, &mut clients[client]) {
                        Some(id) => {
                            let record = RequestRecord { sent_at, ..RequestRecord::default() };
                            in_flight.insert(id, InFlight { client, record });
                        }
                        None => run.rejected += 1,
                    }
                });
            }
            _ => {
                for event in simulation.finish_step()? {
                    let now = simulation.now();
                    let Some(request) = in_flight.get_mut(&event.request) else { continue };
                    let client = &mut clients[request.client];
                    let history = &mut client.history;
                    if !record(&mut request.record, &event.event?, now.as_secs_f64(), history) {
                        continue;
                    }
                    if client.turns_sent < client.conversation.turns.len() {
                        let next = now + client.conversation.pause;
                        arrivals.push(Reverse((next, request.client)));
                    }
                    run.records.extend(in_flight.remove(&event.request).map(|done| done.record));
                }
            }
        }
        let stats = simulation.stats();
        let (running, waited) = (stats.running, stats.waiting > 0);
        if run.running.last().is_none_or(|&(_, last, before)| (last, before) != (running, waited)) {
            run.running.push((simulation.now().as_secs_f64(), running, waited));
        }
    }
    anyhow::ensure!(in_flight.is_empty(), "{} requests never ended", in_flight.len());
    let audit = simulation.audit()?;
    anyhow::ensure!(audit.blocks_reserved == 0 && audit.running == 0, "{audit:?}");
    run.stats = simulation.stats();
    Ok(run)
}

/// Conversations per second that the scheduler can serve: all conversations of the workload are
/// sent at once, and their number is divided by the time that they take.
///
/// # Errors
/// As [`simulate`].
pub fn capacity(
    workload: Workload,
    spec: &BackendSpec,
    config: &EngineConfig,
    cost: &CostModel,
    seed: u64,
) -> anyhow::Result<f64> {
    let burst = workload.conversations(f64::INFINITY, spec.vocab_size, seed);
    let run = simulate(&burst, spec.clone(), config.clone(), cost)?;
    let ends = run.records.iter().filter_map(|record| record.token_times.last().copied());
    Ok(burst.len() as f64 / ends.fold(0.0, f64::max))
}

/// Submits a conversation's next turn. `None` if it is refused, which ends the conversation.
fn submit<C: FnMut(&StepBatch) -> Duration>(
    simulation: &mut Simulation<C>,
    client: &mut Client<'_>,
) -> Option<u64> {
    let turn = &client.conversation.turns[client.turns_sent];
    client.turns_sent += 1;
    client.history.extend_from_slice(&turn.tokens);
    let request = SequenceRequest::new(client.history.clone(), turn.output_tokens);
    simulation.submit(request).ok()
}

/// Records an event that happened at `now` seconds. Returns whether it was the request's last.
fn record(record: &mut RequestRecord, event: &Event, now: f64, history: &mut Vec<u32>) -> bool {
    match event {
        Event::Token(token) => {
            record.token_times.push(now);
            history.extend(token.id);
        }
        Event::Finished(finish) => {
            record.prompt_tokens = finish.usage.prompt_tokens;
            record.cached_tokens = finish.usage.cached_tokens;
            record.output_tokens = record.token_times.len();
            return true;
        }
        _ => {}
    }
    false
}
