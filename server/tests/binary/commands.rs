//! `stolon generate`, `chat` and `demo`, run as from a shell.

use serde_json::Value;

use crate::support::{TINY, fail, json_lines, stolon, succeed, succeed_with};

/// `generate --json` on the tiny model with these further arguments.
fn generate(args: &[&str]) -> Vec<Value> {
    let base = ["generate", "--json", "--model", TINY, "--num-blocks", "256", "--max-tokens", "8"];
    json_lines(&succeed(&[&base[..], args].concat()))
}

/// Goal: `--json` prints one object per prompt with all fields; prompts of one call share the prefix
/// cache, and a text and its token ids are the same prompt.
#[test]
fn generate_prints_one_json_object_per_prompt() {
    let text = "the same forty bytes of prompt, once more";
    let ids = text.bytes().map(|byte| byte.to_string()).collect::<Vec<_>>().join(",");
    let objects =
        generate(&["--prompt", text, "--prompt-tokens", &ids, "--logprobs", "2", "--ignore-eos"]);
    let [cold, warm] = &objects[..] else { panic!("expected 2 objects, got {objects:?}") };
    for object in [cold, warm] {
        assert_eq!(object["token_ids"].as_array().map(Vec::len), Some(8));
        assert_eq!(object["prompt_tokens"], 41);
        assert_eq!(object["finish_reason"], "length");
        assert!(object["ttft_ms"].as_f64().is_some_and(|ms| ms > 0.0));
        let logprobs = object["logprobs"].as_array().expect("a list");
        assert_eq!(logprobs.len(), 8);
        for (entry, id) in logprobs.iter().zip(object["token_ids"].as_array().expect("a list")) {
            assert_eq!(&entry["token_id"], id);
            assert_eq!(entry["top"].as_array().map(Vec::len), Some(2));
            assert_eq!(entry["top"][0]["token_id"], *id, "greedy takes the most likely token");
            assert_eq!(entry["top"][0]["logprob"], entry["logprob"]);
        }
    }
    assert_eq!((&cold["cached_tokens"], &warm["cached_tokens"]), (&0.into(), &32.into()));
    for same in ["token_ids", "text", "logprobs"] {
        assert_eq!(cold[same], warm[same], "warm equals cold");
    }
}

/// Goal: without `--json` the text is printed, the same as in the JSON form.
#[test]
fn generate_prints_the_text() {
    let objects = generate(&["--prompt", "hello", "--logit-bias", "66=100"]);
    assert_eq!(objects[0]["text"], "BBBBBBBB");
    let args = ["generate", "--model", TINY, "--prompt", "hello", "--logit-bias", "66=100"];
    let output = succeed(&[&args[..], &["--max-tokens", "8"]].concat());
    let lines: Vec<&str> = output.lines().collect();
    assert_eq!(lines[0], "BBBBBBBB");
    assert!(lines[1].contains("5 prompt tokens, 0 cached"), "{output}");
}

/// Goal: batching, prefix caching, the block size and chunked prefill do not change the generated
/// tokens.
#[test]
fn generated_tokens_do_not_depend_on_engine_settings() {
    let prompts: Vec<String> = (0..6)
        .map(|i| format!("a beginning all prompts share, and an end of its own: {i}"))
        .collect();
    let prompts: Vec<&str> = prompts.iter().flat_map(|p| ["--prompt", p.as_str()]).collect();
    let tokens = |extra: &[&str]| -> Vec<Value> {
        let objects = generate(&[&prompts[..], extra, &["--ignore-eos"]].concat());
        objects.iter().map(|object| object["token_ids"].clone()).collect()
    };
    let reference = tokens(&["--no-prefix-caching"]);
    assert_eq!(reference.len(), 6);
    for extra in [
        &[][..],
        &["--concurrent"],
        &["--block-size", "1"],
        &["--block-size", "32", "--concurrent"],
        &["--max-batched-tokens", "7", "--concurrent"],
    ] {
        assert_eq!(tokens(extra), reference, "{extra:?}");
    }
}

/// Goal: a prompt from a file or from standard input is read to its last byte.
#[test]
fn generate_reads_files_and_standard_input() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("prompt.txt");
    std::fs::write(&file, "seventeen bytes.\n").expect("written");
    let file = file.to_str().expect("UTF-8");
    let args = ["generate", "--json", "--model", TINY, "--prompt-file"];
    let output = succeed(&[&args[..], &[file]].concat());
    assert_eq!(json_lines(&output)[0]["prompt_tokens"], 17);
    let output = succeed_with(&[&args[..], &["-"]].concat(), "five\n");
    assert_eq!(json_lines(&output)[0]["prompt_tokens"], 5);
}

/// Goal: each wrong argument is refused with what was expected and what was given.
#[test]
fn wrong_arguments_are_refused_with_what_was_expected() {
    let check = |args: &[&str], words: &[&str]| {
        let message = fail(&[&["generate", "--model", TINY][..], args].concat());
        for word in words {
            assert!(message.contains(word), "{args:?}: expected `{word}` in: {message}");
        }
    };
    check(&[], &["expected a prompt"]);
    check(&["--prompt", ""], &["empty"]);
    check(&["--prompt-tokens", ""], &["empty"]);
    check(&["--prompt-tokens", "1,320"], &["320"]);
    check(&["--prompt-tokens", "1,x"], &["expected token ids", "x"]);
    check(&["--prompt", "x", "--temperature", "-1"], &["temperature", "-1"]);
    check(&["--prompt", "x", "--top-p", "2"], &["top_p", "2"]);
    check(&["--prompt", "x", "--max-tokens", "0"], &["max_tokens", "0"]);
    check(&["--prompt", "x", "--block-size", "3"], &["block size", "power of two", "3"]);
    check(&["--prompt", "x", "--num-blocks", "0"], &["KV blocks", "got 0"]);
    check(&["--prompt", "x", "--kv-memory", "lots"], &["expected a size", "lots"]);
    check(&["--prompt", "x", "--admission", "dice"], &["admission policy", "dice"]);
    check(&["--prompt-file", "/nowhere/to/be/found"], &["/nowhere/to/be/found"]);
    let long = "x".repeat(100);
    check(&["--prompt", &long, "--num-blocks", "4"], &["too long", "100"]);
}

/// Goal: a model that does not exist, or is not a model, gives an error that names it.
#[test]
fn errors_name_the_model_that_cannot_be_loaded() {
    let dir = tempfile::tempdir().expect("a directory");
    let empty = dir.path().to_str().expect("UTF-8");
    for (model, words) in [
        (empty, ["config.json", empty]),
        ("random:enormous", ["enormous", "tiny"]),
        ("/nowhere/model.gguf", ["/nowhere/model.gguf", "cannot"]),
    ] {
        let message = fail(&["generate", "--prompt", "x", "--model", model]);
        for word in words {
            assert!(message.contains(word), "{model}: expected `{word}` in: {message}");
        }
    }
}

/// Goal: if the reader of the output closes its pipe, the command ends without an error.
#[test]
fn a_closed_output_pipe_is_not_an_error() {
    let mut command = stolon(&[
        "generate",
        "--model",
        TINY,
        "--prompt",
        "x",
        "--max-tokens",
        "400",
        "--ignore-eos",
    ]);
    let mut child = command
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("the binary starts");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("the binary ends");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

/// Goal: `chat` with piped input answers turn by turn; a later turn finds the earlier ones cached
/// until the conversation is reset.
#[test]
fn chat_turns_find_earlier_turns_cached() {
    let input =
        "Hello there, how are you today?\n/stats\nAnd what now?\n/reset\nAnew!\n/nonsense\n/quit\n";
    let output = succeed_with(&["chat", "--block-size", "4", "--max-tokens", "8"], input);
    let figures: Vec<&str> =
        output.lines().filter(|line| line.contains(" prompt tokens, ")).collect();
    assert_eq!(figures.len(), 3, "{output}");
    let cached = |line: &str| -> usize {
        let (before, _) = line.split_once(" cached").expect("a count");
        before.rsplit(' ').next().and_then(|count| count.parse().ok()).expect("a number")
    };
    assert_eq!(cached(figures[0]), 0, "{output}");
    assert!(cached(figures[1]) > 8, "{output}");
    assert!(cached(figures[2]) <= 4, "{output}");
    assert!(output.contains("[1 turns;") && output.contains("no command `/nonsense`"), "{output}");
}

/// Goal: `demo` runs without arguments or network, finds the handbook cached from the second
/// question on, and gives the same answers with an empty cache.
#[test]
fn demo_answers_are_the_same_cached_and_cold() {
    let output = succeed(&["demo"]);
    let figures: Vec<&str> =
        output.lines().filter(|line| line.contains("of them cached")).collect();
    assert!(figures.len() >= 4, "{output}");
    assert!(figures[0].contains(" 0 of them cached"), "{output}");
    assert!(!figures[1].contains(" 0 of them cached"), "{output}");
    assert!(output.contains("cold") && output.contains("warm"), "{output}");
    let count = figures.len();
    assert!(output.contains(&format!("{count} of {count} answers are the same")), "{output}");
}
