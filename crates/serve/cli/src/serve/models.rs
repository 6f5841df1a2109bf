//! Several models in one server: `--model NAME=SOURCE`, repeated, or `[[models]]` in the file with
//! settings.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::Args;
use stolon::{EngineBuilder, EngineError, ModelRecipe, ModelSet};

use crate::args::EngineArgs;
use crate::memory::{format_bytes, parse_bytes};
use crate::terminal;

/// Maximum length of the name of a model, in bytes.
const NAME_BYTES_MAX: usize = 100;

/// Settings of all models of a server of several.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Several models")]
pub(super) struct ModelsArgs {
    /// Memory for all models together, weights and KV caches, in bytes or with a unit: 16G
    ///
    /// If a model that is to be loaded does not fit, others leave: the idle one that was used least
    /// recently first, and one that is in use when its requests have ended. What the weights leave is
    /// divided evenly among the KV caches, unless their size is set (--kv-memory applies to each
    /// model). Default: no limit.
    #[arg(long, value_parser = parse_bytes, value_name = "BYTES")]
    models_memory: Option<u64>,
    /// Seconds without a request after which a model is unloaded, counted from the end of its last
    /// request. By default none is
    ///
    /// The next request loads it again. With --kv-cache-dir, where each model has a folder of its
    /// own, it starts with what it had computed.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=31_536_000))]
    #[arg(value_name = "SECONDS", visible_alias = "sleep-idle-seconds")]
    models_idle: Option<u64>,
    /// Name of a model that is loaded at start and stays loaded. Can be repeated
    #[arg(long, value_name = "NAME")]
    models_pinned: Vec<String>,
    /// Load all models at start, one after another. By default the first request for a model loads
    /// it
    #[arg(long)]
    models_at_start: bool,
}

/// A model of a server of several.
#[derive(Clone, Debug)]
pub(crate) struct NamedModel {
    pub(crate) name: String,
    /// Its engine's settings.
    pub(crate) engine: EngineArgs,
    pub(crate) pinned: bool,
    pub(crate) at_start: bool,
    /// The memory that it counts for, in bytes, if that is not to be computed.
    pub(crate) memory: Option<u64>,
}

/// The name and the source in `NAME=SOURCE`; `None` if the text is the source of one model without a
/// name. A name has no slash, so that a path with `=` is no name, and neither is a file that exists.
pub(crate) fn named(text: &str) -> Option<(&str, &str)> {
    let (name, source) = text.split_once('=')?;
    let is_named = check_name(name).is_ok() && !source.is_empty() && !Path::new(text).exists();
    is_named.then_some((name, source))
}

/// Refuses names that cannot be the name of a folder on every system.
pub(crate) fn check_name(name: &str) -> anyhow::Result<()> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
    ensure!(
        (1..=NAME_BYTES_MAX).contains(&name.len())
            && name.bytes().all(is_allowed)
            && !name.starts_with('.'),
        "the name of a model: expected 1 to {NAME_BYTES_MAX} letters, digits, `-`, `_`, `.` and `:`, \
         got `{}`",
        name.escape_debug()
    );
    Ok(())
}

impl ModelsArgs {
    /// Refuses flags that have no effect on a server of one model.
    pub(super) fn check_unused(&self) -> anyhow::Result<()> {
        let set = [
            ("--models-memory", self.models_memory.is_some()),
            ("--models-idle", self.models_idle.is_some()),
            ("--models-pinned", !self.models_pinned.is_empty()),
            ("--models-at-start", self.models_at_start),
        ];
        match set.into_iter().find(|&(_, is_set)| is_set) {
            Some((flag, _)) => bail!("expected --model NAME=SOURCE with {flag}"),
            None => Ok(()),
        }
    }

    /// Makes the set and loads the models that are to be loaded at start. `complete` adds the
    /// settings of the server to an engine.
    pub(super) async fn start(
        &self,
        models: &[NamedModel],
        complete: impl Fn(EngineBuilder) -> EngineBuilder + Clone + Send + Sync + 'static,
    ) -> anyhow::Result<ModelSet> {
        for name in &self.models_pinned {
            let is_known = models.iter().any(|model| model.name == *name);
            ensure!(is_known, "--models-pinned: there is no model `{name}`");
        }
        let mut set = ModelSet::builder();
        for NamedModel { name, engine, pinned, at_start, memory } in models {
            // Wrong settings are refused now, not when the model is loaded.
            engine.builder().with_context(|| format!("the model `{name}`"))?;
            let (engine, complete) = (engine.clone(), complete.clone());
            let recipe = ModelRecipe::new(name, move || {
                let failed = |error: anyhow::Error| EngineError::StartFailed {
                    reason: crate::cli::one_line(&error),
                };
                Ok(complete(engine.builder().map_err(failed)?))
            });
            let pinned = *pinned || self.models_pinned.contains(name);
            let at_start = *at_start || pinned || self.models_at_start;
            let recipe = recipe.pinned(pinned).at_start(at_start);
            set = set.model(match *memory {
                Some(bytes) => recipe.memory(bytes),
                None => recipe,
            });
        }
        if let Some(bytes) = self.models_memory {
            set = set.memory(bytes);
        }
        if let Some(seconds) = self.models_idle {
            set = set.idle_timeout(Duration::from_secs(seconds));
        }
        let set = set.build()?;
        set.load_at_start().await?;
        Ok(set)
    }
}

/// Describes the models on standard output.
pub(super) fn announce(models: &ModelSet) {
    for model in models.list() {
        let state = match model.info {
            Some(info) => format!(
                "{} ({} tokens of context, KV cache {})",
                info.id,
                info.max_positions,
                format_bytes(info.kv_bytes as u64)
            ),
            None => "loaded by its first request".to_owned(),
        };
        terminal::note(format!("model    {}: {state}", model.name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a name before `=` names a model, and paths, hub ids and files do not.
    #[test]
    fn named_models_are_recognized() {
        let dir = tempfile::tempdir().expect("a directory");
        for (text, expected) in [
            ("chat=Qwen/Qwen3-4B", Some(("chat", "Qwen/Qwen3-4B"))),
            ("a:b-1.5_x=m=n.gguf", Some(("a:b-1.5_x", "m=n.gguf"))),
            ("Qwen/Qwen3-4B", None),
            ("./a=b", None),
            ("/models/a=b.gguf", None),
            (".a=b", None),
            ("=b", None),
            ("a=", None),
            ("a b=c", None),
        ] {
            assert_eq!(named(text), expected, "{text}");
        }
        assert!(dir.path().join("a=b").to_str().is_some_and(|path| named(path).is_none()));
    }
}
