//! What cost-aware admission is to reach, in simulations on the committed calibration.

use stolon_actors::{AdmissionPolicy, CoreConfig};
use stolon_benches::cost::CostModel;
use stolon_benches::drive::{capacity, simulate};
use stolon_benches::report::Summary;
use stolon_benches::workload::Shape;

const VOCAB_SIZE: usize = 32_000;

fn config(policy: AdmissionPolicy, conservative: bool) -> CoreConfig {
    CoreConfig {
        policy,
        conservative,
        max_running: 64,
        max_queued_requests: 1 << 20,
        max_queued_tokens: usize::MAX,
        ..CoreConfig::default()
    }
}

/// Conservative order of arrival, and cost-aware admission, at a share of what can be served.
fn compare(shape: Shape, load: f64, seed: u64) -> [Summary; 2] {
    let cost = CostModel::named("100m").expect("it is kept with the code");
    let spec = shape.spec(8, VOCAB_SIZE);
    let aware = config(AdmissionPolicy::Cost, false);
    let rate = load * capacity(shape, &spec, &aware, &cost, seed).expect("it runs");
    let plan = shape.conversations(rate, VOCAB_SIZE, seed);
    [config(AdmissionPolicy::Fcfs, true), aware].map(|config| {
        let run = simulate(&plan, spec.clone(), config, &cost).expect("it runs");
        assert_eq!((run.records.len(), run.rejected), (plan.len(), 0));
        Summary::of(&run)
    })
}

/// Goal: a shared system prompt and a pool that holds 8 requests without sharing: with all
/// requests at once four times as many run at a time, over several seeds, and half of
/// them have their first token in a third of the time or less.
#[test]
fn four_times_as_many_run_at_once() {
    let (mut few, mut many) = (0.0, 0.0);
    for seed in 0..5 {
        let [conservative, aware] = compare(Shape::SharedSystemPrompt, f64::INFINITY, seed);
        few += conservative.running_mean;
        many += aware.running_mean;
        assert!(aware.ttft_p50 * 3.0 <= conservative.ttft_p50, "{aware:?} {conservative:?}");
    }
    assert!(many >= 4.0 * few, "{many} against {few}");
}

/// Goal: where little is shared, the slowest first tokens are not much later than in order of
/// arrival, since requests age.
#[test]
fn the_slowest_pay_little_for_the_order_by_cost() {
    let cost = CostModel::named("100m").expect("it is kept with the code");
    for shape in [Shape::PrefixRepetition, Shape::NothingShared] {
        let spec = shape.spec(8, VOCAB_SIZE);
        let policies = [AdmissionPolicy::Fcfs, AdmissionPolicy::Cost];
        let configs = policies.map(|policy| config(policy, false));
        let (mut p50, mut p99) = ([0.0; 2], [0.0; 2]);
        for seed in 0..3 {
            let rate = 0.9 * capacity(shape, &spec, &configs[1], &cost, seed).expect("it runs");
            let plan = shape.conversations(rate, VOCAB_SIZE, seed);
            for (i, config) in configs.iter().enumerate() {
                let run = simulate(&plan, spec.clone(), config.clone(), &cost).expect("it runs");
                let summary = Summary::of(&run);
                p50[i] += summary.ttft_p50;
                p99[i] += summary.ttft_p99;
            }
        }
        let [[arrival_p50, p50], [arrival_p99, p99]] = [p50, p99];
        assert!(p99 <= 1.2 * arrival_p99, "{p99} against {arrival_p99}");
        assert!(p50 <= arrival_p50, "{p50} against {arrival_p50}");
    }
}

/// Goal: the same, at nine tenths of what can be served: half of the requests have their first
/// token in a third of the time or less, and the slowest are not slower.
#[test]
fn first_tokens_come_in_a_third_of_the_time() {
    let [conservative, aware] = compare(Shape::SharedSystemPrompt, 0.9, 0);
    assert!(aware.ttft_p50 * 3.0 <= conservative.ttft_p50, "{aware:?} {conservative:?}");
    assert!(aware.ttft_p99 <= conservative.ttft_p99, "{aware:?} {conservative:?}");
}

/// Goal: where nothing is shared, nothing is lost.
#[test]
fn nothing_is_lost_where_nothing_is_shared() {
    let [conservative, aware] = compare(Shape::NothingShared, 0.9, 0);
    assert!(aware.output_rate >= conservative.output_rate * 0.98);
    assert!(aware.ttft_p50 <= conservative.ttft_p50 * 1.05, "{aware:?} {conservative:?}");
}
