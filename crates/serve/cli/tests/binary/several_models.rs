//! `stolon serve` with several models, from flags and from a file with settings.

use std::process::Output;

use serde_json::{Value, json};

use crate::support::{Server, TINY, stolon};

/// The name and the state of each model.
async fn states(server: &Server) -> Vec<(String, String)> {
    let (_, models) = server.get("/v1/models").await;
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let models = models["data"].as_array().expect("a list").iter();
    models.map(|model| (text(&model["id"]), text(&model["status"]["value"]))).collect()
}

fn pairs(list: &[(&str, &str)]) -> Vec<(String, String)> {
    list.iter().map(|&(name, state)| (name.to_owned(), state.to_owned())).collect()
}

/// Goal: models of the command line are served under their names, with the settings of the file
/// under the same names, leave for each other within the memory, and keep their KV in folders of
/// their own, from which they are warm.
#[tokio::test]
async fn models_of_flags_and_of_the_file_are_served() {
    let dir = tempfile::tempdir().expect("a directory");
    let (kv, file) = (dir.path().join("kv"), dir.path().join("stolon.toml"));
    let settings = "kv-memory = \"8M\"\nkv-prefetch-policy = \"wait-complete\"\n\
                    models-memory = \"32M\"\n\
                    [[models]]\nname = \"a\"\nmodel = \"random:none\"\nmemory = \"20M\"\n\
                    max-model-len = 300\nnum-blocks = 64\n\
                    [[models]]\nname = \"b\"\nmodel = \"random:none\"\nmemory = \"20M\"\n\
                    [[models]]\nname = \"unused\"\nmodel = \"random:none\"\n";
    std::fs::write(&file, settings).expect("written");
    let [kv_text, file] = [&kv, &file].map(|path| path.display().to_string());
    let [a, b] = ["a", "b"].map(|name| format!("{name}={TINY}"));
    let args = ["--model", &b, "--config", &file, "--kv-cache-dir", &kv_text];
    let args = [&args[..], &["--models-pinned", "a"]].concat();
    // A pinned model is loaded at start, and leaves no room for the other one.
    let server = Server::with_models(&a, &args);
    assert_eq!(states(&server).await, pairs(&[("a", "loaded"), ("b", "sleeping")]));
    let (status, reply) =
        server.post("/v1/completions", json!({"model": "b", "prompt": "x"})).await;
    assert_eq!((status, &reply["error"]["code"]), (503, &json!("model_too_large")), "{reply}");
    let (_, models) = server.get("/v1/models/a").await;
    assert_eq!(models["max_model_len"], 300, "the setting of its own");
    drop(server);

    let server = Server::with_models(&a, &args[..args.len() - 2]);
    let prompt: Vec<u32> = (0..200).map(|n| 32 + (n * 7) % 90).collect();
    let ask = async |model: &str| {
        let body = json!({"model": model, "prompt": prompt, "max_tokens": 4, "ignore_eos": true});
        let reply = server.complete(body).await;
        assert_eq!(reply["model"], model);
        let cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        (reply["choices"][0]["text"].clone(), cached.expect("a count"))
    };
    let (text, _) = ask("a").await;
    ask("b").await;
    assert_eq!(states(&server).await, pairs(&[("a", "sleeping"), ("b", "loaded")]));
    let (again, cached) = ask("a").await;
    assert!(again == text && cached >= 128, "{cached}");
    for name in ["a", "b"] {
        assert!(kv.join(name).join("v1").is_dir(), "{name}");
    }
    server.terminate();
    assert!(server.wait().success());
}

/// Goal: an idle model is unloaded, and a model list in the file needs no flags.
#[tokio::test]
async fn a_file_alone_names_models() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("stolon.toml");
    let settings = format!(
        "num-blocks = 64\nmodels-idle = 1\n[[models]]\nname = \"z\"\nmodel = \"{TINY}\"\n\
         at-start = true\npinned = true\n[[models]]\nname = \"a\"\nmodel = \"{TINY}\"\n"
    );
    std::fs::write(&file, settings).expect("written");
    let server = Server::from_file(&file.display().to_string());
    let reply = server.complete(json!({"prompt": "x", "max_tokens": 1})).await;
    assert_eq!(reply["model"], "z", "the first in the file");
    server.complete(json!({"prompt": "x", "max_tokens": 1, "model": "a"})).await;
    let expected = pairs(&[("z", "loaded"), ("a", "sleeping")]);
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
    while states(&server).await != expected {
        assert!(std::time::Instant::now() < deadline, "{:?}", states(&server).await);
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

/// Goal: wrong models and settings are refused before a model is loaded.
#[test]
fn wrong_models_are_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("stolon.toml");
    let serve = |settings: &str, args: &[&str]| -> Output {
        std::fs::write(&file, settings).expect("written");
        let mut command = stolon(&["serve", "--port", "0", "--num-blocks", "64"]);
        command.args(args).arg("--config").arg(&file).output().expect("the binary ends")
    };
    let a = format!("a={TINY}");
    let two = ["--model", &a, "--model", "b=random:tiny"];
    let with = |args: &[&'static str]| -> Vec<String> {
        two.iter().copied().chain(args.iter().copied()).map(str::to_owned).collect()
    };
    let cases: [(&str, Vec<String>, &str); 12] = [
        ("", with(&["--model", "random:tiny"]), "NAME=SOURCE"),
        ("", with(&["--model", "a=random:tiny"]), "twice"),
        ("", with(&["--served-model-name", "x"]), "--served-model-name"),
        ("", with(&["--lora-modules", "x=y"]), "belongs to one model"),
        ("", with(&["--models-pinned", "c"]), "no model `c`"),
        ("", vec!["--models-idle".into(), "5".into()], "--model NAME=SOURCE"),
        ("model = \"demo\"\n[[models]]\nname = \"a\"\nmodel = \"demo\"\n", vec![], "got both"),
        ("[[models]]\nmodel = \"demo\"\n", vec![], "`name`"),
        ("[[models]]\nname = \"a\"\n", vec![], "expected `model`"),
        ("[[models]]\nname = \"a/b\"\nmodel = \"demo\"\n", vec![], "a/b"),
        ("[[models]]\nname = \"a\"\nmodel = \"demo\"\nport = 1\n", vec![], "no setting `port`"),
        ("models = 1\n", vec![], "list of tables"),
    ];
    for (settings, args, expected) in cases {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let output = serve(settings, &args);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && errors.contains(expected), "{expected}: {errors}");
        assert!(!errors.contains("panicked"), "{errors}");
    }
}
