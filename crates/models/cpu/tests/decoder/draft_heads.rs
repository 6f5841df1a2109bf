//! Draft heads, a model's own (MTP), EAGLE-3 and assistants of Gemma 4: their logits equal those of
//! another implementation, have the same bits wherever their keys and values come from, and leave the
//! model's logits as they are.

use std::sync::Arc;

use safetensors::SafeTensors;
use stolon_backend::{Backend, BackendError, DraftTask, LogitRows, SequenceSlice, StepBatch};
use stolon_checkpoint::inspect::{InspectOptions, inspect};
use stolon_checkpoint::{
    KvBudget, KvType, LoadOptions, LoadedModel, ModelError, ModelSource, TensorType, load,
    load_draft_head,
};
use stolon_cpu::{CpuBackend, CpuOptions};
use stolon_kvcache::BlockId;

use super::fixture::{self, difference};
use crate::gguf_model::gguf_with_head;
use crate::gguf_writer::{GgufWriter, Meta};
use crate::suite::run;

/// The fixture with a dense head.
const NAME: &str = "mtp/qwen3_5";

/// The fixtures with a head of their own.
const NAMES: [&str; 7] = [
    NAME,
    "mtp/qwen3_5_moe",
    "mtp/glm4_moe",
    "mtp/glm4_moe_air",
    "mtp/glm4_moe_lite",
    "mtp/deepseek_v3",
    "mtp/mimo",
];

/// Those whose heads llama.cpp's converter writes.
fn in_gguf() -> impl Iterator<Item = &'static str> {
    NAMES.into_iter().filter(|name| !["mtp/deepseek_v3", "mtp/mimo"].contains(name))
}

/// EAGLE-3 heads. Each is for the model whose name its own begins with.
const EAGLE3: [&str; 3] = ["eagle3/llama3", "eagle3/qwen3", "eagle3/qwen3_each"];

/// Assistants of Gemma 4. Each is for the model with its own name.
const ASSISTANTS: [&str; 2] = ["gemma4_assistant/gemma4", "gemma4_assistant/gemma4_dense"];

/// A head of each kind: of EAGLE-3, one that reads the output of the model's last layer, and one that
/// does not.
const KINDS: [&str; 5] = [NAME, "eagle3/llama3", "eagle3/qwen3", ASSISTANTS[0], ASSISTANTS[1]];

/// Number of guesses of the fixture.
const GUESSES: usize = 4;

/// The model of a fixture, with its head if `with_head` is true.
fn model(name: &str, with_head: bool) -> LoadedModel {
    let directory = |name: &str| ModelSource::Directory(fixture::directory(name));
    let eagle3 = name.strip_prefix("eagle3/").and_then(|head| head.split('_').next());
    let Some(model) = eagle3.or(name.strip_prefix("gemma4_assistant/")) else {
        let options = LoadOptions { mtp: with_head, ..LoadOptions::default() };
        return load(&directory(name), &options).expect("a valid model");
    };
    let options = LoadOptions::default();
    let mut model = load(&directory(model), &options).expect("a valid model");
    if with_head {
        let head = load_draft_head(&directory(name), &options, (&model.config, &model.weights));
        model.mtp = head.expect("a valid head");
    }
    model
}

fn backend(
    name: &str,
    with_head: bool,
    block_size: usize,
    (threads, kv_type): (usize, KvType),
) -> CpuBackend {
    backend_of(model(name, with_head), block_size, threads, kv_type)
}

fn backend_of(
    model: LoadedModel,
    block_size: usize,
    threads: usize,
    kv_type: KvType,
) -> CpuBackend {
    let LoadedModel { config, weights, mtp, .. } = model;
    let options = CpuOptions {
        block_size,
        kv_budget: KvBudget::Blocks(256),
        kv_type: Some(kv_type),
        threads: Some(threads),
        kv_copies: true,
        ..CpuOptions::default()
    };
    CpuBackend::with_head(config, None, weights, mtp, options).expect("a valid model")
}

/// The tokens of the fixture, whose last one the model has sampled, and the logits of the guesses
/// that follow.
fn expected(name: &str) -> (Vec<u32>, Vec<Vec<f32>>) {
    let file = match name.split('/').next() {
        Some("eagle3") => "eagle3",
        Some("gemma4_assistant") => "guesses",
        _ => "mtp",
    };
    let bytes = fixture::file(name, &format!("{file}.safetensors"));
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let logits = file.tensor("logits").expect("a tensor of the script");
    let values = logits.data().chunks_exact(4);
    let values: Vec<f32> =
        values.map(|bytes| f32::from_le_bytes(bytes.try_into().expect("4 bytes"))).collect();
    let rows = values.chunks_exact(logits.shape()[1]).map(<[f32]>::to_vec).collect();
    (integers(&file, "prompt"), rows)
}

/// The tensor `name` of a script, which has token ids.
fn integers(file: &SafeTensors<'_>, name: &str) -> Vec<u32> {
    let tensor = file.tensor(name).expect("a tensor of the script");
    let token = |bytes: &[u8]| i64::from_le_bytes(bytes.try_into().expect("8 bytes")) as u32;
    tensor.data().chunks_exact(8).map(token).collect()
}

/// The rows of logits from which up to `count` greedy tokens after `tokens` are guessed.
fn guesses(
    backend: &mut dyn Backend,
    tokens: &[u32],
    table: &[BlockId],
    count: usize,
) -> Vec<Vec<f32>> {
    let block_table = table.to_vec();
    let task = DraftTask { tokens: Arc::new(tokens.to_vec()), block_table, count, missing_max: 0 };
    let mut rows = Vec::new();
    let mut choose = |task: usize, row: &mut [f32]| {
        assert_eq!(task, 0);
        rows.push(row.to_vec());
        Some(run::argmax(row))
    };
    let output = backend.draft(&[task], usize::MAX, &mut choose).expect("a good task");
    let chosen: Vec<u32> = rows.iter().map(|row| run::argmax(row)).collect();
    assert_eq!(output.tokens, [chosen]);
    assert_eq!((output.first_tokens, output.passes + 1), (1, rows.len()));
    rows
}

fn bits(rows: &[Vec<f32>]) -> Vec<u32> {
    rows.iter().flatten().map(|value| value.to_bits()).collect()
}

/// Goal: the guesses have the logits that the published description of the head gives, also those
/// that follow other guesses.
#[test]
fn guesses_equal_those_of_the_published_head() {
    for name in NAMES {
        let (tokens, expected) = expected(name);
        assert_eq!(expected.len(), GUESSES);
        let rows = guesses_after(model(name, true), &tokens);
        assert_eq!(rows.len(), GUESSES);
        for (guess, (row, expected)) in rows.iter().zip(&expected).enumerate() {
            let difference = difference(row, expected);
            assert!(difference < 1e-3, "{name}, guess {guess}: {difference} standard deviations");
        }
    }
}

/// Goal: the guesses of EAGLE-3 heads have the logits of the published implementation, also those that
/// follow other guesses. What a head cannot guess has no probability.
#[test]
fn guesses_equal_those_of_published_eagle3_heads() {
    for name in EAGLE3 {
        let (tokens, expected) = expected(name);
        let bytes = fixture::file(name, "eagle3.safetensors");
        let ids = integers(&SafeTensors::deserialize(&bytes).expect("a safetensors file"), "ids");
        let rows = guesses_after(model(name, true), &tokens);
        assert_eq!((rows.len(), expected.len()), (GUESSES, GUESSES));
        for (guess, (row, expected)) in rows.iter().zip(&expected).enumerate() {
            let known: Vec<f32> = ids.iter().map(|id| row[*id as usize]).collect();
            let difference = difference(&known, expected);
            assert!(difference < 1e-3, "{name}, guess {guess}: {difference} standard deviations");
            let others = row.iter().filter(|logit| **logit == f32::NEG_INFINITY).count();
            assert_eq!(others, row.len() - ids.len(), "{name}");
        }
    }
}

/// Goal: the guesses of assistants have the logits of transformers, also those that follow other
/// guesses. Tokens of clusters that are not chosen have no probability.
#[test]
fn guesses_equal_those_of_published_assistants() {
    for (name, known) in ASSISTANTS.into_iter().zip([96, 3 * 96 / 12]) {
        let (tokens, expected) = expected(name);
        let rows = guesses_after(model(name, true), &tokens);
        assert_eq!((rows.len(), expected.len()), (GUESSES, GUESSES));
        for (guess, (row, expected)) in rows.iter().zip(&expected).enumerate() {
            let chosen: Vec<usize> = (0..row.len()).filter(|at| row[*at].is_finite()).collect();
            assert_eq!(chosen.len(), known, "{name}");
            let [row, expected] =
                [row, expected].map(|row| chosen.iter().map(|at| row[*at]).collect::<Vec<_>>());
            let difference = difference(&row, &expected);
            assert!(difference < 1e-3, "{name}, guess {guess}: {difference} standard deviations");
        }
    }
}

/// The logits of guesses after the model has computed `tokens`.
fn guesses_after(model: LoadedModel, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut backend = backend_of(model, 16, 1, KvType::F32);
    let table = run::table(5, tokens.len() + GUESSES, 16);
    run::rows(&mut backend, &tokens[..tokens.len() - 1], 0, usize::MAX / 2, &table);
    guesses(&mut backend, tokens, &table, GUESSES)
}

/// A file that is removed in the end.
struct Gguf {
    _directory: tempfile::TempDir,
    source: ModelSource,
}

impl Gguf {
    /// The model `name` with its head, after `change`.
    fn write(name: &str, change: impl FnOnce(&mut GgufWriter)) -> Self {
        let LoadedModel { config, weights, mtp, .. } = model(name, true);
        let head = mtp.expect("a head");
        let head = (&head.config, &head.weights);
        let mut file = gguf_with_head((&config, &weights), head, TensorType::F32);
        change(&mut file);
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("model.gguf");
        std::fs::write(&path, file.bytes()).expect("writable");
        Self { _directory: directory, source: ModelSource::Gguf(path) }
    }

    fn load(&self, mtp: bool) -> Result<LoadedModel, ModelError> {
        load(&self.source, &LoadOptions { mtp, ..LoadOptions::default() })
    }
}

/// Goal: the head of a GGUF file has the logits of the published one, and those of the one in
/// safetensors files bit for bit, if both read the same hidden states. Without its head, the file is
/// the same model.
#[test]
fn heads_of_gguf_files_have_the_same_bits() {
    for name in in_gguf() {
        let file = Gguf::write(name, |_| ());
        let (tokens, expected) = expected(name);
        let of = |mtp| file.load(mtp).expect("a valid model");
        assert_eq!(of(true).config, of(false).config);
        assert_eq!(of(true).config.layers.len(), model(name, false).config.layers.len());
        assert!(of(false).mtp.is_none() && of(false).has_mtp);
        let rows = guesses_after(of(true), &tokens);
        for (row, expected) in rows.iter().zip(&expected) {
            let difference = difference(row, expected);
            assert!(difference < 1e-3, "{name}: {difference} standard deviations");
        }
        let own = guesses_after(model(name, true), &tokens);
        let mixed = LoadedModel { mtp: of(true).mtp, ..model(name, true) };
        assert!(bits(&guesses_after(mixed, &tokens)) == bits(&own), "{name}");
    }
}

/// Goal: without a norm of its own, the head of a GGUF file has the model's.
#[test]
fn heads_of_gguf_files_may_have_the_norm_of_the_model() {
    let (tokens, _) = expected(NAME);
    let norm = "blk.5.nextn.shared_head_norm.weight";
    let without = Gguf::write(NAME, |file| file.tensors.retain(|tensor| tensor.0 != norm));
    let with_same = Gguf::write(NAME, |file| {
        let mut tensors = file.tensors.iter();
        let own = tensors.find(|tensor| tensor.0 == "output_norm.weight").map(|own| own.3.clone());
        let mut tensors = file.tensors.iter_mut();
        tensors.find(|tensor| tensor.0 == norm).expect("a norm").3 = own.expect("a norm");
    });
    let [without, with_same, other] = [without, with_same, Gguf::write(NAME, |_| ())]
        .map(|file| bits(&guesses_after(file.load(true).expect("a valid model"), &tokens)));
    assert!(without == with_same && without != other);
}

/// Goal: inspection knows the heads of GGUF files. A malformed head, or one with several layers, is
/// refused by its name if it is to be used, and the file is the same model without it.
#[test]
fn heads_of_gguf_files_are_inspected_and_checked() {
    let inspected = |file: &Gguf, mtp| {
        let mut options = InspectOptions::default();
        options.load.mtp = mtp;
        inspect(&file.source, &options).expect("a description")
    };
    for name in [NAME, "mtp/glm4_moe_air"] {
        let own = inspected(&Gguf::write(name, |_| ()), true);
        let mut options = InspectOptions::default();
        options.load.mtp = true;
        let directory = ModelSource::Directory(fixture::directory(name));
        let expected = inspect(&directory, &options).expect("a description");
        assert!(own.refusals.is_empty() && own.mtp.is_some(), "{:?}", own.refusals);
        assert_eq!(own.mtp, expected.mtp);
        assert_eq!(own.outline.layers, expected.outline.layers);
    }
    for (change, part) in [
        (
            (|file| file.tensors.retain(|t| t.0 != "blk.5.attn_k.weight")) as fn(&mut GgufWriter),
            "k_proj",
        ),
        (|file| file.tensors.retain(|t| t.0 != "blk.5.nextn.hnorm.weight"), "norm_hidden"),
        (
            |file| {
                file.set("qwen35.block_count", Meta::U32(7));
                file.set("qwen35.nextn_predict_layers", Meta::U32(2));
            },
            "nextn_predict_layers",
        ),
        (|file| file.tensors.retain(|t| !t.0.contains("nextn")), "which has none"),
    ] {
        let file = Gguf::write(NAME, change);
        let error = file.load(true).expect_err(part).to_string();
        let refused = inspected(&file, true).refusals;
        assert!(error.contains(part) && refused == [error.clone()], "{error}: {refused:?}");
        let without = file.load(false).expect("a model");
        assert!(!without.has_mtp, "{error}");
        assert_eq!(without.config.layers.len(), model(NAME, false).config.layers.len());
        assert!(inspected(&file, false).refusals.is_empty());
    }
}

/// Goal: heads in files that llama.cpp's converter has written have the logits of the published ones.
#[test]
#[ignore = "needs the folder STOLON_CONVERTED, which convert_fixtures.py fills"]
fn converted_heads_match_the_published_ones() {
    for name in in_gguf() {
        let source = ModelSource::Gguf(super::converted::folder().join(format!("{name}.gguf")));
        let options = LoadOptions { mtp: true, ..LoadOptions::default() };
        let (tokens, expected) = expected(name);
        let rows = guesses_after(load(&source, &options).expect("a valid model"), &tokens);
        for (row, expected) in rows.iter().zip(&expected) {
            let difference = difference(row, expected);
            assert!(difference < 1e-3, "{name}: {difference} standard deviations");
        }
    }
}

/// Goal: guesses have the same bits however the prompt was cut, at every block size and number of
/// threads, after rejected proposals, and in blocks that were copied to another backend. The head
/// changes no bit of the model's logits.
#[test]
fn guesses_have_the_same_bits_wherever_their_context_comes_from() {
    let types = [KvType::F32, KvType::Bf16, KvType::Int8];
    for (name, kv_type) in KINDS.into_iter().flat_map(|name| types.map(|kind| (name, kind))) {
        let (tokens, _) = expected(name);
        let len = tokens.len() - 1;
        let mut plain = backend(name, false, 16, (1, kv_type));
        let whole = run::table(3, tokens.len() + GUESSES, 16);
        let logits = run::rows(&mut plain, &tokens[..len], 0, usize::MAX / 2, &whole);
        let mut first = None;
        for (block_size, chunk, threads) in [(16, usize::MAX / 2, 1), (16, 3, 2), (4, 5, 1)] {
            let mut own = backend(name, true, block_size, (threads, kv_type));
            let table = run::table(3, tokens.len() + GUESSES, block_size);
            let rows = run::rows(&mut own, &tokens[..len], 0, chunk, &table);
            assert_eq!(bits(&rows), bits(&logits), "{kv_type:?}, chunks of {chunk}");
            let guessed = bits(&guesses(&mut own, &tokens, &table, GUESSES));
            let expected = first.get_or_insert_with(|| guessed.clone());
            assert_eq!(*expected, guessed, "{kv_type:?}, {block_size}, chunks of {chunk}");
            // What guesses have written is written again.
            let again = bits(&guesses(&mut own, &tokens, &table, GUESSES));
            assert_eq!(*expected, again);

            // The blocks of the prompt in another backend, in another order.
            let mut other = backend(name, true, block_size, (1, kv_type));
            let block_bytes = own.spec().block_bytes;
            let mut bytes = vec![0; table.len() * block_bytes];
            own.read_blocks(&table, &mut bytes).expect("blocks");
            let moved: Vec<BlockId> = (0..table.len() as u32).rev().map(BlockId).collect();
            let parts: Vec<&[u8]> = bytes.chunks(block_bytes).collect();
            other.write_blocks(&moved, &parts).expect("blocks");
            let guessed = bits(&guesses(&mut other, &tokens, &moved, GUESSES));
            assert_eq!(*expected, guessed, "{kv_type:?}: copied blocks");
            let fingerprint =
                |of: &CpuBackend| of.kv_format().expect("a format").fingerprint().expect("a hash");
            assert_eq!(fingerprint(&own), fingerprint(&other));
            assert_ne!(fingerprint(&own), fingerprint(&plain));
        }
    }
}

/// Goal: after proposals of which some were rejected, guesses have the bits that they have after the
/// same tokens without proposals.
#[test]
fn rejected_proposals_leave_nothing_behind() {
    for name in KINDS {
        let (tokens, _) = expected(name);
        let len = tokens.len() - 1;
        let table = run::table(3, tokens.len() + 2 * GUESSES, 16);
        let run_to = |proposed: &[u32]| {
            let mut own = backend(name, true, 16, (1, KvType::F32));
            run::rows(&mut own, &tokens[..len - 4], 0, 7, &table);
            // The first four tokens are right, and the others are not.
            let all = [&tokens[..len], proposed].concat();
            let part = run::part(&all, len - 4, all.len(), &table);
            let part = run::proposing(&own, table[0].0, part, all.len() - (len - 3));
            run::step(&mut own, &[part]);
            guesses(&mut own, &tokens, &table, GUESSES)
        };
        let plain = run_to(&[]);
        assert_eq!(bits(&run_to(&[7, 8, 9])), bits(&plain), "{name}");
        assert_eq!(bits(&run_to(&[1])), bits(&plain), "{name}");
    }
}

/// Goal: several sequences are guessed for together, each with the bits that it has alone. Those
/// without a pair, without a count or beyond the budget get nothing, and the context ends guesses.
#[test]
fn tasks_are_independent() {
    KINDS.into_iter().for_each(check_tasks);
}

fn check_tasks(name: &str) {
    let (tokens, _) = expected(name);
    let mut own = backend(name, true, 16, (1, KvType::F32));
    let tables = [1, 20, 40].map(|first| run::table(first, tokens.len() + GUESSES, 16));
    let lens = [tokens.len() - 1, 9, 14];
    let parts: Vec<_> =
        (0..3).map(|index| run::part(&tokens, 0, lens[index], &tables[index])).collect();
    run::step(&mut own, &parts);
    let alone: Vec<_> = (0..3)
        .map(|index| guesses(&mut own, &tokens[..=lens[index]], &tables[index], GUESSES))
        .collect();
    let task = |index: usize, len: usize, count: usize, blocks: usize| DraftTask {
        tokens: Arc::new(tokens[..len].to_vec()),
        block_table: tables[index][..blocks].to_vec(),
        count,
        missing_max: usize::MAX,
    };
    let all = |index: usize| task(index, lens[index] + 1, GUESSES, tables[index].len());
    let draft = |own: &mut CpuBackend, tasks: &[DraftTask], budget: usize| {
        let mut rows = vec![Vec::new(); tasks.len()];
        let mut choose = |task: usize, row: &mut [f32]| {
            rows[task].push(row.to_vec());
            Some(run::argmax(row))
        };
        Backend::draft(own, tasks, budget, &mut choose).expect("good tasks");
        rows
    };
    let tasks = [all(0), task(1, 1, 3, 1), all(1), task(2, 15, 0, 2), all(2)];
    let rows = draft(&mut own, &tasks, usize::MAX);
    for (rows, alone) in [&rows[0], &rows[2], &rows[4]].into_iter().zip(&alone) {
        assert_eq!(bits(rows), bits(alone));
    }
    assert!(rows[1].is_empty() && rows[3].is_empty());
    let rows = draft(&mut own, &tasks, 2);
    assert_eq!(rows.iter().map(Vec::len).collect::<Vec<_>>(), [GUESSES, 0, GUESSES, 0, 0]);
    // The blocks have room for 16 positions, of which 15 are known.
    let rows = draft(&mut own, &[task(2, 15, GUESSES, 1)], 1);
    assert_eq!(bits(&rows[0]), bits(&alone[2][..2]));
    let nothing = Backend::draft(&mut own, &[task(2, 17, 1, 1)], 1, &mut |_, _| None);
    assert!(matches!(nothing, Err(BackendError::MalformedBatch(_))), "{nothing:?}");
}

/// Goal: a step without logits, whose rows would be dropped before the last layer, leaves the same
/// behind. An assistant needs the hidden states of rows with logits only.
#[test]
fn prompts_without_logits_leave_the_same_behind() {
    for name in KINDS {
        let (tokens, _) = expected(name);
        let table = run::table(3, tokens.len() + GUESSES, 16);
        let fewest = if ASSISTANTS.contains(&name) { LogitRows::Last } else { LogitRows::None };
        let guessed = [fewest, LogitRows::All].map(|logit_rows| {
            let mut own = backend(name, true, 16, (1, KvType::F32));
            let slice = SequenceSlice {
                token_count: tokens.len() - 1,
                block_table: table.clone(),
                logit_rows,
                state: own.spec().state.map(|_| stolon_backend::SliceState::in_slot(0)),
                ..SequenceSlice::default()
            };
            let batch =
                StepBatch { tokens: tokens[..tokens.len() - 1].to_vec(), sequences: vec![slice] };
            own.step(&batch).expect("a good batch");
            bits(&guesses(&mut own, &tokens, &table, GUESSES))
        });
        assert_eq!(guessed[0], guessed[1], "{name}");
    }
}
