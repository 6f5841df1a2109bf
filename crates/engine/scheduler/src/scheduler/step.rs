//! The start and the end of a step: planning it, and applying its results.

use std::sync::Arc;
use std::time::Instant;

use stolon_backend::{DraftTask, LogitRows, SequenceSlice, StepBatch};

use super::Scheduler;
use super::batch::{InFlight, Step};
use crate::blocks_for;
use crate::cached_logits::PromptLogits;
use crate::context::EngineContext;
use crate::event::FinishReason;
use crate::memory::{ActorStopped, Memory};
use crate::schedule::{self, Slice};
use crate::sequence::Sequence;
use crate::speculation::Proposal;
use crate::step_plan::{DraftPlan, DraftSlice, RowTask, StepDone, StepPlan};

impl<M: Memory> Scheduler<M> {
    /// Applies the results of the step in flight. Does nothing if there is none.
    ///
    /// # Errors
    /// [`ActorStopped`] if the memory no longer answers.
    pub async fn complete(&mut self, mut done: StepDone, now: Instant) -> Result<(), ActorStopped> {
        let Some(mut step) = self.batch.take_step() else { return Ok(()) };
        let only_computes = !self.transfers.has_loads() && done.encoded.is_none();
        self.transfers.complete(&mut self.batch, &mut done);
        self.encoding.complete(&mut self.batch, done.encoded.take(), done.encoding);
        self.context.gauges.steps.add(usize::from(!step.slices.is_empty()));
        match done.outcome {
            Ok(mut results) => {
                debug_assert_eq!(results.len(), step.slices.len());
                self.context.gauges.model_computed_tokens.add(done.draft.output.first_tokens);
                self.batch.take_drafts(&mut step, &done.draft);
                let is_background = self.count_background(&step);
                if !is_background {
                    self.estimates.note_step(&step, &results, done.compute);
                }
                if only_computes && !is_background {
                    self.estimates.note_cost(&step, &results, done.draft.time, now);
                    self.speculating.note(&step, &done.draft, &results, now);
                }
                let mut rows: Vec<(u64, Arc<[f32]>)> = Vec::new();
                for (slice, result) in step.slices.iter().zip(&mut results) {
                    let row = result.logits.take().filter(|_| result.failure.is_none());
                    rows.extend(row.map(|row| (slice.id, row)));
                }
                let mut finished: Vec<(u64, FinishReason)> = Vec::new();
                for (slice, result) in step.slices.iter_mut().zip(results) {
                    let end = self.batch.apply(slice, result, now);
                    finished.extend(end.map(|end| (slice.id, end)));
                    if let Some(sequence) = self.batch.get_mut(slice.id) {
                        let state = std::mem::take(&mut slice.state);
                        self.checkpoints.take(sequence, slice.start, state);
                    }
                }
                self.commit().await?;
                self.cache_logits(rows)?;
                self.finish(finished, now).await?;
            }
            Err(reason) => {
                self.context.gauges.steps_failed.add(1);
                self.batch.fail_step(&step, &reason);
                self.end_overdue(now);
                self.flush().await?;
            }
        }
        self.admission.update_followers(&self.batch);
        self.end_overdue(now);
        Ok(())
    }

    /// Counts the tokens of a step that computes a prompt in the background, alone. Returns whether
    /// it does. Such steps are short, so they say nothing about the speed of others.
    fn count_background(&self, step: &Step) -> bool {
        let is_background =
            |slice: &&InFlight| self.batch.get(slice.id).is_some_and(|of| of.is_background);
        let computed: usize = step.slices.iter().filter(is_background).map(|s| s.count).sum();
        self.context.gauges.background_tokens.add(computed);
        computed > 0
    }

    /// Applies the tokens that were sampled outside of steps.
    ///
    /// # Errors
    /// [`ActorStopped`] if the memory no longer answers.
    pub(super) async fn apply_late_tokens(&mut self, now: Instant) -> Result<(), ActorStopped> {
        let mut finished = Vec::new();
        for (id, end) in self.batch.apply_late_tokens(now) {
            // It may be preempted from now on.
            self.admission.retry();
            finished.extend(end.map(|end| (id, end)));
        }
        self.finish(finished, now).await
    }

    /// Caches the logits of the last positions of prompts whose full blocks are all in the tree.
    fn cache_logits(&mut self, rows: Vec<(u64, Arc<[f32]>)>) -> Result<(), ActorStopped> {
        let block_size = self.context.spec.block_size;
        for (id, logits) in rows {
            let Some(sequence) = self.batch.get(id) else { continue };
            let last_full = (sequence.prompt_len / block_size).checked_sub(1);
            let blocks = sequence.held.lease.as_ref().map(|lease| lease.blocks());
            let (Some(last_full), Some(blocks)) = (last_full, blocks) else { continue };
            let Some(&block) = blocks.get(last_full) else { continue };
            self.blocks.memory().cache_logits(PromptLogits {
                block,
                namespace: sequence.namespace,
                tokens: sequence.tokens[..sequence.prompt_len].to_vec(),
                logits,
            })?;
        }
        Ok(())
    }

    /// Plans the next step; `None` if no running sequence can take part.
    ///
    /// # Errors
    /// [`ActorStopped`] if the memory no longer answers.
    pub(super) async fn plan(&mut self, now: Instant) -> Result<Option<StepPlan>, ActorStopped> {
        self.checkpoints.prepare_loads(&mut self.batch, &mut self.blocks).await?;
        let is_alone = self.is_alone();
        let encode = self.encoding.plan(&mut self.batch, is_alone);
        let loads = self.transfers.plan_loads(&self.batch);
        let chosen = self.choose_slices(is_alone);
        let (proposals, budget) = self.propose(&chosen, is_alone);
        let mut slices = Vec::new();
        for ((id, slice), proposals) in chosen.into_iter().zip(proposals) {
            let Some(sequence) = self.batch.get_mut(id) else { continue };
            let lens = self.checkpoints.choose(sequence, &slice, self.admission.queue());
            let state = self.checkpoints.reserve(sequence, lens, &mut self.blocks).await?;
            slices.push((id, slice, state, proposals));
        }
        let saves = self.transfers.plan_saves(self.blocks.take_evicted());
        if slices.is_empty() && saves.is_empty() && loads.is_empty() && encode.is_none() {
            return Ok(None);
        }
        let block_size = self.context.spec.block_size;
        let mut batch = StepBatch::default();
        let mut draft = DraftPlan { slices: Vec::new(), budget };
        let mut tasks = Vec::with_capacity(slices.len());
        let mut in_flight = Vec::with_capacity(slices.len());
        for (id, slice, mut state, proposals) in slices {
            let Some(sequence) = self.batch.get_mut(id) else { continue };
            let Slice { start, count, .. } = slice;
            let end = start + count;
            let cache_logits = caches_logits(&self.context, sequence);
            let blocks = blocks_for(block_size, end + proposals.len());
            let proposals = match proposals {
                Proposal::Tokens(tokens) => tokens,
                Proposal::Model { count, missing_max } => {
                    draft.slices.push(DraftSlice {
                        index: tasks.len(),
                        task: DraftTask {
                            tokens: Arc::clone(&sequence.tokens),
                            block_table: sequence.held.table.clone(),
                            count,
                            missing_max,
                        },
                        ends: [sequence.eos_ids.clone(), sequence.options.stop_ids.clone()],
                    });
                    // They are added by the executor.
                    Vec::new()
                }
            };
            let proposed = proposals.len();
            batch.tokens.extend_from_slice(&sequence.tokens[start..end]);
            batch.tokens.extend_from_slice(&proposals);
            batch.sequences.push(SequenceSlice {
                token_count: count + proposed,
                start,
                write_from: slice.write_from,
                block_table: sequence.held.table[..blocks].to_vec(),
                // Proposals follow a single token, so each token of the slice has a row.
                logit_rows: if proposed > 0 { LogitRows::All } else { slice.rows },
                state: self.checkpoints.begin_slice(sequence, (end, proposed), &mut state),
                images: sequence.images.within(&(start..end)),
                rotary_lag: sequence.images.rotary_lag(start),
                adapter: sequence.options.adapter.clone(),
            });
            tasks.push(RowTask {
                load: self.transfers.load_of(id).map(|(index, _)| index),
                proposals,
                ..sequence.row_task(start, count, cache_logits)
            });
            in_flight.push(InFlight { id, start, count, proposed, state });
        }
        self.batch.begin_step(in_flight, self.transfers.loading(), now);
        let (discarded, ticket) = self.blocks.begin_step();
        Ok(Some(StepPlan { saves, discarded, loads, encode, draft, batch, tasks, ticket }))
    }

    /// What is proposed for each of the slices of the next step, and the draft model's budget
    /// ([`DraftPlan::budget`]).
    fn propose(&mut self, slices: &[(u64, Slice)], is_alone: bool) -> (Vec<Proposal>, usize) {
        let waits = (is_alone, self.estimates.are_several_tenants());
        let (tokens, tree) = (self.context.config.max_batched_tokens, self.blocks.reader());
        let sequences = (&mut self.batch, &self.checkpoints);
        self.speculating.propose(sequences, slices, tokens, waits, tree)
    }

    /// The slices of the next step, each with the id of its sequence.
    fn choose_slices(&self, is_alone: bool) -> Vec<(u64, Slice)> {
        let views: Vec<_> = (self.batch.running())
            .map(|running| {
                let sequence = &running.sequence;
                let load = self.transfers.load_of(sequence.id);
                let computed = load.map_or(sequence.held.computed, |(_, end)| end);
                let cache_logits = caches_logits(&self.context, sequence);
                let arrival = running.place().arrival;
                sequence.view(&self.context.spec, arrival, computed, cache_logits)
            })
            .collect();
        let ids: Vec<u64> = self.batch.sequences().map(|sequence| sequence.id).collect();
        let (limits, order) =
            (self.estimates.step_limits(is_alone), self.estimates.prefill_order());
        let slices = schedule::plan(&views, limits, order).into_iter();
        slices.map(|slice| (ids[slice.index], slice)).collect()
    }
}

/// Whether the logits of the last position of a sequence's prompt are cached. They are those of the
/// vocabulary only.
fn caches_logits(context: &EngineContext, sequence: &Sequence) -> bool {
    let config = &context.config;
    config.prefix_caching
        && config.logit_cache_bytes > 0
        && sequence.writes_cache()
        && !sequence.options.regions
        && !sequence.is_background
        && sequence.prompt_len >= context.spec.block_size
}
