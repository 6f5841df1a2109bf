//! How a call of attention is cut into tasks and parts.
//!
//! A task is some successive queries of a sequence. A part, which is what a thread takes at a time, is
//! some heads and spans of a task's context. Where a task has several parts along its context, every
//! span leaves its state, and a second pass merges them in order of position, just as a task of one
//! part does on its way. So cuts, which depend on the number of threads, change no bit.
//!
//! Few queries wait for memory, as in decoding. There a part is one span of several kv heads, whose
//! keys and values stand side by side: what the processor fetches beyond one head's is then
//! what the next head needs. Many queries wait for arithmetic: there a part is one head of a task,
//! or, where those are too few to keep all threads busy, some spans of one.
//!
//! **Decodes that share a prefix** read it together: a part then has several readers, tasks of one row
//! each, and a tile of the cache that they have in the same blocks is loaded once for all of them (see
//! [`share`]). Each query's sums are made as if it were alone.

use std::ops::Range;

use super::super::lanes::LANES;
use super::share::{self, Reader};
use super::state::State;
use super::{AttentionArgs, SPAN};

/// Query vectors (rows times heads of a group) a part holds, about: eight tiles of 16.
pub(super) const PART_QUERIES: usize = 128;
/// Query vectors up to which a task waits for memory rather than for arithmetic.
const FEW_QUERIES: usize = 16;
/// Parts a thread should have to choose from, so that none is left alone with one at the end.
const PARTS_PER_THREAD: usize = 4;
/// What loading a position costs, in rows that are computed with it, about.
const LOAD_ROWS: usize = 6;

/// Some queries of a sequence.
#[derive(Clone, Debug)]
pub(super) struct Task {
    pub(super) sequence: usize,
    /// Row of `q` that holds the task's first query.
    pub(super) row: usize,
    /// That query's position.
    pub(super) position: usize,
    /// Rows.
    pub(super) count: usize,
    /// First position that a query of it sees.
    pub(super) first: usize,
    /// Where its spans leave their states, `[spans][kv_heads]`, if it has several parts along its
    /// context.
    pub(super) states: Option<usize>,
}

impl Task {
    /// One past the last position that a query of it sees.
    pub(super) fn end(&self) -> usize {
        self.position + self.count
    }

    /// Query vectors of one kv head.
    pub(super) fn queries(&self, args: &AttentionArgs<'_>) -> usize {
        self.count * (args.heads / args.kv_heads)
    }

    /// The spans that its queries see.
    pub(super) fn spans(&self) -> Range<usize> {
        self.first / SPAN..self.end().div_ceil(SPAN)
    }

    /// What its queries see of `positions`; empty where that is nothing.
    pub(super) fn seen(&self, positions: Range<usize>) -> Range<usize> {
        let from = self.first.clamp(positions.start, positions.end);
        from..self.end().clamp(from, positions.end)
    }

    fn few(&self, args: &AttentionArgs<'_>) -> bool {
        self.queries(args) <= FEW_QUERIES
    }
}

/// Successive spans and heads of a task, or of several that read a span together.
#[derive(Clone, Debug)]
pub(super) struct Part {
    /// Range of the plan's readers: of one row each where there are several.
    pub(super) readers: Range<usize>,
    pub(super) kv_heads: Range<usize>,
    /// One where there are several readers; all of them see some of it.
    pub(super) spans: Range<usize>,
}

/// What a call does.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) tasks: Vec<Task>,
    pub(super) readers: Vec<Reader>,
    /// The long ones first.
    pub(super) parts: Vec<Part>,
    /// Tasks of several parts along their context.
    pub(super) cut: Vec<usize>,
    /// The `f32`s that their states take.
    pub(super) state_len: usize,
}

impl Plan {
    /// The plan for so many threads and tiles of so many positions, a divisor of [`SPAN`].
    pub(super) fn new(args: &AttentionArgs<'_>, threads: usize, tile: usize) -> Plan {
        let tasks = tasks(args);
        let together = |task: &Task| task.count == 1 && task.few(args);
        let readers = share::readers(args, &tasks, tile, together);
        let mut plan = Plan { tasks, readers, ..Plan::default() };
        let runs = plan.runs(args);
        let wanted = if threads == 1 { 1 } else { PARTS_PER_THREAD * threads };
        let least = |run: &Part| if plan.task(run, 0).few(args) { 1 } else { args.kv_heads };
        let share = wanted.div_ceil(runs.iter().map(least).sum::<usize>().max(1));
        let step = |task: &Task| {
            if task.few(args) { 1 } else { task.spans().len().div_ceil(share) }
        };
        for (index, task) in plan.tasks.iter_mut().enumerate() {
            let spans = task.spans().len();
            if spans > step(task) {
                let width = args.head_dim.next_multiple_of(LANES);
                let state_len = State::len(task.queries(args), width);
                task.states = Some(plan.state_len);
                plan.state_len += spans * args.kv_heads * state_len;
                plan.cut.push(index);
            }
        }
        for run in &runs {
            let task = plan.task(run, 0);
            let (queries, step) = (task.queries(args), step(task));
            let few = task.few(args);
            let pieces = share.div_ceil(args.kv_heads);
            let most = (PART_QUERIES / queries).max(1);
            let readers = run.readers.len().div_ceil(pieces).min(most);
            let heads = args.kv_heads.div_ceil(share).min((most / readers).max(1));
            let heads = if few { heads } else { 1 };
            for readers in cut(&run.readers, readers) {
                for spans in cut(&run.spans, step) {
                    plan.parts.extend(cut(&run.kv_heads, heads).map(|kv_heads| Part {
                        readers: readers.clone(),
                        kv_heads,
                        spans: spans.clone(),
                    }));
                }
            }
        }
        let mut parts = std::mem::take(&mut plan.parts);
        parts.sort_by_cached_key(|part| std::cmp::Reverse(plan.work(part)));
        plan.parts = parts;
        plan
    }

    /// All there is to do in the largest pieces: single spans with all that share some of them, or whole
    /// tasks of many queries.
    fn runs(&self, args: &AttentionArgs<'_>) -> Vec<Part> {
        let mut runs = Vec::new();
        for (index, reader) in self.readers.iter().enumerate() {
            let task = &self.tasks[reader.task];
            let mut run = |readers, spans| {
                runs.push(Part { readers, kv_heads: 0..args.kv_heads, spans });
            };
            if !task.few(args) {
                run(index..index + 1, task.spans());
                continue;
            }
            // A span that it shares with the reader before it stands in that one's run.
            for span in task.spans().filter(|&span| !reader.shares_in(span)) {
                let later = &self.readers[index + 1..];
                let more = later.iter().take_while(|later| later.shares_in(span)).count();
                run(index..index + 1 + more, span..span + 1);
            }
        }
        runs
    }

    /// The task of a part's reader.
    #[inline]
    pub(super) fn task(&self, part: &Part, reader: usize) -> &Task {
        &self.tasks[self.readers[part.readers.start + reader].task]
    }

    /// What a part costs, about, in pairs of a row and a position of one head.
    fn work(&self, part: &Part) -> usize {
        let positions = part.spans.start * SPAN..part.spans.end * SPAN;
        let readers = self.readers[part.readers.clone()].iter().enumerate();
        let costs = readers.map(|(index, reader)| {
            let task = &self.tasks[reader.task];
            let seen = task.seen(positions.clone());
            let shared = if index > 0 { reader.shared.end.clamp(seen.start, seen.end) } else { 0 };
            seen.len() * task.count + (seen.end - shared.max(seen.start)) * LOAD_ROWS
        });
        costs.sum::<usize>() * part.kv_heads.len()
    }
}

/// A range in pieces of `step`, the last of them perhaps shorter.
fn cut(range: &Range<usize>, step: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let end = range.end;
    range.clone().step_by(step).map(move |from| from..end.min(from + step))
}

fn tasks(args: &AttentionArgs<'_>) -> Vec<Task> {
    let task_rows = (PART_QUERIES * args.kv_heads / args.heads).max(1);
    let mut tasks = Vec::new();
    let mut row = 0;
    for (index, sequence) in args.sequences.iter().enumerate() {
        for from in (0..sequence.count).step_by(task_rows) {
            let position = sequence.start + from;
            tasks.push(Task {
                sequence: index,
                row: row + from,
                position,
                count: task_rows.min(sequence.count - from),
                first: args.first_seen(position),
                states: None,
            });
        }
        row += sequence.count;
    }
    tasks
}

#[cfg(test)]
mod tests;
