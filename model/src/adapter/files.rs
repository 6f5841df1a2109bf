//! Reads the files of an adapter: a directory with the files of PEFT, `adapter_config.json` and
//! `adapter_model.safetensors`, or a GGUF file.
//!
//! Files are read into memory before they are parsed. They are small, and operators overwrite them
//! in place, which would fault if they were mapped.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use super::peft::PeftSettings;
use super::sites::{HEAD, sites};
use super::{FIRST, RANK_MAX};
use crate::config::{self, Architecture, DecoderConfig, TensorSpec};
use crate::error::ModelError;
use crate::files;
use crate::gguf::{Header, Value, read};
use crate::mmap::Bytes;
use crate::weights::{Weights, safetensors};

/// The settings of an adapter in the format of PEFT.
const CONFIG: &str = "adapter_config.json";
/// The matrices of an adapter in the format of PEFT.
const WEIGHTS: &str = "adapter_model.safetensors";
/// The ending of the name of one of the model's own matrices, which is not used.
const BASE: &str = ".base_layer";
/// Prefix of the names of tensors in the format of PEFT.
const PREFIX: &str = "base_model.model.";

/// The content of an adapter's files.
#[derive(Debug)]
pub(super) struct AdapterFiles {
    /// The file with the matrices, used in errors.
    file: String,
    /// The matrices `B`, with the names of the model's matrices, and `A`, with these names and
    /// [`FIRST`].
    weights: Weights,
    /// For each matrix of the file that has an adapter the name of its module in the file.
    modules: HashMap<String, String>,
    scaling: Scaling,
    fingerprint: [u8; 32],
}

/// How the scale follows from the rank.
#[derive(Debug)]
enum Scaling {
    Peft(PeftSettings),
    /// `alpha / rank`, or 1 if `alpha` is 0.
    Gguf {
        alpha: f32,
    },
}

impl AdapterFiles {
    /// Reads the adapter at `path` for the model with the configuration `config`. Files of more
    /// than `bytes_max` bytes are not read.
    pub(super) fn open(
        path: &Path,
        config: &DecoderConfig,
        bytes_max: u64,
    ) -> Result<Self, ModelError> {
        let is_gguf = path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf"));
        let mut files = match is_gguf {
            true => Self::open_gguf(path, config, bytes_max)?,
            false => Self::open_peft(path, config, bytes_max)?,
        };
        if files.modules.is_empty() {
            return Err(ModelError::malformed(files.file, "expected matrices, got none"));
        }
        files.weights.check_disjoint()?;
        let mut hasher = blake3::Hasher::new_derive_key("stolon 2026 weights of an adapter");
        hasher.update(&files.weights.hash(1));
        hasher.update(format!("{:?}", files.scaling).as_bytes());
        files.fingerprint = *hasher.finalize().as_bytes();
        files.weights.split_updates(config)?;
        Ok(files)
    }

    fn open_peft(path: &Path, config: &DecoderConfig, bytes_max: u64) -> Result<Self, ModelError> {
        let settings = path.join(CONFIG);
        let Some(value) = files::optional(files::read_json(&settings))? else {
            let expected = format!("{CONFIG} (the directory of an adapter), or a .gguf file");
            return Err(ModelError::MissingFile { directory: path.to_owned(), expected });
        };
        let settings = PeftSettings::parse(&settings.display().to_string(), &value)?;
        let weights_path = path.join(WEIGHTS);
        let Some(bytes) = files::optional(files::read(&weights_path, bytes_max))? else {
            let mut expected = WEIGHTS.to_owned();
            if path.join("adapter_model.bin").exists() {
                expected += " (adapter_model.bin is not supported: save it as safetensors)";
            }
            return Err(ModelError::MissingFile { directory: path.to_owned(), expected });
        };
        let file = weights_path.display().to_string();
        let mut names = Names::new(&file, config);
        let mut weights = Weights::empty(&file);
        safetensors::add_renamed(&mut weights, &file, Bytes::Owned(bytes), |name| {
            names.of_peft(name)
        })?;
        // PEFT saves the model's own output matrix, too, if there is an adapter of it.
        let base = format!("{HEAD}{BASE}");
        if weights.contains(&base) {
            weights.tensor(&base, &[config.vocab_size, config.hidden_size])?;
            weights.remove(&base);
        }
        if config.architecture.description().rotation.adjacent {
            weights.pair_adjacent_rows(config)?;
        }
        let modules = names.modules;
        let scaling = Scaling::Peft(settings);
        Ok(Self { file, weights, modules, scaling, fingerprint: [0; 32] })
    }

    fn open_gguf(path: &Path, config: &DecoderConfig, bytes_max: u64) -> Result<Self, ModelError> {
        let bytes = files::read(path, bytes_max)?;
        let file = path.display().to_string();
        let header = read(&file, &bytes)?;
        let architecture = check_gguf(&header, config)?;
        let mut names = Names::new(&file, config);
        let mut renamed = HashMap::new();
        for name in header.tensors.keys() {
            renamed.insert(name.clone(), names.of_gguf(architecture, name)?);
        }
        let mut weights =
            header.weights(vec![Bytes::Owned(bytes)], |_| 0, |name| renamed.get(name).cloned())?;
        if architecture.description().gguf.adjacent {
            weights.pair_adjacent_rows(config)?;
        }
        let alpha = match header.metadata.get("adapter.lora.alpha") {
            None => None,
            Some(value) => value.as_f64().map(|alpha| alpha as f32).filter(|a| a.is_finite()),
        };
        let Some(alpha) = alpha else {
            let got = header.metadata.get("adapter.lora.alpha");
            let got = got.map_or_else(|| "nothing".to_owned(), Value::shown);
            return Err(ModelError::key(&file, "adapter.lora.alpha", "a finite number", got));
        };
        let (modules, scaling) = (names.modules, Scaling::Gguf { alpha });
        Ok(Self { file, weights, modules, scaling, fingerprint: [0; 32] })
    }

    /// The name of the file with the matrices.
    pub(super) fn file(&self) -> &str {
        &self.file
    }

    /// The matrices.
    pub(super) fn weights(&self) -> &Weights {
        &self.weights
    }

    /// A hash of everything that the adapter changes.
    pub(super) fn fingerprint(&self) -> [u8; 32] {
        self.fingerprint
    }

    /// The rank of the matrices of the projection `spec`; `None` if the adapter does not change it.
    pub(super) fn rank(&self, spec: &TensorSpec) -> Result<Option<usize>, ModelError> {
        let Some(shape) = self.weights.shape(&spec.name) else { return Ok(None) };
        match shape {
            [_, rank] if (1..=RANK_MAX).contains(rank) => Ok(Some(*rank)),
            _ => {
                let expected = format!("a matrix with 1 to {RANK_MAX} columns");
                let reason = format!("{}: expected {expected}, got {shape:?}", spec.name);
                Err(ModelError::malformed(&self.file, reason))
            }
        }
    }

    /// The name of the file's matrix, among `sources`, whose matrix `A` belongs to the projection
    /// `spec`.
    pub(super) fn source(
        &self,
        spec: &TensorSpec,
        sources: &[String],
        rank: usize,
    ) -> Result<String, ModelError> {
        let first = |source: &&String| self.weights.contains(&format!("{source}{FIRST}"));
        sources.iter().find(first).cloned().ok_or_else(|| ModelError::MissingTensor {
            file: self.file.clone(),
            tensor: format!("{}{FIRST}", spec.name),
            expected: vec![rank, spec.shape[1]],
        })
    }

    /// The scale of the matrices of `source`, a matrix of the file.
    pub(super) fn scale(&self, source: &str, rank: usize) -> Result<f32, ModelError> {
        match &self.scaling {
            Scaling::Peft(settings) => {
                let module = self.modules.get(source).map_or(source, String::as_str);
                settings.scale(module, rank)
            }
            // As in llama.cpp.
            Scaling::Gguf { alpha: 0.0 } => Ok(1.0),
            Scaling::Gguf { alpha } => Ok(alpha / rank as f32),
        }
    }

    /// Checks that each matrix `A` has a matrix `B`.
    pub(super) fn check_all_used(&self, config: &DecoderConfig) -> Result<(), ModelError> {
        for part in sites(config).iter().flatten().flatten() {
            let shape = self.weights.shape(&format!("{}{FIRST}", part.spec.name));
            let Some(shape) = shape else { continue };
            if !self.weights.contains(&part.spec.name) {
                return Err(ModelError::MissingTensor {
                    file: self.file.clone(),
                    tensor: format!("{} (lora_B)", part.spec.name),
                    expected: vec![part.spec.shape[0], shape.first().copied().unwrap_or(0)],
                });
            }
        }
        Ok(())
    }
}

/// Checks that a GGUF file is a LoRA adapter for the model with the configuration `config`. Returns
/// the architecture by which its tensors are named.
fn check_gguf(header: &Header, config: &DecoderConfig) -> Result<Architecture, ModelError> {
    for (key, expected) in [("general.type", "adapter"), ("adapter.type", "lora")] {
        let value = header.metadata.get(key);
        if value.and_then(Value::as_text) != Some(expected) {
            let got = value.map_or_else(|| "nothing".to_owned(), Value::shown);
            return Err(ModelError::key(&header.file, key, format!("`{expected}`"), got));
        }
    }
    let activated = "adapter.alora.invocation_tokens";
    if let Some(value) = header.metadata.get(activated) {
        return Err(ModelError::unsupported(&header.file, activated, "nothing", value.shown()));
    }
    let (architecture, name) = config::gguf::architecture(header)?;
    let own = config.architecture.description().gguf.names;
    // Files of architectures without a name of their own have that of another.
    if own.is_empty() || own.contains(&name) {
        return Ok(architecture);
    }
    let expected = format!("that of the model, `{}`", own.join("` or `"));
    Err(ModelError::key(&header.file, "general.architecture", expected, name))
}

/// Gives the tensors of an adapter the names of the model's matrices.
struct Names<'a> {
    file: &'a str,
    /// The matrices that an adapter may change.
    supported: HashSet<String>,
    /// For each of them that it changes the name of its module in the file.
    modules: HashMap<String, String>,
}

impl<'a> Names<'a> {
    fn new(file: &'a str, config: &DecoderConfig) -> Self {
        let parts = sites(config).into_iter().flatten().flatten();
        let supported = parts.flat_map(|part| part.sources).collect();
        Self { file, supported, modules: HashMap::new() }
    }

    /// The name of a tensor of PEFT.
    fn of_peft(&mut self, name: &str) -> Result<String, ModelError> {
        let rest = name.strip_prefix(PREFIX).unwrap_or(name);
        if let Some(module) = rest.strip_suffix(".base_layer.weight") {
            let matrix = safetensors::canonical_name(&format!("{module}.weight"));
            let known = matrix == HEAD;
            return if known { Ok(format!("{matrix}{BASE}")) } else { Err(self.refused(name)) };
        }
        let ends = [(".lora_A.weight", true), (".lora_B.weight", false)].into_iter();
        let mut found = ends.filter_map(|(end, first)| Some((rest.strip_suffix(end)?, first)));
        let Some((module, is_first)) = found.next() else { return Err(self.refused(name)) };
        let matrix = safetensors::canonical_name(&format!("{module}.weight"));
        self.record(name, matrix, module, is_first)
    }

    /// The name of a tensor of a GGUF file.
    fn of_gguf(&mut self, architecture: Architecture, name: &str) -> Result<String, ModelError> {
        let ends = [(".lora_a", true), (".lora_b", false)].into_iter();
        let mut found = ends.filter_map(|(end, first)| Some((name.strip_suffix(end)?, first)));
        let Some((own, is_first)) = found.next() else { return Err(self.refused(name)) };
        match config::gguf::tensor_name(architecture, own) {
            Some(matrix) => self.record(name, matrix, own, is_first),
            None => Err(self.refused(name)),
        }
    }

    fn record(
        &mut self,
        name: &str,
        matrix: String,
        module: &str,
        is_first: bool,
    ) -> Result<String, ModelError> {
        if !self.supported.contains(&matrix) {
            return Err(self.refused(name));
        }
        let renamed = if is_first { format!("{matrix}{FIRST}") } else { matrix.clone() };
        self.modules.insert(matrix, module.to_owned());
        Ok(renamed)
    }

    fn refused(&self, name: &str) -> ModelError {
        ModelError::NotAdaptable { file: self.file.to_owned(), tensor: crate::error::quoted(name) }
    }
}
