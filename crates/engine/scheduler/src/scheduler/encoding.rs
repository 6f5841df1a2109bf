//! [`Encoding`]: which image the next step encodes, and what becomes of the result.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use stolon_backend::{ImageEmbeddings, ImageInput};
use stolon_kvcache::Namespace;

use super::batch::Batch;
use crate::context::EngineContext;
use crate::error::EngineError;
use crate::images::{ENCODE_TIME_MAX, EncoderCache, ImageKey, key};
use crate::policy::Place;
use crate::sequence::Ending;
use crate::step_plan::EncodeTask;
use crate::tenant::TenantId;

/// The images that are encoded.
#[derive(Debug)]
pub(super) struct Encoding {
    context: EngineContext,
    cache: EncoderCache,
    /// The image that the last step has begun or continued to encode, with the namespace that it is
    /// encoded for.
    current: Option<(Namespace, Arc<ImageInput>)>,
    /// The time for which it has been encoded so far.
    time: Duration,
    /// For each tenant with running requests the step in which an image of it was last begun.
    turns: HashMap<TenantId, u64>,
}

/// A sequence that waits for an image.
struct Waiting {
    tenant: TenantId,
    arrival: u64,
    namespace: Namespace,
    image: Arc<ImageInput>,
}

impl Waiting {
    fn key(&self) -> ImageKey {
        key(self.namespace, &self.image)
    }
}

impl Encoding {
    pub(super) fn new(context: &EngineContext) -> Encoding {
        let bytes = context.config.encoder_cache_bytes;
        let cache = EncoderCache::new(bytes, Arc::clone(&context.encoded));
        let (context, turns) = (context.clone(), HashMap::new());
        Encoding { context, cache, current: None, time: Duration::ZERO, turns }
    }

    /// Gives running sequences the embeddings that are cached, and chooses the image that the next
    /// step encodes: the one that was begun, or the first one of the tenant that has waited longest.
    /// `is_alone` says that no other request waits for the step.
    pub(super) fn plan(&mut self, batch: &mut Batch, is_alone: bool) -> Option<EncodeTask> {
        let time = match is_alone {
            true => ENCODE_TIME_MAX,
            false => self.context.config.step_time_target.unwrap_or(ENCODE_TIME_MAX),
        };
        let Encoding { cache, current, time: spent, turns, .. } = self;
        let step = batch.next_step();
        let mut waiting: Vec<Waiting> = Vec::new();
        for running in batch.running_mut() {
            let Place { arrival, .. } = running.place();
            let sequence = &mut running.sequence;
            if sequence.end.is_some() || sequence.is_stalled() {
                continue;
            }
            let computed = sequence.held.computed;
            while let Some(image) = sequence.next_to_encode() {
                let (namespace, image) = (sequence.namespace, Arc::clone(&image.input));
                let Some(embeddings) = cache.get(&key(namespace, &image)) else {
                    let tenant = sequence.tenant;
                    match image.pixels.is_empty() {
                        true => sequence.end = Some(without_pixels()),
                        false => waiting.push(Waiting { tenant, arrival, namespace, image }),
                    }
                    break;
                };
                sequence.images.keep(&image, embeddings, computed);
            }
        }
        if waiting.is_empty() {
            *current = None;
            turns.clear();
            return None;
        }
        let current_key = current.as_ref().map(|(namespace, image)| key(*namespace, image));
        let begun = waiting.iter().position(|waiting| current_key == Some(waiting.key()));
        let chosen = begun.unwrap_or_else(|| {
            let turn = |waiting: &Waiting| {
                (turns.get(&waiting.tenant).copied().unwrap_or(0), waiting.arrival)
            };
            let first = (0..waiting.len()).min_by_key(|&index| turn(&waiting[index]));
            first.unwrap_or_default()
        });
        let Waiting { tenant, namespace, image, .. } = waiting.swap_remove(chosen);
        if begun.is_none() {
            turns.insert(tenant, step);
            *spent = Duration::ZERO;
        }
        *current = Some((namespace, Arc::clone(&image)));
        Some(EncodeTask { image, time })
    }

    /// Takes the result of the encoder: gives complete embeddings to all sequences of the namespace
    /// with the image, or ends those that wait for an image that could not be encoded.
    pub(super) fn complete(
        &mut self,
        batch: &mut Batch,
        encoded: Option<Result<Option<ImageEmbeddings>, String>>,
        time: Duration,
    ) {
        let Some((namespace, image)) = self.current.take() else { return };
        let image_key = key(namespace, &image);
        self.time += time;
        let result = encoded.unwrap_or_else(|| Err("the image was not encoded".to_owned()));
        match result {
            Ok(None) => self.current = Some((namespace, image)),
            Ok(Some(embeddings)) => {
                self.context.gauges.note_encoding(image.kv_len, self.time);
                let running = batch.sequences_mut();
                for sequence in running.filter(|sequence| sequence.namespace == namespace) {
                    sequence.images.keep(&image, &embeddings, sequence.held.computed);
                }
                self.cache.insert(image_key, embeddings);
            }
            Err(reason) => {
                for sequence in batch.sequences_mut() {
                    let next = sequence.next_to_encode();
                    let next = next.map(|next| key(sequence.namespace, &next.input));
                    if next == Some(image_key) {
                        let reason = reason.clone();
                        let failed = Ending::Failed(EngineError::StepFailed { reason });
                        sequence.end.get_or_insert(failed);
                    }
                }
            }
        }
    }
}

/// The error of a request whose image is known by its stored KV only, if the KV could not be
/// loaded.
fn without_pixels() -> Ending {
    let reason = "the stored KV of an image could not be loaded, and it has no pixels to encode";
    Ending::Failed(EngineError::StepFailed { reason: reason.to_owned() })
}
