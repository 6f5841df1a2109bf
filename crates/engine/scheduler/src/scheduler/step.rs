//! The start and the end of a step: planning it, and applying its results.

use std::sync::Arc;
use std::time::{Duration, Instant};

use stolon_backend::{SamplingError, SequenceSlice, StepBatch};

use super::{InFlight, Running, Scheduler};
use crate::blocks_for;
use crate::cached_logits::PromptLogits;
use crate::config::AdmissionPolicy;
use crate::error::EngineError;
use crate::event::FinishReason;
use crate::late_sampling::LateToken;
use crate::memory::{ActorStopped, Memory};
use crate::schedule::{self, PrefillOrder, StepLimits, TenantLimit};
use crate::sequence::{Ending, Sequence};
use crate::step_cost::StepWork;
use crate::step_plan::{RowResult, RowTask, StepDone, StepPlan};

/// While several tenants send requests, a step with prompts takes at most this part of the target
/// duration, because one of them may send a request during the step. But it has up to
/// [`SHARED_PREFILL`] tokens if these fit the whole target.
const SHARED_STEP_SHARE: u32 = 4;

/// See [`SHARED_STEP_SHARE`]. Steps with more prompt tokens compute hardly more of them per second.
const SHARED_PREFILL: usize = 128;

/// Duration of the decodes of one tenant in a step that another tenant waits for, as a multiple of
/// the time of one decode alone.
const DECODES_PER_TENANT: f64 = 2.0;

impl<M: Memory> Scheduler<M> {
    /// Applies the results of the step in flight.
    ///
    /// # Errors
    /// [`ActorStopped`] if the memory no longer answers.
    pub async fn complete(&mut self, mut done: StepDone, now: Instant) -> Result<(), ActorStopped> {
        let mut slices = self.in_flight.take().unwrap_or_default();
        let only_computes = self.loads.is_empty() && done.encoded.is_none();
        self.complete_transfers(&mut done);
        self.complete_encoding(done.encoded.take(), done.encoding);
        self.context.gauges.steps.add(usize::from(!slices.is_empty()));
        let mut finished: Vec<(u64, FinishReason)> = Vec::new();
        match done.outcome {
            Ok(mut results) => {
                debug_assert_eq!(results.len(), slices.len());
                self.note_step(&slices, &results, done.compute);
                if only_computes {
                    self.note_cost(&slices, now);
                }
                let mut rows: Vec<(u64, Arc<[f32]>)> = Vec::new();
                for (slice, result) in slices.iter().zip(&mut results) {
                    let row = result.logits.take().filter(|_| result.failure.is_none());
                    rows.extend(row.map(|row| (slice.id, row)));
                }
                for (slice, result) in slices.iter_mut().zip(results) {
                    let end = self.apply(slice, result, now);
                    finished.extend(end.map(|end| (slice.id, end)));
                    if let Some(index) = self.find(slice) {
                        let state = std::mem::take(&mut slice.state);
                        self.take_checkpoints(index, slice.start, state);
                    }
                }
                self.commit().await?;
                self.publish_ending(&finished).await?;
                self.cache_logits(rows)?;
            }
            Err(reason) => {
                self.context.gauges.steps_failed.add(1);
                for slice in &slices {
                    let Some(index) = self.find(slice) else { continue };
                    let sequence = &mut self.running[index].sequence;
                    sequence.in_step = false;
                    let reason = reason.clone();
                    sequence.end = Some(Ending::Failed(EngineError::StepFailed { reason }));
                }
                self.end_overdue(now);
                self.flush().await?;
            }
        }
        for (id, end) in finished {
            self.finish(id, end, now);
        }
        self.update_followers();
        self.end_overdue(now);
        Ok(())
    }

    /// Counts the tokens that a step has computed, and records its speed.
    fn note_step(&mut self, slices: &[InFlight], results: &[RowResult], time: Duration) {
        let computed = slices.iter().zip(results).filter(|(_, result)| !result.skipped);
        let computed: usize = computed.map(|(slice, _)| slice.count).sum();
        if computed == 0 {
            return;
        }
        let prompts = slices.iter().filter(|slice| slice.count > 1).map(|slice| slice.count).sum();
        let gauges = &self.context.gauges;
        gauges.computed_tokens.add(computed);
        gauges.histograms.step_tokens.count(computed);
        gauges.note_prefill(prompts, computed, time);
        self.note_rate(computed, time.as_secs_f64());
    }

    /// Learns from the step that ends now how long steps take, together with everything that happens
    /// between its plan and its results.
    fn note_cost(&mut self, slices: &[InFlight], now: Instant) {
        self.cost.note(work_of(slices), now.saturating_duration_since(self.step_began));
    }

    /// Applies the result of one slice. Returns a reason if its sequence is complete.
    fn apply(&mut self, slice: &InFlight, result: RowResult, now: Instant) -> Option<FinishReason> {
        let index = self.find(slice)?;
        let sequence = &mut self.running[index].sequence;
        sequence.in_step = false;
        sequence.sampler = result.sampler.or(sequence.sampler.take());
        if result.skipped {
            sequence.pooler = result.pooler.or(sequence.pooler.take());
            return None;
        }
        if let Some(failure) = result.failure {
            // The positions of a failed sequence are not counted as computed, so that they are
            // never committed.
            sequence.end = Some(Ending::Failed(unusable_logits(&failure)));
            return None;
        }
        sequence.held.stepped(slice.start, slice.start + slice.count);
        sequence.images.forget(sequence.held.computed);
        sequence.gather_prompt_logprobs(result.prompt);
        if sequence.end.is_some() {
            return None;
        }
        if let Some(late) = result.late {
            self.late_sampling.start(sequence.id, sequence.tenant, late);
            sequence.is_sampling = true;
        }
        let end = result.pooler.and_then(|pooler| sequence.pooled(pooler));
        let Some(sampled) = result.sampled else { return end };
        sequence.push(sampled.token, sampled.logprob, now)
    }

    /// Applies the tokens that were sampled outside of steps.
    ///
    /// # Errors
    /// [`ActorStopped`] if the memory no longer answers.
    pub(super) async fn apply_late_tokens(&mut self, now: Instant) -> Result<(), ActorStopped> {
        let mut finished = Vec::new();
        let is_running = |id| self.running.iter().any(|running| running.sequence.id == id);
        for LateToken { id, sampler, sampled, .. } in self.late_sampling.take(is_running) {
            let running = self.running.iter_mut().find(|r| r.sequence.id == id);
            let Some(Running { sequence, .. }) = running else { continue };
            sequence.is_sampling = false;
            sequence.sampler = sampler;
            // It may be preempted from now on.
            self.try_admission = true;
            match sampled {
                _ if sequence.end.is_some() => {}
                Ok(sampled) => {
                    let end = sequence.push(sampled.token, sampled.logprob, now);
                    finished.extend(end.map(|end| (id, end)));
                }
                Err(failure) => sequence.end = Some(Ending::Failed(unusable_logits(&failure))),
            }
        }
        self.publish_ending(&finished).await?;
        for (id, end) in finished {
            self.finish(id, end, now);
        }
        Ok(())
    }

    /// Caches the logits of the last positions of prompts whose full blocks are all in the tree.
    fn cache_logits(&mut self, rows: Vec<(u64, Arc<[f32]>)>) -> Result<(), ActorStopped> {
        let block_size = self.context.spec.block_size;
        for (id, logits) in rows {
            let Some(running) = self.running.iter().find(|r| r.sequence.id == id) else { continue };
            let sequence = &running.sequence;
            let last_full = (sequence.prompt_len / block_size).checked_sub(1);
            let blocks = sequence.held.lease.as_ref().map(|lease| lease.blocks());
            let (Some(last_full), Some(blocks)) = (last_full, blocks) else { continue };
            let Some(&block) = blocks.get(last_full) else { continue };
            self.memory.cache_logits(PromptLogits {
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
    pub(super) async fn plan(&mut self) -> Result<Option<StepPlan>, ActorStopped> {
        self.prepare_state_loads().await?;
        let encode = self.plan_encoding();
        let (spec, config) = (&self.context.spec, &self.context.config);
        let block_size = spec.block_size;
        let cache_logits = config.prefix_caching && config.logit_cache_bytes > 0;
        let cache_logits = move |sequence: &Sequence| {
            cache_logits && sequence.writes_cache() && sequence.prompt_len >= block_size
        };
        let loads = self.plan_loads();
        let views: Vec<_> = (self.running.iter().enumerate())
            .map(|(index, Running { sequence, arrival, .. })| {
                let load = self.loads.iter().find(|load| load.index == index);
                let computed = load.map_or(sequence.held.computed, |load| load.end);
                sequence.view(&self.context.spec, *arrival, computed, cache_logits(sequence))
            })
            .collect();
        let slices = schedule::plan(&views, self.step_limits(), self.prefill_order());
        let mut states = self.reserve_checkpoints(&slices).await?.into_iter();
        let saves = self.plan_saves();
        if slices.is_empty() && saves.is_empty() && loads.is_empty() && encode.is_none() {
            return Ok(None);
        }
        self.step += 1;
        for load in &self.loads {
            self.running[load.index].sequence.held.last_step = self.step;
        }
        let mut batch = StepBatch::default();
        let mut tasks = Vec::with_capacity(slices.len());
        let mut in_flight = Vec::with_capacity(slices.len());
        for slice in slices {
            let end = slice.start + slice.count;
            let mut state = states.next().unwrap_or_default();
            let slice_state = self.slice_state(slice.index, end, &mut state);
            let sequence = &mut self.running[slice.index].sequence;
            batch.tokens.extend_from_slice(&sequence.tokens[slice.start..end]);
            batch.sequences.push(SequenceSlice {
                token_count: slice.count,
                start: slice.start,
                write_from: slice.write_from,
                block_table: sequence.held.table[..blocks_for(block_size, end)].to_vec(),
                logit_rows: slice.rows,
                state: slice_state,
                images: sequence.images.within(&(slice.start..end)),
                rotary_lag: sequence.images.rotary_lag(slice.start),
                adapter: sequence.options.adapter.clone(),
            });
            let cache_logits = cache_logits(sequence);
            tasks.push(RowTask {
                load: self.loads.iter().position(|load| load.index == slice.index),
                ..sequence.row_task(slice.start, slice.count, cache_logits)
            });
            sequence.in_step = true;
            sequence.held.last_step = self.step;
            in_flight.push(InFlight {
                id: sequence.id,
                index: slice.index,
                start: slice.start,
                count: slice.count,
                state,
            });
        }
        self.in_flight = Some(in_flight);
        let discarded = std::mem::take(&mut self.reserved);
        let ticket = self.fence.begin();
        Ok(Some(StepPlan { saves, discarded, loads, encode, batch, tasks, ticket }))
    }

    /// The sizes of the next step. Its duration is limited at the recent speed while another request
    /// decodes or waits, and more so while several tenants send requests.
    pub(super) fn step_limits(&self) -> StepLimits {
        self.step_limits_if(self.is_alone())
    }

    /// The sizes of a step with one request alone, or with several.
    pub(super) fn step_limits_if(&self, is_alone: bool) -> StepLimits {
        let config = &self.context.config;
        let positions = |time| self.context.gauges.prefill_positions(time).unwrap_or(usize::MAX);
        let (mut timed, mut tenant) = (usize::MAX, None);
        if let Some(target) = config.step_time_target {
            if self.several_tenants {
                let shared = positions(target / SHARED_STEP_SHARE).max(SHARED_PREFILL);
                timed = positions(target).min(shared);
            } else if !is_alone {
                timed = positions(target);
            }
            let (cost, seconds) = (self.cost, DECODES_PER_TENANT * self.cost.one_decode());
            tenant = Some(TenantLimit { cost, seconds });
        }
        StepLimits { tokens: config.max_batched_tokens, timed, tenant }
    }

    /// Whether no other request decodes or waits.
    pub(super) fn is_alone(&self) -> bool {
        self.running.len() <= 1 && self.queue.is_empty()
    }

    /// In which order prompts are computed.
    pub(super) fn prefill_order(&self) -> PrefillOrder {
        match **self.context.policy.load() {
            _ if self.context.config.max_overtake_tokens == 0 => PrefillOrder::Arrival,
            AdmissionPolicy::Fcfs => PrefillOrder::Priority,
            AdmissionPolicy::LongestPrefix | AdmissionPolicy::Cost => PrefillOrder::FewestLeft,
        }
    }

    /// The current index of a sequence that was part of the step; `None` if it has ended.
    fn find(&self, slice: &InFlight) -> Option<usize> {
        let at = |index: usize| self.running.get(index).is_some_and(|r| r.sequence.id == slice.id);
        if at(slice.index) {
            return Some(slice.index);
        }
        self.running.iter().position(|r| r.sequence.id == slice.id)
    }

    /// Updates the throughput, from which the retry hint of refused requests is computed.
    fn note_rate(&mut self, tokens: usize, seconds: f64) {
        if seconds > 0.0 {
            let rate = tokens as f64 / seconds;
            self.rate = if self.rate == 0.0 { rate } else { 0.9 * self.rate + 0.1 * rate };
            self.context.limits.set_rate(self.rate);
        }
    }
}

/// The work of a step.
pub(super) fn work_of(slices: &[InFlight]) -> StepWork {
    let works = slices.iter().map(|&InFlight { start, count, .. }| match count {
        1 => StepWork::decode(start as f64),
        _ => StepWork::prompt(start as f64, count as f64),
    });
    works.fold(StepWork::default(), StepWork::and)
}

/// The error of a sequence whose logits cannot be sampled from.
pub(super) fn unusable_logits(failure: &SamplingError) -> EngineError {
    let reason = failure.to_string();
    match failure {
        SamplingError::ProcessorFailed { .. } => EngineError::LogitsProcessor { reason },
        SamplingError::ProcessorBusy { .. } => EngineError::ProcessorBusy { reason },
        _ => EngineError::InvalidLogits { reason },
    }
}
