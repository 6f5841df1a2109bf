//! Compiles the CUDA kernels of this crate to PTX, for the feature `cuda-core`.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The PTX is for this architecture (A100 and later); the driver compiles it for newer ones.
const ARCHITECTURE: &str = "compute_80";

fn main() {
    println!("cargo::rerun-if-changed=kernels");
    println!("cargo::rerun-if-env-changed=CUDA_HOME");
    println!("cargo::rerun-if-env-changed=NVCC");
    if std::env::var_os("CARGO_FEATURE_CUDA_CORE").is_none() {
        return;
    }
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it"));
    for entry in std::fs::read_dir("kernels").expect("a folder of this package") {
        let source = entry.expect("a file of this package").path();
        if source.extension().is_some_and(|extension| extension == "cu") {
            compile(&source, &out);
        }
    }
}

/// Compiles a file to PTX in the folder `out`.
fn compile(source: &Path, out: &Path) {
    let nvcc = nvcc();
    let mut command = Command::new(&nvcc);
    let ptx = out.join(source.with_extension("ptx").file_name().expect("a file"));
    command.args(["--ptx", "-O3", "-std=c++17", "-arch", ARCHITECTURE]).arg(source);
    match command.arg("-o").arg(ptx).status() {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("{command:?}: {status}"),
        Err(error) => panic!(
            "{}: {error}. The feature `cuda` needs the CUDA toolkit: set CUDA_HOME or NVCC, or add \
             nvcc to PATH",
            nvcc.display()
        ),
    }
}

/// The compiler: `$NVCC`, or that of `$CUDA_HOME`, or `nvcc` in the path.
fn nvcc() -> PathBuf {
    if let Some(nvcc) = std::env::var_os("NVCC") {
        return nvcc.into();
    }
    match std::env::var_os("CUDA_HOME").or_else(|| std::env::var_os("CUDA_PATH")) {
        Some(home) => Path::new(&home).join("bin/nvcc"),
        None => "nvcc".into(),
    }
}
