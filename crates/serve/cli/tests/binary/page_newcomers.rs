//! The page at `/` for somebody who comes to it with a phone, many chats or files. It has the
//! requirements of `page.rs`.

use serde_json::{Value, json};

use crate::browser::{Browser, ENTER};
use crate::page::{answers, demo, nothing_went_wrong};
use crate::page_chat::{keep_chat, texts};
use crate::page_images::give;

/// Asks a question; its answer is the last of `count`.
async fn ask(browser: &Browser, question: &str, count: usize) {
    browser.type_into("#question", question).await;
    browser.press(ENTER).await;
    answers(browser, count).await;
}

/// Goal: on a phone the header is one row, the whole field of the question is in view, and the chat
/// and the cache are one button apart.
#[tokio::test]
#[ignore = "needs chromium and chromium-driver; .ci/deep runs it"]
async fn a_phone_shows_everything() {
    let (server, browser) = demo(&[]).await;
    for (width, height) in [(390, 844), (360, 640)] {
        browser.resize(width, height).await;
        browser.open(&server.url("/")).await;
        browser.wait_for("document.querySelectorAll('#questions button').length").await;
        let outside = "return [...document.querySelectorAll('header *, #ask textarea, #ask button')]\
             .filter((element) => element.checkVisibility()).filter((element) => {\
               const box = element.getBoundingClientRect();\
               return box.left < 0 || box.top < 0 || box.right > innerWidth \
                 || box.bottom > innerHeight;\
             }).map((element) => element.outerHTML)";
        assert_eq!(browser.script(outside).await, json!([]), "{width}");
        let middles = "return new Set([...document.querySelectorAll('header button, header a')]\
             .map((element) => element.getBoundingClientRect().top)).size";
        assert_eq!(browser.script(middles).await, 1, "{width}: the header is one row");
        let visible = "['#chat', '#cache'].map((name) => \
                       document.querySelector(name).checkVisibility()).join()";
        assert_eq!(browser.script(&format!("return {visible}")).await, "true,false");
        browser.click("#toggle-cache").await;
        assert_eq!(browser.script(&format!("return {visible}")).await, "false,true");
        browser.click("#flush").await;
        browser.accept().await;
        browser.click("#toggle-cache").await;
        assert_eq!(browser.script(&format!("return {visible}")).await, "true,false");
        let size = "return [document.documentElement.scrollWidth, \
                    document.documentElement.scrollHeight]";
        assert_eq!(browser.script(size).await, json!([width, height]));
    }
    browser.resize(1360, 900).await;
    browser.wait_for("document.querySelector('#cache').checkVisibility()").await;
    nothing_went_wrong(&server, &browser).await;
}

/// Goal: a chat is found by a word of an answer, and opened with the keyboard; what a chat is called
/// is text.
#[tokio::test]
#[ignore = "needs chromium and chromium-driver; .ci/deep runs it"]
async fn chats_are_searched() {
    let (server, browser) = demo(&[]).await;
    keep_chat(&browser, "The lamp is <b>lit</b> at dusk.").await;
    browser.open(&server.url("/")).await;
    browser.click("#new-chat").await;
    browser.wait_for("document.querySelectorAll('#questions button').length").await;
    ask(&browser, "<i>Who</i> owns the speckled goat?", 1).await;
    browser.click("#open-chats").await;
    let names = ["<i>Who</i> owns the speckled goat?", "Earlier"];
    assert_eq!(texts(&browser, ".entry-name").await, json!(names));
    browser.press("DUSK lamp").await;
    browser.wait_for("document.querySelectorAll('.entry').length === 1").await;
    assert_eq!(texts(&browser, "#chats-found").await, json!(["1 of 2 chats"]));
    let extract = texts(&browser, ".entry").await;
    assert!(extract[0].as_str().is_some_and(|text| text.contains("<b>lit</b>")), "{extract}");
    assert_eq!(texts(&browser, "#chat-list b, #chat-list i").await, json!([]));
    browser.press(ENTER).await;
    browser.wait_for("!document.querySelector('#chats').open").await;
    assert_eq!(texts(&browser, ".question").await, json!(["An earlier question"]));
    assert_eq!(texts(&browser, "#chat-heading").await, json!(["Earlier"]));

    browser.click("#open-chats").await;
    browser.click("#chat-list li:nth-child(2) > button:last-child").await;
    browser.accept().await;
    browser.wait_for("document.querySelectorAll('.entry').length === 1").await;
    browser.click("#close-chats").await;
    assert_eq!(texts(&browser, ".question").await, json!([names[0]]));
    nothing_went_wrong(&server, &browser).await;
}

/// Goal: an answer that was regenerated and a question that was changed stay, one click away, with
/// all that came after them, also after a reload.
#[tokio::test]
#[ignore = "needs chromium and chromium-driver; .ci/deep runs it"]
async fn versions_of_an_answer_are_kept() {
    let (server, browser) = demo(&[]).await;
    browser.wait_for("document.querySelectorAll('#questions button').length").await;
    ask(&browser, "What is the speckled goat called?", 1).await;
    ask(&browser, "Who owns the speckled goat?", 2).await;
    assert_eq!(texts(&browser, ".version").await, json!([]));
    browser.click(".turn:first-child .answer .actions button:last-child").await;
    answers(&browser, 1).await;
    browser.click(".turn:first-child .question-box button:nth-child(2)").await;
    browser.script("document.activeElement.value = ''").await;
    browser.press("How much does the violet tent cost?").await;
    browser.press(ENTER).await;
    browser.wait_for("document.querySelector('.answer .words').innerText.includes('crowns')").await;
    answers(&browser, 1).await;
    let place = "document.querySelector('.version + .quiet').innerText";
    assert_eq!(browser.script(&format!("return {place}")).await, "3 of 3");
    browser.open(&server.url("/")).await;
    answers(&browser, 1).await;
    for (expected, turns) in [("2 of 3", 1), ("1 of 3", 2)] {
        browser.click("[aria-label='Previous version']").await;
        assert_eq!(browser.script(&format!("return {place}")).await, expected);
        answers(&browser, turns).await;
    }
    let focused = "return document.activeElement.ariaLabel";
    assert_eq!(browser.script(focused).await, "Next version", "there is no previous one");
    let questions = json!(["What is the speckled goat called?", "Who owns the speckled goat?"]);
    assert_eq!(texts(&browser, ".question").await, questions);
    browser.press(ENTER).await;
    browser.press(ENTER).await;
    assert_eq!(browser.script(&format!("return {place}")).await, "3 of 3");
    assert_eq!(texts(&browser, ".question").await, json!(["How much does the violet tent cost?"]));
    nothing_went_wrong(&server, &browser).await;
}

/// Goal: a text file is sent before the question, in a fence that it cannot close, and shown as
/// text.
#[tokio::test]
#[ignore = "needs chromium and chromium-driver; .ci/deep runs it"]
async fn text_files_are_sent() {
    let (server, browser) = demo(&[]).await;
    browser.wait_for("document.querySelectorAll('#questions button').length").await;
    let spy = "const real = window.fetch; window.fetch = (path, options) => { \
               if (path === 'v1/chat/completions') window.sent = options.body; \
               return real(path, options) }";
    browser.script(spy).await;
    give(&browser, "drop", "text/plain", "'unwanted'").await;
    browser.wait_for("document.querySelector('.attachment')").await;
    browser.click(".attachment button").await;
    browser.wait_for("document.querySelector('#attached').hidden").await;
    give(&browser, "paste", "", "'```\\n<img src=x onerror=document.title=1>\\n'").await;
    browser.wait_for("document.querySelector('.attachment')").await;
    ask(&browser, "Who owns the speckled goat?", 1).await;
    let sent = browser.script("return JSON.parse(window.sent).messages.at(-1).content").await;
    let expected = "given:\n````\n```\n<img src=x onerror=document.title=1>\n````\n\n\
                    Who owns the speckled goat?";
    assert_eq!(sent, expected);
    assert_eq!(texts(&browser, ".attachment").await, json!([]), "it is sent once");
    browser.open(&server.url("/")).await;
    answers(&browser, 1).await;
    browser.click(".file summary").await;
    let shown = json!(["```\n<img src=x onerror=document.title=1>\n"]);
    assert_eq!(texts(&browser, ".file pre").await, shown);
    assert_eq!(texts(&browser, "main img").await, json!([]));
    nothing_went_wrong(&server, &browser).await;
}

/// Goal: an answer says which message was changed if that made the server compute again, and says
/// nothing of that if the question is just new.
#[tokio::test]
#[ignore = "needs chromium and chromium-driver; .ci/deep runs it"]
async fn misses_are_explained() {
    let (server, browser) = demo(&[]).await;
    browser.wait_for("document.querySelectorAll('#questions button').length").await;
    for number in 1..=2 {
        ask(&browser, "Who owns the speckled goat?", number).await;
        assert_eq!(texts(&browser, ".why").await, json!([]));
    }
    browser.click("#system-box summary").await;
    browser.type_into("#system", " Be brief.").await;
    browser.click("#system-box summary").await;
    ask(&browser, "Who owns the speckled goat?", 3).await;
    browser.click(".why summary").await;
    let why = texts(&browser, ".why").await;
    let why = why[0].as_str().expect("a text");
    for part in ["tokens computed again: a message differs", "It is the system prompt “Welcome to"]
    {
        assert!(why.contains(part), "{why}");
    }
    nothing_went_wrong(&server, &browser).await;
}

/// Goal: of several models one is chosen, and the page remembers which.
#[tokio::test]
#[ignore = "needs chromium and chromium-driver; .ci/deep runs it"]
async fn a_model_is_chosen() {
    let (server, browser) =
        demo(&["--served-model-name", "first", "--served-model-name", "<second>"]).await;
    browser.wait_for("!document.querySelector('#model-choice').hidden").await;
    browser.type_into("#model-choice", "<second>").await;
    ask(&browser, "Hello", 1).await;
    let facts = texts(&browser, ".answer-facts").await;
    assert!(facts[0].as_str().is_some_and(|facts| facts.ends_with("by <second>")), "{facts}");
    browser.open(&server.url("/")).await;
    browser.wait_for("document.querySelector('#model-choice').value === '<second>'").await;
    assert_eq!(browser.script("return document.title").await, "<second> · Stolon");
    nothing_went_wrong(&server, &browser).await;
}

/// Goal: browsers offer to install the page.
#[tokio::test]
#[ignore = "needs chromium and chromium-driver; .ci/deep runs it"]
async fn the_page_can_be_installed() {
    let (server, browser) = demo(&[]).await;
    let manifest = browser.devtools("Page.getAppManifest", json!({})).await;
    let manifest: Value = serde_json::from_str(manifest["data"].as_str().expect("a text"))
        .unwrap_or_else(|error| panic!("{error}: {manifest}"));
    assert_eq!(manifest["name"], "Stolon");
    let errors = browser.devtools("Page.getInstallabilityErrors", json!({})).await;
    assert_eq!(errors["installabilityErrors"], json!([]));
    nothing_went_wrong(&server, &browser).await;
}
