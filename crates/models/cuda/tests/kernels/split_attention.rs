//! The kernels of split-KV decoding.

use half::{bf16, f16};
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use super::host::Program;

/// Positions of a part in the kernels.
const PART: usize = 256;

/// A batch of single queries.
#[derive(Clone, Debug)]
struct Case {
    /// 0: f32, 1: f16, 2: bf16, 3: int8.
    element: usize,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    block_size: usize,
    /// Number of positions that each query reads without a window.
    contexts: Vec<usize>,
    window: Option<usize>,
    sinks: bool,
    scale: f32,
    softcap: f32,
}

/// The operands of a case.
#[derive(Debug)]
struct Operands {
    /// `[rows, heads, dim]`.
    queries: Vec<f32>,
    /// `[slots, kv_heads, dim]`, as the element type has it: codes in int8.
    keys: Vec<f32>,
    values: Vec<f32>,
    /// Factors of keys and values, `[slots, kv_heads]`: 1 except in int8.
    key_scales: Vec<f32>,
    value_scales: Vec<f32>,
    /// The blocks of each row. Some are shared by rows.
    tables: Vec<Vec<u32>>,
    sinks: Vec<f32>,
    slots: usize,
}

impl Operands {
    fn random(case: &Case, random: &mut SmallRng) -> Self {
        let blocks = case.contexts.iter().map(|context| context.div_ceil(case.block_size));
        let block_count = blocks.clone().max().unwrap_or(1) + 3;
        let tables = blocks.map(|blocks| {
            let mut table: Vec<u32> = (0..block_count as u32).collect();
            table.shuffle(random);
            table.truncate(blocks);
            table
        });
        let tables = tables.collect();
        let slots = block_count * case.block_size;
        let mut values = |element: usize, count: usize| -> Vec<f32> {
            let value = |_| round(element, random.random_range(-2.0..2.0));
            (0..count).map(value).collect()
        };
        let element = case.element;
        let own = element.min(2);
        let scales = |values: Vec<f32>| -> Vec<f32> {
            let scale = |value: f32| if element == 3 { 0.01 + value.abs() / 200.0 } else { 1.0 };
            values.into_iter().map(scale).collect()
        };
        Self {
            queries: values(own, case.contexts.len() * case.heads * case.dim),
            keys: values(element, slots * case.kv_heads * case.dim),
            values: values(element, slots * case.kv_heads * case.dim),
            key_scales: scales(values(own, slots * case.kv_heads)),
            value_scales: scales(values(own, slots * case.kv_heads)),
            tables,
            sinks: values(own, case.heads),
            slots,
        }
    }

    /// What the kernels compute.
    fn run(&self, program: &Program, case: &Case, descending: bool) -> Vec<f32> {
        let (mut part_rows, mut part_starts) = (Vec::new(), vec![0]);
        for (row, context) in case.contexts.iter().enumerate() {
            part_rows.resize(part_rows.len() + context.div_ceil(PART), row as u32);
            part_starts.push(part_rows.len() as u32);
        }
        // Padding, as captured steps have it.
        let last = case.contexts.len() as u32 - 1;
        part_rows.resize(part_rows.len().next_power_of_two(), last);
        let table_len = self.tables.iter().map(Vec::len).max().unwrap_or(0).next_power_of_two();
        let mut arguments = [
            usize::from(descending),
            case.element,
            case.contexts.len(),
            case.heads,
            case.kv_heads,
            case.dim,
            self.slots,
            case.block_size,
            table_len,
            part_rows.len(),
            case.window.unwrap_or(u32::MAX as usize),
            usize::from(case.sinks),
        ]
        .map(|number| number.to_string())
        .to_vec();
        arguments.extend([case.scale, case.softcap].map(|number| number.to_string()));

        let mut input: Vec<u8> = self.queries.iter().flat_map(|x| x.to_ne_bytes()).collect();
        for value in self.keys.iter().chain(&self.values) {
            match case.element {
                0 => input.extend(value.to_ne_bytes()),
                1 => input.extend(f16::from_f32(*value).to_ne_bytes()),
                2 => input.extend(bf16::from_f32(*value).to_ne_bytes()),
                _ => input.extend((*value as i8).to_ne_bytes()),
            }
        }
        if case.element == 3 {
            let scales = self.key_scales.iter().chain(&self.value_scales);
            input.extend(scales.flat_map(|scale| scale.to_ne_bytes()));
        }
        for table in &self.tables {
            let mut table = table.clone();
            // What follows a table must not be read.
            table.resize(table_len, u32::MAX);
            input.extend(table.iter().flat_map(|block| block.to_ne_bytes()));
        }
        let contexts = case.contexts.iter().map(|context| *context as u32);
        let numbers = contexts.chain(part_rows).chain(part_starts);
        input.extend(numbers.flat_map(u32::to_ne_bytes));
        if case.sinks {
            input.extend(self.sinks.iter().flat_map(|sink| sink.to_ne_bytes()));
        }
        let output = program.run(&arguments, &input);
        output.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect()
    }

    /// The definition, in f64.
    fn expected(&self, case: &Case) -> Vec<f64> {
        let (dim, mut expected) = (case.dim, Vec::new());
        for (row, &context) in case.contexts.iter().enumerate() {
            let oldest = case.window.map_or(0, |window| context.saturating_sub(window));
            for head in 0..case.heads {
                let query = &self.queries[(row * case.heads + head) * dim..][..dim];
                let kv_head = head / (case.heads / case.kv_heads);
                let stored = |position: usize| {
                    let block = self.tables[row][position / case.block_size] as usize;
                    let slot = block * case.block_size + position % case.block_size;
                    slot * case.kv_heads + kv_head
                };
                let score = |position: usize| {
                    let key = &self.keys[stored(position) * dim..][..dim];
                    let product = |(a, b): (&f32, &f32)| f64::from(*a) * f64::from(*b);
                    let score = query.iter().zip(key).map(product).sum::<f64>();
                    let score = score * f64::from(self.key_scales[stored(position)]);
                    let (score, cap) = (score * f64::from(case.scale), f64::from(case.softcap));
                    if cap > 0.0 { cap * (score / cap).tanh() } else { score }
                };
                let sink = if case.sinks { f64::from(self.sinks[head]).exp() } else { 0.0 };
                let (mut sum, mut weighted) = (sink, vec![0.0; dim]);
                for position in oldest..context {
                    let weight = score(position).exp();
                    sum += weight;
                    let values = &self.values[stored(position) * dim..][..dim];
                    let weight = weight * f64::from(self.value_scales[stored(position)]);
                    for (to, value) in weighted.iter_mut().zip(values) {
                        *to += weight * f64::from(*value);
                    }
                }
                expected.extend(weighted.iter().map(|value| value / sum));
            }
        }
        expected
    }
}

/// The nearest value that the element type has.
fn round(element: usize, value: f32) -> f32 {
    match element {
        0 => value,
        1 => f16::from_f32(value).to_f32(),
        2 => bf16::from_f32(value).to_f32(),
        // A code from -127 to 127.
        _ => (value * 63.5).round(),
    }
}

/// Goal: for all element types, heads, block sizes and contexts, with windows, caps and sinks, the
/// kernels compute attention, and the order in which threads run changes nothing.
#[test]
fn parts_of_a_context_are_merged_to_its_attention() {
    let program = Program::compile("split_attention.cpp");
    let mut random = SmallRng::seed_from_u64(2);
    let shapes = [(4, 4, 64), (8, 2, 128), (12, 1, 256), (32, 2, 80), (5, 5, 8), (6, 3, 192)];
    for (index, (heads, kv_heads, dim)) in shapes.into_iter().cycle().take(32).enumerate() {
        let mut contexts: Vec<usize> = (0..3).map(|_| random.random_range(1..900)).collect();
        contexts.extend([1, PART, PART + 1]);
        let case = Case {
            element: index % 4,
            heads,
            kv_heads,
            dim,
            block_size: [1, 16, 32, 256][index / 4 % 4],
            contexts,
            window: [None, Some(1), Some(100), Some(500), Some(4096)][index % 5],
            sinks: index / 2 % 2 == 1,
            scale: 1.0 / (dim as f32).sqrt(),
            softcap: [0.0, 1.5][index / 3 % 2],
        };
        let operands = Operands::random(&case, &mut random);
        let got = operands.run(&program, &case, false);
        for (index, (got, expected)) in got.iter().zip(operands.expected(&case)).enumerate() {
            let difference = (f64::from(*got) - expected).abs();
            assert!(difference < 2e-6, "{case:?}: element {index}: {got} instead of {expected}");
        }
        assert_eq!(got.len(), case.contexts.len() * heads * dim);
        assert_eq!(operands.run(&program, &case, true), got, "{case:?}: another order");

        // Alone in the batch, a query gets the same bits.
        let row = 2;
        let one = Case { contexts: vec![case.contexts[row]], ..case.clone() };
        let size = heads * dim;
        let alone = Operands {
            queries: operands.queries[row * size..][..size].to_vec(),
            tables: vec![operands.tables[row].clone()],
            ..operands
        };
        assert_eq!(alone.run(&program, &one, false), got[row * size..][..size], "{case:?}: alone");
    }
}
