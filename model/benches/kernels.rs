//! The kernels against candle's matrix product, which the CPU backend would use without them.
//!
//! `cargo bench -p stolon-model --bench kernels`; `STOLON_CPU_PATH` forces a lower instruction set.
//! Products are of one linear layer, 2048 to 6144 features; throughput counts the weights' bytes for
//! up to 16 rows, where memory is the limit, and multiplications and additions above.

#![allow(missing_docs, reason = "criterion's macro makes a public function")]

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use stolon_kvcache::BlockId;
use stolon_model::kernels::{
    AttentionArgs, AttentionSequence, KvSlice, Matrix, Path, TensorType, Threads, attention,
};

const INNER: usize = 2048;
const FEATURES: usize = 6144;

fn random(count: usize) -> Vec<f32> {
    let mut rng = SmallRng::seed_from_u64(1);
    (0..count).map(|_| rng.random_range(-1.0..1.0)).collect()
}

fn products(criterion: &mut Criterion) {
    let threads = Threads::new(Threads::default_count());
    let path = Path::detect().expect("STOLON_CPU_PATH names a path of this machine");
    let weights = random(FEATURES * INNER);
    let device = candle_core::Device::Cpu;
    let tensor = candle_core::Tensor::from_slice(&weights, (FEATURES, INNER), &device)
        .expect("a tensor of the weights");
    let quantised = |dtype| {
        let tensor = candle_core::quantized::QTensor::quantize(&tensor, dtype);
        tensor.expect("the inner size is a whole number of blocks")
    };
    let bytes_of = |dtype: TensorType| -> Vec<u8> {
        use candle_core::quantized::GgmlDType;
        let ggml = match dtype {
            TensorType::Q8_0 => GgmlDType::Q8_0,
            TensorType::Q4K => GgmlDType::Q4K,
            TensorType::Bf16 => {
                return weights
                    .iter()
                    .flat_map(|&w| half::bf16::from_f32(w).to_le_bytes())
                    .collect();
            }
            _ => return weights.iter().flat_map(|w| w.to_le_bytes()).collect(),
        };
        quantised(ggml).data().expect("the bytes of a CPU tensor").to_vec()
    };
    for rows in [1, 8, 64, 512] {
        let x = random(rows * INNER);
        let mut out = vec![0.0; rows * FEATURES];
        let mut group = criterion.benchmark_group(format!("product/{rows}"));
        group.sample_size(20);
        for dtype in [TensorType::F32, TensorType::Bf16, TensorType::Q8_0, TensorType::Q4K] {
            let matrix = Matrix::pack(dtype, FEATURES, INNER, &bytes_of(dtype), path)
                .expect("the bytes fit the shape");
            group.throughput(if rows <= 16 {
                Throughput::Bytes(matrix.bytes() as u64)
            } else {
                Throughput::Elements((2 * rows * INNER * FEATURES) as u64)
            });
            group.bench_function(BenchmarkId::new(path.name(), format!("{dtype:?}")), |bencher| {
                bencher.iter(|| matrix.matmul(&threads, &x, rows, &mut out));
            });
        }
        let input = candle_core::Tensor::from_slice(&x, (rows, INNER), &device)
            .expect("a tensor of the activations");
        let turned = tensor.t().expect("a matrix");
        group.bench_function("candle/F32", |bencher| {
            bencher.iter(|| input.matmul(&turned).expect("shapes that fit"));
        });
        let q8 = candle_core::quantized::QMatMul::from_qtensor(quantised(
            candle_core::quantized::GgmlDType::Q8_0,
        ))
        .expect("a quantised product");
        group.bench_function("candle/Q8_0", |bencher| {
            use candle_core::Module;
            bencher.iter(|| q8.forward(&input).expect("shapes that fit"));
        });
        group.finish();
    }
}

/// One layer of a model with 16 heads on 8 kv heads of 128, blocks of 16 dealt out in disorder.
fn attentions(criterion: &mut Criterion) {
    const HEADS: usize = 16;
    const KV_HEADS: usize = 8;
    const HEAD_DIM: usize = 128;
    const BLOCK_SIZE: usize = 16;
    let threads = Threads::new(Threads::default_count());
    let path = Path::detect().expect("STOLON_CPU_PATH names a path of this machine");
    let mut group = criterion.benchmark_group("attention");
    group.sample_size(20);
    for (name, start, count) in [
        ("decode at 8192", 8191_usize, 1),
        ("prefill of 1088", 0, 1088),
        ("512 after 4096", 4096, 512),
    ] {
        let blocks = (start + count).div_ceil(BLOCK_SIZE);
        let store: Vec<u16> = random(blocks * BLOCK_SIZE * KV_HEADS * HEAD_DIM)
            .iter()
            .map(|&v| half::bf16::from_f32(v).to_bits())
            .collect();
        let values = store.clone();
        // 7919 is prime, so this is a permutation of the blocks.
        let table: Vec<BlockId> = (0..blocks)
            .map(|index| BlockId(u32::try_from(index * 7919 % blocks).expect("few blocks")))
            .collect();
        let q = random(count * HEADS * HEAD_DIM);
        let mut out = vec![0.0; q.len()];
        let args = AttentionArgs {
            path,
            q: &q,
            sequences: &[AttentionSequence { start, count, block_table: &table }],
            keys: KvSlice::Bf16(&store),
            values: KvSlice::Bf16(&values),
            block_size: BLOCK_SIZE,
            heads: HEADS,
            kv_heads: KV_HEADS,
            head_dim: HEAD_DIM,
            scale: 1.0 / (HEAD_DIM as f32).sqrt(),
            sliding_window: None,
        };
        let pairs: usize = (start + 1..=start + count).sum();
        group.throughput(if count == 1 {
            Throughput::Bytes((4 * (start + 1) * KV_HEADS * HEAD_DIM) as u64)
        } else {
            Throughput::Elements((4 * pairs * HEADS * HEAD_DIM) as u64)
        });
        group.bench_function(BenchmarkId::new(path.name(), name), |bencher| {
            bencher.iter(|| attention(&threads, &args, &mut out));
        });
    }
    group.finish();
}

criterion_group!(benches, products, attentions);
criterion_main!(benches);
