//! Crafted checkpoints in quantized formats. They are made from the fixtures of the parity tests.

use std::collections::BTreeMap;

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};

use super::{MEMORY_MAX, run_within};
use crate::support::model_dir::write_json;

const FORMATS: [&str; 5] = ["fp8_block", "awq", "gptq4_act_order", "int8", "int4_zero_points"];
const MODULE: &str = "model.layers.0.mlp.down_proj";

/// The content of a model directory.
#[derive(Clone)]
struct Checkpoint {
    config: Value,
    tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
}

impl Checkpoint {
    fn of(format: &str) -> Self {
        let directory = stolon_fixtures::path("quantized").join(format);
        let config = std::fs::read(directory.join("config.json")).unwrap();
        let file = std::fs::read(directory.join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&file).unwrap();
        let tensors = file.tensors().into_iter().map(|(name, view)| {
            (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
        });
        let tensors = tensors.collect();
        Self { config: serde_json::from_slice(&config).unwrap(), tensors }
    }

    /// The names of the parts of one matrix that are necessary.
    fn parts(&self) -> Vec<String> {
        let names = self.tensors.keys().filter(|name| name.starts_with(MODULE));
        names.filter(|name| !name.ends_with("weight_shape")).cloned().collect()
    }

    fn run(&self) -> Result<(), String> {
        let dir = tempfile::tempdir().unwrap();
        write_json(dir.path(), "config.json", &self.config);
        let views = self.tensors.iter().map(|(name, (dtype, shape, bytes))| {
            (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        let file = safetensors::serialize(views, None).unwrap();
        std::fs::write(dir.path().join("model.safetensors"), file).unwrap();
        match run_within(dir.path(), MEMORY_MAX) {
            // The tokenizer is the last thing that is needed, and the fixtures have none.
            Err(error) if error.contains("expected tokenizer.json") => Ok(()),
            result => result,
        }
    }

    fn refused(&self, what: &str, expected: &str) {
        let error = self.run().expect_err(what);
        assert!(error.contains(expected), "{what}: `{error}` lacks `{expected}`");
    }
}

/// Goal: a part that is missing, or has the wrong type or shape, is an error that names it.
#[test]
fn wrong_parts_are_refused() {
    for format in FORMATS {
        let whole = Checkpoint::of(format);
        whole.run().unwrap();
        for name in whole.parts() {
            let mut missing = whole.clone();
            missing.tensors.remove(&name);
            // Without its codes, a matrix is not recognized as quantized.
            let error = missing.run().expect_err(&name);
            assert!(error.contains(MODULE) && error.contains("missing tensor"), "{name}: {error}");

            let mut flat = whole.clone();
            let (_, shape, _) = flat.tensors.get_mut(&name).unwrap();
            shape.insert(0, 1);
            flat.refused(&format!("{format} {name}"), "expected shape");

            let mut other = whole.clone();
            let (dtype, _, bytes) = other.tensors.get_mut(&name).unwrap();
            (*dtype, *bytes) = match dtype.bitsize() {
                8 => (Dtype::U8, bytes.clone()),
                16 => (Dtype::I16, bytes.clone()),
                _ => (Dtype::U32, bytes.clone()),
            };
            other.refused(&format!("{format} {name}"), &name);
        }
    }
}

/// Goal: group and block sizes that do not fit the scales are refused, whatever they are.
#[test]
fn wrong_sizes_of_groups_are_refused() {
    for size in [1, 7, 31, 1 << 20, 1 << 30] {
        for (format, part) in [("awq", "qzeros"), ("gptq4_act_order", "qzeros")] {
            let mut checkpoint = Checkpoint::of(format);
            checkpoint.config["quantization_config"]["group_size"] = json!(size);
            checkpoint.refused(&format!("{format} {size}"), part);
        }
        let mut checkpoint = Checkpoint::of("int4_zero_points");
        let groups = &mut checkpoint.config["quantization_config"]["config_groups"];
        groups["group_0"]["weights"]["group_size"] = json!(size);
        checkpoint.refused(&format!("int4 {size}"), "expected shape");
        let mut checkpoint = Checkpoint::of("fp8_block");
        checkpoint.config["quantization_config"]["weight_block_size"] = json!([size, 32]);
        let expected = if size > 65_536 { "two numbers" } else { "weight_scale_inv" };
        checkpoint.refused(&format!("fp8 {size}"), expected);
    }
    let mut checkpoint = Checkpoint::of("gptq4_act_order");
    checkpoint.config["quantization_config"]["bits"] = json!(8);
    checkpoint.refused("bits", "qweight");
    let mut checkpoint = Checkpoint::of("awq");
    checkpoint.config["num_key_value_heads"] = json!(2);
    checkpoint.refused("another model", "qweight");
}

/// Goal: columns in groups that do not exist are refused before anything is read by them.
#[test]
fn columns_of_other_groups_are_refused() {
    let name = format!("{MODULE}.g_idx");
    for (column, group) in [(0, -1), (127, 4), (64, i32::MAX), (5, i32::MIN)] {
        let mut checkpoint = Checkpoint::of("gptq4_act_order");
        let (_, _, bytes) = checkpoint.tensors.get_mut(&name).unwrap();
        bytes[4 * column..][..4].copy_from_slice(&group.to_le_bytes());
        let expected = format!("`{name}`: expected groups from 0 to 3, got {group}");
        checkpoint.refused("g_idx", &expected);
        // Without the activation order, adjacent columns are a group.
        checkpoint.config["quantization_config"]["desc_act"] = json!(false);
        checkpoint.run().unwrap();
    }
}

/// Goal: scales that are not finite are refused with their place.
#[test]
fn scales_that_are_not_finite_are_refused() {
    for format in FORMATS {
        let whole = Checkpoint::of(format);
        let name = whole.parts().into_iter().find(|name| name.contains("scale")).unwrap();
        for number in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut checkpoint = whole.clone();
            let (dtype, _, bytes) = checkpoint.tensors.get_mut(&name).unwrap();
            let number = match dtype {
                Dtype::F16 => half::f16::from_f32(number).to_le_bytes().to_vec(),
                Dtype::BF16 => half::bf16::from_f32(number).to_le_bytes().to_vec(),
                _ => number.to_le_bytes().to_vec(),
            };
            let end = bytes.len();
            bytes[end - number.len()..].copy_from_slice(&number);
            checkpoint.refused(&format!("{format} {name}"), "expected a finite number, got ");
            checkpoint.refused(&format!("{format} {name}"), MODULE);
        }
    }
}
