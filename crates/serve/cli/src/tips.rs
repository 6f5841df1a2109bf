//! Tips in errors about unknown flags of `stolon serve`.
//!
//! The parser proposes the flag with the most similar letters, however different it is. Here, a
//! flag of another server gets a tip with the flag that does the same, and other proposals are made
//! only if they are close.

use std::ffi::OsString;

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Flags of llama.cpp, vLLM and SGLang without the dashes in front, and the flags to use instead.
const PEERS: &[(&[&str], &str)] = &[
    (
        &["n-gpu-layers", "gpu-layers", "ngl"],
        "a model is computed on one device as a whole: builds for GPUs choose it with --device",
    ),
    (
        &["ctx-size", "c", "context-length", "max-total-tokens", "max-seq-len"],
        "the context length is --max-model-len",
    ),
    (
        &["parallel", "np", "max-running-requests", "max-concurrent-requests"],
        "the number of requests that run at a time is --max-running",
    ),
    (
        &["batch-size", "b", "ubatch-size", "ub", "chunked-prefill-size", "max-prefill-tokens"],
        "the number of prompt tokens of a step is --max-batched-tokens",
    ),
    (&["n-predict", "predict", "n"], "the default length of answers is --default-max-tokens"),
    (&["alias", "a", "model-name"], "the name of the model for clients is --served-model-name"),
    (
        &["hf-repo", "hf-file", "hf", "hfr", "hff", "model-url", "m", "model-path", "tokenizer"],
        "the model is --model: a directory, a file, or a hub id such as org/name:Q4_K_M",
    ),
    (
        &["cache-type-k", "cache-type-v", "ctk", "ctv", "kv-cache-dtype"],
        "the data type of the KV cache is --kv-dtype; k8v4 has keys in int8 and values in int4",
    ),
    (
        &["quantization", "q", "dtype", "load-format"],
        "the format of the weights is that of the model's files; --weights q8_0 rounds them",
    ),
    (
        &[
            "tensor-parallel-size",
            "tp",
            "tp-size",
            "pipeline-parallel-size",
            "pp",
            "pp-size",
            "data-parallel-size",
            "dp",
            "dp-size",
        ],
        "a process uses one device; run several servers behind a router",
    ),
    (
        &["flash-attn", "fa", "attention-backend", "enable-chunked-prefill", "cont-batching", "cb"],
        "it is always on, or chosen by the engine: the flag can be left out",
    ),
    (
        &[
            "jinja",
            "enable-auto-tool-choice",
            "metrics",
            "enable-metrics",
            "embedding",
            "embeddings",
        ],
        "it is always on: the flag can be left out",
    ),
    (
        &[
            "trust-remote-code",
            "mlock",
            "no-mmap",
            "disable-log-requests",
            "no-enable-log-requests",
        ],
        "nothing like it is needed: the flag can be left out",
    ),
    (&["chat-template-file"], "the chat template is --chat-template"),
    (&["reasoning-format", "reasoning"], "the tags of the reasoning are --reasoning-parser"),
    (
        &["temp", "temperature", "top-k", "top-p", "min-p", "repeat-penalty", "generation-config"],
        "defaults for sampling are --override-generation-config",
    ),
    (&["mem-fraction-static"], "the size of the KV cache is --kv-memory"),
    (&["page-size"], "the number of tokens of a KV block is --block-size"),
    (
        &["disable-radix-cache", "no-cache-prompt"],
        "the prefix cache is off with --no-prefix-caching",
    ),
    (&["schedule-policy"], "the order of waiting requests is --admission"),
    (
        &[
            "enable-hierarchical-cache",
            "swap-space",
            "cpu-offload-gb",
            "slot-save-path",
            "cache-ram",
        ],
        "KV is kept on disk with --kv-cache-dir",
    ),
    (
        &["max-lora-rank", "max-loras", "lora-paths"],
        "adapters are --lora-modules and --lora-memory",
    ),
    (&["log-disable", "verbose", "v", "uvicorn-log-level"], "the log is --log-level"),
];

/// The same error, with a tip that fits the flag, or none.
pub(crate) fn settled(mut error: clap::Error, args: &[OsString]) -> clap::Error {
    if error.kind() != ErrorKind::UnknownArgument {
        return error;
    }
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else { return error };
    let flag = written(flag, args);
    let name = flag.trim_start_matches('-').to_owned();
    let serves =
        args.iter().skip(1).any(|arg| ["serve", "config", "launch"].iter().any(|it| arg == it));
    let tip = PEERS.iter().find(|(names, _)| serves && names.contains(&name.as_str()));
    if let Some((_, tip)) = tip {
        error.insert(ContextKind::InvalidArg, ContextValue::String(flag));
        drop_suggestion(&mut error);
        let tip = StyledStr::from(*tip);
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip]));
        return error;
    }
    let is_close = match error.get(ContextKind::SuggestedArg) {
        Some(ContextValue::String(proposed)) => is_close(&name, proposed.trim_start_matches('-')),
        _ => false,
    };
    if !is_close {
        drop_suggestion(&mut error);
    }
    error
}

/// The flag as it was written. The parser names only the first letter of a long flag with one dash.
fn written(flag: &str, args: &[OsString]) -> String {
    let whole = args.iter().skip(1).filter_map(|arg| arg.to_str());
    let mut whole = whole.filter_map(|arg| arg.split('=').next());
    let is_short = flag.len() == 2 && !flag.starts_with("--");
    let found = whole.find(|arg| is_short && arg.starts_with(flag));
    found.unwrap_or(flag).to_owned()
}

/// Removes the proposed flag, and the usage with it.
fn drop_suggestion(error: &mut clap::Error) {
    for kind in [ContextKind::SuggestedArg, ContextKind::Suggested, ContextKind::Usage] {
        error.remove(kind);
    }
}

/// Whether one flag may be a misspelling of the other, or a part of it.
fn is_close(name: &str, proposed: &str) -> bool {
    let within =
        |long: &str, short: &str| short.len() * 3 >= long.len() * 2 && long.contains(short);
    let most = (name.len() / 4).max(1);
    within(name, proposed) || within(proposed, name) || distance(name, proposed) <= most
}

/// Number of letters that have to be inserted, removed or replaced to turn one text into the other.
fn distance(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (line, char) in from.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = line + 1;
        for (column, other) in to.iter().enumerate() {
            let replaced = diagonal + usize::from(char != *other);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(row[column] + 1).min(diagonal + 1);
        }
    }
    row[to.len()]
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::cli::Cli;

    fn error(flags: &[&str]) -> String {
        let args: Vec<OsString> =
            ["stolon", "serve", "demo"].iter().chain(flags).map(OsString::from).collect();
        let error = Cli::command().try_get_matches_from(&args).expect_err("an unknown flag");
        settled(error, &args).to_string()
    }

    /// Goal: a flag of another server gets a tip about the flag that does the same, a misspelling
    /// gets the flag that was meant, and anything else gets no tip.
    #[test]
    fn tips_fit_the_flag() {
        for (flags, tip) in [
            (&["--n-gpu-layers", "9"][..], Some("one device as a whole")),
            (&["-ngl", "99"], Some("one device as a whole")),
            (&["--ctx-size=4096"], Some("--max-model-len")),
            (&["-c", "4096"], Some("--max-model-len")),
            (&["--tensor-parallel-size", "2"], Some("behind a router")),
            (&["--flash-attn"], Some("can be left out")),
            (&["--api-keys", "x"], Some("'--api-key'")),
            (&["--max-model-length", "7"], Some("'--max-model-len'")),
            (&["--kv-memroy", "64M"], Some("'--kv-memory'")),
            (&["--model-len", "7"], None),
            (&["--served-names", "x"], Some("'--served-name'")),
            (&["--nothing-of-the-kind"], None),
            (&["-z"], None),
        ] {
            let error = error(flags);
            let flag = flags[0].split('=').next().unwrap_or_default();
            assert!(error.contains(flag), "{error}");
            match tip {
                Some(tip) => assert!(error.contains("tip:") && error.contains(tip), "{error}"),
                None => assert!(!error.contains("tip:"), "{error}"),
            }
        }
    }

    /// Goal: each flag that a tip names exists, and none of the flags with a tip does.
    #[test]
    fn tips_name_flags_that_exist() {
        let command = Cli::command();
        let serve = command.find_subcommand("serve").expect("the command");
        let names: Vec<&str> = serve
            .get_arguments()
            .chain(command.get_arguments())
            .flat_map(|arg| {
                arg.get_long().into_iter().chain(arg.get_all_aliases().unwrap_or_default())
            })
            .collect();
        for (peers, tip) in PEERS {
            for flag in tip.split([' ', ':', ';']).filter_map(|word| word.strip_prefix("--")) {
                assert!(names.contains(&flag) || flag == "device", "--{flag}");
            }
            for peer in *peers {
                assert!(!names.contains(peer), "--{peer}");
            }
        }
    }
}
