//! `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as in vLLM, and the operator's list.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use stolon::AdapterInfo;

use super::fields::UnknownFields;

/// The body of `POST /v1/load_lora_adapter`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct LoadAdapter {
    /// The name by which requests choose the adapter, as `model`.
    pub lora_name: String,
    /// The adapter on the server's disk: a directory with the files of PEFT, or a `.gguf` file.
    pub lora_path: String,
    /// Whether an adapter of this name is replaced. Requests that use it end with the weights that
    /// they began with. Default false: a name that is in use is refused.
    pub load_inplace: Option<bool>,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The body of `POST /v1/unload_lora_adapter`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct UnloadAdapter {
    /// The name of the adapter. Requests that use it are answered.
    pub lora_name: String,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The reply to `GET /v1/lora_adapters`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct AdapterList {
    /// Always `list`.
    pub object: &'static str,
    /// The adapters that are loaded, in the order of their names.
    pub data: Vec<Adapter>,
}

/// A LoRA adapter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Adapter {
    /// The name by which requests choose it.
    pub name: String,
    /// The directory or file that it was loaded from.
    pub path: String,
    /// Identifies its weights, in hexadecimal. KV is shared only between requests of the same name
    /// and generation.
    pub generation: String,
    /// The largest rank of its matrices.
    pub rank: usize,
    /// Size of its weights in memory, in bytes.
    pub bytes: u64,
    /// Whether its weights are in memory. If not, the next request reads them again.
    pub in_memory: bool,
    /// Whether a request uses it.
    pub in_use: bool,
    /// Number of requests that have used it since it was loaded.
    pub requests: u64,
}

impl From<AdapterInfo> for Adapter {
    fn from(info: AdapterInfo) -> Self {
        Self {
            name: info.name,
            path: info.path.display().to_string(),
            generation: format!("{:016x}", info.generation),
            rank: info.rank,
            bytes: info.bytes,
            in_memory: info.in_memory,
            in_use: info.in_use,
            requests: info.requests,
        }
    }
}
