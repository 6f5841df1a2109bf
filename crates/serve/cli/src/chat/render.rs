//! Formats a model's text for a terminal: lines are wrapped between words, and bold text, headings
//! and code of Markdown have styles. The text arrives in pieces of any size.

use unicode_width::UnicodeWidthChar;

const BOLD: &str = "\x1b[1m";
const CODE: &str = "\x1b[36m";
const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";

/// Turns the pieces of one text into the output for the terminal.
#[derive(Debug)]
pub(super) struct Renderer {
    /// Columns of the terminal, at least 1.
    width: usize,
    /// Whether to use styles. Without them, the marks of Markdown are written as they are.
    is_styled: bool,
    /// Column at which the written text ends.
    column: usize,
    /// Number of spaces between the written text and the word. They are dropped at the end of a
    /// line.
    spaces: usize,
    /// Column at which a continuation of this line begins: below the text of a list item.
    indent: usize,
    /// The incomplete word, with its styles.
    word: String,
    word_width: usize,
    /// A run of the same mark (`*`, `` ` `` or `#`), whose meaning depends on what follows it.
    marks: String,
    /// The last character before the marks.
    last: char,
    /// Whether the line has had nothing but spaces.
    is_at_start: bool,
    style: Style,
}

/// The style of the text at the current position.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Style {
    heading: bool,
    bold: bool,
    code: bool,
    /// In a block of code between two fences. Its lines are not wrapped.
    fence: bool,
    /// In the line of a fence.
    fence_line: bool,
}

impl Renderer {
    pub(super) fn new(width: usize, is_styled: bool) -> Self {
        Self {
            width: width.max(1),
            is_styled,
            column: 0,
            spaces: 0,
            indent: 0,
            word: String::new(),
            word_width: 0,
            marks: String::new(),
            last: '\n',
            is_at_start: true,
            style: Style::default(),
        }
    }

    /// Returns the output for the next piece. The last word is held back until it is complete.
    pub(super) fn push(&mut self, piece: &str) -> String {
        let mut out = String::new();
        for character in piece.chars() {
            let is_mark = self.is_styled && matches!(character, '*' | '`' | '#');
            if !is_mark || !self.marks.ends_with(character) {
                self.resolve_marks(&mut out, character);
            }
            if is_mark {
                self.marks.push(character);
            } else {
                self.add(&mut out, character);
            }
        }
        out
    }

    /// Returns the output for the end of the text.
    pub(super) fn finish(&mut self) -> String {
        let mut out = String::new();
        self.resolve_marks(&mut out, '\n');
        self.end_word(&mut out);
        if self.style != Style::default() {
            out.push_str(PLAIN);
            self.style = Style::default();
        }
        out
    }

    /// Decides whether the marks before `next` are text or change the style.
    fn resolve_marks(&mut self, out: &mut String, next: char) {
        let marks = std::mem::take(&mut self.marks);
        let Some(mark) = marks.chars().next() else { return };
        if self.apply_marks(mark, marks.len(), next) {
            self.restyle();
            self.last = mark;
        } else {
            marks.chars().for_each(|mark| self.add(out, mark));
        }
    }

    /// Changes the style if `count` marks before `next` are Markdown. The marks of a fence are also
    /// written as text.
    fn apply_marks(&mut self, mark: char, count: usize, next: char) -> bool {
        let style = &mut self.style;
        match mark {
            '`' if count >= 3 && self.is_at_start => {
                (style.fence, style.fence_line) = (!style.fence, true);
                self.restyle();
                false
            }
            _ if style.fence => false,
            '#' if count <= 6 && self.is_at_start && next == ' ' => {
                style.heading = true;
                true
            }
            '`' if count == 1 && (style.code || next != '\n') => {
                style.code = !style.code;
                true
            }
            '*' if count == 2 && !style.code => {
                let beside = if style.bold { self.last } else { next };
                if beside.is_whitespace() {
                    return false;
                }
                style.bold = !style.bold;
                true
            }
            _ => false,
        }
    }

    /// Writes the codes of the present style into the word.
    fn restyle(&mut self) {
        let style = self.style;
        self.word.push_str(PLAIN);
        if style.fence_line {
            self.word.push_str(DIM);
        } else if style.fence || style.code {
            self.word.push_str(CODE);
        }
        if (style.bold || style.heading) && !style.fence {
            self.word.push_str(BOLD);
        }
    }

    fn add(&mut self, out: &mut String, character: char) {
        match character {
            '\n' => self.end_line(out),
            ' ' if !self.style.fence => {
                self.end_word(out);
                // The space after the marks of a heading belongs to them.
                if self.last != '#' || !self.style.heading {
                    self.spaces += 1;
                }
            }
            // Other control characters would move the cursor.
            character if character.is_control() && character != '\t' => {}
            character => {
                self.word_width += character.width().unwrap_or(4);
                self.word.push(character);
            }
        }
        self.last = character;
        self.is_at_start = character == '\n' || (self.is_at_start && character == ' ');
    }

    /// Writes the word, on the next line if it does not fit on this one.
    fn end_word(&mut self, out: &mut String) {
        if self.word.is_empty() {
            return;
        }
        let is_first = self.column == 0;
        let end = self.column + self.spaces + self.word_width;
        if end > self.width && self.column > self.indent && !self.style.fence {
            out.push('\n');
            self.column = self.indent;
            out.push_str(&" ".repeat(self.indent));
        } else {
            out.push_str(&" ".repeat(self.spaces));
            self.column += self.spaces;
        }
        out.push_str(&self.word);
        self.column += self.word_width;
        if is_first && is_list_mark(&self.word) && self.column + 1 < self.width / 2 {
            self.indent = self.column + 1;
        }
        self.word.clear();
        (self.spaces, self.word_width) = (0, 0);
    }

    fn end_line(&mut self, out: &mut String) {
        // Styles end with the line, so that a mark without its partner does not style the rest.
        let ended = Style { fence: self.style.fence, ..Style::default() };
        if self.style != ended {
            self.style = ended;
            self.restyle();
        }
        self.end_word(out);
        out.push('\n');
        (self.column, self.spaces, self.indent) = (0, 0, 0);
    }
}

/// Whether a line that begins with this word is an item of a list.
fn is_list_mark(word: &str) -> bool {
    let number = word.strip_suffix(['.', ')']);
    matches!(word, "-" | "*" | "+")
        || number.is_some_and(|digits| {
            (1..=3).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit())
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(width: usize, is_styled: bool, text: &str) -> String {
        let mut renderer = Renderer::new(width, is_styled);
        renderer.push(text) + &renderer.finish()
    }

    /// Goal: no word is broken at the margin, continued items of lists are indented, and lines
    /// that fit are as they were.
    #[test]
    fn words_are_not_broken() {
        for (width, text, expected) in [
            (10, "one two three four", "one two\nthree four"),
            (10, "one two\n\nthree", "one two\n\nthree"),
            (3, "a longword b", "a\nlongword\nb"),
            (12, "- one two three", "- one two\n  three"),
            (14, "  1. one two three", "  1. one two\n     three"),
            (6, "\u{4f60}\u{597d} \u{4f60}\u{597d}", "\u{4f60}\u{597d}\n\u{4f60}\u{597d}"),
            (80, "2 * 3 ** 4 # x `", "2 * 3 ** 4 # x `"),
            (80, "a\x1b[31mb\rc", "a[31mbc"),
        ] {
            assert_eq!(render(width, false, text), expected, "{text:?}");
        }
    }

    /// Goal: bold text, headings and code have styles instead of marks, and characters that only
    /// look like marks are kept.
    #[test]
    fn markdown_has_styles() {
        let plain = |text: &str| {
            [BOLD, CODE, DIM, PLAIN]
                .iter()
                .fold(text.to_owned(), |text, code| text.replace(code, ""))
        };
        for (text, expected, styles) in [
            ("a **bold word** b", "a bold word b", vec![BOLD]),
            ("`a ** b`", "a ** b", vec![CODE]),
            ("## Title\ntext", "Title\ntext", vec![BOLD]),
            ("2 * 3 ** 4 #5", "2 * 3 ** 4 #5", vec![]),
            (
                "```rust\nlet a = *b;  // **no**\n```\nend",
                "```rust\nlet a = *b;  // **no**\n```\nend",
                vec![DIM, CODE],
            ),
            ("**never closed\nnext", "never closed\nnext", vec![BOLD]),
            ("* item", "* item", vec![]),
        ] {
            let shown = render(80, true, text);
            assert_eq!(plain(&shown), expected, "{text:?}");
            for code in [BOLD, CODE, DIM] {
                assert_eq!(shown.contains(code), styles.contains(&code), "{text:?}: {shown:?}");
            }
            let last = shown.rfind('\x1b').map(|at| shown[at..].starts_with(PLAIN));
            assert_ne!(last, Some(false), "styles end with the text: {shown:?}");
        }
    }

    /// Goal: the output does not depend on how the text was cut into pieces.
    #[test]
    fn pieces_do_not_matter() {
        let text =
            "# A **b** `c`\n\n- one two three four `five six` **seven eight**\n```\nx  y\n```\n**z";
        let whole = render(20, true, text);
        for size in 1..8 {
            let mut renderer = Renderer::new(20, true);
            let characters: Vec<char> = text.chars().collect();
            let pieces = characters.chunks(size).map(|piece| piece.iter().collect::<String>());
            let shown: String = pieces.map(|piece| renderer.push(&piece)).collect();
            assert_eq!(shown + &renderer.finish(), whole, "pieces of {size}");
        }
    }
}
