//! Tells the crate with which optimization level it is compiled. That is decided by the profile of
//! the program that uses it, and unoptimized kernels are dozens of times slower.

#![allow(clippy::print_stdout, reason = "build scripts talk to cargo on stdout")]

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let level = std::env::var("OPT_LEVEL").unwrap_or_default();
    println!("cargo::rustc-env=STOLON_KERNELS_OPT_LEVEL={level}");
}
