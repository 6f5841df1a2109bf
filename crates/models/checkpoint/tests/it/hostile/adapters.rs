//! Crafted and damaged adapters: every one is an error that names the tensor or the key, or an
//! adapter that can be used.

use std::path::Path;
use std::sync::Arc;

use rand::SeedableRng;
use rand::rngs::SmallRng;
use serde_json::{Value, json};
use stolon_backend::{Adapter, AdapterLoadError, AdapterLoader, Backend};
use stolon_checkpoint::{KvBudget, LoadOptions, MixerConfig, ModelSource, load};
use stolon_cpu::{CpuBackend, CpuOptions};

use super::mutations::damage;
use crate::support::adapter_writer::AdapterWriter;
use crate::support::gguf_writer::{GgufWriter, Meta};
use crate::support::model_adapter::whole_adapter;

/// Maximum size of an adapter in bytes. Those of these tests have a tenth of it.
const BYTES_MAX: u64 = 1 << 20;
const QUERY: &str = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";

/// A loader of adapters for the fixture `name`, perhaps with the order of heads of GGUF files, and
/// a valid adapter.
fn subject(name: &str) -> (Arc<dyn AdapterLoader>, AdapterWriter) {
    let (name, is_gguf) = name.strip_suffix(" in GGUF").map_or((name, false), |name| (name, true));
    let source = ModelSource::Directory(stolon_fixtures::path(name));
    let mut model = load(&source, &LoadOptions::default()).unwrap();
    for mixer in model.config.layers.iter_mut().flat_map(|layer| &mut layer.mixers) {
        if let (MixerConfig::DeltaNet(delta_net), true) = (mixer, is_gguf) {
            delta_net.grouped = false;
        }
    }
    let mut adapter = whole_adapter(&model.config, 4, "F32", 1);
    let shape = [model.config.vocab_size, model.config.hidden_size];
    for module in ["lm_head", "model.embed_tokens"] {
        adapter.add(module, shape, "F32");
    }
    let options =
        CpuOptions { kv_budget: KvBudget::Blocks(2), threads: Some(1), ..CpuOptions::default() };
    let backend = CpuBackend::new(model.config, model.weights, options).unwrap();
    (backend.adapters().unwrap(), adapter)
}

/// Loads an adapter and checks that this allocates little.
fn load_within(loader: &dyn AdapterLoader, path: &Path) -> Result<Adapter, AdapterLoadError> {
    let mut result = Err(AdapterLoadError::NotFound(String::new()));
    let memory = allocation_counter::measure(|| result = loader.load(path, BYTES_MAX));
    assert!(memory.bytes_max < 16 * BYTES_MAX, "{} bytes: {result:?}", memory.bytes_max);
    result
}

#[track_caller]
fn refused(loader: &dyn AdapterLoader, adapter: &AdapterWriter, expected: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    adapter.write(dir.path());
    let error = load_within(loader, dir.path()).expect_err(expected[0]).to_string();
    assert!(error.len() < 4000, "an error of {} bytes", error.len());
    expected.iter().for_each(|part| assert!(error.contains(part), "`{error}` lacks `{part}`"));
}

/// Goal: tensors that are missing, of the wrong shape or type, or not of a projection that adapters
/// may change are refused by name.
#[test]
fn tensors_that_do_not_fit_are_refused_by_name() {
    let (loader, good) = subject("llama");
    let dir = tempfile::tempdir().unwrap();
    good.write(dir.path());
    load_within(&*loader, dir.path()).unwrap();
    type Change = fn(&mut AdapterWriter);
    let cases: [(Change, &[&str]); 12] = [
        (|adapter| adapter.tensors.clear(), &["expected matrices, got none"]),
        (|adapter| drop(adapter.tensors.remove(0)), &["layers.0.self_attn.q_proj", "missing"]),
        (|adapter| drop(adapter.tensors.remove(1)), &["layers.0.self_attn.q_proj", "lora_B"]),
        (|adapter| adapter.tensors[0].2 = vec![3, 64], &["q_proj", "shape [4, 48]", "[3, 64]"]),
        (|adapter| adapter.tensors[1].2 = vec![16, 12], &["q_proj", "[12, 48]", "[4, 48]"]),
        (|adapter| adapter.tensors[1].2 = vec![192], &["q_proj", "1 to 1024 columns", "[192]"]),
        (|adapter| adapter.tensors[0].1 = "I32", &["q_proj", "type", "I32"]),
        (
            |adapter| {
                adapter.settings["r"] = 0.into();
            },
            &["key `r`"],
        ),
        (
            |adapter| {
                adapter.settings["r"] = 5.into();
            },
            &["key `r`: expected 4, the rank of the matrices of `model.layers.0.self_attn.q_proj`"],
        ),
        (
            |adapter| {
                adapter.settings["lora_alpha"] = json!(1e300);
                adapter.settings["use_dora"] = true.into();
            },
            &["key `use_dora`"],
        ),
        (
            |adapter| {
                adapter.settings = json!([]);
            },
            &["expected a JSON object"],
        ),
        (
            |adapter| {
                // 1,025 columns of no rows have no bytes.
                adapter.tensors[1].2 = vec![0, 1025];
                adapter.tensors[1].3.clear();
            },
            &["q_proj"],
        ),
    ];
    for (change, expected) in cases {
        let mut adapter = good.clone();
        change(&mut adapter);
        refused(&*loader, &adapter, expected);
    }
    for other in [
        "base_model.model.lm_head.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias",
        "base_model.model.model.layers.0.input_layernorm.lora_A.weight",
        "base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.00.self_attn.q_proj.lora_A.weight",
    ] {
        let mut adapter = good.clone();
        adapter.tensors[0].0 = other.to_owned();
        refused(&*loader, &adapter, &[other, "is not supported"]);
    }
}

/// Goal: matrices of the embedding and of the output matrix that do not fit are refused by name,
/// and so are other matrices than the model's in the adapter's files.
#[test]
fn matrices_of_the_vocabulary_are_checked() {
    let (loader, good) = subject("llama");
    let at = |name: &str| {
        let name = format!("base_model.model.{name}");
        good.tensors.iter().position(|tensor| tensor.0 == name).unwrap()
    };
    let head = ["lora_A", "lora_B"].map(|end| at(&format!("lm_head.{end}.weight")));
    let tokens = ["A", "B"].map(|end| at(&format!("model.embed_tokens.lora_embedding_{end}")));
    for (index, expected) in [
        (head[0], ["lm_head (lora_A)", "[4, 48]", "missing"]),
        (head[1], ["lm_head (lora_B)", "[96, 4]", "missing"]),
        (tokens[0], ["model.embed_tokens (lora_A)", "[4, 96]", "missing"]),
        (tokens[1], ["model.embed_tokens (lora_B)", "[48, 4]", "missing"]),
    ] {
        let mut adapter = good.clone();
        adapter.tensors.remove(index);
        refused(&*loader, &adapter, &expected);
    }
    for (index, shape, expected) in [
        (head[1], vec![48, 8], ["lm_head.weight", "expected shape [8, 48], got [4, 48]"]),
        (tokens[0], vec![96, 4], ["embed_tokens", "expected shape [4, 96], got [96, 4]"]),
        (tokens[0], vec![384], ["embed_tokens", "expected shape [4, 96], got [384]"]),
        (tokens[1], vec![96, 2], ["embed_tokens", "expected shape [2, 96], got [4, 96]"]),
        (tokens[1], vec![192], ["embed_tokens", "1 to 1024 columns, got [192]"]),
    ] {
        let mut adapter = good.clone();
        adapter.tensors[index].2 = shape;
        refused(&*loader, &adapter, &expected);
    }
    // PEFT saves these next to the adapter.
    let dir = tempfile::tempdir().unwrap();
    good.write(dir.path());
    let bytes = load_within(&*loader, dir.path()).unwrap().bytes();
    for module in ["lm_head", "model.embed_tokens"] {
        let name = format!("base_model.model.{module}.base_layer.weight");
        let mut adapter = good.clone();
        adapter.tensors.push((name.clone(), "F32", vec![96, 48], vec![0; 4 * 96 * 48]));
        adapter.write(dir.path());
        assert_eq!(load_within(&*loader, dir.path()).unwrap().bytes(), bytes);
        // After tokens have been added.
        adapter.tensors.pop();
        adapter.tensors.push((name, "F32", vec![97, 48], vec![0; 4 * 97 * 48]));
        refused(&*loader, &adapter, &[module, "base_layer", "[96, 48]", "[97, 48]"]);
    }
    for other in [
        "model.layers.0.self_attn.q_proj.base_layer.weight",
        "model.embed_tokens.weight",
        "model.embed_tokens.lora_A.weight",
        "lm_head.lora_embedding_A",
    ] {
        let mut adapter = good.clone();
        adapter.tensors[0].0 = format!("base_model.model.{other}");
        refused(&*loader, &adapter, &[other, "is not supported"]);
    }
}

/// Goal: matrices of the keys and values of latent attention that do not fit are refused by name.
#[test]
fn matrices_of_latent_attention_are_checked() {
    let (loader, good) = subject("deepseek_v3");
    let dir = tempfile::tempdir().unwrap();
    good.write(dir.path());
    load_within(&*loader, dir.path()).unwrap();
    let at = |end: &str| {
        let name = format!("base_model.model.model.layers.1.self_attn.kv_b_proj.{end}.weight");
        good.tensors.iter().position(|tensor| tensor.0 == name).unwrap()
    };
    // Four heads with keys of 12 and values of 10 elements, from 20 elements.
    let [first, second] = ["lora_A", "lora_B"].map(at);
    let module = "layers.1.self_attn.kv_b_proj";
    for (index, expected) in [
        (first, "(lora_A)`: expected shape [4, 20]"),
        (second, "(lora_B)`: expected shape [88, 4]"),
    ] {
        let mut adapter = good.clone();
        adapter.tensors.remove(index);
        refused(&*loader, &adapter, &[module, expected]);
    }
    for (index, shape, expected) in [
        (first, vec![20, 4], "expected shape [4, 20], got [20, 4]"),
        (first, vec![80], "expected shape [4, 20], got [80]"),
        (second, vec![44, 8], "expected shape [88, 8], got [44, 8]"),
        (second, vec![352], "expected shape [88, 352], got [352]"),
    ] {
        let mut adapter = good.clone();
        adapter.tensors[index].2 = shape;
        refused(&*loader, &adapter, &[module, expected]);
    }
    let mut adapter = good.clone();
    adapter.tensors[second].1 = "I32";
    refused(&*loader, &adapter, &[module, "expected type F32, F16 or BF16", "I32"]);
}

/// Goal: matrices of experts that do not fit are refused by name.
#[test]
fn matrices_of_experts_are_checked() {
    for (name, module) in [
        ("mixtral", "layers.1.mlp.experts.2.down_proj"),
        ("qwen2_moe", "layers.1.mlp.shared_expert.down_proj"),
        ("deepseek_v3", "layers.1.mlp.down_proj"),
    ] {
        let (loader, good) = subject(name);
        let dir = tempfile::tempdir().unwrap();
        good.write(dir.path());
        load_within(&*loader, dir.path()).unwrap();
        let second = format!("base_model.model.model.{module}.lora_B.weight");
        let second = good.tensors.iter().position(|tensor| tensor.0 == second).unwrap();
        let mut adapter = good.clone();
        adapter.tensors.remove(second);
        refused(&*loader, &adapter, &[module, "(lora_B)`: expected shape [48, 4]"]);
        let mut adapter = good.clone();
        adapter.tensors[second].2 = vec![24, 8];
        refused(&*loader, &adapter, &[module, "expected shape [8, ", "got [4, "]);
    }
}

/// A valid adapter for the two parameters of all 12 experts of a layer of the fixture `qwen3_moe`,
/// of rank 4: `A` and `B` of gate and up, then of down.
fn of_parameters() -> AdapterWriter {
    let mut adapter = AdapterWriter::new(4, 1);
    adapter.settings["peft_version"] = json!("0.19.0");
    for (module, out, inputs) in [("experts.base_layer", 32, 48), ("experts", 48, 16)] {
        for (end, shape) in [("lora_A", vec![48, inputs]), ("lora_B", vec![out, 48])] {
            let name = format!("base_model.model.model.layers.1.mlp.{module}.{end}.weight");
            let bytes = vec![1; 4 * shape[0] * shape[1]];
            adapter.tensors.push((name, "F32", shape, bytes));
        }
    }
    adapter
}

/// Goal: matrices of a parameter of all experts that are missing, or that are for another number of
/// experts or another parameter, are refused by the name of their module, and so are other
/// parameters.
#[test]
fn parameters_of_experts_are_checked() {
    let (loader, _) = subject("qwen3_moe");
    let good = of_parameters();
    let dir = tempfile::tempdir().unwrap();
    good.write(dir.path());
    assert_eq!(load_within(&*loader, dir.path()).unwrap().rank(), 4);
    let name = good.tensors[0].0.replace("base_layer", "base_layer.base_layer");
    let single = "model.layers.1.mlp.experts.3.up_proj";
    type Change<'a> = &'a dyn Fn(&mut AdapterWriter);
    let shapes = |first: [usize; 2], second: [usize; 2]| {
        move |adapter: &mut AdapterWriter| {
            for (index, shape) in [(0, first), (1, second)] {
                adapter.tensors[index].2 = shape.to_vec();
                adapter.tensors[index].3 = vec![1; 4 * shape[0] * shape[1]];
            }
        }
    };
    let expected = "[12 * rank, 48] and [32, 12 * rank] (gate_up_proj) or [12 * rank, 16] and \
                    [48, 12 * rank] (down_proj)";
    let module = "`model.layers.1.mlp.experts`: expected lora_A and lora_B of 12 experts";
    let old = ["key `peft_version`: expected 0.19 or later", "got 0.18.1"];
    let cases: [(Change<'_>, &[&str]); 15] = [
        (&|a| drop(a.tensors.remove(0)), &[module, expected, "got nothing and [32, 48]"]),
        (&|a| drop(a.tensors.remove(1)), &[module, expected, "got [48, 48] and nothing"]),
        // 11 experts, no rank, different ranks, each matrix transposed, the other dimensions.
        (&shapes([44, 48], [32, 44]), &[module, "got [44, 48] and [32, 44]"]),
        (&shapes([0, 48], [32, 0]), &[module, "got [0, 48] and [32, 0]"]),
        (&shapes([48, 48], [32, 24]), &[module, "got [48, 48] and [32, 24]"]),
        (&shapes([48, 48], [48, 32]), &[module, "got [48, 48] and [48, 32]"]),
        (&shapes([48, 32], [48, 48]), &[module, "got [48, 32] and [48, 48]"]),
        // Down twice.
        (&shapes([48, 16], [48, 48]), &["duplicate tensor", "experts.0.down_proj"]),
        (&|a| a.add(single, [16, 48], "F32"), &["duplicate tensor", "experts.3.up_proj"]),
        (&|a| a.settings["peft_version"] = json!("0.18.1"), &old),
        (&|a| a.settings["peft_version"] = json!(null), &["key `peft_version`", "none"]),
        (&|a| a.tensors[1].1 = "I32", &["expected type F32", "I32"]),
        (&|a| a.tensors[0].0.clone_from(&name), &[&name, "is not supported"]),
        (
            &|a| a.settings["rank_pattern"] = json!({ ".*\\.gate_up_proj": 8 }),
            &["key `r`: expected 4", "`model.layers.1.mlp.experts.gate_up_proj`"],
        ),
        (
            &|a| {
                a.settings["target_parameters"] = json!(["experts.gate_up_proj", "mlp.norm.weight"])
            },
            &["key `target_parameters`", "down_proj"],
        ),
    ];
    for (change, expected) in cases {
        let mut adapter = good.clone();
        change(&mut adapter);
        refused(&*loader, &adapter, expected);
    }
    let bytes = good.weights().len() as u64;
    good.write(dir.path());
    for bytes_max in [bytes - 1, load_within(&*loader, dir.path()).unwrap().bytes() - 1] {
        let error = loader.load(dir.path(), bytes_max).unwrap_err();
        assert!(matches!(error, AdapterLoadError::TooLarge(_)), "{error}");
    }
    // Models without experts do not have such modules.
    refused(&*subject("llama").0, &good, &["mlp.experts.base_layer.lora_A", "is not supported"]);
}

/// Goal: two tensors with names of the same matrix are refused.
#[test]
fn tensors_of_the_same_matrix_are_refused() {
    let (loader, mut twice) = subject("llama");
    twice.tensors[2].0 = QUERY.replace("base_model.model.", "");
    refused(&*loader, &twice, &["duplicate tensor", "q_proj"]);
}

/// Goal: adapters of experts that there are not, and of convolutions' taps are refused by name, and
/// so are those of value heads that are in another order in the model.
#[test]
fn taps_and_unknown_experts_are_refused() {
    for (name, tensor) in [
        ("mixtral", "layers.0.block_sparse_moe.experts.9.w1"),
        ("mixtral", "layers.0.block_sparse_moe.experts.*.w1"),
        ("mixtral", "layers.0.mlp.shared_expert_gate"),
        ("qwen3_5", "layers.0.linear_attn.conv1d"),
        ("qwen3_5 in GGUF", "layers.0.linear_attn.in_proj_qkv"),
        ("qwen3_5 in GGUF", "layers.0.linear_attn.out_proj"),
        ("lfm2", "layers.0.conv.conv"),
        ("nemotron_h", "layers.0.mixer.conv1d"),
        ("deepseek_v3", "layers.0.self_attn.k_b_proj.0"),
        ("deepseek_v3", "layers.0.self_attn.v_b_proj.0"),
    ] {
        let (loader, mut adapter) = subject(name);
        let name = format!("base_model.model.model.{tensor}.lora_A.weight");
        adapter.tensors.truncate(1);
        adapter.tensors[0].0.clone_from(&name);
        refused(&*loader, &adapter, &[&name, "is not supported"]);
    }
}

/// Goal: the sizes of files and of packed matrices are bounded before they are read or allocated.
#[test]
fn sizes_are_bounded() {
    let (loader, good) = subject("llama");
    let dir = tempfile::tempdir().unwrap();
    good.write(dir.path());
    let bytes = good.weights().len() as u64;
    let error = loader.load(dir.path(), bytes - 1).unwrap_err();
    assert!(
        matches!(&error, AdapterLoadError::TooLarge(text) if text.contains("at most")),
        "{error}"
    );
    let size = loader.load(dir.path(), BYTES_MAX).unwrap().bytes();
    let error = loader.load(dir.path(), size.max(bytes) - 1).unwrap_err();
    assert!(
        matches!(&error, AdapterLoadError::TooLarge(text) if text.contains("at most")),
        "{error}"
    );
    for (path, expected) in [("nothing", "adapter_config.json"), ("nothing.gguf", "No such file")] {
        let error = loader.load(&dir.path().join(path), BYTES_MAX).unwrap_err();
        assert!(matches!(&error, AdapterLoadError::NotFound(text) if text.contains(expected)));
    }
    std::fs::remove_file(dir.path().join("adapter_model.safetensors")).unwrap();
    std::fs::write(dir.path().join("adapter_model.bin"), "").unwrap();
    let error = loader.load(dir.path(), BYTES_MAX).unwrap_err().to_string();
    assert!(error.contains("adapter_model.bin is not supported"), "{error}");
}

/// A GGUF adapter of one projection.
fn gguf() -> GgufWriter {
    let text = |key: &str, value: &str| (key.to_owned(), Meta::Text(value.to_owned()));
    let tensor = |name: &str, shape: [usize; 2]| {
        let bytes = vec![1; 4 * shape[0] * shape[1]];
        (format!("blk.0.attn_q.weight.{name}"), shape.to_vec(), 0, bytes)
    };
    GgufWriter {
        metadata: vec![
            text("general.architecture", "llama"),
            text("general.type", "adapter"),
            text("adapter.type", "lora"),
            ("adapter.lora.alpha".to_owned(), Meta::F32(8.0)),
        ],
        tensors: vec![tensor("lora_a", [4, 48]), tensor("lora_b", [48, 4])],
    }
}

/// Goal: GGUF files that are not LoRA adapters for the model are refused by the key or the tensor.
#[test]
fn other_gguf_files_are_refused() {
    let (loader, _) = subject("llama");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("adapter.gguf");
    let load = |file: &GgufWriter| {
        std::fs::write(&path, file.bytes()).unwrap();
        load_within(&*loader, &path).map_err(|error| error.to_string())
    };
    load(&gguf()).unwrap();
    for (index, value, expected) in [
        (0, Meta::Text("qwen3".to_owned()), "general.architecture"),
        (1, Meta::Text("model".to_owned()), "general.type"),
        (2, Meta::Text("ia3".to_owned()), "adapter.type"),
        (3, Meta::F32(f32::NAN), "adapter.lora.alpha"),
        (3, Meta::Text("8".to_owned()), "adapter.lora.alpha"),
    ] {
        let mut file = gguf();
        file.metadata[index].1 = value;
        let error = load(&file).unwrap_err();
        assert!(error.contains(&format!("key `{expected}`")), "{error}");
    }
    for name in [
        "token_embd.weight",
        "blk.0.attn_q.weight",
        "blk.0.x.weight.lora_b",
        "blk.0.ffn_up_exps.weight.lora_a",
        "blk.0.attn_k_b.weight.lora_a",
    ] {
        let mut file = gguf();
        file.tensors[0].0 = name.to_owned();
        let error = load(&file).unwrap_err();
        assert!(error.contains(name) && error.contains("is not supported"), "{error}");
    }
    let mut activated = gguf();
    let tokens = Meta::I32s(vec![1]);
    activated.metadata.push(("adapter.alora.invocation_tokens".to_owned(), tokens));
    assert!(load(&activated).unwrap_err().contains("alora"));
}

/// Goal: a tensor of a GGUF file with the matrices of all experts is refused by name if it has
/// those of fewer or more.
#[test]
fn gguf_tensors_of_all_experts_are_checked() {
    let (loader, _) = subject("mixtral");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("adapter.gguf");
    for count in [4, 5, 6] {
        let tensor = |name: &str, shape: [usize; 3]| {
            let bytes = vec![1; 4 * shape.iter().product::<usize>()];
            (format!("blk.1.ffn_gate_exps.weight.{name}"), shape.to_vec(), 0, bytes)
        };
        let tensors = vec![tensor("lora_a", [count, 4, 48]), tensor("lora_b", [count, 40, 4])];
        std::fs::write(&path, GgufWriter { tensors, ..gguf() }.bytes()).unwrap();
        match load_within(&*loader, &path) {
            Ok(adapter) => assert_eq!((count, adapter.rank()), (5, 4)),
            Err(error) => {
                let error = error.to_string();
                assert!(count != 5 && error.contains("experts.*.gate_proj"), "{error}");
            }
        }
    }
}

/// Goal: damaged adapters are errors, or adapters that were read completely.
#[test]
fn damaged_adapters_do_no_harm() {
    let mut random = SmallRng::seed_from_u64(0x10a);
    let (loader, adapter) = subject("llama");
    let dir = tempfile::tempdir().unwrap();
    let settings = adapter.settings.to_string().into_bytes();
    let (weights, gguf) = (adapter.weights(), gguf().bytes());
    let header = 8 + u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize;
    for round in 0..900 {
        let (mut settings, mut weights, mut gguf) =
            (settings.clone(), weights.clone(), gguf.clone());
        match round % 3 {
            0 => damage(&mut settings, usize::MAX, &mut random),
            1 => damage(&mut weights, header, &mut random),
            _ => damage(&mut gguf, 400, &mut random),
        }
        let file = dir.path().join("adapter.gguf");
        std::fs::write(&file, gguf).unwrap();
        std::fs::write(dir.path().join("adapter_config.json"), settings).unwrap();
        std::fs::write(dir.path().join("adapter_model.safetensors"), weights).unwrap();
        let path = if round % 3 == 2 { &file } else { dir.path() };
        let _: Result<_, Value> = load_within(&*loader, path).map_err(|_| Value::Null);
    }
}
