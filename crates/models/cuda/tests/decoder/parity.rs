//! Compares logits with Hugging Face transformers and with the CPU backend.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::{Map, Value};
use stolon_backend::Backend;
use stolon_checkpoint::kv::{KvLayout, KvShape};
use stolon_checkpoint::{DecoderConfig, KvType};
use stolon_cuda::{CandleOptions, ComputeType};

use super::fixture;
use crate::suite::parity::Coverage;
use crate::suite::{parity, run};

/// The architectures of the models that `stolon gpu-check` compares on a device. The book's table of
/// models says of these that they run on GPUs.
fn checked_on_gpus() -> BTreeSet<String> {
    let list = "../../serve/gpu_check/src/architectures.json";
    let list = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(list));
    let list: Map<String, Value> =
        serde_json::from_str(&list.expect("the list of models")).expect("an object");
    list.into_iter().map(|(name, _)| name).collect()
}

/// Goal: logits and greedy tokens of every architecture match those of transformers. The test
/// prints which fixtures are refused, and why; the list has no others, and `gpu-check` and the book
/// have exactly the architectures that are computed.
#[test]
fn every_architecture_matches_transformers() {
    let Coverage { computed, refused } =
        parity::check("candle", &fixture::open(fixture::options(16)));
    println!("the GPU backend refuses {} fixtures", refused.len());
    for (name, reason) in &refused {
        println!("{name}: {reason}");
    }
    let listed: BTreeMap<_, _> = fixture::REFUSED.into_iter().collect();
    assert!(refused.keys().eq(listed.keys()), "refused: {refused:?}");
    for (name, reason) in &refused {
        assert!(reason.contains(listed[name.as_str()]), "{name}: {reason}");
    }
    let computed: BTreeSet<String> = computed.into_iter().map(str::to_owned).collect();
    assert_eq!(computed, checked_on_gpus(), "architectures that run on GPUs");
}

/// Goal: logits and hidden states of every architecture match those of the CPU backend, at all
/// positions, beyond the length of the sliding windows.
#[test]
fn every_architecture_matches_the_cpu_backend() {
    for name in fixture::names() {
        let name = name.as_str();
        let expected = fixture::expected(name);
        let tokens = [expected.prompt, expected.greedy].concat();
        let mut cpu = fixture::cpu_backend(fixture::model(name), 16, KvType::F32);
        let mut candle = fixture::backend(fixture::model(name), fixture::options(16));
        let table = run::table(3, tokens.len(), 16);
        let rows = |backend: &mut dyn Backend| run::rows(backend, &tokens, 0, 1000, &table);
        for (row, (got, expected)) in rows(&mut candle).iter().zip(&rows(&mut cpu)).enumerate() {
            let difference = fixture::difference(got, expected);
            assert!(difference < 1e-3, "{name}, row {row}: {difference} standard deviations");
        }
        let hidden = |backend: &mut dyn Backend| {
            let mut part = run::part(&tokens, 0, tokens.len(), &table);
            part.slice.logit_rows = stolon_backend::LogitRows::AllHidden;
            run::hidden(backend, &[part]).remove(0)
        };
        let (got, expected) = (hidden(&mut candle), hidden(&mut cpu));
        assert_eq!(got.len(), tokens.len());
        for (got, expected) in got.iter().zip(&expected) {
            assert!(fixture::difference(got, expected) < 1e-3, "{name}: hidden states");
        }
    }
}

/// Goal: with keys, values and products in half precision, the logits of most rows are near those
/// in f32, and not equal to them. The models have only 64 features, so that rounding weighs more
/// than in real ones; rows in which it changes the choice of an expert differ more.
#[test]
fn half_precision_is_near() {
    let f32 = CandleOptions { block_size: 16, ..fixture::options(16) };
    for name in ["llama", "gemma2", "qwen3_moe", "gpt_oss"] {
        let expected = fixture::expected(name);
        let rows = |options| {
            let mut backend = fixture::backend(fixture::model(name), options);
            let table = run::table(0, expected.prompt.len(), 16);
            run::rows(&mut backend, &expected.prompt, 0, 1000, &table)
        };
        let exact = rows(f32);
        for (options, most) in [
            (CandleOptions { kv_type: Some(KvType::F16), ..f32 }, 0.02),
            (CandleOptions { kv_type: Some(KvType::Bf16), ..f32 }, 0.1),
            (CandleOptions { compute_type: Some(ComputeType::F16), ..f32 }, 0.02),
        ] {
            let got = rows(options);
            let pairs = got.iter().zip(&exact);
            let mut differences: Vec<_> = pairs.map(|(a, b)| fixture::difference(a, b)).collect();
            differences.sort_by(f32::total_cmp);
            let median = differences[differences.len() / 2];
            assert!(median > 0.0 && median < most, "{name}, {options:?}: {median}");
        }
    }
}

/// Goal: with KV in int8, logits of every architecture are nearer to those of the CPU backend with
/// the same type than to those without rounding. They are not equal, because the order of a sum may
/// change a code, and that the choice of an expert.
#[test]
fn int8_matches_the_cpu_backend() {
    for name in fixture::names() {
        let name = name.as_str();
        let expected = fixture::expected(name);
        let tokens = [expected.prompt, expected.greedy].concat();
        let rows = |backend: &mut dyn Backend| {
            run::rows(backend, &tokens, 0, 1000, &run::table(3, tokens.len(), 16))
        };
        let median = |got: &[Vec<f32>], expected: &[Vec<f32>]| {
            let pairs = got.iter().zip(expected);
            let mut differences: Vec<_> = pairs.map(|(a, b)| fixture::difference(a, b)).collect();
            differences.sort_by(f32::total_cmp);
            differences[differences.len() / 2]
        };
        let candle = |kv_type| {
            let options = CandleOptions { kv_type: Some(kv_type), ..fixture::options(16) };
            rows(&mut fixture::backend(fixture::model(name), options))
        };
        let (got, exact) = (candle(KvType::Int8), candle(KvType::F32));
        let mut cpu = fixture::cpu_backend(fixture::model(name), 16, KvType::Int8);
        let (from_cpu, from_exact) = (median(&got, &rows(&mut cpu)), median(&got, &exact));
        assert!(
            from_cpu < 0.15 * from_exact,
            "{name}: {from_cpu} from the CPU, {from_exact} from f32"
        );
    }
}

/// The heads of keys and values in the bytes of a block in int8, layer by layer, as they are read:
/// `[block_size, kv_heads, head_dim]` of each plane.
fn int8_planes(config: &DecoderConfig, block_size: usize, bytes: &[u8]) -> Vec<Vec<f32>> {
    let shape = KvShape::of(config, block_size, KvType::Int8, |_| KvLayout::Rows);
    let mut rest = bytes;
    let mut take = |count: usize| {
        let (part, others) = rest.split_at(count);
        rest = others;
        part
    };
    let mut planes = Vec::new();
    for layer in &shape.attention_layers {
        for _ in 0..layer.planes() {
            let heads = block_size * layer.kv_heads;
            let (codes, scales) = (take(heads * layer.head_dim), take(heads * size_of::<f32>()));
            let scales = scales.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes));
            let heads = codes.chunks_exact(layer.head_dim).zip(scales);
            let values = heads.flat_map(|(head, scale)| {
                head.iter().map(move |code| f32::from(code.cast_signed()) * scale)
            });
            planes.push(values.collect());
        }
    }
    planes
}

/// Goal: blocks in int8 have the bytes that the CPU backend stores: the same order, and the same
/// numbers except for a few codes that differ because the values differ by rounding. The blocks are
/// too small for keys to be transposed on the CPU.
#[test]
fn int8_is_stored_as_by_the_cpu_backend() {
    let (kv_type, block_size) = (KvType::Int8, 8);
    for name in fixture::names() {
        let name = name.as_str();
        let tokens = fixture::expected(name).prompt;
        let config = fixture::model(name).config;
        let options = CandleOptions { kv_type: Some(kv_type), ..fixture::options(block_size) };
        let mut candle = fixture::backend(fixture::model(name), options);
        let mut cpu = fixture::cpu_backend(fixture::model(name), block_size, kv_type);
        let table = run::table(0, tokens.len(), block_size);
        let planes = |backend: &mut dyn Backend| {
            run::rows(backend, &tokens, 0, 1000, &table);
            let mut bytes = vec![0; backend.spec().block_bytes];
            backend.read_blocks(&table[1..2], &mut bytes).expect("a written block");
            int8_planes(&config, block_size, &bytes)
        };
        let (got, expected) = (planes(&mut candle), planes(&mut cpu));
        assert_eq!(candle.spec().block_bytes, cpu.spec().block_bytes, "{name}");
        for (plane, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let error = fixture::relative_error(got, expected);
            let most = if plane == 0 { 1e-5 } else { 0.01 };
            assert!(error < most, "{name}, plane {plane}: {error}");
        }
    }
}
