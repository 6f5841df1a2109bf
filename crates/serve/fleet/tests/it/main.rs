//! The tests of the KV events, in one program: each program that is linked takes seconds.

mod support {
    pub mod connection;
    pub mod subscriber;
}

mod events;
mod stalled;
mod storage;
