//! Matrices of safetensors files in a quantized format: FP8, AWQ, GPTQ and compressed-tensors.
//!
//! A format stores a matrix in parts: codes, scales and possibly zero points. When the model is
//! opened, [`Weights::convert`] checks the parts and joins them under the name of the matrix. When
//! the matrix is packed, its rows are computed in the type [`Converted::target`]. The value of a
//! weight is `scale * (code - zero)` in f32, with the scale and the zero point of its group.

mod decode;
mod layout;

use std::collections::HashSet;
use std::ops::Range;

use super::{Stored, TensorType, Weights};
use crate::config::quantization::Quantization;
use crate::config::{DecoderConfig, TensorSpec};
use crate::error::ModelError;

/// The number type of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    F32,
    F16,
    Bf16,
    /// 8-bit floats: a sign bit, 4 bits of exponent and 3 bits of mantissa.
    F8E4M3,
    I32,
    I8,
}

/// The supported types of scales.
const FLOATS: [Number; 3] = [Number::F32, Number::F16, Number::Bf16];

impl Number {
    fn bytes(self) -> usize {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::F8E4M3 | Self::I8 => 1,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::F8E4M3 => "F8_E4M3",
            Self::I32 => "I32",
            Self::I8 => "I8",
        }
    }
}

/// A tensor that is a part of a matrix. Its range has the length that follows from its shape and
/// type.
#[derive(Clone, Debug)]
struct Part {
    region: usize,
    range: Range<usize>,
    number: Number,
}

/// The codes of a matrix with `rows` rows and `columns` columns. Words are little-endian and hold
/// several unsigned codes, the first in the lowest bits.
#[derive(Clone, Debug)]
enum Codes {
    /// `[rows, columns]` 8-bit floats, which need no zero point.
    Floats(Part),
    /// `[rows, columns]` signed bytes.
    Bytes(Part),
    /// `[rows, columns * bits / 32]` words.
    Rows { words: Part, bits: usize },
    /// `[columns * bits / 32, rows]` words.
    Columns { words: Part, bits: usize },
    /// `[columns, rows / 8]` words of 4-bit codes in the order [`AWQ_ORDER`].
    Awq { words: Part },
}

/// For each code in a word of AWQ, its row within the 8 rows of the word.
const AWQ_ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// The scales. The scale of a group of columns in a row has the index `row / row_block * row_stride
/// + group * group_stride`.
#[derive(Clone, Debug)]
struct Scales {
    part: Part,
    row_block: usize,
    row_stride: usize,
    group_stride: usize,
}

/// The zero points of the groups.
#[derive(Clone, Debug)]
enum Zeros {
    /// The same zero point for all groups.
    Constant(i32),
    /// `[rows, groups]` signed bytes.
    Bytes(Part),
    /// `[rows * bits / 32, groups]` words.
    Rows { words: Part, bits: usize },
    /// `[groups, rows * bits / 32]` words, and an offset that is added to each zero point.
    Columns { words: Part, bits: usize, offset: i32 },
    /// `[groups, rows / 8]` words in the order [`AWQ_ORDER`].
    Awq { words: Part },
}

/// A matrix that is stored in parts.
#[derive(Clone, Debug)]
pub(super) struct Converted {
    /// Name of the matrix without `.weight`, for error messages.
    module: String,
    /// Number of rows of the stored matrix.
    stored_rows: usize,
    /// The rows of the stored matrix that belong to this one. These are all rows, unless several
    /// matrices are stored as one.
    rows: Range<usize>,
    columns: usize,
    codes: Codes,
    scales: Scales,
    zeros: Zeros,
    /// Number of columns of a group. The last group may have fewer.
    group: usize,
    /// The group of each column, `[columns]` words, all below the number of groups; `None` if
    /// groups consist of adjacent columns.
    order: Option<Part>,
    /// The element type of the rows when the matrix is read.
    target: TensorType,
    /// The name of the format in which the matrix is stored, for messages.
    pub(super) format: &'static str,
    /// Total size of the parts in bytes.
    pub(super) bytes: u64,
}

impl Weights {
    /// Joins the parts of each matrix of `config` that is stored in the format `quantization`. The
    /// only data that is read is the order of columns.
    ///
    /// # Errors
    /// [`ModelError`] for a part that is missing or has the wrong shape or type.
    pub(crate) fn convert(
        &mut self,
        quantization: &Quantization,
        config: &DecoderConfig,
    ) -> Result<(), ModelError> {
        let mut done = 0_usize;
        let (mut stored_bytes, mut bytes) = (0_u64, 0_u64);
        // Several matrices may be stored as one matrix.
        let specs = config.tensors().into_iter().filter(|spec| spec.role.is_matrix());
        let whole = specs.map(|spec| (spec.name.clone(), vec![spec]));
        let stacked = config.stacked().into_iter().chain(config.mixed_matrices());
        let latent = config.latent_matrices();
        let is_latent: HashSet<String> = latent.iter().map(|spec| spec.name.clone()).collect();
        let latent = latent.into_iter().map(|spec| (spec.name.clone(), vec![spec]));
        for (name, matrices) in stacked.chain(latent).chain(whole) {
            let rows = matrices.iter().map(|matrix| matrix.shape[0]).sum();
            let shape = [rows, matrices[0].shape[1]];
            let Some(module) = name.strip_suffix(".weight") else { continue };
            let mut parts = layout::Parts::new(self, module, shape);
            let Some(mut converted) = parts.convert(&quantization.of_module(module))? else {
                continue;
            };
            if is_latent.contains(&name) && converted.target.block_len() > 1 {
                // The keys are transposed when they are read, which is not possible with blocks.
                converted.target = layout::WIDE;
            }
            parts.names.into_iter().for_each(|name| drop(self.tensors.remove(&name)));
            stored_bytes = stored_bytes.saturating_add(converted.bytes);
            let elements = shape[0].saturating_mul(shape[1]);
            bytes = bytes.saturating_add(converted.target.bytes_of(elements).unwrap_or(0) as u64);
            done += 1;
            for (name, stored) in converted.matrices(matrices) {
                self.insert(name, stored)?;
            }
        }
        if done > 0 {
            let (origin, from, to) = (&self.origin, stored_bytes >> 20, bytes >> 20);
            // Users would not expect that a model needs much more memory than its files.
            if bytes > stored_bytes.saturating_add(stored_bytes / 2) {
                tracing::warn!(
                    "{origin}: {done} quantized matrices of {from} MiB need {to} MiB of memory, \
                     because they are converted to a wider type"
                );
            } else {
                tracing::info!(
                    "{origin}: {done} quantized matrices of {from} MiB need {to} MiB of memory"
                );
            }
        }
        Ok(())
    }

    /// The bytes of a part; `None` if only the header of its file is known.
    fn part(&self, part: &Part) -> Option<&[u8]> {
        self.regions[part.region].bytes.get(part.range.clone())
    }
}

impl Converted {
    /// A part of this matrix with the rows `rows`. Its `bytes` are the size of the whole matrix if
    /// `is_first` is true, and 0 otherwise.
    pub(super) fn part(&self, rows: Range<usize>, is_first: bool) -> Self {
        let start = self.rows.start;
        let bytes = if is_first { self.bytes } else { 0 };
        Self { rows: start + rows.start..start + rows.end, bytes, ..self.clone() }
    }

    /// Divides this matrix into the matrices that are stored in it, and returns them with their
    /// names. `parts` lists all of them, in the order of their rows.
    fn matrices(self, parts: Vec<TensorSpec>) -> impl Iterator<Item = (String, Stored)> {
        let mut next = 0;
        parts.into_iter().map(move |TensorSpec { name, shape, role: _ }| {
            let rows = shape[0];
            let main = self.codes.part();
            // Only the first matrix has bytes, because two tensors must not share them.
            let (range, bytes) = match next {
                0 => (main.range.clone(), self.bytes),
                _ => (main.range.start..main.range.start, 0),
            };
            let part = Self { rows: next..next + rows, bytes, ..self.clone() };
            next += rows;
            let stored = Stored {
                region: main.region,
                dtype: Ok(self.target),
                shape,
                range,
                pairs: None,
                interleaved: None,
                runs: None,
                converted: Some(Box::new(part)),
            };
            (name, stored)
        })
    }
}

impl Codes {
    fn part(&self) -> &Part {
        match self {
            Self::Floats(part) | Self::Bytes(part) => part,
            Self::Rows { words, .. } | Self::Columns { words, .. } | Self::Awq { words } => words,
        }
    }
}
