//! The tests of the preparation of images, in one program: each program that is linked takes seconds.

mod support {
    pub mod fixture;
    pub mod png;
}

mod hostile;
mod models;
mod pictures;
mod processors;
