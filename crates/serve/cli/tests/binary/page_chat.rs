//! The chat of the page at `/` in a real browser. It has the requirements of `page.rs`.

use serde_json::{Value, json};

use crate::browser::{Browser, ENTER, ESCAPE};
use crate::page::{answers, demo, nothing_went_wrong};
use crate::support::{Server, TINY};

/// The texts of all elements that a selector finds.
pub(crate) async fn texts(browser: &Browser, selector: &str) -> Value {
    let all = format!("[...document.querySelectorAll('{selector}')]");
    browser.script(&format!("return {all}.map((element) => element.textContent)")).await
}

/// The names of the chats that the browser keeps.
async fn kept_chats(browser: &Browser) -> Value {
    let script = "return Object.keys(localStorage).filter((key) => key.startsWith('stolon-chat/'))\
                  .map((key) => JSON.parse(localStorage.getItem(key)).name).sort()";
    browser.script(script).await
}

/// Keeps a chat with one turn, as an earlier visit would have.
pub(crate) async fn keep_chat(browser: &Browser, answer: &str) {
    let chat = json!({
        "id": "earlier", "name": "Earlier", "system": "", "changed": 1,
        "turns": [{"question": "An earlier question", "answer": answer}],
    });
    let script = format!(
        "localStorage.setItem('stolon-chat/earlier', {}); \
         sessionStorage.setItem('stolon-current', 'earlier')",
        json!(chat.to_string())
    );
    browser.script(&script).await;
}

/// Goal: a chat is there again after a reload and in another tab, can be changed, asked again,
/// exported and deleted.
#[tokio::test]
#[ignore = "needs chromium and chromium-driver; .ci/deep runs it"]
async fn a_chat_is_kept_and_can_be_changed() {
    let (server, browser) = demo(&[]).await;
    browser.wait_for("document.querySelectorAll('#questions button').length").await;
    browser.click("#questions button").await;
    answers(&browser, 1).await;
    browser.type_into("#question", "What is the speckled goat called?").await;
    browser.press(ENTER).await;
    answers(&browser, 2).await;
    let shown = texts(&browser, ".question, .answer .words").await;
    browser.open(&server.url("/")).await;
    answers(&browser, 2).await;
    assert_eq!(texts(&browser, ".question, .answer .words").await, shown);
    assert_eq!(shown[1], "The violet tent costs 45 crowns.");
    assert_eq!(kept_chats(&browser).await, json!(["How much does the violet tent cost?"]));

    // The answer is the same when it is computed again, and the figures are new.
    browser.click(".turn:last-child .answer button:last-child").await;
    answers(&browser, 2).await;
    assert_eq!(texts(&browser, ".question, .answer .words").await, shown);

    // Changing the first question keeps what came after it as another version.
    browser.click(".turn:first-child .question-box button:nth-child(2)").await;
    browser.press(ESCAPE).await;
    browser.click(".turn:first-child .question-box button:nth-child(2)").await;
    browser.script("document.activeElement.value = ''").await;
    browser.press("Who owns the speckled goat?").await;
    browser.press(ENTER).await;
    answers(&browser, 1).await;
    let changed = json!(["Who owns the speckled goat?", "The speckled goat belongs to Ottilie."]);
    assert_eq!(texts(&browser, ".question, .answer .words").await, changed);
    // Instead of a file, which the test could not find.
    let catch = "HTMLAnchorElement.prototype.click = () => {}; \
                 URL.createObjectURL = (blob) => { window.exported = blob; return '#' }";
    browser.script(catch).await;
    browser.click("#menu summary").await;
    browser.click("#export").await;
    let exported = browser.wait_for("window.exported.text()").await;
    let exported = exported.as_str().expect("text");
    assert!(exported.ends_with(
        "## You\n\nWho owns the speckled goat?\n\n## Answer\n\nThe speckled goat belongs to Ottilie.\n"
    ), "{exported}");

    // Deleting it leads back to the other version; that of the second turn has two, too.
    let delete = ".turn:last-child .question-box button:nth-child(3)";
    browser.click(delete).await;
    assert_eq!(texts(&browser, ".question, .answer .words").await, shown);
    browser.click(delete).await;
    assert_eq!(texts(&browser, ".question, .answer .words").await, shown);
    browser.click(delete).await;
    browser.click(delete).await;
    assert_eq!(texts(&browser, ".turn").await, json!([]));
    assert_eq!(kept_chats(&browser).await, json!([]));
    nothing_went_wrong(&server, &browser).await;
}

/// Goal: deleting a chat asks first, and forgets that chat alone.
#[tokio::test]
#[ignore = "needs chromium and chromium-driver; .ci/deep runs it"]
async fn a_chat_is_deleted() {
    let (server, browser) = demo(&[]).await;
    keep_chat(&browser, "An earlier answer").await;
    browser.open(&server.url("/")).await;
    browser.click("#new-chat").await;
    browser.wait_for("document.querySelectorAll('#questions button').length").await;
    browser.type_into("#question", "Who owns the speckled goat?").await;
    browser.press(ENTER).await;
    answers(&browser, 1).await;
    browser.wait_for("document.querySelector('#chat-count').innerText === '2'").await;
    assert_eq!(kept_chats(&browser).await, json!(["Earlier", "Who owns the speckled goat?"]));
    browser.click("#menu summary").await;
    browser.click("#delete").await;
    browser.accept().await;
    let shown = "[...document.querySelectorAll('.question')].map((one) => one.innerText).join()";
    browser.wait_for(&format!("{shown} === 'An earlier question'")).await;
    assert_eq!(kept_chats(&browser).await, json!(["Earlier"]));
    nothing_went_wrong(&server, &browser).await;
}

/// Goal: formulas become MathML. Amounts of money, code, and what the library of formulas refuses
/// stay as they are written, and a formula has neither links nor pictures.
#[tokio::test]
#[ignore = "needs chromium and chromium-driver; .ci/deep runs it"]
async fn formulas_are_shown() {
    let (server, browser) = demo(&[]).await;
    let answer = "The area is $\\pi r^2$ and \\(a \\lt b\\), for $5 or $6, not `$x$`.\n\n\
                  $$\n\\frac{a}{b}\n+ c\n$$\n\n\
                  So:\n\\[ x = 1 \\]\nDone.\n\n\
                  $\\href{javascript:document.title=1}{y}$ $\\includegraphics{https://example.org/}$\n\n\
                  $\\frac{1}{$ and $\\def\\a{\\a\\a}\\a$.";
    keep_chat(&browser, answer).await;
    browser.open(&server.url("/")).await;
    browser.wait_for("document.querySelector('.words math')").await;
    for (selector, expected) in [
        (".words math msup", json!(["r2"])),
        (".words math mo.tml-prime, .words math a, .words math img, .words math mglyph", json!([])),
        (".words .displayed mfrac", json!(["ab"])),
        (".words code", json!(["$x$"])),
    ] {
        assert_eq!(texts(&browser, selector).await, expected, "{selector}");
    }
    let displayed = "return document.querySelectorAll('.words math[display=block]').length";
    assert_eq!(browser.script(displayed).await, 2);
    let links = "return document.querySelectorAll('.words [href], .words [src]').length";
    assert_eq!(browser.script(links).await, 0);
    let text = texts(&browser, ".words").await[0].to_string();
    for part in ["for $5 or $6", "$\\\\frac{1}{$", "$\\\\def\\\\a{"] {
        assert!(text.contains(part), "{text}");
    }
    nothing_went_wrong(&server, &browser).await;
}

/// Goal: Markdown becomes elements, and everything else in an answer is shown as text: no HTML, no
/// image, no script behind a link.
#[tokio::test]
#[ignore = "needs chromium and chromium-driver; .ci/deep runs it"]
async fn answers_are_markdown() {
    let (server, browser) = demo(&[]).await;
    let answer = "# Runners\n\nA **stolon** is a *runner* with `a < b` & [docs](https://example.org/) \
                  or [bad](javascript:document.title=1).\n\n1. one\n   - nested\n2. two\n\n\
                  ```rust\nfn main() {}\n```\n\n| a | b |\n|---|--:|\n| c | d |\n\n\
                  <img src=x onerror=document.title=1>\n\n<script>document.title=1</script>\n\n\
                  ![picture](https://example.org/x.png) <b>bold</b>";
    keep_chat(&browser, answer).await;
    browser.open(&server.url("/")).await;
    browser.wait_for("document.querySelector('.words pre')").await;
    for (selector, expected) in [
        (".words h3", json!(["Runners"])),
        (".words strong", json!(["stolon"])),
        (".words em", json!(["runner"])),
        (".words p > code", json!(["a < b"])),
        (".words ol > li > ul > li", json!(["nested"])),
        (".words pre code", json!(["fn main() {}"])),
        (".words pre code span", json!(["fn"])),
        (".words tbody td", json!(["c", "d"])),
        (".words a", json!(["docs", "picture"])),
        (".words img, .words b, .words script, .words [onerror]", json!([])),
    ] {
        assert_eq!(texts(&browser, selector).await, expected, "{selector}");
    }
    let links =
        "return [...document.querySelectorAll('.words a')].map((link) => link.href + link.rel)";
    let expected = json!([
        "https://example.org/noopener noreferrer nofollow",
        "https://example.org/x.pngnoopener noreferrer nofollow",
    ]);
    assert_eq!(browser.script(links).await, expected);
    let text = texts(&browser, ".words").await[0].to_string();
    for part in ["<img src=x onerror=document.title=1>", "<script>document.title=1</script>"] {
        assert!(text.contains(part), "{text}");
    }
    nothing_went_wrong(&server, &browser).await;
}

/// Goal: an answer that grows does not move the text that the user reads; at the end the page
/// follows it. Stop ends it, and the part that has arrived is kept.
#[tokio::test]
#[ignore = "needs chromium and chromium-driver; .ci/deep runs it"]
async fn reading_is_not_disturbed() {
    let template = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(&template, "{% for m in messages %}{{ m.content }}\n{% endfor %}")
        .expect("written");
    let template = template.path().to_str().expect("UTF-8");
    let server = Server::start(TINY, &["--chat-template", template]);
    let browser = Browser::start().await;
    browser.open(&server.url("/")).await;
    keep_chat(&browser, &"A long paragraph.\n\n".repeat(60)).await;
    browser.open(&server.url("/")).await;
    browser.wait_for("document.querySelector('#model').innerText").await;
    // The most likely tokens of this model are not text.
    browser.script("document.querySelector('[name=temperature]').value = 2").await;
    browser.type_into("#question", "Go on").await;
    browser.press(ENTER).await;
    let length = "document.querySelector('.turn:last-child .words').textContent.length";
    let is_at_end = "(() => { const box = document.querySelector('#messages'); \
                     return box.scrollHeight - box.scrollTop - box.clientHeight < 60 })()";
    browser.wait_for(&format!("{length} > 100 && {is_at_end}")).await;
    // More of the answer may be shown before the event of the scrolling comes. Here it never comes.
    let scroll = "window.addEventListener('scroll', (event) => event.stopImmediatePropagation(), \
                                          { capture: true, once: true }); \
                  document.querySelector('#messages').scrollTop = 200";
    browser.script(scroll).await;
    browser.wait_for("!document.querySelector('#to-end').hidden").await;
    // The model is fast: meanwhile it must not come to its end.
    server.suspend();
    let before = browser.script(&format!("return {length}")).await.as_u64().expect("a count");
    server.resume();
    browser.wait_for(&format!("{length} > {}", before + 100)).await;
    server.suspend();
    let top = browser.script("return document.querySelector('#messages').scrollTop").await;
    assert_eq!(top, 200);
    browser.click("#to-end").await;
    browser.wait_for(is_at_end).await;
    browser.click("#stop").await;
    server.resume();
    browser.wait_for("document.querySelector('.turn:last-child .answer-facts')").await;
    let facts = texts(&browser, ".turn:last-child .answer-facts").await;
    assert!(facts[0].as_str().is_some_and(|facts| facts.ends_with("stopped")), "{facts}");
    let kept = browser.script(&format!("return {length}")).await;
    browser.open(&server.url("/")).await;
    browser.wait_for(&format!("{length} === {kept}")).await;
    nothing_went_wrong(&server, &browser).await;
}

/// Goal: when the server has gone, the page says so and marks its figures as old; when it is back,
/// the marks go.
#[tokio::test]
#[ignore = "needs chromium and chromium-driver; .ci/deep runs it"]
async fn a_server_that_has_gone_is_noticed() {
    let (server, browser) = demo(&[]).await;
    browser.wait_for("document.querySelector('figure polyline')").await;
    let marks = "[...document.querySelectorAll('.as-of')].filter((mark) => !mark.hidden).length";
    assert_eq!(browser.script(&format!("return {marks}")).await, 0);
    server.suspend();
    let gone = "document.querySelector('#gone').innerText.includes('has not answered since')";
    browser.wait_for(gone).await;
    assert_eq!(browser.script(&format!("return {marks}")).await, 5);
    server.resume();
    browser.wait_for("document.querySelector('#gone').hidden").await;
    assert_eq!(browser.script(&format!("return {marks}")).await, 0);
    browser.wait_for("document.querySelectorAll('#questions button').length").await;
    browser.click("#questions button").await;
    answers(&browser, 1).await;
}

/// Goal: a wrong key is called wrong, in the chat and for the tree, and an answer that could not be
/// had is asked for again with one click.
#[tokio::test]
#[ignore = "needs chromium and chromium-driver; .ci/deep runs it"]
async fn a_wrong_key_is_called_wrong() {
    let (_server, browser) = demo(&["--api-key", "client", "--admin-key", "sesame"]).await;
    let enter = async |api: &str, admin: &str| {
        browser.click("#open-keys").await;
        browser
            .script(
                "for (const id of ['api-key', 'admin-key']) \
                        document.getElementById(id).value = ''",
            )
            .await;
        browser.type_into("#api-key", api).await;
        browser.type_into("#admin-key", admin).await;
        browser.press(ENTER).await;
    };
    enter("klient", "semase").await;
    let about = |id: &str, text: &str| {
        format!("document.querySelector('#{id}').innerText.includes('{text}')")
    };
    browser.wait_for(&about("connection", "does not know this API key")).await;
    browser.wait_for(&about("locked-text", "does not know this administrator")).await;
    browser.type_into("#question", "Who owns the speckled goat?").await;
    browser.press(ENTER).await;
    browser.wait_for(&about("messages", "does not know this API key")).await;
    enter("client", "sesame").await;
    browser.wait_for("document.querySelector('#connection').innerText === ''").await;
    browser.click(".turn:last-child .answer button:last-child").await;
    browser.wait_for("document.querySelector('.turn .words').innerText").await;
}

/// Goal: where nothing may be pinned, the page says with which option it could be.
#[tokio::test]
#[ignore = "needs chromium and chromium-driver; .ci/deep runs it"]
async fn a_refused_pin_names_the_option() {
    let server = Server::start(TINY, &["--pin-budget", "0"]);
    let prompt: Vec<u32> = (32..96).collect();
    server.ok("/v1/cache/warm", json!({"prompt": prompt})).await;
    let browser = Browser::start().await;
    browser.open(&server.url("/")).await;
    browser.wait_for("document.querySelector('#tree [role=treeitem]')").await;
    browser.click("#tree [role=treeitem]").await;
    browser.click("#pin").await;
    let error = browser.wait_for("document.querySelector('#action-error').innerText").await;
    let stats = server.get("/v1/cache/stats").await.1;
    let needed = format!("--pin-budget {} or more", stats["cache"]["blocks"]);
    assert!(error.as_str().is_some_and(|error| error.contains(&needed)), "{error} {needed}");
}
