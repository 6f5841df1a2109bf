//! The program, as `cargo run -- demo` starts it.

use std::process::{Command, Output};

fn demo(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_stolon-demo")).args(args).output().expect("it starts")
}

/// Goal: the handbook is cached from the second question on, and the answers are right and the same
/// with an empty cache.
#[test]
fn answers_are_the_same_cached_and_cold() {
    let output = demo(&["demo"]);
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(output.status.success(), "{text}");
    let figures: Vec<&str> = text.lines().filter(|line| line.contains("of them cached")).collect();
    let count = figures.len();
    assert!(count >= 4 && figures.iter().all(|line| line.contains("right;")), "{text}");
    assert!(figures[0].contains(" 0 of them cached"), "{text}");
    assert!(figures[1..].iter().all(|line| !line.contains(" 0 of them cached")), "{text}");
    assert!(text.contains(&format!("{count} of {count} answers are the same")), "{text}");
}

/// Goal: with a picture instead of the handbook, the encoder runs once, and the answers are right.
#[cfg(feature = "images")]
#[test]
fn a_picture_is_encoded_once() {
    let output = demo(&["demo", "--picture"]);
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(output.status.success(), "{text}");
    assert!(text.contains("The image encoder ran once"), "{text}");
    assert!(text.contains("6 of 6 answers are right"), "{text}");
}

/// Goal: a command that only the whole program has is refused, with the way to get it.
#[test]
fn other_commands_are_refused() {
    for args in [&["serve"][..], &["demo", "demo"], &["demo", "--threads", "1"]] {
        let output = demo(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        let message = String::from_utf8(output.stderr).expect("UTF-8");
        assert!(message.contains("cargo install --path cli"), "{message}");
    }
}
