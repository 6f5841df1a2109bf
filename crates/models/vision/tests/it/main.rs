//! The tests of the preparation of images, in one program: each program that is linked takes seconds.

mod support {
    pub(crate) mod fixture;
    pub(crate) mod png;
}

mod hostile;
mod models;
mod pictures;
mod processors;
