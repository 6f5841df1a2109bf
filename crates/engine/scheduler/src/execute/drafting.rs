//! Adds the proposals of a draft model to the slices of a step, before the forward pass.

use std::time::Instant;

use stolon_backend::{Backend, DraftTask, LogitRows, StepBatch};

use crate::step_plan::{DraftDone, DraftPlan, DraftSlice, RowTask};

/// Asks the draft model for the tokens that follow the slices of `plan`, and adds them to the batch
/// and the tasks. If the draft model fails, nothing is proposed: only speed depends on it.
///
/// A token is guessed as the model's own is sampled: with the random number and the penalties of the
/// request. So a draft model with the same logits guesses the same token at any temperature.
pub(super) fn propose(
    backend: &mut dyn Backend,
    plan: DraftPlan,
    (batch, tasks): (&mut StepBatch, &mut [RowTask]),
    loaded: &[bool],
) -> DraftDone {
    let DraftPlan { slices, budget } = plan;
    let (mut asked, mut samplers, mut drafted): (Vec<_>, Vec<_>, Vec<DraftTask>) =
        Default::default();
    for DraftSlice { index, task, ends } in slices {
        let row = &tasks[index];
        let Some(sampler) = row.sampler.as_ref().filter(|_| !row.is_skipped(loaded)) else {
            continue;
        };
        samplers.push(sampler.for_draft());
        drafted.push(task);
        asked.push((index, ends));
    }
    if drafted.is_empty() {
        return DraftDone::default();
    }
    let begun = Instant::now();
    let mut choose = |task: usize, row: &mut [f32]| {
        let token = samplers[task].sample(row).ok()?.token;
        let is_end = asked[task].1.iter().any(|ends| ends.contains(token));
        (!is_end).then_some(token)
    };
    let mut output = match backend.draft(&drafted, budget, &mut choose) {
        Ok(output) => output,
        Err(error) => {
            tracing::warn!("the draft model failed, and nothing is proposed: {error}");
            return DraftDone { time: begun.elapsed(), ..DraftDone::default() };
        }
    };
    let tokens = std::mem::take(&mut output.tokens);
    let proposals: Vec<(usize, Vec<u32>)> = (asked.into_iter().map(|(index, _)| index))
        .zip(tokens)
        .filter(|(_, tokens)| !tokens.is_empty())
        .collect();
    for (index, tokens) in &proposals {
        let task = &mut tasks[*index];
        if let Some(sampler) = &task.sampler {
            sampler.prepare_ahead(tokens);
        }
        task.proposals.clone_from(tokens);
    }
    extend(batch, &proposals);
    DraftDone { proposals, output, time: begun.elapsed() }
}

/// Adds the proposals to the slices, each of which gets a row for each of its tokens.
fn extend(batch: &mut StepBatch, proposals: &[(usize, Vec<u32>)]) {
    let tokens = std::mem::take(&mut batch.tokens);
    let (mut rest, mut proposals) = (tokens.as_slice(), proposals.iter().peekable());
    for (index, slice) in batch.sequences.iter_mut().enumerate() {
        let (own, others) = rest.split_at(slice.token_count);
        rest = others;
        batch.tokens.extend_from_slice(own);
        if let Some((_, proposed)) = proposals.next_if(|(to, _)| *to == index) {
            batch.tokens.extend_from_slice(proposed);
            slice.token_count += proposed.len();
            slice.logit_rows = LogitRows::All;
            if let Some(state) = &mut slice.state {
                state.proposed = proposed.len();
            }
        }
    }
}
