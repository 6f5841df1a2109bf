//! Fairness in virtual time: a small request under any load of another client gets its first token
//! soon, the load loses little throughput, and decodes keep their pace. Each figure is compared
//! with that of the same load when prompts are computed in order of arrival in steps of any
//! duration.

use std::time::Duration;

use stolon_backend::{BackendSpec, StepBatch};

use crate::config::{AdmissionPolicy, EngineConfig};
use crate::event::Event;
use crate::request::SequenceRequest;
use crate::simulation::Simulation;

/// A step takes 5 ms for reading the weights or 1.1 ms for each token, whichever is more: a model
/// of some 500 M parameters on a few cores.
fn cost(batch: &StepBatch) -> Duration {
    Duration::from_micros((1_100 * batch.tokens.len() as u64).max(5_000) + 200)
}

/// A load of one client: `count` prompts of `prompt` tokens, which are all different unless
/// `same`, and answers of `answer` tokens.
#[derive(Clone, Copy, Debug)]
struct Load {
    count: u32,
    prompt: usize,
    same: bool,
    answer: usize,
    /// Its requests write nothing to the prefix cache, so what a preempted one has computed is lost.
    private: bool,
}

const LOADS: [Load; 5] = [
    Load { count: 0, prompt: 0, same: false, answer: 0, private: false },
    Load { count: 1, prompt: 6_000, same: false, answer: 20, private: false },
    Load { count: 4, prompt: 6_000, same: false, answer: 20, private: false },
    Load { count: 64, prompt: 600, same: true, answer: 100, private: false },
    Load { count: 100, prompt: 300, same: false, answer: 30, private: false },
];

/// Whether requests name their clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Clients {
    Named,
    Unnamed,
}

/// The figures of a run.
#[derive(Debug)]
struct Figures {
    /// The longest time to first token of a small request.
    first: Duration,
    /// The largest number of steps that ended between its arrival and its first token.
    steps: usize,
    /// When everything has ended.
    end: Duration,
    /// The 99th percentile of the time between two tokens of a decoding request of a third client.
    inter_token: Duration,
}

/// A backend with room for all requests of these tests.
fn spec() -> BackendSpec {
    BackendSpec {
        vocab_size: 1000,
        max_positions: 8192,
        block_size: 16,
        block_count: 4096,
        block_bytes: 1,
        ..BackendSpec::default()
    }
}

fn run(load: Load, clients: Clients, config: EngineConfig) -> Figures {
    let request = |tenant: &str, tokens: Vec<u32>, answer| {
        let mut request = SequenceRequest::new(tokens, answer);
        request.options.tenant = (clients == Clients::Named).then(|| tenant.into());
        request
    };
    let mut simulation = Simulation::new(spec(), config, cost).expect("valid settings");
    // Warm: the speed of a step is known.
    simulation.submit(request("warm", vec![999; 512], 1)).expect("accepted");
    while simulation.step_end().is_some() {
        simulation.finish_step().expect("no actor is involved");
    }
    let decoder = simulation.submit(request("decoder", vec![998; 20], 400)).expect("accepted");
    for number in 0..load.count {
        let tokens = vec![if load.same { 1 } else { number + 1 }; load.prompt];
        let mut request = request("load", tokens, load.answer);
        request.options.skip_writing_prefix_cache = load.private;
        simulation.submit(request).expect("accepted");
    }
    let mut figures = Figures {
        first: Duration::ZERO,
        steps: 0,
        end: Duration::ZERO,
        inter_token: Duration::ZERO,
    };
    let (mut probe, mut probes, mut steps) = (None, 0, 0);
    let (mut last, mut gaps) = (None, Vec::new());
    while simulation.step_end().is_some() {
        if probe.is_none() && probes < 20 {
            // It arrives a little after the start of a step.
            probes += 1;
            simulation.wait_until(simulation.now() + Duration::from_micros(10));
            let tokens = (0..5).map(|n| 500 + probes * 5 + n).collect();
            let id = simulation.submit(request("small", tokens, 2)).expect("accepted");
            (probe, steps) = (Some((id, simulation.now())), 0);
        }
        steps += 1;
        for event in simulation.finish_step().expect("no actor is involved") {
            let now = simulation.now();
            if !matches!(event.event.expect("no request fails"), Event::Token(_)) {
                continue;
            }
            if let Some((_, arrived)) = probe.take_if(|(id, _)| *id == event.request) {
                figures.first = figures.first.max(now - arrived);
                figures.steps = figures.steps.max(steps);
            } else if event.request == decoder {
                gaps.extend(last.replace(now).map(|last| now - last));
            }
        }
        figures.end = simulation.now();
    }
    gaps.sort_unstable();
    figures.inter_token = gaps[gaps.len() * 99 / 100];
    assert_eq!(simulation.audit().expect("a consistent accounting").running, 0);
    figures
}

/// Goal: under any load, the first token of a small request comes at most two steps later than on
/// an idle server, in steps of about 100 ms; the throughput is within 3 %, and decodes keep their
/// pace.
#[test]
fn a_small_request_is_served_soon_beside_any_load() {
    let in_arrival_order = EngineConfig {
        policy: AdmissionPolicy::Fcfs,
        step_time_target: None,
        ..EngineConfig::default()
    };
    let idle = run(LOADS[0], Clients::Named, EngineConfig::default());
    for load in &LOADS[1..] {
        let before = run(*load, Clients::Unnamed, in_arrival_order.clone());
        let fair = run(*load, Clients::Named, EngineConfig::default());
        println!("{load:?}\n  before {before:?}\n  fair {fair:?}");
        assert!(fair.steps <= idle.steps + 2, "{load:?}: {fair:?}, idle {idle:?}");
        assert!(fair.end.as_secs_f64() <= before.end.as_secs_f64() * 1.03, "{load:?}");
        assert!(fair.inter_token.as_secs_f64() <= before.inter_token.as_secs_f64() * 1.5);
        assert!(fair.inter_token <= Duration::from_millis(110), "{load:?}: {fair:?}");
    }
}

/// A step of a small model on a few cores: 4 ms for reading the weights, and 0.35 ms for each token.
fn small_model(batch: &StepBatch) -> Duration {
    Duration::from_micros(4_000 + 350 * batch.tokens.len() as u64)
}

/// An engine that has answered requests of two clients.
fn small_engine() -> Simulation<fn(&StepBatch) -> Duration> {
    let cost = small_model as fn(&StepBatch) -> Duration;
    let mut engine =
        Simulation::new(spec(), EngineConfig::default(), cost).expect("valid settings");
    for (tenant, token) in [("small", 1), ("load", 2), ("small", 3)] {
        let mut request = SequenceRequest::new(vec![token; 600], 30);
        request.options.tenant = Some(tenant.into());
        engine.submit(request).expect("accepted");
        while engine.step_end().is_some() {
            engine.finish_step().expect("no actor is involved");
        }
    }
    engine
}

/// The times to the first and to the last token of a request with a prompt of 5 tokens and an answer
/// of 16, and the number of steps that have ended before its first token.
fn small_answer(
    engine: &mut Simulation<fn(&StepBatch) -> Duration>,
    token: u32,
) -> (Duration, Duration, usize) {
    // It arrives a little after the start of a step.
    engine.wait_until(engine.now() + Duration::from_micros(10));
    let begun = engine.now();
    let mut request = SequenceRequest::new(vec![token; 5], 16);
    request.options.tenant = Some("small".into());
    let id = engine.submit(request).expect("accepted");
    let (mut first, mut steps) = (None, 0);
    loop {
        steps += 1;
        for event in engine.finish_step().expect("no actor is involved") {
            if event.request != id {
                continue;
            }
            match event.event.expect("no request fails") {
                Event::Token(_) => {
                    first.get_or_insert((engine.now() - begun, steps));
                }
                Event::Finished(_) => {
                    let (first, steps) = first.expect("a token");
                    return (first, engine.now() - begun, steps);
                }
                _ => {}
            }
        }
    }
}

/// Goal: while another client's prompt of 6,000 tokens is computed, the first token of a small answer
/// comes two steps after its request at the latest, in at most a twelfth of a second, and the whole
/// answer takes at most five times as long as on an idle engine. The prompt is computed at half of
/// its speed at least.
#[test]
fn a_small_answer_is_hardly_delayed_by_a_long_prompt() {
    let mut idle = small_engine();
    let (first, whole, _) = small_answer(&mut idle, 10);
    assert!(first < Duration::from_millis(7) && whole < Duration::from_millis(75), "{whole:?}");
    let mut engine = small_engine();
    let begun = engine.now();
    let mut request = SequenceRequest::new(vec![4; 6_000], 1);
    request.options.tenant = Some("load".into());
    let load = engine.submit(request.clone()).expect("accepted");
    let (mut end, mut answers) = (None, 0);
    while end.is_none() {
        answers += 1;
        let (first, beside, steps) = small_answer(&mut engine, 10 + answers);
        assert!(steps <= 2 && first <= Duration::from_millis(75), "{first:?}, {steps} steps");
        assert!(beside <= 5 * whole, "{beside:?}, idle {whole:?}");
        for event in engine.finish_step().expect("no actor is involved") {
            let is_end = matches!(event.event, Ok(Event::Finished(_)));
            end = end.or((event.request == load && is_end).then(|| engine.now() - begun));
        }
        let counts = engine.stats();
        if counts.running + counts.waiting == 0 {
            end = end.or(Some(engine.now() - begun));
        }
    }
    let alone = Duration::from_micros(6_000 * 350 + 12 * 4_000);
    assert!(answers > 5 && end.is_some_and(|end| end <= 2 * alone), "{end:?}, alone {alone:?}");
}

/// Goal: a client that is alone has large steps, and has them again when no other one was seen for
/// some time.
#[test]
fn a_client_alone_has_large_steps() {
    let mut engine = small_engine();
    let mut steps_of = |token| {
        let mut request = SequenceRequest::new(vec![token; 5_120], 1);
        request.options.tenant = Some("load".into());
        engine.submit(request).expect("accepted");
        let mut steps = 0;
        while engine.step_end().is_some() {
            steps += 1;
            engine.finish_step().expect("no actor is involved");
        }
        let now = engine.now();
        engine.wait_until(now + Duration::from_secs(31));
        steps
    };
    assert_eq!((steps_of(5), steps_of(6), steps_of(7)), (40, 10, 10));
}

/// Goal: a small request is served as soon if the cache keeps nothing of the load, so that a
/// preempted request of it loses what it has computed.
#[test]
fn a_load_that_is_not_cached_gives_up_its_slots_too() {
    let idle = run(LOADS[0], Clients::Named, EngineConfig::default());
    let long = Load { count: 64, prompt: 300, same: false, answer: 300, private: false };
    let without_cache = EngineConfig { prefix_caching: false, ..EngineConfig::default() };
    for (load, config) in
        [(Load { private: true, ..long }, EngineConfig::default()), (long, without_cache)]
    {
        let fair = run(load, Clients::Named, config);
        assert!(fair.steps <= idle.steps + 2, "{load:?}: {fair:?}, idle {idle:?}");
    }
}
