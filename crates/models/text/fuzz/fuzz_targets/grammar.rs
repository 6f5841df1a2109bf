//! Arbitrary grammars of every kind, and the first tokens of answers that follow them. Compiling
//! ends with a grammar or an error, and a mask that was begun in advance equals the one of the slow
//! path.
#![no_main]

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use stolon_text::{Grammar, GrammarCompiler, Tokenizer};

static COMPILER: OnceLock<GrammarCompiler> = OnceLock::new();

fuzz_target!(|input: (u8, u8, &str)| {
    let (kind, seed, text) = input;
    let grammar = match kind % 4 {
        0 => Grammar::Regex(text.to_owned()),
        1 => Grammar::Lark(text.to_owned()),
        2 => Grammar::Choice(text.split('|').map(str::to_owned).collect()),
        _ => match serde_json::from_str(text) {
            Ok(schema) => Grammar::JsonSchema(schema),
            Err(_) => return,
        },
    };
    let compiler = COMPILER.get_or_init(|| GrammarCompiler::new(Tokenizer::bytes(), &[0]));
    let Ok(compiled) = compiler.compile(&grammar) else { return };
    let state = compiled.state();
    let mut tokens = Vec::new();
    for step in 0..12 {
        let Ok(mask) = state.mask(&tokens) else { return };
        let start = u32::from(seed).wrapping_mul(step + 1) % 256;
        let mut order = (start..256).chain(0..start).filter(|&token| token > 0);
        match order.find(|&token| mask.allows(token)) {
            Some(token) => tokens.push(token),
            None => return,
        }
        state.begin(&tokens);
    }
    // From the first token on, the mask is the same.
    let (fast, slow) = (state.mask(&tokens), state.restarted().mask(&tokens));
    assert_eq!(fast, slow, "{grammar:?} after {tokens:?}");
});
