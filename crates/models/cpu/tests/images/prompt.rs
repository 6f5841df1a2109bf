//! The logits of prompts with images.

use stolon_backend::{Backend, LogitRows, SequenceSlice, SliceImage, SliceState, StepBatch};
use stolon_kvcache::BlockId;

use super::fixture::{self, NAMES};

/// Maximum difference from transformers, in standard deviations of the logits.
const DIFFERENCE_MAX: f32 = 1e-3;

/// Goal: the logits of a prompt with images match those of transformers, with attention in both
/// directions between the positions of an image where the model has that.
#[test]
fn logits_match_transformers() {
    for name in NAMES {
        let model = fixture::model(name);
        let inputs = fixture::inputs(name, &model);
        let expected = fixture::logits(name);
        let full_attention = inputs[0].full_attention;
        let mut backend = fixture::backend(model, None, 1);
        let mut images = Vec::new();
        let mut position = 0;
        let token = fixture::IMAGE_TOKEN;
        let places = expected.prompt.iter().filter(|id| **id == token).count();
        for image in inputs.iter().take(places / inputs[0].kv_len) {
            let rest = &expected.prompt[position..];
            let start = position + rest.iter().position(|id| *id == token).expect("a place");
            let embeddings = backend.encode(image, std::time::Duration::MAX).expect("an image");
            let embeddings = embeddings.expect("there was time");
            let (len, columns) = (image.kv_len, image.columns);
            images.push(SliceImage { start, len, full_attention, columns, embeddings });
            position = start + image.kv_len;
        }
        let count = expected.prompt.len();
        let blocks = count.div_ceil(backend.spec().block_size) as u32;
        let slice = SequenceSlice {
            token_count: count,
            block_table: (0..blocks).map(BlockId).collect(),
            logit_rows: LogitRows::All,
            images,
            state: backend.spec().state.map(|_| SliceState::in_slot(0)),
            ..SequenceSlice::default()
        };
        let batch = StepBatch { tokens: expected.prompt.clone(), sequences: vec![slice] };
        let got = backend.step(&batch).expect("a good batch").logits;
        let width = backend.spec().vocab_size;
        for (row, logits) in expected.rows.iter().zip(expected.logits.chunks(width)) {
            let difference = fixture::difference(&got[row * width..][..width], logits);
            assert!(difference < DIFFERENCE_MAX, "{name}, row {row}: {difference}");
        }
    }
}
