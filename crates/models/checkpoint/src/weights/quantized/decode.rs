//! Computes the rows of a quantized matrix.

use half::{bf16, f16};

use super::{AWQ_ORDER, Codes, Converted, Number, Part, Weights, Zeros};
use crate::error::ModelError;
use crate::weights::TensorType;

/// Number of rows that are decoded together, a multiple of 8. If words are stored by columns, a
/// cache line has the words of 16 rows.
const RUN_ROWS: usize = 64;
/// Maximum number of threads. More would not help, because the parts are read from disk.
const THREADS_MAX: usize = 16;
/// Minimum number of weights of a matrix that several threads compute.
const PARALLEL_MIN: usize = 1 << 18;

impl Converted {
    /// Computes the rows of the matrix in the type [`Converted::target`], in the format of a file.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] for a scale that is not finite.
    pub(in crate::weights) fn bytes(&self, weights: &Weights) -> Result<Vec<u8>, ModelError> {
        let row_bytes = self.columns / self.target.block_len() * self.target.block_bytes();
        let rows = self.rows.len();
        let mut out = vec![0; rows * row_bytes];
        let cores = std::thread::available_parallelism().map_or(1, |count| count.get());
        let threads = match rows * self.columns < PARALLEL_MIN {
            true => 1,
            false => cores.min(THREADS_MAX),
        };
        let rows_per_thread = rows.div_ceil(threads).next_multiple_of(RUN_ROWS);
        let decoder = Decoder::new(self, weights)?;
        let results: Vec<_> = std::thread::scope(|scope| {
            let shares = out.chunks_mut(rows_per_thread * row_bytes).enumerate();
            let handles: Vec<_> = shares
                .map(|(index, share)| {
                    let decoder = &decoder;
                    let first = self.rows.start + index * rows_per_thread;
                    scope.spawn(move || decoder.rows(first, row_bytes, share))
                })
                .collect();
            handles.into_iter().map(|handle| handle.join()).collect()
        });
        for result in results {
            result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        Ok(out)
    }
}

/// The parts of a matrix as bytes.
struct Decoder<'a> {
    matrix: &'a Converted,
    file: &'a str,
    codes: &'a [u8],
    scales: &'a [u8],
    zeros: &'a [u8],
    order: Option<&'a [u8]>,
    groups: usize,
}

/// The scales and zero points of a row.
#[derive(Default)]
struct Row {
    scales: Vec<f32>,
    zeros: Vec<i32>,
}

impl<'a> Decoder<'a> {
    fn new(matrix: &'a Converted, weights: &'a Weights) -> Result<Self, ModelError> {
        let file = &weights.regions[matrix.codes.part().region].file;
        let bytes = |part: &Part| {
            weights.part(part).ok_or_else(|| ModelError::Truncated {
                file: file.clone(),
                what: format!("matrix `{}`", matrix.module),
                expected: part.range.end as u64,
                got: weights.regions[part.region].bytes.len() as u64,
            })
        };
        let zeros = match &matrix.zeros {
            Zeros::Constant(_) => &[],
            Zeros::Bytes(words)
            | Zeros::Rows { words, .. }
            | Zeros::Columns { words, .. }
            | Zeros::Awq { words } => bytes(words)?,
        };
        Ok(Self {
            matrix,
            file,
            codes: bytes(matrix.codes.part())?,
            scales: bytes(&matrix.scales.part)?,
            zeros,
            order: matrix.order.as_ref().map(bytes).transpose()?,
            groups: matrix.columns.div_ceil(matrix.group),
        })
    }

    /// Computes as many rows as `out` has room for, beginning with the row `first`.
    fn rows(&self, first: usize, row_bytes: usize, out: &mut [u8]) -> Result<(), ModelError> {
        let columns = self.matrix.columns;
        let mut codes = vec![0; RUN_ROWS * columns];
        let mut values = vec![0.0; columns];
        let mut row = Row::default();
        for (run, out) in out.chunks_mut(RUN_ROWS * row_bytes).enumerate() {
            let first = first + run * RUN_ROWS;
            let count = out.len() / row_bytes;
            let codes = &mut codes[..count * columns];
            self.unpack(first, codes);
            let rows = codes.chunks_exact(columns).zip(out.chunks_exact_mut(row_bytes));
            for (index, (codes, out)) in rows.enumerate() {
                self.row(first + index, &mut row)?;
                self.emit(codes, &row, &mut values, out);
            }
        }
        Ok(())
    }

    /// Unpacks the codes of the rows from `first` on to `out`, `[rows, columns]`.
    fn unpack(&self, first: usize, out: &mut [i16]) {
        let (rows, columns) = (self.matrix.stored_rows, self.matrix.columns);
        let count = out.len() / columns;
        match self.matrix.codes {
            Codes::Floats(_) => {
                let bytes = &self.codes[first * columns..];
                out.iter_mut().zip(bytes).for_each(|(code, byte)| *code = i16::from(*byte));
            }
            Codes::Bytes(_) => {
                let bytes = &self.codes[first * columns..];
                out.iter_mut()
                    .zip(bytes)
                    .for_each(|(code, byte)| *code = i16::from(byte.cast_signed()));
            }
            Codes::Rows { bits, .. } => {
                let per_word = 32 / bits;
                let words = columns.div_ceil(per_word);
                for (index, row) in out.chunks_exact_mut(columns).enumerate() {
                    for (word, codes) in row.chunks_mut(per_word).enumerate() {
                        let word = self.word((first + index) * words + word);
                        codes.iter_mut().enumerate().for_each(|(at, code)| {
                            *code = code_at(word, at, bits);
                        });
                    }
                }
            }
            Codes::Columns { bits, .. } => {
                let per_word = 32 / bits;
                for start in (0..columns).step_by(per_word) {
                    for index in 0..count {
                        let word = self.word(start / per_word * rows + first + index);
                        let codes = &mut out[index * columns + start..][..per_word];
                        codes.iter_mut().enumerate().for_each(|(at, code)| {
                            *code = code_at(word, at, bits);
                        });
                    }
                }
            }
            Codes::Awq { .. } => {
                // The first and the last word may also contain codes of other rows.
                let end = first + count;
                for column in 0..columns {
                    for start in (first / 8 * 8..end).step_by(8) {
                        let word = self.word(column * (rows / 8) + start / 8);
                        for (at, row) in AWQ_ORDER.iter().enumerate() {
                            let row = start + row;
                            if (first..end).contains(&row) {
                                out[(row - first) * columns + column] = code_at(word, at, 4);
                            }
                        }
                    }
                }
            }
        }
    }

    /// Reads the scales and zero points of a row.
    fn row(&self, row: usize, out: &mut Row) -> Result<(), ModelError> {
        let scales = &self.matrix.scales;
        let start = row / scales.row_block * scales.row_stride;
        out.scales.clear();
        out.zeros.clear();
        for group in 0..self.groups {
            let scale = float(self.scales, scales.part.number, start + group * scales.group_stride);
            if !scale.is_finite() {
                let reason = format!(
                    "matrix `{}`: the scale of row {row} and group {group}: expected a finite number, \
                     got {scale}",
                    self.matrix.module
                );
                return Err(ModelError::malformed(self.file, reason));
            }
            out.scales.push(scale);
            out.zeros.push(self.zero(row, group));
        }
        Ok(())
    }

    fn zero(&self, row: usize, group: usize) -> i32 {
        let rows = self.matrix.stored_rows;
        match self.matrix.zeros {
            Zeros::Constant(zero) => zero,
            Zeros::Bytes(_) => i32::from(self.zeros[row * self.groups + group].cast_signed()),
            Zeros::Rows { bits, .. } => {
                let per_word = 32 / bits;
                let word = word_of(self.zeros, row / per_word * self.groups + group);
                i32::from(code_at(word, row % per_word, bits))
            }
            Zeros::Columns { bits, offset, .. } => {
                let per_word = 32 / bits;
                let word = word_of(self.zeros, group * (rows / per_word) + row / per_word);
                i32::from(code_at(word, row % per_word, bits)) + offset
            }
            Zeros::Awq { .. } => {
                let word = word_of(self.zeros, group * (rows / 8) + row / 8);
                let at = AWQ_ORDER.iter().position(|place| *place == row % 8).unwrap_or_default();
                i32::from(code_at(word, at, 4))
            }
        }
    }

    /// Writes a row in the target type. `values` is a buffer for the row.
    fn emit(&self, codes: &[i16], row: &Row, values: &mut [f32], out: &mut [u8]) {
        match self.matrix.target {
            TensorType::I8Group32 | TensorType::U4Group32 | TensorType::U4Group128 => {
                self.blocks(codes, row, out);
            }
            TensorType::Bf16 => {
                self.values(codes, row, values);
                let pairs = out.as_chunks_mut::<2>().0.iter_mut().zip(values.iter());
                pairs.for_each(|(out, value)| *out = bf16::from_f32(*value).to_le_bytes());
            }
            _ => {
                self.values(codes, row, values);
                let pairs = out.as_chunks_mut::<2>().0.iter_mut().zip(values.iter());
                pairs.for_each(|(out, value)| *out = f16::from_f32(*value).to_le_bytes());
            }
        }
    }

    /// Writes a row as blocks, which have a scale and, with 4-bit codes, a minimum.
    fn blocks(&self, codes: &[i16], row: &Row, out: &mut [u8]) {
        let target = self.matrix.target;
        let block_len = target.block_len();
        let blocks = codes.chunks_exact(block_len).zip(out.chunks_exact_mut(target.block_bytes()));
        for (index, (codes, out)) in blocks.enumerate() {
            let group = index * block_len / self.matrix.group;
            let (scale, zero) = (row.scales[group], row.zeros[group]);
            out[..4].copy_from_slice(&scale.to_le_bytes());
            if target == TensorType::I8Group32 {
                let signed = codes.iter().map(|code| (i32::from(*code) - zero) as u8);
                out[4..].iter_mut().zip(signed).for_each(|(out, byte)| *out = byte);
                continue;
            }
            out[4..8].copy_from_slice(&(scale * zero as f32).to_le_bytes());
            for (codes, out) in codes.chunks_exact(32).zip(out[8..].chunks_exact_mut(16)) {
                let (low, high) = codes.split_at(16);
                let pairs = low.iter().zip(high).map(|(low, high)| (low | high << 4) as u8);
                out.iter_mut().zip(pairs).for_each(|(out, byte)| *out = byte);
            }
        }
    }

    /// The values of a row.
    fn values(&self, codes: &[i16], row: &Row, out: &mut [f32]) {
        let is_float = matches!(self.matrix.codes, Codes::Floats(_));
        let value = |code: i16, group: usize| match is_float {
            true => E4M3[code as usize] * row.scales[group],
            false => (i32::from(code) - row.zeros[group]) as f32 * row.scales[group],
        };
        match self.order {
            Some(order) => {
                let columns = codes.iter().zip(out).enumerate();
                columns.for_each(|(column, (code, out))| {
                    *out = value(*code, word_of(order, column) as usize);
                });
            }
            None => {
                let group = self.matrix.group;
                for (index, (codes, out)) in
                    codes.chunks(group).zip(out.chunks_mut(group)).enumerate()
                {
                    out.iter_mut().zip(codes).for_each(|(out, code)| *out = value(*code, index));
                }
            }
        }
    }

    fn word(&self, index: usize) -> u32 {
        word_of(self.codes, index)
    }
}

/// The little-endian word `index` of `bytes`.
fn word_of(bytes: &[u8], index: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[4 * index..4 * index + 4]);
    u32::from_le_bytes(word)
}

/// The code `index` of a word, whose first code is in the lowest bits.
fn code_at(word: u32, index: usize, bits: usize) -> i16 {
    (word >> (index * bits) & ((1 << bits) - 1)) as i16
}

/// Converts the number `index` in `bytes` to f32.
fn float(bytes: &[u8], number: Number, index: usize) -> f32 {
    let at = index * number.bytes();
    match number {
        Number::F32 => f32::from_bits(word_of(bytes, index)),
        Number::F16 => f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32(),
        _ => bf16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32(),
    }
}

/// The values of 8-bit floats, which have a sign bit, 4 bits of exponent with a bias of 7, 3 bits
/// of mantissa, no infinities, and NaN if all other bits are set (E4M3 of the OCP 8-bit floating
/// point specification).
static E4M3: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, mantissa) = ((code >> 3 & 15) as u32, (code & 7) as u32);
        let bits = if exponent == 15 && mantissa == 7 {
            0x7fc0_0000
        } else if exponent > 0 {
            (exponent + 120) << 23 | mantissa << 20
        } else {
            // A subnormal number is a multiple of 2^-9.
            (mantissa as f32 / 512.0).to_bits()
        };
        table[code] = f32::from_bits(bits | (code as u32 >> 7) << 31);
        code += 1;
    }
    table
};
