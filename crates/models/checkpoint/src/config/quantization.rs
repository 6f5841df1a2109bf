//! Parses the key `quantization_config` of `config.json`, which says how the matrices of
//! safetensors files are quantized.
//!
//! Some formats also say how to round activations or the KV cache. This is ignored, because it is a
//! choice for speed, and results without it are closer to the results of the original model.

use regex::{Regex, RegexBuilder};
use serde_json::Value;

use super::keys::Keys;
use crate::error::{ModelError, quoted};

/// Maximum number of entries of `dynamic`.
const DYNAMIC_MAX: usize = 4096;
/// Maximum size in bytes of a compiled regular expression of `dynamic`.
const PATTERN_BYTES_MAX: usize = 1 << 18;

/// The supported values of `quant_method`.
const METHODS: &str = "fp8, awq, gptq, mxfp4 or compressed-tensors (other models: as a GGUF file)";

/// How the matrices of a model are quantized.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Quantization {
    /// 8-bit floats (E4M3).
    Fp8 {
        /// Numbers of rows and columns that share a scale. With `None`, each row or the whole
        /// matrix has one.
        block: Option<[usize; 2]>,
    },
    /// AWQ: unsigned 4-bit integers, packed along the rows, with scales and zero points.
    Awq {
        /// Number of columns that share a scale; `None` for all.
        group: Option<usize>,
    },
    /// GPTQ: unsigned integers, packed along the columns, with scales and zero points.
    Gptq {
        /// Number of bits, 4 or 8.
        bits: usize,
        /// Number of columns that share a scale; `None` for all.
        group: Option<usize>,
        /// Whether the groups consist of arbitrary columns.
        act_order: bool,
        /// Added to the zero points in the file: 1, or 0 in version 2 of the format.
        zero_offset: i32,
        /// The differences of some modules (`dynamic`). The first entry that matches is used.
        modules: Vec<GptqModules>,
    },
    /// compressed-tensors with signed integers.
    Integers {
        /// Number of bits, 4 or 8.
        bits: usize,
        /// Whether several integers are packed in a word. Otherwise each is a byte.
        packed: bool,
        /// Whether there are no zero points.
        symmetric: bool,
        /// Number of columns that share a scale; `None` for all.
        group: Option<usize>,
        /// Whether the groups consist of arbitrary columns.
        act_order: bool,
    },
}

/// Modules of a GPTQ model that are quantized in another way.
#[derive(Clone, Debug)]
pub(crate) struct GptqModules {
    /// Matches the beginning of a module's name.
    pattern: Regex,
    bits: Option<usize>,
    /// The outer `None` means that the group is the same as in other modules.
    group: Option<Option<usize>>,
    act_order: Option<bool>,
}

impl PartialEq for GptqModules {
    fn eq(&self, other: &Self) -> bool {
        let members = |this: &Self| (this.bits, this.group, this.act_order);
        self.pattern.as_str() == other.pattern.as_str() && members(self) == members(other)
    }
}

impl Eq for GptqModules {}

impl Quantization {
    /// The quantization of one module.
    pub(crate) fn of_module(&self, module: &str) -> Self {
        let Self::Gptq { bits, group, act_order, zero_offset, modules } = self else {
            return self.clone();
        };
        let own = modules.iter().find(|own| own.pattern.is_match(module));
        Self::Gptq {
            bits: own.and_then(|own| own.bits).unwrap_or(*bits),
            group: own.and_then(|own| own.group).unwrap_or(*group),
            act_order: own.and_then(|own| own.act_order).unwrap_or(*act_order),
            zero_offset: *zero_offset,
            modules: Vec::new(),
        }
    }
}

/// Parses the quantization that `keys` describes, which is the outermost object or `text_config`.
pub(super) fn parse(keys: &Keys<'_>) -> Result<Option<Quantization>, ModelError> {
    let object = match keys.object("quantization_config")? {
        Some(object) => object,
        None => match keys.object("compression_config")? {
            Some(object) => object,
            None => return Ok(None),
        },
    };
    match object.text("quant_method")? {
        Some("fp8") => fp8(&object),
        Some("awq") => awq(&object),
        Some("gptq") => gptq(&object),
        Some("compressed-tensors") => compressed(&object),
        // This format is used by the experts of gpt-oss, whose tensors the loader of experts reads.
        Some("mxfp4") => return Ok(None),
        _ => Err(object.unsupported("quant_method", METHODS)),
    }
    .map(Some)
}

fn fp8(keys: &Keys<'_>) -> Result<Quantization, ModelError> {
    expect_text(keys, "fmt", &["e4m3"])?;
    Ok(Quantization::Fp8 { block: block(keys, "weight_block_size")? })
}

fn awq(keys: &Keys<'_>) -> Result<Quantization, ModelError> {
    expect_bits(keys, "bits", &[4])?;
    expect_text(keys, "version", &["gemm", "GEMM"])?;
    if keys.flag("zero_point")? == Some(false) {
        return Err(keys.unsupported("zero_point", "true"));
    }
    Ok(Quantization::Awq { group: group(keys, "group_size")? })
}

fn gptq(keys: &Keys<'_>) -> Result<Quantization, ModelError> {
    let bits = expect_bits(keys, "bits", &[4, 8])?;
    for key in ["checkpoint_format", "format"] {
        expect_text(keys, key, &["gptq", "gptq_v2"])?;
    }
    expect_text(keys, "pack_dtype", &["int32"])?;
    let format = keys.text("checkpoint_format")?.or(keys.text("format")?);
    Ok(Quantization::Gptq {
        bits,
        group: group(keys, "group_size")?,
        act_order: keys.flag("desc_act")?.unwrap_or(false),
        zero_offset: i32::from(format != Some("gptq_v2")),
        modules: dynamic(keys)?,
    })
}

/// The entries of `dynamic`, GPTQModel's key for modules that are quantized in another way. An
/// entry with the prefix `-:` names modules that are not quantized; its values have no meaning.
fn dynamic(keys: &Keys<'_>) -> Result<Vec<GptqModules>, ModelError> {
    let Some(object) = keys.object("dynamic")? else { return Ok(Vec::new()) };
    if object.names().count() > DYNAMIC_MAX {
        return Err(keys.invalid("dynamic", &format!("at most {DYNAMIC_MAX} entries")));
    }
    let entry = |name: &str| {
        let pattern = name.strip_prefix("-:").or(name.strip_prefix("+:")).unwrap_or(name);
        let compiled =
            RegexBuilder::new(&format!("^(?:{pattern})")).size_limit(PATTERN_BYTES_MAX).build();
        let pattern = compiled.map_err(|error| {
            object.unsupported(name, &quoted(&format!("a regular expression ({error})")))
        })?;
        let plain = GptqModules { pattern, bits: None, group: None, act_order: None };
        let Some(own) = object.object(name)?.filter(|_| !name.starts_with("-:")) else {
            return Ok(plain);
        };
        let group = own.given("group_size").then(|| group(&own, "group_size")).transpose()?;
        let bits = own.given("bits").then(|| expect_bits(&own, "bits", &[4, 8])).transpose()?;
        Ok(GptqModules { bits, group, act_order: own.flag("desc_act")?, ..plain })
    };
    object.names().map(entry).collect()
}

fn compressed(keys: &Keys<'_>) -> Result<Quantization, ModelError> {
    expect_text(keys, "quantization_status", &["compressed"])?;
    if let Some(sparsity) = keys.object("sparsity_config")? {
        expect_text(&sparsity, "format", &["dense"])?;
    }
    if keys.object("transform_config")?.is_some_and(|object| object.names().next().is_some()) {
        return Err(keys.unsupported("transform_config", "nothing"));
    }
    let Some(groups) = keys.object("config_groups")? else {
        return Err(keys.invalid("config_groups", "an object"));
    };
    let format = keys.text("format")?;
    let mut parsed: Option<Quantization> = None;
    for name in groups.names() {
        let Some(of_group) = groups.object(name)? else {
            return Err(groups.invalid(name, "an object"));
        };
        let quantization = compressed_group(keys, &of_group, format)?;
        if parsed.as_ref().is_some_and(|other| *other != quantization) {
            return Err(keys.unsupported("config_groups", "the same format for all layers"));
        }
        parsed = Some(quantization);
    }
    parsed.ok_or_else(|| keys.invalid("config_groups", "at least one group"))
}

/// Parses one group of layers. `format` is the format of the whole model.
fn compressed_group(
    keys: &Keys<'_>,
    group_keys: &Keys<'_>,
    format: Option<&str>,
) -> Result<Quantization, ModelError> {
    // A group can have another format than the model.
    let (owner, format) = match group_keys.text("format")? {
        Some(format) => (group_keys, Some(format)),
        None => (keys, format),
    };
    let Some(weights) = group_keys.object("weights")? else {
        return Err(group_keys.unsupported("weights", "quantized weights"));
    };
    let strategy = weights.text("strategy")?;
    let group_size = match strategy {
        Some("tensor" | "channel" | "block") => None,
        Some("group") | None => group(&weights, "group_size")?,
        _ => return Err(weights.unsupported("strategy", "tensor, channel, group or block")),
    };
    let float = match weights.text("type")? {
        Some("float") => true,
        Some("int") | None => false,
        _ => return Err(weights.unsupported("type", "int or float")),
    };
    match (format, float) {
        (Some("float-quantized" | "naive-quantized"), true) => {
            expect_bits(&weights, "num_bits", &[8])?;
            if group_size.is_some() {
                return Err(weights.unsupported("strategy", "tensor, channel or block"));
            }
            Ok(Quantization::Fp8 { block: block(&weights, "block_structure")? })
        }
        (Some("int-quantized" | "naive-quantized" | "pack-quantized"), false) => {
            let packed = format == Some("pack-quantized");
            let bits = expect_bits(&weights, "num_bits", if packed { &[4, 8] } else { &[8] })?;
            if strategy == Some("block") {
                return Err(weights.unsupported("strategy", "tensor, channel or group"));
            }
            Ok(Quantization::Integers {
                bits,
                packed,
                symmetric: weights.flag("symmetric")?.unwrap_or(true),
                group: group_size,
                act_order: weights.value("actorder").and_then(Value::as_str) == Some("group"),
            })
        }
        _ => Err(owner.unsupported(
            "format",
            "pack-quantized or int-quantized with integers, or float-quantized with floats",
        )),
    }
}

/// Returns an error unless `key` is missing or one of `supported`.
fn expect_text(keys: &Keys<'_>, key: &str, supported: &[&str]) -> Result<(), ModelError> {
    match keys.text(key)? {
        Some(text) if !supported.contains(&text) => {
            Err(keys.unsupported(key, &supported.join(" or ")))
        }
        _ => Ok(()),
    }
}

fn expect_bits(keys: &Keys<'_>, key: &str, supported: &[usize]) -> Result<usize, ModelError> {
    match keys.size(key)? {
        Some(bits) if supported.contains(&bits) => Ok(bits),
        _ => {
            let names: Vec<_> = supported.iter().map(usize::to_string).collect();
            Err(keys.unsupported(key, &names.join(" or ")))
        }
    }
}

/// The number of columns of a group; `None` for all columns, which are meant by a missing key, null
/// and -1.
fn group(keys: &Keys<'_>, key: &str) -> Result<Option<usize>, ModelError> {
    if keys.value(key).and_then(Value::as_i64) == Some(-1) {
        return Ok(None);
    }
    keys.size(key)
}

/// The numbers of rows and columns of a block, if the key is present.
fn block(keys: &Keys<'_>, key: &str) -> Result<Option<[usize; 2]>, ModelError> {
    let Some(value) = keys.value(key) else { return Ok(None) };
    let invalid = || keys.invalid(key, "two numbers from 1 to 65536");
    let sizes = value.as_array().map(Vec::as_slice);
    let size = |value: &Value| value.as_u64().filter(|n| (1..=65_536).contains(n));
    match sizes {
        Some([rows, columns]) => {
            let (rows, columns) =
                (size(rows).ok_or_else(invalid)?, size(columns).ok_or_else(invalid)?);
            Ok(Some([rows as usize, columns as usize]))
        }
        _ => Err(invalid()),
    }
}

#[cfg(test)]
mod tests;
