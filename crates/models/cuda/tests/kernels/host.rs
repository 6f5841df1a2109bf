//! Compiles and runs the programs that call kernels on the host.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

/// A program of this folder.
pub(super) struct Program {
    path: PathBuf,
    _folder: TempDir,
}

impl Program {
    /// Compiles `name` with the kernels that it includes.
    pub(super) fn compile(name: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("host");
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels").join(name);
        let mut command = Command::new(&compiler);
        command.args(["-std=c++17", "-O1", "-Wall", "-Wno-unknown-pragmas", "-Werror"]);
        command.args(["-ffp-contract=off", "-o"]);
        let output = command.arg(&path).arg(source).output();
        let output = output.unwrap_or_else(|error| panic!("`{compiler}`: {error}"));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Self { path, _folder: folder }
    }

    /// What the program writes for these arguments and this input.
    pub(super) fn run(&self, arguments: &[String], input: &[u8]) -> Vec<u8> {
        let mut child = Command::new(&self.path)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let mut stdin = child.stdin.take().expect("a pipe");
        stdin.write_all(input).expect("the program reads everything");
        drop(stdin);
        let output = child.wait_with_output().expect("the program ends");
        assert!(output.status.success(), "{arguments:?}: {}", output.status);
        output.stdout
    }
}
