//! Finds the parts of a quantized matrix and checks their types and shapes.

use super::{Codes, Converted, FLOATS, Number, Part, Scales, Weights, Zeros};
use crate::config::quantization::Quantization;
use crate::error::ModelError;
use crate::weights::TensorType;

/// The type to which rows are decoded if no quantized type represents their values exactly.
pub(super) const WIDE: TensorType = TensorType::F16;

/// Collects the parts of one matrix.
pub(super) struct Parts<'a> {
    weights: &'a Weights,
    module: &'a str,
    rows: usize,
    columns: usize,
    /// The names of the parts that were found.
    pub(super) names: Vec<String>,
    /// Total size of the parts that were found, in bytes.
    bytes: u64,
}

impl<'a> Parts<'a> {
    pub(super) fn new(weights: &'a Weights, module: &'a str, [rows, columns]: [usize; 2]) -> Self {
        Self { weights, module, rows, columns, names: Vec::new(), bytes: 0 }
    }

    /// Finds the parts of the matrix in the format `quantization`; `None` if it is not stored in
    /// this format.
    pub(super) fn convert(
        &mut self,
        quantization: &Quantization,
    ) -> Result<Option<Converted>, ModelError> {
        let stored_as = |name: &str, number: Number| {
            let stored = self.weights.tensors.get(&format!("{}.{name}", self.module));
            stored.is_some_and(|stored| stored.dtype == Err(number.name().to_owned()))
        };
        let exists = |name: &str| self.weights.contains(&format!("{}.{name}", self.module));
        let is_stored = match quantization {
            Quantization::Fp8 { .. } => stored_as("weight", Number::F8E4M3),
            Quantization::Awq { .. } | Quantization::Gptq { .. } => exists("qweight"),
            Quantization::Integers { packed: true, .. } => exists("weight_packed"),
            Quantization::Integers { packed: false, .. } => stored_as("weight", Number::I8),
        };
        if !is_stored {
            return Ok(None);
        }
        match *quantization {
            Quantization::Fp8 { block } => self.fp8(block),
            Quantization::Awq { group } => self.awq(group),
            Quantization::Gptq { bits, group, act_order, zero_offset, .. } => {
                self.gptq(bits, group, act_order, zero_offset)
            }
            Quantization::Integers { bits, packed, symmetric, group, act_order } => {
                self.integers(bits, packed, symmetric, group, act_order)
            }
        }
        .map(Some)
    }

    fn fp8(&mut self, block: Option<[usize; 2]>) -> Result<Converted, ModelError> {
        let (rows, columns) = (self.rows, self.columns);
        let codes = Codes::Floats(self.part("weight", &[Number::F8E4M3], &[&[rows, columns]])?);
        let name = match self.weights.contains(&format!("{}.weight_scale_inv", self.module)) {
            true => "weight_scale_inv",
            false => "weight_scale",
        };
        let (scales, group) = match block {
            Some([block_rows, block_columns]) => {
                let groups = columns.div_ceil(block_columns);
                let shape = [rows.div_ceil(block_rows), groups];
                let part = self.part(name, &FLOATS, &[&shape])?;
                let scales =
                    Scales { part, row_block: block_rows, row_stride: groups, group_stride: 1 };
                (scales, block_columns)
            }
            None => (self.row_scales(name, 1)?, columns),
        };
        // Products of floats and scales have more digits than BF16, but the floats themselves have
        // fewer.
        Ok(self.converted("FP8", codes, scales, Zeros::Constant(0), group, TensorType::Bf16))
    }

    fn awq(&mut self, group: Option<usize>) -> Result<Converted, ModelError> {
        let (rows, columns) = (self.rows, self.columns);
        let group = group.unwrap_or(columns);
        let groups = columns.div_ceil(group);
        if !rows.is_multiple_of(8) {
            return Err(self.not_whole("rows", rows, 8));
        }
        let words = self.part("qweight", &[Number::I32], &[&[columns, rows / 8]])?;
        let zeros = self.part("qzeros", &[Number::I32], &[&[groups, rows / 8]])?;
        let scales = self.column_scales(groups)?;
        let zeros = Zeros::Awq { words: zeros };
        let target = self.target(4, group, &zeros);
        Ok(self.converted("AWQ 4-bit", Codes::Awq { words }, scales, zeros, group, target))
    }

    fn gptq(
        &mut self,
        bits: usize,
        group: Option<usize>,
        act_order: bool,
        offset: i32,
    ) -> Result<Converted, ModelError> {
        let (rows, columns) = (self.rows, self.columns);
        let group = group.unwrap_or(columns);
        let groups = columns.div_ceil(group);
        let per_word = 32 / bits;
        for (what, count) in [("rows", rows), ("columns", columns)] {
            if !count.is_multiple_of(per_word) {
                return Err(self.not_whole(what, count, per_word));
            }
        }
        let words = self.part("qweight", &[Number::I32], &[&[columns / per_word, rows]])?;
        let zeros = self.part("qzeros", &[Number::I32], &[&[groups, rows / per_word]])?;
        let scales = self.column_scales(groups)?;
        let order = self.order("g_idx", act_order, group)?;
        let zeros = self.constant_zeros(Zeros::Columns { words: zeros, bits, offset });
        let target = if order.is_some() { WIDE } else { self.target(bits, group, &zeros) };
        let format = if bits == 4 { "GPTQ 4-bit" } else { "GPTQ 8-bit" };
        let codes = Codes::Columns { words, bits };
        let converted = self.converted(format, codes, scales, zeros, group, target);
        Ok(Converted { order, ..converted })
    }

    fn integers(
        &mut self,
        bits: usize,
        packed: bool,
        symmetric: bool,
        group: Option<usize>,
        act_order: bool,
    ) -> Result<Converted, ModelError> {
        let (rows, columns) = (self.rows, self.columns);
        let group = group.unwrap_or(columns);
        let groups = columns.div_ceil(group);
        let per_word = 32 / bits;
        let codes = match packed {
            true => {
                let shape = [rows, columns.div_ceil(per_word)];
                let words = self.part("weight_packed", &[Number::I32], &[&shape])?;
                // This part is not needed, because the configuration has the shape of the matrix.
                self.ignore("weight_shape");
                Codes::Rows { words, bits }
            }
            false => Codes::Bytes(self.part("weight", &[Number::I8], &[&[rows, columns]])?),
        };
        let scales = self.row_scales("weight_scale", groups)?;
        let zeros = match (symmetric, packed) {
            (true, true) => Zeros::Constant(1 << (bits - 1)),
            (true, false) => Zeros::Constant(0),
            (false, true) => {
                let shape = [rows.div_ceil(per_word), groups];
                let words = self.part("weight_zero_point", &[Number::I32], &[&shape])?;
                Zeros::Rows { words, bits }
            }
            (false, false) => {
                let shape = [rows, groups];
                Zeros::Bytes(self.part("weight_zero_point", &[Number::I8], &[&shape])?)
            }
        };
        if symmetric {
            self.ignore("weight_zero_point");
        }
        let order = self.order("weight_g_idx", act_order, group)?;
        let target = if order.is_some() { WIDE } else { self.target(bits, group, &zeros) };
        let format = if bits == 4 { "INT4" } else { "INT8" };
        let converted = self.converted(format, codes, scales, zeros, group, target);
        Ok(Converted { order, ..converted })
    }

    /// The type of rows of codes with `bits` bits in groups of `group` columns. It represents the
    /// values exactly if the columns fill whole blocks of such a type and no block has columns of
    /// two groups.
    fn target(&self, bits: usize, group: usize, zeros: &Zeros) -> TensorType {
        let fits = |dtype: TensorType| {
            let block = dtype.block_len();
            let whole_groups = group.is_multiple_of(block) || group >= self.columns;
            self.columns.is_multiple_of(block) && whole_groups
        };
        let exact: &[TensorType] = match (bits, zeros) {
            (4, _) => &[TensorType::U4Group128, TensorType::U4Group32],
            // With other zero points, the differences would need more than eight bits.
            (_, Zeros::Constant(_)) => &[TensorType::I8Group32],
            _ => &[],
        };
        exact.iter().copied().find(|dtype| fits(*dtype)).unwrap_or(WIDE)
    }

    /// Converts the zero points of GPTQ to a constant, if they are the ones of signed bytes.
    fn constant_zeros(&self, zeros: Zeros) -> Zeros {
        const SIGNED: i32 = 128;
        let Zeros::Columns { words, bits: 8, offset } = &zeros else { return zeros };
        let bytes = self.weights.part(words).unwrap_or_default();
        let constant = bytes.iter().all(|zero| i32::from(*zero) + offset == SIGNED);
        if constant { Zeros::Constant(SIGNED) } else { zeros }
    }

    fn converted(
        &self,
        format: &'static str,
        codes: Codes,
        scales: Scales,
        zeros: Zeros,
        group: usize,
        target: TensorType,
    ) -> Converted {
        Converted {
            module: self.module.to_owned(),
            stored_rows: self.rows,
            rows: 0..self.rows,
            columns: self.columns,
            codes,
            scales,
            zeros,
            group,
            order: None,
            target,
            format,
            bytes: self.bytes,
        }
    }

    /// Finds scales with the shape `[groups, rows]`.
    fn column_scales(&mut self, groups: usize) -> Result<Scales, ModelError> {
        let part = self.part("scales", &FLOATS, &[&[groups, self.rows]])?;
        Ok(Scales { part, row_block: 1, row_stride: 1, group_stride: self.rows })
    }

    /// Finds scales with the shape `[rows, groups]`. If there is a single group, they may also be
    /// `[rows]`, or a single number for the whole matrix.
    fn row_scales(&mut self, name: &str, groups: usize) -> Result<Scales, ModelError> {
        let rows = self.rows;
        let whole: [&[usize]; 2] = [&[rows, groups], &[rows]];
        let all: [&[usize]; 5] = [&[rows, 1], &[rows], &[1], &[], &[1, 1]];
        let shapes: &[&[usize]] = if groups == 1 { &all } else { &whole[..1] };
        let part = self.part(name, &FLOATS, shapes)?;
        let one = part.range.len() == part.number.bytes();
        let (row_block, row_stride) = if one { (rows, 0) } else { (1, groups) };
        Ok(Scales { part, row_block, row_stride, group_stride: 1 })
    }

    /// Finds the part `name`, which must have one of the types and one of the shapes.
    fn part(
        &mut self,
        name: &str,
        numbers: &[Number],
        shapes: &[&[usize]],
    ) -> Result<Part, ModelError> {
        let name = format!("{}.{name}", self.module);
        let first = shapes.first().copied().unwrap_or_default();
        let stored = self.weights.stored(&name, first)?;
        let file = &self.weights.regions[stored.region].file;
        let dtype = match &stored.dtype {
            Ok(dtype) => dtype.name(),
            Err(other) => other,
        };
        let Some(number) = numbers.iter().copied().find(|number| number.name() == dtype) else {
            let names: Vec<_> = numbers.iter().map(|number| number.name()).collect();
            return Err(ModelError::WrongType {
                file: file.clone(),
                tensor: name,
                expected: names.join(", "),
                got: dtype.to_owned(),
            });
        };
        if !shapes.contains(&stored.shape.as_slice()) {
            return Err(ModelError::WrongShape {
                file: file.clone(),
                tensor: name,
                expected: first.to_vec(),
                got: stored.shape.clone(),
            });
        }
        let bytes = stored.shape.iter().product::<usize>().saturating_mul(number.bytes());
        if stored.range.len() != bytes {
            let got = stored.range.len();
            let reason = format!("tensor `{name}`: expected {bytes} bytes, got {got}");
            return Err(ModelError::malformed(file, reason));
        }
        self.names.push(name);
        self.bytes += bytes as u64;
        Ok(Part { region: stored.region, range: stored.range.clone(), number })
    }

    /// Takes a part that contains no additional information, if it exists.
    fn ignore(&mut self, name: &str) {
        let name = format!("{}.{name}", self.module);
        if self.weights.contains(&name) {
            self.names.push(name);
        }
    }

    /// Reads the groups of the columns, if they are not in order. This is done here, because the
    /// groups determine the type in memory.
    fn order(
        &mut self,
        name: &str,
        act_order: bool,
        group: usize,
    ) -> Result<Option<Part>, ModelError> {
        if !act_order {
            self.ignore(name);
            return Ok(None);
        }
        let part = self.part(name, &[Number::I32], &[&[self.columns]])?;
        let groups = self.columns.div_ceil(group);
        let Some(bytes) = self.weights.part(&part) else { return Ok(None) };
        let mut in_order = true;
        for (column, word) in bytes.as_chunks::<4>().0.iter().enumerate() {
            let got = i32::from_le_bytes(*word);
            if usize::try_from(got).map_or(true, |got| got >= groups) {
                let file = &self.weights.regions[part.region].file;
                let tensor = format!("tensor `{}.{name}`", self.module);
                let reason =
                    format!("{tensor}: expected groups from 0 to {}, got {got}", groups - 1);
                return Err(ModelError::malformed(file, reason));
            }
            in_order &= got as usize == column / group;
        }
        Ok((!in_order).then_some(part))
    }

    fn not_whole(&self, what: &str, got: usize, step: usize) -> ModelError {
        let reason =
            format!("matrix `{}`: expected a multiple of {step} {what}, got {got}", self.module);
        ModelError::malformed(&self.weights.origin, reason)
    }
}
