use super::*;
use crate::mmap::Bytes;

#[path = "../../tests/it/support/gguf_writer.rs"]
#[allow(dead_code, unreachable_pub, missing_docs, reason = "shared with the behavior tests")]
mod gguf_writer;
use gguf_writer::{GgufWriter, Meta};

/// A file with one value of each kind and two tensors.
fn small() -> GgufWriter {
    let mut file = GgufWriter::default();
    file.set("general.architecture", Meta::Text("llama".into()));
    file.set("n", Meta::U32(7));
    file.set("f", Meta::F32(0.5));
    file.set("flag", Meta::Bool(true));
    file.set("texts", Meta::Texts(vec!["a".into(), "bc".into()]));
    file.set("floats", Meta::Floats(vec![1.0, 2.0]));
    file.set("ints", Meta::I32s(vec![-1, 2]));
    file.set("flags", Meta::Bools(vec![true, false]));
    file.tensors.push(("a".into(), vec![2, 3], 0, (0..24).collect()));
    file.tensors.push(("b".into(), vec![2, 32], 8, (0..68).collect()));
    file
}

/// Goal: values, shapes (outermost dimension first), types and bytes are read as they were written.
#[test]
fn a_written_file_is_read_back() {
    let bytes = small().bytes();
    let header = read("f.gguf", &bytes).unwrap();
    let value = |key: &str| header.metadata[key].clone();
    assert_eq!(value("general.architecture").as_text(), Some("llama"));
    assert_eq!(value("n"), Value::Unsigned(7));
    assert_eq!(value("f"), Value::Float(0.5));
    assert_eq!(value("flag").as_bool(), Some(true));
    assert_eq!(value("texts"), Value::Texts(vec!["a".into(), "bc".into()]));
    assert_eq!(value("floats"), Value::Floats(vec![1.0, 2.0]));
    assert_eq!(value("ints"), Value::Integers(vec![-1, 2]));
    assert_eq!(value("flags"), Value::Bools(vec![true, false]));
    let a = &header.tensors["a"];
    assert_eq!((a.shape.as_slice(), a.dtype.clone()), (&[2, 3][..], Ok(TensorType::F32)));
    assert_eq!(&bytes[a.range.clone()], (0..24).collect::<Vec<u8>>());
    let b = &header.tensors["b"];
    assert_eq!((b.shape.as_slice(), b.dtype.clone()), (&[2, 32][..], Ok(TensorType::Q8_0)));
    assert_eq!(&bytes[b.range.clone()], (0..68).collect::<Vec<u8>>());
}

/// Goal: candle reads a file of the tests' writer in the same way, so the writer produces valid
/// GGUF.
#[test]
fn candle_reads_the_same_header() {
    let bytes = small().bytes();
    let ours = read("f.gguf", &bytes).unwrap();
    let mut cursor = std::io::Cursor::new(&bytes);
    let theirs = candle_core::quantized::gguf_file::Content::read(&mut cursor).unwrap();
    assert_eq!(theirs.metadata.len(), ours.metadata.len());
    assert_eq!(theirs.tensor_infos.len(), ours.tensors.len());
    for (name, info) in &theirs.tensor_infos {
        let ours = &ours.tensors[name];
        assert_eq!(ours.shape, info.shape.dims());
        assert_eq!(ours.range.start as u64, theirs.tensor_data_offset + info.offset);
    }
}

/// Goal: a file truncated at any length is an error with this length, and never a panic.
#[test]
fn every_truncation_is_an_error() {
    let bytes = small().bytes();
    for length in 0..bytes.len() {
        let error = read("f.gguf", &bytes[..length]).expect_err("truncated");
        assert!(matches!(error, ModelError::Truncated { .. }), "{length}: {error}");
        assert!(error.to_string().contains(&format!("has {length}")), "{length}: {error}");
    }
}

/// Goal: malformed headers are errors that name the file and the cause.
#[test]
fn malformed_headers_are_refused() {
    let check = |change: &dyn Fn(&mut GgufWriter), part: &str| {
        let mut file = small();
        change(&mut file);
        let error = read("f.gguf", &file.bytes()).expect_err(part).to_string();
        assert!(error.starts_with("f.gguf: ") && error.contains(part), "`{error}` lacks `{part}`");
    };
    check(
        &|f| f.tensors[1].1 = vec![2, 31],
        "tensor `b`: Q8_0: row length 31 is not a multiple of 32",
    );
    check(&|f| f.tensors[1].1 = vec![1 << 30, 1 << 30, 1 << 30, 32], "overflows");
    check(&|f| f.tensors[1].1 = vec![1 << 20, 1 << 20], "tensor `b` needs");
    check(&|f| f.tensors[1].1 = vec![1; 5], "at most 4 dimensions, got 5");
    check(&|f| f.tensors[1].0 = "a".into(), "duplicate tensor `a`");
    check(&|f| f.metadata.push(("n".into(), Meta::U32(1))), "duplicate metadata key `n`");
    check(&|f| f.set("general.alignment", Meta::U32(24)), "power of two, got 24");

    let with = |at: usize, bytes: &[u8]| {
        let mut file = small().bytes();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        read("f.gguf", &file).unwrap_err().to_string()
    };
    assert!(with(0, b"ggml").contains("not a GGUF file: expected it to start with `GGUF`"));
    assert!(with(4, &1_u32.to_le_bytes()).contains("2 or 3"));
    assert!(with(4, &3_u32.to_be_bytes()).contains("big-endian"));
    // Counts and lengths beyond the size of the file are refused before memory is allocated for
    // them.
    assert!(with(8, &u64::MAX.to_le_bytes()).contains("truncated"));
    assert!(with(16, &u64::MAX.to_le_bytes()).contains("truncated"));
    assert!(with(24, &(1_u64 << 40).to_le_bytes()).contains("truncated"));
}

/// Goal: a tensor of an unsupported type is an error only if it is used, and the error names the
/// type.
#[test]
fn unsupported_types_are_errors_on_use() {
    let mut file = small();
    file.tensors[1].2 = 9;
    let bytes = file.bytes();
    let header = read("f.gguf", &bytes).unwrap();
    assert_eq!(header.tensors["b"].dtype, Err("Q8_1".into()));
    let weights = header.weights(vec![Bytes::Owned(bytes)], |_| 0, |n| Some(n.to_owned())).unwrap();
    assert!(weights.tensor("a", &[2, 3]).is_ok());
    let error = weights.tensor("b", &[2, 32]).unwrap_err().to_string();
    assert!(error.contains("`b`") && error.contains("Q6_K") && error.ends_with("got Q8_1"));
}

proptest::proptest! {
    /// Goal: random bytes, also after a valid magic number and version, never cause a panic.
    #[test]
    fn random_bytes_never_panic(
        rest in proptest::collection::vec(proptest::num::u8::ANY, 0..300),
        counts in proptest::collection::vec(0_u64..4, 2),
    ) {
        let _ = read("f", &rest);
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        counts.iter().for_each(|n| bytes.extend(n.to_le_bytes()));
        bytes.extend(rest);
        let _ = read("f", &bytes);
    }

    /// Goal: changing bytes of a valid file leads to an error or to ranges inside the file.
    #[test]
    fn changed_bytes_never_panic(
        changes in proptest::collection::vec((0_usize..400, proptest::num::u8::ANY), 1..4),
    ) {
        let mut bytes = small().bytes();
        let length = bytes.len();
        for (at, to) in changes {
            bytes[at % length] = to;
        }
        if let Ok(header) = read("f", &bytes) {
            for info in header.tensors.values() {
                assert!(info.range.end <= length);
            }
            let _ = crate::config::gguf::parse(&header, &|_| Ok(None));
        }
    }
}
