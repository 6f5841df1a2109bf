//! `stolon generate`, `chat` and `demo`, run as from a shell.

use serde_json::{Value, json};

use crate::support::{Server, TINY, fail, json_lines, stolon, succeed, succeed_with};

/// `generate --json` on the tiny model with these further arguments.
fn generate(args: &[&str]) -> Vec<Value> {
    let base = ["generate", "--json", "--model", TINY, "--num-blocks", "256", "--max-tokens", "8"];
    json_lines(&succeed(&[&base[..], args].concat()))
}

/// Goal: `--json` prints one object per prompt with all fields; prompts of one call share the
/// prefix cache, and a text and its token ids are the same prompt.
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

/// Goal: without flags, the sampling and the suppressed tokens that the model's authors recommend
/// apply; flags replace the sampling.
#[test]
fn generate_uses_what_the_model_recommends() {
    let tokens = |args: &[&str]| {
        let base = ["--prompt", "hello", "--ignore-eos", "--seed", "3"];
        generate(&[&base[..], args].concat())[0]["token_ids"].clone()
    };
    let greedy = tokens(&[]);
    let sampling = ["--override-generation-config", r#"{"temperature": 50.0}"#];
    assert_ne!(tokens(&sampling), greedy);
    assert_eq!(tokens(&[&sampling[..], &["--temperature", "0"]].concat()), greedy);
    let suppressed = json!({"suppress_tokens": [greedy[0]], "bad_words_ids": [[greedy[1]]]});
    let others = tokens(&["--override-generation-config", &suppressed.to_string()]);
    let others = others.as_array().expect("a list");
    assert!(!others.contains(&greedy[0]) && !others.contains(&greedy[1]), "{others:?}");
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
    let input = "/cache\nHello there, how are you today?\n/stats\n/cache\nAnd what now?\n/reset\nAnew!\n/nonsense\n/quit\n";
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
    assert!(figures[0].contains(" tokens/s: "), "{output}");
    assert!(output.contains("[the conversation is empty]"), "{output}");
    let of = |role: &str| {
        let line = output.lines().find(|line| line.starts_with(&format!("[{role}")));
        let line = line.unwrap_or_else(|| panic!("{role}: {output}"));
        let counts = line.split(' ').filter_map(|word| word.parse().ok());
        let counts: Vec<usize> = counts.collect();
        (counts[0], counts[1])
    };
    let (question, all) = of("user");
    assert_eq!(question, all, "the whole question is cached: {output}");
    let (answer, all) = of("assistant");
    assert!(0 < answer && answer < all, "whole blocks of the answer are cached: {output}");
    assert!(output.contains("tokens of the conversation are cached]"), "{output}");
    assert!(output.contains("[1 turns;") && output.contains("no command `/nonsense`"), "{output}");
}

/// Goal: the commands of `chat` change and save the conversation, its sampling and its system
/// prompt; a message can have several lines; a command that fails prints an error, and the
/// conversation continues.
#[test]
fn chat_has_commands() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name).to_str().expect("UTF-8").to_owned();
    let (json, text) = (path("chat.json"), path("chat.md"));
    std::fs::write(path("taken.md"), "mine").expect("a file");
    let input = format!(
        "/help\n/system\n/system The violet tent costs 45 crowns. The amber boat costs 38 crowns.\n\
         /system\n/set\n/set max-tokens 30\n/set temprature 1\n/set temperature hot\n\
         \"\"\"How much does the violet\ntent cost?\"\"\"\nHow much does the \\\namber boat cost?\n\
         /save {json}\n/save {json}\n/save {text}\n/save {}\n/save\n/system -\n/system\n",
        path("taken.md")
    );
    let output = succeed_with(&["chat"], &input);
    for expected in [
        "/system [TEXT]",
        "[no system prompt]",
        "The violet tent costs 45 crowns. The amber boat",
        "[nothing is set; the model's defaults apply to the rest]",
        "[max-tokens 30]",
        "expected one of max-tokens, temperature",
        "invalid value 'hot'",
        "[the system prompt is removed]",
        "cannot write",
        "no command `/save`",
    ] {
        assert!(output.contains(expected), "{expected}: {output}");
    }
    let saved = std::fs::read_to_string(&json).expect("a file");
    let saved: Value = serde_json::from_str(&saved).expect("JSON");
    let said = |index: usize| saved[index]["content"].as_str().expect("text").to_owned();
    assert_eq!(saved.as_array().map(Vec::len), Some(5), "{saved}");
    assert_eq!(said(1), "How much does the violet\ntent cost?");
    assert_eq!(said(3), "How much does the \namber boat cost?");
    let saved = std::fs::read_to_string(&text).expect("a file");
    assert!(
        saved.starts_with("## system\n\nThe violet tent") && saved.contains(&said(4)),
        "{saved}"
    );
    assert_eq!(std::fs::read_to_string(path("taken.md")).expect("a file"), "mine");
}

/// Goal: the demo model says what it can do, with and without a handbook.
#[test]
fn the_demo_model_answers_a_greeting() {
    let about =
        "I am a small demo model: I answer questions about the handbook in the system prompt.";
    for args in [&["chat"][..], &["chat", "--system", "The violet tent costs 45 crowns."]] {
        let output = succeed_with(args, "Hello!\nWhat can you do?\n");
        assert_eq!(output.matches(about).count(), 2, "{output}");
    }
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

/// Goal: `demo --picture` asks about a picture, encodes it once, finds it cached from the second
/// question on, and is right.
#[test]
fn the_demo_with_a_picture_encodes_it_once() {
    let output = succeed(&["demo", "--picture"]);
    let figures: Vec<&str> =
        output.lines().filter(|line| line.contains("of them cached")).collect();
    assert_eq!(figures.len(), 6, "{output}");
    assert!(figures.iter().all(|line| line.contains("right;")), "{output}");
    assert!(figures[0].contains(" 0 of them cached"), "{output}");
    assert!(figures[1..].iter().all(|line| !line.contains(" 0 of them cached")), "{output}");
    assert!(output.contains("The image encoder ran once"), "{output}");
    assert!(output.contains("6 of 6 answers are right"), "{output}");
}

/// Goal: `generate` and `chat` answer questions about an image file with the demo model that sees.
#[test]
fn the_demo_model_sees_image_files() {
    let picture =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo_model/vision/picture.png");
    let asked = ["--image", picture, "--prompt", "What colour is the star?"];
    let output = succeed(&[&["generate", "--chat", "--model", "demo-vision"], &asked[..]].concat());
    assert!(output.contains("The star is yellow."), "{output}");
    let questions = "What is in the middle?\nWhich digit is shown?\n";
    let typed = format!("/image {picture}\n{questions}");
    for (args, typed) in [(&[][..], &*typed), (&["--image", picture][..], questions)] {
        let output = succeed_with(&[&["chat", "--model", "demo-vision"], args].concat(), typed);
        assert!(output.contains("A blue square is in the middle."), "{args:?}: {output}");
        assert!(output.contains("The digit is 7."), "{args:?}: {output}");
    }
}

/// Goal: `stolon cache` has the same effect on a running server as its routes, and reports a
/// refusal and an address where nothing answers.
#[tokio::test]
async fn the_cache_of_a_running_server_is_administered() {
    let server = Server::start(TINY, &["--pin-budget", "8", "--admin-key", "root"]);
    let url = server.url("");
    let cache = |args: &[&str]| {
        let all = [&["cache", "--url", &url, "--admin-key", "root"], args].concat();
        succeed(&all)
    };
    let text = "The keeper of the tower lights the lamp every evening."; // 54 bytes, 54 tokens.
    assert_eq!(cache(&["query", text]), "0 of 54 tokens are cached\n");
    assert_eq!(
        cache(&["warm", text, "x"]),
        "48 of 54 tokens are cached\n0 of 1 tokens are cached\n"
    );
    let queried = json_lines(&cache(&["query", "--json", "--token-ids", "84,104,101"]));
    assert_eq!(queried[0]["results"][0]["prompt_tokens"], 3);
    let pinned = cache(&["pin", text, "--ttl", "900", "--refresh-on-hit", "--reason", "release"]);
    assert_eq!(pinned, "pin 1: 48 tokens\n");
    let pins = cache(&["list-pinned", "--tokens"]);
    for word in ["pin 1: 48 tokens, 3 blocks", "ends in", "release", "The keeper"] {
        assert!(pins.contains(word), "{pins}");
    }
    assert_eq!(cache(&["evict", text]), "0 blocks freed\n");
    assert_eq!(cache(&["unpin", text]), "1 pin has ended\n");
    assert_eq!(cache(&["pin", text]), "pin 2: 48 tokens\n");
    assert_eq!(cache(&["unpin", "--id", "2"]), "1 pin has ended\n");
    assert!(cache(&["tree", "--tokens"]).contains("48 tokens, "));
    assert!(cache(&["tree", "--dot"]).starts_with("digraph"));
    let stats = cache(&["stats"]);
    for words in ["3 cached (3 evictable, 0 pinned)", "KV       ", " % of "] {
        assert!(stats.contains(words), "{stats}");
    }
    assert_eq!(cache(&["evict", text]), "3 blocks freed\n");
    assert_eq!(cache(&["flush"]), "the cache is empty\n");
    assert_eq!(cache(&["tree"]), "nothing is cached\n");
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("prompt.txt");
    std::fs::write(&file, text).expect("a file");
    let file = file.to_str().expect("UTF-8");
    assert_eq!(cache(&["query", "--prompt-file", file]), "0 of 54 tokens are cached\n");
    assert_eq!(cache(&["sessions"]), "there are no sessions\n");
    server.post("/v1/sessions", json!({"id": "chat-7", "ttl_seconds": 60})).await;
    let turn = json!({"prompt": text, "max_tokens": 1, "session_id": "chat-7"});
    assert_eq!(server.post("/v1/completions", turn).await.0, 200);
    let sessions = cache(&["sessions"]);
    assert!(sessions.starts_with("chat-7: 54 of 5"), "{sessions}");
    assert!(
        sessions.contains(" tokens held in 4 blocks, 1 turns, idle for 0 of 60 s"),
        "{sessions}"
    );
    let refused = fail(&["cache", "--url", &url, "stats"]);
    assert!(refused.contains("401") && refused.contains("STOLON_ADMIN_KEY"), "{refused}");
    let unpinned = fail(&["cache", "--url", &url, "--admin-key", "root", "unpin", "--id", "7"]);
    assert!(unpinned.contains("there is no pin 7"), "{unpinned}");
    let unreachable = fail(&["cache", "--url", "http://127.0.0.1:1", "stats"]);
    assert!(unreachable.contains("stolon serve"), "{unreachable}");
}

/// Goal: without arguments the command says what to do first, and everything that it names exists.
#[test]
fn the_first_steps_are_commands() {
    let steps = succeed(&[]);
    let named = steps.lines().filter_map(|line| line.strip_prefix("  stolon "));
    let named: Vec<&str> = named.filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(named, ["demo", "doctor", "run", "serve", "help"]);
    for command in named {
        assert!(succeed(&["help", command]).contains("Usage"), "{command}");
    }
    let message = fail(&["run", "random:enormous"]);
    assert!(message.contains("enormous") && message.contains("tiny"), "{message}");
}

/// Goal: the machine is described in words and as JSON, and models are listed with the memory that
/// they need.
#[test]
fn the_doctor_describes_the_machine() {
    let found = &json_lines(&succeed(&["doctor", "--quick", "--json"]))[0];
    assert!(found["threads"].as_u64().is_some_and(|count| count > 0), "{found}");
    let supported = found["supported"].as_array().expect("a list");
    assert!(supported.contains(&found["kernels"]), "{found}");
    assert_eq!(found["read_rate"], Value::Null);
    let words = succeed(&["doctor", "--quick"]);
    assert!(words.contains("kernels") && words.contains("Llama 3.1 8B"), "{words}");
}

/// Goal: completions and manual pages know every command, and flags are found under vLLM's names.
#[test]
fn completions_manual_pages_and_aliases_exist() {
    for shell in ["bash", "zsh", "fish"] {
        let script = succeed(&["completions", shell]);
        assert!(script.contains("list-pinned") && script.contains("max-num-seqs"), "{shell}");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().to_str().expect("UTF-8");
    succeed(&["man", path]);
    for page in ["stolon.1", "stolon-serve.1", "stolon-cache-pin.1"] {
        assert!(folder.path().join(page).is_file(), "{page}");
    }
    let missing = folder.path().join("missing");
    assert!(fail(&["man", missing.to_str().expect("UTF-8")]).contains("missing"));
}

/// Goal: a server starts with vLLM's names of the flags, and the context is as long as requested.
#[tokio::test]
async fn flags_have_the_names_of_vllm() {
    let server = Server::start(
        TINY,
        &[
            "--max-num-seqs",
            "4",
            "--max-num-batched-tokens",
            "64",
            "--max-model-len",
            "100",
            "--served-model-name",
            "helper",
            "--scheduling-policy",
            "priority",
            "--no-enable-prefix-caching",
            "--enable-prefix-caching",
        ],
    );
    let (_, models) = server.get("/v1/models").await;
    assert_eq!(
        (&models["data"][0]["id"], &models["data"][0]["max_model_len"]),
        (&"helper".into(), &100.into())
    );
    let (status, refused) = server.post("/v1/completions", json!({"prompt": vec![65; 100]})).await;
    assert_eq!(
        (status, &refused["error"]["code"]),
        (400, &"context_length_exceeded".into()),
        "{refused}"
    );
    let body = json!({"prompt": vec![65; 64], "max_tokens": 1});
    for cached in [0, 64] {
        let reply = server.ok("/v1/completions", body.clone()).await;
        assert_eq!(reply["usage"]["prompt_tokens_details"]["cached_tokens"], cached);
    }
    let long = ["--max-model-len", "100000000", "--prompt", "x"];
    let refused = fail(&[&["generate", "--model", TINY][..], &long].concat());
    assert!(refused.contains("max_positions") && refused.contains("100000000"), "{refused}");
}

/// Goal: the command line takes a schema, as text and as a file, a regular expression and a
/// grammar, and refuses two of them.
#[test]
fn the_command_line_takes_grammars() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).expect("written");
        path.to_string_lossy().into_owned()
    };
    let schema = json!({"type": "object", "properties": {"color": {"enum": ["red", "green"]}},
                        "required": ["color"], "additionalProperties": false});
    let inline = schema.to_string();
    let assert_valid = |text: &str| {
        let value: Value = serde_json::from_str(text).expect("JSON");
        assert!(["red", "green"].iter().any(|color| value["color"] == *color), "{value}");
    };
    let generate = |flag: &str, value: &str| {
        let output = succeed(&[
            "generate",
            "--model",
            "demo",
            "--prompt",
            "x",
            "--max-tokens",
            "200",
            "--json",
            flag,
            value,
        ]);
        let line: Value = serde_json::from_str(output.trim()).expect("JSON");
        line["text"].as_str().expect("a text").to_owned()
    };
    assert_valid(&generate("--json-schema", &inline));
    assert_valid(&generate("--json-schema", &file("schema.json", &inline)));
    assert_eq!(generate("--regex", "a{4}"), "aaaa");
    assert_eq!(generate("--grammar", &file("a.lark", "start: \"b\" \"c\"")), "bc");
    let both =
        ["generate", "--model", "demo", "--prompt", "x", "--regex", "a", "--json-schema", "{}"];
    let output = stolon(&both).output().expect("it runs");
    assert_eq!(output.status.code(), Some(2));
}
