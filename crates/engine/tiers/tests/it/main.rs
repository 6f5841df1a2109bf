//! The tests of the tiers, in one program: each program that is linked takes seconds.

mod support {
    pub(crate) mod records;
}

mod checkpoints;
mod disk;
mod disk_events;
mod format;
mod images;
