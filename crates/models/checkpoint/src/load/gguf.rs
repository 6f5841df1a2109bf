//! Loads a GGUF file or the parts of a split one, and the tokenizer and generation files in the
//! same directory.

use std::path::Path;

use stolon_text::{GgufTokenizer, TextSource, TokenizerSource};

use super::embedding::{EmbeddingConfig, EmbeddingSizes};
use super::encoder::TextPrompts;
use super::model::{GenerationDefaults, LoadedModel, LoadedScores};
use super::{AnyModel, class, directory, encoder, generation, mtp};
use crate::config::{self, DecoderConfig, HEAD_DIM_MAX, ParsedConfig};
use crate::error::ModelError;
use crate::files;
use crate::gguf::{Header, Value, split};
use crate::mmap::Bytes;
use crate::weights::{TensorType, Weights};

/// Loads the model in the file `path`, which may be any of its parts, and its head for multi-token
/// prediction if `with_mtp` is true and it has one. `id` is the model's name.
pub(super) fn load(path: &Path, id: String, with_mtp: bool) -> Result<AnyModel, ModelError> {
    let (header, contents) = split::open(path)?;
    if let Some(family) = crate::encoder::gguf_family(&header) {
        let at = (directory_of(path), id);
        let encoder = encoder::load_gguf(&header, contents, at, family)?;
        return Ok(AnyModel::Encoder(Box::new(encoder)));
    }
    let (config, mut weights) = parse(&header, contents)?;
    let head = mtp::of_gguf(&header, &config, &weights);
    let has_mtp = matches!(head, Ok(Some(_)));
    let mtp = if with_mtp { head? } else { None };
    let directory = directory_of(path);
    let text = text(&header, directory)?;
    let generation = directory::logged(generation(&header, config.clone(), directory)?);
    let embedding = embedding(&header)?;
    let prompts = match embedding {
        Some(_) => super::encoder::prompts(directory)?,
        None => TextPrompts::default(),
    };
    let scores = match config::gguf::rank_matrix(&header) {
        Some(matrix) => Some(LoadedScores::of_two_rows(&matrix, &mut weights)?),
        None => None,
    };
    Ok(AnyModel::Decoder(Box::new(LoadedModel {
        id,
        config,
        weights,
        text,
        generation,
        embedding,
        prompts,
        tasks: Vec::new(),
        scores,
        generates: true,
        images: None,
        skills: None,
        has_mtp,
        mtp,
    })))
}

/// How embeddings are computed. A GGUF file does not say whether they are normalized. They are by
/// default in llama.cpp.
pub(crate) fn embedding(header: &Header) -> Result<Option<EmbeddingConfig>, ModelError> {
    let pooling = config::gguf::pooling(header)?;
    let sizes = EmbeddingSizes::Full;
    Ok(pooling.map(|pooling| EmbeddingConfig { pooling, normalize: true, sizes }))
}

/// The directory of the file `path`.
pub(crate) fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Parses and checks the model with the header `header`. `contents` are the bytes of its files.
pub(crate) fn parse(
    header: &Header,
    contents: Vec<Bytes>,
) -> Result<(DecoderConfig, Weights), ModelError> {
    let (config, weights) = describe(header, contents)?;
    weights.check(&config)?;
    weights.check_all(config::gguf::rank_matrix(header))?;
    Ok((config, weights))
}

/// Parses the model without checking that all its tensors are present.
pub(crate) fn describe(
    header: &Header,
    contents: Vec<Bytes>,
) -> Result<(DecoderConfig, Weights), ModelError> {
    let config = config::gguf::parse(header, &|name| small_floats(header, &contents, name))?;
    // These are classifiers, which llama.cpp runs with the pooling `rank`.
    let matrix = config::gguf::rank_matrix(header).map(|matrix| matrix.name);
    let is_other = |name: &&String| name.starts_with("cls.") && Some(*name) != matrix.as_ref();
    if let Some(score) = header.tensors.keys().find(is_other) {
        return Err(class::weights_for_scores(&header.file, score));
    }
    let mut weights = weights(header, &config, contents)?;
    weights.arrange(&config, config.architecture.description().gguf.adjacent)?;
    Ok((config, weights))
}

/// The content of the small F32 tensor `name`, such as the divisors of a rotary embedding, if the
/// file has it.
fn small_floats(
    header: &Header,
    contents: &[Bytes],
    name: &str,
) -> Result<Option<Vec<f32>>, ModelError> {
    let Some(info) = header.tensors.get(name) else { return Ok(None) };
    if info.dtype != Ok(TensorType::F32) {
        return Err(ModelError::WrongType {
            file: header.file_of(info).into(),
            tensor: name.into(),
            expected: "F32".into(),
            got: info.dtype.clone().map_or_else(|other| other, |dtype| dtype.name().into()),
        });
    }
    if info.range.len() > 4 * HEAD_DIM_MAX {
        return Err(ModelError::WrongShape {
            file: header.file_of(info).into(),
            tensor: name.into(),
            expected: vec![HEAD_DIM_MAX / 2],
            got: info.shape.clone(),
        });
    }
    // If only the header of the file is known, it does not have the content.
    let Some(bytes) = contents[info.part].get(info.range.clone()) else { return Ok(None) };
    Ok(Some(bytes.chunks_exact(4).map(|f| f32::from_le_bytes([f[0], f[1], f[2], f[3]])).collect()))
}

fn weights(
    header: &Header,
    config: &DecoderConfig,
    contents: Vec<Bytes>,
) -> Result<Weights, ModelError> {
    let matrix = config::gguf::rank_matrix(header).map(|matrix| matrix.name);
    header.weights(
        contents,
        |name| parts(config, name),
        |name| {
            if matrix.as_deref() == Some(name) {
                return matrix.clone();
            }
            config::gguf::tensor_name(config.architecture, name)
                .filter(|name| !name.contains('*') || is_divided(config, name))
        },
    )
}

/// The number of tensors into which the stacked tensor `name` is divided.
pub(super) fn parts(config: &DecoderConfig, name: &str) -> usize {
    match name.contains(".self_attn.") {
        true => config.latent().map_or(0, |latent| latent.heads),
        false => config.experts().map_or(0, |experts| experts.count),
    }
}

/// Whether the stacked tensor `name` belongs to latent attention or to a layer with experts. All
/// others are omitted before they are divided into many tensors.
fn is_divided(config: &DecoderConfig, name: &str) -> bool {
    let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
    let Some((number, _)) = layer else { return false };
    let index = number.parse::<usize>().ok().filter(|index| index.to_string() == number);
    index.and_then(|index| config.layers.get(index)).is_some_and(|layer| {
        if name.contains(".self_attn.") { config.latent().is_some() } else { layer.has_experts() }
    })
}

/// The data of the tokenizer and the chat templates. A `tokenizer.json` in the same directory takes
/// precedence over the vocabulary of the GGUF file.
pub(crate) fn text(header: &Header, directory: &Path) -> Result<TextSource, ModelError> {
    let mut text = directory::text(directory)?;
    if let TokenizerSource::Missing { .. } = &text.tokenizer {
        text.tokenizer = match tokenizer(header)? {
            Some(tokenizer) => TokenizerSource::Gguf(Box::new(tokenizer)),
            None => text.tokenizer,
        };
    }
    if text.chat_template.is_none() {
        text.chat_template = template(header, TEMPLATE)?;
        let named = format!("{TEMPLATE}.");
        let keys = header.metadata.keys().filter_map(|key| Some((key, key.strip_prefix(&named)?)));
        for (key, name) in keys.take(directory::NAMED_TEMPLATES_MAX) {
            let template = template(header, key)?;
            text.named_templates.extend(template.map(|template| (name.to_owned(), template)));
        }
    }
    Ok(text)
}

/// The key of the chat template. Keys of additional templates have a dot and the template's name
/// after it.
const TEMPLATE: &str = "tokenizer.chat_template";

/// The chat template under `key`.
fn template(header: &Header, key: &str) -> Result<Option<String>, ModelError> {
    let template = header.metadata.get(key).and_then(Value::as_text);
    if let Some(template) = template.filter(|t| t.len() as u64 > files::TEMPLATE_BYTES_MAX) {
        let expected = format!("at most {} bytes", files::TEMPLATE_BYTES_MAX);
        return Err(ModelError::key(&header.file, key, expected, template.len()));
    }
    Ok(template.map(str::to_owned))
}

/// Reads the vocabulary of a GGUF file. The file may be any of several parts, and does not have to
/// contain anything else.
///
/// # Errors
/// [`ModelError`] if the file cannot be read, is malformed, or has no vocabulary.
pub fn read_gguf_tokenizer(path: &Path) -> Result<GgufTokenizer, ModelError> {
    let file = path.display().to_string();
    let (header, _) = split::open(path)?;
    tokenizer(&header)?.ok_or_else(|| {
        ModelError::key(&file, "tokenizer.ggml.tokens", "a list of strings", "nothing")
    })
}

/// Reads the `tokenizer.ggml.*` keys. Returns `None` if the file has no vocabulary.
pub(crate) fn tokenizer(header: &Header) -> Result<Option<GgufTokenizer>, ModelError> {
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let value = |name: &str| header.metadata.get(&key(name));
    let wrong = |name: &str, expected: &str| {
        let got = value(name).map_or_else(|| "nothing".into(), Value::shown);
        ModelError::key(&header.file, &key(name), expected, got)
    };
    let tokens = match value("tokens") {
        None => return Ok(None),
        Some(Value::Texts(tokens)) => tokens.clone(),
        Some(_) => return Err(wrong("tokens", "a list of strings")),
    };
    let each = format!("{} numbers, one per token", tokens.len());
    let scores = match value("scores") {
        None => None,
        Some(Value::Floats(scores)) if scores.len() == tokens.len() => Some(scores.clone()),
        Some(_) => return Err(wrong("scores", &each)),
    };
    let token_types = match value("token_type") {
        None => None,
        Some(Value::Integers(types)) if types.len() == tokens.len() => {
            Some(types.iter().map(|n| i32::try_from(*n).unwrap_or_default()).collect())
        }
        Some(_) => return Err(wrong("token_type", &each)),
    };
    let merges = match value("merges") {
        None => None,
        Some(Value::Texts(merges)) => Some(merges.clone()),
        Some(_) => return Err(wrong("merges", "a list of strings")),
    };
    let text = |name: &str| value(name).and_then(Value::as_text).map(str::to_owned);
    // Converters write 2^32 - 1 for a token that is not in the vocabulary.
    let id = |name: &str| {
        let id = token_id(header, name)?;
        let is_known = (id as usize) < tokens.len();
        if !is_known && id != u32::MAX {
            tracing::warn!(
                id,
                "{}: ignoring {}, which is not in the vocabulary",
                header.file,
                key(name)
            );
        }
        is_known.then_some(id)
    };
    let [bos, eos, unknown, padding] =
        ["bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id"].map(id);
    // Files of encoders have these names, one of which is misspelled.
    let [first, separator] = ["cls_token_id", "seperator_token_id"].map(id);
    let charsmap = match value("precompiled_charsmap") {
        None => None,
        Some(Value::Integers(bytes)) => {
            let bytes: Option<Vec<u8>> = bytes.iter().map(|byte| byte_of(*byte)).collect();
            Some(bytes.ok_or_else(|| wrong("precompiled_charsmap", "a list of bytes"))?)
        }
        Some(_) => return Err(wrong("precompiled_charsmap", "a list of bytes")),
    };
    let flag = |name: &str| value(name).and_then(Value::as_bool);
    Ok(Some(GgufTokenizer {
        file: header.file.clone(),
        model: text("model").ok_or_else(|| wrong("model", "a string"))?,
        pre: text("pre"),
        tokens,
        scores,
        token_types,
        merges,
        bos_token_id: bos.or(first),
        eos_token_id: eos,
        unknown_token_id: unknown,
        padding_token_id: padding,
        separator_token_id: separator,
        add_bos_token: flag("add_bos_token"),
        add_eos_token: flag("add_eos_token"),
        add_space_prefix: flag("add_space_prefix"),
        remove_extra_whitespaces: flag("remove_extra_whitespaces"),
        precompiled_charsmap: charsmap,
    }))
}

/// The byte that is written as a signed or an unsigned integer.
fn byte_of(value: i64) -> Option<u8> {
    u8::try_from(value).ok().or_else(|| i8::try_from(value).ok().map(i8::cast_unsigned))
}

fn token_id(header: &Header, name: &str) -> Option<u32> {
    let value = header.metadata.get(&format!("tokenizer.ggml.{name}"))?;
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

/// Sampling parameters: their names after `general.sampling.`, and in `generation_config.json`.
const SAMPLING_KEYS: [(&str, &str); 5] = [
    ("temp", "temperature"),
    ("top_k", "top_k"),
    ("top_p", "top_p"),
    ("min_p", "min_p"),
    ("penalty_repeat", "repetition_penalty"),
];

/// The sampling parameters that the file recommends, and the tokens that must not be generated, as
/// entries of `generation_config.json`.
fn sampling(header: &Header) -> serde_json::Map<String, serde_json::Value> {
    let mut members = serde_json::Map::new();
    for (name, member) in SAMPLING_KEYS {
        let Some(value) = header.metadata.get(&format!("general.sampling.{name}")) else {
            continue;
        };
        // In llama.cpp, 0 and negative numbers switch the parameter off.
        let value = match name {
            "top_k" => value.as_i64().map(|count| serde_json::json!(count.max(0))),
            "temp" => value.as_f64().map(|value| serde_json::json!(value.max(0.0))),
            _ => value.as_f64().map(|value| serde_json::json!(value)),
        };
        members.extend(value.map(|value| (member.to_owned(), value)));
    }
    if !members.is_empty() {
        members.insert("do_sample".to_owned(), true.into());
    }
    if let Some(Value::Integers(ids)) = header.metadata.get("tokenizer.ggml.suppress_tokens") {
        members.insert("suppress_tokens".to_owned(), ids.as_slice().into());
    }
    members
}

/// The generation defaults. A `generation_config.json` in the same directory takes precedence over
/// the end-of-sequence tokens and the sampling parameters of the GGUF file.
pub(crate) fn generation(
    header: &Header,
    decoder: DecoderConfig,
    directory: &Path,
) -> Result<(GenerationDefaults, Vec<String>), ModelError> {
    let ends = ["eos_token_id", "eot_token_id", "eom_token_id"];
    let id = |name: &str| token_id(header, name).filter(|id| *id != u32::MAX);
    let own = ParsedConfig {
        decoder,
        eos_token_ids: ends.iter().filter_map(|name| id(name)).collect(),
        default_eos: false,
        bos_token_id: token_id(header, "bos_token_id"),
        quantization: None,
        may_lack_head: false,
        notes: Vec::new(),
    };
    let path = directory.join(directory::GENERATION);
    let mut members = sampling(header);
    // Parsing these entries alone makes their errors name the GGUF file, even if the other file
    // replaces them.
    let name = format!("{} (general.sampling)", header.file);
    generation::parse(&name, Some(&members.clone().into()), &own)?;
    let value = match files::optional(files::read_json(&path))? {
        Some(serde_json::Value::Object(mut file)) => {
            members.append(&mut file);
            Some(members.into())
        }
        None if !members.is_empty() => Some(members.into()),
        other => other,
    };
    generation::parse(&path.display().to_string(), value.as_ref(), &own)
}
