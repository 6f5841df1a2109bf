//! Prompts as text, for servers whose tokenizer is not known.
//!
//! Each token id of a workload becomes a short English word after a space, which is one token in
//! the vocabularies of almost all models. The exact numbers of tokens are those that servers
//! report.

use std::sync::LazyLock;

/// Number of different words.
pub const WORD_COUNT: usize = 256;

static WORDS: LazyLock<Vec<&str>> = LazyLock::new(|| LIST.split(' ').collect());

const LIST: &str = "\
    the of and to in is was for on as with by he at from his it an are this be or had not that \
    which were their but has have one two first new all who been after other time when there more \
    she some they can year over into only would most its about then up used them many so see \
    between may part made these also state city during under such being out her where than name no \
    way well both through any while world if now later until work second people against three like \
    early before game known high national life use same since you house number group around end \
    day several found set back place home four area team left service line born small company law \
    family another long system local following general show because large public won music school \
    town war song film book make open play white black red green blue land water river road north \
    south east west air sea hill lake king lord court field light night power force point order \
    right good great best last next each own off did do does came went took gave put let run held \
    kept built led met lost sold told said saw sent spent full free low old young short hard soft \
    warm cold dark deep wide fast slow main major minor human social final total common body head \
    hand face eye foot arm heart mind voice word text page note list case fact form type kind sort \
    plan";

/// One word for each token id; ids with the same remainder by [`WORD_COUNT`] give the same word.
pub(super) fn text(tokens: &[u32]) -> String {
    let mut text = String::with_capacity(tokens.len() * 6);
    for &token in tokens {
        text.push(' ');
        text.push_str(WORDS[token as usize % WORD_COUNT]);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: words are distinct, so that prompts which differ in an id differ as text.
    #[test]
    fn words_are_distinct() {
        let mut words = WORDS.clone();
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), WORD_COUNT);
        assert_eq!(text(&[0, 1, 256]), " the of the");
    }
}
