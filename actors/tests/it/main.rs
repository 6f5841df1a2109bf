//! The tests of the actors, in one program: each program that is linked takes seconds.

mod support {
    pub(crate) mod harness;
}

mod accounting;
mod engine;
mod faults;
mod soak;
