//! The page at `/` in a real browser. These tests need Debian's packages `chromium` and
//! `chromium-driver`, which `.ci/run` installs; without them they fail.

use serde_json::{Value, json};

use crate::browser::{Browser, DOWN, ENTER, ESCAPE, RIGHT, TAB};
use crate::support::{Server, TINY};

/// A server with the demo model, and its page.
pub(crate) async fn demo(args: &[&str]) -> (Server, Browser) {
    let server =
        Server::start("demo", &[&["--num-blocks", "1024", "--pin-budget", "320"], args].concat());
    let browser = Browser::start().await;
    browser.open(&server.url("/")).await;
    (server, browser)
}

/// Nothing went wrong in the browser, and it has loaded nothing from elsewhere.
pub(crate) async fn nothing_went_wrong(server: &Server, browser: &Browser) {
    let loaded = browser
        .script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
        .await;
    for url in loaded.as_array().expect("a list") {
        assert!(url.as_str().is_some_and(|url| url.starts_with(&server.url("/"))), "{url}");
    }
    assert_eq!(browser.log().await, json!([]));
}

/// Waits until this many answers are complete.
pub(crate) async fn answers(browser: &Browser, count: usize) {
    let complete = "document.querySelectorAll('#messages .answer-facts').length";
    browser.wait_for(&format!("{complete} === {count}")).await;
}

/// The number of prompt tokens that the server has found in its cache.
async fn cached_tokens(server: &Server) -> u64 {
    let (_, stats) = server.get("/v1/cache/stats").await;
    stats["stats"]["cached_tokens"].as_u64().expect("a count")
}

async fn pins(server: &Server) -> Value {
    server.get("/v1/cache/pins").await.1["pins"].clone()
}

/// Nodes of the tree that the picture shows.
const NODES: &str = "document.querySelectorAll('#tree [role=treeitem]').length";

/// Goal: somebody who has never seen the page asks about the handbook, sees the tree grow, asks
/// again and sees that the handbook was cached; an operator pins, evicts and warms from the
/// picture.
#[tokio::test]
#[ignore = "needs chromium and chromium-driver; .ci/deep runs it"]
async fn a_newcomer_sees_the_cache_at_work() {
    let (server, browser) = demo(&[]).await;
    browser.wait_for("document.querySelectorAll('#questions button').length").await;
    assert_eq!(browser.script(&format!("return {NODES}")).await, 0);
    browser.click("#questions button").await;
    answers(&browser, 1).await;
    let answer = browser.script("return document.querySelector('.answer .words').innerText").await;
    assert_eq!(answer, "The violet tent costs 45 crowns.");
    browser.wait_for(&format!("{NODES} === 1")).await;
    assert_eq!(cached_tokens(&server).await, 0);
    assert_eq!(browser.script("return document.querySelector('.bar .cached')").await, Value::Null);

    // The next question has a chat of its own, and so branches off.
    browser.click("#questions button").await;
    browser.wait_for("document.querySelector('#chat-count').innerText === '2'").await;
    answers(&browser, 1).await;
    let bar = "document.querySelector('.turn:last-child .bar')";
    let cached = browser.script(&format!("return {bar}.querySelector('.cached').title")).await;
    let cached = cached.as_str().and_then(|text| text.strip_suffix(" tokens from the cache"));
    let cached: u64 = cached.expect("tokens").replace(',', "").parse().expect("a number");
    assert_eq!(cached, cached_tokens(&server).await);
    assert!(cached > 1000, "{cached}");

    browser.wait_for(&format!("{NODES} === 3")).await;
    let shared = "document.querySelector('#tree .numbers').innerText.endsWith('shared by 2')";
    browser.wait_for(shared).await;

    let first = "#tree [role=treeitem]";
    browser.click(first).await;
    browser.wait_for("document.querySelector('#text').innerText.includes('harbour')").await;
    browser.click("#pin").await;
    browser.wait_for("document.querySelector('#tree .pinned')").await;
    let pinned = pins(&server).await;
    let text = pinned[0]["reason"].as_str();
    assert_eq!((pinned.as_array().map(Vec::len), text), (Some(1), Some("pinned on the page")));
    browser.click("#evict").await;
    let refused = "document.querySelector('#action-error').innerText";
    browser.wait_for(&format!("!{NODES} || {NODES} < 3 || {refused}")).await;
    browser.wait_for(&format!("{NODES} >= 1")).await;
    browser.click(first).await;
    browser.wait_for("document.querySelector('#pin').innerText === 'Unpin'").await;
    browser.click("#pin").await;
    browser.wait_for("!document.querySelector('#tree .pinned')").await;
    assert_eq!(pins(&server).await, json!([]));

    browser.click("#evict").await;
    browser.wait_for(&format!("{NODES} === 0")).await;
    browser.click("#warm").await;
    browser.wait_for(&format!("{NODES} === 1")).await;
    browser.click("#flush").await;
    browser.accept().await;
    browser.wait_for(&format!("{NODES} === 0")).await;
    nothing_went_wrong(&server, &browser).await;
}

/// Goal: a system prompt that is warmed ahead is in the picture before anything is asked, and the
/// first answer finds it; warming it again computes next to nothing.
#[tokio::test]
#[ignore = "needs chromium and chromium-driver; .ci/deep runs it"]
async fn a_system_prompt_is_warmed_ahead() {
    let (server, browser) = demo(&["--api-key", "client", "--tenant-by", "key"]).await;
    browser.click("#open-keys").await;
    browser.type_into("#api-key", "client").await;
    browser.press(ENTER).await;
    browser.wait_for("document.querySelectorAll('#questions button').length").await;
    // The browser has logged that the server refused requests without the key.
    browser.log().await;
    browser.click("#system-box summary").await;
    browser.click("#warm-system").await;
    let warmed = "document.querySelector('#warmed').innerText";
    browser.wait_for(&format!("{warmed}.startsWith('Computed')")).await;
    browser.wait_for(&format!("{NODES} === 1")).await;
    let (_, cache) = server.get("/v1/cache/stats").await;
    let blocks = cache["cache"]["blocks"].as_u64().expect("a count");
    assert_eq!(cached_tokens(&server).await, 0);

    browser.click("#questions button").await;
    answers(&browser, 1).await;
    let cached = cached_tokens(&server).await;
    assert!(cached > 1000 && cached <= blocks * 16, "{cached} of {blocks} blocks");
    browser.click("#warm-system").await;
    browser.wait_for(&format!("{warmed}.includes('were cached')")).await;
    browser.click("#new-chat").await;
    browser.script("document.querySelector('#system').value = ''").await;
    browser.type_into("#system", " ").await;
    browser.wait_for(&format!("{warmed} === ''")).await;
    nothing_went_wrong(&server, &browser).await;
}

/// Goal: all of that is possible with the keyboard alone.
#[tokio::test]
#[ignore = "needs chromium and chromium-driver; .ci/deep runs it"]
async fn the_keyboard_is_enough() {
    let (server, browser) = demo(&[]).await;
    browser.wait_for("document.querySelectorAll('#questions button').length").await;
    browser.wait_for("document.activeElement.id === 'question'").await;
    browser.press("How many steps does the iron lighthouse have?").await;
    browser.press(ENTER).await;
    answers(&browser, 1).await;
    tab_to(&browser, "#new-chat").await;
    browser.press(ENTER).await;
    browser.press("Who owns the speckled goat?").await;
    browser.press(ENTER).await;
    answers(&browser, 1).await;
    browser.wait_for(&format!("{NODES} === 3")).await;
    tab_to(&browser, "[role=treeitem]").await;
    let selected = "document.activeElement.ariaLabel";
    let level = "Number(document.activeElement.ariaLevel)";
    assert_eq!(browser.script(&format!("return {level}")).await, 1);
    browser.press("p").await;
    browser.wait_for(&format!("{selected}.includes('pinned')")).await;
    assert_eq!(pins(&server).await.as_array().map(Vec::len), Some(1));
    browser.press("p").await;
    browser.wait_for(&format!("{selected}.includes(', cached')")).await;
    assert_eq!(pins(&server).await, json!([]));
    browser.press(RIGHT).await;
    assert_eq!(browser.script(&format!("return {level}")).await, 2);
    let upper = browser.script(&format!("return {selected}")).await;
    browser.press(DOWN).await;
    assert_ne!(browser.script(&format!("return {selected}")).await, upper);
    browser.press(ENTER).await;
    browser.wait_for(&format!("{NODES} === 1")).await;
    browser.press(ESCAPE).await;
    browser.wait_for(&format!("{NODES} === 3")).await;
    browser.press("e").await;
    // The two nodes that are left have no branch between them and become one.
    browser.wait_for(&format!("{NODES} < 3")).await;
    browser.wait_for("document.querySelector('#announcer').innerText.startsWith('Evicted')").await;
    nothing_went_wrong(&server, &browser).await;
}

/// Presses Tab until an element that matches the selector has the focus.
async fn tab_to(browser: &Browser, selector: &str) {
    for _ in 0..60 {
        browser.press(TAB).await;
        if browser.script(&format!("return document.activeElement.matches('{selector}')")).await
            == true
        {
            return;
        }
    }
    panic!("Tab does not lead to {selector}");
}

/// Goal: without the keys the page says which key it needs and shows nothing of prompts; with them
/// it works, also after a reload, until they are forgotten.
#[tokio::test]
#[ignore = "needs chromium and chromium-driver; .ci/deep runs it"]
async fn keys_are_asked_for() {
    let (server, browser) = demo(&["--api-key", "client", "--admin-key", "sesame"]).await;
    let client = reqwest::Client::new();
    let body = json!({"prompt": "a secret plan ".repeat(20), "max_tokens": 1});
    let request = client.post(server.url("/v1/completions")).bearer_auth("client").json(&body);
    assert_eq!(request.send().await.expect("a response").status(), 200);
    let whole = "document.documentElement.outerHTML";
    browser.wait_for("document.querySelector('#locked-text').innerText.includes('key')").await;
    browser.wait_for("document.querySelector('#connection').innerText.includes('API key')").await;
    assert_eq!(browser.script(&format!("return {whole}.includes('secret plan')")).await, false);
    browser.click("#unlock").await;
    browser.type_into("#api-key", "client").await;
    browser.type_into("#admin-key", "sesame").await;
    browser.press(ENTER).await;
    browser.wait_for(&format!("{NODES} === 1")).await;
    browser.wait_for(&format!("{whole}.includes('secret plan')")).await;
    browser.wait_for("document.querySelector('#model').innerText === 'stolon-demo'").await;
    assert_eq!(browser.script(&format!("return {whole}.includes('sesame')")).await, false);
    browser.open(&server.url("/")).await;
    browser.wait_for(&format!("{NODES} === 1")).await;
    browser.click("#open-keys").await;
    browser.click("#keys [value=forget]").await;
    browser.wait_for(&format!("{NODES} === 0")).await;
    let stored = browser.script("return Object.values(sessionStorage).join()").await;
    assert!(!stored.as_str().expect("text").contains("sesame"), "{stored}");
}

/// Goal: text is shown as text, whatever it looks like, in the chat and in the picture.
#[tokio::test]
#[ignore = "needs chromium and chromium-driver; .ci/deep runs it"]
async fn text_is_never_markup() {
    let (server, browser) = demo(&[]).await;
    browser.wait_for("document.querySelectorAll('#questions button').length").await;
    let hostile =
        "<img src=x onerror=document.title=1><script>document.title=1</script> & <b>bold</b>";
    browser.type_into("#question", hostile).await;
    browser.press(ENTER).await;
    answers(&browser, 1).await;
    let asked = browser.script("return document.querySelector('.question').textContent").await;
    assert_eq!(asked, hostile);
    let prompt = json!({"prompt": hostile.repeat(4), "max_tokens": 1});
    server.complete(prompt).await;
    browser.wait_for(&format!("{NODES} === 2")).await;
    browser.click("#tree [role=treeitem]:nth-child(2)").await;
    browser.wait_for("document.querySelector('#text').textContent.includes('<img src=x')").await;
    browser.click("#as-table").await;
    browser.wait_for("document.querySelectorAll('#table tbody tr').length === 2").await;
    let made = "document.querySelectorAll('main img, main b, main script').length";
    assert_eq!(browser.script(&format!("return {made}")).await, 0);
    assert_eq!(browser.script("return document.title").await, "stolon-demo · Stolon");
    nothing_went_wrong(&server, &browser).await;
}

/// Goal: with thousands of prefixes the picture stays small, says how many it does not show, and
/// fits a phone.
#[tokio::test]
#[ignore = "needs chromium and chromium-driver; .ci/deep runs it"]
async fn thousands_of_prefixes_are_joined() {
    let server = Server::start(TINY, &["--num-blocks", "8192", "--max-queued", "4096"]);
    for round in 0..24 {
        let prompts: Vec<Vec<u32>> = (0..128u32)
            .map(|index| {
                let number = round * 128 + index;
                (0..16).map(|place| 32 + (number >> (place % 12)) % 64).collect()
            })
            .collect();
        server.ok("/v1/cache/warm", json!({"prompt": prompts})).await;
    }
    let browser = Browser::start().await;
    browser.resize(360, 740).await;
    browser.open(&server.url("/")).await;
    browser.click("#toggle-cache").await;
    browser.wait_for(&format!("{NODES} > 100")).await;
    let shown = browser.script(&format!("return {NODES}")).await.as_u64().expect("a count");
    let (_, outline) = server.get("/v1/cache/outline").await;
    let total = outline["total_nodes"].as_u64().expect("a count");
    assert!(total > 2000 && shown <= 501, "{shown} of {total}");
    let rest = browser.wait_for("document.querySelector('#tree .rest').ariaLabel").await;
    assert!(rest.as_str().is_some_and(|text| text.contains("smaller piece")), "{rest}");
    let lowest = "Math.min(...[...document.querySelectorAll('#tree .words')]\
                  .map((words) => words.getBoundingClientRect().height))";
    let lowest = browser.script(&format!("return {lowest}")).await.as_f64().expect("a number");
    assert!(lowest >= 15.0, "each row has a label: {lowest}");
    let width = browser.script("return document.documentElement.scrollWidth").await;
    assert!(width.as_u64() <= Some(360), "nothing is wider than the screen: {width}");
    nothing_went_wrong(&server, &browser).await;
}

/// Goal: the reference page has its styles, which its policy allows by their hash, and no other.
#[tokio::test]
#[ignore = "needs chromium and chromium-driver; .ci/deep runs it"]
async fn the_reference_page_allows_only_its_own_styles() {
    let server = Server::start(TINY, &[]);
    let browser = Browser::start().await;
    browser.open(&server.url("/docs")).await;
    let width = "return getComputedStyle(document.body).maxWidth";
    assert_eq!(browser.script(width).await, "960px");
    assert_eq!(browser.log().await, json!([]));
    let other = "const style = document.createElement('style'); \
                 style.textContent = 'body { max-width: 1px }'; document.head.append(style);";
    browser.script(other).await;
    assert_eq!(browser.script(width).await, "960px");
}

/// Goal: the reference page can be searched: entries with all words are shown, and nothing else.
#[tokio::test]
#[ignore = "needs chromium and chromium-driver; .ci/deep runs it"]
async fn the_reference_page_can_be_searched() {
    let server = Server::start(TINY, &["--no-page"]);
    let browser = Browser::start().await;
    browser.open(&server.url("/docs")).await;
    let shown = "return [...document.querySelectorAll('details')]\
                 .filter((entry) => entry.checkVisibility()).map((entry) => entry.id)";
    browser.wait_for("document.querySelector('#search')").await;
    let all = browser.script(shown).await.as_array().map(Vec::len);
    browser.press("/").await;
    browser.press("prompt tokens").await;
    browser.wait_for("document.querySelector('[role=status]').innerText").await;
    let found = browser.script(shown).await;
    let found: Vec<&str> =
        found.as_array().expect("ids").iter().filter_map(Value::as_str).collect();
    assert!(!found.is_empty() && Some(found.len()) < all, "{found:?}");
    for id in &found {
        let text = format!("document.getElementById('{id}').textContent.toLowerCase()");
        let text = browser.script(&format!("return {text}")).await;
        let text = text.as_str().expect("text");
        assert!(text.contains("prompt") && text.contains("tokens"), "{id}");
    }
    browser.script("document.querySelector('#search').select()").await;
    browser.press("xylophone").await;
    browser.wait_for("document.querySelector('[role=status]').innerText.startsWith('0 of')").await;
    assert_eq!(browser.script(shown).await, json!([]));
    nothing_went_wrong(&server, &browser).await;
}

/// Goal: axe finds no accessibility problem, in light and dark, as a picture and as a table, on a
/// phone, and in the list of chats. `STOLON_AXE` names the file axe.min.js.
#[tokio::test]
#[ignore = "needs chromium, chromium-driver and axe-core; .ci/deep runs it"]
async fn axe_finds_nothing() {
    let path = std::env::var("STOLON_AXE").expect("STOLON_AXE names axe.min.js of axe-core");
    let axe = std::fs::read_to_string(path).expect("axe.min.js");
    let (server, browser) = demo(&[]).await;
    browser.wait_for("document.querySelectorAll('#questions button').length").await;
    for question in 1..=2 {
        browser.click("#questions button").await;
        browser
            .wait_for(&format!("document.querySelector('#chat-count').innerText === '{question}'"))
            .await;
        answers(&browser, 1).await;
    }
    // Another version of the answer.
    browser.click(".answer .actions button:last-child").await;
    browser.wait_for("document.querySelector('.answer .version')").await;
    browser.wait_for(&format!("{NODES} === 3")).await;
    browser.click("#tree [role=treeitem]").await;
    browser
        .script("document.querySelectorAll('details').forEach((box) => { box.open = true; })")
        .await;
    browser.script(&axe).await;
    for (dark, click, width) in [
        (false, None, 1360),
        (true, None, 1360),
        (true, Some("#as-table"), 1360),
        (false, None, 390),
        (true, Some("#toggle-cache"), 390),
        (true, Some("#toggle-cache"), 390),
        (true, Some("#open-chats"), 390),
    ] {
        browser.dark(dark).await;
        browser.resize(width, 900).await;
        if let Some(button) = click {
            browser.click(button).await;
        }
        // While a node appears, its colors are mixed with those behind it.
        browser.wait_for("document.getAnimations().every((a) => a.animationName === 'flow')").await;
        let found =
            browser.wait_for("axe.run().then((result) => JSON.stringify(result.violations))");
        assert_eq!(found.await, "[]", "dark: {dark}, after {click:?}, width: {width}");
    }
    nothing_went_wrong(&server, &browser).await;
}
