//! Coordinates and sizes as tokens.

use std::time::Duration;

use stolon_backend::{
    Backend, BackendError, BackendSpec, LogitRows, RegionToken, SequenceSlice, SliceImage,
    StepBatch,
};
use stolon_cpu::CpuBackend;
use stolon_kernels::Path;
use stolon_kvcache::BlockId;

use super::fixture;

/// A model whose bins are decoded by MLPs, and one with projections of the normalized stream.
const NAMES: [&str; 2] = ["moondream2", "moondream3"];

/// Maximum difference from the reference, in standard deviations of the logits.
const DIFFERENCE_MAX: f32 = 1e-3;

fn coordinate(bin: u32) -> u32 {
    RegionToken::Coordinate { bin }.token().expect("a bin")
}

fn size(width_bin: u32, height_bin: u32) -> u32 {
    RegionToken::Size { width_bin, height_bin }.token().expect("bins")
}

/// The tokens of the prompt with the image, and of a point and a size.
fn tokens(name: &str) -> (usize, Vec<u32>) {
    let mut tokens = fixture::logits(name).prompt;
    let prompt = tokens.len();
    let bins = fixture::region_bins(name);
    tokens.extend([coordinate(bins[0]), coordinate(bins[1]), size(bins[2], bins[3])]);
    (prompt, tokens)
}

/// The slice of the positions from `start` to `end`.
fn slice(backend: &CpuBackend, image: &SliceImage, start: usize, end: usize) -> SequenceSlice {
    let blocks = 64_usize.div_ceil(backend.spec().block_size) as u32;
    SequenceSlice {
        token_count: end - start,
        start,
        write_from: start,
        block_table: (0..blocks).map(BlockId).collect(),
        logit_rows: LogitRows::Regions,
        images: (start < image.len).then(|| image.clone()).into_iter().collect(),
        ..SequenceSlice::default()
    }
}

fn row(backend: &mut CpuBackend, tokens: &[u32], slice: SequenceSlice) -> Vec<f32> {
    let tokens = tokens[slice.start..slice.start + slice.token_count].to_vec();
    let batch = StepBatch { tokens, sequences: vec![slice] };
    backend.step(&batch).expect("a good batch").logits
}

/// A backend and the image of the prompt.
fn open(name: &str, path: Option<Path>, threads: usize) -> (CpuBackend, SliceImage) {
    let model = fixture::model(name);
    let inputs = fixture::inputs(name, &model);
    let mut backend = fixture::backend(model, path, threads);
    let embeddings = backend.encode(&inputs[0], Duration::MAX).expect("an image");
    let embeddings = embeddings.expect("there was time");
    let (len, full_attention) = (inputs[0].kv_len, true);
    let image = SliceImage { start: 0, len, full_attention, columns: 0, embeddings };
    (backend, image)
}

/// Goal: the logits of coordinates and sizes, and those of the tokens after them, are those of the
/// reference on every instruction set, and do not depend, bit for bit, on how the sequence was
/// divided into steps.
#[test]
fn logits_match_the_reference() {
    let paths = || Path::supported().into_iter();
    for (name, path) in NAMES.iter().flat_map(|name| paths().map(move |path| (name, path))) {
        let (prompt, tokens) = tokens(name);
        let (mut backend, image) = open(name, Some(path), 1);
        let width = LogitRows::Regions.width(backend.spec());
        let expected = fixture::region_logits(name);
        assert_eq!(expected.len(), width * 4);
        let mut rows = Vec::new();
        let mut start = 0;
        for end in prompt..=tokens.len() {
            let slice = slice(&backend, &image, start, end);
            rows.push(row(&mut backend, &tokens, slice));
            start = end;
        }
        let vocabulary = backend.spec().vocab_size;
        for (row, expected) in rows.iter().zip(expected.chunks(width)) {
            assert_eq!(row.len(), width);
            for part in [0..vocabulary, vocabulary..width] {
                let difference = fixture::difference(&row[part.clone()], &expected[part]);
                let context = format!("{name}, {path}: {difference} standard deviations");
                assert!(difference < DIFFERENCE_MAX, "{context}");
            }
        }
        let (mut other, image) = open(name, Some(path), 2);
        let whole = slice(&other, &image, 0, tokens.len());
        assert_eq!(row(&mut other, &tokens, whole), rows[3], "{name}, {path}");
    }
}

/// Goal: rows with and without logits of bins can be in one batch, in any order, and have the same
/// values as alone.
#[test]
fn rows_of_both_kinds_share_a_batch() {
    let (_, tokens) = tokens(NAMES[1]);
    let text = [5, 6, 7, 8];
    let (mut backend, image) = open(NAMES[1], None, 1);
    let vocabulary = backend.spec().vocab_size;
    let with_regions = slice(&backend, &image, 0, tokens.len());
    let blocks = backend.spec().block_count as u32;
    let all = SequenceSlice {
        token_count: text.len(),
        block_table: vec![BlockId(blocks - 1)],
        logit_rows: LogitRows::All,
        ..SequenceSlice::default()
    };
    let alone = row(&mut backend, &tokens, with_regions.clone());
    let text_alone = row(&mut backend, &text, all.clone());
    assert_eq!(text_alone.len(), 4 * vocabulary);
    for text_first in [false, true] {
        let mut parts = [(&tokens[..], &with_regions, &alone), (&text[..], &all, &text_alone)];
        if text_first {
            parts.reverse();
        }
        let batch = StepBatch {
            tokens: parts.iter().flat_map(|(tokens, ..)| *tokens).copied().collect(),
            sequences: parts.iter().map(|(_, slice, _)| (*slice).clone()).collect(),
        };
        let expected: Vec<f32> = parts.iter().flat_map(|(.., row)| *row).copied().collect();
        assert_eq!(backend.step(&batch).expect("a good batch").logits, expected);
    }
}

/// Goal: coordinates and sizes that the model does not have are refused, and all of them by a
/// backend without regions.
#[test]
fn other_tokens_are_refused() {
    let (mut backend, _) = open(NAMES[0], None, 1);
    let bins = backend.spec().regions.expect("bins");
    assert_eq!((bins.coordinates, bins.sizes), (12, 10));
    let step = |backend: &mut dyn Backend, token, logit_rows| {
        let slice = SequenceSlice {
            token_count: 1,
            block_table: vec![BlockId(0)],
            logit_rows,
            ..SequenceSlice::default()
        };
        backend.step(&StepBatch { tokens: vec![token], sequences: vec![slice] })
    };
    for token in [coordinate(11), size(9, 0), size(0, 9)] {
        let output = step(&mut backend, token, LogitRows::Regions).expect("a token of the model");
        assert!(output.logits.iter().all(|logit| logit.is_finite()));
    }
    for token in [coordinate(12), size(10, 0), size(0, 10), 1 << 31, u32::MAX] {
        let error = step(&mut backend, token, LogitRows::Last).expect_err("no token of the model");
        assert!(matches!(error, BackendError::MalformedBatch(_)), "{error}");
    }
    let mut plain = fixture::backend(fixture::model("gemma3"), None, 1);
    assert_eq!(plain.spec(), &BackendSpec { regions: None, ..plain.spec().clone() });
    for (token, rows) in [(coordinate(0), LogitRows::Last), (5, LogitRows::Regions)] {
        let error = step(&mut plain, token, rows).expect_err("no regions");
        assert!(matches!(error, BackendError::MalformedBatch(_)), "{error}");
    }
}
