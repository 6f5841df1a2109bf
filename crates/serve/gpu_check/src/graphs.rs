//! Decode steps as CUDA graphs, compared with the same steps without graphs.

use anyhow::ensure;
use stolon::Backend;
use stolon::backend::{Draw, LogitRows};
use stolon_cuda::ComputeType;

use super::parity::{POSITIONS, Rounding, compare};
use super::report::Outcome;
use super::step::{Part, batch, rows_that_differ, step, table};
use super::subject::{BLOCK_SIZE, Setup, Subject, Target};
use stolon_loadgen::rng::SeededRng;

/// Number of sequences at first. One ends with each other step.
const SEQUENCES: usize = 10;
/// Number of decode steps.
const STEPS: usize = 2 * SEQUENCES;

/// The results of the steps of a backend.
struct Generated {
    /// The tokens that were drawn.
    tokens: Vec<u32>,
    /// A row of logits of each sequence, after all steps.
    logits: Vec<Vec<f32>>,
    /// Number of graphs.
    graphs: usize,
}

/// Runs decode steps of sequences with contexts of different lengths.
fn generate<T: Target>(target: &T, subject: &Subject, setup: &Setup) -> anyhow::Result<Generated> {
    let (config, weights) = subject.load()?;
    ensure!(config.max_positions >= POSITIONS, "the context is shorter than {POSITIONS} tokens");
    let mut random = SeededRng::new(6);
    let per_sequence = POSITIONS.div_ceil(BLOCK_SIZE);
    let sequences: Vec<_> = (0..SEQUENCES)
        .map(|index| {
            let tokens = random.tokens(POSITIONS, config.vocab_size);
            (tokens, table(index * per_sequence, POSITIONS, BLOCK_SIZE))
        })
        .collect();
    let context = |index: usize| (index + 1) * (POSITIONS - STEPS - 1) / SEQUENCES;
    let part = |index: usize, from: usize, to: usize| {
        let (tokens, table): &(Vec<u32>, _) = &sequences[index];
        Part::new(tokens, from, to, table)
    };
    let mut backend = target.open(config, weights, setup.options(SEQUENCES * per_sequence))?;
    for index in 0..SEQUENCES {
        step(&mut backend, &[part(index, 0, context(index))])?;
    }
    let mut tokens = Vec::new();
    for done in 0..STEPS {
        let running = 0..SEQUENCES - done / 2;
        let parts = running.map(|i| part(i, context(i) + done, context(i) + done + 1));
        let mut batch = batch(backend.spec(), &parts.collect::<Vec<_>>());
        for slice in &mut batch.sequences {
            slice.logit_rows = LogitRows::Drawn(Draw::GREEDY);
        }
        for token in backend.step(&batch)?.drawn {
            tokens.push(token?);
        }
    }
    // These steps read all keys and values that the earlier ones have written.
    let last = (0..SEQUENCES).map(|index| {
        let end = context(index) + STEPS - 2 * index;
        part(index, end, end + 1)
    });
    let rows = step(&mut backend, &last.collect::<Vec<_>>())?;
    let logits = rows.into_iter().flatten().collect();
    Ok(Generated { tokens, logits, graphs: T::captured_graphs(&backend) })
}

/// Compares logits after decode steps as graphs with logits after the same steps without graphs:
/// bit for bit with batch invariance, and then the drawn tokens, too.
pub(super) fn with_steps<T: Target>(
    target: &T,
    subject: &Subject,
    setup: &Setup,
    compute_type: ComputeType,
) -> anyhow::Result<Outcome> {
    let got = generate(target, subject, setup)?;
    if got.graphs == 0 {
        let detail = "left out: no step can be captured".to_owned();
        return Ok(Outcome { is_good: true, value: None, limit: None, detail });
    }
    let expected = generate(target, subject, &Setup { cuda_graphs: false, ..*setup })?;
    let mut outcome = compare(&got.logits, &expected.logits, Rounding::To(compute_type));
    if setup.batch_invariant {
        let rows = rows_that_differ(&got.logits, &expected.logits);
        let pairs = got.tokens.iter().zip(&expected.tokens);
        let tokens = pairs.filter(|(got, expected)| got != expected).count();
        let is_good = outcome.is_good && rows + tokens == 0;
        let detail = format!("{tokens} tokens and {rows} rows differ of {}", outcome.detail);
        outcome = Outcome { is_good, value: Some(rows as f64), limit: Some(0.0), detail };
    }
    ensure!(got.tokens.len() == expected.tokens.len(), "a token is missing");
    outcome.detail += &format!(", {} graphs for {STEPS} steps", got.graphs);
    Ok(outcome)
}
