//! Qwen3-VL and Qwen3.5: prompts with images of different sizes, however they are divided into
//! steps.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use stolon_backend::{
    Backend, ImageInput, LogitRows, SequenceSlice, SliceImage, SliceState, StateCheckpoint,
    StepBatch, rotary_len,
};
use stolon_checkpoint::{
    ImageModel, KvBudget, KvType, LoadOptions, LoadedModel, ModelSource, load,
};
use stolon_cpu::{CpuBackend, CpuOptions};
use stolon_kernels::Path;
use stolon_kvcache::BlockId;

use super::fixture;

const NAME: &str = "qwen3_vl";
/// The models without and with experts. Those of Qwen3.5 have recurrent layers.
const NAMES: [&str; 4] = [NAME, "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"];
const RECURRENT: [&str; 2] = ["qwen3_5", "qwen3_5_moe"];

/// Maximum difference from transformers, in standard deviations of the logits.
const DIFFERENCE_MAX: f32 = 1e-3;

/// A prompt of the fixtures: the prefix of its keys, and those of the pictures in it.
type Known = (&'static str, &'static [&'static str]);

/// Two images, with text before, between and after them.
pub(super) const TWO: Known = ("two.", &["", "wide."]);
/// One image, with which the prompt begins.
const START: Known = ("start.", &["wide."]);

/// The picture with this prefix, as input of the encoder.
fn input(images: &ImageModel, prefix: &str) -> Arc<ImageInput> {
    // Those of the other models are the same.
    let (shape, pixels) = fixture::tensor(NAME, &format!("{prefix}tiles"));
    let size = [shape[2], shape[1]];
    let encoder = &images.encoder;
    Arc::new(ImageInput {
        content_hash: pixels.iter().map(|pixel| u128::from(*pixel)).sum(),
        kv_len: encoder.rows_of(size).expect("a size for the encoder"),
        full_attention: false,
        columns: encoder.columns_of(size[0]),
        size,
        tiles: [0, 0],
        pixels,
    })
}

fn integers(name: &str, key: &str) -> Vec<u32> {
    let (_, bytes) = fixture::tensor(name, key);
    bytes.chunks_exact(8).map(|b| u32::from_le_bytes(b[..4].try_into().expect("4"))).collect()
}

/// A backend, and a prompt with its images.
pub(super) struct Prompt {
    backend: CpuBackend,
    pub(super) tokens: Vec<u32>,
    pub(super) images: Vec<SliceImage>,
}

impl Prompt {
    fn open(name: &str, path: Option<Path>, known: Known) -> Self {
        let model = fixture::model(name);
        let images = fixture::images(&model).clone();
        Self::of(fixture::backend(model, path, 1), &images, known)
    }

    /// The prompt `known` for a model that reads images as `images` says.
    pub(super) fn of(mut backend: CpuBackend, images: &ImageModel, known: Known) -> Self {
        let (prefix, pictures) = known;
        let inputs = pictures.iter().map(|picture| input(images, picture));
        let tokens = integers(RECURRENT[0], &format!("{prefix}prompt"));
        let (mut images, mut next) = (Vec::new(), 0);
        for input in inputs {
            let is_image = |token: &u32| *token == fixture::IMAGE_TOKEN;
            let start = next + tokens[next..].iter().position(is_image).expect("an image");
            let embeddings = backend.encode(&input, Duration::MAX).expect("a good image");
            let embeddings = embeddings.expect("there was time");
            let (len, columns) = (input.kv_len, input.columns);
            images.push(SliceImage { start, len, full_attention: false, columns, embeddings });
            next = start + len;
        }
        Self { backend, tokens, images }
    }

    /// The logits at positions of the sequence, computed in one step after those before.
    pub(super) fn step(&mut self, positions: Range<usize>) -> Vec<f32> {
        let state = self.backend.spec().state.map(|_| SliceState::in_slot(0));
        self.step_with(positions, state)
    }

    /// The same with this state. The sequence has the first blocks of the store.
    fn step_with(&mut self, positions: Range<usize>, state: Option<SliceState>) -> Vec<f32> {
        let (done, rest): (Vec<_>, Vec<_>) = self
            .images
            .iter()
            .filter(|image| image.start < positions.end)
            .partition(|image| image.positions().end <= positions.start);
        let skipped = |image: &&SliceImage| image.len - rotary_len(image.len, image.columns);
        let blocks = positions.end.div_ceil(self.backend.spec().block_size) as u32;
        let slice = SequenceSlice {
            token_count: positions.len(),
            start: positions.start,
            write_from: positions.start,
            block_table: (0..blocks).map(BlockId).collect(),
            logit_rows: LogitRows::All,
            images: rest.into_iter().cloned().collect(),
            rotary_lag: done.iter().map(skipped).sum(),
            state,
            ..SequenceSlice::default()
        };
        let batch = StepBatch { tokens: self.tokens[positions].to_vec(), sequences: vec![slice] };
        self.backend.step(&batch).expect("a good batch").logits
    }
}

/// Goal: the logits of a prompt with two images of different sizes and text between them, and of
/// one that begins with an image, are those of transformers on every instruction set, and have the
/// same bits however the prompt is divided into steps.
#[test]
fn logits_match_transformers() {
    for (name, path) in NAMES
        .into_iter()
        .flat_map(|name| Path::supported().into_iter().map(move |path| (name, path)))
    {
        let starts = RECURRENT.contains(&name).then_some(START);
        for known in [TWO].into_iter().chain(starts) {
            compare(name, path, known);
        }
    }
}

fn compare(name: &str, path: Path, known: Known) {
    let (shape, expected) = fixture::tensor(name, &format!("{}logits", known.0));
    let expected = fixture::floats(&expected);
    let mut prompt = Prompt::open(name, Some(path), known);
    let count = prompt.tokens.len();
    let whole = prompt.step(0..count);
    assert_eq!(whole.len(), expected.len());
    for (row, (got, expected)) in whole.chunks(shape[1]).zip(expected.chunks(shape[1])).enumerate()
    {
        let difference = fixture::difference(got, expected);
        assert!(difference < DIFFERENCE_MAX, "{name}, {path}, row {row}: {difference}");
    }
    for chunk in 1..count {
        let starts = (0..count).step_by(chunk);
        let parts: Vec<f32> =
            starts.flat_map(|start| prompt.step(start..count.min(start + chunk))).collect();
        assert_eq!(parts, whole, "{name}, {path}, steps of {chunk}");
    }
}

/// Goal: a sequence that resumes from a checkpoint before, inside and after an image has the bits
/// of one that computes everything, on every instruction set and for every type of keys and values.
#[test]
fn checkpoints_around_images_keep_the_bits() {
    for name in RECURRENT {
        for (path, kv_type) in Path::supported().into_iter().flat_map(|path| {
            [KvType::F32, KvType::Bf16, KvType::Int8, KvType::Int4].map(|kv| (path, kv))
        }) {
            for known in [TWO, START] {
                resume_everywhere(name, (path, kv_type), known);
            }
        }
    }
}

/// Resumes after each position of a prompt, and computes the rest at once and in steps of 3.
fn resume_everywhere(name: &str, (path, kv_type): (Path, KvType), known: Known) {
    const BLOCKS: usize = 1024;
    let options = CpuOptions {
        block_size: 1,
        kv_budget: KvBudget::Blocks(BLOCKS),
        path: Some(path),
        kv_type: Some(kv_type),
        ..fixture::options()
    };
    let model = fixture::model(name);
    let images = fixture::images(&model).clone();
    let mut prompt = Prompt::of(fixture::backend_with(model, options), &images, known);
    let (count, width) = (prompt.tokens.len(), prompt.backend.spec().vocab_size);
    let needed = prompt.backend.spec().checkpoint_blocks();
    assert!(count + needed <= BLOCKS, "{needed}");
    let blocks: Vec<BlockId> = (BLOCKS - needed..BLOCKS).map(|id| BlockId(id as u32)).collect();
    let whole = prompt.step(0..count);
    for len in 1..count {
        let checkpoints = vec![StateCheckpoint { len, blocks: blocks.clone() }];
        let state = SliceState { checkpoints, ..SliceState::in_slot(0) };
        assert_eq!(prompt.step_with(0..count, Some(state)), whole, "with a checkpoint");
        let case = format!("{name}, {path}, {kv_type:?}, from {len} of {}", known.0);
        for chunk in [count, 3] {
            let mut parts = Vec::new();
            for start in (len..count).step_by(chunk) {
                let resume = (start == len).then(|| blocks.clone());
                let state = SliceState { resume, ..SliceState::in_slot(1) };
                parts.extend(prompt.step_with(start..count.min(start + chunk), Some(state)));
            }
            assert!(parts == whole[len * width..], "{case}, steps of {chunk}");
        }
    }
}

/// Goal: greedy decoding after two images generates the tokens that transformers does.
#[test]
fn greedy_decoding_matches_transformers() {
    for name in NAMES {
        let mut two = Prompt::open(name, None, TWO);
        let expected = integers(name, "two.generated");
        let (mut start, mut generated) = (0, Vec::new());
        while generated.len() < expected.len() {
            let end = two.tokens.len();
            let logits = two.step(start..end);
            let last = &logits[logits.len() - two.backend.spec().vocab_size..];
            let token = (0..last.len()).max_by(|a, b| last[*a].total_cmp(&last[*b]));
            let token = token.expect("a token") as u32;
            generated.push(token);
            two.tokens.push(token);
            start = end;
        }
        assert_eq!(generated, expected, "{name}");
    }
}

/// Goal: a second image has the embeddings of transformers, also those of the layers for DeepStack,
/// and the number of its rows is that of its squares.
#[test]
fn embeddings_of_a_wide_image_match_transformers() {
    let model = fixture::model(NAME);
    let image = input(fixture::images(&model), "wide.");
    assert_eq!((image.kv_len, image.columns), (6, 6));
    let mut backend = fixture::backend(model, None, 2);
    assert_eq!(backend.spec().image_width, Some((1 + 3) * 32));
    let (_, expected) = fixture::tensor(NAME, "wide.embeddings");
    let (got, expected) = (fixture::encode(&mut backend, &image), fixture::floats(&expected));
    for (plane, expected) in expected.chunks(6 * 32).enumerate() {
        let difference = fixture::difference(&got[plane * 6 * 32..][..6 * 32], expected);
        assert!(difference < 1e-4, "{plane}: {difference} standard deviations");
    }
}

/// Goal: the logits of a prompt without images are those of transformers, and those of Qwen3-VL
/// have the bits of a Qwen3 with the same weights.
#[test]
fn text_has_the_logits_of_qwen3() {
    let source = fixture::directory(NAME);
    let dir = tempfile::tempdir().expect("a directory");
    let file = |name: &str| std::fs::read(source.join(name)).expect("a file of the fixture");
    std::fs::write(dir.path().join("model.safetensors"), file("model.safetensors")).expect("room");
    let config: Value = serde_json::from_slice(&file("config.json")).expect("JSON");
    let mut text = config["text_config"].clone();
    text["model_type"] = "qwen3".into();
    text["tie_word_embeddings"] = false.into();
    std::fs::write(dir.path().join("config.json"), text.to_string()).expect("room");
    let source = ModelSource::Directory(dir.path().to_owned());
    let qwen3 = load(&source, &LoadOptions::default()).expect("a text model");
    assert_eq!(qwen3.config.ropes[0].sections, None);
    let rows = |model: LoadedModel| {
        let backend = fixture::backend(model, None, 1);
        let tokens = integers(NAME, "text.prompt");
        let mut text = Prompt { backend, tokens, images: vec![] };
        text.step(0..text.tokens.len())
    };
    let got = rows(fixture::model(NAME));
    assert_eq!(got, rows(qwen3));
    let (_, expected) = fixture::tensor(NAME, "text.logits");
    let difference = fixture::difference(&got, &fixture::floats(&expected));
    assert!(difference < DIFFERENCE_MAX, "{difference} standard deviations");
    for name in RECURRENT {
        let (_, expected) = fixture::tensor(name, "text.logits");
        let difference =
            fixture::difference(&rows(fixture::model(name)), &fixture::floats(&expected));
        assert!(difference < DIFFERENCE_MAX, "{name}: {difference} standard deviations");
    }
}

/// Goal: images whose size, rows or columns do not fit each other are refused before anything is
/// computed.
#[test]
fn wrong_grids_are_refused() {
    let model = fixture::model(NAME);
    let image = ImageInput::clone(&input(fixture::images(&model), ""));
    let mut backend = fixture::backend(model, None, 1);
    assert_eq!((image.size, image.kv_len, image.columns), ([48, 32], 6, 3));
    for (image, expected) in [
        (
            ImageInput { size: [40, 32], ..image.clone() },
            "multiples of 16 pixels with at most 8192",
        ),
        (ImageInput { size: [0, 32], ..image.clone() }, "got 0 x 32 pixels"),
        (ImageInput { size: [16, 1 << 20], ..image.clone() }, "at most 8192 squares"),
        (ImageInput { size: [1 << 40, 1 << 40], ..image.clone() }, "at most 8192 squares"),
        (ImageInput { size: [32, 48], ..image.clone() }, "expected 2 columns, got 3"),
        (ImageInput { columns: 0, ..image.clone() }, "expected 3 columns, got 0"),
        (ImageInput { kv_len: 4, ..image.clone() }, "expected 6 rows, got 4"),
        (ImageInput { tiles: [1, 1], ..image.clone() }, "expected 0 tiles, got 1 x 1"),
        (ImageInput { pixels: vec![0; 5], ..image }, "expected 4608 bytes of pixels, got 5"),
    ] {
        let error = backend.encode(&Arc::new(image), Duration::MAX).expect_err("a bad image");
        assert!(error.to_string().contains(expected), "{error}");
    }
}
