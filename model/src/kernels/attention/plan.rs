//! How a call of attention is cut into tasks, parts and jobs.
//!
//! A task is some successive queries of a sequence and the heads that share one kv head. A part is a
//! run of whole spans of a task's context; where a task has several, every span leaves its state,
//! and a second pass merges them in order of position, just as a task of one part does on its way.
//! A job is what a thread takes at a time. So cuts and jobs, which depend on the number of
//! threads, change no bit.
//!
//! Few queries wait for memory, as in decoding. There a job is one span of several kv heads, whose
//! keys and values stand side by side: what the processor fetches beyond one head's is then
//! what the next part needs. Many queries wait for arithmetic: there a job is a task, or, where
//! there are too few of them to keep all threads busy, a part of one.

use std::ops::Range;

use super::super::lanes::LANES;
use super::state::State;
use super::{AttentionArgs, SPAN};

/// Query vectors (rows times heads of a group) a task holds, about: eight tiles of 16.
const TASK_QUERIES: usize = 128;
/// Query vectors up to which a task waits for memory rather than for arithmetic.
const FEW_QUERIES: usize = 16;
/// Jobs a thread should have to choose from, so that none is left alone with one at the end.
const JOBS_PER_THREAD: usize = 4;

/// Some queries of a sequence and one kv head.
#[derive(Clone, Debug)]
pub(super) struct Task {
    pub(super) sequence: usize,
    /// Row of `q` that holds the task's first query.
    pub(super) row: usize,
    /// That query's position.
    pub(super) position: usize,
    /// Rows.
    pub(super) count: usize,
    pub(super) kv_head: usize,
    /// First position that a query of it sees.
    pub(super) first: usize,
}

impl Task {
    /// One past the last position that a query of it sees.
    pub(super) fn end(&self) -> usize {
        self.position + self.count
    }

    /// Query vectors.
    pub(super) fn queries(&self, args: &AttentionArgs<'_>) -> usize {
        self.count * (args.heads / args.kv_heads)
    }

    /// The spans that its queries see.
    pub(super) fn spans(&self) -> Range<usize> {
        self.first / SPAN..self.end().div_ceil(SPAN)
    }
}

/// Successive spans of a task.
#[derive(Clone, Debug)]
pub(super) struct Part {
    /// Index of its task.
    pub(super) task: usize,
    pub(super) spans: Range<usize>,
    /// Where its spans leave their states, if it is not all of the task.
    pub(super) states: Option<usize>,
}

impl Part {
    /// Pairs of a row and a position, about.
    fn work(&self, task: &Task) -> usize {
        let from = task.first.max(self.spans.start * SPAN);
        (task.end().min(self.spans.end * SPAN) - from) * task.count
    }
}

/// What a call does.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) tasks: Vec<Task>,
    pub(super) parts: Vec<Part>,
    /// Ranges of `parts`, the long ones first.
    pub(super) jobs: Vec<Range<usize>>,
    /// Tasks of several parts, and where their spans' states begin.
    pub(super) cut: Vec<(usize, usize)>,
    /// The `f32`s that all those states take.
    pub(super) state_len: usize,
}

impl Plan {
    /// The plan for so many threads.
    pub(super) fn new(args: &AttentionArgs<'_>, threads: usize) -> Plan {
        let mut plan = Plan { tasks: tasks(args), ..Plan::default() };
        let wanted = if threads == 1 { 1 } else { JOBS_PER_THREAD * threads };
        let few = |strip: &[Task]| strip[0].queries(args) <= FEW_QUERIES;
        let jobs = |strip: &[Task]| if few(strip) { strip[0].spans().len() } else { strip.len() };
        let strips = plan.tasks.chunks(args.kv_heads);
        let share = wanted.div_ceil(strips.map(jobs).sum::<usize>().max(1));
        let heads = args.kv_heads.div_ceil(share);
        for first in (0..plan.tasks.len()).step_by(args.kv_heads) {
            let strip = first..first + args.kv_heads;
            let task = &plan.tasks[first];
            let spans = task.spans();
            let state_len = State::len(task.queries(args), args.head_dim.next_multiple_of(LANES));
            if few(&plan.tasks[strip.clone()]) {
                let tasks: Vec<(usize, Option<usize>)> =
                    strip.map(|task| (task, plan.place(task, 1, state_len))).collect();
                for (index, span) in spans.enumerate() {
                    for run in tasks.chunks(heads) {
                        let begin = plan.parts.len();
                        plan.parts.extend(run.iter().map(|&(task, place)| {
                            let states = place.map(|at| at + index * state_len);
                            Part { task, spans: span..span + 1, states }
                        }));
                        plan.jobs.push(begin..plan.parts.len());
                    }
                }
            } else {
                let step = spans.len().div_ceil(share);
                for task in strip {
                    let place = plan.place(task, step, state_len);
                    for from in spans.clone().step_by(step) {
                        let states = place.map(|at| at + (from - spans.start) * state_len);
                        let spans = from..spans.end.min(from + step);
                        plan.jobs.push(plan.parts.len()..plan.parts.len() + 1);
                        plan.parts.push(Part { task, spans, states });
                    }
                }
            }
        }
        let (tasks, parts) = (&plan.tasks, &plan.parts);
        plan.jobs.sort_by_key(|job| {
            let work = parts[job.clone()].iter().map(|part| part.work(&tasks[part.task]));
            std::cmp::Reverse(work.sum::<usize>())
        });
        plan
    }

    /// Room for the states of a task that is cut into parts of `step` spans; none if that is one part.
    fn place(&mut self, task: usize, step: usize, state_len: usize) -> Option<usize> {
        let spans = self.tasks[task].spans().len();
        if spans <= step {
            return None;
        }
        let at = self.state_len;
        self.cut.push((task, at));
        self.state_len += spans * state_len;
        Some(at)
    }
}

/// The tasks of a call; those that differ in the kv head alone stand together.
fn tasks(args: &AttentionArgs<'_>) -> Vec<Task> {
    let task_rows = (TASK_QUERIES * args.kv_heads / args.heads).max(1);
    let mut tasks = Vec::new();
    let mut row = 0;
    for (index, sequence) in args.sequences.iter().enumerate() {
        for from in (0..sequence.count).step_by(task_rows) {
            let position = sequence.start + from;
            for kv_head in 0..args.kv_heads {
                tasks.push(Task {
                    sequence: index,
                    row: row + from,
                    position,
                    count: task_rows.min(sequence.count - from),
                    kv_head,
                    first: args.first_seen(position),
                });
            }
        }
        row += sequence.count;
    }
    tasks
}

#[cfg(test)]
mod tests {
    use stolon_kvcache::BlockId;

    use super::super::{AttentionSequence, KvSlice};
    use super::*;
    use crate::kernels::Path;

    /// Goal: jobs cover every span of every task once, in order, each with a place of its own for its
    /// state where the task is cut.
    #[test]
    fn jobs_cover_every_span_once() {
        let sequence =
            |start, count| AttentionSequence { start, count, block_table: &[BlockId(0)] };
        let decode = [sequence(8191, 1), sequence(SPAN - 1, 1)];
        let mixed = [sequence(100, 1), sequence(0, 1088), sequence(3 * SPAN, 9)];
        for (sequences, window) in
            [(&decode[..], None), (&mixed[..], None), (&mixed[..], Some(600))]
        {
            let args = AttentionArgs {
                path: Path::PORTABLE,
                q: &[],
                sequences,
                keys: KvSlice::F32(&[]),
                values: KvSlice::F32(&[]),
                block_size: 16,
                heads: 12,
                kv_heads: 4,
                head_dim: 20,
                scale: 1.0,
                sliding_window: window,
            };
            for threads in [1, 2, 3, 64] {
                let plan = Plan::new(&args, threads);
                let mut in_jobs: Vec<usize> = plan.jobs.iter().flat_map(Clone::clone).collect();
                in_jobs.sort_unstable();
                assert!(in_jobs.into_iter().eq(0..plan.parts.len()));
                assert!(threads < 3 || plan.jobs.len() >= threads);
                let mut states = 0;
                for (index, task) in plan.tasks.iter().enumerate() {
                    let own = || plan.parts.iter().filter(|part| part.task == index);
                    assert!(own().flat_map(|part| part.spans.clone()).eq(task.spans()));
                    let place = plan.cut.iter().find(|(task, _)| *task == index);
                    assert_eq!(place.is_some(), own().count() > 1);
                    let state_len = State::len(task.queries(&args), 32);
                    for part in own() {
                        let before = (part.spans.start - task.spans().start) * state_len;
                        assert_eq!(part.states, place.map(|(_, at)| at + before));
                    }
                    states += place.map_or(0, |_| task.spans().len() * state_len);
                }
                assert_eq!(states, plan.state_len);
            }
        }
    }
}
