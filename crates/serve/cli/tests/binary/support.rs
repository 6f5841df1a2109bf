//! Runs the binary and talks to the server.

use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::ops::Deref;
use std::process::{Child, ChildStdout, Command, Output, Stdio};

use serde_json::Value;

#[path = "../../../http/tests/it/support/client.rs"]
#[allow(dead_code, reason = "shared with the tests of stolon-http")]
mod client;

use client::Client;
pub(crate) use client::{EMBEDDING, GUARD, SCRIPTED, TINY, begin, connect, head, prompt, status};

/// The binary with arguments, and without environment variables that change its behavior.
pub(crate) fn stolon(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stolon"));
    command.args(args).env_remove("RUST_LOG");
    // Settings, and variables of tests, which are not settings.
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    for name in names.filter(|name| name.starts_with("STOLON_") && name != "STOLON_CPU_PATH") {
        command.env_remove(name);
    }
    command.env_remove("OTEL_EXPORTER_OTLP_ENDPOINT");
    command.env_remove("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT");
    command
}

/// Runs the binary with this standard input until it exits.
pub(crate) fn run(args: &[&str], input: &str) -> Output {
    let mut child = stolon(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    stdin.write_all(input.as_bytes()).expect("the binary reads its input");
    drop(stdin);
    child.wait_with_output().expect("the binary ends")
}

/// Runs the binary, expects success, and returns its standard output.
pub(crate) fn succeed(args: &[&str]) -> String {
    succeed_with(args, "")
}

/// The same with a standard input.
pub(crate) fn succeed_with(args: &[&str], input: &str) -> String {
    let output = run(args, input);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "stolon {args:?}: {}: {errors}", output.status);
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Runs the binary, expects a failure with nothing on standard output, and returns its standard
/// error.
pub(crate) fn fail(args: &[&str]) -> String {
    let output = run(args, "");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "stolon {args:?} succeeded: {errors}");
    assert!(!errors.contains("panicked"), "stolon {args:?}: {errors}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "", "stolon {args:?}");
    errors
}

/// The JSON objects in a command's output, one per line.
pub(crate) fn json_lines(output: &str) -> Vec<Value> {
    output.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}

/// A running `stolon serve`, killed when dropped.
pub(crate) struct Server {
    child: Child,
    client: Client,
}

impl Deref for Server {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Server {
    /// Starts a server on a free port.
    pub(crate) fn start(model: &str, args: &[&str]) -> Self {
        Self::read(Self::spawn(stolon(&[]), model, args, Stdio::inherit()))
    }

    /// Starts a server with a limit of the shell, such as `-v 1024` for an address space of 1 MiB.
    pub(crate) fn start_limited(model: &str, args: &[&str], limit: &str) -> Self {
        let mut shell = Command::new("sh");
        let limit = format!("ulimit {limit} && exec \"$@\"");
        shell.args(["-c", &limit, "sh", env!("CARGO_BIN_EXE_stolon")]).env_remove("RUST_LOG");
        Self::read(Self::spawn(shell, model, args, Stdio::inherit()))
    }

    fn read((server, lines): (Self, Lines<BufReader<ChildStdout>>)) -> Self {
        // Later output is read so that it does not fill the pipe.
        std::thread::spawn(move || lines.for_each(drop));
        server
    }

    /// Starts a server, and closes its standard output and standard error when it listens.
    pub(crate) fn without_readers(model: &str, args: &[&str]) -> Self {
        let (mut server, lines) = Self::spawn(stolon(&[]), model, args, Stdio::piped());
        drop((lines, server.child.stderr.take()));
        server
    }

    /// Starts a server and stops it when it listens. Returns its standard error.
    pub(crate) fn errors_at_start(model: &str, args: &[&str]) -> String {
        let (server, _lines) = Self::spawn(stolon(&[]), model, args, Stdio::piped());
        server.stop_and_read_errors()
    }

    /// Starts a server whose standard error is kept for [`Server::stop_and_read_errors`].
    pub(crate) fn with_log(model: &str, args: &[&str]) -> Self {
        Self::read(Self::spawn(stolon(&[]), model, args, Stdio::piped()))
    }

    /// The same with environment variables.
    #[cfg(feature = "otel")]
    pub(crate) fn with_environment(model: &str, args: &[&str], variables: &[(&str, &str)]) -> Self {
        let mut command = stolon(&[]);
        command.envs(variables.iter().copied());
        Self::read(Self::spawn(command, model, args, Stdio::piped()))
    }

    pub(crate) fn stop_and_read_errors(mut self) -> String {
        self.terminate();
        let mut errors = String::new();
        let mut pipe = self.child.stderr.take().expect("a pipe");
        pipe.read_to_string(&mut errors).expect("UTF-8");
        errors
    }

    fn spawn(
        mut command: Command,
        model: &str,
        args: &[&str],
        errors: Stdio,
    ) -> (Self, Lines<BufReader<ChildStdout>>) {
        let pool: &[&str] =
            if args.contains(&"--num-blocks") { &[] } else { &["--num-blocks", "512"] };
        command.args(["serve", "--port", "0", "--model", model]).args(pool).args(args);
        Self::listening(command, errors)
    }

    /// Starts a server with this model and the rest of the arguments, without a size of the KV cache.
    pub(crate) fn with_models(model: &str, args: &[&str]) -> Self {
        let mut command = stolon(&["serve", "--port", "0", "--model", model]);
        command.args(args);
        Self::read(Self::listening(command, Stdio::inherit()))
    }

    /// Starts a server with the settings in a file.
    pub(crate) fn from_file(file: &str) -> Self {
        Self::from_file_with(file, &[])
    }

    /// Starts a server with the settings in a file, and these arguments.
    pub(crate) fn from_file_with(file: &str, args: &[&str]) -> Self {
        let mut command = stolon(&["serve", "--port", "0", "--config", file]);
        command.args(args);
        Self::read(Self::listening(command, Stdio::inherit()))
    }

    /// Runs a server until it listens.
    fn listening(mut command: Command, errors: Stdio) -> (Self, Lines<BufReader<ChildStdout>>) {
        let mut child =
            command.stdout(Stdio::piped()).stderr(errors).spawn().expect("the binary starts");
        let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        let base = loop {
            let line = lines.next().expect("an address before the end").expect("UTF-8");
            if let Some(address) = line.strip_prefix("listening on ") {
                break address.to_owned();
            }
        };
        (Self { child, client: Client::new(base) }, lines)
    }

    pub(crate) fn tiny() -> Self {
        Self::start(TINY, &[])
    }

    /// Resident memory of the process, in bytes.
    #[cfg(target_os = "linux")]
    pub(crate) fn resident_bytes(&self) -> u64 {
        let path = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(path).expect("Linux describes the process");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
        line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
    }

    /// Asks it to read its keys and certificates again.
    pub(crate) fn hang_up(&self) {
        self.signal("-HUP");
    }

    /// Ends the process at once.
    pub(crate) fn kill(mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it has ended");
    }

    /// Sends SIGTERM to the process.
    pub(crate) fn terminate(&self) {
        self.signal("-TERM");
    }

    /// Stops the process until `resume`: it answers nothing, and its connections stay open.
    pub(crate) fn suspend(&self) {
        self.signal("-STOP");
    }

    pub(crate) fn resume(&self) {
        self.signal("-CONT");
    }

    fn signal(&self, signal: &str) {
        let status = Command::new("kill").args([signal, &self.child.id().to_string()]).status();
        assert!(status.expect("kill runs").success());
    }

    /// Waits until the process exits.
    pub(crate) fn wait(mut self) -> std::process::ExitStatus {
        self.child.wait().expect("the process ends")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Fails if the process has exited already, which is fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
