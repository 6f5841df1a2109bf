//! Output to the terminal: dim and bold text, tables, and streamed text that is flushed piece by
//! piece. Styles are used only if standard output is a terminal and `NO_COLOR` is not set.

use std::fmt::Display;
use std::io::{self, IsTerminal, Write};

/// Whether to use styles on standard output.
pub(crate) fn is_styled() -> bool {
    io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none()
}

/// The text in a dim color, if styles are used.
pub(crate) fn dim(text: impl Display) -> String {
    if is_styled() { format!("\x1b[2m{text}\x1b[0m") } else { text.to_string() }
}

/// The text in bold, if styles are used.
pub(crate) fn bold(text: impl Display) -> String {
    if is_styled() { format!("\x1b[1m{text}\x1b[0m") } else { text.to_string() }
}

/// Writes a piece of a text and flushes it, so that it is visible while the next is computed.
pub(crate) fn stream(piece: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(piece.as_bytes())?;
    out.flush()
}

/// Writes a whole line.
pub(crate) fn line(text: impl Display) -> io::Result<()> {
    writeln!(io::stdout().lock(), "{text}")
}

/// Writes a line to standard output and ignores errors, for programs that continue without a
/// reader.
pub(crate) fn note(text: impl Display) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}

/// Writes a line to standard error and ignores errors.
pub(crate) fn warn(text: impl Display) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Rows as aligned columns: the first left-aligned, the others right-aligned.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max()
    };
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, &width))| {
            if column == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: columns are as wide as their widest cell, in characters rather than bytes.
    #[test]
    fn columns_are_aligned() {
        let row = |cells: &[&str]| cells.iter().map(|&cell| cell.to_owned()).collect();
        let rows: Vec<Vec<String>> =
            vec![row(&["", "p50"]), row(&["caf\u{e9}", "1.5"]), row(&["x", "100.25"])];
        assert_eq!(table(&rows), "         p50\ncaf\u{e9}     1.5\nx     100.25\n");
    }
}
