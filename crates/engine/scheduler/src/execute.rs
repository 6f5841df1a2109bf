//! Executing one step: copies of blocks, guesses of a draft model, the forward pass, then sampling.

#[cfg(test)]
mod tests;

mod drafting;

use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use stolon_backend::{
    Backend, ImageEmbeddings, ImageInput, Sampled, SamplingError, SequenceSlice, StepBatch,
    StepOutput, TokenLogprob, prompt_logprob,
};

use crate::late_sampling::LateRow;
use crate::step_plan::{EncodeTask, PromptTargets, RowResult, RowTask, StepDone, StepPlan};
use crate::transfer::save_blocks;
use crate::verify::{Rows, Verified};

/// Minimum number of logits per sampling thread. Starting a thread takes some 20 microseconds, and
/// sampling from this many logits some 300.
const LOGITS_PER_THREAD: usize = 1 << 18;

/// Executes a step on `backend`. The step's ticket is dropped before this returns, so that blocks
/// released during the step can be reused when its result is handled.
pub fn execute(backend: &mut dyn Backend, plan: StepPlan) -> StepDone {
    let StepPlan { saves, discarded, loads, encode, draft, mut batch, mut tasks, ticket } = plan;
    let saved = saves.iter().map(|blocks| save_blocks(backend, blocks)).collect();
    backend.discard_blocks(&discarded);
    let loaded: Vec<bool> = loads.into_iter().map(|load| load.run(backend)).collect();
    let begun = Instant::now();
    let encoded = encode.map(|EncodeTask { image, time }| {
        let embeddings = backend.encode(&image, time).map_err(|error| error.to_string())?;
        check_embeddings(&image, backend.spec().image_values(image.kv_len), embeddings)
    });
    let encoding = if encoded.is_some() { begun.elapsed() } else { Duration::ZERO };
    let draft = drafting::propose(backend, draft, (&mut batch, &mut tasks), &loaded);
    let begun = Instant::now();
    let outcome = forward(backend, batch, tasks, &loaded);
    let compute = begun.elapsed();
    drop(ticket);
    StepDone { saved, encoded, encoding, loaded, draft, outcome, compute }
}

/// Checks the size of the embeddings that an encoder has returned.
fn check_embeddings(
    image: &ImageInput,
    expected: usize,
    embeddings: Option<ImageEmbeddings>,
) -> Result<Option<ImageEmbeddings>, String> {
    let got = embeddings.as_ref().map(|embeddings| embeddings.values.len());
    if let Some(got) = got.filter(|got| *got != expected) {
        let len = image.kv_len;
        return Err(format!(
            "the encoder returned {got} values for {len} positions, expected {expected}"
        ));
    }
    Ok(embeddings)
}

/// Runs the forward pass of the slices whose loads have not failed, and handles their logits and
/// hidden states.
fn forward(
    backend: &mut dyn Backend,
    mut batch: StepBatch,
    tasks: Vec<RowTask>,
    loaded: &[bool],
) -> Result<Vec<RowResult>, String> {
    let skipped = |task: &RowTask| task.is_skipped(loaded);
    if tasks.iter().any(skipped) {
        batch = keep_slices(batch, tasks.iter().map(|task| !skipped(task)));
    }
    let vocab_size = backend.spec().vocab_size;
    let hidden_size = backend.spec().hidden_size.unwrap_or(0);
    let mut output = match batch.sequences.is_empty() {
        true => StepOutput::default(),
        false => backend.step(&batch).map_err(|error| error.to_string())?,
    };
    let row_count = |slice: &SequenceSlice| slice.logit_rows.logits(slice.token_count).len();
    let spec = backend.spec().clone();
    let row_values = |slice: &SequenceSlice| row_count(slice) * slice.logit_rows.width(&spec);
    let wanted: usize = batch.sequences.iter().map(row_values).sum();
    if output.logits.len() != wanted {
        return Err(format!(
            "the backend returned {} logits, expected {wanted} in rows of {vocab_size}",
            output.logits.len()
        ));
    }
    let state_count = |slice: &SequenceSlice| slice.logit_rows.hidden(slice.token_count).len();
    let wanted: usize = batch.sequences.iter().map(state_count).sum();
    if output.hidden.len() != wanted * hidden_size {
        return Err(format!(
            "the backend returned {} values of hidden states, expected {wanted} rows of \
             {hidden_size}",
            output.hidden.len()
        ));
    }
    let wanted = batch.sequences.iter().filter(|slice| slice.logit_rows.draw().is_some()).count();
    let known =
        |drawn: &Result<u32, _>| !matches!(drawn, Ok(token) if *token as usize >= vocab_size);
    if output.drawn.len() != wanted || !output.drawn.iter().all(known) {
        return Err(format!(
            "the backend returned the tokens {:?}, expected {wanted} below {vocab_size}",
            output.drawn
        ));
    }
    let mut drawn = output.drawn.into_iter();
    let threads = backend.sampling_threads().min(output.logits.len() / LOGITS_PER_THREAD);
    let mut rest = output.logits.as_mut_slice();
    let mut states = output.hidden.as_slice();
    let mut work = Vec::with_capacity(tasks.len());
    let mut slices = batch.sequences.iter();
    for task in tasks {
        let Some(slice) = (!skipped(&task)).then(|| slices.next()).flatten() else {
            work.push((task, None));
            continue;
        };
        let (rows, others) = rest.split_at_mut(row_values(slice));
        rest = others;
        let (own, others) = states.split_at(state_count(slice) * hidden_size);
        states = others;
        let drawn = slice.logit_rows.draw().and_then(|_| drawn.next());
        let width = slice.logit_rows.width(&spec);
        work.push((task, Some(SliceOutput { rows, width, drawn, states: own })));
    }
    let result = |(task, output)| slice_result(task, output, hidden_size);
    Ok(in_parallel(work, threads, result))
}

/// What the backend has returned for one slice.
struct SliceOutput<'a> {
    /// `[rows, width]`.
    rows: &'a mut [f32],
    width: usize,
    drawn: Option<Result<u32, SamplingError>>,
    /// `[rows, hidden_size]`.
    states: &'a [f32],
}

/// Handles the output of one slice; `None` if it was not computed.
fn slice_result(task: RowTask, output: Option<SliceOutput<'_>>, hidden_size: usize) -> RowResult {
    let Some(SliceOutput { rows, width, drawn, states }) = output else {
        let RowTask { sampler, pooler, .. } = task;
        return RowResult { sampler, pooler, skipped: true, ..RowResult::default() };
    };
    let mut result = sample_slice(rows, drawn, width, task);
    if let Some(pooler) = result.pooler.as_mut().filter(|_| !states.is_empty()) {
        pooler.push(states, hidden_size);
    }
    result
}

/// Applies `f` to all items on up to `threads` threads, this one among them. The results are in the
/// order of the items. A panic of `f` is passed on.
fn in_parallel<T: Send, R: Send>(
    items: Vec<T>,
    threads: usize,
    f: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    if threads <= 1 || items.len() <= 1 {
        return items.into_iter().map(f).collect();
    }
    let others = threads.min(items.len()) - 1;
    let queue = Mutex::new(items.into_iter().enumerate());
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    let serve = || {
        let mut results = Vec::new();
        while let Some((index, item)) = next() {
            results.push((index, f(item)));
        }
        results
    };
    let mut results = thread::scope(|scope| {
        // Without another thread, this one does all of it.
        let start = |_| thread::Builder::new().spawn_scoped(scope, serve).ok();
        let others: Vec<_> = (0..others).filter_map(start).collect();
        let mut results = serve();
        for other in others {
            results.extend(other.join().unwrap_or_else(|panic| resume_unwind(panic)));
        }
        results
    });
    results.sort_unstable_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, result)| result).collect()
}

/// The slices of a batch for which `kept` is true.
fn keep_slices(batch: StepBatch, kept: impl Iterator<Item = bool>) -> StepBatch {
    let StepBatch { tokens, sequences } = batch;
    let mut batch = StepBatch::default();
    let mut rest = tokens.as_slice();
    for (slice, kept) in sequences.into_iter().zip(kept) {
        let (tokens, others) = rest.split_at(slice.token_count);
        rest = others;
        if kept {
            batch.tokens.extend_from_slice(tokens);
            batch.sequences.push(slice);
        }
    }
    batch
}

/// Samples from one slice's logits, unless the backend has drawn a token or the logits processor is
/// not ready, and computes its log-probabilities. If tokens were proposed, it samples as many as are
/// the proposed ones, and one more.
fn sample_slice(
    rows: &mut [f32],
    drawn: Option<Result<u32, SamplingError>>,
    width: usize,
    task: RowTask,
) -> RowResult {
    let RowTask { sampler, return_logits, prompt, proposals, pooler, .. } = task;
    let mut result = RowResult { pooler, ..RowResult::default() };
    match prompt.map(|prompt| prompt_rows(rows, width, &prompt)).transpose() {
        Ok(logprobs) => result.prompt = logprobs.unwrap_or_default(),
        Err(error) => result.failure = Some(error),
    }
    // The rows of prompt tokens come before the one to sample from.
    let sampled_rows = width * (1 + proposals.len());
    let last = rows.len().checked_sub(sampled_rows).map(|first| &mut rows[first..]);
    if result.failure.is_some() {
        return RowResult { sampler, ..result };
    }
    let Some(mut sampler) = sampler else { return result };
    match (last, drawn) {
        (Some(rows), _) => {
            // Copied before sampling, which overwrites the row.
            result.logits = return_logits.then(|| Arc::from(&*rows));
            let tried = Rows { logits: &mut *rows, width, proposals: &proposals };
            let Verified { sampled, failure, not_ready } = tried.verify(&mut sampler, false);
            (result.sampled, result.failure) = (sampled, failure);
            if let Some(next) = not_ready {
                let (logits, proposals) =
                    (rows[next * width..].to_vec(), proposals[next..].to_vec());
                result.late = Some(LateRow { sampler, logits, width, proposals });
                return result;
            }
        }
        (None, Some(Ok(token))) => {
            sampler.observe(token);
            result.sampled.push(Sampled { token, logprob: None });
        }
        (None, Some(Err(error))) => result.failure = Some(error),
        (None, None) => {}
    }
    result.sampler = Some(sampler);
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
