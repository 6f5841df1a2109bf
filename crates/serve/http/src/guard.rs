//! Who may call, from where, how often and for how long.

pub(crate) mod access;
pub(crate) mod cors;
pub(crate) mod deadline;
pub(crate) mod hosts;
#[cfg(feature = "image-urls")]
pub(crate) mod image_hosts;
pub(crate) mod keys;
