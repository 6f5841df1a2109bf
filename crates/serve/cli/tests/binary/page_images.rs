//! Pictures in the chat of the page at `/` in a real browser. They have the requirements of
//! `page.rs`.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;

use crate::browser::{Browser, ENTER};
use crate::page::{answers, demo, nothing_went_wrong};
use crate::support::Server;

/// The picture of the demonstration.
const PICTURE: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo_model/vision/picture.png");

/// The preview of the picture that is sent with the next message.
const PREVIEW: &str = "document.querySelector('#attached:not([hidden]) img')";

/// A server with the demo model that sees, and its page.
async fn seeing() -> (Server, Browser) {
    let server = Server::start("demo-vision", &[]);
    let browser = Browser::start().await;
    browser.open(&server.url("/")).await;
    browser.wait_for("document.querySelector('#attach').title.includes('picture')").await;
    (server, browser)
}

/// Pastes a file into the field of the question, or drops it onto the page. `bytes` is a JavaScript
/// expression of its content.
pub(crate) async fn give(browser: &Browser, event: &str, kind: &str, bytes: &str) {
    let (constructor, member) = match event {
        "paste" => ("ClipboardEvent", "clipboardData"),
        _ => ("DragEvent", "dataTransfer"),
    };
    browser
        .script(&format!(
            "const data = new DataTransfer(); \
             data.items.add(new File([{bytes}], 'given', {{ type: '{kind}' }})); \
             document.querySelector('#question').dispatchEvent(new {constructor}('{event}', \
               {{ {member}: data, bubbles: true, cancelable: true }}))"
        ))
        .await;
}

/// A JavaScript expression of the content of the picture.
fn picture() -> String {
    let file = STANDARD.encode(std::fs::read(PICTURE).expect("it is committed"));
    format!("Uint8Array.from(atob('{file}'), (char) => char.charCodeAt(0))")
}

/// Asks a question and returns the text of the answer, which is answer number `number`.
async fn ask(browser: &Browser, question: &str, number: usize) -> String {
    browser.type_into("#question", question).await;
    browser.press(ENTER).await;
    answers(browser, number).await;
    let words = "return [...document.querySelectorAll('.answer .words')].at(-1).innerText";
    browser.script(words).await.as_str().expect("a text").to_owned()
}

/// Goal: a picture is chosen, pasted and dropped, shown before it is sent, and removed; answers are
/// about it, later ones from the cache; and the conversation shows it, also after a reload.
#[tokio::test]
#[ignore = "needs chromium and chromium-driver; .ci/deep runs it"]
async fn a_picture_is_chosen_pasted_and_dropped() {
    let (server, browser) = seeing().await;
    let path = std::fs::canonicalize(PICTURE).expect("it is committed");
    browser.type_into("#file", path.to_str().expect("UTF-8")).await;
    browser.wait_for(PREVIEW).await;
    browser.click("#remove-image").await;
    let is_focused = "return document.activeElement.id";
    assert_eq!(browser.script(is_focused).await, "question");
    assert_eq!(browser.script(&format!("return {PREVIEW}")).await, json!(null));

    give(&browser, "paste", "image/png", &picture()).await;
    browser.wait_for(PREVIEW).await;
    assert_eq!(ask(&browser, "What colour is the star?", 1).await, "The star is yellow.");
    assert_eq!(browser.script(&format!("return {PREVIEW}")).await, json!(null), "it is sent once");
    assert_eq!(ask(&browser, "Which digit is shown?", 2).await, "The digit is 7.");
    let facts = "return [...document.querySelectorAll('.answer-facts')].at(-1).innerText";
    let facts = browser.script(facts).await;
    assert!(!facts.as_str().expect("a text").starts_with("0 of"), "{facts}");
    let shown = "return document.querySelectorAll('.question .sent-image').length";
    assert_eq!(browser.script(shown).await, 1);

    browser.open(&server.url("/")).await;
    answers(&browser, 2).await;
    assert_eq!(browser.script(shown).await, 1);
    let loaded = "document.querySelector('.sent-image').naturalWidth === 240";
    browser.wait_for(loaded).await;

    browser.click("#new-chat").await;
    give(&browser, "drop", "image/png", &picture()).await;
    browser.wait_for(PREVIEW).await;
    assert_eq!(ask(&browser, "How many squares are there?", 1).await, "There are 2 squares.");
    let (_, stats) = server.get("/admin/stats").await;
    assert_eq!(stats["stats"]["images_encoded"], 1, "{stats}");
    nothing_went_wrong(&server, &browser).await;
}

/// Goal: the page offers the example picture with questions about it.
#[tokio::test]
#[ignore = "needs chromium and chromium-driver; .ci/deep runs it"]
async fn the_example_picture_is_offered() {
    let (server, browser) = seeing().await;
    browser.click("#load-picture").await;
    browser.wait_for(PREVIEW).await;
    // The first question that is left, and then the third.
    for (number, child) in [(1, 1), (2, 3)] {
        browser.wait_for("document.querySelector('#questions button:not(:disabled)')").await;
        browser.click(&format!("#questions button:nth-child({child})")).await;
        answers(&browser, number).await;
    }
    let words =
        "return [...document.querySelectorAll('.answer .words')].map((one) => one.innerText)";
    assert_eq!(browser.script(words).await, json!(["The star is yellow.", "The digit is 7."]));
    nothing_went_wrong(&server, &browser).await;
}

/// Goal: files that cannot be sent are refused, and the error says what was expected: a file that
/// is too large, one that is not a picture, and any picture if the model takes none.
#[tokio::test]
#[ignore = "needs chromium and chromium-driver; .ci/deep runs it"]
async fn other_files_are_refused() {
    let (server, browser) = seeing().await;
    let complaint = "document.querySelector('#image-error:not([hidden])')?.innerText";
    let includes = |text: &str| format!("{complaint}?.includes('{text}')");
    give(&browser, "drop", "image/png", "new Uint8Array(5 << 20)").await;
    browser.wait_for(&includes("expected at most 4 MiB, got 5 MiB")).await;
    give(&browser, "drop", "image/tiff", "'II'").await;
    browser.wait_for(&includes("expected PNG, JPEG, WebP, GIF or BMP, got image/tiff")).await;
    let unreadable = "expected a text (UTF-8) or a picture, got application/zip";
    for (bytes, expected) in [
        ("'%PDF-1.7' + ' '.repeat(300 << 10)", "is a PDF file, whose text the page cannot read"),
        ("new Uint8Array([255, 254, 65])", unreadable),
        ("'a\\0b'", unreadable),
    ] {
        give(&browser, "drop", "image/tiff", "'II'").await;
        browser.wait_for(&includes("image/tiff")).await;
        give(&browser, "drop", "application/zip", bytes).await;
        browser.wait_for(&includes(expected)).await;
    }
    give(&browser, "drop", "text/plain", "new Uint8Array(300 << 10)").await;
    browser.wait_for(&includes("expected a text of at most 256 KiB, got 300 KiB")).await;
    assert_eq!(browser.script(&format!("return {PREVIEW}")).await, json!(null));
    give(&browser, "paste", "image/png", &picture()).await;
    browser.wait_for(PREVIEW).await;
    assert_eq!(browser.script(&format!("return {complaint}")).await, json!(null));
    nothing_went_wrong(&server, &browser).await;

    let (server, browser) = demo(&[]).await;
    browser.wait_for("document.querySelectorAll('#questions button').length").await;
    let title = browser.script("return document.querySelector('#attach').title").await;
    assert!(title.as_str().is_some_and(|title| !title.contains("picture")), "{title}");
    give(&browser, "paste", "image/png", &picture()).await;
    browser.wait_for(&includes("The model stolon-demo takes no pictures, only text.")).await;
    nothing_went_wrong(&server, &browser).await;
}

/// Goal: axe finds nothing in a chat with pictures, in light and in dark.
#[tokio::test]
#[ignore = "needs chromium, chromium-driver and axe-core; .ci/deep runs it"]
async fn axe_finds_nothing_in_a_chat_with_pictures() {
    let path = std::env::var("STOLON_AXE").expect("STOLON_AXE names axe.min.js of axe-core");
    let axe = std::fs::read_to_string(path).expect("axe.min.js");
    let (server, browser) = seeing().await;
    give(&browser, "paste", "image/png", &picture()).await;
    browser.wait_for(PREVIEW).await;
    ask(&browser, "What colour is the star?", 1).await;
    give(&browser, "drop", "application/pdf", "'%PDF'").await;
    give(&browser, "paste", "image/png", &picture()).await;
    browser.wait_for(PREVIEW).await;
    browser.script(&axe).await;
    for (dark, width) in [(false, 1360), (true, 1360), (false, 390)] {
        browser.dark(dark).await;
        browser.resize(width, 900).await;
        browser.wait_for("document.getAnimations().every((a) => a.animationName === 'flow')").await;
        let found =
            browser.wait_for("axe.run().then((result) => JSON.stringify(result.violations))");
        assert_eq!(found.await, "[]", "dark: {dark}, width: {width}");
    }
    nothing_went_wrong(&server, &browser).await;
}
