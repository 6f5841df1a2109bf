//! The conversations of `stolon verify`: invented notes with facts, of which one is a secret word,
//! and questions about them. Everything is determined by a seed.
//!
//! The words and the forms of the sentences are those that the demo model was trained for, so that
//! its answers depend on the note, as those of larger models do.

use stolon_loadgen::http::Message;
use stolon_loadgen::rng::SeededRng;

/// No two things of a note have the same of these words.
const ADJECTIVES: [&str; 24] = [
    "amber", "azure", "violet", "scarlet", "crimson", "golden", "ivory", "russet", "emerald",
    "velvet", "marble", "mossy", "dusty", "gilded", "crooked", "narrow", "quiet", "sunny", "windy",
    "frosty", "polished", "speckled", "rusty", "iron",
];

/// Things with the beginning and the end of a sentence about them, and a question about it.
const FACTS: [(&[&str], &str, &str, &str); 4] = [
    (
        &["tent", "cabin", "boat", "kite", "lantern"],
        "costs",
        " crowns",
        "How much does the X cost?",
    ),
    (&["anchor", "bell", "statue", "chest"], "weighs", " pounds", "How heavy is the X?"),
    (&["tower", "stair", "ladder", "bridge"], "has", " steps", "How many steps does the X have?"),
    (&["hall", "barn", "chapel", "tavern"], "holds", " guests", "How many guests does the X hold?"),
];

/// The secret words: names that no model says by chance.
pub(super) const SECRETS: [&str; 48] = [
    "Thornwick",
    "Marrowby",
    "Pellham",
    "Fennimore",
    "Grimsel",
    "Harrowgate",
    "Kettleby",
    "Lindow",
    "Mirefold",
    "Nettlecombe",
    "Oakhaven",
    "Quillon",
    "Ravensby",
    "Saltmarsh",
    "Tarnmoor",
    "Umberley",
    "Vexford",
    "Windlesham",
    "Yarrowdale",
    "Ottilie",
    "Bramwell",
    "Cordelia",
    "Dorian",
    "Fergus",
    "Greta",
    "Horatio",
    "Imogen",
    "Kerstin",
    "Lionel",
    "Nestor",
    "Odette",
    "Percival",
    "Quentin",
    "Rosalind",
    "Tabitha",
    "Ulric",
    "Verity",
    "Wilfred",
    "Xenia",
    "Yorick",
    "Zelda",
    "Alaric",
    "Beatrix",
    "Elspeth",
    "Florian",
    "Gwendolyn",
    "Isolde",
    "Philippa",
];

/// Those that have a secret word as their name.
const CREATURES: [&str; 6] = ["owl", "goose", "pony", "parrot", "donkey", "goat"];

/// Sentences between the facts.
const FILLERS: [&str; 20] = [
    "Most visitors arrive on foot, and all of them arrive hungry.",
    "Please do not feed the pigeons, since they have become proud.",
    "We ask all visitors to speak softly after supper.",
    "The old rules were longer, but the mice ate half of them.",
    "Those who stay longer than a week are handed a broom.",
    "Please wipe your boots, for the floors are older than any of us.",
    "Nothing here is locked except the jam.",
    "Music is welcome in the yard, but not before breakfast.",
    "There was once a fire, and there was once a flood, and both were forgiven.",
    "Anyone who finds a mistake in these pages may correct it in pencil.",
    "The clocks do not agree, and we have stopped asking them to.",
    "Children may climb the trees, provided that they also climb down.",
    "No charge is made for advice, and none is made for silence.",
    "You are free to wander as you please, but please come back.",
    "Pilgrims and poets pay what they can.",
    "Sundays are for rest, or at least for resting from rest.",
    "Dogs sleep by the stove and their owners where they can.",
    "Everything in these pages has been tried at least once.",
    "Take only what you can carry, and carry only what is yours.",
    "Good guests leave early, and the best ones leave a note.",
];

/// A question whose answer is long, if the model understands it.
const LONG_QUESTION: &str = "Repeat the note from its beginning, word for word.";

/// A note and questions about it.
#[derive(Debug)]
pub(super) struct Note {
    text: String,
    /// The first is about the secret word, the last one has a long answer.
    questions: Vec<String>,
}

/// Writes notes that share no beginning with each other.
#[derive(Debug)]
pub(super) struct Writer {
    rng: SeededRng,
    /// Number of secret words that were used. When all were, they are used again.
    secrets_used: usize,
}

impl Note {
    /// A prompt: the note and the question of this number. After the last question, they repeat.
    pub(super) fn ask(&self, question: usize) -> Message {
        user(format!("{}\n\n{}", self.text, self.question(question)))
    }

    /// A later question about the note.
    pub(super) fn ask_again(&self, question: usize) -> Message {
        user(self.question(question).to_owned())
    }

    fn question(&self, index: usize) -> &str {
        &self.questions[index % self.questions.len()]
    }
}

fn user(text: String) -> Message {
    Message { role: "user", text }
}

impl Writer {
    /// Writes the notes that belong to a seed.
    pub(super) fn new(seed: u64) -> Self {
        Self { rng: SeededRng::new(seed), secrets_used: 0 }
    }

    /// The generator of everything that is random.
    pub(super) fn rng(&mut self) -> &mut SeededRng {
        &mut self.rng
    }

    /// A note of about this many words. It begins with a number that no other note has.
    pub(super) fn note(&mut self, words: usize) -> Note {
        let mut adjectives = ADJECTIVES;
        self.rng.shuffle(&mut adjectives);
        let [first, others @ ..] = adjectives;
        let (secret, question) = self.secret(first);
        let mut sentences = vec![secret];
        let mut questions = vec![question];
        for adjective in others.into_iter().take(words.div_ceil(40)) {
            let (nouns, stem, tail, question) = FACTS[self.rng.between(0, FACTS.len() - 1)];
            let thing = format!("{adjective} {}", self.pick(nouns));
            let number = self.rng.between(13, 249);
            sentences.push(format!("The {thing} {stem} {number}{tail}."));
            questions.push(question.replace('X', &thing));
        }
        questions.push(LONG_QUESTION.to_owned());
        let mut count: usize = sentences.iter().map(|sentence| words_of(sentence)).sum();
        while count < words {
            let filler = self.pick(&FILLERS);
            count += words_of(filler);
            sentences.push(filler.to_owned());
        }
        self.rng.shuffle(&mut sentences);
        let number = self.rng.between(10_000_000, 99_999_999);
        Note { text: format!("Note {number}. {}", sentences.join(" ")), questions }
    }

    /// `count` prompts that begin with the same note, and go on with a secret word of their own and
    /// a question: about it, or about the shared note.
    pub(super) fn branches(&mut self, words: usize, count: usize) -> Vec<Message> {
        let note = self.note(words);
        let branch = |index| {
            let (secret, question) = self.secret(ADJECTIVES[index % ADJECTIVES.len()]);
            let question = if index % 2 == 0 { &question } else { note.question(index) };
            user(format!("{}\n\n{secret} {question}", note.text))
        };
        (0..count).map(branch).collect()
    }

    /// A sentence with the next secret word, and a question about it.
    fn secret(&mut self, adjective: &str) -> (String, String) {
        let creature = format!("{adjective} {}", self.pick(&CREATURES));
        let word = SECRETS[self.secrets_used % SECRETS.len()];
        self.secrets_used += 1;
        (format!("The {creature} is called {word}."), format!("What is the {creature} called?"))
    }

    fn pick<'a>(&mut self, words: &[&'a str]) -> &'a str {
        words[self.rng.between(0, words.len() - 1)]
    }
}

fn words_of(sentence: &str) -> usize {
    sentence.split(' ').count()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a seed determines all prompts, and another one changes their beginning.
    #[test]
    fn the_seed_determines_the_prompts() {
        let prompts = |seed| {
            let mut writer = Writer::new(seed);
            let mut prompts = writer.branches(100, 4);
            prompts.extend((0..3).map(|question| writer.note(100).ask(question)));
            prompts
        };
        assert_eq!(prompts(5), prompts(5));
        for (one, other) in prompts(5).iter().zip(prompts(6)) {
            assert_ne!(one.text[..14], other.text[..14], "the numbers of the notes");
        }
    }

    /// Goal: a note has the length that was asked for, one secret word, and questions about things
    /// that it mentions once.
    #[test]
    fn notes_are_about_what_is_asked() {
        let mut writer = Writer::new(1);
        for (words, secret) in [50, 300, 1_200].into_iter().zip(SECRETS) {
            let note = writer.note(words);
            let count = words_of(&note.text);
            assert!((words..words + 60).contains(&count), "{count} words instead of {words}");
            let secrets: Vec<_> =
                SECRETS.iter().filter(|word| note.text.contains(**word)).collect();
            assert_eq!(secrets, [&secret]);
            assert!(note.text.contains(&format!(" is called {secret}.")));
            let (long, about_things) = note.questions.split_last().expect("questions");
            assert_eq!(long, LONG_QUESTION);
            for question in about_things {
                let known = |adjective: &&&str| question.contains(&format!(" {adjective} "));
                let adjective = ADJECTIVES.iter().find(known).expect("an adjective");
                let facts = note.text.matches(&format!("The {adjective} ")).count();
                assert_eq!(facts, 1, "{question} has one answer");
            }
        }
    }

    /// Goal: branches begin alike, and each has a secret word that no other one has. No secret word
    /// is a part of another one.
    #[test]
    fn branches_share_their_note() {
        let branches = Writer::new(2).branches(80, 30);
        let shared = branches[0].text.find("\n\n").expect("the end of the note");
        for (branch, secret) in branches.iter().zip(&SECRETS[1..]) {
            assert_eq!(branch.text[..shared], branches[0].text[..shared]);
            assert!(branch.text.contains(SECRETS[0]) && branch.text.contains(secret));
            let holders = branches.iter().filter(|branch| branch.text.contains(secret)).count();
            assert_eq!(holders, 1);
        }
        for secret in SECRETS {
            assert_eq!(SECRETS.iter().filter(|other| other.contains(secret)).count(), 1);
        }
    }
}
