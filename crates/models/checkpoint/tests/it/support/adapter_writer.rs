//! Writes LoRA adapters in the format of PEFT for tests, with random matrices.

use std::path::Path;

use serde_json::{Map, Value, json};

/// A tensor: its name, its type as safetensors files name it, its shape and its bytes.
pub(crate) type Entry = (String, &'static str, Vec<usize>, Vec<u8>);

/// An adapter that is written to a directory.
#[derive(Clone, Debug)]
pub(crate) struct AdapterWriter {
    /// The members of `adapter_config.json`.
    pub(crate) settings: Value,
    /// The tensors of `adapter_model.safetensors`, in the order of their data.
    pub(crate) tensors: Vec<Entry>,
    state: u64,
}

impl AdapterWriter {
    /// An adapter without matrices, whose scale is 2. Different seeds give different matrices.
    pub(crate) fn new(rank: usize, seed: u64) -> Self {
        let settings = json!({ "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank });
        Self { settings, tensors: Vec::new(), state: seed }
    }

    /// The next of a sequence of numbers from -0.5 to 0.5.
    fn number(&mut self) -> f32 {
        // SplitMix64.
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 40) as f32 / (1u32 << 24) as f32 - 0.5
    }

    /// Adds random matrices of the type F32 or BF16 for the module `module`, such as
    /// `model.layers.0.self_attn.q_proj`, whose weight is `[out, in]`, or `[in, out]` for the
    /// embedding, `model.embed_tokens`.
    pub(crate) fn add(&mut self, module: &str, shape: [usize; 2], dtype: &'static str) {
        let is_embedding = module.ends_with("embed_tokens");
        let [input, out] = if is_embedding { shape } else { [shape[1], shape[0]] };
        let rank = self.settings["r"].as_u64().expect("a rank") as usize;
        // An update is of about the size of the results that it is added to.
        let scale = 2.0 / (rank as f32).sqrt() / (input as f32).sqrt();
        for (name, shape, scale) in [("A", vec![rank, input], 1.0), ("B", vec![out, rank], scale)] {
            let count = shape[0] * shape[1];
            let bytes = (0..count).flat_map(|_| {
                let bytes = (scale * self.number()).to_le_bytes();
                bytes[if dtype == "BF16" { 2 } else { 0 }..].to_vec()
            });
            let bytes = bytes.collect();
            let name = match is_embedding {
                true => format!("base_model.model.{module}.lora_embedding_{name}"),
                false => format!("base_model.model.{module}.lora_{name}.weight"),
            };
            self.tensors.push((name, dtype, shape, bytes));
        }
    }

    /// The contents of `adapter_model.safetensors`.
    pub(crate) fn weights(&self) -> Vec<u8> {
        let mut header = Map::new();
        let mut end = 0;
        for (name, dtype, shape, bytes) in &self.tensors {
            let offsets = [end, end + bytes.len()];
            end = offsets[1];
            let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets });
            header.insert(name.clone(), entry);
        }
        let header = Value::Object(header).to_string();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend_from_slice(header.as_bytes());
        self.tensors.iter().for_each(|(.., bytes)| file.extend_from_slice(bytes));
        file
    }

    /// Writes the files of the adapter to `directory`, which is created.
    pub(crate) fn write(&self, directory: &Path) {
        std::fs::create_dir_all(directory).expect("a directory");
        let settings = self.settings.to_string();
        std::fs::write(directory.join("adapter_config.json"), settings).expect("a file");
        let weights = self.weights();
        std::fs::write(directory.join("adapter_model.safetensors"), weights).expect("a file");
    }
}
