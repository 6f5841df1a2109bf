//! The executor's thread: forward pass, then sampling, step by step.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use ractor::ActorRef;
use stolon_model::sampling::{SamplingError, TokenLogprob, prompt_logprob};
use stolon_model::{Backend, LogitRows};
use tokio::sync::oneshot;

use super::plan::{PromptTargets, RowResult, RowTask, StepDone, StepPlan};
use crate::admission::AdmissionMessage;
use crate::fault::{FaultPlan, Part};

/// A step, and who gets its result.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) plan: Box<StepPlan>,
    pub(crate) results: ActorRef<AdmissionMessage>,
}

/// Computes jobs until there are no more or one panics; hands the backend back either way.
pub(crate) fn run(
    mut backend: Box<dyn Backend>,
    jobs: &Receiver<Job>,
    faults: &FaultPlan,
    hand_back: oneshot::Sender<Box<dyn Backend>>,
    died: impl FnOnce(String),
) {
    let mut death = None;
    while let Ok(Job { plan, results }) = jobs.recv() {
        // What a panic may leave half done is the backend's KV and this step's samplers: the
        // cache is started anew and the sequences fail, so nothing half done is used again.
        let done = catch_unwind(AssertUnwindSafe(|| {
            let injected = faults.strike(Part::ExecutorThread).map_err(|error| error.to_string());
            compute(backend.as_mut(), *plan, injected)
        }));
        match done {
            // The actor may have been stopped meanwhile; then nobody wants the result.
            Ok(done) => drop(results.cast(AdmissionMessage::StepDone(Box::new(done)))),
            Err(panic) => {
                death = Some(panic_text(panic.as_ref()));
                break;
            }
        }
    }
    // Handed back before the death is told: whoever hears of it finds the backend there.
    drop(hand_back.send(backend));
    if let Some(reason) = death {
        died(reason);
    }
}

/// One step. Its ticket is dropped before the result is told.
pub(crate) fn compute(
    backend: &mut dyn Backend,
    plan: StepPlan,
    injected: Result<(), String>,
) -> StepDone {
    let StepPlan { batch, tasks, ticket } = plan;
    let begun = Instant::now();
    let vocab_size = backend.spec().vocab_size;
    let outcome = injected.and_then(|()| {
        let mut output = backend.step(&batch).map_err(|error| error.to_string())?;
        let row_count = |rows, tokens| match rows {
            LogitRows::None => 0,
            LogitRows::Last => 1,
            LogitRows::All => tokens,
        };
        let wanted: usize = batch
            .sequences
            .iter()
            .map(|slice| row_count(slice.logit_rows, slice.token_count))
            .sum();
        if output.logits.len() != wanted * vocab_size {
            return Err(format!(
                "the backend returned {} logits, expected {wanted} rows of {vocab_size}",
                output.logits.len()
            ));
        }
        let mut rest = output.logits.as_mut_slice();
        let mut results = Vec::with_capacity(tasks.len());
        for (slice, task) in batch.sequences.iter().zip(tasks) {
            let rows = row_count(slice.logit_rows, slice.token_count);
            let (rows, others) = rest.split_at_mut(rows * vocab_size);
            rest = others;
            results.push(finish_rows(rows, vocab_size, task));
        }
        Ok(results)
    });
    drop(ticket);
    StepDone { outcome, compute: begun.elapsed() }
}

/// Turns one slice's rows into tokens and log-probabilities.
fn finish_rows(rows: &mut [f32], vocab_size: usize, task: RowTask) -> RowResult {
    let RowTask { mut sampler, keep_row, prompt } = task;
    let mut result = RowResult::default();
    match prompt.map(|prompt| prompt_rows(rows, vocab_size, &prompt)).transpose() {
        Ok(told) => result.prompt = told.unwrap_or_default(),
        Err(error) => result.failure = Some(error),
    }
    if let Some(sampler) = &mut sampler
        && rows.len() >= vocab_size
        && result.failure.is_none()
    {
        let last = rows.len() - vocab_size;
        // Sampling overwrites the row.
        result.row = keep_row.then(|| Arc::from(&rows[last..]));
        match sampler.sample(&mut rows[last..]) {
            Ok(sampled) => result.sampled = Some(sampled),
            Err(error) => result.failure = Some(error),
        }
    }
    result.sampler = sampler;
    result
}

fn prompt_rows(
    rows: &[f32],
    vocab_size: usize,
    prompt: &PromptTargets,
) -> Result<Vec<TokenLogprob>, SamplingError> {
    let rows = rows.chunks_exact(vocab_size);
    rows.zip(&prompt.tokens).map(|(row, &token)| prompt_logprob(row, token, prompt.top)).collect()
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic").to_owned()
}
