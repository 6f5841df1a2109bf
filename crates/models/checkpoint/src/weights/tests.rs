use ::safetensors::tensor::{Dtype, TensorView};
use serde_json::json;

use super::*;

fn file_of(tensors: &[(&str, Dtype, &[usize], Vec<u8>)]) -> Vec<u8> {
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (*name, TensorView::new(*dtype, shape.to_vec(), data).unwrap())
    });
    ::safetensors::serialize(views, None).unwrap()
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn open(bytes: Vec<u8>) -> Result<Weights, ModelError> {
    Weights::from_safetensors("m.safetensors", Bytes::Owned(bytes))
}

/// A file with the given header and `data` zero bytes.
fn with_header(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

/// Goal: tensors are found by the decoder's names, whatever prefixes the names in the file have.
#[test]
fn tensors_are_found_with_and_without_prefixes() {
    for (saved, asked) in [
        ("model.norm.weight", "model.norm.weight"),
        ("norm.weight", "model.norm.weight"),
        ("layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("backbone.embeddings.weight", "model.embed_tokens.weight"),
        ("backbone.norm_f.weight", "model.norm.weight"),
        ("backbone.layers.7.norm.weight", "model.layers.7.input_layernorm.weight"),
        ("backbone.layers.7.mixer.norm.weight", "model.layers.7.mamba.norm.weight"),
        ("backbone.layers.7.mixer.q_proj.weight", "model.layers.7.self_attn.q_proj.weight"),
        (
            "model.layers.7.mixer.experts.2.up_proj.weight",
            "model.layers.7.mlp.experts.2.up_proj.weight",
        ),
    ] {
        let data = floats(&[1.0, 2.0, 3.0]);
        let weights = open(file_of(&[(saved, Dtype::F32, &[3], data.clone())])).unwrap();
        let tensor = weights.tensor(asked, &[3]).unwrap();
        assert_eq!((&*tensor.bytes, tensor.dtype), (&data[..], TensorType::F32), "{saved}");
        assert!(matches!(tensor.bytes, Cow::Borrowed(_)));
    }
}

/// Goal: the errors for a missing tensor, a wrong shape and an unsupported type include the tensor,
/// the expected value and the actual value.
#[test]
fn errors_name_the_tensor() {
    let weights = open(file_of(&[
        ("norm.weight", Dtype::F32, &[3], floats(&[0.0; 3])),
        ("lm_head.weight", Dtype::I8, &[2, 2], vec![0; 4]),
    ]))
    .unwrap();
    let error = |name, shape: &[usize]| weights.tensor(name, shape).unwrap_err().to_string();
    assert_eq!(
        error("model.norm.weight", &[4]),
        "m.safetensors: tensor `model.norm.weight`: expected shape [4], got [3]"
    );
    assert_eq!(
        error("model.x.weight", &[4, 2]),
        "m.safetensors: missing tensor `model.x.weight`: expected shape [4, 2], got nothing"
    );
    let wrong = error("lm_head.weight", &[2, 2]);
    assert!(wrong.contains("`lm_head.weight`") && wrong.ends_with("got I8"), "{wrong}");
}

/// Goal: a file truncated at any length is an error with this length, and never a panic.
#[test]
fn every_truncation_is_an_error() {
    let whole = file_of(&[
        ("a.weight", Dtype::F32, &[3], floats(&[1.0; 3])),
        ("b.weight", Dtype::BF16, &[2, 2], vec![0; 8]),
    ]);
    assert!(open(whole.clone()).is_ok());
    for length in 0..whole.len() {
        let error = open(whole[..length].to_vec()).expect_err("truncated");
        assert!(matches!(error, ModelError::Truncated { .. }), "{length}: {error}");
        assert!(error.to_string().contains(&format!("has {length}")), "{length}: {error}");
    }
    let mut longer = whole;
    longer.push(0);
    assert!(matches!(open(longer), Err(ModelError::Malformed { .. })));
}

/// Goal: headers with wrong sizes, offsets or lengths, and duplicate tensors, are errors.
#[test]
fn inconsistent_headers_are_refused() {
    let max = usize::MAX;
    for (header, data) in [
        (r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#.to_owned(), 4),
        (r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#.to_owned(), 4),
        (r#"{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}"#.to_owned(), 4),
        (format!(r#"{{"a":{{"dtype":"F32","shape":[{max},2],"data_offsets":[0,8]}}}}"#), 8),
        (format!(r#"{{"a":{{"dtype":"F32","shape":[0],"data_offsets":[{max},{max}]}}}}"#), 0),
        (format!(r#"{{"a":{{"dtype":"F32","shape":[1],"data_offsets":[0,{max}]}}}}"#), 4),
        (r#"{"a":{"dtype":"F32","shape":[1]}}"#.to_owned(), 4),
        ("[]".to_owned(), 0),
        ("{".to_owned(), 0),
        ("\u{0}".to_owned(), 0),
    ] {
        let error = open(with_header(&header, data)).expect_err(&header);
        assert!(error.to_string().starts_with("m.safetensors: "), "{header}: {error}");
    }
    let mut huge = vec![0xff; 8];
    huge.extend_from_slice(b"{}");
    assert!(
        open(huge)
            .unwrap_err()
            .to_string()
            .contains("not a safetensors file: expected a header of at most 33554432 bytes")
    );
    let twice = [("norm.weight", 4), ("model.norm.weight", 4)]
        .map(|(name, size)| (name, Dtype::U8, [size], vec![0_u8; size]));
    let views = twice.iter().map(|(n, d, s, b)| (*n, TensorView::new(*d, s.to_vec(), b).unwrap()));
    let file = ::safetensors::serialize(views, None).unwrap();
    assert!(open(file).unwrap_err().to_string().contains("duplicate tensor `model.norm.weight`"));
}

proptest::proptest! {
    /// Goal: random bytes and random headers never cause a panic.
    #[test]
    fn random_bytes_never_panic(
        bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..200),
        header in "[\\[\\]{}\":,0-9a-zF]{0,60}",
    ) {
        let _ = open(bytes);
        let _ = open(with_header(&header, 16));
    }

    /// Goal: changing any byte of a valid file never causes a panic.
    #[test]
    fn changed_bytes_never_panic(at in 0_usize..160, to in proptest::num::u8::ANY) {
        let mut file = file_of(&[
            ("a.weight", Dtype::F32, &[3], floats(&[1.0; 3])),
            ("b.weight", Dtype::BF16, &[2, 2], vec![0; 8]),
        ]);
        let at = at % file.len();
        file[at] = to;
        if let Ok(weights) = open(file) {
            for name in weights.names() {
                let shape = weights.shape(name).unwrap_or_default().to_vec();
                let _ = weights.tensor(name, &shape);
            }
        }
    }
}

/// Goal: entries of an index must be file names, so that they cannot lead out of the directory.
#[test]
fn index_entries_must_be_file_names() {
    let shards = |value| safetensors::shards("index", &value);
    let ok = json!({ "weight_map": { "a": "m-2.safetensors", "b": "m-1.safetensors", "c": "m-1.safetensors" } });
    assert_eq!(shards(ok).unwrap(), ["m-1.safetensors", "m-2.safetensors"]);
    for name in ["../x", "/etc/passwd", "a/b", "", ".", "..", "c:x", "a\\b"] {
        let error = shards(json!({ "weight_map": { "a": name } })).expect_err(name).to_string();
        assert!(error.contains("expected a file name"), "{name}: {error}");
    }
    assert!(shards(json!({ "weight_map": {} })).is_err());
    assert!(shards(json!({ "weight_map": { "a": 1 } })).is_err());
    assert!(shards(json!({})).is_err());
}

/// Goal: tensors in memory are refused if their number of bytes does not match shape and type, or
/// if their name is a duplicate.
#[test]
fn tensors_in_memory_are_checked() {
    let tensor = |name: &str, dtype, shape: &[usize], bytes: usize| Tensor {
        name: name.into(),
        dtype,
        shape: shape.to_vec(),
        bytes: vec![0; bytes].into(),
    };
    let make = |list: Vec<Tensor<'static>>| Weights::from_tensors("memory", list);
    assert!(make(vec![tensor("a", TensorType::Q8_0, &[2, 32], 68)]).is_ok());
    assert!(make(vec![tensor("a", TensorType::Q8_0, &[2, 31], 68)]).is_err());
    assert!(make(vec![tensor("a", TensorType::F32, &[2], 7)]).is_err());
    let one = || tensor("a", TensorType::F32, &[1], 4);
    assert!(make(vec![one(), one()]).unwrap_err().to_string().contains("duplicate tensor `a`"));
}
