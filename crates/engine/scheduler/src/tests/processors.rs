//! Requests whose logits processor is slow.

use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;

use stolon_backend::{LogitsProcessor, SamplingError, SharedProcessor};

use super::*;

/// A processor that does not return before it is opened.
#[derive(Clone, Default)]
struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    fn open(&self) {
        *self.0.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.1.notify_all();
    }
}

impl LogitsProcessor for Gate {
    fn process(&self, _: &[u32], _: &mut [f32]) -> Result<(), SamplingError> {
        let open = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.0.1.wait_while(open, |open| !*open));
        Ok(())
    }
}

fn submit_gated(harness: &mut Harness, prompt: Vec<u32>, max_tokens: usize, tenant: &str) -> Gate {
    let gate = Gate::default();
    let processor = SharedProcessor::new(gate.clone());
    harness.submit_request(prompt, max_tokens, |request| {
        request.options.sampling.processor = Some(processor);
        request.options.tenant = Some(tenant.into());
    });
    gate
}

/// Runs steps until `is_done`, for at most 10 seconds, so that sampling threads can return.
fn run_until(harness: &mut Harness, is_done: impl Fn(&Harness) -> bool) {
    for _ in 0..10_000 {
        harness.step(false);
        harness.read(true);
        harness.advance();
        if is_done(harness) {
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
    panic!("nothing more happens");
}

/// Goal: a request whose processor does not return keeps its blocks and its place, and no other
/// request waits for it. When the processor returns, the request goes on with the same answer.
#[test]
fn nobody_waits_for_the_processor_of_another_request() {
    let mut harness = Harness::new(4, 64, EngineConfig::default());
    let gate = submit_gated(&mut harness, prompt(1, 20), 5, "a");
    harness.submit(prompt(2, 30), 20, None);
    run_until(&mut harness, |harness| harness.callers[1].is_done());
    assert!(harness.callers[0].tokens.is_empty(), "its processor has not returned");
    let audit = ready(harness.scheduler.audit()).expect("a consistent accounting");
    assert_eq!(audit.running, 1);
    gate.open();
    run_until(&mut harness, |harness| harness.callers[0].is_done());
    harness.finish();
}

/// Goal: a request can be canceled while its processor runs. The threads of processors that do not
/// return are bounded, for each tenant too, so that the requests of others continue.
#[test]
fn a_request_can_end_while_its_processor_runs() {
    let config = EngineConfig { max_running: 2, ..EngineConfig::default() };
    let mut harness = Harness::new(4, 64, config);
    let mut gates = Vec::new();
    for index in 0..4 {
        gates.push(submit_gated(&mut harness, prompt(index, 9), 2, "a"));
        harness.step(false);
        assert!(!harness.callers[index as usize].is_done());
        harness.cancel(index as usize);
    }
    // Two threads of requests that have ended, as many as one tenant may have.
    gates.push(submit_gated(&mut harness, prompt(5, 9), 2, "a"));
    let other = submit_gated(&mut harness, prompt(6, 9), 2, "b");
    other.open();
    run_until(&mut harness, |harness| harness.callers[5].is_done());
    assert_eq!(harness.callers[5].end, Some(Ok(())));
    assert!(!harness.callers[4].is_done() && harness.callers[4].tokens.is_empty());
    gates.iter().for_each(Gate::open);
    run_until(&mut harness, |harness| harness.callers[4].is_done());
    assert_eq!(harness.callers[4].end, Some(Ok(())));
    harness.finish();
}
