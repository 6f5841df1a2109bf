//! [`StoredHistory`]: the history in a file, so that it survives a restart of the program.
//!
//! The file is next to the KV of the disk tier, and belongs to one model and tokenizer. Each answer
//! is a line: a checksum, and a [`Record`] as JSON of the answer, the request's digests and those of
//! its tokens that the answer before it, in the same file, does not have.
//!
//! 1. [`StoredHistory::open`] reads the file into the history. A line that is damaged, or that
//!    continues one that is not there, is left out: that answer is tokenized again. Then the file is
//!    written anew from the history, which is within its limit of memory.
//! 2. [`StoredHistory::add`] gives an answer to a thread, which appends it. If it does not keep up,
//!    answers are left out.
//! 3. A file of twice the limit is written anew, without what the history has forgotten.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Weak};

use serde::{Deserialize, Serialize};
use stolon_text::{Answer, ToolCall};

use super::exchange::{Answered, Exchange};
use super::outline::{Mark, Outline};
use super::{Digest, History, Known};

/// The beginning of the file, before the digest of the model.
const MAGIC: &str = "stolon-history 1 ";
/// Maximum number of answers that wait to be written.
const WAITING_MAX: usize = 256;
/// Maximum size of the file, as a multiple of the history's limit of memory.
const SIZE_RATIO: u64 = 2;
/// Smallest size in bytes at which the file is written anew.
const SIZE_MIN: u64 = 64 << 10;

/// The file of a history. See the module documentation.
#[derive(Debug)]
pub(crate) struct StoredHistory {
    jobs: SyncSender<Job>,
}

#[derive(Debug)]
enum Job {
    Add(Arc<Exchange>, Arc<Answered>),
    /// Removes everything from the file.
    Clear,
    /// Says when everything that was added before is written.
    Flush(Sender<()>),
}

/// An answer in the file.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    conversation: Hex,
    /// The digests of [`Outline`]: tenant, salt, adapter, tools, options.
    outline: [Hex; 5],
    has_images: bool,
    /// Number of messages that are those of the base.
    shared: usize,
    /// The other messages.
    messages: Vec<MarkRecord>,
    text_len: usize,
    text_digest: Hex,
    /// The request that it continues, by its conversation, and the answer to that, by its tokens.
    base: Option<(Hex, Hex)>,
    /// The tokens of the prompt after those of the base.
    tokens: Vec<u32>,
    answer: Vec<u32>,
    text: String,
    said: (String, String, Vec<(String, String)>),
}

#[derive(Debug, Serialize, Deserialize)]
struct MarkRecord(String, Hex, Option<Hex>, Hex, usize);

/// A digest as hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hex(Digest);

impl Serialize for Hex {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl<'de> Deserialize<'de> for Hex {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Hex, D::Error> {
        let hex = String::deserialize(deserializer)?;
        let hash = blake3::Hash::from_hex(hex).map_err(serde::de::Error::custom)?;
        Ok(Hex(*hash.as_bytes()))
    }
}

/// The digest of an answer's tokens.
fn digest_of_tokens(tokens: &[u32]) -> Digest {
    let mut hasher = blake3::Hasher::new();
    tokens.iter().for_each(|token| _ = hasher.update(&token.to_le_bytes()));
    *hasher.finalize().as_bytes()
}

impl StoredHistory {
    /// Reads the file at `path` into a history and starts the thread that writes it. `model` is the
    /// digest of everything that tokens depend on, and each token is below `vocab_size`.
    ///
    /// A file that is damaged, or that belongs to another model, is used as far as possible and
    /// written anew.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn open(
        path: PathBuf,
        history: &Arc<History>,
        model: Digest,
        vocab_size: usize,
    ) -> io::Result<StoredHistory> {
        read(&path, history, &model, vocab_size);
        let mut writer = Writer {
            path,
            model,
            history: Arc::downgrade(history),
            size_max: (history.limit as u64).saturating_mul(SIZE_RATIO).max(SIZE_MIN),
            file: None,
            size: 0,
            written: HashSet::new(),
        };
        writer.rewrite(&history.answers())?;
        let (jobs, receiver) = sync_channel(WAITING_MAX);
        let thread = std::thread::Builder::new().name("stolon-history".to_owned());
        thread.spawn(move || writer.run(&receiver))?;
        Ok(StoredHistory { jobs })
    }

    /// Adds an answer to the file, if not too many wait.
    pub(crate) fn add(&self, exchange: &Arc<Exchange>, answer: &Arc<Answered>) {
        let _ = self.jobs.try_send(Job::Add(Arc::clone(exchange), Arc::clone(answer)));
    }

    /// Removes everything from the file.
    pub(crate) fn clear(&self) {
        // Fails only if the thread has ended.
        let _ = self.jobs.send(Job::Clear);
        self.flush();
    }

    /// Waits until everything that was added before is written.
    pub(crate) fn flush(&self) {
        let (sender, receiver) = channel();
        if self.jobs.send(Job::Flush(sender)).is_ok() {
            // Fails only if the thread has ended.
            let _ = receiver.recv();
        }
    }
}

impl History {
    /// The request with this digest, if it is kept.
    fn kept(&self, conversation: &Digest) -> Option<Arc<Exchange>> {
        self.state().exchanges.get(conversation).map(|(_, exchange)| Arc::clone(exchange))
    }

    /// All answers with their requests, those first that were not used for the longest time.
    fn answers(&self) -> Vec<(Arc<Exchange>, Arc<Answered>)> {
        let state = self.state();
        let exchanges = state.order.values().filter_map(|digest| state.exchanges.get(digest));
        let exchanges: Vec<_> = exchanges.map(|(_, exchange)| Arc::clone(exchange)).collect();
        drop(state);
        let with_answers = |exchange: Arc<Exchange>| {
            let answers = exchange.answers().into_iter();
            answers.map(move |answer| (Arc::clone(&exchange), answer))
        };
        exchanges.into_iter().flat_map(with_answers).collect()
    }
}

/// Writes the file.
#[derive(Debug)]
struct Writer {
    path: PathBuf,
    model: Digest,
    history: Weak<History>,
    /// Size in bytes at which the file is written anew.
    size_max: u64,
    /// `None` after an error.
    file: Option<File>,
    /// Size of the file in bytes.
    size: u64,
    /// The answers in the file: the digests of their conversations and tokens.
    written: HashSet<(Digest, Digest)>,
}

impl Writer {
    fn run(mut self, jobs: &Receiver<Job>) {
        while let Ok(job) = jobs.recv() {
            let result = match job {
                Job::Add(exchange, answer) => self.add(&exchange, &answer),
                Job::Clear => self.rewrite(&[]),
                Job::Flush(done) => {
                    // Fails only if the caller has gone.
                    let _ = done.send(());
                    Ok(())
                }
            };
            if let Err(error) = result {
                let path = self.path.display();
                tracing::warn!(%path, %error, "the history is not stored any longer");
                self.file = None;
            }
        }
    }

    fn add(&mut self, exchange: &Arc<Exchange>, answer: &Arc<Answered>) -> io::Result<()> {
        let Some(mut file) = self.file.take() else { return Ok(()) };
        let line = self.line(exchange, answer)?;
        file.write_all(&line)?;
        self.size += line.len() as u64;
        self.file = Some(file);
        match self.history.upgrade() {
            Some(history) if self.size > self.size_max => self.rewrite(&history.answers()),
            _ => Ok(()),
        }
    }

    /// Replaces the file by one with these answers, the oldest first. If they are too large, the
    /// oldest are left out.
    fn rewrite(&mut self, answers: &[(Arc<Exchange>, Arc<Answered>)]) -> io::Result<()> {
        self.file = None;
        let mut kept = answers.len();
        let mut size = 0;
        while kept > 0 && size < self.size_max / 2 {
            kept -= 1;
            let (exchange, answer) = &answers[kept];
            size += exchange.stored_bytes() as u64 + answer.stored_bytes() as u64;
        }
        let temporary = self.path.with_extension("tmp");
        // It may be there after a crash.
        let _ = fs::remove_file(&temporary);
        let mut options = File::options();
        options.create_new(true).write(true);
        // It has the answers, as text.
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let mut file = BufWriter::new(options.open(&temporary)?);
        let header = format!("{MAGIC}{}\n", blake3::Hash::from_bytes(self.model).to_hex());
        file.write_all(header.as_bytes())?;
        self.size = header.len() as u64;
        self.written.clear();
        for (exchange, answer) in &answers[kept..] {
            let line = self.line(exchange, answer)?;
            self.size += line.len() as u64;
            file.write_all(&line)?;
        }
        let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
        fs::rename(&temporary, &self.path)?;
        self.file = Some(file);
        Ok(())
    }

    /// The line of an answer, which is in the file from now on.
    fn line(&mut self, exchange: &Exchange, answer: &Answered) -> io::Result<Vec<u8>> {
        let base = exchange.base().map(|(base, said)| {
            let key = (base.conversation, digest_of_tokens(&said.tokens));
            (base, key)
        });
        let base = base.filter(|(_, key)| self.written.contains(key));
        let outline = &exchange.outline;
        let shared = base.as_ref().map_or(0, |(base, _)| {
            let pairs = base.outline.messages.iter().zip(&outline.messages);
            pairs.take_while(|(theirs, own)| theirs == own).count()
        });
        let Answer { reasoning, text, calls } = answer.said.clone();
        let record = Record {
            conversation: Hex(exchange.conversation),
            outline: outline.digests().map(Hex),
            has_images: outline.has_images,
            shared,
            messages: outline.messages[shared..].iter().map(MarkRecord::new).collect(),
            text_len: exchange.text_len,
            text_digest: Hex(exchange.text_digest),
            tokens: match &base {
                Some(_) => exchange.own_tokens().to_vec(),
                None => exchange.prompt(),
            },
            base: base.map(|(_, (conversation, tokens))| (Hex(conversation), Hex(tokens))),
            answer: answer.tokens.to_vec(),
            text: answer.text.to_string(),
            said: (
                reasoning,
                text,
                calls.into_iter().map(|call| (call.name, call.arguments)).collect(),
            ),
        };
        let json = serde_json::to_string(&record)?;
        let checksum = blake3::keyed_hash(&self.model, json.as_bytes()).to_hex();
        self.written.insert((exchange.conversation, digest_of_tokens(&answer.tokens)));
        Ok(format!("{checksum} {json}\n").into_bytes())
    }
}

/// Reads the file into the history, as far as possible.
fn read(path: &Path, history: &History, model: &Digest, vocab_size: usize) {
    let shown = path.display();
    // Opening a pipe would wait for its other end.
    let is_file = fs::symlink_metadata(path).map(|metadata| metadata.is_file());
    let file = match is_file.and_then(|is_file| match is_file {
        true => File::open(path),
        false => Err(io::Error::other("expected a regular file")),
    }) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return,
        Err(error) => return tracing::warn!(path = %shown, %error, "the history cannot be read"),
    };
    let size_max = (history.limit as u64).saturating_mul(SIZE_RATIO).max(SIZE_MIN);
    // A file can be larger by its last line, and one that another program has made by anything.
    let mut lines = BufReader::new(file.take(2 * size_max)).split(b'\n');
    let header = format!("{MAGIC}{}", blake3::Hash::from_bytes(*model).to_hex());
    if lines.next().and_then(Result::ok).as_deref() != Some(header.as_bytes()) {
        tracing::info!(path = %shown, "the stored history is of another model or version");
        return;
    }
    let (mut used, mut left_out) = (0, 0);
    for line in lines {
        let record = line.ok().and_then(|line| parse(&line, model));
        match record.and_then(|record| restore(record, history, vocab_size)) {
            Some(()) => used += 1,
            None => left_out += 1,
        }
    }
    if left_out > 0 {
        tracing::warn!(path = %shown, used, left_out, "a part of the stored history is damaged");
    }
}

/// The record of a line; `None` if the line is damaged.
fn parse(line: &[u8], model: &Digest) -> Option<Record> {
    let (checksum, json) = line.split_at_checked(2 * blake3::OUT_LEN)?;
    let json = json.strip_prefix(b" ")?;
    let checksum = blake3::Hash::from_hex(checksum).ok()?;
    (blake3::keyed_hash(model, json) == checksum).then(|| serde_json::from_slice(json).ok())?
}

/// Adds an answer to the history. `None` if it continues one that is not there, or if it cannot be
/// of this model.
fn restore(record: Record, history: &History, vocab_size: usize) -> Option<()> {
    let is_token = |&token: &u32| (token as usize) < vocab_size;
    if !record.tokens.iter().chain(&record.answer).all(is_token) {
        return None;
    }
    let base = match record.base {
        None => None,
        Some((Hex(conversation), Hex(tokens))) => {
            let exchange = history.kept(&conversation)?;
            let answer = exchange.answer_with(|tokens_of| digest_of_tokens(tokens_of) == tokens)?;
            // The index of the message is of no use here.
            Some(Known { message: 0, exchange, answer })
        }
    };
    let shared = match &base {
        Some(base) => base.exchange.outline.messages.get(..record.shared)?.to_vec(),
        None if record.shared > 0 => return None,
        None => Vec::new(),
    };
    let messages = shared.into_iter().chain(record.messages.into_iter().map(MarkRecord::mark));
    let [tenant, salt, adapter, tools, options] = record.outline.map(|hex| hex.0);
    let (has_images, messages) = (record.has_images, messages.collect());
    let outline = Outline { tenant, salt, adapter, tools, options, has_images, messages };
    let Record { conversation, text_len, text_digest, tokens, answer, text, said, .. } = record;
    let text_of_prompt = (text_len, text_digest.0);
    let exchange = Exchange::stored(conversation.0, outline, text_of_prompt, base, tokens);
    // Nobody knows what the cache has evicted since.
    let exchange = history.remember(Arc::new(exchange), u64::MAX);
    let (reasoning, said_text, calls) = said;
    let call = |(name, arguments)| ToolCall { name, arguments };
    let calls = calls.into_iter().map(call).collect();
    exchange.answered(answer, text, Answer { reasoning, text: said_text, calls })?;
    Some(())
}

impl Outline {
    /// Everything but the messages: the digests of the tenant, the salt, the adapter, the tools and
    /// the options.
    fn digests(&self) -> [Digest; 5] {
        [self.tenant, self.salt, self.adapter, self.tools, self.options]
    }
}

impl MarkRecord {
    fn new(mark: &Mark) -> MarkRecord {
        let Mark { role, digest, said, reasoning, bytes } = mark;
        MarkRecord(role.to_string(), Hex(*digest), said.map(Hex), Hex(*reasoning), *bytes)
    }

    fn mark(self) -> Mark {
        let MarkRecord(role, digest, said, reasoning, bytes) = self;
        let said = said.map(|said| said.0);
        Mark { role: role.into(), digest: digest.0, said, reasoning: reasoning.0, bytes }
    }
}
