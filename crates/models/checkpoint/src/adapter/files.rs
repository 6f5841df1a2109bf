//! Reads the files of an adapter: a directory with the files of PEFT, `adapter_config.json` and
//! `adapter_model.safetensors`, or a GGUF file.
//!
//! Files are read into memory before they are parsed. They are small, and operators overwrite them
//! in place, which would fault if they were mapped.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use super::parameters::Parameters;
use super::peft::PeftSettings;
use super::sites::{EMBEDDING, HEAD, Sites};
use super::{FIRST, RANK_MAX};
use crate::config::{self, Architecture, DecoderConfig, TensorSpec};
use crate::error::ModelError;
use crate::files;
use crate::gguf::{Header, Value, read};
use crate::mmap::Bytes;
use crate::weights::{Weights, safetensors};

/// The settings of an adapter in the format of PEFT.
pub(crate) const CONFIG: &str = "adapter_config.json";
/// The matrices of an adapter in the format of PEFT.
pub(crate) const WEIGHTS: &str = "adapter_model.safetensors";
/// The suffix of the names of the model's own matrices in an adapter's file, which are not used.
const BASE: &str = ".base_layer";
/// Prefix of the names of tensors in the format of PEFT.
pub(crate) const PREFIX: &str = "base_model.model.";

/// The content of an adapter's files.
#[derive(Debug)]
pub(super) struct AdapterFiles {
    /// The file with the matrices, used in errors.
    file: String,
    /// The matrices `B` have the names of the model's matrices, and the matrices `A` have these
    /// names with the suffix [`FIRST`].
    weights: Weights,
    /// For each of the model's matrices that the adapter changes, the name of its module in the
    /// file.
    modules: BTreeMap<String, String>,
    sites: Sites,
    /// The result of [`Sites::sources`].
    sources: HashMap<String, Vec<String>>,
    scaling: Scaling,
    fingerprint: [u8; 32],
}

/// How the scale is computed from the rank.
#[derive(Debug)]
enum Scaling {
    Peft(PeftSettings),
    /// `alpha / rank`, or 1 if `alpha` is 0, as in llama.cpp.
    Gguf {
        alpha: f32,
    },
}

impl AdapterFiles {
    /// Reads the adapter at `path` for the model with the configuration `config`. Files with more
    /// than `bytes_max` bytes are refused.
    pub(super) fn open(
        path: &Path,
        config: &DecoderConfig,
        bytes_max: u64,
    ) -> Result<Self, ModelError> {
        let is_gguf = path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf"));
        let grouped = !(is_gguf && config.architecture.description().gguf.tiled_heads);
        let sites = Sites::of(config, grouped);
        let files = match is_gguf {
            true => Self::open_gguf(path, config, sites, bytes_max)?,
            false => Self::open_peft(path, config, sites, bytes_max)?,
        };
        files.checked(config)
    }

    /// Checks that the file has pairs of matrices, and divides pairs that belong to several of the
    /// model's matrices.
    fn checked(mut self, config: &DecoderConfig) -> Result<Self, ModelError> {
        if self.modules.is_empty() {
            return Err(ModelError::malformed(self.file, "expected matrices, got none"));
        }
        self.check_pairs()?;
        self.weights.check_disjoint()?;
        let mut hasher = blake3::Hasher::new_derive_key("stolon 2026 weights of an adapter");
        hasher.update(&self.weights.contents(1).hash(1)?);
        hasher.update(format!("{:?}", self.scaling).as_bytes());
        self.fingerprint = *hasher.finalize().as_bytes();
        self.weights.split_updates(config)?;
        Ok(self)
    }

    /// Checks that each matrix `A` has a matrix `B`, and each `B` an `A`.
    fn check_pairs(&self) -> Result<(), ModelError> {
        let matrices = self.sites.matrices();
        for (matrix, module) in &self.modules {
            let [out, inputs] = matrices[matrix];
            let first = self.weights.shape(&format!("{matrix}{FIRST}"));
            let (part, expected) = match (first, self.weights.shape(matrix)) {
                (Some(first), None) => ("lora_B", [out, first.iter().product::<usize>() / inputs]),
                (None, Some(second)) => ("lora_A", [second.last().copied().unwrap_or(0), inputs]),
                _ => continue,
            };
            return Err(ModelError::MissingTensor {
                file: self.file.clone(),
                tensor: format!("{module} ({part})"),
                expected: expected.into(),
            });
        }
        Ok(())
    }

    fn open_peft(
        path: &Path,
        config: &DecoderConfig,
        sites: Sites,
        bytes_max: u64,
    ) -> Result<Self, ModelError> {
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
        let mut names = Names::new(&file, config, &sites);
        let mut weights = Weights::empty(&file);
        safetensors::add_renamed(&mut weights, &file, Bytes::Owned(bytes), |name| {
            names.of_peft(name)
        })?;
        // PEFT also saves these matrices of the model if there is an adapter for one of them.
        for matrix in [HEAD, EMBEDDING] {
            let base = format!("{matrix}{BASE}");
            if weights.contains(&base) {
                weights.tensor(&base, &[config.vocab_size, config.hidden_size])?;
                weights.remove(&base);
            }
        }
        if config.architecture.description().rotation.adjacent {
            weights.pair_adjacent_rows(config)?;
        }
        let Names { mut modules, parameters, .. } = names;
        modules.extend(parameters.split(&mut weights, &settings, &file)?);
        Ok(Self::new(file, weights, modules, sites, Scaling::Peft(settings)))
    }

    fn open_gguf(
        path: &Path,
        config: &DecoderConfig,
        sites: Sites,
        bytes_max: u64,
    ) -> Result<Self, ModelError> {
        let bytes = files::read(path, bytes_max)?;
        let file = path.display().to_string();
        let header = read(&file, &bytes)?;
        let architecture = check_gguf(&header, config)?;
        let mut names = Names::new(&file, config, &sites);
        let mut renamed = HashMap::new();
        for name in header.tensors.keys() {
            renamed.insert(name.clone(), names.of_gguf(architecture, name)?);
        }
        let mut weights = header.weights(
            vec![Bytes::Owned(bytes)],
            |_| names.experts,
            |name| renamed.get(name).cloned(),
        )?;
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
        let modules = names.modules;
        Ok(Self::new(file, weights, modules, sites, Scaling::Gguf { alpha }))
    }

    fn new(
        file: String,
        weights: Weights,
        modules: BTreeMap<String, String>,
        sites: Sites,
        scaling: Scaling,
    ) -> Self {
        let sources = sites.sources();
        Self { file, weights, modules, sites, sources, scaling, fingerprint: [0; 32] }
    }

    /// The name of the file with the matrices.
    pub(super) fn file(&self) -> &str {
        &self.file
    }

    /// The matrices.
    pub(super) fn weights(&self) -> &Weights {
        &self.weights
    }

    /// The projections that the adapter may change.
    pub(super) fn sites(&self) -> &Sites {
        &self.sites
    }

    /// Whether the matrix `A` of the embedding is stored by columns, `[vocab_size, rank]`.
    pub(super) fn has_columns(&self) -> bool {
        matches!(self.scaling, Scaling::Gguf { .. })
    }

    /// A hash of the matrices and their scales.
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

    /// The name that the file's matrix `A` for the projection `spec` belongs to: the name of the
    /// projection, or of a matrix with the rows of several projections.
    pub(super) fn source(&self, spec: &TensorSpec) -> String {
        let combined = self.sources.get(&spec.name).into_iter().flatten();
        let mut all = [&spec.name].into_iter().chain(combined);
        let has_first = |source: &&String| self.weights.contains(&format!("{source}{FIRST}"));
        all.find(has_first).unwrap_or(&spec.name).clone()
    }

    /// The scale of the matrices of `source`, which is a matrix of the file.
    pub(super) fn scale(&self, source: &str, rank: usize) -> Result<f32, ModelError> {
        match &self.scaling {
            Scaling::Peft(settings) => {
                let module = self.modules.get(source).map_or(source, String::as_str);
                settings.scale(module, rank)
            }
            Scaling::Gguf { alpha: 0.0 } => Ok(1.0),
            Scaling::Gguf { alpha } => Ok(alpha / rank as f32),
        }
    }
}

/// Checks that a GGUF file is a LoRA adapter for the model with the configuration `config`. Returns
/// the architecture that determines the names of its tensors.
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
    // An architecture without names of its own uses the name of another one in files.
    if own.is_empty() || own.contains(&name) {
        return Ok(architecture);
    }
    let expected = format!("that of the model, `{}`", own.join("` or `"));
    Err(ModelError::key(&header.file, "general.architecture", expected, name))
}

/// Parses the name of a matrix of PEFT: the module, whether the matrix is `A`, and whether the
/// module is an embedding. The name of the adapter may follow `lora_A` or `lora_B`, as it does in
/// PEFT's modules in memory.
fn matrix_of_peft(name: &str) -> Option<(&str, bool, bool)> {
    let parts = [
        (".lora_A", ".weight", true, false),
        (".lora_B", ".weight", false, false),
        (".lora_embedding_A", "", true, true),
        (".lora_embedding_B", "", false, true),
    ];
    parts.into_iter().find_map(|(part, end, is_first, is_embedding)| {
        let (module, adapter) = name.strip_suffix(end)?.rsplit_once(part)?;
        let adapter = adapter.strip_prefix('.').or(adapter.is_empty().then_some("default"))?;
        let is_name = !adapter.is_empty() && !adapter.contains('.');
        is_name.then_some((module, is_first, is_embedding))
    })
}

/// Maps the names of an adapter's tensors to the names of the model's matrices.
struct Names<'a> {
    file: &'a str,
    /// Number of experts of a layer.
    experts: usize,
    /// The matrices that an adapter may change, with their shapes `[out, in]`.
    supported: HashMap<String, [usize; 2]>,
    /// For each matrix that the adapter changes, the name of its module in the file.
    modules: BTreeMap<String, String>,
    /// The combined matrices of all experts that it may change.
    parameters: Parameters,
}

impl<'a> Names<'a> {
    fn new(file: &'a str, config: &DecoderConfig, sites: &Sites) -> Self {
        let experts = config.experts().map_or(0, |experts| experts.count);
        let (supported, parameters) = (sites.matrices(), Parameters::of(config));
        Self { file, experts, supported, modules: BTreeMap::new(), parameters }
    }

    /// Maps the name of a tensor of PEFT.
    fn of_peft(&mut self, name: &str) -> Result<String, ModelError> {
        let rest = name.strip_prefix(PREFIX).unwrap_or(name);
        if let Some(module) = rest.strip_suffix(".base_layer.weight") {
            let matrix = safetensors::canonical_name(&format!("{module}.weight"));
            let known = matrix == HEAD || matrix == EMBEDDING;
            return if known { Ok(format!("{matrix}{BASE}")) } else { Err(self.refused(name)) };
        }
        let Some((module, is_first, is_embedding)) = matrix_of_peft(rest) else {
            return Err(self.refused(name));
        };
        if !is_embedding && let Some(renamed) = self.parameters.rename(module, is_first) {
            return Ok(renamed);
        }
        let matrix = safetensors::canonical_name(&format!("{module}.weight"));
        if is_embedding != (matrix == EMBEDDING) || matrix.contains('*') {
            return Err(self.refused(name));
        }
        self.record(name, matrix, module, is_first)
    }

    /// Maps the name of a tensor of a GGUF file.
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
        let renamed = if is_first { format!("{matrix}{FIRST}") } else { matrix.clone() };
        // One tensor may have the matrices of all experts.
        let count = if matrix.contains('*') { self.experts } else { 1 };
        let all: Vec<String> =
            (0..count).map(|expert| matrix.replace('*', &expert.to_string())).collect();
        if all.is_empty() || !all.iter().all(|matrix| self.supported.contains_key(matrix)) {
            return Err(self.refused(name));
        }
        self.modules.extend(all.into_iter().map(|matrix| (matrix, module.to_owned())));
        Ok(renamed)
    }

    fn refused(&self, name: &str) -> ModelError {
        ModelError::NotAdaptable { file: self.file.to_owned(), tensor: crate::error::quoted(name) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the names of matrices are parsed with and without the name of the adapter in them.
    #[test]
    fn names_of_peft_may_have_the_name_of_the_adapter() {
        let a = Some(("x.q_proj", true, false));
        for name in ["x.q_proj.lora_A.weight", "x.q_proj.lora_A.default.weight"] {
            assert_eq!(matrix_of_peft(name), a, "{name}");
        }
        assert_eq!(matrix_of_peft("x.lora_B.my-name.weight"), Some(("x", false, false)));
        assert_eq!(matrix_of_peft("x.lora_embedding_A"), Some(("x", true, true)));
        assert_eq!(matrix_of_peft("x.lora_embedding_B.default"), Some(("x", false, true)));
        for other in
            ["x.lora_A", "x.lora_A.a.b.weight", "x.lora_A..weight", "x.weight", "x.lora_Aa"]
        {
            assert_eq!(matrix_of_peft(other), None, "{other}");
        }
    }
}
