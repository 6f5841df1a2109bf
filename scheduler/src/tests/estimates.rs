//! The expected time to the first token, next to the time that passes, in virtual time.

use std::collections::HashMap;
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use stolon_backend::{BackendSpec, StepBatch};

use crate::config::{AdmissionPolicy, EngineConfig};
use crate::error::EngineError;
use crate::event::Event;
use crate::request::SequenceRequest;
use crate::simulation::Simulation;

/// The duration of a step.
type Cost = Box<dyn FnMut(&StepBatch) -> Duration>;

/// An engine in virtual time, with the first tokens of its requests.
struct Engine {
    simulation: Simulation<Cost>,
    /// When each request was submitted, and the number of the request in its workload.
    submitted: HashMap<u64, (Duration, usize)>,
    /// The time to the first token, by the number in the workload.
    firsts: Vec<(usize, f64)>,
}

impl Engine {
    /// An engine with a policy; see [`Engine::with`].
    fn new(token: Duration, policy: AdmissionPolicy) -> Engine {
        Engine::with(token, EngineConfig { policy, max_running: 16, ..EngineConfig::default() })
    }

    /// An engine that takes `token` for each token of a step and 30 times that for the step.
    fn with(token: Duration, config: EngineConfig) -> Engine {
        let spec = BackendSpec {
            vocab_size: 50_000,
            max_positions: 8_192,
            block_size: 16,
            block_count: 1_500,
            block_bytes: 1,
            hidden_size: None,
            draws: false,
            ..BackendSpec::default()
        };
        let cost = move |batch: &StepBatch| token * (30 + batch.tokens.len() as u32);
        let simulation = Simulation::new(spec, config, Box::new(cost) as Cost).expect("valid");
        Engine { simulation, submitted: HashMap::new(), firsts: Vec::new() }
    }

    /// Runs until this moment, or until nothing is left to do.
    fn run_until(&mut self, moment: Duration) {
        while self.simulation.step_end().is_some_and(|end| end <= moment) {
            for happened in self.simulation.finish_step().expect("no actor is involved") {
                if let Ok(Event::Token(_)) = happened.event
                    && let Some((begun, number)) = self.submitted.remove(&happened.request)
                {
                    self.firsts.push((number, (self.simulation.now() - begun).as_secs_f64()));
                }
            }
        }
        self.simulation.wait_until(moment);
    }

    fn submit(&mut self, number: usize, request: SequenceRequest) {
        let id = self.simulation.submit(request).expect("the queue is large enough");
        self.submitted.insert(id, (self.simulation.now(), number));
    }

    fn estimate(&self, request: &SequenceRequest) -> Option<f64> {
        self.simulation.first_token_estimate(request).map(|(first, _)| first.as_secs_f64())
    }
}

/// When each request arrives, and the request: mostly short prompts, some long ones, a few of
/// several clients, at `rate` per second on average.
fn workload(seed: u64, count: usize, rate: f64) -> Vec<(Duration, SequenceRequest)> {
    let mut random = SmallRng::seed_from_u64(seed);
    let mut moment = 0.0;
    let request = |number: usize| {
        moment -= (1.0 - random.random::<f64>()).ln() / rate;
        let len = match random.random_range(0..10) {
            0 => random.random_range(1_000..4_000),
            1..4 => random.random_range(200..1_000),
            _ => random.random_range(10..200),
        };
        let first = number as u32 * 7;
        let tokens = (0..len).map(|n| (first + n * 31) % 50_000).collect();
        let mut request = SequenceRequest::new(tokens, random.random_range(5..150));
        let tenants = [None, None, None, Some("a"), Some("b")];
        request.options.tenant = tenants[random.random_range(0..5)].map(Into::into);
        (Duration::from_secs_f64(moment), request)
    };
    (0..count).map(request).collect()
}

/// The sorted factors by which the estimates of one engine are wrong, without those of the first
/// requests, for which the engine knows little.
fn factors(policy: AdmissionPolicy, rate: f64) -> Vec<f64> {
    let mut engine = Engine::new(Duration::from_micros(200), policy);
    let mut estimates = Vec::new();
    for (number, (moment, request)) in workload(7, 600, rate).into_iter().enumerate() {
        engine.run_until(moment);
        estimates.push(engine.estimate(&request));
        engine.submit(number, request);
    }
    engine.run_until(Duration::MAX);
    assert_eq!(engine.firsts.len(), 600);
    let known = engine.firsts.iter().filter(|(number, _)| *number >= 50);
    let factor = |&(number, actual): &(usize, f64)| {
        let estimate = estimates[number].expect("something was computed");
        (estimate / actual).max(actual / estimate)
    };
    let mut factors: Vec<f64> = known.map(factor).collect();
    factors.sort_by(f64::total_cmp);
    factors
}

/// Goal: at a low load, at half of the capacity, at the capacity and above it, under every policy,
/// the median of the factor by which the expected time to the first token is wrong is below 1.5.
#[test]
fn estimates_are_right_within_a_factor() {
    for policy in [AdmissionPolicy::Cost, AdmissionPolicy::Fcfs, AdmissionPolicy::LongestPrefix] {
        for rate in [1.0, 4.0, 8.0, 12.0] {
            let factors = factors(policy, rate);
            let at = |share: f64| factors[(factors.len() as f64 * share) as usize];
            assert!(at(0.5) < 1.5, "{policy} at {rate}/s: {:.2}, p90 {:.2}", at(0.5), at(0.9));
        }
    }
}

/// Goal: the time after which a refused request may be sent again is that at which the queue has
/// room for it: the median of the factor by which it is wrong is below 1.5.
#[test]
fn refused_requests_learn_when_there_is_room() {
    let mut factors: Vec<f64> = (0..21).map(room_factor).collect();
    factors.sort_by(f64::total_cmp);
    assert!(factors[10] < 1.5, "{factors:.2?}");
}

/// The factor by which the time is wrong after which a full engine lets a request try again.
fn room_factor(seed: u64) -> f64 {
    let config =
        EngineConfig { max_queued_requests: 12, max_running: 8, ..EngineConfig::default() };
    let mut engine = Engine::with(Duration::from_micros(200), config);
    let mut refused = None;
    let requests = workload(seed, 400, 100.0).into_iter();
    for (number, (_, request)) in requests.enumerate() {
        // The first ones teach the engine its speed.
        if number == 8 {
            engine.run_until(Duration::from_secs(1_000));
        }
        loop {
            match engine.simulation.submit(request.clone()) {
                Ok(_) => break,
                Err(EngineError::Overloaded { retry_after, .. }) => {
                    let now = engine.simulation.now();
                    refused.get_or_insert((now, retry_after));
                    engine.simulation.finish_step().expect("no actor is involved");
                }
                Err(other) => panic!("{other}"),
            }
        }
        if let Some((begun, promised)) = refused {
            let (actual, promised) = (engine.simulation.now() - begun, promised.as_secs_f64());
            let actual = actual.max(Duration::from_millis(50)).as_secs_f64();
            return (promised / actual).max(actual / promised);
        }
    }
    panic!("the queue was never full");
}

/// Goal: a router that sends each request to the engine with the smallest estimate gets first
/// tokens sooner than one that takes turns, if one engine is slower and if they are equal.
#[test]
fn a_router_gains_from_estimates() {
    let mean = |speeds: [u64; 2], by_estimate: bool| {
        let engine = |token| Engine::new(Duration::from_micros(token), AdmissionPolicy::Cost);
        let mut engines = speeds.map(engine);
        for (number, (moment, request)) in workload(11, 800, 10.0).into_iter().enumerate() {
            engines.iter_mut().for_each(|engine| engine.run_until(moment));
            let [first, second] = engines.each_ref().map(|engine| engine.estimate(&request));
            let choice = match (by_estimate, first, second) {
                (true, Some(first), Some(second)) => usize::from(second < first),
                _ => number % 2,
            };
            engines[choice].submit(number, request);
        }
        engines.iter_mut().for_each(|engine| engine.run_until(Duration::MAX));
        let firsts = engines.iter().flat_map(|engine| &engine.firsts);
        firsts.map(|(_, time)| time).sum::<f64>() / 800.0
    };
    for speeds in [[200, 400], [250, 250]] {
        let (turns, routed) = (mean(speeds, false), mean(speeds, true));
        assert!(routed < 0.9 * turns, "{speeds:?}: {routed} s, by turns {turns} s");
    }
}
