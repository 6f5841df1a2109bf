//! Tests models from a hub: which files are downloaded and cached, and the errors. The hub is a
//! small server in this process that listens on the loopback interface.
use std::path::Path;
use std::sync::{Arc, Mutex};

use gguf_model::gguf_of;
use hub_server::{Hub, Repository};
use model_dir::{assert_same, config_json, model, safetensors_of};
use serde_json::json;
use stolon_backend::Pooling;
use stolon_checkpoint::{
    AnyModel, EmbeddingConfig, EmbeddingSizes, HubOptions, InspectOptions, LoadOptions,
    LoadedModel, ModelError, ModelSource, ProgressCallback, TensorType, inspect, load, load_any,
    load_draft_head,
};

use crate::support::{gguf_model, hub_server, model_dir};

const ID: &str = "org/tiny-model";
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

fn options(hub: &Hub, home: &Path) -> HubOptions {
    let home = home.to_str().unwrap().to_owned();
    let endpoint = hub.endpoint.clone();
    let options = HubOptions::from_variables(|name| match name {
        "HF_HOME" => Some(home.clone()),
        "HF_ENDPOINT" => Some(endpoint.clone()),
        _ => None,
    });
    HubOptions { timeout: std::time::Duration::from_secs(10), ..options }
}

fn open(text: &str, hub: &HubOptions) -> Result<LoadedModel, ModelError> {
    let source: ModelSource = text.parse()?;
    load(&source, &LoadOptions { hub: hub.clone(), ..LoadOptions::default() })
}

/// A repository with a model in one file, and with files that the engine does not use.
fn repository(seed: u64, commit: &str) -> Repository {
    let config = config_json("llama");
    let (_, weights) = model(&config, seed);
    let mut repository = Repository { commit: commit.into(), ..Repository::default() };
    let mut put = |name: &str, bytes: Vec<u8>| repository.files.insert(name.into(), bytes);
    put("config.json", config.to_string().into_bytes());
    put("generation_config.json", json!({ "eos_token_id": [3, 4] }).to_string().into_bytes());
    put("tokenizer.json", b"{}".to_vec());
    put("tokenizer_config.json", b"{ }".to_vec());
    put("chat_template.jinja", b"template".to_vec());
    put("model.safetensors", safetensors_of(&weights, |name| Some(name.to_owned())));
    put("pytorch_model.bin", vec![0; 1000]);
    put("README.md", b"# hello".to_vec());
    put("onnx/model.onnx", vec![0; 1000]);
    repository
}

/// The names of the downloaded files, sorted.
fn fetched(hub: &Hub) -> Vec<String> {
    let requests = hub.take_requests();
    let resolve = requests.iter().filter(|path| path.contains("/resolve/"));
    let mut names: Vec<_> =
        resolve.map(|path| path.rsplit('/').next().unwrap_or_default().to_owned()).collect();
    names.sort();
    names
}

/// Goal: only needed files are downloaded, and only once. Afterwards the model is loaded from the
/// cache, offline or if the hub cannot be reached.
#[test]
fn files_are_downloaded_once_and_then_cached() {
    let hub = Hub::start();
    hub.put(ID, "main", &repository(1, COMMIT));
    let home = tempfile::tempdir().unwrap();
    let mut options = options(&hub, home.path());
    let loaded = open(ID, &options).unwrap();
    assert_eq!(loaded.id, ID);
    // The ends of all files count.
    assert_eq!(loaded.generation.eos_token_ids, [2, 3, 4]);
    assert_eq!(loaded.text.chat_template.as_deref(), Some("template"));
    assert_same(&loaded.weights, &model(&config_json("llama"), 1).1, &loaded.config);
    assert_eq!(
        fetched(&hub),
        [
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json"
        ]
    );
    // The directory layout is that of Hugging Face's own tools.
    let snapshot = home.path().join("hub/models--org--tiny-model/snapshots").join(COMMIT);
    assert!(snapshot.join("model.safetensors").exists());

    open(ID, &options).unwrap();
    assert_eq!(fetched(&hub), [] as [&str; 0]);

    options.offline = true;
    open(ID, &options).unwrap();
    open(&format!("{ID}@{COMMIT}"), &options).unwrap();
    assert!(hub.take_requests().is_empty());

    options.offline = false;
    drop(hub);
    open(ID, &options).unwrap();
}

/// Goal: the hub is asked once for a draft model, which may turn out to be a head or a model.
#[test]
fn a_draft_model_is_fetched_once() {
    let hub = Hub::start();
    hub.put(ID, "main", &repository(1, COMMIT));
    let home = tempfile::tempdir().unwrap();
    let options = LoadOptions { hub: options(&hub, home.path()), ..LoadOptions::default() };
    let model = open(ID, &options.hub).unwrap();
    hub.take_requests();
    let local = stolon_checkpoint::fetched(&ID.parse().unwrap(), &options).unwrap();
    assert_eq!(hub.take_requests().len(), 1);
    let head = load_draft_head(&local, &options, (&model.config, &model.weights)).unwrap();
    assert!(head.is_none());
    assert_same(&load(&local, &options).unwrap().weights, &model.weights, &model.config);
    assert!(hub.take_requests().is_empty());
}

/// Goal: the files that say how embeddings are made are downloaded with a model that has them.
#[test]
fn a_model_for_embeddings_is_downloaded_with_its_pooling() {
    let hub = Hub::start();
    let mut repository = repository(1, COMMIT);
    let modules =
        json!([{ "type": "m.Transformer" }, { "type": "m.Pooling", "path": "1_Pooling" }]);
    repository.files.insert("modules.json".into(), modules.to_string().into_bytes());
    let pooling = json!({ "pooling_mode_lasttoken": true }).to_string().into_bytes();
    repository.files.insert("1_Pooling/config.json".into(), pooling);
    hub.put(ID, "main", &repository);
    let home = tempfile::tempdir().unwrap();
    let loaded = open(ID, &options(&hub, home.path())).unwrap();
    let (sizes, normalize) = (EmbeddingSizes::Full, false);
    let expected = EmbeddingConfig { pooling: Pooling::Last, normalize, sizes };
    assert_eq!((loaded.embedding, loaded.generates), (Some(expected), true));
    assert_eq!(fetched(&hub).iter().filter(|name| *name == "config.json").count(), 2);
}

/// Goal: the adapters of the tasks that `config.json` names are downloaded with the model, and no
/// others.
#[test]
fn a_model_with_adapters_for_tasks_is_downloaded_with_them() {
    let hub = Hub::start();
    let directory = stolon_fixtures::path("encoders/jina_v5_nano");
    let mut repository = Repository { commit: COMMIT.into(), ..Repository::default() };
    let adapters =
        ["retrieval", "text-matching", "clustering"].map(|task| format!("adapters/{task}/"));
    let files = ["adapter_config.json", "adapter_model.safetensors"];
    let of_adapters: Vec<String> =
        adapters.iter().flat_map(|task| files.map(|file| format!("{task}{file}"))).collect();
    let others = ["config.json", "model.safetensors", "modules.json", "tokenizer.json"];
    for name in of_adapters.iter().map(String::as_str).chain(others) {
        repository.files.insert(name.into(), std::fs::read(directory.join(name)).unwrap());
    }
    repository.files.insert("adapters/other/adapter_model.safetensors".into(), vec![0; 10]);
    hub.put(ID, "main", &repository);
    let home = tempfile::tempdir().unwrap();
    let options = LoadOptions { hub: options(&hub, home.path()), ..LoadOptions::default() };
    let AnyModel::Encoder(encoder) = load_any(&ID.parse().unwrap(), &options).unwrap() else {
        panic!("expected an encoder");
    };
    assert_eq!(encoder.config.tasks.unwrap().names.len(), 3);
    let names = fetched(&hub);
    let count = |file: &str| names.iter().filter(|name| *name == file).count();
    assert_eq!(files.map(count), [3, 3], "{names:?}");
}

/// The names and sizes of the files that are not complete.
fn incomplete(home: &Path) -> Vec<(String, u64)> {
    let blobs = home.join("hub/models--org--tiny-model/blobs");
    let entries = std::fs::read_dir(blobs).unwrap().map(|entry| entry.unwrap());
    let named =
        entries.map(|e| (e.file_name().into_string().unwrap(), e.metadata().unwrap().len()));
    named.filter(|(name, _)| name.ends_with(".incomplete")).collect()
}

/// Goal: an interrupted download is an error and leaves no incomplete file in the snapshot. The
/// next attempt requests only the rest. The progress starts with what is there, and ends with the
/// size.
#[test]
fn an_interrupted_download_is_continued_later() {
    let hub = Hub::start();
    let whole = repository(8, COMMIT);
    let size = whole.files["model.safetensors"].len() as u64;
    let cut = Repository { cut: Some("model.safetensors".into()), ..whole.clone() };
    hub.put(ID, "main", &cut);
    let home = tempfile::tempdir().unwrap();
    let mut options = options(&hub, home.path());
    let error = open(ID, &options).unwrap_err().to_string();
    assert!(error.contains("model.safetensors"), "{error}");
    let left = incomplete(home.path());
    assert!(matches!(left[..], [(_, bytes)] if bytes == size / 2), "{left:?}");
    options.offline = true;
    assert!(open(ID, &options).is_err());
    options.offline = false;
    hub.put(ID, "main", &whole);
    hub.take_requests();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let progress = seen.clone();
    options.progress = Some(ProgressCallback::new(move |file| {
        assert_eq!((file.repo, file.file), (ID, "model.safetensors"));
        progress.lock().unwrap().push((file.bytes, file.size, file.done));
    }));
    let loaded = open(ID, &options).unwrap();
    assert_same(&loaded.weights, &model(&config_json("llama"), 8).1, &loaded.config);
    let ranges = hub.take_ranges();
    let start = ranges.iter().find(|(path, _)| path.ends_with("model.safetensors")).unwrap().1;
    assert_eq!((start as u64, ranges.len()), (size / 2, 2), "{ranges:?}");
    assert_eq!(incomplete(home.path()), []);
    let seen = seen.lock().unwrap();
    assert_eq!(seen.first(), Some(&(size / 2, Some(size), false)));
    assert_eq!(seen.last(), Some(&(size, Some(size), true)));
    assert!(seen.is_sorted() && seen.iter().filter(|(.., done)| *done).count() == 1);
}

/// Goal: if the part that an interrupted download has left is damaged, too long or complete, the
/// result is the right file or an error, and the next attempt succeeds.
#[test]
fn damaged_parts_are_not_used() {
    let hub = Hub::start();
    let whole = repository(9, COMMIT);
    hub.put(ID, "main", &whole);
    let content = &whole.files["model.safetensors"];
    let zeroes = vec![0; content.len() / 3];
    let too_long = [content.as_slice(), b"x"].concat();
    let mut wrong = content.clone();
    wrong[100] ^= 1;
    for (part, sound) in [(&zeroes, false), (&wrong, false), (&too_long, true), (content, true)] {
        let home = tempfile::tempdir().unwrap();
        let options = options(&hub, home.path());
        hub.put(ID, "main", &Repository { cut: Some("model.safetensors".into()), ..whole.clone() });
        open(ID, &options).unwrap_err();
        let [(name, _)] = &incomplete(home.path())[..] else { panic!("one file") };
        let blobs = home.path().join("hub/models--org--tiny-model/blobs");
        std::fs::write(blobs.join(name), part).unwrap();
        hub.put(ID, "main", &whole);
        if !sound {
            let error = open(ID, &options).unwrap_err().to_string();
            let hash = name.trim_end_matches(".incomplete");
            let expected = format!("model.safetensors: SHA-256: expected {hash}, got ");
            assert!(error.contains(&expected), "{error}");
            assert_eq!(incomplete(home.path()), []);
        }
        let loaded = open(ID, &options).unwrap();
        assert_same(&loaded.weights, &model(&config_json("llama"), 9).1, &loaded.config);
    }
}

/// Goal: a file whose content does not have the announced hash is an error with both hashes. It is
/// removed and never used.
#[test]
fn corrupt_files_are_refused_and_removed() {
    let hub = Hub::start();
    let home = tempfile::tempdir().unwrap();
    let mut options = options(&hub, home.path());
    let whole = repository(10, COMMIT);
    for (name, hash) in [("model.safetensors", "SHA-256"), ("config.json", "SHA-1")] {
        let corrupt = Repository { corrupt: Some(name.into()), ..whole.clone() };
        hub.put(ID, "main", &corrupt);
        let home = tempfile::tempdir().unwrap();
        options.cache = home.path().join("hub");
        let error = open(ID, &options).unwrap_err().to_string();
        for part in [name, hash, "expected ", ", got ", "removed"] {
            assert!(error.contains(part), "`{error}` lacks `{part}`");
        }
        assert_eq!(incomplete(home.path()), []);
        let snapshot = home.path().join("hub/models--org--tiny-model/snapshots").join(COMMIT);
        assert!(!snapshot.join(name).exists());
        hub.put(ID, "main", &whole);
        open(ID, &options).unwrap();
    }
}

/// A GGUF model in `count` files.
fn gguf_files(seed: u64, count: usize) -> Vec<Vec<u8>> {
    let (config, weights) = model(&config_json("qwen3"), seed);
    let file = gguf_of(&config, &weights, TensorType::F32);
    match count {
        1 => vec![file.bytes()],
        _ => file.split(count).iter().map(|part| part.bytes()).collect(),
    }
}

/// Goal: of a repository with GGUF files, the chosen model is downloaded with all of its parts and
/// nothing else, and is found in the cache offline. Without a choice, the usual quantization is
/// taken, or the models are listed.
#[test]
fn gguf_models_are_downloaded_with_all_parts() {
    let hub = Hub::start();
    let mut repository = Repository { commit: COMMIT.into(), ..Repository::default() };
    let mut put = |name: &str, bytes: Vec<u8>| repository.files.insert(name.into(), bytes);
    put("config.json", b"{}".to_vec());
    put("m-Q4_K_M.gguf", gguf_files(1, 1).remove(0));
    put("mmproj-m.gguf", vec![0; 10]);
    for (index, part) in gguf_files(2, 3).into_iter().enumerate() {
        put(&format!("BF16/m-BF16-0000{}-of-00003.gguf", index + 1), part);
    }
    put("m-Q8_0-00001-of-00002.gguf", vec![0; 10]);
    hub.put(ID, "main", &repository);
    let home = tempfile::tempdir().unwrap();
    let mut options = options(&hub, home.path());
    let check = |text: &str, seed, options: &HubOptions, expected: &[&str]| {
        let loaded = open(text, options).unwrap();
        assert_eq!(loaded.id, ID);
        let (config, weights) = model(&config_json("qwen3"), seed);
        assert_same(&loaded.weights, &weights, &config);
        assert_eq!(fetched(&hub), expected, "{text}");
    };
    check(ID, 1, &options, &["m-Q4_K_M.gguf"]);
    let parts = [1, 2, 3].map(|number| format!("m-BF16-0000{number}-of-00003.gguf"));
    let parts = parts.each_ref().map(String::as_str);
    check(&format!("{ID}:bf16"), 2, &options, &parts);
    check(&format!("{ID}@{COMMIT}:m-BF16-00002-of-00003.gguf"), 2, &options, &[]);
    options.offline = true;
    check(&format!("{ID}:bf16"), 2, &options, &[]);
    check(&format!("{ID}:Q4_K_M"), 1, &options, &[]);
    let blob = home.path().join("hub/models--org--tiny-model/snapshots").join(COMMIT);
    std::fs::remove_file(blob.join("BF16/m-BF16-00003-of-00003.gguf")).unwrap();
    assert!(open(&format!("{ID}:bf16"), &options).is_err());
    options.offline = false;
    let fails = |text: &str, expected: &str| {
        let error = open(text, &options).unwrap_err().to_string();
        assert!(error.contains(expected), "`{error}` lacks `{expected}`");
    };
    fails(&format!("{ID}:Q8_0"), "m-Q8_0-00002-of-00002.gguf: the repository does not have");
    fails(&format!("{ID}:Q6_K"), "Q6_K: expected one of BF16/m-BF16-00001-of-00003.gguf, m-Q4_K_M");
    repository.files.remove("m-Q4_K_M.gguf");
    hub.put(ID, "main", &repository);
    fails(ID, "choose one as org/tiny-model:FILE or org/tiny-model:Q8_0, for example: BF16/m-BF16");
}

/// Goal: of a model in several files, exactly the files in its index are downloaded.
#[test]
fn sharded_models_are_downloaded_by_their_index() {
    let hub = Hub::start();
    let config = config_json("qwen2");
    let (_, weights) = model(&config, 2);
    let mut repository = Repository { commit: COMMIT.into(), ..Repository::default() };
    repository.files.insert("config.json".into(), config.to_string().into_bytes());
    let mut map = json!({});
    for (shard, layer) in [("model-1-of-2.safetensors", false), ("model-2-of-2.safetensors", true)]
    {
        let pick = |name: &str| (name.contains("layers.0.") == layer).then(|| name.to_owned());
        repository.files.insert(shard.into(), safetensors_of(&weights, pick));
        weights.names().filter_map(pick).for_each(|name| map[name] = shard.into());
    }
    let index = json!({ "weight_map": map }).to_string().into_bytes();
    repository.files.insert("model.safetensors.index.json".into(), index);
    repository.files.insert("model-3-of-3.safetensors".into(), vec![0; 10]);
    hub.put(ID, "main", &repository);
    let home = tempfile::tempdir().unwrap();
    let loaded = open(ID, &options(&hub, home.path())).unwrap();
    assert_same(&loaded.weights, &weights, &loaded.config);
    let names = fetched(&hub);
    assert_eq!(names.len(), 4, "{names:?}");
    assert!(!names.contains(&"model-3-of-3.safetensors".to_owned()));
}

/// Goal: a model on the hub is described without downloading its weights, in the same way as one in
/// the cache.
#[test]
fn models_are_inspected_without_their_weights() {
    let hub = Hub::start();
    let mut large = repository(12, COMMIT);
    let mut config = config_json("llama");
    config["vocab_size"] = 4000.into();
    let (_, weights) = model(&config, 12);
    large.files.insert("config.json".into(), config.to_string().into_bytes());
    let weights = safetensors_of(&weights, |name| Some(name.to_owned()));
    large.files.insert("model.safetensors".into(), weights);
    hub.put(ID, "main", &large);
    let mut split = Repository { commit: "d".repeat(40), ..Repository::default() };
    for (index, part) in gguf_files(2, 3).into_iter().enumerate() {
        split.files.insert(format!("m-0000{}-of-00003.gguf", index + 1), part);
    }
    hub.put("org/split", "main", &split);
    let home = tempfile::tempdir().unwrap();
    let hub_options = options(&hub, home.path());
    let load_options = LoadOptions { hub: hub_options.clone(), ..LoadOptions::default() };
    let inspect_options = InspectOptions { load: load_options, ..InspectOptions::default() };
    for (id, files) in [(ID, 1), ("org/split", 3)] {
        let source: ModelSource = id.parse().unwrap();
        let remote = inspect(&source, &inspect_options).unwrap();
        assert_eq!(remote.refusals, [] as [&str; 0]);
        assert_eq!(remote.files.len(), files);
        let blobs = home.path().join(format!("hub/models--{}/blobs", id.replace('/', "--")));
        let stored = std::fs::read_dir(blobs).into_iter().flatten().flatten();
        let stored = stored.map(|entry| entry.metadata().unwrap().len());
        assert!(stored.sum::<u64>() < 10_000);
        open(id, &hub_options).unwrap();
        let local = inspect(&source, &inspect_options).unwrap();
        assert_eq!((remote.parameters, remote.memory), (local.parameters, local.memory));
        assert_eq!((remote.tensors, remote.outline), (local.tensors, local.outline));
        assert_eq!(remote.eos_token_ids, local.eos_token_ids);
    }
}

/// Goal: each commit of a branch has its own snapshot.
#[test]
fn each_commit_has_its_own_snapshot() {
    let hub = Hub::start();
    let second = "f".repeat(40);
    hub.put(ID, "main", &repository(3, COMMIT));
    hub.put(ID, "refs/pr/1", &repository(4, &second));
    let home = tempfile::tempdir().unwrap();
    let options = options(&hub, home.path());
    let config = config_json("llama");
    let check = |text: &str, seed: u64| {
        let loaded = open(text, &options).unwrap();
        assert_same(&loaded.weights, &model(&config, seed).1, &loaded.config);
    };
    check(ID, 3);
    check(&format!("{ID}@refs/pr/1"), 4);
    check(&format!("{ID}@{second}"), 4);
    hub.put(ID, "main", &repository(5, &"e".repeat(40)));
    check(ID, 5);
}

/// Goal: a private repository requires the token. The error for a missing or wrong token says what
/// to set, and no message contains the token.
#[test]
fn private_repositories_require_the_token() {
    let hub = Hub::start();
    let private = Repository { token: Some("hf_secret".into()), ..repository(6, COMMIT) };
    hub.put(ID, "main", &private);
    let home = tempfile::tempdir().unwrap();
    let mut options = options(&hub, home.path());
    let error = open(ID, &options).unwrap_err().to_string();
    assert!(error.contains(ID) && error.contains("401") && error.contains("HF_TOKEN"), "{error}");
    options.token = Some("hf_wrong".into());
    let error = open(ID, &options).unwrap_err().to_string();
    assert!(error.contains("no access") && !error.contains("hf_wrong"), "{error}");
    options.token = Some("hf_secret".into());
    assert!(open(ID, &options).is_ok());
}

/// Goal: the errors for a missing repository, revision, model, hub or cached snapshot name it.
#[test]
fn errors_name_what_is_missing() {
    let hub = Hub::start();
    hub.put(ID, "main", &repository(7, COMMIT));
    let home = tempfile::tempdir().unwrap();
    let mut options = options(&hub, home.path());
    let fails = |text: &str, options: &HubOptions, parts: &[&str]| {
        let error = open(text, options).expect_err(text);
        assert!(matches!(error, ModelError::Hub { .. }), "{error}");
        for part in parts {
            assert!(error.to_string().contains(part), "`{error}` lacks `{part}`");
        }
    };
    fails("org/other", &options, &["org/other@main", "404", "mistyped"]);
    fails(&format!("{ID}@v9"), &options, &["org/tiny-model@v9", "404"]);

    let mut other = repository(7, &"a".repeat(40));
    other.files.remove("model.safetensors");
    hub.put("org/bin", "main", &other);
    fails("org/bin", &options, &["no safetensors weights"]);
    other.files.remove("config.json");
    hub.put("org/other-format", "main", &other);
    fails("org/other-format", &options, &["config.json", "neither this file nor a GGUF file"]);

    let mut escaping = repository(7, COMMIT);
    escaping.commit = "../../../x".into();
    hub.put("org/escaping", "main", &escaping);
    fails("org/escaping", &options, &["expected a commit", "../../../x"]);

    options.offline = true;
    fails(ID, &options, &["offline", home.path().to_str().unwrap()]);
    options.offline = false;
    drop(hub);
    fails(ID, &options, &["HF_HUB_OFFLINE", &options.endpoint]);
}
