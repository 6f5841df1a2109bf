//! Small valid `tokenizer.json` files with arbitrary changes: the result is an error, or a usable
//! tokenizer.
#![no_main]

#[allow(dead_code, reason = "the tests use more of it")]
#[path = "../../tests/text/vocabularies.rs"]
mod vocabularies;

use std::sync::Once;

use libfuzzer_sys::fuzz_target;
use stolon_text::Tokenizer;
use vocabularies::{Spaces, byte_level, metaspace, words};

/// The number of the file, replacements as (place, bytes to remove, text to insert), and a text to
/// encode.
type Input<'a> = (u8, Vec<(u16, u8, &'a str)>, &'a str);

fuzz_target!(|input: Input<'_>| {
    // libFuzzer's hook ends the process at each panic, also at those that the library catches.
    static HOOK: Once = Once::new();
    HOOK.call_once(|| std::panic::set_hook(Box::new(|_| ())));
    let (file, changes, text) = input;
    let mut bytes = match file % 4 {
        0 => byte_level(),
        1 => metaspace(Spaces::Cut, false),
        2 => metaspace(Spaces::Metaspace, true),
        _ => words(),
    }
    .to_string()
    .into_bytes();
    for (place, removed, inserted) in changes {
        // The vocabulary is long, so half of the places are counted from the end.
        let place = usize::from(place) % bytes.len().max(1);
        let place = if inserted.len() % 2 == 0 { place } else { bytes.len() - place };
        let end = (place + usize::from(removed)).min(bytes.len());
        bytes.splice(place..end, inserted.bytes());
    }
    let Ok(tokenizer) = Tokenizer::from_json("tokenizer.json", &bytes) else { return };
    for add_special in [false, true] {
        if let Ok(tokens) = tokenizer.encode(text, add_special) {
            let _ = tokenizer.decode(&tokens, false);
        }
    }
});
