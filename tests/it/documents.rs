//! The documents agree with the repository: links resolve, paths exist, and lists are complete. The
//! tests read the files of a checkout; in a published crate, which has no neighbors, they pass
//! without checking anything.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// Folders of the checkout that paths in the documents begin with.
const FOLDERS: [&str; 10] = [
    ".ci/",
    "actors/",
    "benches/",
    "crates/",
    "deploy/",
    "docs/",
    "examples/",
    "loom_tests/",
    "src/",
    "tests/",
];

/// The root of the checkout, or `None` in a published crate.
fn checkout() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    root.join("docs/book.toml").exists().then(|| root.to_owned())
}

/// All Markdown files below `folder`, without the files of build outputs and of other people's
/// packages.
fn documents(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a readable folder") {
        let path = entry.expect("a readable folder").path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.is_dir() {
            if !["target", "node_modules", "venv", ".git"].contains(&name) {
                found.extend(documents(&path));
            }
        } else if name.ends_with(".md") {
            found.push(path);
        }
    }
    found
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).expect("a readable file")
}

/// The text without the lines of code blocks, in which brackets and backticks are not Markdown.
fn prose(text: &str) -> String {
    let mut is_code = false;
    let is_prose = |line: &&str| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence
    };
    text.lines().filter(is_prose).collect::<Vec<_>>().join("\n")
}

/// The targets of all links and images, in Markdown and in HTML.
fn targets(text: &str) -> Vec<&str> {
    let mut targets = Vec::new();
    for (begin, end) in [("](", ')'), ("src=\"", '"'), ("srcset=\"", '"'), ("href=\"", '"')] {
        let ends = text.split(begin).skip(1).filter_map(|rest| rest.split_once(end));
        targets.extend(ends.map(|(target, _)| target.trim()));
    }
    targets
}

/// The anchors of the headings of a document, as GitHub and mdBook make them.
fn anchors(text: &str) -> HashSet<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    let anchor = |heading: &str| {
        let kept = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = kept.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
        kept.collect::<String>().replace(' ', "-")
    };
    headings.map(anchor).collect()
}

/// The reason why the link does not resolve; `None` if it does. Links to other sites are not
/// followed.
fn broken(document: &Path, link: &str) -> Option<String> {
    if link.contains(':') {
        return None;
    }
    let folder = document.parent().expect("a folder");
    let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
    let target = if path.is_empty() { document.to_owned() } else { folder.join(path) };
    if !target.exists() {
        return Some(format!("no file {}", target.display()));
    }
    let has_anchor = anchor.is_empty()
        || target.extension().is_none_or(|extension| extension != "md")
        || anchors(&prose(&read(&target))).contains(anchor);
    (!has_anchor).then(|| format!("no heading #{anchor} in {}", target.display()))
}

/// Goal: relative links of all documents lead to files and headings that exist.
#[test]
fn links_resolve() {
    let Some(root) = checkout() else { return };
    let mut wrong = Vec::new();
    for document in documents(&root) {
        let text = prose(&read(&document));
        for link in targets(&text) {
            if let Some(reason) = broken(&document, link) {
                wrong.push(format!("{}: {link}: {reason}", document.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Goal: the check of links notices a missing file and a missing heading, in the book and outside it.
#[test]
fn broken_links_are_noticed() {
    let Some(root) = checkout() else { return };
    let page = root.join("docs/src/index.md");
    for link in ["missing.md", "install.md#missing", "#missing", "../../missing.md"] {
        assert!(broken(&page, link).is_some(), "{link}");
    }
    for link in ["install.md", "install.md#features-of-the-command", "https://example.org/x.md"] {
        assert_eq!(broken(&page, link), None, "{link}");
    }
    assert_eq!(targets("[a](b.md) ![c](d.png) <img src=\"e.png\">"), ["b.md", "d.png", "e.png"]);
    assert_eq!(prose("a\n```sh\n[x](y)\n```\nb"), "a\nb");
}

/// Goal: a path that a document names in full exists.
#[test]
fn paths_exist() {
    let Some(root) = checkout() else { return };
    let mut wrong = Vec::new();
    for document in documents(&root) {
        // Diaries name files of their time, which may not exist any longer.
        if document.starts_with(root.join("benches/history")) {
            continue;
        }
        let text = prose(&read(&document));
        let quoted = text.split('`').skip(1).step_by(2);
        for path in quoted.filter(|path| FOLDERS.iter().any(|folder| path.starts_with(folder))) {
            let is_path = !path.contains(char::is_whitespace) && !path.contains(['*', '$', '<']);
            // Documents of a crate also name paths in that crate.
            let parent = document.parent().expect("a folder");
            if is_path && !root.join(path).exists() && !parent.join(path).exists() {
                wrong.push(format!("{}: {path}", document.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Goal: the book's table of contents lists every page, so that each page is built and can be
/// reached.
#[test]
fn the_book_has_every_page() {
    let Some(root) = checkout() else { return };
    let book = root.join("docs/src");
    let summary = read(&book.join("SUMMARY.md"));
    let listed: HashSet<PathBuf> =
        targets(&summary).into_iter().map(|page| book.join(page)).collect();
    let pages = documents(&book).into_iter().filter(|page| !page.ends_with("SUMMARY.md"));
    let missing: Vec<PathBuf> = pages.filter(|page| !listed.contains(page)).collect();
    assert!(missing.is_empty(), "not in SUMMARY.md: {missing:?}");
}

/// Goal: every invariant of ARCHITECTURE.md names the file that enforces it, or a step of
/// `.ci/deep`.
#[test]
fn every_invariant_names_its_test() {
    let Some(root) = checkout() else { return };
    let text = read(&root.join("ARCHITECTURE.md"));
    let invariants: Vec<&str> = text.split("**Invariant**: ").skip(1).collect();
    assert!(invariants.len() > 50, "ARCHITECTURE.md has invariants");
    for invariant in invariants {
        let invariant = invariant.split("\n\n").next().expect("a paragraph");
        let names_one = invariant.split('`').skip(1).step_by(2).any(|name| {
            name.starts_with(".ci/deep ") || name.ends_with(".rs") && root.join(name).is_file()
        });
        assert!(names_one, "no test is named: {invariant}");
    }
}

/// Goal: the table of deep checks in CONTRIBUTING.md has exactly the steps that `.ci/deep` has.
#[test]
fn contributing_lists_the_deep_checks() {
    let Some(root) = checkout() else { return };
    let script = read(&root.join(".ci/deep"));
    let is_name =
        |name: &str| name.chars().all(|c| c.is_ascii_lowercase() || "_0123456789".contains(c));
    let steps = script.lines().filter_map(|line| line.split_once("() { # "));
    let steps: HashSet<&str> = steps.map(|(name, _)| name).filter(|name| is_name(name)).collect();
    let text = read(&root.join("CONTRIBUTING.md"));
    let (_, section) = text.split_once("### Deep checks").expect("the section");
    let (section, _) = section.split_once("\n##").expect("the next section");
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `"));
    let cells = rows.filter_map(|row| row.split_once(" |"));
    let listed = cells.flat_map(|(cell, _)| cell.split('`').step_by(2));
    let listed: HashSet<&str> = listed.filter(|name| !name.is_empty()).collect();
    assert_eq!(listed, steps, "the table lists the steps of .ci/deep");
}
