//! Settings from a file and from the environment, and `stolon config`.

use std::process::Output;

use crate::support::{TINY, stolon};

/// Writes a file with settings and runs a command with it and with these environment variables.
fn run(file: &str, variables: &[(&str, &str)], args: &[&str]) -> Output {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("stolon.toml");
    std::fs::write(&path, file).expect("written");
    let mut command = stolon(args);
    command.arg("--config").arg(&path).envs(variables.iter().copied());
    command.output().expect("the binary ends")
}

fn text(output: &Output) -> String {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {errors}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The line of a setting.
fn line<'a>(output: &'a str, name: &str) -> &'a str {
    let is_named = |line: &&str| line.trim_start_matches("# ").split(' ').next() == Some(name);
    output.lines().find(is_named).unwrap_or_else(|| panic!("no line {name}: {output}"))
}

/// Goal: flags take precedence over the environment, and the environment over the file, for
/// numbers, texts, lists and switches; each setting is shown with its source.
#[test]
fn flags_precede_the_environment_and_that_the_file() {
    let file = "port = 1111\nhost = \"file.example\"\nblock-size = 4\nmax-num-seqs = 7\n\
                served-model-name = [\"a\", \"b\"]\nhide-cached-tokens = true\npublic-metrics = false\n\
                api-key = \"sekret\"\nkv-memory = \"1G\"\n";
    let variables = [
        ("STOLON_HOST", "environment.example"),
        ("STOLON_BLOCK_SIZE", "8"),
        ("STOLON_SPECIAL_TOKENS_IN_MESSAGES", "yes"),
        ("STOLON_KV_CACHE_DIR_SIZE", "0.5x"),
    ];
    let args = ["config", "--block-size", "32", "--num-blocks", "512"];
    let output = text(&run(file, &variables, &args));
    for (name, expected) in [
        ("port", "port = 1111 # file"),
        ("host", "host = \"environment.example\" # environment"),
        ("block-size", "block-size = 32 # flag"),
        ("max-running", "max-running = 7 # file"),
        ("served-model-name", "served-model-name = [\"a\", \"b\"] # file"),
        ("hide-cached-tokens", "hide-cached-tokens = true # file"),
        ("kv-cache-dir-size", "kv-cache-dir-size = \"0.5x\" # environment"),
        ("public-metrics", "public-metrics = false # file"),
        ("special-tokens-in-messages", "special-tokens-in-messages = true # environment"),
        ("api-key", "# api-key is set, by file"),
        ("admin-key", "# admin-key is not set"),
        // A flag excludes it.
        ("kv-memory", "# kv-memory is not set"),
        ("shutdown-timeout", "shutdown-timeout = 30 # default"),
    ] {
        assert_eq!(line(&output, name), expected, "{output}");
    }
    assert!(!output.contains("sekret"), "{output}");
}

/// The lines of `stolon config` without the sources of their values.
fn values(text: &str) -> Vec<&str> {
    text.lines().map(|line| line.rsplit_once(" # ").map_or(line, |(value, _)| value)).collect()
}

/// Goal: the output of `stolon config` is a file that gives the same settings again.
#[test]
fn the_output_is_a_file() {
    let args =
        ["config", "--port", "0", "--served-name", "x\"y", "--model", TINY, "--public-metrics"];
    let first = text(&stolon(&args).output().expect("the binary ends"));
    let second = text(&run(&first, &[], &["config"]));
    assert_eq!(values(&first), values(&second));
}

/// Goal: the same for a file with several models, whose tables are printed as they are.
#[test]
fn the_output_has_the_models_of_the_file() {
    let file = format!(
        "num-blocks = 64\n[[models]]\nname = \"chat\"\nmodel = \"{TINY}\"\npinned = true\n\
         [[models]]\nname = \"other\"\nmodel = \"{TINY}\"\nnum-blocks = 32\n"
    );
    let first = text(&run(&file, &[], &["config"]));
    assert_eq!(line(&first, "num-blocks"), "num-blocks = 64 # file");
    for expected in ["[[models]]", "name = \"chat\"", "pinned = true", "num-blocks = 32"] {
        assert!(first.contains(expected), "{first}");
    }
    assert_eq!(values(&text(&run(&first, &[], &["config"]))), values(&first));
}

/// Goal: other commands take the settings of the engine, and ignore settings that only the server
/// has.
#[test]
fn other_commands_take_the_engines_settings() {
    let file = format!("model = \"{TINY}\"\nport = 1\nnum-blocks = 64\n");
    let args = ["generate", "--prompt", "x", "--max-tokens", "1", "--json"];
    let output = text(&run(&file, &[], &args));
    assert!(output.contains("token_ids"), "{output}");
    let output = run(&file, &[("STOLON_NUM_BLOCKS", "none")], &args);
    assert_eq!(output.status.code(), Some(2));
}

/// Goal: the log's options are settings of all commands, and flags and the environment take
/// precedence over the file.
#[test]
fn the_log_is_set_by_the_file() {
    let file = format!(
        "model = \"{TINY}\"\nnum-blocks = 64\nlog-level = \"stolon_http=info,stolon=info\"\n\
         log-format = \"json\"\n"
    );
    let output = text(&run(&file, &[("STOLON_LOG_FORMAT", "text")], &["config"]));
    let level = "log-level = \"stolon_http=info,stolon=info\" # file";
    assert_eq!(line(&output, "log-level"), level);
    assert_eq!(line(&output, "log-format"), "log-format = \"text\" # environment");
    let output = text(&run(&file, &[("RUST_LOG", "off")], &["config", "--log-format", "json"]));
    assert_eq!(line(&output, "log-level"), "log-level = \"off\" # environment");
    assert_eq!(line(&output, "log-format"), "log-format = \"json\" # flag");
    let generate = ["generate", "--prompt", "x", "--max-tokens", "1"];
    for (args, is_json) in [
        (generate.to_vec(), true),
        ([&generate[..], &["--log-format", "text"]].concat(), false),
        ([&["--log-format", "text"], &generate[..]].concat(), false),
    ] {
        let output = run(&file, &[], &args);
        let log = String::from_utf8_lossy(&output.stderr);
        let ended = log.lines().find(|line| line.contains("request ended")).expect("a line");
        assert_eq!(serde_json::from_str::<serde_json::Value>(ended).is_ok(), is_json, "{log}");
    }
    let output = run("log-level = \"stolon=loud\"", &[], &["config"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("stolon=loud"));
}

/// Goal: the variables that Kubernetes sets in the pods next to a service named `stolon` neither
/// stop the server nor count as a port, and `serve` warns of them.
#[test]
fn the_variable_of_a_kubernetes_service_is_ignored() {
    let link = [("STOLON_PORT", "tcp://10.0.0.1:8000"), ("STOLON_SERVICE_HOST", "10.0.0.1")];
    let output = text(&run("", &link, &["config"]));
    assert_eq!(line(&output, "port"), "port = 8080 # default");
    let output = text(&run("port = 81", &link, &["config"]));
    assert_eq!(line(&output, "port"), "port = 81 # file");
    // The model cannot be loaded, so that the command ends.
    let serve = ["serve", "--model", "random:none", "--port", "0"];
    let errors = |output: Output| String::from_utf8_lossy(&output.stderr).into_owned();
    let warned = errors(run("", &link, &serve[..3]));
    assert!(warned.contains("STOLON_PORT is ignored") && warned.contains("--port"), "{warned}");
    assert!(!errors(run("", &link, &serve)).contains("STOLON_PORT"));
    let output = run("", &[("STOLON_PORT", "http")], &["config"]);
    assert_eq!(output.status.code(), Some(2), "any other text is refused");
}

/// Goal: a wrong file is refused with status 2, the key's name and the expected value.
#[test]
fn wrong_files_are_refused() {
    for (file, words) in [
        ("prot = 1", ["`prot`", "stolon config"]),
        ("config = \"x\"", ["`config`", "no setting"]),
        ("port = \"high\"", ["--port", "high"]),
        ("kv-cache-dir-size = \"0x\"", ["--kv-cache-dir-size", "4x"]),
        ("port = [1]", ["`port`", "a text or a number"]),
        ("hide-cached-tokens = 1", ["`hide-cached-tokens`", "true or false"]),
        ("[serve]\nport = 1", ["`serve`", "no setting"]),
        ("port = ", ["stolon.toml", "TOML"]),
        ("num-blocks = 1\nkv-memory = \"1G\"", ["--num-blocks", "--kv-memory"]),
    ] {
        let output = run(file, &[], &["config"]);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{file}: {errors}");
        for word in words {
            assert!(errors.contains(word), "{file}: expected `{word}`: {errors}");
        }
    }
    let output = stolon(&["serve", "--config", "/nowhere/x.toml"]).output().expect("it ends");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("/nowhere/x.toml") && errors.contains("cannot read"), "{errors}");
}

/// Goal: the model can be given without a flag or with the short one, and takes precedence over the
/// environment and the file.
#[test]
fn the_model_needs_no_long_flag() {
    let file = "model = \"random:of-the-file\"";
    let environment = [("STOLON_MODEL", "random:of-the-environment")];
    for args in [
        &["config", "random:given"][..],
        &["config", "--port", "1", "random:given"],
        &["config", "-m", "random:given"],
    ] {
        let output = text(&run(file, &environment, args));
        assert_eq!(line(&output, "model"), "model = \"random:given\" # flag");
    }
    let output = run(file, &environment, &["config", "random:a", "--model", "random:b"]);
    assert_eq!(output.status.code(), Some(2), "two models");
}

/// Goal: a misspelled variable is refused, and the variables of a Kubernetes service are not.
#[test]
fn misspelt_variables_are_refused() {
    let service = [
        ("STOLON_SERVICE_PORT_HTTP", "8080"),
        ("STOLON_PORT_8080_TCP_ADDR", "10.0.0.1"),
        ("STOLON_CHAT_SERVICE_HOST", "10.0.0.2"),
        ("STOLON_CPU_PATH", "portable"),
    ];
    text(&run("", &service, &["config"]));
    for args in [&["config"][..], &["generate", "--prompt", "x"]] {
        let output = run("", &[("STOLON_MAX_MODEL_LENGHT", "4096")], args);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{errors}");
        assert!(errors.contains("STOLON_MAX_MODEL_LENGHT"), "{errors}");
    }
    for args in [&["--help"][..], &["serve", "--help"], &["help"], &["--version"]] {
        let output = stolon(args).env("STOLON_MAX_MODEL_LENGHT", "4096").output();
        assert!(output.expect("the binary ends").status.success(), "{args:?}");
    }
}
