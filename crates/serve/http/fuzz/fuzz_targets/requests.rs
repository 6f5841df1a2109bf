//! Arbitrary bodies of requests: each is parsed, or refused with an error of bounded length.
#![no_main]

use libfuzzer_sys::fuzz_target;
use stolon_http::{
    parse_chat, parse_completion, parse_embeddings, parse_infill, parse_messages,
    parse_ollama_chat, parse_responses,
};

const MAX_VALUES: usize = 1_000;

fuzz_target!(|body: &[u8]| {
    let errors = [
        parse_completion(body, MAX_VALUES).err(),
        parse_chat(body, MAX_VALUES).err(),
        parse_responses(body, MAX_VALUES).err(),
        parse_messages(body, MAX_VALUES).err(),
        parse_embeddings(body, MAX_VALUES).err(),
        parse_infill(body, MAX_VALUES).err(),
        parse_ollama_chat(body, MAX_VALUES).err(),
    ];
    for reply in errors.into_iter().flatten() {
        assert!(!reply.error.message.is_empty() && reply.error.message.len() < 3_000);
        assert!(reply.error.param.is_none_or(|param| param.len() < 300));
    }
});
