//! Flags of LoRA adapters.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use serde::Deserialize;
use stolon::EngineBuilder;

use crate::memory::parse_bytes;

/// The adapters that are loaded at start, and the memory of all.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Engine")]
pub struct AdapterArgs {
    /// LoRA adapters to load: NAME=PATH, or a JSON object with `name` and `path`. Several can be
    /// given, and the flag can be repeated
    ///
    /// A path is a directory with the files of PEFT (adapter_config.json and
    /// adapter_model.safetensors), or a GGUF file. Requests choose an adapter by its name as the
    /// model. More can be loaded while the server runs (`/v1/load_lora_adapter`).
    #[arg(long, visible_alias = "lora-adapters", value_name = "NAME=PATH", num_args = 1..)]
    pub lora_modules: Vec<LoraModule>,
    /// Memory for the weights of LoRA adapters, in bytes or with a unit: 536870912, 512M, 1.5G
    ///
    /// If one more is needed, those that no request uses leave the memory, the least recently used
    /// one first. They stay loaded by name, and the next request reads their files again.
    #[arg(long, value_parser = parse_bytes, default_value = "1G", value_name = "BYTES")]
    pub lora_memory: u64,
    /// Accepted as in vLLM, without an effect: LoRA adapters can always be loaded
    #[arg(long, hide = true)]
    pub enable_lora: bool,
}

/// An adapter that is loaded at start.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct LoraModule {
    name: String,
    path: PathBuf,
    /// The model that it changes, which vLLM reports. It has no effect.
    #[serde(default, rename = "base_model_name")]
    _base: Option<String>,
}

impl FromStr for LoraModule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim_start().starts_with('{') {
            return serde_json::from_str(text)
                .map_err(|error| format!("expected an object with `name` and `path`: {error}"));
        }
        match text.split_once('=') {
            Some((name, path)) if !name.is_empty() && !path.is_empty() => {
                Ok(Self { name: name.to_owned(), path: path.into(), _base: None })
            }
            _ => Err(format!("expected NAME=PATH, or a JSON object, got `{text}`")),
        }
    }
}

impl AdapterArgs {
    /// Adds the adapters to an engine.
    pub(super) fn apply(&self, builder: EngineBuilder) -> EngineBuilder {
        let builder = builder.adapter_memory(self.lora_memory);
        self.lora_modules
            .iter()
            .fold(builder, |builder, LoraModule { name, path, .. }| builder.adapter(name, path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: both forms of vLLM are parsed, and anything else is refused with what was expected.
    #[test]
    fn modules_are_parsed() {
        let module = |name: &str, path: &str| LoraModule {
            name: name.to_owned(),
            path: path.into(),
            _base: None,
        };
        assert_eq!("sql=a/b=c".parse(), Ok(module("sql", "a/b=c")));
        assert_eq!(r#"{"name": "x", "path": "y"}"#.parse(), Ok(module("x", "y")));
        let named = r#"{"name": "x", "path": "y", "base_model_name": "z"}"#;
        assert!(named.parse::<LoraModule>().is_ok());
        for bad in ["sql", "=x", "x=", r#"{"name": "x"}"#] {
            let error = bad.parse::<LoraModule>().expect_err("not a module");
            assert!(error.contains("expected"), "{error}");
        }
    }
}
