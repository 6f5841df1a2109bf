//! Decode steps that are captured and replayed: the tokens, and what the steps write, are those of
//! other steps.

use std::borrow::Cow;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use stolon_backend::{Backend, Draw, LogitRows, StepBatch};
use stolon_checkpoint::config::TensorSpec;
use stolon_checkpoint::{KvType, Tensor, Weights};
use stolon_cuda::{CandleBackend, CandleOptions};

use super::fixture;
use crate::suite::run;

/// Number of sequences. Each ends earlier than the one before it.
const SEQUENCES: usize = 11;

/// What sequences have generated, and the logits of their last positions.
#[derive(Debug)]
struct Generated {
    tokens: Vec<Vec<u32>>,
    logits: Vec<Vec<f32>>,
}

fn backend(
    (name, kv_type): (&str, KvType),
    batch_invariant: bool,
    cuda_graphs: bool,
) -> CandleBackend {
    let kv_type = Some(kv_type);
    let options = CandleOptions { batch_invariant, cuda_graphs, kv_type, ..fixture::options(4) };
    fixture::backend(fixture::model(name), options)
}

/// Runs the sequence's last token with `rows`, or all tokens if it has no keys and values.
fn batch(sequences: &[(usize, &Vec<u32>)], from: usize, rows: &[LogitRows]) -> StepBatch {
    let parts = sequences.iter().zip(rows).map(|(&(index, tokens), rows)| {
        let table = run::table(20 * index as u32, tokens.len(), 4);
        let mut part = run::part(tokens, from.min(tokens.len() - 1), tokens.len(), &table);
        part.slice.logit_rows = *rows;
        part
    });
    let parts: Vec<_> = parts.collect();
    StepBatch {
        tokens: parts.iter().flat_map(|part| part.tokens.clone()).collect(),
        sequences: parts.into_iter().map(|part| part.slice).collect(),
    }
}

/// Generates tokens for prompts of 1 to 31 tokens, together.
fn generate(backend: &mut CandleBackend) -> Generated {
    let mut random = SmallRng::seed_from_u64(5);
    let mut tokens: Vec<Vec<u32>> = (0..SEQUENCES)
        .map(|index| (0..=3 * index).map(|_| random.random_range(1..90)).collect())
        .collect();
    for step in 0..2 * SEQUENCES {
        let running: Vec<_> = tokens.iter().enumerate().take(SEQUENCES - step / 2).collect();
        let draws: Vec<_> = running
            .iter()
            .map(|(index, _)| match index % 3 {
                0 => LogitRows::Drawn(Draw::GREEDY),
                _ => {
                    let uniform = random.random();
                    LogitRows::Drawn(Draw { temperature: 1.0, uniform, ..Draw::GREEDY })
                }
            })
            .collect();
        let from = if step == 0 { 0 } else { usize::MAX };
        let drawn = backend.step(&batch(&running, from, &draws)).expect("a good batch").drawn;
        assert_eq!(drawn.len(), draws.len());
        for (tokens, token) in tokens.iter_mut().zip(drawn) {
            tokens.push(token.expect("usable logits"));
        }
    }
    // These read all that the steps have written.
    let all: Vec<_> = tokens.iter().enumerate().collect();
    let output = backend.step(&batch(&all, usize::MAX, &[LogitRows::Last; SEQUENCES]));
    let logits = output.expect("a good batch").logits;
    let logits = logits.chunks_exact(backend.spec().vocab_size).map(<[f32]>::to_vec).collect();
    Generated { tokens, logits }
}

/// Goal: sequences that run together in batches of all sizes get the tokens and the logits that
/// they get without graphs, and there are few graphs.
#[test]
fn replayed_steps_are_steps() {
    let f32 = ["llama", "granite", "phi3", "smollm3"].map(|name| (name, KvType::F32));
    for model in f32.into_iter().chain([("llama", KvType::Int8)]) {
        let (mut replayed, mut plain) = (backend(model, false, true), backend(model, false, false));
        let name = format!("{model:?}");
        let (got, expected) = (generate(&mut replayed), generate(&mut plain));
        assert_eq!(got.tokens, expected.tokens, "{name}");
        assert_eq!(got.logits.len(), SEQUENCES);
        for (got, expected) in got.logits.iter().zip(&expected.logits) {
            let difference = fixture::difference(got, expected);
            assert!(difference < 0.001, "{name}: {difference}");
        }
        assert_eq!(plain.captured_graphs(), 0);
        let count = replayed.captured_graphs();
        assert!((5..=12).contains(&count), "{name}: {count} graphs for {} steps", 2 * SEQUENCES);
    }
}

/// Goal: a step that cannot be captured is computed without a graph: of models with experts, and
/// with attention from gathered keys and values.
#[test]
fn other_steps_are_not_captured() {
    for (name, batch_invariant) in [("qwen3_moe", false), ("llama", true)] {
        let mut backend = backend((name, KvType::F32), batch_invariant, true);
        let tokens = vec![3, 1, 4];
        let mut step = |from, rows| {
            let output = backend.step(&batch(&[(0, &tokens)], from, &[rows]));
            output.expect("a good batch")
        };
        let logits = step(0, LogitRows::Last).logits;
        let drawn = step(usize::MAX, LogitRows::Drawn(Draw::GREEDY)).drawn;
        assert_eq!(drawn, [Draw::GREEDY.of(&logits)], "{name}");
        assert_eq!(backend.captured_graphs(), 0, "{name}");
    }
}

/// Goal: rows of logits that cannot be used are errors of their requests, as without graphs, and a
/// batch of more sequences than expected is computed, too.
#[test]
fn unusable_rows_and_large_batches_are_as_without() {
    let mut model = fixture::model("llama");
    let tensor = |TensorSpec { name, shape, .. }| {
        let tensor = model.weights.tensor(&name, &shape).expect("a tensor of the model");
        let (dtype, mut bytes) = (tensor.dtype, tensor.bytes.to_vec());
        if name == "model.embed_tokens.weight" {
            // The token 7 makes its row of logits NaN.
            let width = bytes.len() / shape[0];
            bytes[7 * width..][..width].fill(0xff);
        }
        Tensor { name, dtype, shape, bytes: Cow::Owned(bytes) }
    };
    let tensors: Vec<_> = model.config.tensors().into_iter().map(tensor).collect();
    model.weights = Weights::from_tensors("memory", tensors).expect("valid tensors");
    let options = CandleOptions {
        batch_invariant: false,
        cuda_graphs: true,
        step_sequences: 3,
        ..fixture::options(4)
    };
    let mut backend = fixture::backend(model, options);
    let sequences = [vec![1, 7], vec![1, 2], vec![1, 3], vec![4, 7], vec![5, 6]];
    for count in [3, 3, 5] {
        let all: Vec<_> = sequences.iter().enumerate().take(count).collect();
        backend.step(&batch(&all, 0, &[LogitRows::None; 5])).expect("a good batch");
        let drawn = backend.step(&batch(&all, 1, &[LogitRows::Drawn(Draw::GREEDY); 5]));
        let drawn = drawn.expect("a good batch").drawn;
        let usable: Vec<_> = drawn.iter().map(Result::is_ok).collect();
        assert_eq!(usable, [false, true, true, false, true][..count]);
        assert_eq!(backend.captured_graphs(), 1);
    }
}
