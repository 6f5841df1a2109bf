//! The tests of the KV events, in one program: each program that is linked takes seconds.

mod support {
    pub(crate) mod connection;
    pub(crate) mod subscriber;
}

mod events;
mod stalled;
mod storage;
