//! Which image the next step encodes, and what to do with the result.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use stolon_backend::{ImageEmbeddings, ImageInput};

use super::{Running, Scheduler};
use crate::error::EngineError;
use crate::images::{ENCODE_TIME_MAX, EncoderCache, key};
use crate::memory::Memory;
use crate::sequence::Ending;
use crate::step_plan::EncodeTask;
use crate::tenant::TenantId;

/// The images that are encoded.
#[derive(Debug)]
pub(super) struct Encoding {
    cache: EncoderCache,
    /// The image that the last step has begun, or gone on with.
    current: Option<Arc<ImageInput>>,
    /// How long it has been encoded so far.
    time: Duration,
    /// For each tenant with running requests the step in which an image of it was last begun.
    turns: HashMap<TenantId, u64>,
}

impl Encoding {
    pub(super) fn new(cache_bytes: usize) -> Encoding {
        let cache = EncoderCache::new(cache_bytes);
        Encoding { cache, current: None, time: Duration::ZERO, turns: HashMap::new() }
    }
}

impl<M: Memory> Scheduler<M> {
    /// Gives running sequences the embeddings that are cached, and chooses the image that the next
    /// step encodes: the one that was begun, or the first one of the tenant that has waited longest.
    pub(super) fn plan_encoding(&mut self) -> Option<EncodeTask> {
        let time = match self.is_alone() {
            true => ENCODE_TIME_MAX,
            false => self.context.config.step_time_target.unwrap_or(ENCODE_TIME_MAX),
        };
        let Encoding { cache, current, time: spent, turns } = &mut self.encoding;
        let mut waiting: Vec<(TenantId, u64, Arc<ImageInput>)> = Vec::new();
        for Running { sequence, arrival, .. } in &mut self.running {
            if sequence.end.is_some() || sequence.is_stalled() {
                continue;
            }
            let computed = sequence.held.computed;
            while let Some(image) = sequence.images.next_to_encode(computed) {
                let input = Arc::clone(&image.input);
                let Some(embeddings) = cache.get(&input) else {
                    waiting.push((sequence.tenant, *arrival, input));
                    break;
                };
                sequence.images.keep(&input, embeddings, computed);
            }
        }
        if waiting.is_empty() {
            *current = None;
            turns.clear();
            return None;
        }
        let is_current = |image: &ImageInput| current.as_deref().map(key) == Some(key(image));
        let begun = waiting.iter().position(|(_, _, image)| is_current(image));
        let chosen = begun.unwrap_or_else(|| {
            let turn = |(tenant, arrival, _): &(TenantId, u64, _)| {
                (turns.get(tenant).copied().unwrap_or(0), *arrival)
            };
            let first = (0..waiting.len()).min_by_key(|&index| turn(&waiting[index]));
            first.unwrap_or_default()
        });
        let (tenant, _, image) = waiting.swap_remove(chosen);
        if begun.is_none() {
            turns.insert(tenant, self.step + 1);
            *spent = Duration::ZERO;
        }
        *current = Some(Arc::clone(&image));
        Some(EncodeTask { image, time })
    }

    /// Takes the result of the encoder: gives complete embeddings to all sequences with the image,
    /// or ends those that wait for an image that could not be encoded.
    pub(super) fn complete_encoding(
        &mut self,
        encoded: Option<Result<Option<ImageEmbeddings>, String>>,
        time: Duration,
    ) {
        let Some(image) = self.encoding.current.take() else { return };
        self.encoding.time += time;
        let result = encoded.unwrap_or_else(|| Err("the image was not encoded".to_owned()));
        match result {
            Ok(None) => self.encoding.current = Some(image),
            Ok(Some(embeddings)) => {
                self.context.gauges.note_encoding(image.kv_len, self.encoding.time);
                for Running { sequence, .. } in &mut self.running {
                    sequence.images.keep(&image, &embeddings, sequence.held.computed);
                }
                self.encoding.cache.insert(&image, embeddings);
            }
            Err(reason) => {
                for Running { sequence, .. } in &mut self.running {
                    let next = sequence.images.next_to_encode(sequence.held.computed);
                    if next.is_some_and(|next| key(&next.input) == key(&image)) {
                        let reason = reason.clone();
                        let failed = Ending::Failed(EngineError::StepFailed { reason });
                        sequence.end.get_or_insert(failed);
                    }
                }
            }
        }
    }
}
