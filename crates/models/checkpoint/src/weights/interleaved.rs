//! Tensors that combine all experts of a layer. They are divided into one tensor per expert and
//! projection.
//!
//! Without biases (Qwen3.5-MoE), `gate_up_proj` is `[experts, 2 * width, hidden]`, with the rows of
//! gate first, and `down_proj` is `[experts, hidden, width]`, so each new tensor is a range of
//! bytes. Each expert may also be transposed (Qwen3-VL with experts), which follows from the shapes
//! of both tensors. With biases (gpt-oss), the rows of gate and up are interleaved. They are
//! brought into the usual order when a tensor is read:
//!
//! | tensor | shape |
//! |---|---|
//! | `gate_up_proj` | `[experts, hidden, 2 * width]` floats |
//! | `down_proj` | `[experts, width, hidden]` floats |
//! | `gate_up_proj_bias` | `[experts, 2 * width]` floats |
//! | `down_proj_bias` | `[experts, hidden]` floats |
//! | `gate_up_proj_blocks` | `[experts, 2 * width, hidden / 32, 16]` bytes |
//! | `down_proj_blocks` | `[experts, hidden, width / 32, 16]` bytes |
//! | `gate_up_proj_scales`, `down_proj_scales` | as the blocks, without the last dimension |
//!
//! Blocks and scales are MXFP4. A byte of a block has two successive weights, the first in its low
//! bits. In ggml's [`TensorType::Mxfp4`], the scale comes before its block, and a byte has two
//! weights at a distance of 16.

use std::ops::Range;

use super::{Stored, TensorType, Weights};
use crate::config::TensorSpec;
use crate::error::ModelError;

/// Maximum number of experts of a tensor.
const EXPERTS_MAX: usize = 1024;
/// Number of weights of an MXFP4 block.
const BLOCK_LEN: usize = 32;
/// Number of bytes of the weights of an MXFP4 block.
const BLOCK_BYTES: usize = BLOCK_LEN / 2;

/// The place of a tensor within a tensor that combines all experts, or within a transposed matrix.
/// The tensor's range has all rows of its expert.
#[derive(Clone, Debug)]
pub(super) struct Interleaved {
    /// The first row of the expert that belongs to the tensor.
    pub(super) first: usize,
    /// The distance between successive rows that belong to it; 2 if gate and up are interleaved.
    step: usize,
    /// Number of tensors among which the rows of the expert are divided.
    parts: usize,
    form: Form,
}

/// How the rows of an expert are stored.
#[derive(Clone, Debug)]
enum Form {
    /// `[rows, columns]`.
    Rows,
    /// `[columns, rows]`.
    Columns,
    /// MXFP4 blocks, `[rows, columns / 32, 16]`. The scales are `[rows, columns / 32]` bytes in a
    /// range of another region.
    Mxfp4 { region: usize, scales: Range<usize> },
}

impl Interleaved {
    /// A matrix that is stored separately, but transposed.
    pub(super) const TRANSPOSED: Self = Self { first: 0, step: 1, parts: 1, form: Form::Columns };

    /// Size of the stored tensor in bytes. `expert` is the size of all rows of the expert, without
    /// scales.
    pub(super) fn byte_len(&self, expert: usize) -> usize {
        let scales = match &self.form {
            Form::Mxfp4 { scales, .. } => scales.len(),
            Form::Rows | Form::Columns => 0,
        };
        (expert + scales) / self.parts
    }

    /// The bytes of a tensor with `rows` rows whose elements have `width` bytes. `expert` is the
    /// content of the tensor's range. `None` if the bytes of the scales are not known.
    pub(super) fn read(
        &self,
        weights: &Weights,
        expert: &[u8],
        rows: usize,
        width: usize,
    ) -> Option<Vec<u8>> {
        let all_rows = rows * self.parts;
        let row_bytes = expert.len() / all_rows;
        let mut bytes = Vec::with_capacity(rows * row_bytes);
        let own_rows = (self.first..all_rows).step_by(self.step).take(rows);
        let row = |row: usize| &expert[row * row_bytes..][..row_bytes];
        match &self.form {
            Form::Rows => own_rows.for_each(|index| bytes.extend_from_slice(row(index))),
            Form::Columns => {
                for index in own_rows {
                    for column in expert.chunks_exact(all_rows * width) {
                        bytes.extend_from_slice(&column[index * width..][..width]);
                    }
                }
            }
            Form::Mxfp4 { region, scales } => {
                let scales = weights.regions[*region].bytes.get(scales.clone())?;
                let row_blocks = row_bytes / BLOCK_BYTES;
                for index in own_rows {
                    let scales = &scales[index * row_blocks..][..row_blocks];
                    for (block, scale) in row(index).as_chunks().0.iter().zip(scales) {
                        bytes.push(*scale);
                        bytes.extend_from_slice(&ggml_order(block));
                    }
                }
            }
        }
        Some(bytes)
    }
}

/// Reorders the 32 weights of a block to ggml's order, in which byte `i` has the weights `i` and `i
/// + 16` instead of `2 i` and `2 i + 1`.
fn ggml_order(block: &[u8; BLOCK_BYTES]) -> [u8; BLOCK_BYTES] {
    let weight = |index: usize| block[index / 2] >> (4 * (index % 2)) & 15;
    std::array::from_fn(|index| weight(index) | weight(index + BLOCK_BYTES) << 4)
}

impl Weights {
    /// Divides a tensor that has the matrices of all experts one after the other, as `[experts * rows,
    /// columns]` or `[experts, rows, columns]`, into `experts`, matrices of one shape. With
    /// `is_transposed`, each is stored as `[columns, rows]`.
    ///
    /// # Errors
    /// [`ModelError::WrongShape`].
    pub(crate) fn divide_experts(
        &mut self,
        name: &str,
        experts: Vec<TensorSpec>,
        is_transposed: bool,
    ) -> Result<(), ModelError> {
        let (Some(found), Some(first)) = (self.tensors.get(name), experts.first()) else {
            return Ok(());
        };
        let (count, mut shape) = (experts.len(), first.shape.clone());
        if is_transposed {
            shape.reverse();
        }
        match found.shape.len() {
            3 => shape.insert(0, count),
            _ => shape[0] *= count,
        }
        let Some(stored) = self.take_whole(name, shape)? else { return Ok(()) };
        let (start, len) = (stored.range.start, stored.range.len() / count);
        for (index, TensorSpec { name, shape, role: _ }) in experts.into_iter().enumerate() {
            let range = start + index * len..start + (index + 1) * len;
            let interleaved = is_transposed.then_some(Interleaved::TRANSPOSED);
            self.insert(name, Stored { shape, range, interleaved, ..stored.clone() })?;
        }
        Ok(())
    }
}

/// Replaces tensors that combine all experts in `weights` with tensors of each expert and
/// projection.
///
/// # Errors
/// [`ModelError::Malformed`] for a tensor of another shape, and [`ModelError::MissingTensor`] for
/// blocks without scales.
pub(super) fn divide(weights: &mut Weights) -> Result<(), ModelError> {
    let of_experts = |name: &&String| {
        let (_, last) = name.rsplit_once(".experts.").unwrap_or_default();
        let last = last.strip_suffix("_bias").or(last.strip_suffix("_blocks")).unwrap_or(last);
        matches!(last, "gate_up_proj" | "down_proj")
    };
    let mut names: Vec<String> = weights.tensors.keys().filter(of_experts).cloned().collect();
    names.sort_unstable();
    let module = |name: &String| name.rsplit_once('.').map(|(module, _)| module.to_owned());
    let mut transposed: Vec<String> = names.iter().filter_map(module).collect();
    transposed.dedup();
    transposed.retain(|module| is_transposed(weights, module));
    for name in names {
        if let Some(stored) = weights.tensors.remove(&name) {
            let is_transposed = module(&name).is_some_and(|module| transposed.contains(&module));
            divide_one(weights, &name, stored, is_transposed)?;
        }
    }
    Ok(())
}

/// Whether the experts of a module without biases are transposed.
fn is_transposed(weights: &Weights, module: &str) -> bool {
    let shape = |name: &str| weights.tensors.get(&format!("{module}.{name}")).map(|t| &*t.shape);
    match (shape("gate_up_proj"), shape("down_proj")) {
        (Some(&[_, hidden, both]), Some(&[_, width, same])) => {
            hidden == same && Some(both) == width.checked_mul(2)
        }
        _ => false,
    }
}

fn divide_one(
    weights: &mut Weights,
    name: &str,
    mut stored: Stored,
    is_transposed: bool,
) -> Result<(), ModelError> {
    let file = weights.regions[stored.region].file.clone();
    let malformed = |expected: &str, got: &Stored| {
        let reason = format!("tensor `{name}`: expected {expected}, got {:?}", got.shape);
        ModelError::malformed(&file, format!("{reason} in {} bytes", got.range.len()))
    };
    let (module, last) = name.rsplit_once('.').unwrap_or_default();
    let projections: &[&str] =
        if last.starts_with("gate_up_proj") { &["gate_proj", "up_proj"] } else { &["down_proj"] };
    let parts = projections.len();
    let has_biases = last.contains("proj_") || weights.contains(&format!("{name}_bias"));
    if !has_biases && !is_transposed {
        return divide_rows(weights, module, projections, &stored)
            .unwrap_or_else(|| Err(malformed(&expected_experts(parts), &stored)));
    }
    let mut scales = None;
    // The number of experts, of rows, and of columns unless the tensor is a bias.
    let (count, rows, columns) = match *stored.shape.as_slice() {
        [count, rows] if last.ends_with("_bias") => (count, rows, None),
        [count, rows, groups, BLOCK_BYTES] if last.ends_with("_blocks") => {
            let scales_name = name.replace("_blocks", "_scales");
            let found = take_scales(weights, &file, scales_name, vec![count, rows, groups])?;
            let Some(found) = found.filter(|(_, range)| {
                range.len().checked_mul(BLOCK_BYTES) == Some(stored.range.len())
            }) else {
                return Err(malformed("bytes, 16 for each byte of scales", &stored));
            };
            stored.dtype = Ok(TensorType::Mxfp4);
            scales = Some(found);
            (count, rows, groups.checked_mul(BLOCK_LEN))
        }
        [count, columns, rows] if !last.contains("proj_") => (count, rows, Some(columns)),
        _ => (0, 0, None),
    };
    if !(1..=EXPERTS_MAX).contains(&count)
        || !rows.is_multiple_of(parts)
        || stored.range.len() < count
    {
        return Err(malformed(&expected_experts(parts), &stored));
    }
    let kind = if columns.is_some() { "weight" } else { "bias" };
    let part = |range: &Range<usize>, index: usize| {
        let len = range.len() / count;
        range.start + index * len..range.start + (index + 1) * len
    };
    for index in 0..count {
        for (number, projection) in projections.iter().enumerate() {
            let (first, step) =
                if has_biases { (number, parts) } else { (number * (rows / parts), 1) };
            let form = match &scales {
                Some((region, scales)) => {
                    Form::Mxfp4 { region: *region, scales: part(scales, index) }
                }
                None if columns.is_some() => Form::Columns,
                None => Form::Rows,
            };
            let stored = Stored {
                shape: [rows / parts].into_iter().chain(columns).collect(),
                range: part(&stored.range, index),
                interleaved: Some(Interleaved { first, step, parts, form }),
                ..stored.clone()
            };
            weights.insert(format!("{module}.{index}.{projection}.{kind}"), stored)?;
        }
    }
    Ok(())
}

/// Removes the scales of MXFP4, which have one byte each, and returns their region and range;
/// `None` if they do not have the shape `expected`.
fn take_scales(
    weights: &mut Weights,
    file: &str,
    tensor: String,
    expected: Vec<usize>,
) -> Result<Option<(usize, Range<usize>)>, ModelError> {
    let Some(found) = weights.tensors.remove(&tensor) else {
        return Err(ModelError::MissingTensor { file: file.to_owned(), tensor, expected });
    };
    let count = expected.iter().try_fold(1_usize, |n, d| n.checked_mul(*d));
    let is_valid = found.shape == expected && Some(found.range.len()) == count;
    Ok(is_valid.then_some((found.region, found.range)))
}

/// The expected shape of a tensor that combines all experts, for messages.
fn expected_experts(parts: usize) -> String {
    format!("1 to {EXPERTS_MAX} experts with a multiple of {parts} rows")
}

/// Divides a tensor `[experts, rows of all projections, columns]`; `None` if it has another shape.
fn divide_rows(
    weights: &mut Weights,
    module: &str,
    projections: &[&str],
    stored: &Stored,
) -> Option<Result<(), ModelError>> {
    let [count, all_rows, columns] = *stored.shape.as_slice() else { return None };
    let parts = count.checked_mul(projections.len())?;
    if !(1..=EXPERTS_MAX).contains(&count)
        || !all_rows.is_multiple_of(projections.len())
        || stored.range.len() < parts
        || !stored.range.len().is_multiple_of(parts)
    {
        return None;
    }
    let (rows, len) = (all_rows / projections.len(), stored.range.len() / parts);
    for part in 0..parts {
        let (index, projection) = (part / projections.len(), projections[part % projections.len()]);
        let start = stored.range.start + part * len;
        let stored =
            Stored { shape: vec![rows, columns], range: start..start + len, ..stored.clone() };
        let name = format!("{module}.{index}.{projection}.weight");
        if let Err(error) = weights.insert(name, stored) {
            return Some(Err(error));
        }
    }
    Some(Ok(()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::TensorRole;
    use crate::weights::Tensor;

    fn weights(tensors: Vec<(&str, Vec<usize>, Vec<f32>)>) -> Result<Weights, ModelError> {
        let tensors = tensors.into_iter().map(|(name, shape, values)| Tensor {
            name: format!("m.experts.{name}"),
            dtype: TensorType::F32,
            shape,
            bytes: values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>().into(),
        });
        let mut weights = Weights::from_tensors("f", tensors)?;
        divide(&mut weights)?;
        Ok(weights)
    }

    fn numbers(count: u16) -> Vec<f32> {
        (0..count).map(f32::from).collect()
    }

    fn floats(weights: &Weights, name: &str, shape: &[usize]) -> Vec<f32> {
        let tensor = weights.tensor(&format!("m.experts.{name}"), shape).unwrap();
        tensor.bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    /// Goal: the rows of gate and up are separated, columns become rows, and biases are divided.
    #[test]
    fn rows_are_brought_into_the_usual_order() {
        let weights = weights(vec![
            ("gate_up_proj", vec![2, 3, 4], numbers(24)),
            ("gate_up_proj_bias", vec![2, 4], numbers(8)),
            ("down_proj", vec![2, 2, 3], numbers(12)),
            ("down_proj_bias", vec![2, 3], numbers(6)),
        ])
        .unwrap();
        let gate = floats(&weights, "1.gate_proj.weight", &[2, 3]);
        assert_eq!(gate, [12.0, 16.0, 20.0, 14.0, 18.0, 22.0]);
        let up = floats(&weights, "0.up_proj.weight", &[2, 3]);
        assert_eq!(up, [1.0, 5.0, 9.0, 3.0, 7.0, 11.0]);
        assert_eq!(floats(&weights, "1.up_proj.bias", &[2]), [5.0, 7.0]);
        let down = floats(&weights, "1.down_proj.weight", &[3, 2]);
        assert_eq!(down, [6.0, 9.0, 7.0, 10.0, 8.0, 11.0]);
        assert_eq!(weights.total_bytes(), 4 * (24 + 8 + 12 + 6));
        assert!(weights.check_disjoint().is_ok());
    }

    /// Goal: without biases, the rows of gate are followed by the rows of up, and transposed experts
    /// are read as rows.
    #[test]
    fn experts_without_biases_are_divided() {
        for (shapes, gate, up, down) in [
            (
                [[2, 4, 3], [2, 3, 2]],
                [12.0, 13.0, 14.0, 15.0, 16.0, 17.0],
                [6.0, 7.0, 8.0, 9.0, 10.0, 11.0],
                [6.0, 7.0, 8.0, 9.0, 10.0, 11.0],
            ),
            (
                [[2, 3, 4], [2, 2, 3]],
                [12.0, 16.0, 20.0, 13.0, 17.0, 21.0],
                [2.0, 6.0, 10.0, 3.0, 7.0, 11.0],
                [6.0, 9.0, 7.0, 10.0, 8.0, 11.0],
            ),
        ] {
            let [gate_up, down_proj] = shapes.map(Vec::from);
            let weights = weights(vec![
                ("gate_up_proj", gate_up, numbers(24)),
                ("down_proj", down_proj, numbers(12)),
            ]);
            let weights = weights.unwrap();
            assert_eq!(floats(&weights, "1.gate_proj.weight", &[2, 3]), gate);
            assert_eq!(floats(&weights, "0.up_proj.weight", &[2, 3]), up);
            assert_eq!(floats(&weights, "1.down_proj.weight", &[3, 2]), down);
            assert_eq!(weights.total_bytes(), 4 * (24 + 12));
            assert!(weights.check_disjoint().is_ok());
        }
    }

    /// Goal: the matrices of all experts, stacked in two dimensions or three, as they are or transposed,
    /// become those of each expert. Other shapes are refused.
    #[test]
    fn stacked_experts_are_divided() {
        let specs = |is_transposed: bool| -> Vec<TensorSpec> {
            let shape = if is_transposed { vec![3, 2] } else { vec![2, 3] };
            let name = |expert: usize| format!("m.experts.{expert}");
            let spec = |expert| TensorSpec {
                name: name(expert),
                shape: shape.clone(),
                role: TensorRole::Matrix,
            };
            (0..2).map(spec).collect()
        };
        for shape in [vec![4, 3], vec![2, 2, 3]] {
            for (is_transposed, second) in [
                (false, [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]),
                (true, [6.0, 9.0, 7.0, 10.0, 8.0, 11.0]),
            ] {
                let mut weights = weights(vec![("w", shape.clone(), numbers(12))]).unwrap();
                let specs = specs(is_transposed);
                let own = specs[1].shape.clone();
                weights.divide_experts("m.experts.w", specs, is_transposed).unwrap();
                assert_eq!(floats(&weights, "1", &own), second);
                assert!(weights.check_disjoint().is_ok());
            }
        }
        for shape in [vec![3, 4], vec![2, 3, 2], vec![12], vec![1, 4, 3]] {
            let mut weights = weights(vec![("w", shape, numbers(12))]).unwrap();
            let error = weights.divide_experts("m.experts.w", specs(false), false).unwrap_err();
            assert!(error.to_string().contains("`m.experts.w`"), "{error}");
        }
    }

    /// Goal: tensors of other shapes are refused, with their name.
    #[test]
    fn other_shapes_are_refused() {
        for (name, shape) in [
            ("gate_up_proj", vec![2, 3, 3]),
            ("gate_up_proj", vec![2, 6]),
            ("down_proj", vec![1025, 1, 1]),
            ("down_proj", vec![4, 1, 0]),
            ("down_proj_bias", vec![2, 2, 2]),
            ("down_proj_blocks", vec![1, 2, 1, 8]),
        ] {
            let values = vec![0.0; shape.iter().product()];
            let error = weights(vec![(name, shape, values)]).unwrap_err().to_string();
            assert!(error.contains(&format!("`m.experts.{name}`: expected")), "{error}");
        }
        let blocks = ("down_proj_blocks", vec![1, 2, 1, 16], vec![0.0; 32]);
        let error = weights(vec![blocks.clone()]).unwrap_err().to_string();
        assert!(error.contains("m.experts.down_proj_scales"), "{error}");
        let scales = ("down_proj_scales", vec![1, 2, 1], vec![0.0; 2]);
        let error = weights(vec![blocks, scales]).unwrap_err().to_string();
        assert!(error.contains("`m.experts.down_proj_blocks`: expected bytes"), "{error}");
    }
}
