//! An hour of coding agents in virtual time: a main agent that works alone for some turns, then
//! sends three sub-agents to work and waits for their reports. All share a pool that is too small
//! for them, so the order of eviction decides whose context is computed again.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use stolon_backend::{BackendSpec, StateSpec, StepBatch};
use stolon_kvcache::EvictionPolicy;
use stolon_loadgen::metrics::{RequestRecord, share};
use stolon_loadgen::rng::SeededRng;
use stolon_scheduler::{EngineConfig, Event, SequenceRequest, Simulation, StoredKv};

use crate::checkpoints::{KV_BYTES, STATE_BYTES};
use crate::cost::CostModel;

const VOCAB_SIZE: usize = 32_000;
const BLOCK_SIZE: usize = 16;
/// Tokens of the main agent's system prompt with its tools, and of each kind of sub-agent.
const MAIN_PROMPT: usize = 28_000;
const SUB_PROMPT: usize = 6_000;
/// Number of sub-agents that work at the same time. Each has another kind.
const SUBS: usize = 3;
/// Context length at which an agent summarizes its conversation and starts again with the summary.
const MAX_CONTEXT: usize = 48_000;
/// Positions of all agents at their largest.
const EVERYTHING: usize = MAX_CONTEXT + SUBS * 20_000;
/// Length of the trace.
const HOUR: Duration = Duration::from_secs(3600);
/// What is needed again after less than this should not have been evicted.
const SOON: Duration = Duration::from_secs(60);

/// Whether clients say which requests matter more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hints {
    /// All requests have the same priority.
    None,
    /// The main agent's requests have a higher priority.
    MainFirst,
}

/// What the requests of an hour found in the cache.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Prompt tokens of all requests.
    pub prompt_tokens: usize,
    /// Those that were cached.
    pub cached_tokens: usize,
    /// Those of them that were read from the disk.
    pub read_tokens: usize,
    /// Prompt tokens that had been computed before, and had to be computed again.
    pub lost_tokens: usize,
    /// Those of them that had been used less than a minute before.
    pub soon_lost_tokens: usize,
    /// Turns of main agents and of sub-agents that were answered.
    pub turns: [usize; 2],
    /// Milliseconds to the first token, of main agents and of sub-agents.
    pub first_token_ms: [Vec<f64>; 2],
}

impl Outcome {
    /// Share of the prompt tokens that were cached, from 0 to 1.
    #[must_use]
    pub fn hit_rate(&self) -> f64 {
        share(self.cached_tokens, self.prompt_tokens)
    }
}

/// A conversation.
#[derive(Debug)]
struct Agent {
    /// Index of its team, and its kind: 0 for a main agent, from 1 for sub-agents.
    team: usize,
    kind: usize,
    history: Vec<u32>,
    /// Length of the part of `history` that was computed when it was last used, at `used`.
    computed: usize,
    used: Duration,
    /// When its next request was sent, and the blocks of its prompt that were read from the disk, if
    /// that has begun.
    reading: Option<(Duration, Range<usize>)>,
    /// Turns until a main agent delegates, or until a sub-agent is done.
    turns_left: usize,
    /// The source of the lengths of all texts that it reads and writes. It is its own, so that the
    /// lengths do not depend on evictions.
    rng: SeededRng,
}

/// A main agent and its sub-agents.
#[derive(Debug)]
struct Team {
    /// Number of sub-agents that work.
    working: usize,
    /// Number of sub-agents that were ever sent to work.
    started: u64,
}

/// The agents of an hour and the engine that answers them.
struct Hour<'a, C> {
    simulation: Simulation<C>,
    hints: Hints,
    /// The speed of the disk that has everything that was computed, in bytes per second, and the KV of a
    /// block.
    disk: Option<(f64, Bytes)>,
    prompts: &'a [Vec<u32>],
    /// When the system prompt of each kind was last used.
    prompt_used: Vec<Option<Duration>>,
    teams: Vec<Team>,
    agents: Vec<Agent>,
    arrivals: BinaryHeap<Reverse<(Duration, usize)>>,
    in_flight: HashMap<u64, (usize, RequestRecord)>,
    outcome: Outcome,
}

/// Runs `teams` main agents, each with its sub-agents, for an hour. The pool holds `pool` of all
/// that one team has in its context at most. With `has_states`, the model has recurrent layers of the
/// shape of Qwen3.5-0.8B, whose checkpoints are in the pool as well. With `disk`, everything that is
/// computed is on a disk of this speed in bytes per second, and is read where that is faster than
/// computing; only without states.
///
/// # Errors
/// If a request is refused, or the check of the block accounting at the end fails.
pub fn run(
    teams: usize,
    pool: f64,
    policy: EvictionPolicy,
    hints: Hints,
    has_states: bool,
    disk: Option<f64>,
    cost: &CostModel,
) -> anyhow::Result<Outcome> {
    let spec = BackendSpec {
        vocab_size: VOCAB_SIZE,
        max_positions: 1 << 17,
        block_size: BLOCK_SIZE,
        block_count: (EVERYTHING as f64 * pool) as usize * teams / BLOCK_SIZE,
        block_bytes: BLOCK_SIZE * KV_BYTES,
        draws: false,
        state: has_states.then_some(StateSpec { bytes: STATE_BYTES, slots: 64 }),
        ..BackendSpec::default()
    };
    let config = EngineConfig {
        eviction_policy: Some(policy),
        logit_cache_bytes: 0,
        ..EngineConfig::default()
    };
    anyhow::ensure!(disk.is_none() || !has_states, "expected a disk only without states");
    let block = Bytes::from(vec![0; BLOCK_SIZE * KV_BYTES]);
    let mut rng = SeededRng::new(1);
    let lens = [MAIN_PROMPT].into_iter().chain([SUB_PROMPT; SUBS]);
    let prompts: Vec<Vec<u32>> = lens.map(|len| rng.tokens(len, VOCAB_SIZE)).collect();
    let simulation = Simulation::new(spec, config, |batch| cost.step(batch, BLOCK_SIZE))?;
    let mut hour = Hour {
        simulation,
        hints,
        disk: disk.map(|speed| (speed, block)),
        prompt_used: vec![None; prompts.len()],
        prompts: &prompts,
        teams: Vec::new(),
        agents: Vec::new(),
        arrivals: BinaryHeap::new(),
        in_flight: HashMap::new(),
        outcome: Outcome::default(),
    };
    for team in 0..teams {
        hour.teams.push(Team { working: 0, started: 0 });
        hour.start(team, 0, Duration::from_secs(40 * team as u64));
    }
    hour.run()
}

impl<C: FnMut(&StepBatch) -> Duration> Hour<'_, C> {
    fn run(mut self) -> anyhow::Result<Outcome> {
        loop {
            let next = self.arrivals.peek().map(|Reverse((at, _))| *at);
            match (next, self.simulation.step_end()) {
                (None, None) => break,
                (Some(at), end) if end.is_none_or(|end| at < end) => {
                    if let Some(Reverse((_, agent))) = self.arrivals.pop()
                        && at < HOUR
                    {
                        self.simulation.wait_until(at);
                        self.submit(agent, at)?;
                    }
                }
                _ => {
                    for event in self.simulation.finish_step()? {
                        self.happened(event.request, &event.event?);
                    }
                }
            }
        }
        self.outcome.read_tokens = usize::try_from(self.simulation.stats().loaded_tokens)?;
        let audit = self.simulation.audit()?;
        anyhow::ensure!(audit.blocks_reserved == 0 && audit.running == 0, "{audit:?}");
        Ok(self.outcome)
    }

    /// A new conversation of a kind, whose first request is sent at `at`.
    fn start(&mut self, team: usize, kind: usize, at: Duration) {
        let number = self.teams[team].started;
        self.teams[team].started += 1;
        let seed = (team as u64) << 32 | number << 8 | kind as u64;
        let mut rng = SeededRng::new(seed);
        let mut history = self.prompts[kind].clone();
        let task = rng.between(100, 600);
        history.extend(rng.tokens(task, VOCAB_SIZE));
        let turns_left = if kind == 0 { rng.between(3, 7) } else { rng.between(8, 15) };
        let agent = Agent {
            team,
            kind,
            history,
            computed: 0,
            used: Duration::ZERO,
            reading: None,
            turns_left,
            rng,
        };
        self.arrivals.push(Reverse((at, self.agents.len())));
        self.agents.push(agent);
    }

    /// What was computed before of an agent's prompt, and when it was last used: the conversation, or
    /// only the system prompt of its kind.
    fn known(&self, agent: &Agent) -> Option<(usize, Duration)> {
        match (agent.computed, self.prompt_used[agent.kind]) {
            (0, None) => None,
            (0, Some(used)) => Some((self.prompts[agent.kind].len(), used)),
            (computed, _) => Some((computed, agent.used)),
        }
    }

    /// The blocks of an agent's prompt that are on the disk and not in the pool, and how long it takes
    /// to read them. `None` if there are none, or if computing them is faster.
    fn reads(&self, index: usize) -> Option<(Range<usize>, Duration)> {
        let (speed, block) = self.disk.as_ref()?;
        let agent = &self.agents[index];
        let (known, _) = self.known(agent)?;
        let cached = self.simulation.cached(&SequenceRequest::new(agent.history.clone(), 1));
        let blocks = cached / BLOCK_SIZE..known / BLOCK_SIZE;
        let time = Duration::from_secs_f64((blocks.len() * block.len()) as f64 / speed);
        let rate = self.simulation.stats().prefill_rate.max(1) as f64;
        let computed = Duration::from_secs_f64((blocks.len() * BLOCK_SIZE) as f64 / rate);
        (!blocks.is_empty() && time < computed).then_some((blocks, time))
    }

    fn submit(&mut self, index: usize, at: Duration) -> anyhow::Result<()> {
        if self.agents[index].reading.is_none()
            && let Some((blocks, time)) = self.reads(index)
        {
            self.agents[index].reading = Some((at, blocks));
            self.arrivals.push(Reverse((at + time, index)));
            return Ok(());
        }
        let agent = &mut self.agents[index];
        let (at, read) = agent.reading.take().unwrap_or((at, 0..0));
        let output = agent.rng.between(60, 250);
        let mut request = SequenceRequest::new(agent.history.clone(), output);
        if let Some((_, block)) = self.disk.as_ref().filter(|_| !read.is_empty()) {
            let kv = vec![block.clone(); read.len()];
            request.stored = Some(StoredKv::new(BLOCK_SIZE, read.start, kv));
        }
        if self.hints == Hints::MainFirst {
            request.options.priority = i32::from(agent.kind == 0);
        }
        let id = self.simulation.submit(request)?;
        let record = RequestRecord { sent_at: at.as_secs_f64(), ..RequestRecord::default() };
        self.in_flight.insert(id, (index, record));
        Ok(())
    }

    fn happened(&mut self, request: u64, event: &Event) {
        let now = self.simulation.now();
        let Some((index, record)) = self.in_flight.get_mut(&request) else { return };
        let index = *index;
        match event {
            Event::Token(token) => {
                record.token_times.push(now.as_secs_f64());
                self.agents[index].history.extend(token.id);
            }
            Event::Finished(finish) => {
                record.prompt_tokens = finish.usage.prompt_tokens;
                record.cached_tokens = finish.usage.cached_tokens;
                if let Some((_, record)) = self.in_flight.remove(&request) {
                    self.count(index, &record);
                    self.answered(index, now);
                }
            }
            _ => {}
        }
    }

    /// Adds a finished request to the outcome.
    fn count(&mut self, index: usize, record: &RequestRecord) {
        let known = self.known(&self.agents[index]);
        let agent = &mut self.agents[index];
        let role = usize::from(agent.kind > 0);
        let sent = Duration::from_secs_f64(record.sent_at);
        if let Some((len, used)) = known {
            let lost = (len / BLOCK_SIZE * BLOCK_SIZE).saturating_sub(record.cached_tokens);
            self.outcome.lost_tokens += lost;
            if sent.saturating_sub(used) < SOON {
                self.outcome.soon_lost_tokens += lost;
            }
        }
        let now = self.simulation.now();
        // The last token of an answer is sampled, not computed.
        (agent.computed, agent.used) = (agent.history.len() - 1, now);
        self.prompt_used[agent.kind] = Some(now);
        self.outcome.prompt_tokens += record.prompt_tokens;
        self.outcome.cached_tokens += record.cached_tokens;
        self.outcome.turns[role] += 1;
        self.outcome.first_token_ms[role].extend(record.ttft_ms());
    }

    /// Decides what an agent does after an answer.
    fn answered(&mut self, index: usize, now: Duration) {
        let agent = &mut self.agents[index];
        agent.turns_left -= 1;
        let (team, kind) = (agent.team, agent.kind);
        match (agent.turns_left, kind) {
            (0, 0) => {
                agent.turns_left = agent.rng.between(3, 7);
                self.teams[team].working = SUBS;
                for sub in 1..=SUBS {
                    self.start(team, sub, now + Duration::from_secs(sub as u64));
                }
            }
            (0, _) => {
                self.teams[team].working -= 1;
                if self.teams[team].working == 0 {
                    // The main agent reads all reports.
                    let main = self.agents.iter().position(|a| a.team == team && a.kind == 0);
                    main.into_iter().for_each(|main| self.read(main, [1_200, 2_400], now));
                }
            }
            _ => self.read(index, [200, 1_500], now),
        }
    }

    /// A tool runs for some seconds, and the agent reads its result.
    fn read(&mut self, index: usize, [least, most]: [usize; 2], now: Duration) {
        let agent = &mut self.agents[index];
        let pause = Duration::from_millis(agent.rng.between(500, 12_000) as u64);
        let count = agent.rng.between(least, most);
        if agent.history.len() + count > MAX_CONTEXT {
            let summary = agent.rng.between(1_500, 3_000);
            agent.history.truncate(self.prompts[agent.kind].len());
            agent.history.extend(agent.rng.tokens(summary, VOCAB_SIZE));
            agent.computed = 0;
        }
        agent.history.extend(agent.rng.tokens(count, VOCAB_SIZE));
        self.arrivals.push(Reverse((now + pause, index)));
    }
}
