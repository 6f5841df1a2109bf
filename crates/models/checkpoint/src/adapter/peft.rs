//! The settings of an adapter in the format of PEFT, `adapter_config.json`.

use regex::{RegexBuilder, RegexSet, RegexSetBuilder};
use serde_json::Value;

use super::parameters;
use crate::config::Keys;
use crate::error::{ModelError, quoted};

/// The names of modules of routers, whose matrices are parameters in transformers 5.
const ROUTERS: [&str; 2] = ["gate", "router"];

/// Maximum size in bytes of the compiled regular expressions of a pattern.
const REGEX_BYTES_MAX: usize = 10 << 20;

/// Options that change answers and are not implemented. They must be missing, false or empty.
const REFUSED: [&str; 11] = [
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "modules_to_save",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
];

/// The supported values of `bias`, which says which biases PEFT trains and saves. Most models have
/// no biases.
const BIASES: [&str; 3] = ["none", "all", "lora_only"];

/// Initializations that change the model's own weights. The changed weights are not in the
/// adapter's files.
const CHANGE_THE_MODEL: [&str; 5] = ["pissa", "olora", "corda", "loftq", "lora_ga"];

/// The settings that determine the scale of each module.
#[derive(Debug)]
pub(crate) struct PeftSettings {
    /// The file, used in errors.
    file: String,
    rank: usize,
    alpha: f64,
    /// The ranks of single modules.
    rank_pattern: Pattern,
    /// The values of `alpha` for single modules.
    alpha_pattern: Pattern,
    /// Whether the scale is `alpha / sqrt(rank)` instead of `alpha / rank`.
    by_root: bool,
    /// The version of PEFT that has written the files; `None` for versions before 0.18.
    version: Option<String>,
}

impl PeftSettings {
    /// Reads the settings in `value`. `file` is used in errors.
    pub(crate) fn parse(file: &str, value: &Value) -> Result<Self, ModelError> {
        let keys = Keys::root(file, value)?;
        if !keys.text("peft_type")?.is_some_and(|kind| kind.eq_ignore_ascii_case("LORA")) {
            return Err(keys.unsupported("peft_type", "`LORA`"));
        }
        for key in REFUSED {
            let is_off = match keys.value(key) {
                None | Some(Value::Bool(false)) => true,
                Some(Value::Array(list)) => list.is_empty(),
                Some(Value::Object(map)) => map.is_empty(),
                Some(_) => false,
            };
            if !is_off {
                return Err(keys.unsupported(key, "nothing"));
            }
        }
        check_parameters(&keys)?;
        // Biases in the file are refused by the names of their tensors.
        if keys.text("bias")?.is_some_and(|bias| !BIASES.contains(&bias)) {
            return Err(keys.unsupported("bias", &BIASES.join(", ")));
        }
        let initialized = keys.value("init_lora_weights").and_then(Value::as_str).unwrap_or("");
        if CHANGE_THE_MODEL.iter().any(|kind| initialized.to_lowercase().starts_with(kind)) {
            let expected = "an adapter that was converted to one of the original model";
            return Err(keys.unsupported("init_lora_weights", expected));
        }
        Ok(Self {
            file: file.to_owned(),
            rank: keys.size("r")?.ok_or_else(|| keys.invalid("r", "an integer above 0"))?,
            alpha: keys
                .number("lora_alpha")?
                .ok_or_else(|| keys.invalid("lora_alpha", "a finite number"))?,
            rank_pattern: Pattern::parse(&keys, "rank_pattern")?,
            alpha_pattern: Pattern::parse(&keys, "alpha_pattern")?,
            by_root: keys.flag("use_rslora")?.unwrap_or(false),
            version: keys.text("peft_version")?.map(str::to_owned),
        })
    }

    /// The rank of all modules that have no rank of their own.
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// Checks that the matrices for parameters `[experts, out, in]` are for `[out, in]`. Before
    /// PEFT 0.19 they are for the transposed matrices, and the shapes do not always show it.
    ///
    /// # Errors
    /// [`ModelError::InvalidKey`] if the version of PEFT is older.
    pub(super) fn check_orientation(&self) -> Result<(), ModelError> {
        let version = self.version.as_deref().unwrap_or("none");
        let mut numbers = version.split('.').map(|number| number.parse::<u32>().ok());
        let version_of = (numbers.next().flatten(), numbers.next().flatten());
        if version_of >= (Some(0), Some(19)) {
            return Ok(());
        }
        let expected = "0.19 or later, since earlier versions transpose the parameters of experts";
        Err(ModelError::key(&self.file, "peft_version", expected, version))
    }

    /// The scale of the matrices of `module`, whose name is the name in the file without PEFT's
    /// prefix. `rank` is the rank of the matrices.
    ///
    /// # Errors
    /// [`ModelError::InvalidKey`] if the settings have another rank.
    pub(crate) fn scale(&self, module: &str, rank: usize) -> Result<f32, ModelError> {
        let expected = self.rank_pattern.of(module).unwrap_or(self.rank as f64);
        if expected != rank as f64 {
            let tensors = format!("{rank}, the rank of the matrices of `{module}`");
            return Err(ModelError::key(&self.file, "r", tensors, expected));
        }
        let alpha = self.alpha_pattern.of(module).unwrap_or(self.alpha);
        Ok((alpha / if self.by_root { expected.sqrt() } else { expected }) as f32)
    }
}

/// Numbers for single modules. The keys are regular expressions that match the whole name of a
/// module, or the end of the name after a dot.
#[derive(Debug)]
struct Pattern {
    keys: RegexSet,
    values: Vec<f64>,
}

impl Pattern {
    /// Reads the object `key`.
    fn parse(keys: &Keys<'_>, key: &str) -> Result<Self, ModelError> {
        let Some(object) = keys.object(key)? else {
            return Ok(Self { keys: RegexSet::empty(), values: Vec::new() });
        };
        let value = |name| object.number(name)?.ok_or_else(|| object.invalid(name, "a number"));
        let values = object.names().map(value).collect::<Result<_, _>>()?;
        // Keys are matched in the same way as in PEFT.
        let whole = |name: &str| format!("^(?:.*\\.)?(?:{name})$");
        let all =
            RegexSetBuilder::new(object.names().map(whole)).size_limit(REGEX_BYTES_MAX).build();
        match all {
            Ok(keys) => Ok(Self { keys, values }),
            Err(error) => {
                let is_wrong = |name: &&str| {
                    RegexBuilder::new(&whole(name)).size_limit(REGEX_BYTES_MAX).build().is_err()
                };
                let wrong = object.names().find(is_wrong);
                let expected = format!("a regular expression that can be used ({error})");
                Err(match wrong {
                    Some(name) => object.unsupported(name, &quoted(&expected)),
                    None => keys.unsupported(key, "fewer or simpler regular expressions"),
                })
            }
        }
    }

    /// The value of the first key that matches `module`.
    fn of(&self, module: &str) -> Option<f64> {
        let first = self.keys.matches(module).iter().next()?;
        self.values.get(first).copied()
    }
}

/// Checks that all parameters with an adapter are parameters of experts or matrices of routers.
fn check_parameters(keys: &Keys<'_>) -> Result<(), ModelError> {
    let key = "target_parameters";
    let is_known = |name: &Value| {
        let mut parts = name.as_str().unwrap_or_default().rsplit('.');
        match (parts.next(), parts.next()) {
            (Some("weight"), module) => module.is_some_and(|module| ROUTERS.contains(&module)),
            (last, _) => last.is_some_and(|last| parameters::NAMES.contains(&last)),
        }
    };
    match keys.value(key) {
        None => Ok(()),
        Some(Value::Array(names)) if names.iter().all(is_known) => Ok(()),
        Some(_) => {
            let names = parameters::NAMES.join("`, `");
            let expected =
                format!("parameters of experts, `{names}`, and of routers, `gate.weight`");
            Err(keys.unsupported(key, &expected))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(more: &[(&str, Value)]) -> Result<PeftSettings, ModelError> {
        let mut value = json!({ "peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none" });
        more.iter().for_each(|(key, member)| value[*key] = member.clone());
        PeftSettings::parse("adapter_config.json", &value)
    }

    /// Goal: scales are computed from rank and alpha as in PEFT, also for single modules.
    #[test]
    fn scales_follow_from_the_settings() {
        let module = "model.layers.1.self_attn.q_proj";
        assert_eq!(parse(&[]).unwrap().scale(module, 8).unwrap(), 2.0);
        let root = parse(&[("use_rslora", json!(true)), ("r", json!(16))]).unwrap();
        assert_eq!(root.scale(module, 16).unwrap(), 4.0);
        let patterns = parse(&[
            ("rank_pattern", json!({ "q_proj": 4, "^model.layers.0.mlp.up_proj": 2 })),
            ("alpha_pattern", json!({ "layers.1.self_attn.q_proj": 3.0, "proj": 100 })),
        ])
        .unwrap();
        assert_eq!(patterns.scale(module, 4).unwrap(), 0.75);
        assert_eq!(patterns.scale("model.layers.0.mlp.up_proj", 2).unwrap(), 8.0);
        assert_eq!(patterns.scale("model.layers.1.mlp.up_proj", 8).unwrap(), 2.0);
        let error = patterns.scale(module, 8).unwrap_err().to_string();
        assert!(error.contains("key `r`: expected 8, the rank of the matrices of"), "{error}");
        // PEFT writes this if it combines gate and up into one parameter.
        let of_parameter = json!({ ".*\\.gate_up_proj": 16 });
        let doubled =
            parse(&[("rank_pattern", of_parameter.clone()), ("alpha_pattern", of_parameter)]);
        assert_eq!(doubled.unwrap().scale("layers.1.mlp.experts.gate_up_proj", 16).unwrap(), 1.0);
        // Keys are regular expressions, and the first key that matches is used.
        for (pattern, rank) in [
            (json!({ "q_proj": 4, "self_attn.q_proj": 8 }), 4),
            (json!({ "self_attn.q_proj": 8, "q_proj": 4 }), 8),
            (json!({ r"layers\.[01]\.self_attn\.(q|k)_proj": 2, ".*": 4 }), 2),
            (json!({ r"layers\.[02]\..*": 2, "self_attn|q_proj": 4 }), 4),
            (json!({ "_proj": 2, "model.layers.1": 4 }), 8),
        ] {
            let scale = parse(&[("rank_pattern", pattern)]).unwrap().scale(module, rank);
            assert_eq!(scale.unwrap(), 16.0 / rank as f32);
        }
    }

    /// Goal: options that would change answers and are not implemented are refused, with their
    /// keys.
    #[test]
    fn other_options_are_refused_by_their_keys() {
        for (key, value) in [
            ("peft_type", json!("ADALORA")),
            ("use_dora", json!(true)),
            ("lora_bias", json!(true)),
            ("modules_to_save", json!(["lm_head"])),
            ("bias", json!("some")),
            ("init_lora_weights", json!("pissa_niter_4")),
            ("alora_invocation_tokens", json!([1, 2])),
            ("target_parameters", json!(["experts.down_proj", "mlp.norm.weight"])),
            ("target_parameters", json!(["weight"])),
            ("target_parameters", json!("experts.down_proj")),
            ("target_parameters", json!([7])),
            ("rank_pattern", json!({ "layers.(?=0)": 4 })),
            ("rank_pattern", json!({ "x{1000}{1000}{1000}": 4 })),
            ("alpha_pattern", json!({ "q_proj": "4" })),
            ("r", json!(0)),
            ("lora_alpha", json!("x")),
        ] {
            let error = parse(&[(key, value)]).expect_err(key).to_string();
            assert!(error.contains(key), "{error}");
        }
        let off = [("use_dora", json!(false)), ("modules_to_save", json!([]))];
        let null = [("lora_bias", Value::Null), ("init_lora_weights", json!("gaussian"))];
        assert!(parse(&[off, null].concat()).is_ok());
        let experts = json!(["mlp.experts.gate_up_proj", "down_proj", "gate.weight"]);
        assert!(parse(&[("target_parameters", experts)]).is_ok());
    }
}
