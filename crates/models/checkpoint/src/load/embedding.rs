//! Parses whether a model is an embedding model, and how its embeddings are computed: from
//! `modules.json` and `1_Pooling/config.json` of sentence-transformers, or from `pooling_type` of a
//! GGUF file.

use std::path::Path;

use serde::Serialize;
use serde_json::Value;
use stolon_backend::Pooling;

use super::task_adapters;
use crate::config::Keys;
use crate::encoder::has_task_adapters;
use crate::error::ModelError;
use crate::files::{optional, read_json};

pub(crate) const MODULES: &str = "modules.json";
pub(crate) const POOLING: &str = "1_Pooling/config.json";
/// The directory of [`POOLING`], which must be the path in `modules.json`.
const POOLING_PATH: &str = "1_Pooling";
/// Maximum number of sizes in [`EmbeddingSizes::Listed`].
const SIZES_MAX: usize = 1024;
/// Maximum number of dense layers after the pooling.
pub(crate) const DENSE_MAX: usize = 16;

/// How a model's embeddings are computed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EmbeddingConfig {
    /// The function from the hidden states of a text to one vector.
    pub pooling: Pooling,
    /// Whether embeddings are scaled to length 1.
    pub normalize: bool,
    /// The sizes to which embeddings may be shortened.
    pub sizes: EmbeddingSizes,
}

/// The sizes to which embeddings may be shortened (Matryoshka embeddings). The first values of an
/// embedding are an embedding, too, if the model was trained for this size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum EmbeddingSizes {
    /// No other size: embeddings have as many values as a hidden state.
    Full,
    /// Any number of values.
    Any,
    /// These numbers of values.
    Listed(Vec<usize>),
}

impl EmbeddingSizes {
    /// Whether embeddings of `full` values may be shortened to `size` values.
    #[must_use]
    pub fn allow(&self, size: usize, full: usize) -> bool {
        let shorter = match self {
            Self::Full => false,
            Self::Any => true,
            Self::Listed(sizes) => sizes.contains(&size),
        };
        size == full || shorter && (1..full).contains(&size)
    }
}

/// How embeddings are computed, from the files of sentence-transformers in `directory`; `None` if
/// there are none. `config` is the content of `config.json`.
///
/// # Errors
/// [`ModelError::Unsupported`] if several ways of pooling are combined, or for dense layers.
pub(crate) fn of_directory(
    directory: &Path,
    config: &Value,
    hidden_size: usize,
) -> Result<Option<EmbeddingConfig>, ModelError> {
    if has_task_adapters(config) {
        return Ok(Some(task_adapters::EMBEDDING));
    }
    let Some(Modules { dense, normalize }) = modules_of(directory)? else { return Ok(None) };
    if let Some(path) = dense.first() {
        let expected = "no dense layers after a language model";
        return Err(ModelError::unsupported(MODULES, "path", expected, path));
    }
    let pooling = pooling_of(directory, hidden_size)?;
    let file = directory.join(super::directory::CONFIG).display().to_string();
    let keys = Keys::root(&file, config)?;
    refuse_own_code(&keys)?;
    let sizes = sizes(&keys, hidden_size)?;
    Ok(Some(EmbeddingConfig { pooling, normalize, sizes }))
}

/// Refuses a model with Python code of its own. In embedding models, such code mostly makes
/// attention bidirectional (GritLM, for example).
pub(super) fn refuse_own_code(keys: &Keys<'_>) -> Result<(), ModelError> {
    match keys.object("auto_map")? {
        Some(map) if map.given("AutoModel") => Err(map.unsupported("AutoModel", "nothing")),
        _ => Ok(()),
    }
}

/// The modules of a model of sentence-transformers after its transformer.
pub(super) struct Modules {
    /// The directories of the dense layers after the pooling.
    pub(super) dense: Vec<String>,
    /// Whether embeddings are normalized.
    pub(super) normalize: bool,
}

/// The modules of the model in `directory`; `None` if it has no modules, or no pooling, as in
/// rerankers.
///
/// # Errors
/// [`ModelError::Unsupported`] for other modules, and another order.
pub(super) fn modules_of(directory: &Path) -> Result<Option<Modules>, ModelError> {
    let path = directory.join(MODULES);
    let Some(value) = optional(read_json(&path))? else { return Ok(None) };
    modules(&path.display().to_string(), &value)
}

/// The classes of the modules in `modules.json`, without the names of packages, and their paths.
pub(super) fn module_list<'a>(
    file: &'a str,
    value: &'a Value,
) -> Result<(Vec<&'a str>, Vec<&'a str>), ModelError> {
    let Some(list) = value.as_array() else {
        return Err(ModelError::malformed(file, "expected a list of modules"));
    };
    let mut kinds = Vec::new();
    let mut paths = Vec::new();
    for module in list {
        let keys = Keys::root(file, module)?;
        let class = keys.text("type")?.ok_or_else(|| keys.invalid("type", "a string"))?;
        // In newer versions, the modules are in other packages, but their classes have the same
        // names.
        kinds.push(class.rsplit('.').next().unwrap_or(class));
        paths.push(keys.text("path")?.unwrap_or_default());
    }
    Ok((kinds, paths))
}

/// The content of `modules.json`.
fn modules(file: &str, value: &Value) -> Result<Option<Modules>, ModelError> {
    let (kinds, paths) = module_list(file, value)?;
    if !kinds.contains(&"Pooling") {
        return Ok(None);
    }
    let expected = "Transformer, Pooling, dense layers if there are any and, if embeddings are normalized, \
         Normalize";
    let unsupported = || ModelError::unsupported(file, "type", expected, kinds.join(", "));
    let ["Transformer", "Pooling", rest @ ..] = &kinds[..] else { return Err(unsupported()) };
    let (dense, normalize) = match rest {
        [dense @ .., "Normalize"] => (dense, true),
        dense => (dense, false),
    };
    if dense.len() > DENSE_MAX || dense.iter().any(|kind| *kind != "Dense") {
        return Err(unsupported());
    }
    if paths[1] != POOLING_PATH {
        return Err(ModelError::key(file, "path", POOLING_PATH, paths[1]));
    }
    let paths = &paths[2..2 + dense.len()];
    let is_name = |path: &&str| {
        !path.is_empty() && path.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    };
    if let Some(path) = paths.iter().find(|path| !is_name(path)) {
        return Err(ModelError::key(file, "path", "the name of a directory", path));
    }
    let dense = paths.iter().map(|path| (*path).to_owned()).collect();
    Ok(Some(Modules { dense, normalize }))
}

/// The pooling of the model in `directory`.
pub(super) fn pooling_of(directory: &Path, hidden_size: usize) -> Result<Pooling, ModelError> {
    let path = directory.join(POOLING);
    let file = path.display().to_string();
    let value = read_json(&path)?;
    pooling(&Keys::root(&file, &value)?, hidden_size)
}

/// Parses the pooling from the module's configuration.
fn pooling(keys: &Keys<'_>, hidden_size: usize) -> Result<Pooling, ModelError> {
    const FLAGS: [(&str, &str); 6] = [
        ("pooling_mode_cls_token", "cls"),
        ("pooling_mode_max_tokens", "max"),
        ("pooling_mode_mean_tokens", "mean"),
        ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens"),
        ("pooling_mode_weightedmean_tokens", "weightedmean"),
        ("pooling_mode_lasttoken", "lasttoken"),
    ];
    for key in ["word_embedding_dimension", "embedding_dimension"] {
        if keys.size(key)?.is_some_and(|size| size != hidden_size) {
            return Err(keys.invalid(key, &format!("{hidden_size} (hidden_size)")));
        }
    }
    // Since version 5, one key replaces the flags. The results of several modes are concatenated.
    let mut modes: Vec<&str> = match keys.value("pooling_mode") {
        Some(Value::String(mode)) => vec![mode],
        Some(_) => keys.texts("pooling_mode")?.unwrap_or_default(),
        None => {
            let mut modes = Vec::new();
            for (key, mode) in FLAGS {
                modes.extend(keys.flag(key)?.unwrap_or(false).then_some(mode));
            }
            modes
        }
    };
    if modes.is_empty() {
        modes.push("mean");
    }
    let pooling = match modes[..] {
        ["lasttoken"] => Pooling::Last,
        ["mean"] => Pooling::Mean,
        ["cls"] => Pooling::First,
        ["max"] => Pooling::Max,
        ["weightedmean"] => Pooling::WeightedMean,
        ["mean_sqrt_len_tokens"] => Pooling::MeanSqrtLen,
        _ => {
            let expected =
                "one of cls, max, mean, mean_sqrt_len_tokens, weightedmean and lasttoken";
            return Err(ModelError::unsupported(
                keys.file,
                "pooling_mode",
                expected,
                modes.join(", "),
            ));
        }
    };
    // The part of a text that is the prompt is not known here.
    if pooling != Pooling::Last && keys.flag("include_prompt")? == Some(false) {
        return Err(keys.unsupported("include_prompt", "true"));
    }
    Ok(pooling)
}

/// The sizes that `config.json` declares, with the same keys as in vLLM.
pub(super) fn sizes(keys: &Keys<'_>, hidden_size: usize) -> Result<EmbeddingSizes, ModelError> {
    const KEY: &str = "matryoshka_dimensions";
    if let Some(sizes) = keys.counts(KEY)? {
        let range = 1..=hidden_size;
        if sizes.len() > SIZES_MAX || !sizes.iter().all(|size| range.contains(size)) {
            let expected = format!("at most {SIZES_MAX} integers from 1 to {hidden_size}");
            return Err(keys.invalid(KEY, &expected));
        }
        return Ok(EmbeddingSizes::Listed(sizes));
    }
    Ok(match keys.flag("is_matryoshka")? {
        Some(true) => EmbeddingSizes::Any,
        _ => EmbeddingSizes::Full,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pooling_of(value: &Value) -> Result<Pooling, String> {
        Keys::root("f", value).and_then(|keys| pooling(&keys, 8)).map_err(|error| error.to_string())
    }

    /// Goal: both versions of the file are read, and unsupported pooling is refused, with its name.
    #[test]
    fn pooling_is_read_or_refused_by_name() {
        let last = json!({"word_embedding_dimension": 8, "pooling_mode_mean_tokens": false,
            "pooling_mode_lasttoken": true, "include_prompt": false});
        assert_eq!(pooling_of(&last), Ok(Pooling::Last));
        let newer = json!({"embedding_dimension": 8, "pooling_mode": "lasttoken"});
        assert_eq!(pooling_of(&newer), Ok(Pooling::Last));
        assert_eq!(pooling_of(&json!({"pooling_mode": ["mean"]})), Ok(Pooling::Mean));
        assert_eq!(pooling_of(&json!({})), Ok(Pooling::Mean), "the default");
        assert_eq!(pooling_of(&json!({"pooling_mode_cls_token": true})), Ok(Pooling::First));
        for (value, parts) in [
            (json!({"pooling_mode": "median"}), ["pooling_mode", "median"]),
            (json!({"pooling_mode": ["cls", "mean"]}), ["one of cls", "cls, mean"]),
            (json!({"pooling_mode": 3}), ["pooling_mode", "3"]),
            (json!({"pooling_mode": "mean", "include_prompt": false}), ["include_prompt", "true"]),
            (json!({"word_embedding_dimension": 9}), ["word_embedding_dimension", "8"]),
        ] {
            let error = pooling_of(&value).expect_err("refused");
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }

    /// Goal: only supported pipelines are accepted. Others are refused, with their modules, unless
    /// they compute no embeddings.
    #[test]
    fn modules_are_read_or_refused_by_name() {
        let of = |kinds: &[&str]| {
            let path = |(index, kind): (usize, &str)| match kind.rsplit('.').next() {
                Some("Pooling") => "1_Pooling".to_owned(),
                Some("Dense") => format!("{index}_Dense"),
                _ => String::new(),
            };
            let list = kinds.iter().enumerate();
            let list = list.map(|(index, kind)| json!({"type": kind, "path": path((index, kind))}));
            let modules = modules("f", &list.collect()).map_err(|error| error.to_string())?;
            Ok::<_, String>(modules.map(|modules| (modules.dense, modules.normalize)))
        };
        let (transformer, pooling) = ("a.models.Transformer", "b.modules.pooling.Pooling");
        assert_eq!(of(&[transformer, pooling]), Ok(Some((vec![], false))));
        assert_eq!(of(&[transformer, pooling, "Normalize"]), Ok(Some((vec![], true))));
        let dense = vec!["2_Dense".to_owned()];
        assert_eq!(of(&[transformer, pooling, "y.Dense", "Normalize"]), Ok(Some((dense, true))));
        assert_eq!(of(&[transformer, "x.LogitScore"]), Ok(None));
        assert_eq!(of(&[]), Ok(None));
        for refused in ["y.WordWeights", "Transformer"] {
            let error = of(&[transformer, pooling, refused, "Normalize"]).expect_err("refused");
            assert!(error.contains(refused.rsplit('.').next().expect("a name")), "{error}");
        }
        let outside = json!([{"type": transformer}, {"type": pooling, "path": "1_Pooling"},
                             {"type": "Dense", "path": "../2_Dense"}]);
        assert!(modules("f", &outside).is_err());
        for bad in [json!({}), json!([1]), json!([{"path": ""}])] {
            assert!(modules("f", &bad).is_err(), "{bad}");
        }
        let elsewhere = json!([{"type": "Transformer"}, {"type": "Pooling", "path": "../p"}]);
        assert!(modules("f", &elsewhere).is_err());
    }

    /// Goal: a model whose own code may compute something else is refused.
    #[test]
    fn pooling_with_code_of_its_own_is_refused() {
        let of = |value: Value| Keys::root("f", &value).and_then(|keys| refuse_own_code(&keys));
        assert!(of(json!({"auto_map": {"AutoConfig": "a.B"}})).is_ok());
        let error = of(json!({"auto_map": {"AutoModel": "a.B"}})).expect_err("refused");
        assert!(error.to_string().contains("auto_map.AutoModel"), "{error}");
    }

    /// Goal: embeddings are shortened only to declared sizes.
    #[test]
    fn sizes_are_those_that_are_declared() {
        let of = |value: Value| Keys::root("f", &value).and_then(|keys| sizes(&keys, 8));
        let allowed = |sizes: EmbeddingSizes| {
            (0..10).filter(|&size| sizes.allow(size, 8)).collect::<Vec<_>>()
        };
        assert_eq!(allowed(of(json!({})).expect("valid")), [8]);
        let any = of(json!({"is_matryoshka": true})).expect("valid");
        assert_eq!(allowed(any), [1, 2, 3, 4, 5, 6, 7, 8]);
        let listed = json!({"is_matryoshka": true, "matryoshka_dimensions": [2, 4]});
        assert_eq!(allowed(of(listed).expect("valid")), [2, 4, 8]);
        for bad in [json!([0]), json!([9]), json!(["4"]), json!(vec![1; 1025])] {
            assert!(of(json!({"matryoshka_dimensions": bad})).is_err());
        }
    }
}
