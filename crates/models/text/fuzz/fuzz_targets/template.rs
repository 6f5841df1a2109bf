//! Arbitrary text as a chat template and as a message: the result is an error, or a bounded text.
#![no_main]

use std::sync::Once;

use libfuzzer_sys::fuzz_target;
use serde_json::Map;
use stolon_text::{ChatMessage, ChatOptions, ChatTemplate};

fuzz_target!(|input: (&str, &str)| {
    // libFuzzer's hook ends the process at each panic, also at those that the library catches.
    static HOOK: Once = Once::new();
    HOOK.call_once(|| std::panic::set_hook(Box::new(|_| ())));
    let (source, message) = input;
    let Ok(chat) = ChatTemplate::new([("default", source)], Map::new()) else { return };
    let messages = [ChatMessage::user(message), ChatMessage::assistant("hello")];
    if let Ok(text) = chat.render(&messages, &ChatOptions::default()) {
        assert!(text.len() <= 16 << 20);
    }
});
