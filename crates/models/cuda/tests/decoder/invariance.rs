//! Tests batch invariance: a row of logits depends, bit for bit, only on the tokens of its
//! sequence.

use stolon_backend::{Draw, LogitRows};
use stolon_checkpoint::KvType;
use stolon_cuda::{CandleOptions, ComputeType};

use super::fixture;
use crate::suite::invariance::Subject;
use crate::suite::run;

/// The fixture `name` with `options`.
fn subject(name: &str, options: CandleOptions) -> Subject<'static> {
    let CandleOptions { compute_type, kv_type, .. } = options;
    let label = format!("candle, products in {compute_type:?}, KV in {kv_type:?}");
    Subject::fixture(name, &label, fixture::open(options), &[1])
}

/// Goal: logits and hidden states of every architecture are the same, bit for bit, for all chunks,
/// block sizes, batches and cached prefixes.
#[test]
fn every_architecture_is_batch_invariant() {
    for name in fixture::names() {
        subject(&name, CandleOptions::default()).check();
    }
}

/// Goal: the same in half precision.
#[test]
fn half_precision_is_batch_invariant() {
    let options = CandleOptions::default();
    for options in [
        CandleOptions { kv_type: Some(KvType::Bf16), ..options },
        CandleOptions { compute_type: Some(ComputeType::F16), ..options },
    ] {
        for name in ["llama", "gemma3", "qwen2_moe", "gpt_oss"] {
            subject(name, options).check();
        }
    }
}

/// Goal: the same with KV in int8, for full attention, windows, heads of several sizes, keys and
/// values of other layers, sinks, latent attention, convolutions, and checkpoints in its blocks.
#[test]
fn int8_is_batch_invariant() {
    let options = CandleOptions { kv_type: Some(KvType::Int8), ..CandleOptions::default() };
    for name in [
        "llama",
        "gemma3",
        "gemma4_e4b",
        "gpt_oss",
        "glm4_moe_lite",
        "lfm2",
        "qwen3_5",
        "falcon_h1",
    ] {
        subject(name, options).check();
    }
}

/// Goal: without batch invariance, a warm cache gives the same logits within 0.001 standard
/// deviations.
#[test]
fn without_batch_invariance_warm_is_near_cold() {
    let options = CandleOptions { batch_invariant: false, ..CandleOptions::default() };
    for name in fixture::names() {
        let subject = subject(&name, options);
        let expected = subject.reference(&subject.tokens);
        let table = run::table(2, subject.tokens.len(), 4);
        let mut backend = subject.backend(4, 1);
        for chunk in [1, 7, 64] {
            let rows = run::rows(&mut *backend, &subject.tokens, 0, chunk, &table);
            for (row, expected) in rows.iter().zip(&expected) {
                let difference = fixture::difference(row, expected);
                assert!(difference < 1e-3, "{name}, chunks of {chunk}: {difference}");
            }
        }
    }
}

/// Goal: tokens are drawn from the right rows, also in a batch with other kinds of rows.
#[test]
fn tokens_are_drawn_from_their_rows() {
    let subject = subject("llama", CandleOptions::default());
    let with_rows = |rows: LogitRows, tokens: &[u32], first: u32| {
        let mut part = run::part(tokens, 0, tokens.len(), &run::table(first, tokens.len(), 16));
        part.slice.logit_rows = rows;
        part
    };
    let random = Draw { temperature: 3.0, uniform: 0.6, ..Draw::GREEDY };
    let parts = [
        with_rows(LogitRows::Drawn(Draw::GREEDY), &subject.tokens, 0),
        with_rows(LogitRows::Last, &subject.other, 10),
        with_rows(LogitRows::Drawn(random), &subject.other[..7], 20),
    ];
    let mut backend = subject.backend(16, 1);
    let batch = run::batch(&*backend, &parts);
    let output = backend.step(&batch).expect("a good batch");
    let rows = [(&subject.tokens[..], Draw::GREEDY), (&subject.other[..7], random)];
    let expected = rows.map(|(tokens, draw)| draw.of(&subject.reference(tokens)[tokens.len() - 1]));
    assert_eq!(output.drawn, expected);
    let last = &subject.reference(&subject.other)[subject.other.len() - 1];
    assert_eq!(&output.logits, last);
}
