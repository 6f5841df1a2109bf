//! Text encoders: inspection, and GGUF files that cannot be used. `tests/it/encoders.rs` of the facade
//! compares what they compute.

use std::path::Path;

use stolon_checkpoint::inspect::{InspectOptions, Inspection, inspect};
use stolon_checkpoint::{AnyModel, EncoderTask, LoadOptions, ModelSource, load_any};

use crate::support::gguf_writer::{GgufWriter, Meta};

fn inspected(source: &ModelSource) -> Inspection {
    inspect(source, &InspectOptions::default()).expect("it can be described")
}

/// Goal: all encoders are described as they are loaded: sizes, pooling or labels, and memory.
#[test]
fn encoders_are_described() {
    let mut count = 0;
    for folder in ["encoders", "gguf_encoders"] {
        for entry in std::fs::read_dir(stolon_fixtures::path(folder)).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.extension().is_some_and(|end| end == "json") {
                continue;
            }
            let source = match path.is_dir() {
                true => ModelSource::Directory(path.clone()),
                false => ModelSource::Gguf(path.clone()),
            };
            let inspection = inspected(&source);
            assert!(inspection.refusals.is_empty(), "{path:?}: {:?}", inspection.refusals);
            let loaded = load_any(&source, &LoadOptions::default()).expect("it can be loaded");
            let AnyModel::Encoder(loaded) = loaded else { continue };
            let memory = inspection.memory.expect("supported types");
            assert!(memory.weights > 10_000 && memory.kv_per_token == 0, "{path:?}");
            assert!(inspection.parameters > 5_000 && !inspection.files.is_empty(), "{path:?}");
            assert_eq!(inspection.outline.context_length, Some(loaded.config.max_positions as u64));
            match &loaded.task {
                EncoderTask::Embed(config) => {
                    assert_eq!(inspection.embedding.as_ref(), Some(config))
                }
                EncoderTask::Score(_, config) => {
                    assert_eq!(inspection.scores.as_ref(), Some(config));
                }
            }
            count += 1;
        }
    }
    assert!(count >= 18, "{count}");
}

/// A small BERT whose tensors are zeroes.
fn bert() -> GgufWriter {
    let (hidden, inner, vocab, positions) = (32, 64, 6, 16);
    let mut file = GgufWriter::default();
    file.set("general.architecture", Meta::Text("bert".into()));
    for (key, value) in [
        ("context_length", positions),
        ("embedding_length", hidden),
        ("block_count", 1),
        ("feed_forward_length", inner),
        ("attention.head_count", 4),
        ("pooling_type", 2),
    ] {
        file.set(&format!("bert.{key}"), Meta::U32(value as u32));
    }
    file.set("bert.attention.layer_norm_epsilon", Meta::F32(1e-12));
    file.set("bert.attention.causal", Meta::Bool(false));
    let tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "\u{2581}a", "b"];
    file.set("tokenizer.ggml.model", Meta::Text("bert".into()));
    file.set("tokenizer.ggml.tokens", Meta::Texts(tokens.map(String::from).to_vec()));
    file.set("tokenizer.ggml.cls_token_id", Meta::U32(2));
    file.set("tokenizer.ggml.seperator_token_id", Meta::U32(3));
    let mut add = |name: &str, shape: Vec<usize>| {
        let bytes = vec![0; 4 * shape.iter().product::<usize>()];
        file.tensors.push((name.to_owned(), shape, 0, bytes));
    };
    add("token_embd.weight", vec![vocab, hidden]);
    add("position_embd.weight", vec![positions, hidden]);
    add("token_types.weight", vec![2, hidden]);
    let mut norm = |name: &str| {
        add(&format!("{name}.weight"), vec![hidden]);
        add(&format!("{name}.bias"), vec![hidden]);
    };
    norm("token_embd_norm");
    norm("blk.0.attn_output_norm");
    norm("blk.0.layer_output_norm");
    for (name, rows, columns) in [
        ("attn_q", hidden, hidden),
        ("attn_k", hidden, hidden),
        ("attn_v", hidden, hidden),
        ("attn_output", hidden, hidden),
        ("ffn_up", inner, hidden),
        ("ffn_down", hidden, inner),
    ] {
        add(&format!("blk.0.{name}.weight"), vec![rows, columns]);
        add(&format!("blk.0.{name}.bias"), vec![rows]);
    }
    file
}

fn open(directory: &Path, file: &GgufWriter) -> Result<AnyModel, String> {
    let path = directory.join("m.gguf");
    std::fs::write(&path, file.bytes()).expect("written");
    let source = ModelSource::Gguf(path);
    let loaded = load_any(&source, &LoadOptions::default()).map_err(|error| error.to_string());
    assert_eq!(loaded.is_ok(), inspected(&source).refusals.is_empty(), "inspection and loading");
    loaded
}

/// Goal: keys and tensors of GGUF encoders that are out of range, or would change the result, are
/// refused by their name; the head of a classifier must be complete.
#[test]
fn gguf_encoders_are_read_or_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    let loaded = open(dir.path(), &bert()).expect("a valid file");
    let AnyModel::Encoder(loaded) = loaded else { panic!("expected an encoder") };
    assert_eq!(loaded.task.pooling(), stolon_backend::Pooling::First);
    for (key, value) in [
        ("attention.head_count", Meta::U32(5)),
        ("attention.head_count", Meta::U32(0)),
        ("attention.causal", Meta::Bool(true)),
        ("attention.layer_norm_epsilon", Meta::F32(0.0)),
        ("block_count", Meta::U32(1 << 30)),
        ("context_length", Meta::U32(1 << 30)),
        ("context_length", Meta::U32(17)),
        ("embedding_length", Meta::U32(1 << 30)),
        ("feed_forward_length", Meta::Text("many".into())),
        ("pooling_type", Meta::U32(9)),
        ("rope.scaling.type", Meta::Text("yarn".into())),
        ("expert_count", Meta::U32(8)),
    ] {
        let mut file = bert();
        file.set(&format!("bert.{key}"), value);
        let error = open(dir.path(), &file).expect_err(key);
        let related = [key, "num_attention_heads", "max_position_embeddings", "hidden_size"];
        assert!(related.iter().any(|key| error.contains(key)), "{key}: {error}");
    }
    for name in ["token_types.weight", "blk.0.ffn_up.weight", "token_embd_norm.bias"] {
        let mut file = bert();
        file.tensors.retain(|(own, ..)| own != name);
        // Without token types, the model is a DistilBERT.
        assert_eq!(open(dir.path(), &file).is_ok(), name == "token_types.weight", "{name}");
    }
    let mut file = bert();
    file.set("bert.pooling_type", Meta::U32(4));
    let error = open(dir.path(), &file).expect_err("no labels");
    assert!(error.contains("cls.output.weight"), "{error}");
    file.tensors.push(("cls.output.weight".to_owned(), vec![1, 32], 0, vec![0; 128]));
    let error = open(dir.path(), &file).expect_err("no pooler");
    assert!(error.contains("`cls.weight`"), "{error}");
    file.tensors.push(("cls.weight".to_owned(), vec![32, 32], 0, vec![0; 4096]));
    let AnyModel::Encoder(loaded) = open(dir.path(), &file).expect("complete") else {
        panic!("expected an encoder")
    };
    assert!(matches!(loaded.task, EncoderTask::Score(_, config) if config.labels.len() == 1));
}
