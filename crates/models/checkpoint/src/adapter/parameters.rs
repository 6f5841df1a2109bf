//! Reads the matrices of PEFT for all experts of a layer together. They belong to a parameter that
//! combines the projections of all experts (PEFT's `target_parameters`, transformers 5).
//!
//! Files name the module of the experts, not the parameter: `mlp.experts.lora_A`, and for a second
//! parameter `mlp.experts.base_layer.lora_A`. The shapes tell which parameter it is.

use std::collections::{BTreeMap, HashMap};

use super::FIRST;
use super::peft::PeftSettings;
use crate::config::{DecoderConfig, FeedForwardWeights, MlpInputs, MlpWeights};
use crate::error::ModelError;
use crate::weights::{ExpertMatrices, Weights, safetensors};

/// The suffix of the name of a matrix `B` before it is divided.
const SECOND: &str = ".lora_b";
/// The suffix of a module's name for the second parameter of this module that has an adapter.
const NESTED: &str = ".base_layer";

/// The names of the parameters in transformers, which are listed in PEFT's settings.
pub(super) const NAMES: [&str; 3] = ["gate_up_proj", "up_proj", "down_proj"];

/// A projection of all experts of a layer.
#[derive(Debug)]
struct Parameter {
    /// Its name in transformers, which is also the name of each expert's matrix: one of [`NAMES`].
    name: String,
    /// The shape of each expert's matrix, `[out, in]`.
    shape: [usize; 2],
    /// Whether the rows of gate and up alternate, as in gpt-oss.
    alternating: bool,
}

/// The parameters of all layers, and the modules of a file that have matrices for them.
#[derive(Debug)]
pub(super) struct Parameters {
    /// Number of experts of a layer.
    count: usize,
    /// The parameters of each module of experts, by its name.
    modules: HashMap<String, Vec<Parameter>>,
    /// For each parameter with an adapter, the name of its matrices in [`Weights`] without the
    /// suffix, and the name of its module in the file without [`NESTED`].
    found: BTreeMap<String, String>,
}

impl Parameters {
    /// Lists the parameters of the model with the configuration `config`.
    pub(super) fn of(config: &DecoderConfig) -> Self {
        let mut modules = HashMap::new();
        for layer in config.weights().layers {
            let weights = layer.mlp.as_ref().and_then(FeedForwardWeights::experts);
            modules.extend(weights.and_then(|weights| of_expert(weights.experts.first()?)));
        }
        let count = config.experts().map_or(0, |experts| experts.count);
        Self { count, modules, found: BTreeMap::new() }
    }

    /// Records a matrix `A` or `B` of the file's module `module` and returns its new name. Returns
    /// `None` if the module is not the experts of a layer.
    pub(super) fn rename(&mut self, module: &str, is_first: bool) -> Option<String> {
        let (own, nested) = match module.strip_suffix(NESTED) {
            Some(own) => (own, NESTED),
            None => (module, ""),
        };
        let name = safetensors::canonical_name(&format!("{own}.weight"));
        let name = name.strip_suffix(".weight").filter(|name| self.modules.contains_key(*name))?;
        let name = format!("{name}{nested}");
        let renamed = format!("{name}{}", if is_first { FIRST } else { SECOND });
        self.found.insert(name, own.to_owned());
        Some(renamed)
    }

    /// Divides the renamed matrices into matrices of single experts. Returns the names of the
    /// model's matrices that they change, each with its name in PEFT's settings. `file` is used in
    /// errors.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] if the shapes do not fit any parameter, and the errors of
    /// [`PeftSettings::check_orientation`] and [`Weights::split_expert_matrices`].
    pub(super) fn split(
        &self,
        weights: &mut Weights,
        settings: &PeftSettings,
        file: &str,
    ) -> Result<BTreeMap<String, String>, ModelError> {
        let mut matrices = BTreeMap::new();
        for (name, module) in &self.found {
            let own = name.strip_suffix(NESTED).unwrap_or(name);
            let [first, second] = [FIRST, SECOND].map(|end| format!("{name}{end}"));
            let parameters = &self.modules[own];
            // Parameters with alternating rows are `[experts, in, out]`, which no version of PEFT
            // transposes.
            if !parameters.iter().any(|parameter| parameter.alternating) {
                settings.check_orientation()?;
            }
            let shapes = [weights.shape(&first), weights.shape(&second)];
            let Some(parameter) = parameters.iter().find(|one| self.fits(one, shapes)) else {
                return Err(self.misfit(file, module, parameters, shapes));
            };
            let matrix = |expert: usize| format!("{own}.{expert}.{}.weight", parameter.name);
            let updates = ExpertMatrices {
                count: self.count,
                alternating: parameter.alternating,
                first,
                second,
            };
            weights.split_expert_matrices(&updates, |expert| {
                let second = matrix(expert);
                [format!("{second}{FIRST}"), second]
            })?;
            let setting = format!("{module}.{}", parameter.name);
            matrices.extend((0..self.count).map(|expert| (matrix(expert), setting.clone())));
        }
        Ok(matrices)
    }

    /// Whether matrices `A` and `B` of these shapes belong to `parameter`.
    fn fits(&self, parameter: &Parameter, shapes: [Option<&[usize]>; 2]) -> bool {
        let [Some(&[rows, inputs]), Some(&[out, columns])] = shapes else { return false };
        let ranks = rows > 0 && rows == columns && rows.is_multiple_of(self.count);
        ranks && parameter.shape == [out, inputs]
    }

    fn misfit(
        &self,
        file: &str,
        module: &str,
        parameters: &[Parameter],
        shapes: [Option<&[usize]>; 2],
    ) -> ModelError {
        let count = self.count;
        let expected = parameters.iter().map(|Parameter { name, shape: [out, inputs], .. }| {
            format!("[{count} * rank, {inputs}] and [{out}, {count} * rank] ({name})")
        });
        let expected: Vec<String> = expected.collect();
        let got = |shape: Option<&[usize]>| {
            shape.map_or_else(|| "nothing".to_owned(), |shape| format!("{shape:?}"))
        };
        let reason = format!(
            "`{module}`: expected lora_A and lora_B of {count} experts with the shapes {}, got {} \
             and {}",
            expected.join(" or "),
            got(shapes[0]),
            got(shapes[1])
        );
        ModelError::malformed(file, reason)
    }
}

/// The module name and the parameters of the experts of a layer, whose first expert is `mlp`.
fn of_expert(MlpWeights { inputs, down, .. }: &MlpWeights) -> Option<(String, Vec<Parameter>)> {
    let module = down.weight.name.strip_suffix(".0.down_proj.weight")?.to_owned();
    let alternating = down.bias.is_some();
    let (name, out) = match inputs {
        MlpInputs::Gated(gate_up, _) => {
            let rows = gate_up.parts.iter().map(|part| part.weight.shape[0]);
            (gate_up.name.clone(), rows.sum())
        }
        MlpInputs::Plain(up, _) => (up.weight.name.clone(), up.weight.shape[0]),
    };
    let name = name.strip_prefix(&format!("{module}.0."))?.strip_suffix(".weight")?.to_owned();
    let [hidden, width] = [down.weight.shape[0], down.weight.shape[1]];
    let inputs = Parameter { name, shape: [out, hidden], alternating };
    let down =
        Parameter { name: "down_proj".to_owned(), shape: [hidden, width], alternating: false };
    Some((module, vec![inputs, down]))
}
