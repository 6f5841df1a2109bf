//! Benchmarks of GEMM, attention and recurrences, with candle's matrix product as the baseline.
//!
//! Run with `cargo bench -p stolon-kernels --bench kernels`. `STOLON_CPU_PATH` selects a lower
//! instruction set. The products belong to a linear layer with 2048 input and 6144 output features.
//! Throughput is given in bytes of weights for up to 16 rows, which are memory-bound, and in
//! additions and multiplications for more rows. A recurrence is one head of Qwen3.5.

#![allow(missing_docs, reason = "criterion's macro makes a public function")]

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use stolon_kernels::{
    AttentionArgs, AttentionSequence, KvLayout, KvSlice, Matrix, Path, Recurrence, Rule,
    StridedRows, TensorType, Threads, attention,
};
use stolon_kvcache::BlockId;

const INNER: usize = 2048;
const FEATURES: usize = 6144;

const DTYPES: [TensorType; 14] = [
    TensorType::F32,
    TensorType::Bf16,
    TensorType::Q8_0,
    TensorType::Q4K,
    TensorType::Q4_0,
    TensorType::Q4_1,
    TensorType::Q5_0,
    TensorType::Q2K,
    TensorType::Q3K,
    TensorType::Iq4Nl,
    TensorType::Iq1M,
    TensorType::Iq2Xs,
    TensorType::Iq3S,
    TensorType::Mxfp4,
];

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
    let quantized = |dtype| {
        let tensor = candle_core::quantized::QTensor::quantize(&tensor, dtype);
        tensor.expect("the inner size is a whole number of blocks")
    };
    let bytes_of = |dtype: TensorType| -> Vec<u8> {
        match dtype {
            TensorType::F32 => weights.iter().flat_map(|w| w.to_le_bytes()).collect(),
            TensorType::Bf16 => {
                weights.iter().flat_map(|&w| half::bf16::from_f32(w).to_le_bytes()).collect()
            }
            // These bytes are 0.26 as f16. The speed does not depend on the values.
            _ => vec![0x34; dtype.bytes_of(weights.len()).expect("whole blocks")],
        }
    };
    for rows in [1, 8, 64, 512] {
        let x = random(rows * INNER);
        let mut out = vec![0.0; rows * FEATURES];
        let mut group = criterion.benchmark_group(format!("product/{rows}"));
        group.sample_size(20);
        for dtype in DTYPES {
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
        let transposed = tensor.t().expect("a matrix");
        group.bench_function("candle/F32", |bencher| {
            bencher.iter(|| input.matmul(&transposed).expect("shapes that fit"));
        });
        let q8 = candle_core::quantized::QMatMul::from_qtensor(quantized(
            candle_core::quantized::GgmlDType::Q8_0,
        ))
        .expect("a quantized product");
        group.bench_function("candle/Q8_0", |bencher| {
            use candle_core::Module;
            bencher.iter(|| q8.forward(&input).expect("shapes that fit"));
        });
        group.finish();
    }
}

const HEADS: usize = 16;
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 128;
const BLOCK_SIZE: usize = 16;

/// Keys or values as they are stored.
#[derive(Clone)]
enum Stored {
    Bf16(Vec<u16>),
    Int8 { values: Vec<i8>, scales: Vec<f32> },
    Int4 { packed: Vec<u8>, scales: Vec<f32> },
}

/// The types of keys and values.
const KINDS: [(&str, [Kind; 2]); 4] = [
    ("attention", [Kind::Bf16; 2]),
    ("attention, int8", [Kind::Int8; 2]),
    ("attention, k8v4", [Kind::Int8, Kind::Int4]),
    ("attention, int4", [Kind::Int4; 2]),
];

#[derive(Clone, Copy)]
enum Kind {
    Bf16,
    Int8,
    Int4,
}

impl Kind {
    /// Size in bytes of a head.
    fn head_bytes(self) -> usize {
        match self {
            Kind::Bf16 => 2 * HEAD_DIM,
            Kind::Int8 => HEAD_DIM + size_of::<f32>(),
            Kind::Int4 => HEAD_DIM / 2 + size_of::<f32>(),
        }
    }
}

impl Stored {
    /// Random keys or values of `positions` positions.
    fn random(kind: Kind, positions: usize) -> Stored {
        let heads = positions * KV_HEADS;
        let values = random(heads * HEAD_DIM);
        let scales = vec![1.0 / 127.0; heads];
        match kind {
            Kind::Bf16 => {
                Stored::Bf16(values.iter().map(|&v| half::bf16::from_f32(v).to_bits()).collect())
            }
            Kind::Int8 => {
                let values = values.iter().map(|value| (value * 127.0) as i8).collect();
                Stored::Int8 { values, scales }
            }
            Kind::Int4 => {
                let pairs = values.chunks_exact(2);
                let packed = pairs.map(|pair| (pair[0] * 127.0) as i8 as u8).collect();
                Stored::Int4 { packed, scales }
            }
        }
    }

    fn as_slice(&self) -> KvSlice<'_> {
        match self {
            Stored::Bf16(bits) => KvSlice::Bf16(bits),
            Stored::Int8 { values, scales } => KvSlice::Int8 { values, scales },
            Stored::Int4 { packed, scales } => KvSlice::Int4 { packed, scales },
        }
    }
}

/// Queries, keys and values of one layer: 16 heads, 8 KV heads, a head dimension of 128, and blocks
/// of 16 positions.
struct Layer {
    /// The position of the first query and the block table of each sequence.
    tables: Vec<(usize, Vec<BlockId>)>,
    /// Number of queries of each sequence.
    count: usize,
    q: Vec<f32>,
    keys: Stored,
    values: Stored,
}

impl Layer {
    /// `sequences` sequences with `start` cached positions and `count` queries each. All of them
    /// share the first `shared` positions.
    fn new(kinds: [Kind; 2], sequences: usize, start: usize, count: usize, shared: usize) -> Layer {
        let (own, shared) = ((start + count).div_ceil(BLOCK_SIZE), shared / BLOCK_SIZE);
        let blocks = shared + sequences * (own - shared);
        let [keys, values] = kinds.map(|kind| Stored::random(kind, blocks * BLOCK_SIZE));
        // 7919 is prime, so this is a permutation of the blocks.
        let block = |index: usize| BlockId(u32::try_from(index * 7919 % blocks).expect("few"));
        let table = |sequence: usize| {
            let place =
                |index| if index < shared { index } else { sequence * (own - shared) + index };
            (start, (0..own).map(|index| block(place(index))).collect())
        };
        let tables = (0..sequences).map(table).collect();
        let q = random(sequences * count * HEADS * HEAD_DIM);
        Layer { tables, count, q, keys, values }
    }

    fn attend(&self, path: Path, threads: &Threads, out: &mut [f32]) {
        let sequences = self.tables.iter().map(|(start, block_table)| AttentionSequence {
            start: *start,
            count: self.count,
            full: false,
            block_table,
        });
        let bf16 = matches!(self.keys, Stored::Bf16(_));
        let args = AttentionArgs {
            path,
            q: &self.q,
            sequences: &sequences.collect::<Vec<_>>(),
            keys: self.keys.as_slice(),
            key_layout: KvLayout::of_keys(path, bf16, BLOCK_SIZE, HEAD_DIM),
            values: self.values.as_slice(),
            block_size: BLOCK_SIZE,
            heads: HEADS,
            kv_heads: KV_HEADS,
            head_dim: HEAD_DIM,
            scale: 1.0 / (HEAD_DIM as f32).sqrt(),
            softcap: None,
            sliding_window: None,
            window_after: None,
            bias: None,
            sinks: None,
        };
        attention(threads, &args, out);
    }
}

fn attentions(criterion: &mut Criterion) {
    let threads = Threads::new(Threads::default_count());
    let path = Path::detect().expect("STOLON_CPU_PATH names a path of this machine");
    for (name, kinds) in KINDS {
        let mut group = criterion.benchmark_group(name);
        group.sample_size(20);
        for (name, sequences, start, count, shared) in [
            // The keys and values fit in the L2 caches of two threads.
            ("decode at 512", 1, 511, 1, 0),
            ("decode at 8192", 1, 8191, 1, 0),
            ("8 decodes at 513", 8, 512, 1, 0),
            ("8 decodes at 2176", 8, 2175, 1, 0),
            ("8 decodes at 2176, 2048 shared", 8, 2175, 1, 2048),
            ("16 decodes at 2176", 16, 2175, 1, 0),
            ("16 decodes at 2176, 2048 shared", 16, 2175, 1, 2048),
            ("prefill of 1088", 1, 0, 1088, 0),
            ("512 after 4096", 1, 4096, 512, 0),
        ] {
            let layer = Layer::new(kinds, sequences, start, count, shared);
            let mut out = vec![0.0; layer.q.len()];
            let pairs: usize = (start + 1..=start + count).sum();
            // Shared prefixes are counted once for each sequence, as if each one read them.
            group.throughput(if count == 1 {
                let bytes: usize = kinds.iter().map(|kind| kind.head_bytes()).sum();
                Throughput::Bytes((sequences * (start + 1) * KV_HEADS * bytes) as u64)
            } else {
                Throughput::Elements((4 * pairs * HEADS * HEAD_DIM) as u64)
            });
            group.bench_function(BenchmarkId::new(path.name(), name), |bencher| {
                bencher.iter(|| layer.attend(path, &threads, &mut out));
            });
        }
        group.finish();
    }
}

fn recurrences(criterion: &mut Criterion) {
    const DIM: usize = 128;
    let path = Path::detect().expect("STOLON_CPU_PATH names an instruction set of this machine");
    let mut group = criterion.benchmark_group("recurrence");
    for (name, rule, tokens) in [
        ("delta rule, 512 tokens", Rule::Delta, 512),
        ("delta rule, 1 token", Rule::Delta, 1),
        ("additive, 512 tokens", Rule::Additive, 512),
    ] {
        let rows: Vec<f32> = random(3 * DIM * tokens).iter().map(|value| 0.05 * value).collect();
        let gates = vec![0.9; tokens];
        let rows = |at: usize| StridedRows { values: &rows[at..], stride: 3 * DIM };
        let gates = StridedRows { values: &gates, stride: 1 };
        let recurrence = Recurrence {
            path,
            rule,
            tokens,
            key_dim: DIM,
            value_dim: DIM,
            queries: rows(0),
            keys: rows(DIM),
            values: rows(2 * DIM),
            decays: gates,
            strengths: gates,
        };
        let mut state = vec![0.0; Recurrence::state_len(DIM, DIM)];
        let mut out = vec![0.0; tokens * DIM];
        group.throughput(Throughput::Elements((8 * tokens * DIM * DIM) as u64));
        group.bench_function(BenchmarkId::new(path.name(), name), |bencher| {
            bencher.iter(|| recurrence.run(&mut state, &mut out));
        });
    }
    group.finish();
}

criterion_group!(benches, products, attentions, recurrences);
criterion_main!(benches);
