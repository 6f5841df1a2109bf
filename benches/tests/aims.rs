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
fn compare(shape: Shape, load: f64) -> [Summary; 2] {
    let cost = CostModel::named("100m").expect("it is kept with the code");
    let spec = shape.spec(8, VOCAB_SIZE);
    let aware = config(AdmissionPolicy::Cost, false);
    let rate = load * capacity(shape, &spec, &aware, &cost, 0).expect("it runs");
    let plan = shape.conversations(rate, VOCAB_SIZE, 0);
    [config(AdmissionPolicy::Fcfs, true), aware].map(|config| {
        let run = simulate(&plan, spec.clone(), config, &cost).expect("it runs");
        assert_eq!((run.records.len(), run.rejected), (plan.len(), 0));
        Summary::of(&run)
    })
}

/// Goal: a shared system prompt and a pool that holds 8 requests without sharing: with all
/// requests at once about four times as many run at a time, and half of them have their first
/// token in a third of the time or less.
#[test]
fn four_times_as_many_run_at_once() {
    let [conservative, aware] = compare(Shape::SharedSystemPrompt, f64::INFINITY);
    let (few, many) = (conservative.running_mean, aware.running_mean);
    assert!(many >= 3.8 * few, "{many} against {few}");
    assert!(aware.ttft_p50 * 3.0 <= conservative.ttft_p50, "{aware:?} {conservative:?}");
}

/// Goal: where little is shared, the slowest first tokens are not much later than in order of
/// arrival, since requests age.
#[test]
fn the_slowest_pay_little_for_the_order_by_cost() {
    let cost = CostModel::named("100m").expect("it is kept with the code");
    for shape in [Shape::PrefixRepetition, Shape::NothingShared] {
        let spec = shape.spec(8, VOCAB_SIZE);
        let aware = config(AdmissionPolicy::Cost, false);
        let rate = 0.9 * capacity(shape, &spec, &aware, &cost, 0).expect("it runs");
        let plan = shape.conversations(rate, VOCAB_SIZE, 0);
        let [arrival, aware] = [config(AdmissionPolicy::Fcfs, false), aware].map(|config| {
            Summary::of(&simulate(&plan, spec.clone(), config, &cost).expect("it runs"))
        });
        assert!(aware.ttft_p99 <= 1.2 * arrival.ttft_p99, "{aware:?} {arrival:?}");
        assert!(aware.ttft_p50 <= arrival.ttft_p50, "{aware:?} {arrival:?}");
    }
}

/// Goal: the same, at nine tenths of what can be served: half of the requests have their first
/// token in a third of the time or less, and the slowest are not slower.
#[test]
fn first_tokens_come_in_a_third_of_the_time() {
    let [conservative, aware] = compare(Shape::SharedSystemPrompt, 0.9);
    assert!(aware.ttft_p50 * 3.0 <= conservative.ttft_p50, "{aware:?} {conservative:?}");
    assert!(aware.ttft_p99 <= conservative.ttft_p99, "{aware:?} {conservative:?}");
}

/// Goal: where nothing is shared, nothing is lost.
#[test]
fn nothing_is_lost_where_nothing_is_shared() {
    let [conservative, aware] = compare(Shape::NothingShared, 0.9);
    assert!(aware.output_rate >= conservative.output_rate * 0.98);
    assert!(aware.ttft_p50 <= conservative.ttft_p50 * 1.05, "{aware:?} {conservative:?}");
}
